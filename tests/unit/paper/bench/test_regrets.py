"""What is said of regrets: statistics over the seeds, who is best, and what did not come to its end."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bayesbackprop_paper.bench import pictures, regrets, report
from bayesbackprop_paper.bench.bandits import Found
from bayesbackprop_paper.bench.regrets import Comparison, Row

pytestmark = pytest.mark.identities

RUN = report.this_run("bandit", "bbb bench bandit", threads=1, rounds=2, seed=3)
ROW = Row("clicks", "ThompsonSampling", "1", 50, [3, 4, 5], [50] * 3, [10.0, 30.0, 80.0], [1.0, 2.0, 3.0], [""] * 3)


def row(agent: str, *lost: float, **changed: Any) -> Row:
    return replace(ROW, agent=agent, regrets=list(lost), **changed)


def test_rows_are_made_of_the_runs_of_each_agent() -> None:
    found = [
        Found("clicks", agent, seed, 50, 50 - seed, 10.0 * seed, float(seed), "7", "no" if seed == 4 else "")
        for agent in ("Uniform", "mabwiser LinUCB, tuned")
        for seed in (4, 3)
    ]
    found += [
        Found("clicks", "Uniform", 5, 60, 60, 1.0, 1.0, "7"),
        Found("wheel-0.5", "Uniform", 5, 50, 50, 1.0, 1.0, "7"),
    ]
    rows = regrets.rows_of(found, ["clicks"], ["mabwiser LinUCB, tuned", "Uniform", "LinearThompson"], 50)
    shared: Any = ("7", 50, [3, 4], [47, 46], [30.0, 40.0], [3.0, 4.0], ["", "no"])
    assert rows == [
        Row("clicks", "mabwiser LinUCB, tuned", *shared, "alpha=0.25", True),
        Row("clicks", "Uniform", *shared),
    ]
    assert regrets.versions(rows) == {"mabwiser": "7", "bayesbackprop": "7"}


def test_statistics_by_hand() -> None:
    assert ROW.mean == 40.0
    assert ROW.standard_error == pytest.approx(math.sqrt((900 + 100 + 1600) / 2 / 3))
    assert math.isnan(row("Uniform", 3.0).standard_error)
    text = regrets.section(Comparison(RUN, [ROW]), [])
    assert "| ThompsonSampling | 40 | 21 | 30 | 80 | 3 | 2.00 |  |" in text


def test_the_best_is_of_those_that_took_all_steps() -> None:
    slow = row("mabwiser LinTS", 1.0, 1.0, 1.0, done=[50, 20, 50])
    rows = [ROW, slow, row("Uniform", 38.5, 38.5, 38.5), row("LinearThompson", 45.0, 45.0, 45.0)]
    best = regrets.best_of(rows)
    assert best == rows[2]
    assert regrets.within(ROW, rows[2])
    assert not regrets.within(rows[3], rows[2])
    assert not regrets.within(slow, rows[2])
    assert regrets.best_of([slow]) is None
    lucky = row("Uniform", -10.0, -10.0, -10.0)
    assert not regrets.within(row("x", -9.9), lucky)
    assert regrets.within(lucky, lucky)


def test_what_did_not_come_to_its_end_is_said_with_what_it_reached() -> None:
    slow = row("mabwiser LinTS", 5.0, 6.0, 7.0, done=[50, 20, 20], seconds=[3.0, 9.0, 8.0])
    assert slow.note == "2 of 3 stopped after 8 s; on average 30 steps"
    failed = replace(slow, errors=["", "ValueError: no", "ValueError: no"], options="alpha=0.1")
    assert failed.note == "`alpha=0.1`; 2 of 3 ValueError: no; on average 30 steps"
    text = regrets.section(Comparison(RUN, [slow]), [])
    assert "| mabwiser LinTS | 6 | 1 | 6 | 7 | 3 | 6.67 | 2 of 3 stopped after 8 s; on average 30 steps |" in text
    assert "| clicks | not run | none took all steps |  |  | none took all steps |  |  |" in text
    assert "\n\nThompsonSampling was not run.\n\n" in text


COMPARISON = Comparison(
    RUN,
    [
        ROW,
        row("Uniform", 39.0, 39.0, 39.0),
        row("mabwiser LinUCB, tuned", 20.0, 20.0, 20.0, options="alpha=0.1", tuned=True),
        replace(ROW, environment="items"),
        row("Uniform", 90.0, 90.0, 90.0, environment="items"),
    ],
)


def test_the_page_says_who_is_best_of_all_and_with_defaults() -> None:
    text = regrets.section(COMPARISON, [report.Picture("dots", "page/x.png")])
    assert "| clicks | 40 | mabwiser LinUCB, tuned | 20 | 2.00 | Uniform | 39 | 1.03 ✓ |" in text
    assert "| items | 40 | ThompsonSampling | 40 | 1.00 ✓ | ThompsonSampling | 40 | 1.00 ✓ |" in text
    assert "(✓) in 1 of 2 environments; among agents with their defaults, in 2." in text
    assert "### clicks, 50 steps\n" in text
    assert "![dots](page/x.png)" in text
    assert "`bbb bench bandit`" in text


def test_a_comparison_survives_its_file_and_other_files_are_none(tmp_path: Path) -> None:
    path = tmp_path / "bandits.json"
    regrets.write_json(COMPARISON, path)
    assert regrets.read_json(path) == COMPARISON
    for text in ("", "[]", "{}", "[1]", '{"run": {}, "rows": []}'):
        path.write_text(text)
        assert regrets.read_json(path) is None


def test_a_picture_has_a_dot_for_each_seed_and_a_line_for_each_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    real = pictures.finish
    monkeypatch.setattr(pictures, "finish", lambda figure, *a, **kw: kept.append(figure) or real(figure, *a, **kw))
    picture = pictures.dots(COMPARISON, tmp_path / "page", "bandits")
    assert picture.file == "page/bandits.png"
    assert (tmp_path / picture.file).read_bytes().startswith(b"\x89PNG")
    left, right = kept[0].axes
    assert [left.get_title(loc="left"), right.get_title(loc="left")] == ["clicks", "items"]
    assert [label.get_text() for label in left.get_yticklabels()] == [
        "ThompsonSampling",
        "Uniform",
        "mabwiser LinUCB, tuned",
    ]
    dots = [collection.get_offsets().tolist() for collection in left.collections if len(collection.get_offsets())]
    assert dots == [[[lost, place] for lost in each.regrets] for place, each in enumerate(COMPARISON.rows[:3])]
    assert [line.get_xdata()[0] for line in left.lines] == [40.0, 39.0, 20.0]
    assert left.get_xscale() == "log"
