"""The priors: densities that integrate to 1, equal scipy's and torch's, and keep their gradient in the tails."""

import math

import pytest
import torch
from scipy import stats
from scipy.special import expit, logsumexp
from torch import distributions

from bayesbackprop import Laplace, LogDensity, Normal, ScaleMixture

pytestmark = pytest.mark.identities

SIGMAS = (1e-8, 1e-6, 1e-4, 1e-2, 1.0, 10.0, 1e3)
DTYPES = (torch.float32, torch.float64)
CAUCHY = LogDensity(lambda w: -torch.log1p(w.square()) - math.log(math.pi), name="Cauchy")


def log_density(prior, w: float) -> float:
    """log P(w) in Python's doubles, written anew."""
    if isinstance(prior, Normal):
        return stats.norm.logpdf(w, scale=prior.sigma)
    if isinstance(prior, Laplace):
        return -abs(w) / prior.scale - math.log(2 * prior.scale)  # scipy's is -inf in the tails
    both = [stats.norm.logpdf(w, scale=prior.sigma1), stats.norm.logpdf(w, scale=prior.sigma2)]
    return float(logsumexp(both, b=[prior.pi, 1 - prior.pi]))


def slope(prior, w: float) -> float:
    """d log P(w) / dw, by hand."""
    if isinstance(prior, Normal):
        return -w / prior.sigma**2
    if isinstance(prior, Laplace):
        return -math.copysign(1, w) / prior.scale
    odds = math.inf if prior.pi == 1 else -math.inf
    if 0 < prior.pi < 1:
        odds = math.log(prior.pi) - math.log(1 - prior.pi)
        odds += stats.norm.logpdf(w, scale=prior.sigma1) - stats.norm.logpdf(w, scale=prior.sigma2)
    slab = expit(odds)  # the probability that w comes from the first component
    return -w * (slab / prior.sigma1**2 + expit(-odds) / prior.sigma2**2)


MIXTURES = [ScaleMixture(0.25, one, two) for one in SIGMAS for two in SIGMAS]
PRIORS = [Normal(s) for s in SIGMAS] + [Laplace(s) for s in SIGMAS] + MIXTURES


