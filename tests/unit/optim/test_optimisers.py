"""A table of optimisers, others' and ours: each lowers the free energy, and goes on from its state bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesbackprop as bbb
from bayesbackprop import Bayesian, FreeEnergy, Gaussian

STEPS = 120
_random = torch.Generator().manual_seed(0)
X = torch.randn(32, 4, generator=_random)
Y = torch.sin(X.sum(1, keepdim=True))

Made = torch.optim.Optimizer


def problem() -> FreeEnergy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1))
    return FreeEnergy(Bayesian(net, Gaussian(0.3), seed=0), n=len(X), complexity="closed")


class Several(torch.optim.Optimizer):
    """Optimisers of parts of a model, stepped together: what a loop of a user's own does in three lines."""

    def __init__(self, *parts: Made) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, part in enumerate(self.parts):
            part.load_state_dict(state_dict[str(number)])


def muon(free_energy: FreeEnergy) -> Made:
    """For matrices of means alone; rho, biases and norms are none, whatever their shape."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon from 2.9 on")
    matrices = [mu for mu in free_energy.model.net.parameters() if mu.dim() == 2]
    others = [p for p in free_energy.parameters() if all(p is not mu for mu in matrices)]
    return Several(torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), bbb.Adam(others, lr=0.01))


def schedule_free(free_energy: FreeEnergy) -> Made:
    made: Made = pytest.importorskip("schedulefree").AdamWScheduleFree(free_energy.param_groups(0.02))
    made.train()  # type: ignore[attr-defined]
    return made


def of_torch(name: str, lr: float, **options: Any) -> Callable[[FreeEnergy], Made]:
    return lambda free_energy: getattr(torch.optim, name)(free_energy.param_groups(weight_decay=1e-3), lr=lr, **options)


OPTIMISERS: dict[str, Callable[[FreeEnergy], Made]] = {
    "SGD": of_torch("SGD", 0.003, momentum=0.9),
    "SGD, foreach": of_torch("SGD", 0.003, momentum=0.9, foreach=True),
    "SGD, fused": of_torch("SGD", 0.003, momentum=0.9, fused=True),
    "Adam": of_torch("Adam", 0.01),
    "Adam, foreach": of_torch("Adam", 0.01, foreach=True),
    "Adam, fused": of_torch("Adam", 0.01, fused=True),
    "AdamW, foreach": of_torch("AdamW", 0.01, foreach=True),
    "AdamW, fused": of_torch("AdamW", 0.01, fused=True),
    "Adagrad, fused": of_torch("Adagrad", 0.03, fused=True),
    "RMSprop, foreach": of_torch("RMSprop", 0.003, foreach=True),
    "NAdam": of_torch("NAdam", 0.01),
    "RAdam": of_torch("RAdam", 0.03),
    "Adamax": of_torch("Adamax", 0.03),
    "Muon": muon,
    "schedule-free": schedule_free,
    "ours": lambda free_energy: bbb.Adam(free_energy.param_groups(0.01, weight_decay=1e-3)),
    "ours, fused": lambda free_energy: bbb.Adam(free_energy.param_groups(0.01), fused=True),
    "IVON": lambda free_energy: bbb.IVON(free_energy, 0.1, betas=(0.9, 0.99), hess_init=10.0, rest_lr=0.01),
}


def train(free_energy: FreeEnergy, optimiser: Made, steps: int) -> None:
    for _ in range(steps):
        optimiser.zero_grad()
        free_energy(X, Y).backward()
        optimiser.step()


def value(free_energy: FreeEnergy) -> float:
    """On the same noise, however it was trained."""
    with torch.no_grad():
        return sum(float(free_energy(X, Y, step=step)) for step in range(10_000, 10_020)) / 20


def parameters_of(free_energy: FreeEnergy) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in free_energy.parameters()]


@pytest.mark.supports(
    "Training", "optimisers of torch and schedule-free", "plain, fused, foreach; Muon; no decay of rho"
)
@pytest.mark.learning
@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=list(OPTIMISERS))
def test_it_lowers_the_free_energy_and_trains_every_parameter(make: Callable[[FreeEnergy], Made]) -> None:
    free_energy = problem()
    before, cost = parameters_of(free_energy), value(free_energy)
    train(free_energy, make(free_energy), STEPS)
    assert value(free_energy) < cost - 1
    assert not any(torch.equal(*pair) for pair in zip(before, parameters_of(free_energy), strict=True))


@pytest.mark.equivalence
@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=list(OPTIMISERS))
def test_it_goes_on_from_its_state(make: Callable[[FreeEnergy], Made]) -> None:
    one, other = problem(), problem()
    first, second = make(one), make(other)
    train(one, first, 5)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(one, first, 5)
    train(other, second, 5)
    torch.testing.assert_close(parameters_of(one), parameters_of(other), rtol=0, atol=0)


@pytest.mark.identities
@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=list(OPTIMISERS))
def test_it_has_every_parameter_once_and_decays_no_rho(make: Callable[[FreeEnergy], Made]) -> None:
    free_energy = problem()
    groups = make(free_energy).param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    assert len(parameters) == len(set(parameters))
    assert set(parameters) == set(free_energy.parameters())
    decayed = {parameter for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert decayed.isdisjoint(free_energy.model.rho.parameters())


# --- LBFGS -----------------------------------------------------------------------------------------------------------


@pytest.mark.supports("Training", "LBFGS with a line search", "`step=` holds the noise")
@pytest.mark.learning
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_with_the_noise_of_one_step_lbfgs_finds_a_minimum(search: str | None) -> None:
    made = Bayesian(nn.Linear(4, 1), Gaussian(0.3), sigma=0.1, seed=0)
    free_energy = FreeEnergy(made.double(), n=len(X), draws=64, complexity="closed")
    optimiser = torch.optim.LBFGS(free_energy.parameters(), max_iter=60, tolerance_change=0, line_search_fn=search)
    x, y = X.double(), Y.double()
    seen: list[float] = []

    def closure() -> Tensor:
        optimiser.zero_grad()
        cost = free_energy(x, y, step=1)
        cost.backward()
        seen.append(float(cost))
        return cost

    for _ in range(5):
        optimiser.step(closure)
    closure()
    assert int(free_energy.step) == 1
    assert seen[-1] < seen[0] - 1
    slopes = [float(parameter.grad.abs().max()) for parameter in free_energy.parameters() if parameter.grad is not None]
    assert max(slopes) < 1e-6


@pytest.mark.identities
def test_a_step_that_is_given_has_the_same_noise_whenever_it_is_asked() -> None:
    free_energy = problem()
    costs = [float(free_energy(X, Y, step=step)) for step in (1, 2, 1)]
    assert costs[0] == costs[2] != costs[1]
    assert float(free_energy(X, Y)) == costs[1]  # the next one is that after the last
