"""``bbb reproduce``: tables and figures by command, of networks that take no time."""

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import digits
from bayesbackprop._cli import app, main
from bayesbackprop.pruning import snr
from bayesbackprop_paper.experiments import figures, regression, table1, table2
from bayesbackprop_paper.experiments.recipe import CHECKPOINT, METRICS
from bayesbackprop_paper.experiments.regression import Config, Curve
from commands import bbb
from table1_rows import COLUMNS, row

pytestmark = pytest.mark.identities


# --- Figure 5 --------------------------------------------------------------------------------------------------------


def curve(config: Config) -> Curve:
    levels = torch.linspace(-1, 1, 5)[:, None].expand(5, len(regression.GRID))
    return Curve(levels.double().numpy() * (1 + config.seed), levels[:1].double().numpy(), 0.5, 0.9)


def test_figure_5_by_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fitted: list[Config] = []
    monkeypatch.setattr(regression, "fit", lambda config: fitted.append(config) or curve(config))
    result = bbb("reproduce", "fig5", "--seeds", 2, "--steps", 7, "--variant", "formula", "--results", tmp_path)
    assert result.exit_code == 0, result.output
    assert fitted == [Config(method, "formula", seed=seed, steps=7) for seed in (0, 1) for method in regression.METHODS]
    names = {"fig5-curves.json", *(f"fig5.{x}" for x in ("csv", "json", "png", "svg"))}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "Bayes by Backprop, formula, 2 seeds" in result.stdout
    assert isinstance(bbb("reproduce", "fig5", "--variant", "neither").exception, ValueError)


def test_a_quick_figure_5_is_kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(regression, "fit", curve)
    monkeypatch.setattr(regression, "fig5", lambda *arguments: drawn.append(arguments) or "drawn")
    assert bbb("reproduce", "fig5", "--quick", "--runs", tmp_path / "runs").stdout == "drawn\n"
    ((curves, results, _),) = drawn
    assert list(curves) == [
        Config(method, variant, steps=500) for variant in regression.VARIANTS for method in regression.METHODS
    ]
    assert results == tmp_path / "runs" / "quick"


# --- Table 1, Table 2, Figures 2 to 4 --------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_the_quick_table(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "table1", "--quick", "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    assert f"Wrote {tmp_path / 'runs' / 'quick' / 'table1'}: csv, png, svg." in result.stderr
    with (tmp_path / "runs" / "quick" / "table1.csv").open() as file:
        assert file.readline() == COLUMNS + "\n"
        rows = list(csv.DictReader(file, COLUMNS.split(",")))
    assert [(each["method"], each["units"], each["epochs"], each["seed"]) for each in rows] == [
        (method, "100", "3", "0") for method in sorted(table1.PUBLISHED)
    ]
    for each in rows:
        assert each["method"] in result.stdout
        assert 0 <= float(each["test_error"]) <= 100
        assert 1 <= int(each["selected_epoch"]) <= 3
        assert each["prediction"] in ("mean", "draws")


@pytest.mark.usefixtures("small")
def test_what_is_quick_is_otherwise_what_was_asked_for(tmp_path: Path) -> None:
    options = ["--method", "sgd", "--units", "8", "--seeds", "2", "--epochs", "1", "--results", str(tmp_path / "here")]
    command = ["reproduce", "table1", "--quick", *options, "--runs", str(tmp_path / "runs")]
    assert CliRunner().invoke(app, command).exit_code == 0
    rows = table1.read(tmp_path / "here" / "table1.csv")
    assert [(each.method, each.units, each.epochs, each.seed) for each in rows] == [("sgd", 8, 1, 0), ("sgd", 8, 1, 1)]
    assert {path.name for path in (tmp_path / "runs" / "quick").iterdir()} == {
        "sgd-8-1epochs-seed0",
        "sgd-8-1epochs-seed1",
    }


