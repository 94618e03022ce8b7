"""What a newcomer meets first: the README's table is what was measured, and the command line explains itself."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from bayesbackprop import Bayesian, Categorical, save
from bayesbackprop._cli import Deferred, app, main
from bayesbackprop._networks import mlp
from bayesbackprop_paper.experiments import page

pytestmark = pytest.mark.identities

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results: written by bbb reproduce page -->\n", "<!-- end of results -->"


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


# --- the README ------------------------------------------------------------------------------------------------------


def test_the_table_of_the_readme_is_what_was_measured() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.split(BEGIN)[1].split(END)[0] == page.summary(ROOT / "results"), (
        "run bbb reproduce page --readme README.md"
    )


def test_the_results_page_is_what_was_measured(tmp_path: Path) -> None:
    written = page.write(ROOT / "results", tmp_path)
    assert written.read_text() == (ROOT / "docs" / "results.md").read_text(), "run bbb reproduce page"
    for picture in (tmp_path / "results").iterdir():
        assert picture.read_bytes() == (ROOT / "docs" / "results" / picture.name).read_bytes()


def test_the_readme_begins_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("make demo") < text.index("make test") < text.index("```python")
    rules = (ROOT / "Makefile").read_text()
    assert "\ndemo: environment" in rules
    assert "\ntest: " in rules


def test_the_summary_goes_between_its_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    for _ in range(2):
        page.write_summary(ROOT / "results", readme)
        assert readme.read_text() == f"before\n{BEGIN}{page.summary(ROOT / 'results')}{END}\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        page.write_summary(ROOT / "results", readme)
    assert readme.read_text() == "no marks"


def test_the_summary_of_nothing_has_no_rows(tmp_path: Path) -> None:
    assert page.summary(tmp_path).count("\n") == 2


def test_the_summary_by_hand(tmp_path: Path) -> None:
    header = "method,units,temperature,seed,epochs,selected_epoch,validation_error,test_error,seconds,prediction\n"
    rows = ["bbb-mixture,400,1,0,40,3,1.5,1.4", "bbb-mixture,400,1,1,40,3,1.5,1.6", "sgd,400,1,0,40,3,1.5,9.9"]
    rows += ["bbb-mixture,800,0.1,0,9,3,1.5,1.2"]
    (tmp_path / "table1.csv").write_text(header + "".join(f"{row},9,mean\n" for row in rows))
    (tmp_path / "table2.csv").write_text(
        "units,seed,fraction,weights_left,test_error,file_bytes,latency_us\n"
        + "".join(
            f"1200,{seed},{fraction},9,{error + seed / 10},{size},{time}\n"
            for seed in (0, 2)
            for fraction, error, size, time in ((0, 1.0, 900, 60), (0.95, 1.1, 90, 9), (0.98, 1.2, 30, 10))
        )
    )
    (tmp_path / "table2.json").write_text(json.dumps({"1200 units": {"command": "bbb pruning"}}))
    (tmp_path / "fig6.csv").write_text(
        "agent,seed,step,regret\n"
        + "".join(
            f"{agent},0,{step},{step}\n" for agent in ("bbb", "greedy", "epsilon-1", "epsilon-5") for step in (10, 2000)
        )
    )
    (tmp_path / "fig6.json").write_text(json.dumps({"command": "bbb this"}))
    (tmp_path / "bench").mkdir()
    step = {"units": 1200, "network": "a-b", "command": "bbb that"}
    names = {"sgd": 1.0, "bayesbackprop": 1.625, "BLiTZ": 7.04}
    entries = [{**step, "name": name, "ratio_sgd": ratio} for name, ratio in names.items()]
    (tmp_path / "bench" / "step.json").write_text(json.dumps([*entries, {**entries[2], "units": 400, "ratio_sgd": 99}]))
    assert page.summary(tmp_path).splitlines()[2:] == [
        "| a training step of a-b, in plain SGD steps | 1.62 | BLiTZ 7.0 | `bbb that` |",
        "| MNIST test error, 2x400/800/1200, the paper's cost, 40 epochs (2/0/0 seeds) | 1.50 / not run / not run % "
        "| paper 1.36 / 1.34 / 1.32 %, 600 epochs | `bbb reproduce table1 --method bbb-mixture` |",
        "| MNIST test error, 2x400/800/1200, complexity at temperature 0.1, 9 epochs (0/1/0 seeds) | not run / 1.20 / "
        "not run % | paper 1.36 / 1.34 / 1.32 %, 600 epochs "
        "| `bbb reproduce table1 --method bbb-mixture --temperature 0.1 --epochs 9` |",
        "| test error without 0 / 95 / 98 % of the weights of 2x1200 (2 seeds) | 1.10 / 1.20 / 1.30 %; at 98 % the "
        "file is 1/30 and a digit takes 1/6.0 | paper 1.24 / 1.29 / 1.39 % | `bbb pruning` |",
        "| mushroom bandit, regret after 2,000 steps (1 seed) | Bayes by Backprop 2000, greedy 2000, 1 % greedy 2000, "
        "5 % greedy 2000 | paper 2000, 2277, 2528, 2826 | `bbb this` |",
    ]


# --- the command line ------------------------------------------------------------------------------------------------


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
    without = {"data list", "data fetch", "data where", "bench report", "reproduce page", "report", "show"}
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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    # As the shell asks: which commands begin with "re"?
    asks = {"_BBB_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "bbb re", "COMP_WORDS": "bbb re"}
    asks |= {"COMP_CWORD": "1", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    command = [Path(sys.executable).with_name("bbb")]
    done = subprocess.run(command, env={**os.environ, **asks}, capture_output=True, text=True, check=False)
    assert "report" in done.stdout
    assert "reproduce" in done.stdout
    assert "train" not in done.stdout


def test_prune_says_it_to_programs(tmp_path: Path) -> None:
    model = Bayesian(mlp([4, 8, 3]), Categorical())
    save(model, tmp_path / "model.safetensors")
    command = ["prune", str(tmp_path / "model.safetensors"), "--fraction", "0.5", "--time", "2", "--json"]
    found = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).output)
    assert (found["weights"], found["weights_left"]) == (67, 33)
    for kind in ("bayesian", "sparse"):
        assert Path(found[f"{kind}_file"]).stat().st_size == found[f"{kind}_bytes"]
    assert found["dense_us"] > 0
    assert found["sparse_us"] > 0


@pytest.mark.parametrize("option", ["--out", "--sparse"])
def test_prune_does_not_write_over_what_it_reads(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save(Bayesian(mlp([4, 8, 3]), Categorical()), path)
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    both = ["--out", "new", "--sparse", "new"]
    for command, says in (
        ([option, path.name], "another file than the checkpoint"),
        (both, "another file than --out"),
        (["--time", "1"], "at least 2"),
    ):
        with pytest.raises(ValueError, match=says):
            CliRunner().invoke(app, ["prune", str(path), *command], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_the_data_sets_to_programs() -> None:
    found = json.loads(CliRunner().invoke(app, ["data", "list", "--json"], catch_exceptions=False).output)
    by_name = {row["name"]: row for row in found}
    assert by_name["mnist"]["bytes"] > 1e6
    assert isinstance(by_name["mnist"]["fetched"], bool)


def test_json_without_a_file_is_said(tmp_path: Path) -> None:
    save(Bayesian(mlp([784, 8, 10]), Categorical()), tmp_path / "model.safetensors")
    command = ["evaluate", str(tmp_path / "model.safetensors"), "--json", "--draws"]
    with pytest.raises(ValueError, match="name of a file"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_evaluate_draws_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import digits
    from bayesbackprop_paper.cli import evaluate

    monkeypatch.setitem(evaluate._LOADERS, "mnist", lambda folder=None: digits.images())
    torch.manual_seed(0)
    save(Bayesian(mlp([784, 8, 10]), Categorical(), sigma=0.5), tmp_path / "model.safetensors")
    found = []
    for seed in ("3", "3", "4"):
        out = tmp_path / "rows.json"
        command = ["evaluate", str(tmp_path / "model.safetensors"), "--draws", "2", "--seed", seed, "--json", str(out)]
        CliRunner().invoke(app, command, catch_exceptions=False)
        found.append(json.loads(out.read_text())[-1]["nll"])
    assert found[0] == found[1] != found[2]
