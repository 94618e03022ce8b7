"""Networks of a posterior outside of Python: torch.export, and ONNX by onnxruntime, are what torch computes."""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import bayesbackprop as bbb

pytestmark = pytest.mark.equivalence

# What torch's exporters say of themselves, where torch.export is called without save_onnx.
exporting = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

CLOSE = 1e-5


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Linear(36, 3)

    def forward(self, image: Tensor, *, scale: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(image))).flatten(1)) * scale


def fully_connected(likelihood: bbb.Likelihood, **options: Any) -> bbb.Bayesian:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    return bbb.Bayesian(net, likelihood, sigma=0.3, seed=7, **options)


def run(path: Path, **inputs: Any) -> list[Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(each) for each in session.run(None, {name: np.asarray(x) for name, x in inputs.items()})]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=CLOSE, atol=CLOSE)


# --- the networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [bbb.Diagonal(), bbb.LowRank(2), bbb.Mixture(3)], ids=repr)
def test_a_drawn_network_is_the_draw_of_that_index(family: Any) -> None:
    model, x = fully_connected(bbb.Categorical(), family=family, estimator=None), torch.randn(5, 4)
    drawn, ensemble = bbb.DrawnNetwork(model), model.ensemble(6)
    for index in (0, 5):
        assert_close(drawn(torch.tensor(index), x), ensemble(x)[index])
    assert model.net.training  # the model is as it was
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_drawn_network_draws_whole_networks_whatever_the_estimator() -> None:
    model, x = fully_connected(bbb.Categorical(), estimator="local"), torch.randn(5, 4)
    wanted = model.outputs(x, draws=3, estimator="shared")[2]
    assert_close(bbb.DrawnNetwork(model)(torch.tensor(2), x), wanted)


def test_an_ensemble_network_predicts_as_the_ensemble() -> None:
    heads = bbb.Joint({"kind": bbb.Categorical(), "size": bbb.Gaussian(0.1)})

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.size = nn.Linear(4, 3), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"kind": self.kind(x), "size": self.size(x)}

    x = torch.randn(5, 4)
    for model in (fully_connected(bbb.Gaussian(0.1)), bbb.Bayesian(Heads(), heads, sigma=0.3)):
        ensemble = model.ensemble(6)
        found, wanted = bbb.EnsembleNetwork(ensemble)(x), ensemble.predict(x)
        torch.testing.assert_close(found["mean"], wanted.mean)
        torch.testing.assert_close(found["variance"], wanted.variance)
        torch.testing.assert_close(found["epistemic"], wanted.epistemic)


