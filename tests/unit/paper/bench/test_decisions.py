"""Decisions are timed while the agent learns."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bayesbackprop._cli import app
from bayesbackprop_paper.bench import decisions

pytestmark = pytest.mark.identities


def test_each_decision_is_timed_and_learnt_from(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    options = ["--calls", "8", "--updates", "1", "--deciding", "3", "--pause", "0.1", "--json", str(path)]
    result = CliRunner().invoke(app, ["bench", "decisions", *options])
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert written["run"]["command"] == "bbb bench decisions --calls 8 --updates 1 --deciding 3 --pause 0.1 --seed 0"
    rows = [decisions.Row(**row) for row in written["rows"]]
    assert [row.calls for row in rows[:3]] == [8, 2, 24]
    assert all(0 < row.median <= row.p99 <= row.worst for row in rows[:3])
    assert "3 threads, while it learns" in result.output


def test_quantiles_are_those_of_the_times() -> None:
    row = decisions._row("what", [n / 1000 for n in range(1, 102)])
    assert (row.median, row.p99, row.worst) == pytest.approx((51, 100, 101))
    assert row.per_second == pytest.approx(101 / (101 * 51 / 1000))
    assert decisions._row("what", [0.1, 0.1], 4.0).per_second == 0.5
