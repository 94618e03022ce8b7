"""``bbb fit`` writes a model and a page when all is done, and nothing before."""

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

import bayesbackprop.tables
from bayesbackprop.tables import TableModel
from commands import bbb
from training_runs import ctrl_c_counts

pytestmark = pytest.mark.identities

QUICK = ("--epochs", 2, "--draws", 3)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [f"{number / 7},{'yes' if number % 3 else 'no'},{number * 1.5}" for number in range(120)]
    path = tmp_path / "houses.csv"
    path.write_text("\n".join(["size,garden,price", *rows]))
    return path


def test_it_says_what_it_found_and_writes_both_files(table: Path) -> None:
    result = bbb("fit", table, "--target", "price", *QUICK)
    assert result.exit_code == 0, result.output
    for said in ("garden  category   values: 2", "linear model", "in 90 % interval", "its uncertainty", "houses.html"):
        assert said in result.output.replace("Its", "its")
    assert sorted(os.listdir(table.parent)) == ["houses.bbb", "houses.csv", "houses.html"]
    assert TableModel.load(table.with_suffix(".bbb")).target == "price"
    assert "Predicting &#x27;price&#x27; in houses.csv" in table.with_suffix(".html").read_text()


def test_the_help_says_how_many_passes_are_made(table: Path) -> None:
    passes = {kind: estimator().max_iter for kind, estimator in bayesbackprop.tables._ESTIMATORS.items()}
    assert passes == {"regression": 100, "classification": 100, "counts": 500}
    assert "[default: (100, of counts 500)]" in " ".join(bbb("fit", "--help").stdout.replace("│", " ").split())


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_without_code(table: Path) -> None:
    shown = warnings.showwarning
    said = bbb("fit", table, "--target", "price", *QUICK).stderr
    assert said.startswith("Warning: The free energy may still be falling after 2 passes")
    assert said.count("\n") == 1
    assert warnings.showwarning is shown


def test_options_reach_the_model(table: Path, tmp_path: Path) -> None:
    output, page = tmp_path / "model", tmp_path / "page"
    options = ["--drop", "garden", "--held-out", 0.5, "--output", output, "--page", page, "--json", "--seed", 3]
    result = bbb("fit", table, "--target", "price", *QUICK, *options)
    found = json.loads(result.stdout)
    assert [column["kind"] for column in found["columns"]] == ["number", "dropped"]
    assert found["verdicts"]["Bayesian network"]["examples"] == 60
    assert found["verdicts"]["Bayesian network"]["draws"] == 3
    assert (found["model"], found["page"]) == (str(output), str(page))
    assert bbb("fit", table, "--target", "garden", "--kind", "counts").exit_code == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--output", "houses.csv"], "another file than the table"),
        (["--page", "houses.csv"], "another file than the table"),
        (["--page", "same", "--output", "same"], "and the other result"),
        (["--output", "nowhere/model"], "in a folder that exists"),
    ],
)
def test_places_are_checked_before_anything_is_done(
    options: list[str], says: str, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(table.parent)
    before = table.read_bytes()
    result = bbb("fit", table.name, "--target", "price", *options)
    assert says in str(result.exception)
    assert os.listdir(table.parent) == ["houses.csv"]
    assert table.read_bytes() == before


def test_only_a_page_of_its_own_is_replaced(table: Path) -> None:
    page = table.with_suffix(".html")
    page.write_text("<!doctype html><p>My houses")
    result = bbb("fit", table, "--target", "price", *QUICK)
    assert "a new file, or a page that bbb wrote: choose another place by --page" in str(result.exception)
    assert page.read_text() == "<!doctype html><p>My houses"
    assert not table.with_suffix(".bbb").exists()
    page.unlink()
    for _ in range(2):
        assert bbb("fit", table, "--target", "price", *QUICK).exit_code == 0


def test_ctrl_c_leaves_nothing(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bayesbackprop.tables.rivals

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(bayesbackprop.tables, "rivals", interrupted)
    with ctrl_c_counts():  # also where these tests run in the background
        assert bbb("fit", table, "--target", "price", *QUICK).exit_code != 0
    assert os.listdir(table.parent) == ["houses.csv"]
