"""``bbb bandit`` and Figure 6 by command: which jobs are run, what is written and said."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bandit_jobs import points, serial
from bayesbackprop import _cli as cli
from bayesbackprop_paper import data
from bayesbackprop_paper.cli import bandit as bandit_commands
from bayesbackprop_paper.data import Mushrooms
from bayesbackprop_paper.experiments import bandit
from bayesbackprop_paper.experiments.bandit import Job, Point
from commands import bbb

pytestmark = pytest.mark.identities


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Commands run their jobs in this process; gives those that were run."""
    ran: list[Job] = []

    def run_all(jobs: Sequence[Job], *arguments: Any) -> list[Point]:
        ran.extend(jobs)
        return serial(jobs, *arguments)

    monkeypatch.setattr(bandit_commands, "run_all", run_all)
    monkeypatch.setattr(bandit, "run_all", run_all)
    return ran


def test_agents_in_an_environment_by_command(in_turn: list[Job], tmp_path: Path) -> None:
    command = ["bandit", "run", "wheel-0.5", "--agent", "uniform", "--agent", "linear", "--steps", 50]
    result = bbb(*command, "--runs", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    assert in_turn == [Job("wheel-0.5", (agent,), (0,), 50, 4) for agent in ("uniform", "linear")]
    found = json.loads(result.stdout)
    expected = bandit.means(serial(in_turn, tmp_path / "again", 1, lambda *_: None))
    assert found == {agent: {"50": pytest.approx(steps[50])} for agent, steps in expected.items()}
    assert sorted(path.name for path in (tmp_path / "bandit").iterdir()) == sorted(job.name for job in in_turn)
    assert f"{in_turn[0].name}: step 1, mean regret" in result.stderr
    # The same again takes no step; a table says the same, rounded.
    result = bbb(*command, "--runs", tmp_path)
    assert result.stderr.splitlines() == [f"{job.name}: 50 steps" for job in in_turn[:2]]
    for agent in ("uniform", "linear"):
        row = next(line for line in result.stdout.splitlines() if agent in line)
        assert row.split("│")[2:4] == [" 1     ", f" {found[agent]['50']:<6.0f} "]


def test_seeds_are_counted_from_the_first(in_turn: list[Job], tmp_path: Path) -> None:
    result = bbb(
        *("bandit", "run", "wheel-0.9", "--agent", "uniform", "--steps", 20, "--seeds", 3, "--seed", 5),
        *("--updates", 2, "--runs", tmp_path),
    )
    assert in_turn == [Job("wheel-0.9", ("uniform",), (5, 6, 7), 20, 2)]
    regrets = [point.regret for point in serial(in_turn, tmp_path / "bandit", 1, lambda *_: None)]
    tensor = torch.tensor(regrets)
    assert f"{float(tensor.mean()):.0f} ± {float(tensor.std()):.0f}" in result.stdout


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["nowhere"], "'environment' parameter of Job must be one of mushroom, adult, covertype, wheel-0.5"),
        (
            ["wheel-0.5", "--agent", "uniform", "--agent", "nobody"],
            "'agent' parameter of Job must be one of bbb, greedy",
        ),
    ],
)
def test_a_mistake_is_one_line(
    command: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bbb", "bandit", "run", *command, "--runs", str(tmp_path)])
    monkeypatch.delenv("BBB_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()
    assert stopped.value.code == 1
    assert out == ""
    assert err.startswith("Error: The ")
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_options_have_bounds() -> None:
    for option in ("--steps", "--updates", "--seeds", "--cores"):
        assert bbb("bandit", "run", "wheel-0.5", option, 0).exit_code == 2
    assert "Example:" in bbb("bandit", "run", "--help").stdout


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "mushroom", lambda: Mushrooms(torch.eye(4), torch.arange(4) > 1))


@pytest.mark.usefixtures("few")
def test_figure_6_by_command(in_turn: list[Job], tmp_path: Path) -> None:
    places = ("--runs", tmp_path / "runs", "--results", tmp_path / "results")
    result = bbb("reproduce", "fig6", "--seeds", 1, "--steps", 3, "--updates", 1, *places)
    assert result.exit_code == 0, result.output
    assert in_turn == [
        Job("mushroom", ("bbb",), (0,), 3, 1),
        Job("mushroom", ("greedy", "epsilon-1", "epsilon-5"), (0,), 3, 1),
    ]
    assert "cumulative regret after 3 steps" in result.stdout
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        f"fig6.{x}" for x in ("csv", "json", "png", "svg")
    }
    assert {path.name for path in (tmp_path / "runs" / "bandit").iterdir()} == {job.name for job in in_turn}


def test_a_quick_figure_6_is_kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Job] = []
    drawn: list[Any] = []
    monkeypatch.setattr(bandit, "run_all", lambda jobs, *_: asked.extend(jobs) or points())
    monkeypatch.setattr(bandit, "fig6", lambda *arguments: drawn.append(arguments[:2]) or "drawn")
    assert bbb("reproduce", "fig6", "--quick", "--runs", tmp_path / "runs").stdout == "drawn\n"
    assert {(job.steps, job.seeds) for job in asked} == {(500, (0,)), (500, (1,)), (500, (0, 1))}
    assert drawn == [(points(), tmp_path / "runs" / "quick")]
