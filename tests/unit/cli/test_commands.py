"""The table of commands: its lines are those of the commands, and a command that cannot run says what to install."""

import signal
import sys
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from bayesbackprop._cli import PANELS, Deferred, _start, app, main
from training_runs import ctrl_c_counts

pytestmark = pytest.mark.identities

DEFERRED: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OF_THE_PAPER = [command.name for command in PANELS[-1].commands]


def test_each_panel_has_its_own_package() -> None:
    assert [panel.package for panel in PANELS] == ["bayesbackprop._cli", "bayesbackprop_paper.cli"]
    own = ["fit", "predict", "show", "prune", "playground", "serve"]
    assert [command.name for command in PANELS[0].commands] == own
    assert len(DEFERRED) == sum(len(panel.commands) for panel in PANELS)


@pytest.mark.parametrize("name", DEFERRED)
def test_the_help_is_the_first_line_of_the_command(name: str) -> None:
    command = DEFERRED[name]
    assert isinstance(command, Deferred)
    loaded = command.load()
    assert loaded.name == name
    assert loaded.help.splitlines()[0] == command.help


def test_an_option_reaches_the_command() -> None:
    result = CliRunner().invoke(app, ["show", "--nonsense"])
    assert result.exit_code == 2
    assert "--nonsense" in result.output


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_without_the_dependencies_a_command_says_what_it_needs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("matplotlib", "pooch"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["bbb", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert f" {name} " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bbb", name])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert f'bbb {name} needs matplotlib, pooch: pip install "bayesbackprop[paper]"' in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["fit", "predict"])
def test_tables_have_an_extra_of_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr(sys, "argv", ["bbb", name])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f'Error: bbb {name} needs pandas: pip install "bayesbackprop[tables]"\n'


def test_the_service_has_an_extra_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.setattr(sys, "argv", ["bbb", "serve"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == 'Error: bbb serve needs fastapi: pip install "bayesbackprop[serve]"\n'


@pytest.mark.parametrize(
    ("missing", "said"), [([], "bbb demo"), (["optuna"], "bbb fit TABLE"), (["optuna", "pandas"], "bbb show FILE")]
)
def test_the_help_suggests_what_is_installed(missing: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesbackprop._cli.find_spec", lambda name: None if name in missing else name)
    assert f"`{said}" in _start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_command_with_its_code(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Deferred, "load", lambda _: signal.raise_signal(number))
    monkeypatch.setattr(sys, "argv", ["bbb", "show"])
    with ctrl_c_counts(), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == "Stopped.\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
