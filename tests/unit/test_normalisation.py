"""Batch normalisation: several draws count once, evaluation moves nothing, and one call re-estimates the statistics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

import bayesbackprop as bbb

pytestmark = pytest.mark.identities

_generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(16, 3, generator=_generator) + 1, torch.randn(16, 2, generator=_generator)
MOMENTA = [0.1, 0.7, None]  # None: the average over all batches


def model_of(momentum: float | None = 0.1, **options: Any) -> bbb.Bayesian:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2)
    return bbb.Bayesian(nn.Sequential(*layers), bbb.Gaussian(1.0), sigma=0.5, estimator="shared", seed=0, **options)


def statistics(model: bbb.Bayesian) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.net.named_buffers()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.supports("Batch normalisation", "several draws a step", "count once")
@pytest.mark.parametrize("momentum", MOMENTA)
def test_several_draws_count_once_a_step(momentum: float | None) -> None:
    """r <- (1 - m) r + m * the mean over the draws of the batch's statistics, and one batch is counted."""
    model = model_of(momentum)
    free_energy = bbb.FreeEnergy(model, n=16, draws=4)
    for step in (1, 2):
        before = statistics(model)
        m = 1 / step if momentum is None else momentum
        hidden = [model.draw(step, k).weights for k in range(4)]
        batches = [X @ w["0.weight"].T + w["0.bias"] for w in hidden]
        mean = torch.stack([h.mean(0) for h in batches]).mean(0)
        variance = torch.stack([h.var(0) for h in batches]).mean(0)
        free_energy(X, Y).backward()
        expected = {
            "1.running_mean": (1 - m) * before["1.running_mean"] + m * mean.detach(),
            "1.running_var": (1 - m) * before["1.running_var"] + m * variance.detach(),
            "1.num_batches_tracked": torch.tensor(step),
        }
        assert_same(statistics(model), expected)


def test_gradients_of_several_draws_are_the_mean_of_those_of_each() -> None:
    model, single = model_of(), model_of()
    torch.manual_seed(3)
    bbb.FreeEnergy(model, n=16, draws=3)(X, Y).backward()
    torch.manual_seed(3)
    drawn = [single.draw(1, k) for k in range(3)]
    costs = [single.likelihood.cost(draw(X), Y) + draw.complexity() / 16 for draw in drawn]
    torch.stack(costs).mean().backward()
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_step_that_is_refused_moves_nothing() -> None:
    model = model_of()
    free_energy = bbb.FreeEnergy(model, n=16, draws=3)
    before = statistics(model)
    with pytest.raises(ValueError, match="target"):
        free_energy(X, Y[:, :1])
    assert_same(statistics(model), before)


# --- evaluation ------------------------------------------------------------------------------------------------------


def _objective_in_eval(model: bbb.Bayesian) -> None:
    bbb.FreeEnergy(model, n=16, draws=2).eval()(X, Y)


def _without_gradients(model: bbb.Bayesian) -> None:
    for draws in (1, 2):
        with torch.no_grad():
            bbb.FreeEnergy(model, n=16, draws=draws)(X, Y)


def _objective_alone_in_eval(model: bbb.Bayesian) -> None:
    free_energy = bbb.FreeEnergy(model, n=16)
    free_energy.training = False
    free_energy(X, Y)


EVALUATIONS: dict[str, Callable[[bbb.Bayesian], Any]] = {
    "objective, eval": _objective_in_eval,
    "objective, eval of itself alone": _objective_alone_in_eval,
    "objective, no_grad": _without_gradients,
    "predict": lambda model: model.predict(X, draws=3),
    "predict, draw by draw": lambda model: model.predict(X, draws=3, memory=1),
    "predict, local": lambda model: model.predict(X, draws=3, estimator="local"),
    "predict_mean": lambda model: model.predict_mean(X),
    "ensemble": lambda model: model.ensemble(3).predict(X),
    "evaluate": lambda model: bbb.evaluate(model, (X, Y), draws=3),
    "report": lambda model: model.report((X, Y), draws=30),
    "refine": lambda model: bbb.refine(model, (X, Y), draws=2, iterations=8, leapfrogs=1, progress=False),
}


