"""A step whose gradient is not finite is refused before the parameters change, on every path."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesbackprop as bbb
from bayesbackprop.bandits import EpsilonGreedy, ThompsonSampling
from bayesbackprop.sklearn import BayesianMLPRegressor
from bayesbackprop.training import Batches, DivergenceError, check_gradients, fit

pytestmark = pytest.mark.identities

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :1]


class Spoilt(torch.autograd.Function):
    """Its result is its input, and one number of its gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        spoilt = gradients[0].clone()
        spoilt.view(-1)[0] = ctx.value
        return spoilt, None


class Net(nn.Module):
    def __init__(self, value: float, wide: int) -> None:
        super().__init__()
        self.first, self.last, self.value = nn.Linear(3, wide), nn.Linear(wide, 1), value

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Spoilt.apply(self.first(x), self.value).tanh())


class Mean(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - y).square().mean()


class _Wide(bbb.Prior):
    """A prior whose density is finite, and whose slope is not."""

    def log_density(self, w: Tensor) -> Tensor:
        return Spoilt.apply(w, math.inf) * 0.0 - w.square()


def state(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def unchanged(module: nn.Module, before: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("wide", [4, 20_000])
@pytest.mark.parametrize("kind", ["model", "objective"])
def test_fit_refuses_a_gradient_of_the_likelihood(kind: str, wide: int, clip: float | None, value: float) -> None:
    model: nn.Module
    net = Net(value, wide)
    model = bbb.Bayesian(net, bbb.Gaussian(0.5), bbb.Normal(1.0), seed=0) if kind == "model" else Mean(net)
    before = state(model)
    with pytest.raises(
        DivergenceError, match=r"The gradient of '.*first.weight' is not finite.*no step was taken"
    ) as error:
        fit(model, Batches(X, Y, 8), epochs=1, clip=clip)
    assert unchanged(model, before)
    assert ("The likelihood cost is to blame" in str(error.value)) == (kind == "model")


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip": 1.0}])
@pytest.mark.parametrize("draws", [1, 3])
def test_fit_refuses_a_gradient_of_the_complexity(options: dict[str, Any], draws: int) -> None:
    model = bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian(0.5), {"weight": _Wide(), "bias": bbb.Normal()}, seed=0)
    before = state(model)
    with pytest.raises(DivergenceError, match=r"'model.net.weight' is not finite.*The complexity cost is to blame"):
        fit(bbb.FreeEnergy(model, n=16, draws=draws), Batches(X, Y, 8), epochs=1, **options)
    assert unchanged(model, before)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_whose_sum_overflows_is_finite_and_its_norm_is_not(clip: float | None) -> None:
    weight = nn.Parameter(torch.zeros(3))
    objective = nn.ParameterDict({"weight": weight})
    weight.grad = torch.full((3,), 3e38)
    optimiser = torch.optim.SGD([weight], lr=0.1)
    if clip is None:
        assert check_gradients(objective, optimiser) is None
    else:
        with pytest.raises(DivergenceError, match="norm of the gradient overflows"):
            check_gradients(objective, optimiser, norm=True)


def test_gradients_may_be_sparse_or_missing() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimiser = torch.optim.SparseAdam(embedding.parameters())
    check_gradients(embedding, optimiser)
    embedding(torch.tensor([1, 1])).sum().backward()
    check_gradients(embedding, optimiser)
    (embedding(torch.tensor([2])) * math.inf).sum().backward()
    with pytest.raises(DivergenceError, match="The gradient of 'weight' is not finite"):
        check_gradients(embedding, optimiser)


def test_clipping_is_that_of_torch() -> None:
    models = [bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian(0.5), estimator="shared", seed=0) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimisers = [torch.optim.Adam(model.param_groups(), fused=True) for model in models]
    fit(models[0], Batches(X, Y, 8), epochs=2, optimiser=optimisers[0], clip=0.1)
    objective, optimiser = bbb.FreeEnergy(models[1], n=16, complexity="closed"), optimisers[1]
    batches = Batches(X, Y, 8)
    for epoch in range(2):
        batches.set_epoch(epoch)
        for x, y in batches:
            optimiser.zero_grad()
            objective(x, y).backward()
            nn.utils.clip_grad_norm_(objective.parameters(), 0.1)
            optimiser.step()
    assert unchanged(models[0], state(models[1]))


@pytest.mark.parametrize("kind", [ThompsonSampling, EpsilonGreedy])
def test_an_agent_refuses_it_too(kind: type[Any]) -> None:
    agent = kind(features=3, actions=2, hidden=[4], updates=2, memory=4)
    agent.net[0].register_forward_hook(lambda *call: Spoilt.apply(call[-1], math.nan))
    before = state(agent.net)
    with pytest.raises(DivergenceError, match="is not finite"):
        agent.observe([0.0, 1.0, 0.0], 1, 1.0)
    assert unchanged(agent.net, before)


def test_an_estimator_refuses_it_too() -> None:
    estimator = BayesianMLPRegressor(max_iter=1, prior=_Wide())
    with pytest.raises(DivergenceError, match="The complexity cost is to blame"):
        estimator.fit(np.ones((4, 2)), np.arange(4.0))
    assert not hasattr(estimator, "model_")


# --- priors that are too narrow --------------------------------------------------------------------------------------


NARROW = {
    "sigma": lambda value: bbb.Normal(value),
    "sigma1": lambda value: bbb.ScaleMixture(sigma1=value),
    "sigma2": lambda value: bbb.ScaleMixture(sigma2=value),
    "scale": lambda value: bbb.Laplace(value),
}


@pytest.mark.parametrize("name", list(NARROW))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_prior_too_narrow_for_the_type_of_the_weights_is_refused(name: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    smallest = 1 / largest if name == "scale" or dtype is torch.float16 else largest**-0.5
    with pytest.raises(ValueError, match=rf"The '{name}' parameter of \w+ must be at least .*{dtype}.*'weight'"):
        bbb.Bayesian(nn.Linear(3, 1).to(dtype), bbb.Gaussian(0.5), NARROW[name](smallest * 0.9))
    model = bbb.Bayesian(nn.Linear(3, 1).to(dtype), bbb.Gaussian(0.5), NARROW[name](smallest * 1.1), sigma=0.1, seed=0)
    nn.init.zeros_(model.net.weight)
    nn.init.zeros_(model.net.bias)


@pytest.mark.parametrize("name", ["sigma1", "sigma2"])
@pytest.mark.parametrize("kernels", ["fused", "plain"])
@pytest.mark.parametrize("weight", [0.0, 1e-20, 1e-10, 1.0, 1e10])
def test_the_narrowest_mixture_has_finite_gradients(name: str, kernels: str, weight: float) -> None:
    model = bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian(0.5), NARROW[name](5.5e-20), sigma=1e-3, seed=0)
    nn.init.constant_(model.net.weight, weight)
    with bbb.plain_kernels() if kernels == "plain" else torch.enable_grad():
        model.draw(1).complexity().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)


def test_a_conversion_is_checked_as_well() -> None:
    model = bbb.Bayesian(nn.Linear(3, 1).double(), bbb.Gaussian(0.5), bbb.ScaleMixture(sigma2=1e-30))
    with pytest.raises(ValueError, match=r"The 'sigma2' parameter of ScaleMixture must be at least 5\.42e-20"):
        model.float()
