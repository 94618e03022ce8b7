"""Every path is measured, two ranks too where there can be any."""

import pytest
import torch.distributed as dist

from bayesbackprop_paper.bench import paths, report
from bayesbackprop_paper.bench.measuring import Config

pytestmark = pytest.mark.identities

OURS = [
    "Adam",
    "fused Adam",
    "SGD",
    "Normal",
    "Laplace",
    "own prior",
    "flipout",
    "local",
    "compiled",
    "4 draws",
]
RANKS = ["plain SGD", "bayesbackprop SGD", "bayesbackprop own averaging SGD"]


@pytest.fixture(scope="module")
def tables() -> dict[str, dict[str, report.Row]]:
    """The rows of each table by name."""
    config = Config(report.this_run("paths", "", threads=1, rounds=2, seed=0))
    rows = paths.paths(config, paths.QUICK)
    return {title: {row.name: row for row in group} for title, group in report.by_table(rows)}


def test_every_path_has_a_row_with_its_time_its_ratio_and_its_memory(tables: dict[str, dict[str, report.Row]]) -> None:
    rows = tables["5-4-4-3, batch 2"]
    for name in OURS:
        row = rows[f"bayesbackprop {name}"]
        assert row.against is not None
        assert row.milliseconds is not None
        assert row.ratio == pytest.approx(row.milliseconds / (rows[row.against].milliseconds or 0))
        assert row.memory is not None
        assert row.memory > 0
    against = {name: rows[f"bayesbackprop {name}"].against for name in ("Adam", "fused Adam", "SGD", "4 draws")}
    assert list(against.values()) == ["plain Adam", "plain fused Adam", "plain SGD", "4 single steps"]


def test_draws_hold_more_than_one_and_single_steps_as_much(tables: dict[str, dict[str, report.Row]]) -> None:
    memory = {name: row.memory or 0 for name, row in tables["5-4-4-3, batch 2"].items()}
    assert memory["4 single steps"] == memory["bayesbackprop Adam"] < memory["bayesbackprop 4 draws"]


def test_networks_of_other_shapes_have_tables(tables: dict[str, dict[str, report.Row]]) -> None:
    assert list(tables) == [
        "5-4-4-3, batch 2",
        "5-4-4-3, batch 2 on each of 2 ranks of one thread",
        "5-4-4-3, 3 draws for 1 image",
        "2 layers of 2 units, batch 2",
        "3 layers of 2 units, batch 2",
        "3-4-4-1, batch 2, one thread",
    ]
    deep = tables["3 layers of 2 units, batch 2"]
    bases = {name: row.against for name, row in deep.items() if row.against}
    assert bases == {
        "bayesbackprop": "plain",
        "bayesbackprop, gradients alone": "plain, gradients alone",
        "bayesbackprop, update alone": "plain, update alone",
    }


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
def test_two_ranks_take_steps(tables: dict[str, dict[str, report.Row]]) -> None:
    rows = tables["5-4-4-3, batch 2 on each of 2 ranks of one thread"]
    assert list(rows) == RANKS
    assert all(rows[name].ratio is not None for name in RANKS[1:])
    assert all(row.memory is not None for row in rows.values())
    # There is no second copy of the gradients.
    assert (rows[RANKS[2]].memory or 0) < (rows[RANKS[1]].memory or 0)


def test_ranks_that_cannot_be_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_processes(rank: object, calls: list[tuple[object, ...]]) -> list[object]:
        return [rank(*calls[0])]  # type: ignore[operator]

    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    monkeypatch.setattr(paths, "call_apart", without_processes)
    config = Config(report.this_run("paths", "", threads=1, rounds=2, seed=0))
    rows = paths.two_ranks(config, paths.QUICK)
    assert [row.name for row in rows] == RANKS
    assert {(row.note, row.milliseconds) for row in rows} == {("left out: this torch has no gloo", None)}
