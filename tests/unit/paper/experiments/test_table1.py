"""Table 1 holds what was run, nothing else."""

import json
import math
import os
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import digits
from bayesbackprop.callbacks import Callback
from bayesbackprop_paper.experiments import mnist, page, table1, table2
from bayesbackprop_paper.experiments.mnist import Config, Result
from bayesbackprop_paper.experiments.recipe import CHECKPOINT, METRICS
from bayesbackprop_paper.experiments.records import arithmetic
from table1_rows import COLUMNS, row

pytestmark = pytest.mark.identities


def test_cells_are_in_order_and_the_seeds_last() -> None:
    found = [
        (config.seed, config.method, config.temperature, config.units)
        for config in table1.cells(["sgd", "bbb-mixture"], [400, 800], range(2), [1.0, 0.1])
    ]
    one = [
        ("sgd", 1.0, 400),
        ("sgd", 1.0, 800),
        *(("bbb-mixture", temperature, units) for temperature in (1.0, 0.1) for units in (400, 800)),
    ]
    assert found == [(seed, *cell) for seed in range(2) for cell in one]


def test_cells_follow_the_recipes() -> None:
    for method, recipe in table1.RECIPES.items():
        start = None if recipe.start is None else table1.cells([recipe.start.row], [77], [5])[0]
        (config,) = table1.cells([method], [77], [5])
        assert config == replace(recipe, units=77, seed=5, schedule=replace(recipe.schedule, seed=5), start=start)
        assert config.row == method
        for epochs in (3, 96):
            (config,) = table1.cells([method], [77], [5], epochs=epochs)
            assert config.epochs == epochs
            assert config.schedule == replace(recipe.schedule, seed=5, epochs=config.schedule.epochs)
            if config.start is not None:
                assert config.start == table1.cells([config.start.row], [77], [5], epochs=config.start.epochs)[0]
    (config,) = table1.cells(["bbb-mixture-from-dropout"], [77], [5], epochs=12)
    assert config.schedule.epochs == 2  # of 12, as 16 of 96
    with pytest.raises(ValueError, match="'epochs' parameter of bbb-mixture-from-dropout must be at least 2"):
        table1.cells(["bbb-mixture-from-dropout"], [77], [5], epochs=1)
    assert set(table1.RECIPES) == {*mnist.METHODS, "bbb-mixture-from-dropout"}


def test_names_of_runs_differ() -> None:
    configs = [
        *table1.cells(["sgd", "bbb-mixture"], [4, 8], range(3), [1.0, 0.5, 0.25]),
        *table1.cells(["sgd", "bbb-mixture"], [4, 8], range(3), epochs=7),
    ]
    assert len({table1.name_of(config) for config in configs}) == len(configs)
    assert table1.name_of(configs[0]) == f"sgd-4-{table1.RECIPES['sgd'].schedule.epochs}epochs-seed0"


def test_tables_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    assert table1.read(path) == []
    rows = [row(units=1200), row(seed=1), row(), row(method="dropout", temperature=0.125)]
    table1.write(path, rows)
    lines = path.read_text().splitlines()
    assert lines[0] == COLUMNS
    assert lines[1:] == [
        "dropout,400,0.125,0,40,17,1.25,1.83,0.0625,0.5,12345.7,mean",
        "sgd,400,1,0,40,17,1.25,1.83,0.0625,0.5,12345.7,mean",
        "sgd,400,1,1,40,17,1.25,1.83,0.0625,0.5,12345.7,mean",
        "sgd,1200,1,0,40,17,1.25,1.83,0.0625,0.5,12345.7,mean",
    ]
    read = table1.read(path)
    assert read == sorted(
        (replace(each, seconds=12345.7) for each in rows), key=lambda each: (each.method, each.units, each.seed)
    )
    table1.write(path, [*read, row(test_error=9.0), row(epochs=41)])
    merged = table1.read(path)
    assert len(merged) == 5
    assert [each.test_error for each in merged] == [1.83, 9, 1.83, 1.83, 1.83]
    assert [each.epochs for each in merged] == [40, 40, 41, 40, 40]


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.csv"
    table1.write(path, [row()])
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        table1.write(path, [row(), row(seed=1)])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_summary_is_mean_and_spread_over_seeds() -> None:
    rows = [row(seed=seed, test_error=error) for seed, error in enumerate((1.0, 2.0, 4.0))]
    found = table1.summary([*rows, row(units=800), row(temperature=0.5), row(epochs=3, test_error=9.0)])
    assert list(found) == [("sgd", 0.5, 400, 40), ("sgd", 1.0, 400, 3), ("sgd", 1.0, 400, 40), ("sgd", 1.0, 800, 40)]
    assert found["sgd", 1.0, 400, 40] == (pytest.approx(7 / 3), pytest.approx(math.sqrt(7 / 3)), 3)
    error, spread, seeds = found["sgd", 1.0, 400, 3]
    assert (error, seeds) == (9, 1)
    assert math.isnan(spread)


