"""Mixtures of counts and of heavy tails against scipy: quantiles, intervals, moments and entropies."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import distributions

from bayesbackprop import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    LogLikelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from bayesbackprop.prediction import Predictive, predictive

pytestmark = pytest.mark.identities

# Nearer to 1 a double distinguishes too few levels to compare quantiles.
LEVELS = (1e-9, 1e-4, 0.05, 0.25, 0.5, 0.9, 0.999, 1 - 1e-6)

# Of each likelihood the distribution of scipy for outputs in an array.
COUNTS: dict[str, tuple[Likelihood, Callable[[np.ndarray], Any]]] = {
    "Poisson": (Poisson(), lambda x: stats.poisson(np.exp(x))),
    "NegativeBinomial": (NegativeBinomial(0.5), lambda x: stats.nbinom(2, 1 / (1 + 0.5 * np.exp(x)))),
    "NegativeBinomial, many zeros": (NegativeBinomial(20.0), lambda x: stats.nbinom(0.05, 1 / (1 + 20 * np.exp(x)))),
    "a user's own": (
        LogLikelihood(lambda x, y: y[:, 0], lambda x: distributions.Geometric(logits=-x)),
        lambda x: stats.geom(1 / (1 + np.exp(x)), loc=-1),
    ),
}
NUMBERS: dict[str, tuple[Likelihood, Callable[[np.ndarray], Any]]] = {
    "Gaussian": (Gaussian(0.3), lambda x: stats.norm(x, 0.3)),
    "StudentT": (StudentT(0.5, 3.0), lambda x: stats.t(3, x, 0.5)),
    "StudentT without variance": (StudentT(0.5, 1.5), lambda x: stats.t(1.5, x, 0.5)),
    "Cauchy": (StudentT(2.0, 1.0), lambda x: stats.cauchy(x, 2)),
    "hardly a mean in sight": (StudentT(1.0, 0.3), lambda x: stats.t(0.3, x, 1)),
}
# Three networks for four examples.
OUTPUTS = torch.tensor([[0.0, 3.0, -2.0, 1.0], [0.1, -1.0, -2.5, 6.0], [-0.3, 2.0, -8.0, 1.0]]).double()[..., None]


def mixture(likelihood: Likelihood, dtype: torch.dtype = torch.float64) -> Predictive:
    return predictive(likelihood, OUTPUTS.to(dtype), len(OUTPUTS))


def components(name: str, example: int) -> Any:
    return {**COUNTS, **NUMBERS}[name][1](OUTPUTS[:, example, 0].numpy())


# --- quantiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_the_quantile_of_counts_is_the_first_that_reaches_the_level(name: str, dtype: torch.dtype) -> None:
    levels = [level for level in LEVELS if dtype == torch.float64 or 1e-6 < level < 1 - 1e-6]
    quantiles = mixture(COUNTS[name][0], dtype).quantiles(levels)
    assert quantiles.dtype == dtype
    assert quantiles.shape == (len(levels), 4, 1)
    for example in range(4):
        of_scipy = components(name, example)
        for level, quantile in zip(levels, quantiles[:, example, 0].tolist(), strict=True):
            assert quantile == int(quantile) >= 0
            assert of_scipy.cdf(quantile).mean() >= level > of_scipy.cdf(quantile - 1).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_the_quantile_of_numbers_is_the_root(name: str, dtype: torch.dtype) -> None:
    levels = [level for level in LEVELS if dtype == torch.float64 or 1e-6 < level < 1 - 1e-6]
    quantiles = mixture(NUMBERS[name][0], dtype).quantiles(levels)
    assert quantiles.dtype == dtype
    for example in range(4):
        of_scipy = components(name, example)
        for level, quantile in zip(levels, quantiles[:, example, 0].tolist(), strict=True):
            ends = of_scipy.ppf(level).min() - 1e-6, of_scipy.ppf(level).max() + 1e-6
            root = optimize.brentq(lambda y: of_scipy.cdf(y).mean() - level, *ends, rtol=1e-14)  # noqa: B023
            assert quantile == pytest.approx(root, rel=1e-8 if dtype == torch.float64 else 1e-5, abs=1e-6)


@pytest.mark.parametrize("name", [*COUNTS, *NUMBERS])
def test_one_component_has_the_quantiles_of_scipy(name: str) -> None:
    likelihood, of_scipy = {**COUNTS, **NUMBERS}[name]
    predicted = predictive(likelihood, OUTPUTS[:1], 1)
    levels = (0.01, 0.5, 0.975)
    expected = [of_scipy(OUTPUTS[0, :, 0].numpy()).ppf(level) for level in levels]
    np.testing.assert_allclose(predicted.quantiles(levels)[..., 0].numpy(), expected, rtol=1e-9, atol=1e-9)


def test_the_ends() -> None:
    for likelihood, _ in COUNTS.values():
        assert mixture(likelihood).quantiles([0, 1])[:, 0, 0].tolist() == [0, math.inf]
    for likelihood, _ in NUMBERS.values():
        assert mixture(likelihood).quantiles([0, 1])[:, 0, 0].tolist() == [-math.inf, math.inf]


def test_a_bounded_count_of_a_users_own() -> None:
    """Where torch has no distribution function its probabilities are summed, up to the end of the support."""
    likelihood = LogLikelihood(lambda x, y: y[:, 0], lambda x: distributions.Binomial(12, logits=x))
    predicted = mixture(likelihood)
    quantiles = predicted.quantiles([0, 0.1, 0.5, 0.99, 1])
    for example in range(4):
        of_scipy = stats.binom(12, 1 / (1 + np.exp(-OUTPUTS[:, example, 0].numpy())))
        for level, quantile in zip((0.1, 0.5, 0.99), quantiles[1:4, example, 0].tolist(), strict=True):
            assert of_scipy.cdf(quantile).mean() >= level > of_scipy.cdf(quantile - 1).mean()
    assert quantiles[0].unique().tolist() == [0]
    assert quantiles[4].unique().tolist() == [12]
    probs = np.mean([[stats.binom(12, 1 / (1 + math.exp(-x))).pmf(k) for k in range(13)] for x in OUTPUTS[:, 0, 0]], 0)
    assert predicted.entropy[0, 0].item() == pytest.approx(stats.entropy(probs), rel=1e-9)


def test_a_number_of_a_users_own_needs_a_distribution_function() -> None:
    gamma = LogLikelihood(lambda x, y: y[:, 0], lambda x: distributions.Gamma(x.exp(), torch.ones_like(x)))
    quantiles = mixture(gamma).quantiles([0.0, 0.3, 0.99])
    for example in range(4):
        of_scipy = stats.gamma(np.exp(OUTPUTS[:, example, 0].numpy()))
        expected = [optimize.brentq(lambda y: of_scipy.cdf(y).mean() - q, 0, 1e4, rtol=1e-14) for q in (0.3, 0.99)]  # noqa: B023
        assert quantiles[1:, example, 0].tolist() == pytest.approx(expected, rel=1e-8, abs=1e-9)
    assert (quantiles[0] == 0).all()
    own = LogLikelihood(lambda x, y: y[:, 0], lambda x: distributions.Beta(x.exp(), torch.ones_like(x)))
    with pytest.raises(NotImplementedError, match="Quantiles of a mixture of Beta are not available: it has no cdf"):
        mixture(own).quantiles([0.5])
    for likelihood in (gamma, own):
        with pytest.raises(NotImplementedError, match=r"The entropy of a mixture of (Beta|Gamma) is not available"):
            mixture(likelihood).entropy  # noqa: B018


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), Poisson(), StudentT(1.0, 4.0), Bernoulli()], ids=repr)
def test_an_interval_holds_its_share(likelihood: Likelihood) -> None:
    predicted = mixture(likelihood)
    low, high = predicted.interval(0.5)
    assert torch.equal(torch.stack([low, high]), predicted.quantiles([0.25, 0.75]))
    for bad in (-0.1, 1.1, "0.5", None, [0.5]):
        with pytest.raises(ValueError, match=r"The 'level' parameter of interval must be a float in \[0, 1\]"):
            predicted.interval(bad)  # type: ignore[arg-type]


def test_far_locations_and_scales() -> None:
    """Where there is no mean to start from, the bracket is found all the same, wherever it is."""
    far = predictive(StudentT(1e-3, 0.5), torch.full((1, 2), 1e7).double(), 1)
    assert far.mean.isnan().all()
    np.testing.assert_allclose(
        far.quantiles([0.5, 0.9]).numpy()[:, 0], stats.t.ppf([0.5, 0.9], 0.5, 1e7, 1e-3), rtol=1e-12
    )
    wide = predictive(StudentT(1e30, 1.0), torch.zeros(1, 1).double(), 1)
    assert wide.quantiles([0.75]).item() == pytest.approx(1e30, rel=1e-9)
    many = predictive(Poisson(), torch.tensor([[1e9]], dtype=torch.float64).log(), 1)
    assert many.quantiles([0.01, 0.99]).flatten().tolist() == stats.poisson.ppf([0.01, 0.99], 1e9).tolist()


# --- moments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Poisson", "NegativeBinomial", "a user's own", "StudentT"])
def test_the_law_of_total_variance(name: str) -> None:
    predicted = mixture({**COUNTS, **NUMBERS}[name][0])
    for example in range(4):
        means, variances = components(name, example).stats("mv")
        assert predicted.mean[example].item() == pytest.approx(means.mean())
        assert predicted.aleatoric[example].item() == pytest.approx(variances.mean())
        assert predicted.epistemic[example].item() == pytest.approx(means.var())
        second = (variances + means**2).mean()  # E y^2
        assert predicted.variance[example].item() == pytest.approx(second - means.mean() ** 2)
        assert predicted.stddev[example].item() == pytest.approx(math.sqrt(second - means.mean() ** 2))


@pytest.mark.parametrize("name", ["Poisson", "NegativeBinomial", "StudentT", "Cauchy"])
def test_the_log_probability_is_that_of_the_mixture(name: str) -> None:
    y = torch.tensor([[0.0], [3.0], [1.0], [40.0]]).double()
    found = mixture({**COUNTS, **NUMBERS}[name][0]).log_prob(y)
    for example in range(4):
        of_scipy = components(name, example)
        log_probs = (of_scipy.logpmf if name in COUNTS else of_scipy.logpdf)(y[example].item())
        expected = np.logaddexp.reduce(log_probs) - math.log(3)
        assert found[example].item() == pytest.approx(expected, rel=1e-10)


def test_ordered_classes_are_classes() -> None:
    likelihood = Ordinal(4)
    predicted = mixture(likelihood)
    probs = likelihood.distribution(OUTPUTS.flatten(0, 1)).probs.reshape(3, 4, 1, 4).mean(0).detach()
    torch.testing.assert_close(predicted.mean, probs)
    assert predicted.quantiles([0.5]).shape == (1, 4, 1, 4)
    torch.testing.assert_close(predicted.entropy, -(probs * probs.log()).sum(-1))
    assert not predicted.mean.requires_grad


def test_targets_that_cannot_be_are_refused() -> None:
    for likelihood, value in ((Poisson(), -1.0), (NegativeBinomial(1.0), 0.5), (StudentT(1.0, 1.0), math.nan)):
        with pytest.raises(ValueError, match="within the support"):
            mixture(likelihood).log_prob(torch.full((4, 1), value).double())
        with pytest.raises(ValueError, match=r"The 'target' parameter of Predictive\.log_prob must be"):
            mixture(likelihood).log_prob(torch.zeros(4))


# --- entropies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
def test_the_entropy_of_counts_is_their_sum(name: str) -> None:
    found = mixture(COUNTS[name][0]).entropy
    assert found.shape == (4, 1)
    for example in range(4):
        of_scipy = components(name, example)
        last = int(of_scipy.isf(1e-15).max())
        probs = np.zeros(last + 1)
        for part in range(3):
            probs += COUNTS[name][1](OUTPUTS[part, example, 0].numpy()).pmf(np.arange(last + 1)) / 3
        assert found[example].item() == pytest.approx(stats.entropy(probs / probs.sum()), rel=1e-8)


@pytest.mark.parametrize("name", NUMBERS)
def test_the_entropy_of_numbers_is_their_integral(name: str) -> None:
    """By the trapezoidal rule in u, y = m + s sinh(u), which sees the middle and the furthest tail."""
    found = mixture(NUMBERS[name][0]).entropy
    u = np.linspace(-120, 120, 400_001)
    for example in range(4):
        of_scipy = components(name, example)
        y = of_scipy.median().mean() + 0.5 * np.sinh(u)
        p = of_scipy.pdf(y[:, None]).mean(1)
        integrand = -p * np.log(np.maximum(p, 1e-300)) * 0.5 * np.cosh(u)
        assert found[example].item() == pytest.approx(np.trapezoid(integrand, u), abs=1e-5)


@pytest.mark.parametrize("df", [0.3, 1.0, 4.0, 30.0, 1e5])
def test_the_entropy_of_one_student(df: float) -> None:
    entropy = predictive(StudentT(2.0, df), torch.zeros(1, 1, 1).double(), 1).entropy
    assert entropy.item() == pytest.approx(stats.t(df, 0, 2).entropy(), abs=1e-5)


def test_counts_that_are_too_many_have_no_entropy() -> None:
    predicted = predictive(NegativeBinomial(1.0), torch.full((1, 1), math.log(1e7)).double(), 1)
    with pytest.raises(NotImplementedError, match=r"spread over [\d,]+ values is not available \(at most 1,048,576\)"):
        predicted.entropy  # noqa: B018
    assert predictive(Poisson(), torch.full((1, 1), math.log(1e6)).double(), 1).entropy.item() == pytest.approx(
        0.5 * math.log(2 * math.pi * math.e * 1e6), abs=1e-6
    )


def test_predictions_of_other_shapes() -> None:
    outputs = torch.randn(5, 4, 2, 3).double()
    for likelihood in (Poisson(), NegativeBinomial(1.0), StudentT(1.0, 3.0), Gaussian(1.0)):
        predicted = predictive(likelihood, outputs, 5)
        flat = predictive(likelihood, outputs.flatten(2), 5)
        for name in ("mean", "variance", "entropy"):
            assert getattr(predicted, name).shape == (4, 2, 3)
            torch.testing.assert_close(getattr(predicted, name).flatten(1), getattr(flat, name))
        torch.testing.assert_close(predicted.quantiles([0.1, 0.5]).flatten(2), flat.quantiles([0.1, 0.5]))
        assert predicted.sample(7).shape == (7, 4, 2, 3)


# --- samples ---------------------------------------------------------------------------------------------------------

SAMPLED: dict[str, Likelihood] = {
    **{name: likelihood for name, (likelihood, _) in {**COUNTS, **NUMBERS}.items()},
    "Bernoulli": Bernoulli(),
    "Ordinal": Ordinal(4),
    "a user's own gamma": LogLikelihood(
        lambda x, y: y[:, 0], lambda x: distributions.Gamma(x.exp(), torch.ones_like(x))
    ),
    "a user's own beta": LogLikelihood(lambda x, y: y[:, 0], lambda x: distributions.Beta(x.exp(), torch.ones_like(x))),
    "a user's own of several kinds": LogLikelihood(
        lambda x, y: y[:, 0], lambda x: distributions.LogNormal(x, torch.ones_like(x))
    ),
    "a user's own Cauchy": LogLikelihood(lambda x, y: y[:, 0], lambda x: distributions.Cauchy(x, torch.ones_like(x))),
    "a user's own exponential": LogLikelihood(lambda x, y: y[:, 0], lambda x: distributions.Exponential(x.exp())),
    "a user's own binomial": LogLikelihood(lambda x, y: y[:, 0], lambda x: distributions.Binomial(9, logits=x)),
    "a user's own Laplace": LogLikelihood(lambda x, y: y[:, 0], lambda x: distributions.Laplace(x, torch.ones_like(x))),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_come_from_the_generator_that_is_given(name: str) -> None:
    """The same seed, the same samples; torch's own generator stays as it is."""
    predicted = mixture(SAMPLED[name])
    before = torch.get_rng_state()
    first, again, other = (predicted.sample(9, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.shape == (9, 4, 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(7)
    usual = predicted.sample(9)
    assert not torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(predicted.sample(9), usual)
    assert not first.requires_grad


def test_classes_are_sampled_by_their_number() -> None:
    predicted = predictive(Categorical(), torch.randn(3, 5, 4, 2), 3)
    samples = predicted.sample(11)
    assert samples.shape == (11, 5, 2)
    assert samples.dtype == torch.int64
    assert predicted.log_prob(samples[0]).shape == (5, 2)


def test_each_sample_is_of_one_draw() -> None:
    """Of networks that are certain: all examples of a sample are of the same one, and all draws have their turn."""
    outputs = torch.arange(5.0)[:, None, None].expand(5, 3, 1) + torch.tensor([0.0, 100.0, 200.0])[None, :, None]
    samples = predictive(Gaussian(1e-4), outputs, 5).sample(400).round()[..., 0]
    draw = samples[:, 0]
    assert torch.equal(samples, draw[:, None] + torch.tensor([0.0, 100.0, 200.0]))
    counts = draw.long().bincount(minlength=5)
    assert len(counts) == 5
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    assert draw[:20].unique().numel() > 1  # not one draw after the other
    lag = (draw[1:] == draw[:-1]).float().mean().item()
    assert lag == pytest.approx(0.2, abs=4 * math.sqrt(0.2 * 0.8 / 399))


def test_no_two_samples_are_the_same_number() -> None:
    samples = predictive(Gaussian(1.0), torch.zeros(2, 1, 1).double(), 2).sample(1000)
    assert samples.unique().numel() == 1000


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None, "3"])
def test_bad_counts_are_refused(count: Any) -> None:
    with pytest.raises(ValueError, match=r"The 'count' parameter of sample must be an int in \[1, inf\)"):
        mixture(Poisson()).sample(count)


@pytest.mark.parametrize("generator", [0, "cpu", torch.default_generator.manual_seed])
def test_bad_generators_are_refused(generator: Any) -> None:
    with pytest.raises(ValueError, match=r"The 'generator' parameter of sample must be None or a torch\.Generator"):
        mixture(Poisson()).sample(3, generator)
