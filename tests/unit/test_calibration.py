"""Temperature scaling finds the temperature; conformal intervals hold the fraction of targets that they promise."""

import math

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import (
    Bayesian,
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    calibrate_temperature,
    conformal_intervals,
    evaluate,
)
from bayesbackprop.calibration import TemperatureScaled
from bayesbackprop.evaluation import nll
from bayesbackprop.prediction import Predictive, predictive
from ztests import assert_mean, assert_z


class Fixed:
    """Predicts by its inputs: they are the outputs of a network, in each of ``draws``, with noise of its own."""

    def __init__(self, likelihood: Likelihood, spread: float = 0.0) -> None:
        self.likelihood, self.spread = likelihood, spread

    def predict(self, x: Tensor, draws: int, seed: int | None) -> Predictive:
        random = torch.Generator().manual_seed(seed or 0)
        offsets = self.spread * torch.randn(draws, *[1] * x.dim(), generator=random, dtype=x.dtype)
        return predictive(self.likelihood, x + offsets, draws)


# --- temperature -----------------------------------------------------------------------------------------------------


@pytest.mark.statistical
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_temperature_of_the_data_is_found(temperature: float) -> None:
    logits = 3 * torch.randn(20_000, 5, dtype=torch.float64)
    labels = (logits / temperature).softmax(1).multinomial(1)[:, 0]
    found = calibrate_temperature(Fixed(Categorical()), (logits, labels), draws=1).temperature
    # The likelihood of b = 1 / T has the information sum_i Var(logit of a class drawn by softmax(b logits_i)).
    probs = (logits / temperature).softmax(1)
    information = ((probs * logits.square()).sum(1) - (probs * logits).sum(1).square()).sum()
    assert_z(((1 / found - 1 / temperature) * information.sqrt()).view(1), "the inverse temperature")


@pytest.mark.statistical
def test_yes_and_no_have_a_temperature_too() -> None:
    logits = 2 * torch.randn(20_000, 1, dtype=torch.float64)
    answers = (logits / 2).sigmoid().bernoulli()
    found = calibrate_temperature(Fixed(Bernoulli()), (logits, answers), draws=1).temperature
    p = (logits / 2).sigmoid()
    information = (logits.square() * p * (1 - p)).sum()
    assert_z(((1 / found - 1 / 2) * information.sqrt()).view(1), "the inverse temperature")


@pytest.mark.identities
def test_no_other_temperature_has_a_lower_nll_with_many_draws() -> None:
    x = torch.randn(500, 3, dtype=torch.float64)
    labels = (x / 3).softmax(1).multinomial(1)[:, 0]
    model = Fixed(Categorical(), spread=0.5)
    best = calibrate_temperature(model, (x, labels), draws=7)

    def at(temperature: float) -> float:
        return nll(TemperatureScaled(model, temperature).predict(x, draws=7, seed=None), labels)

    lowest = at(best.temperature)
    assert lowest < at(1.0)
    assert all(lowest <= at(best.temperature * factor) for factor in (0.9, 0.999, 1.001, 1.1))


@pytest.mark.identities
@pytest.mark.parametrize(
    ("right", "limit", "advice"),
    [(True, 0.05, "smaller sigma, make the last layer alone Bayesian, or train longer"), (False, 20.0, "same order")],
)
def test_a_search_that_ends_at_its_limit_says_so(right: bool, limit: float, advice: str) -> None:
    logits = torch.randn(200, 3, dtype=torch.float64)
    labels = logits.argmax(1) if right else logits.argmin(1)
    with pytest.warns(UserWarning, match=advice) as caught:
        found = calibrate_temperature(Fixed(Categorical()), (logits, labels), draws=1)
    assert found.temperature == pytest.approx(limit)
    assert f"ended at its limit, {limit:g}" in str(caught[0].message)


