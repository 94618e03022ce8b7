"""Fully connected networks under each rule, back by hand, against the same rules through autograd."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Gaussian, Laplace, LogDensity, Normal, Prior, ScaleMixture
from bayesbackprop._engine.mlp import FullyConnected
from bayesbackprop.posterior import constant_rho
from opaque import Opaque
from step_memory import memory_of_a_step

pytestmark = pytest.mark.equivalence

ESTIMATORS: dict[str, Any] = {
    "shared": "shared",
    "flipout": "flipout",
    "local": "local",
    "one of each": {"0.*": "local", "2.*": "flipout", "4.*": "shared"},
}
CAUCHY = LogDensity(lambda w: -torch.log1p((w / 0.3).square()), name="Cauchy")
COSTS: dict[str, tuple[Prior | dict[str, Prior], str]] = {
    "mixture, sampled": (ScaleMixture(0.25, 1.0, 0.1), "sampled"),
    "normal, sampled": (Normal(0.5), "sampled"),
    "own, sampled": (CAUCHY, "sampled"),
    "own and normal, sampled": ({"*.bias": CAUCHY, "*": Normal(0.5)}, "sampled"),
    "normal, closed": (Normal(0.5), "closed"),
    "laplace, closed": (Laplace(0.5), "closed"),
    "both, closed": ({"*.bias": Normal(0.5), "*": Laplace(0.2)}, "closed"),
}


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 4))
    return nn.Sequential(*layers).to(dtype)


def named(estimator: Any, wrap: type[Opaque] | None) -> Any:
    return (
        {f"inner.{name}": rule for name, rule in estimator.items()}
        if wrap and isinstance(estimator, dict)
        else estimator
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("centre", [None, "net"])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_rules_by_hand_are_those_through_autograd(
    estimator: str, cost: str, centre: Any, dtype: torch.dtype, taken: list[int]
) -> None:
    prior, complexity = COSTS[cost]
    net, generator = network(dtype), torch.Generator().manual_seed(1)
    x = torch.randn(9, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    y = torch.randint(4, (9,), generator=generator)
    results: list[list[Tensor]] = []
    for wrap in (None, Opaque):
        inner = copy.deepcopy(net)
        model = Bayesian(
            wrap(inner) if wrap else inner,
            Categorical(),
            prior,
            sigma=0.2,
            estimator=named(ESTIMATORS[estimator], wrap),
            centre=centre,
            seed=3,
        )
        with torch.no_grad():
            for rho in model.rho.parameters():
                rho.view(-1)[::5] = constant_rho(dtype)
            for mu in model.net.parameters():
                mu.add_(0.1)  # away from the centre
        free_energy = FreeEnergy(model, n=100, complexity=complexity, draws=2)  # type: ignore[arg-type]
        x.grad = None
        found = free_energy(x, y)
        found.backward()
        assert x.grad is not None
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        results.append([*(part.detach() for part in found), x.grad.clone(), *gradients])
    assert taken == [9, 9]
    accuracy = {"rtol": 2e-4, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(*results, **accuracy)


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_inputs_and_units_that_are_dead(estimator: str, taken: list[int]) -> None:
    """A row of zeros, and a unit that never fires: no NaN, and the gradients of autograd."""
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        net[0].weight[1] = -100.0
    x = torch.rand(6, 3, dtype=torch.float64)
    x[2] = 0
    results = []
    for wrap in (lambda inner: inner, Opaque):
        model = Bayesian(wrap(copy.deepcopy(net)), Gaussian(0.5), Normal(1.0), estimator=estimator, seed=0)  # type: ignore[arg-type]
        cost = FreeEnergy(model, n=20)(x, torch.zeros(6, 1, dtype=torch.float64))
        cost.backward()
        results.append([cost.detach(), *(parameter.grad for parameter in model.parameters())])
    assert taken == [6]
    assert all(bool(tensor.isfinite().all()) for tensor in results[0])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.identities
def test_a_bias_with_a_rule_of_its_own_is_left_to_autograd(taken: list[int]) -> None:
    model = Bayesian(network(torch.float32), Categorical(), estimator={"*.bias": "shared", "*": "local"}, seed=0)
    FreeEnergy(model, n=10)(torch.randn(3, 5), torch.zeros(3, dtype=torch.int64)).backward()
    assert not taken
    assert isinstance(model.engine().executors[0], FullyConnected)


@pytest.mark.identities
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_a_step_needs_two_copies_of_the_weights_besides_parameters_and_gradients(estimator: Any) -> None:
    assert memory_of_a_step(lambda net: Bayesian(net, Categorical(), estimator=estimator, seed=0)) < 2.5