class Both(nn.Module):
    """A network that returns more than a likelihood takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(x), "inputs": x}


def test_all_three_give_what_output_picks(tmp_path: Path) -> None:
    model = bbb.Bayesian(Both(), bbb.Categorical(), sigma=0.3, output=lambda found: found["logits"])
    x, ensemble = torch.randn(5, 4), model.ensemble(3)
    assert_close(bbb.DrawnNetwork(model)(torch.tensor(2), x), ensemble(x)[2])
    assert_close(bbb.EnsembleNetwork(ensemble)(x)["epistemic"], ensemble.predict(x).epistemic)
    mean = bbb.mean_network(model)
    assert not mean.training
    assert_close(mean(x), model.net(x)["logits"])
    bbb.save_onnx(model, tmp_path / "mean.onnx", x)
    (output,) = run(tmp_path / "mean.onnx", input=x)
    assert_close(output, mean(x))
    bbb.save_onnx(model.net, tmp_path / "net.onnx", x)  # all that the network returns
    assert list(map(len, run(tmp_path / "net.onnx", input=x))) == [5, 5]


# --- torch.export -----------------------------------------------------------------------------------------------------


@pytest.mark.supports("Files and formats", "torch.export", "the mean, a draw by its index, a kept ensemble")
@exporting
def test_torch_export_takes_all_three(tmp_path: Path) -> None:
    model, x = fully_connected(bbb.Categorical()), torch.randn(5, 4)
    ensemble = model.ensemble(6)
    longer = torch.randn(9, 4)
    batch = torch.export.Dim("batch")
    shapes = ({0: batch},)
    program = torch.export.export(bbb.mean_network(model), (x,), dynamic_shapes={"input": {0: batch}})
    assert_close(program.module()(longer), model.eval()(longer))
    program = torch.export.export(
        bbb.DrawnNetwork(model), (torch.tensor(0), x), dynamic_shapes={"index": None, "args": shapes}, strict=False
    )
    torch.export.save(program, tmp_path / "drawn.pt2")
    program = torch.export.load(tmp_path / "drawn.pt2")
    assert_close(program.module()(torch.tensor(5), longer), ensemble(longer)[5])
    program = torch.export.export(bbb.EnsembleNetwork(ensemble), (x,), dynamic_shapes={"args": shapes}, strict=False)
    assert_close(program.module()(longer)["epistemic"], ensemble.predict(longer).epistemic)


# --- ONNX -------------------------------------------------------------------------------------------------------------


@pytest.mark.supports("Files and formats", "ONNX of the mean", "onnxruntime computes what torch does")
def test_onnx_of_the_mean(tmp_path: Path) -> None:
    model, longer = fully_connected(bbb.Categorical()), torch.randn(9, 4)
    assert bbb.save_onnx(model, tmp_path / "mean.onnx", torch.randn(1, 4)) < CLOSE  # one row stands for any number
    assert_close(run(tmp_path / "mean.onnx", input=longer)[0], model.eval()(longer))


def test_writing_a_file_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.INFO)  # a user's own choice, which stays
    try:
        bbb.save_onnx(fully_connected(bbb.Categorical()), tmp_path / "mean.onnx", torch.randn(5, 4))
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)
    assert capfd.readouterr() == ("", "")


@pytest.mark.supports("Files and formats", "ONNX of a draw", "its index is an input")
def test_onnx_of_a_draw_by_its_index(tmp_path: Path) -> None:
    """Also of the last index there is, whose word has all bits set."""
    model, longer = fully_connected(bbb.Categorical()), torch.randn(9, 4)
    drawn = bbb.DrawnNetwork(model)
    assert bbb.save_onnx(drawn, tmp_path / "drawn.onnx", torch.randn(3, 4)) < CLOSE
    outputs = []
    for index in (0, 1, 2**31, 2**32 - 1):
        (output,) = run(tmp_path / "drawn.onnx", index=index, input=longer)
        assert_close(output, drawn(torch.tensor(index), longer))
        outputs.append(output)
    assert_close(torch.stack(outputs[:2]), model.ensemble(2)(longer))
    assert (outputs[0] - outputs[1]).abs().max() > 0.1


def test_onnx_of_a_draw_of_convolutions_and_inputs_by_name(tmp_path: Path) -> None:
    model = bbb.Bayesian(Convolutional(), bbb.Categorical(), sigma=0.2, normalisation=True, seed=1)
    model.net(torch.randn(8, 1, 8, 8), scale=torch.ones(8, 1))  # moves the statistics of the batch norm
    inputs = {"image": torch.randn(2, 1, 8, 8), "scale": torch.rand(2, 1)}
    assert bbb.save_onnx(bbb.DrawnNetwork(model), tmp_path / "drawn.onnx", inputs) < CLOSE
    inputs = {"image": torch.randn(5, 1, 8, 8), "scale": torch.rand(5, 1)}
    (output,) = run(tmp_path / "drawn.onnx", index=3, **inputs)
    assert_close(output, model.ensemble(4)(**inputs)[3])


@pytest.mark.supports("Files and formats", "ONNX of an ensemble", "mean, variance and epistemic part")
@pytest.mark.parametrize(
    "likelihood",
    [bbb.Categorical(), bbb.Gaussian("learnt"), bbb.NegativeBinomial(), bbb.StudentT(5.0)],
    ids=lambda each: type(each).__name__,
)
def test_onnx_of_a_kept_ensemble(likelihood: bbb.Likelihood, tmp_path: Path) -> None:
    ensemble, longer = fully_connected(likelihood).ensemble(5), torch.randn(9, 4)
    assert bbb.save_onnx(ensemble, tmp_path / "kept.onnx", torch.randn(3, 4)) < CLOSE
    session = onnxruntime.InferenceSession(tmp_path / "kept.onnx")
    assert [each.name for each in session.get_outputs()] == ["mean", "variance", "epistemic"]
    mean, variance, epistemic = run(tmp_path / "kept.onnx", input=longer)
    wanted = ensemble.predict(longer)
    assert_close(mean, wanted.mean)
    assert_close(variance, wanted.variance)
    assert_close(epistemic, wanted.epistemic)


class Pooled(nn.Module):
    """Its graph has values that torch calls ``mean``, ``relu``, ``conv2d`` and so on."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names, self.first, self.last = names, nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        hidden = torch.relu(self.first(x)).mean((2, 3))
        logits: Tensor = self.last(hidden)
        return dict(zip(self.names, (logits, hidden), strict=False)) if self.names else logits


def test_an_ensemble_of_a_network_with_a_mean(tmp_path: Path) -> None:
    """Its output ``mean`` is not the ``mean`` of the pooling layer."""
    ensemble, x = bbb.Bayesian(Pooled(()), bbb.Categorical(), sigma=0.3, seed=0).ensemble(2), torch.rand(3, 1, 8, 8)
    assert bbb.save_onnx(ensemble, tmp_path / "kept.onnx", x) < CLOSE
    session = onnxruntime.InferenceSession(tmp_path / "kept.onnx")
    assert [each.name for each in session.get_outputs()] == ["mean", "variance", "epistemic"]
    assert_close(run(tmp_path / "kept.onnx", input=x)[0], ensemble.predict(x).mean)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("mean", "relu"), ["mean", "relu"]),
        (("relu", "mean"), ["relu", "mean"]),
        (("module.last.weight", "mean_inner_1"), ["module.last.weight", "mean_inner_1"]),
        (("input", "bayesbackprop.0"), ["output_input", "bayesbackprop.0"]),
    ],
)
def test_outputs_may_have_any_name(names: tuple[str, ...], found: list[str], tmp_path: Path) -> None:
    net, x = Pooled(names).eval(), torch.rand(3, 1, 8, 8)
    assert bbb.save_onnx(net, tmp_path / "x.onnx", x) < CLOSE
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx")
    assert [each.name for each in session.get_outputs()] == found
    for got, wanted in zip(run(tmp_path / "x.onnx", input=x), net(x).values(), strict=True):
        assert_close(got, wanted)


