"""``bbb search``: its studies, its mistakes, and a search whose process was killed."""

import json
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import digits
from bayesbackprop._cli import app
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import table1
from processes import run_apart
from searches import images, optuna, trials_in

pytestmark = pytest.mark.identities

COMMAND = ["search", "--method", "sgd", "--units", "8"]
NAME = f"ours-sgd-8-{digits.EPOCHS}epochs"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "mnist", images)
    monkeypatch.setattr(table1, "RECIPES", digits.RECIPES)


def succeed(*command: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, list(command))
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.usefixtures("small")
def test_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*COMMAND, "--trials", "2", "--runs", str(tmp_path)])
    best = json.loads(result.stdout)
    assert best.keys() == {"validation_error", "learning_rate", "trials"}
    again = f"bbb train --method sgd --units 8 --epochs {digits.EPOCHS} --seed 0 --folder {tmp_path / 'best'}"
    assert f"To train it: {again} --learning-rate {best['learning_rate']}\n" in result.stderr
    assert best["trials"] == len(trials_in(tmp_path, NAME)) == 2
    # Another search is another study, in the same file or in one that is named.
    storage = f"sqlite:///{tmp_path / 'other.db'}"
    for more in (["--epochs", "2"], ["--space", "paper"], ["--storage", storage]):
        assert succeed(*COMMAND, *more, "--trials", "1", "--runs", str(tmp_path))["trials"] == 1
    names = {"ours-sgd-8-2epochs", f"paper-sgd-8-{digits.EPOCHS}epochs", NAME}
    assert set(optuna.get_all_study_names(f"sqlite:///{tmp_path / 'search.db'}")) == names
    assert optuna.get_all_study_names(storage) == [NAME]


@pytest.mark.parametrize(("option", "value"), [("--space", "mine"), ("--method", "magic")])
def test_a_mistake_is_a_line(option: str, value: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["search", option, value, "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 2
    assert f"'{value}' is n" in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
def test_a_search_whose_process_was_killed_goes_on(tmp_path: Path) -> None:
    command = [*COMMAND, "--trials", "1", "--runs", str(tmp_path)]
    cases = {"search": (signal.SIGKILL, command)}
    run_apart(digits.fork_and_kill, cases, tmp_path, timeout=100)
    assert json.loads((tmp_path / "ends.json").read_text()) == {"search": -signal.SIGKILL}
    (killed,) = trials_in(tmp_path, NAME)
    assert killed.state.name == "RUNNING"
    assert list(killed.intermediate_values) == [1]
    # Its process is gone: the next search goes on with it.
    assert succeed(*command)["trials"] == 1
    first, last = trials_in(tmp_path, NAME)
    assert (first.state.name, last.state.name) == ("FAIL", "COMPLETE")
    assert first.params == last.params
    assert sorted(last.intermediate_values) == list(range(1, digits.EPOCHS + 1))
    assert list(tmp_path.glob("search/*")) == []


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_trial_of_another_machine_is_tried_again_when_it_has_been_silent(tmp_path: Path) -> None:
    command = [*COMMAND, "--trials", "1", "--runs", str(tmp_path)]
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'search.db'}", study_name=NAME)
    study.ask().set_user_attr("place", "elsewhere:/runs")
    database = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'search.db'}", heartbeat_interval=60)
    database.record_heartbeat(1)
    assert succeed(*command)["trials"] == 1
    assert [trial.state.name for trial in trials_in(tmp_path, NAME)] == ["RUNNING", "COMPLETE"]
    with sqlite3.connect(tmp_path / "search.db") as connection:
        connection.execute("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 day')")
    connection.close()
    assert succeed(*command)["trials"] == 2
    assert [trial.state.name for trial in trials_in(tmp_path, NAME)] == ["FAIL", "COMPLETE", "COMPLETE"]