def reproduce(folder: Path, configs: list[Config], command: str = "bbb test") -> tuple[list[Result], list[str]]:
    """The table, and the names of what was run for it."""
    ran: list[str] = []

    def progress(name: str) -> Callback:
        ran.append(name)
        return Callback()

    where = folder / "runs", folder / "results"
    return table1.reproduce(configs, digits.images(), *where, command, progress), ran


def test_differences_from_the_paper() -> None:
    rows = [row(test_error=1.80), row(seed=1, test_error=1.90), row(units=1200, test_error=2.0), row(units=9)]
    warm = row(method="bbb-mixture-from-dropout", units=800, epochs=58, test_error=1.24)
    said = table1.difference([*rows, warm, row(method="bbb-mixture", temperature=0.5, test_error=1.5)])
    assert "SGD (40 epochs) +0.02 at 2x400, +0.12 at 2x1200. Ours" in said
    assert "from dropout's weights (58 epochs) -0.10 at 2x800; " in said
    assert "scale mixture, temperature 0.5 (40 epochs) +0.14 at 2x400; " in said
    assert "in points: none of its sizes. " in table1.difference([row(units=9)])
    pruned = [
        table2.Row(1200, seed, fraction, 1, error + 0.02 * seed, size, 100 / (1 + fraction))
        for seed in (0, 1)
        for fraction, error, size in ((0.0, 1.30, 1000), (0.95, 1.33, 100), (0.98, 1.4, 40))
    ]
    assert table2.difference(pruned) == (
        "Points lost without 95 / 98 % of the weights: 0.03 / 0.10; in the paper 0.05 / 0.15. At 98%, of the whole "
        "network's: file 1/25.0, time for one image 1/2.0. Ours begin at 1.31 %, the paper's at 1.24 %."
    )


@pytest.mark.usefixtures("small")
def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    configs = table1.cells(["sgd", "bbb-mixture"], [8], range(2))
    rows, ran = reproduce(tmp_path, configs[:3], "bbb first")
    assert ran == [table1.name_of(config) for config in configs[:3]]
    assert len(rows) == 3
    for name in ran:
        assert not (tmp_path / "runs" / name / CHECKPOINT).exists()
    again, ran = reproduce(tmp_path, configs, "bbb second")
    assert ran == [table1.name_of(configs[3])]
    assert set(rows) < set(again)
    assert len(again) == 4
    # The results alone are lost: they come back without training.
    text = (tmp_path / "results" / "table1.csv").read_text()
    how = (tmp_path / "results" / "table1.json").read_text()
    (tmp_path / "results" / "table1.csv").unlink()
    (tmp_path / "results" / "table1.json").unlink()
    _, ran = reproduce(tmp_path, configs, "bbb third")
    assert ran == []
    assert (tmp_path / "results" / "table1.csv").read_text() == text
    assert (tmp_path / "results" / "table1.json").read_text() == how
    commands = {name: entry["command"] for name, entry in json.loads(how).items()}
    assert commands == {
        table1.name_of(config): "bbb second" if config is configs[3] else "bbb first" for config in configs
    }
    for config in configs:
        entry = json.loads(how)[table1.name_of(config)]
        assert {name: entry[name] for name in asdict(config)} == asdict(config)
        assert entry["version"]