@pytest.mark.supports("Batch normalisation", "evaluation", "moves nothing")
@pytest.mark.filterwarnings("ignore:The chains of refine")
@pytest.mark.parametrize("evaluation", list(EVALUATIONS))
def test_evaluation_moves_nothing(evaluation: str) -> None:
    model = model_of()
    bbb.FreeEnergy(model, n=16)(X, Y).backward()
    model.train()
    before, modes = statistics(model), [module.training for module in model.net.modules()]
    EVALUATIONS[evaluation](model)
    after = statistics(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    expected = [False] * len(modes) if evaluation == "objective, eval" else modes
    assert [module.training for module in model.net.modules()] == expected


# --- statistics for other weights ------------------------------------------------------------------------------------


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), 4)


@pytest.mark.supports("Batch normalisation", "update_batchnorm", "of the mean, and of a pruned network")
@pytest.mark.parametrize("pruned", [False, True], ids=["mean", "pruned"])
@pytest.mark.parametrize("data", [X, (X, Y), _loader()], ids=["tensor", "pair", "loader"])
def test_one_call_gives_the_statistics_of_the_mean(pruned: bool, data: Any) -> None:
    model = bbb.prune(model_of(), 0.5) if pruned else model_of()
    free_energy = bbb.FreeEnergy(model, n=16)
    for _ in range(3):
        free_energy(X, Y)
    modes = [module.training for module in model.modules()]
    assert bbb.update_batchnorm(model, data) is model
    with torch.no_grad():
        hidden = model.net[0](X)
    found = statistics(model)
    torch.testing.assert_close(found["1.running_mean"], hidden.mean(0))
    parts = hidden.split(4) if isinstance(data, DataLoader) else [hidden]
    torch.testing.assert_close(found["1.running_var"], torch.stack([part.var(0) for part in parts]).mean(0))
    assert model.net[1].momentum == 0.1
    assert [module.training for module in model.modules()] == modes


def test_it_is_torchs_own_where_that_serves() -> None:
    ours, theirs = model_of(), model_of()
    for model in (ours, theirs):
        model.net[3].p = 0.0
    bbb.update_batchnorm(ours.net, _loader())
    update_bn(_loader(), theirs.net)
    assert_same(statistics(ours), statistics(theirs))


def test_inputs_by_name_and_statistics_of_draws() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, *, x: Tensor) -> Tensor:
            output: Tensor = self.norm(self.layer(x))
            return output

    model = bbb.Bayesian(ByName(), bbb.Gaussian(1.0), sigma=0.5, estimator="shared", seed=0)
    bbb.update_batchnorm(model, [({"x": X}, Y)], draws=5)
    each = [model.draw(0, k).weights for k in range(5)]
    means = [(X @ w["layer.weight"].T + w["layer.bias"]).mean(0) for w in each]
    torch.testing.assert_close(model.net.norm.running_mean, torch.stack(means).mean(0).detach())


def test_after_an_error_nothing_has_changed() -> None:
    model = model_of()
    bbb.FreeEnergy(model, n=16)(X, Y)
    before, modes = statistics(model), [module.training for module in model.modules()]
    with pytest.raises(RuntimeError, match="mat1"):
        bbb.update_batchnorm(model, [X, X[:, :2]])
    assert_same(statistics(model), before)
    assert model.net[1].momentum == 0.1
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"model": 3}, "model"),
        ({"data": 3}, "data"),
        ({"data": X * float("nan")}, "data"),
        ({"draws": -1}, "draws"),
        ({"seed": -1}, "seed"),
        ({"model": nn.BatchNorm1d(3), "draws": 2}, "draws"),
    ],
)
def test_bad_calls_are_refused(given: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ValueError, match=f"The '{parameter}' parameter of update_batchnorm"):
        bbb.update_batchnorm(**{"model": model_of(), "data": X, **given})
