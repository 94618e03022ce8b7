"""Every fast path of training against the plain equations, over a hundred steps on the same noise."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import (
    Adam,
    Bayesian,
    Categorical,
    FreeEnergy,
    Laplace,
    LogDensity,
    Normal,
    ScaleMixture,
    plain_kernels,
)
from bayesbackprop._engine import own_priors

pytestmark = pytest.mark.equivalence

STEPS = 100

CAUCHY = LogDensity(lambda w: -torch.log1p((w / 0.1).square()) - math.log(0.1 * math.pi), name="Cauchy")

# The options of the model and those of the objective.
PATHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sampled": ({"prior": ScaleMixture()}, {}),
    "closed, normal": ({"prior": Normal(0.5)}, {"complexity": "closed"}),
    "closed, laplace": ({"prior": Laplace(0.5)}, {"complexity": "closed"}),
    "sampled, four draws": ({"prior": ScaleMixture()}, {"draws": 4}),
    "closed, four draws": ({"prior": Laplace(0.5)}, {"complexity": "closed", "draws": 4}),
    "flipout": ({"prior": ScaleMixture(), "estimator": "flipout"}, {}),
    "local": ({"prior": ScaleMixture(), "estimator": "local"}, {}),
    "local, closed": ({"prior": Normal(0.5), "estimator": "local"}, {"complexity": "closed"}),
    "own": ({"prior": CAUCHY, "centre": "net"}, {}),
    "own, four draws": ({"prior": CAUCHY}, {"draws": 4}),
    "own, flipout": ({"prior": CAUCHY, "estimator": "flipout"}, {}),
    "closed, both": ({"prior": {"*.bias": Normal(0.5), "*": Laplace(0.2)}, "centre": "net"}, {"complexity": "closed"}),
}


# So many weights that their memory is used again.
NETS = {
    "fully connected": lambda: nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4)),
    "convolutional": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 16, 16)), nn.Conv2d(1, 8, 4, stride=4), nn.Softplus(), nn.Flatten(), nn.Linear(128, 4)
    ),
}


def objective(path: str, net: str = "fully connected") -> FreeEnergy:
    of_model, of_objective = PATHS[path]
    torch.manual_seed(0)
    model = Bayesian(NETS[net](), Categorical(), **of_model, sigma=0.05, seed=1)
    return FreeEnergy(model, n=500, **of_objective).double()


def train(free_energy: FreeEnergy, call: Any, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> list[Tensor]:
    """The costs of all steps, and the parameters after the last."""
    optimiser = kind(free_energy.parameters(), lr=1e-3)  # type: ignore[call-arg]
    generator = torch.Generator().manual_seed(2)
    costs: list[Tensor] = []
    for _ in range(STEPS):
        x = torch.randn(10, 256, generator=generator, dtype=torch.float64)
        optimiser.zero_grad()
        cost = call(x, torch.randint(4, (10,), generator=generator))
        optimiser.backward(cost) if isinstance(optimiser, Adam) else cost.backward()
        optimiser.step()
        costs.append(cost.detach().clone())
    return [torch.stack(costs), *(parameter.detach() for parameter in free_energy.parameters())]


def assert_same_training(fast: FreeEnergy, call: Any, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> None:
    plain = copy.deepcopy(fast)
    before = [parameter.detach().clone() for parameter in fast.parameters()]
    found = train(fast, call, kind)
    with plain_kernels():
        expected = train(plain, plain)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
    assert all(bool((now - first).abs().max() > 0.005) for now, first in zip(found[1:], before, strict=True))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("path", PATHS)
def test_a_hundred_steps_are_those_of_the_equations(path: str, net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_priors, "PIECE", 10_000)  # so that there are several, and they end within parameters
    fast = objective(path, net)
    assert_same_training(fast, fast)


@pytest.mark.parametrize("path", ["sampled", "flipout", "local", "closed, both"])
def test_a_hundred_steps_of_our_adam_are_those_of_torch_on_the_equations(path: str) -> None:
    fast = objective(path)
    assert_same_training(fast, fast, Adam)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's compiler
@pytest.mark.parametrize("path", ["sampled", "closed, both"])
def test_a_hundred_compiled_steps_are_those_of_the_equations(path: str) -> None:
    torch._dynamo.reset()
    fast = objective(path)
    assert_same_training(fast, torch.compile(fast, fullgraph=True, backend="aot_eager"))