@pytest.mark.usefixtures("small")
def test_what_a_run_starts_from_is_run_first_and_once(tmp_path: Path) -> None:
    dropout, warm = table1.cells(["dropout", "bbb-mixture-from-dropout"], [8], [0])
    rows, ran = reproduce(tmp_path, [warm])
    assert ran == [table1.name_of(dropout), table1.name_of(warm)]
    assert [each.method for each in rows] == ["bbb-mixture-from-dropout"]
    rows, ran = reproduce(tmp_path, [dropout, warm])
    assert ran == []
    assert [each.method for each in rows] == ["bbb-mixture-from-dropout", "dropout"]
    folder = tmp_path / "runs" / table1.name_of(warm)
    own = sum(json.loads(line)["seconds"] for line in (folder / METRICS).read_text().splitlines())
    assert rows[0].seconds == pytest.approx(rows[1].seconds + own, rel=1e-4)  # of all its epochs, as the table says


@pytest.mark.usefixtures("small")
def test_the_time_to_an_error_counts_that_of_the_start(tmp_path: Path) -> None:
    dropout, warm = table1.cells(["dropout", "bbb-mixture-from-dropout"], [8], [0])
    for config, records in ((dropout, [(9.0, 10.0), (1.3, 20.0)]), (warm, [(1.5, 1.0), (1.4, 2.0), (1.2, 4.0)])):
        folder = tmp_path / table1.name_of(config)
        folder.mkdir()
        lines = [json.dumps({"test_error": error, "seconds": seconds}) for error, seconds in records]
        (folder / METRICS).write_text("\n".join(lines) + "\n")
    assert [table1.seconds_to(error, dropout, tmp_path) for error in (9, 1.4, 1)] == [10, 30, None]
    assert [table1.seconds_to(error, warm, tmp_path) for error in (9, 1.4, 1.2, 1)] == [31, 33, 37, None]
    made = {"seconds_to_target": 66.0, "command": "bbb this"}
    (tmp_path / "table1.json").write_text(json.dumps({"a-seed0": made, "a-seed1": made, "b-seed0": {"command": "b"}}))
    says = page.write(tmp_path, tmp_path / "docs").read_text()
    assert "| run | seeds | version | minutes | minutes to 1.4 % |\n" in says
    assert "\n| a | 0, 1 |  |  | 1.1, 1.1 |\n| b | 0 |  |  |  |\n" in says
    made = {"a-seed0": "0.1.0", "a-seed1": "0.1.0", "a-seed2": "0.2.0", "b-seed0": "0.2.0"}
    entries = {name: {"command": "bbb this", "version": version} for name, version in made.items()}
    (tmp_path / "table1.json").write_text(json.dumps(entries))
    says = page.write(tmp_path, tmp_path / "docs").read_text()
    assert "\n| a | 0, 1, 2 | 0.1.0, 0.1.0, 0.2.0 |  |  |\n| b | 0 | 0.2.0 |  |  |\n" in says


@pytest.mark.usefixtures("small")
def test_results_from_before_an_option_was_there_still_count(tmp_path: Path) -> None:
    (config,) = table1.cells(["bbb-mixture"], [8], [0])
    reproduce(tmp_path, [config])
    path = tmp_path / "runs" / table1.name_of(config) / "result.json"
    written = json.loads(path.read_text())
    for name in ("estimator", "start"):
        del written["made"][name]
    path.write_text(json.dumps(written))
    assert reproduce(tmp_path, [config])[1] == []
    with pytest.raises(ValueError, match="another recipe"):
        reproduce(tmp_path, [replace(config, estimator="flipout")])


