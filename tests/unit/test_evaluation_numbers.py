"""Metrics of predicted numbers against integrals and by hand."""

import math

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, distributions

from bayesbackprop import Categorical, Gaussian, LogLikelihood
from bayesbackprop.evaluation import covered, crps, nll, rmse
from bayesbackprop.prediction import Predictive, predictive

pytestmark = pytest.mark.identities

LEVELS = [0.1, 0.5, 0.9]


def mixture(draws: int, rows: int) -> tuple[Predictive, Tensor, Tensor]:
    """A mixture of Gaussians with noise of their own, and their means and noises ``[draws, rows]``."""
    mean = torch.randn(draws, rows, dtype=torch.float64)
    raw = torch.randn(draws, rows, dtype=torch.float64)
    output = torch.stack([mean, raw], -1)
    return predictive(Gaussian("per-input"), output, draws), mean, torch.nn.functional.softplus(raw)


def laplace(rows: int) -> Predictive:
    """Of components for which no formula is used."""

    def distribution(output: Tensor) -> distributions.Laplace:
        return distributions.Laplace(output, torch.ones_like(output))

    likelihood = LogLikelihood(lambda output, target: distribution(output).log_prob(target).sum(1), distribution)
    return predictive(likelihood, torch.zeros(1, rows, 1, dtype=torch.float64), 1)


@pytest.mark.parametrize("draws", [1, 2, 7])
def test_the_crps_is_its_integral(draws: int) -> None:
    prediction, mean, scale = mixture(draws, 4)
    targets = 2 * torch.randn(4, 1, dtype=torch.float64)
    for row, found in enumerate(crps(prediction, targets)[:, 0].tolist()):
        components = stats.norm(mean[:, row].numpy(), scale[:, row].numpy())
        y = float(targets[row])
        below, _ = integrate.quad(lambda z, p: p.cdf(z).mean() ** 2, -40, y, (components,), limit=200)
        above, _ = integrate.quad(lambda z, p: p.sf(z).mean() ** 2, y, 40, (components,), limit=200)
        assert found == pytest.approx(below + above, rel=1e-6)


def test_the_crps_does_not_depend_on_how_many_elements_are_done_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction, _, _ = mixture(5, 11)
    targets = torch.randn(11, 1, dtype=torch.float64)
    whole = crps(prediction, targets)
    monkeypatch.setattr("bayesbackprop.evaluation._CHUNK", 10)
    torch.testing.assert_close(crps(prediction, targets), whole, rtol=1e-12, atol=0)


def test_the_crps_by_quantiles_is_the_formula_for_laplace() -> None:
    y = torch.tensor([0.0, -0.5, 1.0, 4.0], dtype=torch.float64)[:, None]
    expected = y.abs() + (-y.abs()).exp() - 0.75  # Jordan, Krüger and Lerch (2019)
    torch.testing.assert_close(crps(laplace(4), y), expected, rtol=2e-3, atol=0)


def test_the_crps_of_a_point_is_the_distance() -> None:
    prediction = predictive(Gaussian(1e-9), torch.tensor([[[2.0], [5.0]]], dtype=torch.float64), 1)
    targets = torch.tensor([[1.0], [5.5]], dtype=torch.float64)
    torch.testing.assert_close(crps(prediction, targets)[:, 0], torch.tensor([1.0, 0.5], dtype=torch.float64))


def test_intervals_lie_between_the_quantiles() -> None:
    prediction, _, _ = mixture(6, 200)
    targets = torch.randn(200, 1, dtype=torch.float64)
    for level, found in zip(LEVELS, covered(prediction, targets, LEVELS), strict=True):
        low, high = prediction.quantiles([(1 - level) / 2, (1 + level) / 2])
        assert torch.equal(found, (low <= targets) & (targets <= high))


def test_intervals_of_other_distributions_lie_between_their_quantiles() -> None:
    targets = torch.linspace(-3, 3, 61, dtype=torch.float64)[:, None]
    half = -math.log(1 - 0.5)  # the central half of a Laplace distribution is +- log 2
    assert torch.equal(covered(laplace(61), targets, [0.5])[0], targets.abs() <= half)


def test_rmse_and_nll_by_hand() -> None:
    prediction = predictive(Gaussian(0.5), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 1)
    targets = torch.tensor([[1.0, 4.0], [3.0, 4.0]])
    assert rmse(prediction, targets) == 1.0
    constant = 2 * (math.log(0.5) + 0.5 * math.log(2 * math.pi))  # of the two elements of an example
    assert nll(prediction, targets) == pytest.approx(constant + 0.5 * (2 / 0.5) ** 2 / 2, rel=1e-6)


@pytest.mark.parametrize("metric", [rmse, crps, lambda prediction, targets: covered(prediction, targets, [0.5])])
def test_classes_are_no_numbers(metric: object) -> None:
    prediction = predictive(Categorical(), torch.randn(1, 4, 3), 1)
    with pytest.raises(ValueError, match="a prediction of numbers"):
        metric(prediction, torch.ones(4))  # type: ignore[operator]
