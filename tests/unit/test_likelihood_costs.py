"""The cost of a likelihood is the mean of its log-probabilities, and its slope the gradient of that."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesbackprop import Categorical, FreeEnergy, Gaussian, Likelihood
from engine_parameters import DTYPES
from mlps import LIKELIHOODS, assert_same, bayesian, by_backward, net_of, twins
from opaque import Opaque

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("positions", [(), (3,), (2, 3)])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_cost_is_the_mean_and_the_slope_its_gradient(
    likelihood: str, positions: tuple[int, ...], batch: int, dtype: torch.dtype
) -> None:
    if positions and likelihood in ("own", "function"):
        pytest.skip("these take two dimensions")
    given = LIKELIHOODS[likelihood][0]().to(dtype)
    output = 3 * torch.randn(batch, 4, *positions, dtype=dtype)
    target = {
        "categorical": lambda: torch.randint(4, (batch, *positions)),
        "bernoulli": lambda: torch.randint(2, output.shape),
        **dict.fromkeys(("poisson", "negative binomial", "ordinal"), lambda: torch.randint(6, output.shape)),
        "per-input": lambda: torch.randn_like(output.chunk(2, -1)[0]),
    }.get(likelihood, lambda: torch.randn_like(output))
    if likelihood == "per-input" and output.shape[-1] % 2:
        output = torch.cat([output, output], -1)
    y = target()
    accuracy = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    leaf = output.clone().requires_grad_()
    cost = given.cost(leaf, y)
    mean = -given.log_prob(leaf, y).mean()
    assert cost.shape == ()
    torch.testing.assert_close(cost, mean, **accuracy)
    variables = [leaf, *given.parameters()]
    expected = torch.autograd.grad(mean, variables)
    torch.testing.assert_close(torch.autograd.grad(cost, variables), expected, **accuracy)
    before = output.clone()
    assert given.has_slope == (likelihood in ("gaussian", "bernoulli", "categorical", "per-input"))
    if given.has_slope and not positions:
        slope = given.slope(output, y)
        assert torch.equal(output, before)
        assert slope.dtype == dtype
        torch.testing.assert_close(slope, expected[0], **accuracy)


def test_a_single_class_and_far_logits() -> None:
    one = torch.randn(5, 1)
    assert torch.equal(Categorical().slope(one, torch.zeros(5, dtype=torch.int64)), torch.zeros(5, 1))
    far = torch.tensor([[1000.0, -1000.0, 0.0]])
    assert Categorical().slope(far, torch.tensor([1])).tolist() == [[1.0, -1.0, 0.0]]


def test_targets_of_another_precision() -> None:
    """Single precision in, single precision out."""
    output, target = torch.randn(5, 3), torch.randn(5, 3).double()
    for likelihood in (Gaussian(0.3), Gaussian("learnt")):
        assert likelihood.cost(output, target).dtype == torch.float32
    assert Gaussian(0.3).slope(output, target).dtype == torch.float32


@pytest.mark.parametrize("wrap", [lambda net: net, Opaque], ids=["fully connected", "any module"])
@pytest.mark.parametrize("wrong", [-100, -1, 4, 2**40, 1 - 2**63])
def test_targets_out_of_range_are_refused(wrong: int, wrap: Any) -> None:
    """-100 is what torch ignores: here no target is."""
    model = bayesian(wrap(net_of([3, 4])), Categorical())
    free_energy = FreeEnergy(model, n=40)
    y = torch.tensor([0, wrong, 3])
    low, high = min(0, wrong), max(3, wrong)
    message = rf"must be class indices in \[0, 3\]\. Got indices from {low} to {high} instead\."
    with pytest.raises(ValueError, match=message):
        free_energy(torch.randn(3, 3), y)
    assert free_energy.step == 0
    for function in (Categorical().cost, Categorical().log_prob):
        with pytest.raises(ValueError, match=message):
            function(torch.randn(3, 4), y)
    assert all(parameter.grad is None for parameter in model.parameters())


class OnlyLogProb(Categorical):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return -F.cross_entropy(output, target, label_smoothing=0.5, reduction="none")


class OnlyDistribution(Categorical):
    def distribution(self, output: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=output / 2)


class CostAndSlope(Categorical):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return -F.cross_entropy(output, target, label_smoothing=0.5, reduction="none")

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.5)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        wanted = 0.5 * F.one_hot(target, output.shape[1]) + 0.5 / output.shape[1]
        return (output.softmax(1) - wanted) / len(target)


class Grandchild(OnlyLogProb):
    pass


class OnlyCost(Categorical):
    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.5)


class LogProbAndCost(OnlyCost):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return -F.cross_entropy(output, target, label_smoothing=0.5, reduction="none")

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.5)


@pytest.mark.equivalence
@pytest.mark.parametrize("kind", [OnlyLogProb, OnlyDistribution, CostAndSlope, Grandchild, OnlyCost, LogProbAndCost])
def test_a_subclass_has_the_slope_of_its_own_cost(kind: type[Likelihood]) -> None:
    x, y = torch.randn(5, 3).double(), torch.randint(4, (5,))
    results = []
    for model, context in twins(net_of([3, 6, 4]).double(), kind()):
        with context:
            cost = FreeEnergy(model, n=40)(x, y)
            results.append([cost.detach(), *by_backward(cost, model)])
    assert_same(results[0], results[1:], torch.float64)


def test_what_a_subclass_keeps() -> None:
    assert OnlyLogProb.cost is Grandchild.cost is Likelihood.cost
    assert not any(kind.has_slope for kind in (OnlyLogProb, Grandchild, OnlyCost, LogProbAndCost, Likelihood))
    assert OnlyDistribution.cost is Categorical.cost
    assert OnlyDistribution.slope is Categorical.slope
    assert "slope" in vars(CostAndSlope)
    assert all(kind.has_slope for kind in (Categorical, Gaussian, OnlyDistribution, CostAndSlope))