@pytest.mark.parametrize("prior", [*PRIORS, CAUCHY], ids=repr)
def test_integrates_to_one(prior):
    # On w = +-exp(t) the integrand is smooth whatever the scales, and the trapezium rule converges geometrically.
    t = torch.linspace(math.log(min(SIGMAS)) - 33, math.log(max(SIGMAS)) + 33, 40_001, dtype=torch.float64)
    both_sides = sum(torch.trapezoid((prior.log_density(sign * t.exp()) + t).exp(), t) for sign in (1, -1))
    assert float(both_sides) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_value_and_gradient_at_every_scale(prior, dtype):
    sizes = torch.tensor([1e4, 100.0, 1.0, 1e-2, 1e-5, 1e-9], dtype=dtype)
    w = torch.cat([sizes, -sizes]).requires_grad_()
    value = prior.log_density(w)
    (gradient,) = torch.autograd.grad(value.sum(), w)
    assert value.dtype == dtype
    expected = torch.tensor([log_density(prior, x) for x in w.tolist()], dtype=torch.float64)
    expected_gradient = torch.tensor([slope(prior, x) for x in w.tolist()], dtype=torch.float64)
    # A value of size v, made of terms of about 20, is known to rtol * (v + 20); the share of a mixture's components
    # depends on the difference of two such values.
    rtol = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(value.double(), expected, rtol=rtol, atol=20 * rtol)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=100 * rtol, atol=0)
    assert (gradient.sign() == -w.sign()).all()  # none is 0, the tails' least of all


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prior", [Normal(0.3), Laplace(2.0), ScaleMixture(0.5, 1.0, 1e-3)], ids=repr)
def test_gradient_at_zero_is_zero(prior, dtype):
    w = torch.zeros(3, dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(prior.log_density(w).sum(), w)
    assert torch.equal(gradient, torch.zeros_like(w))


@pytest.mark.parametrize(
    ("prior", "reference"),
    [
        (Normal(0.3), distributions.Normal(0.0, 0.3)),
        (Normal(), distributions.Normal(0.0, 1.0)),
        (Laplace(0.7), distributions.Laplace(0.0, 0.7)),
        (Laplace(), distributions.Laplace(0.0, 1.0)),
        (
            ScaleMixture(0.3, 2.0, 0.1),
            distributions.MixtureSameFamily(
                distributions.Categorical(torch.tensor([0.3, 0.7])),
                distributions.Normal(torch.zeros(2), torch.tensor([2.0, 0.1])),
            ),
        ),
    ],
    ids=repr,
)
def test_equals_torch_distributions(prior, reference):
    w = torch.linspace(-3, 3, 101).reshape(1, 101)
    torch.testing.assert_close(prior.log_density(w), reference.log_prob(w), rtol=1e-5, atol=1e-5)


def test_default_mixture_is_the_middle_of_the_paper_grid():
    assert ScaleMixture() == ScaleMixture(pi=0.5, sigma1=math.exp(-1), sigma2=math.exp(-7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pi", "sigma"), [(1, 0.5), (1.0, 0.5), (0, 1e-3), (0.0, 1e-3)])
def test_mixture_of_one_component_is_a_normal(pi, sigma, dtype):
    w = torch.tensor([-1e4, -1.0, 0.0, 1e-3, 0.2, 1e4], dtype=dtype, requires_grad=True)
    mixture = ScaleMixture(pi, 0.5, 1e-3).log_density(w)
    alone = Normal(sigma).log_density(w)
    assert torch.equal(mixture, alone)
    assert torch.equal(torch.autograd.grad(mixture.sum(), w)[0], torch.autograd.grad(alone.sum(), w)[0])


def test_swapping_the_components_changes_nothing():
    w = torch.linspace(-2, 2, 50, dtype=torch.float64)
    one, other = ScaleMixture(0.2, 1.0, 0.01), ScaleMixture(0.8, 0.01, 1.0)
    torch.testing.assert_close(one.log_density(w), other.log_density(w), rtol=1e-13, atol=1e-13)


# --- errors -----------------------------------------------------------------------------------------------------------

NOT_NUMBERS = [True, False, float("nan"), "0.1", None, [1.0], torch.tensor(1.0), 1j]
CONSTRAINTS = {
    "a float in (0, inf)": [(Normal, "sigma"), (Laplace, "scale"), (ScaleMixture, "sigma1"), (ScaleMixture, "sigma2")],
    "a float in [0, 1]": [(ScaleMixture, "pi")],
}
OUTSIDE = {
    "a float in (0, inf)": [-1, 0, -0.0, float("inf"), -float("inf")],
    "a float in [0, 1]": [-1e-9, 1.0001, float("inf")],
}


@pytest.mark.parametrize(
    ("kind", "name", "constraint", "value"),
    [
        (kind, name, constraint, value)
        for constraint, parameters in CONSTRAINTS.items()
        for kind, name in parameters
        for value in NOT_NUMBERS + OUTSIDE[constraint]
    ],
)
def test_bad_parameters_are_refused(kind, name, constraint, value):
    with pytest.raises(ValueError, match="parameter of") as error:
        kind(**{name: value})
    got = "a tensor of shape [] and type torch.float32" if isinstance(value, torch.Tensor) else repr(value)
    assert str(error.value) == f"The '{name}' parameter of {kind.__name__} must be {constraint}. Got {got} instead."


@pytest.mark.parametrize(
    "function",
    [lambda w: w.sum(), lambda w: w[:-1], lambda w: w.unsqueeze(0), lambda w: 0.0, lambda w: None],
    ids=["summed", "shorter", "one dimension more", "a float", "None"],
)
def test_log_density_of_the_wrong_shape_is_refused(function):
    with pytest.raises(ValueError, match=r"The 'function' parameter of LogDensity\(mine\) must be .*shape \[3\]"):
        LogDensity(function, name="mine").log_density(torch.zeros(3))


@pytest.mark.parametrize("function", [None, 3.0, "cauchy"])
def test_log_density_of_no_function_is_refused(function):
    with pytest.raises(ValueError, match=r"The 'function' parameter of LogDensity"):
        LogDensity(function)


def test_log_density_is_the_function():
    w = torch.randn(2, 3, requires_grad=True)
    torch.testing.assert_close(CAUCHY.log_density(w), distributions.Cauchy(0.0, 1.0).log_prob(w))
    assert torch.autograd.grad(CAUCHY.log_density(w).sum(), w)[0].abs().min() > 0


@pytest.mark.identities
@pytest.mark.parametrize(
    "prior", [ScaleMixture(), ScaleMixture(0.25, 0.01, 1.0), ScaleMixture(0.0), ScaleMixture(1.0)], ids=repr
)
def test_the_second_derivative_of_a_mixture(prior: ScaleMixture) -> None:
    """It is finite wherever the components are, and the one of finite differences."""
    w = torch.tensor([0.0, 1e-4, 1e-3, 0.01, 0.3, 5.0, 1e3], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(prior.log_density(w).sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    step = 1e-6 * torch.maximum(w.detach().abs(), torch.tensor(1e-3, dtype=torch.float64))
    ends = [(w.detach() + sign * step).requires_grad_() for sign in (1, -1)]
    above, below = (torch.autograd.grad(prior.log_density(end).sum(), end)[0] for end in ends)
    torch.testing.assert_close(second, (above - below) / (2 * step), rtol=1e-4, atol=1e-3)


def test_what_has_only_a_density_cannot_be_drawn_from():
    with pytest.raises(NotImplementedError, match="cannot be drawn from"):
        LogDensity(torch.neg).sample(torch.empty(2), torch.Generator())