@pytest.mark.usefixtures("small")
def test_figures_of_several_seeds(tmp_path: Path) -> None:
    options = ["--quick", "--units", "8", "--seeds", "2", "--runs", str(tmp_path)]
    for name in ("fig2", "fig3", "fig4"):
        result = CliRunner().invoke(app, ["reproduce", name, *options])
        assert result.exit_code == 0, result.output
        assert "2x8 (the paper's 2x1200), 2 seeds" in " ".join(result.stdout.split())
    folder = tmp_path / "quick"
    runs = [[each["test_error"] for each in digits.metrics(folder / f"sgd-8-3epochs-seed{seed}")] for seed in (0, 1)]
    assert runs[0] != runs[1]
    assert figures.read_csv(folder / "fig2.csv")["sgd"] == pytest.approx(np.mean(runs, 0))
    weights = [figures.trained_weights(folder / f"sgd-8-3epochs-seed{seed}") for seed in (0, 1)]
    inside = np.mean(np.abs(np.concatenate(weights)) < 0.405)
    assert figures.read_csv(folder / "fig3.csv")["sgd"].sum() * 0.01 == pytest.approx(inside, rel=1e-4)
    models = [figures.bayesian_in(folder / f"bbb-mixture-8-3epochs-seed{seed}") for seed in (0, 1)]
    below = (torch.cat(list(map(snr, models))).log10() < 1.9).double().mean()
    assert figures.read_csv(folder / "fig4.csv")["cdf"][-1] == pytest.approx(float(below), rel=1e-5)
    # A run that was made without test errors has none to show.
    path = folder / "sgd-8-3epochs-seed0" / METRICS
    path.write_text(path.read_text().replace("test_error", "other"))
    result = CliRunner().invoke(app, ["reproduce", "fig2", *options])
    assert "sgd-8-3epochs-seed0 has no test errors by epoch: remove it" in str(result.exception)


@pytest.mark.usefixtures("small")
def test_rows_of_table_2_are_kept(tmp_path: Path) -> None:
    for units, seeds in ((8, 2), (9, 1), (8, 1)):
        command = ["reproduce", "table2", "--quick", "--units", units, "--seeds", seeds, "--runs", tmp_path]
        result = CliRunner().invoke(app, list(map(str, command)))
        assert result.exit_code == 0
        assert "Points lost without 50 / 75 / 95 / 98 % of the weights: " in result.stdout
    rows = table2.read(tmp_path / "quick" / "table2.csv")
    networks = [(8, 0), (8, 1), (9, 0)]
    assert [(each.units, each.seed, each.fraction) for each in rows] == [
        (*network, fraction) for network in networks for fraction in table2.PUBLISHED
    ]
    assert json.loads((tmp_path / "quick" / "table2.json").read_text()).keys() == {"8 units", "9 units"}
    assert table2.largest(rows) == rows[-len(table2.PUBLISHED) :]


@pytest.mark.usefixtures("small")
def test_the_shown_table_has_the_paper_beside_it(tmp_path: Path) -> None:
    table1.write(tmp_path / "table1.csv", [row(), row(seed=1, test_error=1.97)])
    options = ["--method", "sgd", "--units", "8", "--seeds", "1", "--runs", str(tmp_path), "--results", str(tmp_path)]
    result = CliRunner().invoke(app, ["reproduce", "table1", *options])
    assert result.exit_code == 0, result.output
    assert re.search(r"sgd\W+1\W+400\W+40\W+2\W+1\.90 ± 0\.10\W+1\.83", result.stdout)
    assert re.search(r"sgd\W+1\W+8\W+3\W+1\W+\d+\.\d\d\s", result.stdout)
    assert table1.difference(table1.read(tmp_path / "table1.csv")) in result.stdout.splitlines()


@pytest.mark.parametrize("command", [["reproduce", "table1", "--quick"], ["train"]])
def test_a_bad_method_is_a_line(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*command, "--method", "magic"])
    assert done.exit_code == 2
    assert "'magic' is none of bbb-mixture" in re.sub(r"[\s│]+", " ", done.output)
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("options", "status", "says"),
    [(["--method", "magic"], 2, "magic"), (["--folder", "{}", "--resume"], 1, "whole safetensors file")],
)
def test_a_mistake_has_no_traceback(
    options: list[str],
    status: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / CHECKPOINT).write_text("nonsense")
    monkeypatch.setattr(sys, "argv", ["bbb", "train", *(option.format(tmp_path) for option in options)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == status
    assert says in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
