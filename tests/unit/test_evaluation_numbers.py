"""Metrics of predicted numbers against integrals and by hand."""

import math

import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor, distributions

from bayesbackprop import (
    Categorical,
    Gaussian,
    Likelihood,
    LogLikelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from bayesbackprop._crps import by_quadrature, of_gaussians
from bayesbackprop.evaluation import _quantiles, covered, crps, nll, rmse
from bayesbackprop.prediction import Predictive, ValuePredictive, predictive

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
    monkeypatch.setattr("bayesbackprop._crps._CHUNK", 10)
    torch.testing.assert_close(crps(prediction, targets), whole, rtol=1e-12, atol=0)


def test_the_crps_by_quantiles_is_the_formula_for_laplace() -> None:
    y = torch.tensor([0.0, -0.5, 1.0, 4.0], dtype=torch.float64)[:, None]
    expected = y.abs() + (-y.abs()).exp() - 0.75  # Jordan, Krüger and Lerch (2019)
    torch.testing.assert_close(crps(laplace(4), y), expected, rtol=2e-3, atol=0)


def test_the_crps_by_quadrature_is_the_closed_form_of_gaussians() -> None:
    """Of one draw and of many, that agree and that do not."""
    for draws, spread, within in ((1, 0.0, 1e-4), (2, 30.0, 5e-3), (100, 0.3, 1e-3), (100, 10.0, 0.02)):
        mean = spread * torch.randn(draws, 200, dtype=torch.float64)
        scale = 0.5 + torch.rand(draws, 200, dtype=torch.float64)
        y = mean[0] + torch.randn(200, dtype=torch.float64)
        exact = of_gaussians(mean, scale, y)
        for kind in (distributions.Normal, Hidden):
            prediction = ValuePredictive(kind(mean.flatten(), scale.flatten()), draws)
            found = by_quadrature(prediction.cdf, _quantiles(prediction), draws, y, whole=False)
            assert found.mean() == pytest.approx(float(exact.mean()), rel=1e-3)
            assert float((found - exact).abs().max()) < within * float(exact.mean())


class Hidden(distributions.Normal):
    """Without quantiles of its own."""

    def icdf(self, value: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("df", [2.1, 4.0, 50.0])
def test_the_crps_of_student_is_the_formula(df: float) -> None:
    z = torch.tensor([0.0, -0.5, 1.0, 4.0, 300.0], dtype=torch.float64)[:, None]
    prediction = predictive(StudentT(2.0, df), torch.zeros(1, 5, 1, dtype=torch.float64), 1)
    t = stats.t(df)
    scaled = z.numpy()
    tail = 2 * t.pdf(scaled) * (df + scaled**2) / (df - 1)  # Jordan, Krüger and Lerch (2019)
    constant = 2 * math.sqrt(df) / (df - 1) * special.beta(0.5, df - 0.5) / special.beta(0.5, df / 2) ** 2
    expected = scaled * (2 * t.cdf(scaled) - 1) + tail - constant
    torch.testing.assert_close(crps(prediction, 2 * z), torch.from_numpy(2 * expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(0.5)], ids=["Poisson", "NegativeBinomial"])
@pytest.mark.parametrize(("log_mean", "most"), [(1.0, 0), (1.0, 4096), (5.0, 4096), (5.0, 0)])
def test_the_crps_of_counts_is_their_sum(
    likelihood: Likelihood, log_mean: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summed where they are few, and by quadrature."""
    output = log_mean + 0.5 * torch.randn(7, 20, 1, dtype=torch.float64)
    targets = torch.poisson(output[0].exp())
    prediction = predictive(likelihood, output, 7)
    numbers = torch.arange(5000, dtype=torch.float64)[:, None, None]
    probs = prediction.components.log_prob(numbers).exp().reshape(5000, 7, 20).mean(1)
    expected = (probs.cumsum(0) - (numbers[:, 0] >= targets[:, 0]).double()).square().sum(0)
    monkeypatch.setattr("bayesbackprop.evaluation._MOST_COUNTS", most)
    torch.testing.assert_close(crps(prediction, targets)[:, 0], expected, rtol=1e-6 if most else 5e-3, atol=0)


def test_heavy_tails_and_counts_need_few_values_of_their_distribution_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By bisection they were thousands for each element."""
    asked = []
    of_student = ValuePredictive.cdf

    def cdf(self: ValuePredictive, value: Tensor) -> Tensor:
        asked.append(value)
        return of_student(self, value)

    monkeypatch.setattr(ValuePredictive, "cdf", cdf)
    prediction = predictive(StudentT(1.0, 4.0), torch.randn(100, 3, 1), 100)
    crps(prediction, torch.randn(3, 1))
    assert len(asked) < 60
    covered(prediction, torch.randn(3, 1), LEVELS)
    assert len(asked) < 62


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(0.5)], ids=["Poisson", "NegativeBinomial"])
def test_intervals_of_counts_lie_between_their_quantiles(likelihood: Likelihood) -> None:
    prediction = predictive(likelihood, 1 + torch.randn(6, 100, 1, dtype=torch.float64), 6)
    targets = torch.randint(20, (100, 1)).double()
    levels = [0.0, *LEVELS, 1.0]
    for level, found in zip(levels, covered(prediction, targets, levels), strict=True):
        low, high = prediction.quantiles([(1 - level) / 2, (1 + level) / 2])
        assert torch.equal(found, (low <= targets) & (targets <= high))


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
