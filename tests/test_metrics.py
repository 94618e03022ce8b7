"""Metrics against values computed by hand, their identities, and the command that shows them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import digits
from bayesbackprop import Bayesian, Bernoulli, Categorical, Gaussian, prune, save, save_sparse, sparse
from bayesbackprop._cli import app, evaluate
from bayesbackprop.evaluation import BINS, brier, calibration, error, nll, score
from bayesbackprop.prediction import predictive
from bayesbackprop_paper import data
from bayesbackprop_paper.data import Images, Split
from bayesbackprop_paper.experiments import diagrams, mnist
from bayesbackprop_paper.experiments.networks import from_file, mlp
from bayesbackprop_paper.experiments.recipe import BEST, CHECKPOINT, Examples

pytestmark = pytest.mark.identities

PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.0, 0.0, 1.0]])
LABELS = torch.tensor([0, 2, 2, 2])


def test_by_hand() -> None:
    assert error(PROBS, LABELS) == 1 / 4
    assert nll(PROBS, LABELS) == pytest.approx(-(math.log(0.7) + math.log(0.3) + math.log(0.5)) / 4, rel=1e-6)
    squares = [0.09 + 0.04 + 0.01, 0.01 + 0.36 + 0.49, 0.0625 + 0.0625 + 0.25, 0.0]
    assert brier(PROBS, LABELS) == pytest.approx(sum(squares) / 4, rel=1e-6)


def test_calibration_by_hand() -> None:
    found = calibration(PROBS, LABELS, bins=4)  # confidences .7 and .6 in (.5, .75], .5 in (.25, .5], 1 in (.75, 1]
    assert found.examples.tolist() == [0, 1, 2, 1]
    assert found.confidence[1:].tolist() == pytest.approx([0.5, 0.65, 1.0])
    assert found.accuracy[1:].tolist() == [1.0, 0.5, 1.0]
    assert found.confidence[0].isnan()
    assert found.accuracy[0].isnan()
    assert found.ece == pytest.approx((1 * 0.5 + 2 * 0.15 + 0) / 4)


def test_the_best_and_the_worst() -> None:
    labels = torch.arange(5)
    certain = torch.eye(5)
    assert score(certain, labels) == (0, 0, 0, 0)
    assert score(certain.roll(1, 0), labels) == (1, math.inf, 2, 1)
    uniform = torch.full((5, 5), 0.2)
    assert nll(uniform, labels) == pytest.approx(math.log(5))
    assert brier(uniform, labels) == pytest.approx(0.8)
    assert calibration(uniform, labels).ece == pytest.approx(0, abs=1e-7)


def test_predictions_that_are_calibrated_have_no_calibration_error_in_the_long_run() -> None:
    probs = torch.rand(200_000, 3).softmax(1)
    labels = probs.multinomial(1).squeeze(1)
    # |mean of n_b draws - its expectation| is at most about sqrt(p(1-p) / n_b): over 15 bins below sqrt(15 / N) / 2
    assert calibration(probs, labels).ece < math.sqrt(BINS / 200_000) / 2
    assert calibration((probs * 4).softmax(1), labels).ece > 0.03


def test_draws_are_averaged_before_anything_else() -> None:
    logits = torch.randn(7, 4, 3)  # [draws, B, C]
    prediction = predictive(Categorical(), logits, 7)
    assert score(prediction, LABELS) == pytest.approx(score(logits.softmax(-1).mean(0), LABELS), rel=1e-5)


def test_the_nll_of_a_prediction_is_finite_where_its_probability_is_too_small_for_a_float() -> None:
    logits = torch.tensor([[[0.0, 500.0]]])
    assert nll(predictive(Categorical(), logits, 1), torch.tensor([0])) == 500
    assert nll(logits.softmax(-1)[0], torch.tensor([0])) == math.inf


@pytest.mark.parametrize(
    ("prediction", "labels", "match"),
    [
        (PROBS * 2, LABELS, "not logits"),
        (PROBS - 0.5, LABELS, "none below 0"),
        (PROBS[0], LABELS, r"probabilities \[N, C\]"),
        (PROBS.tolist(), LABELS, r"probabilities \[N, C\]"),
        (PROBS, LABELS[:3], r"shape \[4\]"),
        (PROBS, LABELS.float(), "int64"),
        (PROBS, LABELS + 1, r"in \[0, 2\]"),
        (PROBS[:0], LABELS[:0], r"probabilities \[N, C\]"),
        (predictive(Gaussian(1.0), torch.randn(1, 4, 3), 1), LABELS, "of classes"),
        (predictive(Bernoulli(), torch.randn(1, 4), 1), LABELS, "of classes"),
    ],
)
def test_what_is_no_prediction_is_refused(prediction: Any, labels: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        score(prediction, labels)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_diagram_is_the_same_file_each_time(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = [tmp_path / f"{number}{suffix}" for number in range(2)]
    for path in drawn:
        diagrams.reliability({"ours": calibration(PROBS, LABELS)}, path)
    assert drawn[0].read_bytes() == drawn[1].read_bytes()
    assert drawn[0].read_bytes()[:4] == (b"\x89PNG" if suffix == ".png" else b"<?xm")


# --- the command -----------------------------------------------------------------------------------------------------

SIZES = [784, 6, 10]


@pytest.fixture
def _digits(monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(torch.rand(50, 784), torch.randint(10, (50,)))
    monkeypatch.setitem(
        vars(__import__("bayesbackprop_paper.cli.evaluate", fromlist=["_"]))["_LOADERS"], "mnist", _load(split)
    )


def _load(split: Split) -> Any:
    return lambda folder: Images(split, split, split)


def _files(folder: Path) -> dict[str, Path]:
    model = Bayesian(mlp(SIZES), Categorical(), sigma=0.05, seed=1)
    pruned = prune(model, 0.9)
    files = {name: folder / f"{name}.safetensors" for name in ("dense", "pruned", "sparse")}
    save(model, files["dense"])
    save(pruned, files["pruned"])
    save_sparse(sparse(pruned), files["sparse"])
    return files


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
    files = _files(tmp_path)
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
    good = str(_files(tmp_path)["dense"])
    for arguments, match in (
        ([str(numbers)], "predicts classes"),
        ([good, "--split", "all"], "one of train, validation, test"),
        ([good, "--data", "letters"], "one of mnist"),
        ([good, "--diagram", str(tmp_path / "x.pdf")], r"\.png or \.svg"),
    ):
        with pytest.raises(ValueError, match=match):
            CliRunner().invoke(app, ["evaluate", *arguments], catch_exceptions=False)


# --- networks from files ---------------------------------------------------------------------------------------------


def test_a_network_is_found_in_its_file(tmp_path: Path) -> None:
    for name, path in _files(tmp_path).items():
        network = from_file(path)
        assert isinstance(network, Bayesian) == (name != "sparse")
    assert [tuple(q.mu.shape) for q in from_file(tmp_path / "dense.safetensors").posterior.values()] == [  # type: ignore[union-attr]
        (6, 784),
        (6,),
        (10, 6),
        (10,),
    ]


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        nn.Sequential(nn.Dropout(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2)),
        nn.Linear(3, 4),
        nn.GRU(3, 4),
    ],
    ids=lambda net: "-".join(type(module).__name__ for module in net.modules()),
)
def test_a_file_of_another_architecture_is_refused(net: nn.Module, tmp_path: Path) -> None:
    save(Bayesian(net, Categorical()), tmp_path / "model")
    with pytest.raises(ValueError, match=r"a checkpoint of a fully connected nn\.Sequential"):
        from_file(tmp_path / "model")


@pytest.mark.parametrize("name", [CHECKPOINT, BEST])
def test_the_state_of_a_run_is_not_its_model(name: str, tmp_path: Path) -> None:
    run = mnist.prepare(digits.RECIPES["bbb-mixture"], digits.N, tmp_path)
    training, validation, _ = (Examples(*split) for split in digits.images())
    run.train(training, {"validation": validation})
    with pytest.raises(ValueError, match=r"must be the model that a run leaves at its end, model\.safetensors"):
        from_file(tmp_path / name)


def test_the_loaders_of_evaluate_are_those_of_the_data_sets() -> None:
    assert set(evaluate._LOADERS) <= set(data.DATA_SETS)