@pytest.mark.identities
def test_the_model_is_wrapped_and_not_changed() -> None:
    model = Bayesian(nn.Linear(2, 3), Categorical(), seed=0)
    x, labels = torch.randn(40, 2), torch.randint(3, (40,))
    before = model.predict(x, draws=4).mean
    calibrated = calibrate_temperature(model, (x, labels), draws=4)
    assert torch.equal(model.predict(x, draws=4).mean, before)
    assert calibrated.model is model
    same = TemperatureScaled(model, 1.0).predict(x, draws=4)
    torch.testing.assert_close(same.mean, before)
    single = TemperatureScaled(model, 3.0).predict(x, draws=1)
    assert torch.equal(single.mean.argmax(1), model.predict(x, draws=1).mean.argmax(1))
    assert evaluate(calibrated, (x, labels), draws=4).scores.nll <= evaluate(model, (x, labels), draws=4).scores.nll


@pytest.mark.identities
def test_numbers_have_no_temperature_and_classes_no_intervals() -> None:
    x = torch.randn(20, 3)
    with pytest.raises(ValueError, match="one that predicts classes"):
        calibrate_temperature(Fixed(Gaussian(1.0)), (x, x), draws=1)
    with pytest.raises(ValueError, match="one that predicts numbers"):
        conformal_intervals(Fixed(Categorical()), (x, x.argmax(1)), draws=1)


# --- conformal intervals ---------------------------------------------------------------------------------------------


@pytest.mark.statistical
@pytest.mark.parametrize("noise", [0.01, 5.0])  # intervals far too narrow, and far too wide
@pytest.mark.parametrize(("level", "n"), [(0.9, 19), (0.5, 40)])
def test_a_new_target_is_covered_with_the_probability_of_its_rank(noise: float, level: float, n: int) -> None:
    """Of n + 1 exchangeable scores the new one is with probability k / (n + 1) among the k lowest: exactly.

    The elements of a target have margins of their own, so that 2000 of them are as many experiments.
    """
    x = torch.randn(n + 20, 2000, dtype=torch.float64)
    y = x + x.exp() * torch.randn_like(x)
    found = conformal_intervals(Fixed(Gaussian(noise), spread=0.1), (x[:n], y[:n]), level=level, draws=3)
    low, high = found.intervals(x[n:])
    covered = ((low <= y[n:]) & (y[n:] <= high)).double().mean(0)
    assert_mean(covered, math.ceil(level * (n + 1)) / (n + 1), "the coverage of conformal intervals")


@pytest.mark.identities
def test_of_the_held_out_targets_exactly_those_up_to_the_rank_are_covered() -> None:
    x = torch.randn(99, 2, dtype=torch.float64)
    y = x + torch.randn(99, 2, dtype=torch.float64)
    found = conformal_intervals(Fixed(Gaussian(0.1)), (x, y), level=0.8, draws=1)
    low, high = found.intervals(x)
    assert ((low <= y + 1e-12) & (y <= high + 1e-12)).sum(0).tolist() == [80, 80]  # each element by itself
    assert found.margin.shape == (2,)


@pytest.mark.identities
def test_a_margin_below_0_turns_no_interval_inside_out() -> None:
    x = torch.zeros(50, 1, dtype=torch.float64)
    found = conformal_intervals(Fixed(Gaussian(10.0)), (x, x), level=0.9, draws=1)
    low, high = found.intervals(x)
    assert float(found.margin) < 0
    assert bool((low <= high).all())
    assert bool((low <= 1e-9).all())
    assert bool((high >= -1e-9).all())


@pytest.mark.identities
@pytest.mark.parametrize(("level", "fewest"), [(0.9, 9), (0.5, 1), (0.95, 19), (0.8, 4)])
def test_too_few_examples_are_refused(level: float, fewest: int) -> None:
    x = torch.randn(fewest, 1)
    conformal_intervals(Fixed(Gaussian(1.0)), (x, x), level=level, draws=1)
    if fewest > 1:
        with pytest.raises(ValueError, match=f"at least {fewest} examples"):
            conformal_intervals(Fixed(Gaussian(1.0)), (x[1:], x[1:]), level=level, draws=1)


@pytest.mark.identities
def test_targets_of_another_shape_are_refused() -> None:
    x = torch.randn(50, 2)
    with pytest.raises(ValueError, match=r"The 'held_out' parameter .* shape \[50, 2\]"):
        conformal_intervals(Fixed(Gaussian(1.0)), (x, x[:, :1]), draws=1)
