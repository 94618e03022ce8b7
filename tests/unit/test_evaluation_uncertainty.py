"""Measures of uncertainty against brute force, and the decomposition of the Brier score."""

import itertools
import math

import pytest
import torch

from bayesbackprop.evaluation import auroc, brier, fpr95, risk_coverage

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("values", [3, 1000])  # many ties, and few
def test_auroc_is_the_fraction_of_pairs_in_order(values: int) -> None:
    inside, outside = torch.randint(values, (40,)).float(), torch.randint(values, (30,)).float() + values / 5
    pairs = [(a > b) + 0.5 * (a == b) for a in outside.tolist() for b in inside.tolist()]
    assert auroc(inside, outside) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert auroc(inside, outside) + auroc(outside, inside) == pytest.approx(1, abs=1e-12)


def test_auroc_of_the_same_and_of_what_is_apart() -> None:
    x = torch.rand(50)
    assert auroc(x, x) == 0.5
    assert auroc(x, x + 2) == 1.0
    assert auroc(x + 2, x) == 0.0


@pytest.mark.parametrize("count", [1, 19, 20, 21, 40, 101])
def test_fpr95_is_of_the_lowest_threshold_that_95_of_100_pass(count: int) -> None:
    inside, outside = torch.randint(30, (count,)).float(), torch.randint(30, (60,)).float()
    thresholds = [t for t in inside.tolist() if int((inside <= t).sum()) * 100 >= 95 * count]
    assert fpr95(inside, outside) == pytest.approx(float((outside <= min(thresholds)).double().mean()), abs=1e-12)


def test_risk_at_each_coverage_is_the_mean_loss_of_the_surest() -> None:
    uncertainty, loss = torch.rand(30), torch.rand(30)
    found = risk_coverage(uncertainty, loss)
    order = uncertainty.argsort()
    for count in range(1, 31):
        assert float(found.risk[count - 1]) == pytest.approx(float(loss[order[:count]].mean()), rel=1e-5)
        assert found.at(count / 30) == float(found.risk[count - 1])
    assert found.at(0.5001) == float(found.risk[15])
    assert found.area == pytest.approx(float(found.risk.mean()))


def test_equally_uncertain_examples_count_as_in_the_mean_of_all_orders() -> None:
    uncertainty, loss = torch.tensor([0.1, 0.5, 0.5, 0.5, 0.9]), torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    orders = [[0, *middle, 4] for middle in itertools.permutations((1, 2, 3))]
    curves = torch.stack([loss[list(order)].cumsum(0) / torch.arange(1, 6) for order in orders])
    torch.testing.assert_close(risk_coverage(uncertainty, loss).risk, curves.mean(0).double())


def test_the_brier_score_is_reliability_minus_resolution_plus_uncertainty() -> None:
    """Murphy (1973), for forecasts that take few values; of two classes the score counts each error twice."""
    levels = torch.tensor([0.1, 0.4, 0.8], dtype=torch.float64)
    forecast = levels[torch.randint(3, (500,))]
    labels = (torch.rand(500) < forecast.sqrt()).long()
    base = float(labels.double().mean())
    reliability = resolution = 0.0
    for level in levels.tolist():
        of_level = labels[forecast == level].double()
        reliability += len(of_level) / 500 * (level - float(of_level.mean())) ** 2
        resolution += len(of_level) / 500 * (float(of_level.mean()) - base) ** 2
    expected = 2 * (reliability - resolution + base * (1 - base))
    assert brier(torch.stack([1 - forecast, forecast], 1), labels) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bad", [torch.rand(3, 2), torch.tensor([math.nan, 1.0]), torch.ones(0), [1.0, 2.0]])
def test_what_is_no_measure_is_refused(bad: object) -> None:
    good = torch.rand(2)
    for call in (lambda: auroc(good, bad), lambda: fpr95(bad, good), lambda: risk_coverage(good, bad)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="one for each example"):
            call()


def test_a_loss_of_other_examples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The 'loss' parameter of risk_coverage must be a tensor of shape \[3\]"):
        risk_coverage(torch.rand(3), torch.rand(4))
