"""``bbb evaluate`` tells files apart, shows dense, pruned and sparse networks, and refuses the rest."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import digits
from bayesbackprop import Bayesian, Categorical, Gaussian, save
from bayesbackprop._cli import app
from bayesbackprop._networks import mlp
from bayesbackprop_paper import data
from bayesbackprop_paper.cli import evaluate
from bayesbackprop_paper.data import Images, Split
from model_files import SIZES, model_files

pytestmark = pytest.mark.identities


@pytest.fixture
def _digits(monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(torch.rand(50, 784), torch.randint(10, (50,)))
    monkeypatch.setitem(evaluate._LOADERS, "mnist", lambda folder: Images(split, split, split))


@pytest.mark.usefixtures("_digits")
def test_evaluate_tells_files_of_the_same_name_apart(tmp_path: Path) -> None:
    paths = [tmp_path / run / "model.safetensors" for run in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        save(Bayesian(mlp(SIZES), Categorical()), path)
    drawing = tmp_path / "reliability.svg"
    command = ["evaluate", *map(str, paths), "--draws", "0", "--diagram", str(drawing)]
    said = CliRunner().invoke(app, command, catch_exceptions=False).output
    for run in ("one", "two"):
        assert f" {run}/model.safetensors " in said  # below the folder they have in common
        assert f"{run}/model.safetensors by mean" in drawing.read_text()


@pytest.mark.usefixtures("_digits")
def test_evaluate_shows_dense_pruned_and_sparse(tmp_path: Path) -> None:
    files = model_files(tmp_path)
    out, drawing = tmp_path / "rows.json", tmp_path / "reliability.svg"
    command = ["evaluate", *map(str, files.values()), "--draws", "3", "--json", str(out), "--diagram", str(drawing)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    rows = json.loads(out.read_text())
    assert [(Path(row["file"]).stem, row["by"]) for row in rows] == [
        ("dense", "mean"),
        ("dense", "3 draws"),
        ("pruned", "mean"),
        ("pruned", "3 draws"),
        ("sparse", "network"),
    ]
    for field in ("error_percent", "nll", "brier", "ece"):
        assert rows[2][field] == pytest.approx(rows[4][field], rel=1e-4)
        assert rows[0][field] != rows[1][field] or field == "error_percent"
    assert sum(entry["examples"] for entry in rows[0]["bins"]) == rows[0]["examples"] == 50
    assert drawing.exists()
    assert "error %" in result.stdout


@pytest.mark.usefixtures("_digits")
def test_evaluate_refuses_what_it_cannot_evaluate(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.safetensors"
    save(Bayesian(mlp([784, 3, 10]), Gaussian(1.0)), numbers)
    good = str(model_files(tmp_path)["dense"])
    for arguments, match in (
        ([str(numbers)], "predicts classes"),
        ([good, "--split", "all"], "one of train, validation, test"),
        ([good, "--data", "letters"], "one of mnist"),
        ([good, "--diagram", str(tmp_path / "x.pdf")], r"\.png or \.svg"),
    ):
        with pytest.raises(ValueError, match=match):
            CliRunner().invoke(app, ["evaluate", *arguments], catch_exceptions=False)


def test_the_loaders_of_evaluate_are_those_of_the_data_sets() -> None:
    assert set(evaluate._LOADERS) <= set(data.DATA_SETS)


def test_json_without_a_file_is_said(tmp_path: Path) -> None:
    save(Bayesian(mlp([784, 8, 10]), Categorical()), tmp_path / "model.safetensors")
    command = ["evaluate", str(tmp_path / "model.safetensors"), "--json", "--draws"]
    with pytest.raises(ValueError, match="name of a file"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_evaluate_draws_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evaluate._LOADERS, "mnist", lambda folder=None: digits.images())
    torch.manual_seed(0)
    save(Bayesian(mlp([784, 8, 10]), Categorical(), sigma=0.5), tmp_path / "model.safetensors")
    found = []
    for seed in ("3", "3", "4"):
        out = tmp_path / "rows.json"
        command = ["evaluate", str(tmp_path / "model.safetensors"), "--draws", "2", "--seed", seed, "--json", str(out)]
        CliRunner().invoke(app, command, catch_exceptions=False)
        found.append(json.loads(out.read_text())[-1]["nll"])
    assert found[0] == found[1] != found[2]