@pytest.mark.usefixtures("small")
def test_a_row_is_verified_by_training_it_again(tmp_path: Path) -> None:
    dropout, warm = table1.cells(["dropout", "bbb-mixture-from-dropout"], [8], [0])
    rows, _ = reproduce(tmp_path, [warm, *table1.cells(["sgd"], [8], [0])])
    where = digits.images(), tmp_path / "runs", tmp_path / "results"
    ran: list[str] = []
    verified: list[table1.Verified] = []

    def verify(name: str) -> dict[str, tuple[Any, Any]]:
        def progress(title: str) -> Callback:
            ran.append(title)
            return Callback()

        verified.append(table1.verify(name, *where, "bbb again", progress))
        return verified[-1].differing()

    assert verify(table1.name_of(warm)) == {}
    assert verified[-1].arithmetic == {}
    assert ran == [table1.name_of(dropout), table1.name_of(warm)]  # all of it was trained
    # A row that says something else is noticed, and so is one that was made by other settings.
    changed = [replace(row, test_error=row.test_error + 1, seconds=0.0) for row in rows]
    table1.write(tmp_path / "results" / "table1.csv", changed)
    path = tmp_path / "results" / "table1.json"
    made = json.loads(path.read_text())
    (name,) = {name for name in made if "sgd" in name}
    made[name] |= {"instructions": "abacus"}
    del made[name]["torch"]
    path.write_text(json.dumps(made))
    assert verify(name).keys() == {"test_error"}
    now = arithmetic()
    assert verified[-1].arithmetic == {
        "instructions": ("abacus", now["instructions"]),
        "torch": ("unknown", now["torch"]),
    }
    with pytest.raises(ValueError, match="'name' parameter of verify must be a row of"):
        verify("nothing")


def test_a_score_that_an_old_row_does_not_have_is_not_compared() -> None:
    old = row(test_nll=math.nan, test_ece=math.nan, seconds=1.0)
    assert table1.Verified(old, row(), {}).differing() == {}
    assert table1.Verified(old, row(test_error=1.84), {}).differing() == {"test_error": ("1.83", "1.84")}


@pytest.mark.usefixtures("small")
def test_the_table_is_there_after_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = table1.cells(["sgd"], [8], range(3))
    run = table1.run

    def stop_at_last(config: Config, *arguments: Any, **options: Any) -> Result:
        if config is configs[-1]:
            raise KeyboardInterrupt
        return run(config, *arguments, **options)

    monkeypatch.setattr(table1, "run", stop_at_last)
    with pytest.raises(KeyboardInterrupt):
        reproduce(tmp_path, configs)
    assert [each.seed for each in table1.read(tmp_path / "results" / "table1.csv")] == [0, 1]


@pytest.mark.usefixtures("small")
def test_results_of_another_recipe_are_refused(tmp_path: Path) -> None:
    (config,) = table1.cells(["sgd"], [8], [0])
    reproduce(tmp_path, [config])
    before = (tmp_path / "results" / "table1.csv").read_bytes()
    for other in (
        replace(config, schedule=replace(config.schedule, learning_rate=0.2)),
        replace(config, prediction_draws=9),
    ):
        with pytest.raises(ValueError, match="another recipe"):
            reproduce(tmp_path, [other])
    assert (tmp_path / "results" / "table1.csv").read_bytes() == before


@pytest.mark.usefixtures("small")
def test_test_errors_by_epoch_are_those_of_the_figures_only(tmp_path: Path) -> None:
    small, large = table1.cells(["sgd"], [8, 16], [0])
    reproduce(tmp_path, [small, large])
    for config in (small, large):
        records = digits.metrics(tmp_path / "runs" / table1.name_of(config))
        assert all(("test_error" in record) == (config is large) for record in records)


@pytest.mark.usefixtures("small")
def test_two_at_once_lose_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = table1.cells(["sgd"], [8], range(2))
    reproduce(tmp_path, configs)
    for name in ("table1.csv", "table1.json"):
        (tmp_path / "results" / name).unlink()
    both_have_read, read = threading.Barrier(2, timeout=0.5), table1.read

    def read_and_wait(path: Path) -> list[Result]:
        rows = read(path)
        with suppress(threading.BrokenBarrierError):
            both_have_read.wait()
        return rows

    monkeypatch.setattr(table1, "read", read_and_wait)
    threads = [threading.Thread(target=reproduce, args=(tmp_path, [config])) for config in configs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.seed for each in read(tmp_path / "results" / "table1.csv")] == [0, 1]
    how = json.loads((tmp_path / "results" / "table1.json").read_text())
    assert how.keys() == {table1.name_of(config) for config in configs}


@pytest.mark.usefixtures("small")
def test_two_at_once_train_a_run_once(tmp_path: Path) -> None:
    (config,) = table1.cells(["sgd"], [8], [0])
    ran: list[list[str]] = []
    threads = [threading.Thread(target=lambda: ran.append(reproduce(tmp_path, [config])[1])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ran) == [[], [table1.name_of(config)]]
