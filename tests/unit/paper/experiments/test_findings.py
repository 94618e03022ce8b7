"""What is said of the results is computed from their files."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bayesbackprop.bandits import EpsilonGreedy, ThompsonSampling
from bayesbackprop_paper.experiments import bandit, regression, table1, table2
from bayesbackprop_paper.experiments.bandit import Point
from bayesbackprop_paper.experiments.findings import TITLES, Finding, findings
from repository import ROOT
from table1_rows import row

pytestmark = pytest.mark.identities


def found(folder: Path) -> dict[str, Finding]:
    return {each.name: each for each in findings(folder)}


def _plain(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in rows]


def test_nothing_is_said_of_nothing(tmp_path: Path) -> None:
    assert findings(tmp_path) == []


def test_every_result_is_found_in_order() -> None:
    there = [name for name in TITLES if (ROOT / "results" / f"{name}.csv").exists()]
    every = findings(ROOT / "results")
    assert [each.name for each in every] == there
    for each in every:
        assert each.sentence
        assert each.commands
        for grid in (*each.tables, *each.runs):
            assert {len(cells) for cells in grid.rows} == {len(grid.columns)}


def test_table1_by_hand(tmp_path: Path) -> None:
    mixture = row(method="bbb-mixture", test_error=1.26)  # the paper's is 1.36
    rows = [
        mixture,
        replace(mixture, seed=1, test_error=1.46),
        replace(mixture, units=800, test_error=1.44, test_nll=float("nan"), test_ece=float("nan")),  # 1.34
        replace(mixture, temperature=0.1, epochs=60, test_error=1.26),
        row(),
    ]
    table1.write(tmp_path / "table1.csv", rows)
    finding = found(tmp_path)["table1"]
    errors, scores = finding.tables
    assert errors.columns == ["", "2x400", "2x800", "2x1200"]
    assert _plain(errors.rows) == [
        [
            "Bayes by Backprop, scale mixture, temperature 0.1\n60 epochs",
            "1.26 (1)\npaper 1.36",
            "not run\npaper 1.34",
            "not run\npaper 1.32",
        ],
        [
            "Bayes by Backprop, scale mixture\n40 epochs",
            "1.36 ± 0.14 (2)\npaper 1.36",
            "1.44 (1)\npaper 1.34",
            "not run\npaper 1.32",
        ],
        ["SGD\n40 epochs", "1.83 (1)\npaper 1.83", "not run\npaper 1.84", "not run\npaper 1.88"],
    ]
    assert "(how many in brackets)" in errors.caption
    assert [cells[1:3] for cells in scores.rows] == [["0.0625\n0.50 %", "not run"]] * 3
    assert finding.sentence.startswith(
        "The error of Bayes by Backprop with the scale mixture, less the paper's, in points: "
        "\N{MINUS SIGN}0.10 at temperature 0.1 (60 epochs); +0.00 to +0.10 with the paper's cost (40 epochs). "
        "We trained for 40 to 60 epochs"
    )
    (runs,) = finding.runs
    assert runs.rows[0] == ["bbb-mixture-400-40epochs", "0, 1", "", "205.8, 205.8", ""]


def test_seeds_are_counted_once_where_all_cells_have_as_many(tmp_path: Path) -> None:
    table1.write(tmp_path / "table1.csv", [row(), row(units=800)])
    errors, _ = found(tmp_path)["table1"].tables
    assert _plain(errors.rows)[0][1] == "1.83\npaper 1.83"
    assert "over 1 seed." in errors.caption


def test_rows_that_have_no_scores_have_no_second_table(tmp_path: Path) -> None:
    table1.write(tmp_path / "table1.csv", [row(test_nll=float("nan"), test_ece=float("nan"))])
    assert len(found(tmp_path)["table1"].tables) == 1


def test_a_run_has_the_name_that_its_command_gave_it(tmp_path: Path) -> None:
    configs = table1.cells(["bbb-mixture-from-dropout"], [400], [3], [0.5])
    (config,) = configs
    method, epochs = config.row, config.epochs
    table1.write(tmp_path / "table1.csv", [row(method=method, temperature=0.5, seed=3, epochs=epochs, seconds=60.0)])
    made = {table1.name_of(config): {"command": "bbb this", "version": "0.2.0"}}
    (tmp_path / "table1.json").write_text(json.dumps(made))
    finding = found(tmp_path)["table1"]
    assert finding.runs[0].rows == [[table1.name_of(config).removesuffix("-seed3"), "3", "0.2.0", "1.0", ""]]
    assert finding.commands == ["bbb this"]


def test_table2_by_hand(tmp_path: Path) -> None:
    table2.write(
        tmp_path / "table2.csv",
        [
            table2.Row(1200, seed, removed, 9, error + seed / 10, size, time)
            for seed in (0, 2)
            for removed, error, size, time in ((0.0, 1.0, 9_000_000, 60.0), (0.98, 1.2, 300_000, 10.0))
        ],
    )
    finding = found(tmp_path)["table2"]
    (means,) = finding.tables
    assert means.rows == [["0 %", "1.10", "1.24", "9.00 MB", "60 µs"], ["98 %", "1.30", "1.39", "0.30 MB", "10 µs"]]
    assert finding.sentence == (
        "Without 98 % of its weights our 2x1200 network loses 0.20 points, the paper's 2x1200 0.15; the file shrinks "
        "to 1/30, the time for one image to 1/6.0. Unpruned, ours is at 1.10 % and the paper's at 1.24 %."
    )
    made = {"schedule": {"epochs": 7}, "temperature": 0.5, "pi": 0.5, "sigma1": 1, "sigma2": 0.1, "pruned": 0.98}
    (tmp_path / "table2.json").write_text(json.dumps({"1200 units": {**made, "command": "bbb this"}}))
    assert found(tmp_path)["table2"].sentence.endswith("1.24 %; ours was trained for 7 epochs at temperature 0.5.")


def test_figures_by_hand(tmp_path: Path) -> None:
    (tmp_path / "fig2.csv").write_text("epoch,bbb-mixture,sgd\n1,4.5,4.25\n2,nan,3.25\n")
    regression_rows = [
        regression.Row("bbb", "figure", 0, 1.25, 1.5, 0.5, 0.9),
    ]
    regression_rows += [replace(regression_rows[0], seed=1, off=1.5, coverage50=0.6)]
    with (tmp_path / "fig5.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(regression_rows[0].__dict__)
        writer.writerows(each.__dict__.values() for each in regression_rows)
    bandit.write(tmp_path / "fig6.csv", [Point("bbb", seed, 50_000, 100.0 + seed) for seed in (0, 2)])
    said = found(tmp_path)
    assert [cells[:2] for cells in said["fig2"].tables[0].rows] == [
        ["Bayes by Backprop\n1 epochs", "4.50"],
        ["SGD\n2 epochs", "3.25"],
    ]
    assert said["fig2"].sentence.startswith("After 1 epochs Bayes by Backprop is at 4.50 %; ")
    assert said["fig5"].tables[0].rows == [
        ["Bayes by Backprop\npoints as in the paper's figure", "1.25", "1.50", "55 %", "90 %"]
    ]
    assert said["fig6"].tables[0].rows == [["Bayes by Backprop", "101", "100 to 102", "5730"]]
    assert "regret of 101, the paper's of 5730. Ours is our default agent (temperature 0.03, a linear regression" in (
        said["fig6"].sentence
    )


def test_what_is_said_of_the_agents_of_figure_6_is_so() -> None:
    ours, _ = bandit.make(bandit.Job("wheel-0.5", ("bbb",), (0,), 1, 1))
    greedy, _ = bandit.make(bandit.Job("wheel-0.5", ("greedy",), (0,), 1, 1))
    assert isinstance(ours, ThompsonSampling)
    assert isinstance(greedy, EpsilonGreedy)
    assert (ours.temperature, ours.encoding, ours.memory) == (0.03, "output", 65536)
    assert ours.optimism is not None
    assert (greedy.encoding, greedy.memory, greedy.learning_rate) == ("input", 4096, 3e-4)
    for words in ("temperature 0.03", "memory of 65,536", "memory of 4,096", "rate of 0.0003", "no regression"):
        assert words in bandit.DIFFERENCES