@pytest.mark.supports("Files and formats", "ONNX of a pruned network", "in 32 and in 8 bits")
def test_onnx_of_what_pruning_left_in_32_and_8_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))
    model = bbb.Bayesian(net, bbb.Categorical(), seed=0)
    with torch.no_grad():
        for _, rho in model.rho.named_parameters():
            rho.copy_(torch.randn_like(rho) - 4)
    small, x = bbb.sparse(bbb.prune(model, 0.9)), torch.randn(7, 200)
    assert any(type(layer).__name__ == "SparseLinear" for layer in small.layers)
    torch.testing.assert_close(small.dense()(x), small(x))
    assert bbb.save_onnx(small, tmp_path / "whole.onnx", x) < CLOSE
    off = bbb.save_onnx(small, tmp_path / "int8.onnx", x, int8=True)
    (output,) = run(tmp_path / "int8.onnx", input=x)
    assert float((output - small(x)).abs().max()) == pytest.approx(off, abs=1e-6)
    assert CLOSE < off < 0.05 * float(small(x).abs().max())
    assert (tmp_path / "int8.onnx").stat().st_size < 0.35 * (tmp_path / "whole.onnx").stat().st_size


@pytest.mark.parametrize("fraction", [0.95, 1.0])
def test_onnx_in_8_bits_of_layers_that_pruning_left_empty(
    fraction: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 20), nn.Sigmoid(), nn.Linear(20, 20), nn.Sigmoid(), nn.Linear(20, 3))
    model, x = bbb.prune(bbb.Bayesian(net, bbb.Categorical(), sigma=0.1, seed=1), fraction), torch.randn(9, 10)
    assert bbb.save_onnx(bbb.sparse(model), tmp_path / "x.onnx", x, int8=True) < CLOSE
    for _ in range(3):  # what is not initialised differs from one time to the next
        assert_close(run(tmp_path / "x.onnx", input=x)[0], model.net(x))
    assert not capfd.readouterr().err  # onnxruntime would recommend a further step


# --- what is refused --------------------------------------------------------------------------------------------------


class DependsOnNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def conditional() -> bbb.Bayesian:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return bbb.Bayesian(net, bbb.Categorical(), family=bbb.Conditional(torch.randn(5, 4)))


@pytest.mark.parametrize(
    ("make", "inputs", "words"),
    [
        (lambda: bbb.Normal(0.1), torch.randn(3, 4), "a Bayesian, an Ensemble"),
        (lambda: fully_connected(bbb.Categorical()), [1.0], r"torch.tensor\(x\) makes one of a list"),
        (lambda: fully_connected(bbb.Categorical()), (torch.zeros(2, 4), torch.zeros(3)), r"\[2, 3\] rows"),
        (lambda: fully_connected(bbb.Categorical()), torch.full((2, 4), torch.nan), "finite"),
        (lambda: fully_connected(bbb.Categorical(), family=bbb.Mixture(2)), torch.randn(3, 4), "mean is a network"),
        (lambda: DependsOnNumbers(), torch.randn(3, 4), "one that torch.export takes"),
        (lambda: bbb.DrawnNetwork(conditional()), torch.randn(3, 4), "one whose operations ONNX has"),
    ],
    ids=["prior", "list", "lengths", "nan", "mixture", "numbers", "conditional"],
)
def test_what_cannot_be_exported_is_refused(make: Any, inputs: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        bbb.save_onnx(make(), tmp_path / "x.onnx", inputs)
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r'needs onnxscript: pip install "bayesbackprop\[onnx\]"'):
        bbb.save_onnx(fully_connected(bbb.Categorical()), tmp_path / "x.onnx", torch.randn(3, 4))


def test_weights_that_are_drawn_when_the_file_runs_have_no_8_bits(tmp_path: Path) -> None:
    model = bbb.Bayesian(nn.Linear(3, 2), bbb.Categorical(), seed=0)
    with pytest.raises(ValueError, match="'int8' parameter of save_onnx must be False for a DrawnNetwork"):
        bbb.save_onnx(bbb.DrawnNetwork(model), tmp_path / "x.onnx", torch.ones(4, 3), int8=True)
    assert not list(tmp_path.iterdir())
