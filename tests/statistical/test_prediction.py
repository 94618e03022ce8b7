"""Quantiles of a predictive distribution hold their share of samples, and samples have its moments."""

import pytest
import torch

from bayesbackprop import Bernoulli, Categorical, Gaussian, Likelihood, NegativeBinomial, Ordinal, Poisson, StudentT
from bayesbackprop.prediction import predictive
from mixtures import LEVELS, MIXTURE, from_outputs, mixture_parts
from ztests import assert_mean, assert_variance

pytestmark = pytest.mark.statistical


def test_quantiles_hold_their_share_of_samples():
    quantiles = from_outputs(Gaussian("per-input"), MIXTURE).quantiles(LEVELS)
    for example in range(2):
        means, scales = (torch.from_numpy(part) for part in mixture_parts(example))
        which = torch.randint(3, (1_000_000,))
        y = means[which] + scales[which] * torch.randn(1_000_000, dtype=torch.float64)
        below = (y.unsqueeze(1) < quantiles[:, example, 0]).double()
        assert_mean(below, torch.tensor(LEVELS).double(), f"samples below the quantiles of example {example}")


# Three networks for two examples of two targets.
OUTPUTS = torch.tensor([[[0.0, 1.0], [2.0, -1.0]], [[0.5, 1.5], [-1.0, -1.5]], [[-1.0, 1.2], [1.0, 0.0]]]).double()
SAMPLES = 200_000


@pytest.mark.parametrize(
    "likelihood", [Poisson(), NegativeBinomial(0.5), StudentT(0.5, 9.0), Gaussian("per-input")], ids=repr
)
def test_samples_have_the_moments_of_the_prediction(likelihood: Likelihood) -> None:
    predicted = predictive(likelihood, OUTPUTS, 3)
    samples = predicted.sample(SAMPLES, torch.Generator().manual_seed(1))
    assert_mean(samples, predicted.mean, "mean of the samples")
    assert_variance(samples, predicted.variance, "variance of the samples")


@pytest.mark.parametrize("likelihood", [Bernoulli(), Ordinal(4)], ids=repr)
def test_samples_of_classes_are_as_frequent_as_they_are_probable(likelihood: Likelihood) -> None:
    predicted = predictive(likelihood, OUTPUTS, 3)
    samples = predicted.sample(SAMPLES, torch.Generator().manual_seed(1))
    classes = torch.nn.functional.one_hot(samples, 4) if isinstance(likelihood, Ordinal) else samples
    assert_mean(classes, predicted.mean, "share of each class")


def test_samples_of_several_classes() -> None:
    predicted = predictive(Categorical(), OUTPUTS, 3)
    samples = predicted.sample(SAMPLES, torch.Generator().manual_seed(1))
    assert_mean(torch.nn.functional.one_hot(samples, 2), predicted.probs, "share of each class")


@pytest.mark.parametrize("likelihood", [StudentT(0.5, 1.0), StudentT(1.0, 2.5)], ids=repr)
def test_samples_without_moments_have_their_quantiles(likelihood: Likelihood) -> None:
    predicted = predictive(likelihood, OUTPUTS, 3)
    samples = predicted.sample(SAMPLES, torch.Generator().manual_seed(1))
    below = torch.stack([(samples < quantile).double() for quantile in predicted.quantiles(LEVELS)], dim=1)
    assert_mean(below, torch.tensor(LEVELS).double()[:, None, None], "samples below the quantiles")


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(0.5), StudentT(0.5, 2.0), Gaussian(0.3)], ids=repr)
def test_the_entropy_is_the_mean_surprise_of_samples(likelihood: Likelihood) -> None:
    predicted = predictive(likelihood, OUTPUTS, 3)
    samples = predicted.sample(4000, torch.Generator().manual_seed(1))
    each = torch.stack([-predicted.log_prob(sample) for sample in samples])
    assert_mean(each, predicted.entropy, "surprise of a sample")
