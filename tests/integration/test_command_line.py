"""The command line explains itself: help, examples, completion, and one line for a mistake."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bayesbackprop._cli import Deferred, app, main

pytestmark = pytest.mark.identities


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, by the words that call it."""
    for name, deferred in group.commands.items():
        command = deferred.load() if isinstance(deferred, Deferred) else deferred
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


EVERY = dict(commands(typer.main.get_command(app)))


def help_of(*words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_help_fits_one_screen() -> None:
    lines = help_of().splitlines()
    assert len(lines) <= 34
    assert max(map(len, lines)) <= 80
    for words in EVERY:
        assert f" {words[0]} " in help_of()


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_has_an_example_that_can_be_parsed(words: tuple[str, ...]) -> None:
    text = " ".join(help_of(*words).replace("│", " ").split())
    assert f"Example: bbb {' '.join(words)}" in text
    example = (EVERY[words].help or "").split("Example: `")[1].split("`")[0]
    options = {name for option in EVERY[words].params for name in option.opts}
    for word in example.split()[1:]:
        assert not word.startswith("--") or word in options


def test_what_is_random_has_a_seed() -> None:
    # Those that compute nothing random, or read what others wrote.
    without = {"data list", "data fetch", "data where", "bench report", "reproduce page", "report", "show", "predict"}
    without |= {"serve export", "playground"}  # whose page has a button for another seed
    without |= {
        "truth uci",
        "truth page",
        "truth picture",
    }  # whose seeds are its splits; a page; one fit of each method
    for words, command in EVERY.items():
        names = {name for option in command.params for name in option.opts}
        assert bool(names & {"--seed", "--seeds"}) != (" ".join(words) in without), words


@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["train", "--units", "0"], ["prune", "nowhere"], ["evaluate", "nowhere"], ["bandit", "run", "moon"]],
)
def test_a_mistake_is_one_line_without_a_traceback(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bbb", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (0, None)
    said = capsys.readouterr().err
    assert said.startswith("Error: ")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_traceback_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BBB_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["bbb", "prune", "nowhere"])
    with pytest.raises((OSError, ValueError)):
        main()


def asks(shell: str) -> dict[str, str]:
    """As the shell asks: which commands begin with "re"?"""
    variables = {"_BBB_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "bbb re", "COMP_WORDS": "bbb re"}
    return variables | {"COMP_CWORD": "1", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in asks(shell).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        typer.main.get_command(app).main([], "bbb")
    said = capsys.readouterr().out
    assert "report" in said
    assert "reproduce" in said
    assert "train" not in said


def test_completion_by_the_installed_command() -> None:
    command = [Path(sys.executable).with_name("bbb")]
    done = subprocess.run(command, env={**os.environ, **asks("bash")}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["report", "reproduce"]
