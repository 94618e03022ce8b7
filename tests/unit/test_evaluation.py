"""Metrics against values computed by hand, and their identities."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bayesbackprop import Bernoulli, Categorical, Gaussian
from bayesbackprop.evaluation import BINS, brier, calibration, error, nll, score
from bayesbackprop.prediction import predictive

pytestmark = pytest.mark.identities

PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.0, 0.0, 1.0]])
LABELS = torch.tensor([0, 2, 2, 2])


def test_by_hand() -> None:
    assert error(PROBS, LABELS) == 1 / 4
    assert nll(PROBS, LABELS) == pytest.approx(-(math.log(0.7) + math.log(0.3) + math.log(0.5)) / 4, rel=1e-6)
    squares = [0.09 + 0.04 + 0.01, 0.01 + 0.36 + 0.49, 0.0625 + 0.0625 + 0.25, 0.0]
    assert brier(PROBS, LABELS) == pytest.approx(sum(squares) / 4, rel=1e-6)


def test_calibration_by_hand() -> None:
    found = calibration(PROBS, LABELS, bins=4)  # confidences .7 and .6 in (.5, .75], .5 in (.25, .5], 1 in (.75, 1]
    assert found.examples.tolist() == [0, 1, 2, 1]
    assert found.confidence[1:].tolist() == pytest.approx([0.5, 0.65, 1.0])
    assert found.accuracy[1:].tolist() == [1.0, 0.5, 1.0]
    assert found.confidence[0].isnan()
    assert found.accuracy[0].isnan()
    assert found.ece == pytest.approx((1 * 0.5 + 2 * 0.15 + 0) / 4)


def test_the_best_and_the_worst() -> None:
    labels = torch.arange(5)
    certain = torch.eye(5)
    assert score(certain, labels) == (0, 0, 0, 0)
    assert score(certain.roll(1, 0), labels) == (1, math.inf, 2, 1)
    uniform = torch.full((5, 5), 0.2)
    assert nll(uniform, labels) == pytest.approx(math.log(5))
    assert brier(uniform, labels) == pytest.approx(0.8)
    assert calibration(uniform, labels).ece == pytest.approx(0, abs=1e-7)


def test_predictions_that_are_calibrated_have_no_calibration_error_in_the_long_run() -> None:
    probs = torch.rand(200_000, 3).softmax(1)
    labels = probs.multinomial(1).squeeze(1)
    # |mean of n_b draws - its expectation| is at most about sqrt(p(1-p) / n_b): over 15 bins below sqrt(15 / N) / 2
    assert calibration(probs, labels).ece < math.sqrt(BINS / 200_000) / 2
    assert calibration((probs * 4).softmax(1), labels).ece > 0.03


def test_draws_are_averaged_before_anything_else() -> None:
    logits = torch.randn(7, 4, 3)  # [draws, B, C]
    prediction = predictive(Categorical(), logits, 7)
    assert score(prediction, LABELS) == pytest.approx(score(logits.softmax(-1).mean(0), LABELS), rel=1e-5)


def test_the_nll_of_a_prediction_is_finite_where_its_probability_is_too_small_for_a_float() -> None:
    logits = torch.tensor([[[0.0, 500.0]]])
    assert nll(predictive(Categorical(), logits, 1), torch.tensor([0])) == 500
    assert nll(logits.softmax(-1)[0], torch.tensor([0])) == math.inf


@pytest.mark.parametrize(
    ("prediction", "labels", "match"),
    [
        (PROBS * 2, LABELS, "not logits"),
        (PROBS - 0.5, LABELS, "none below 0"),
        (PROBS[0], LABELS, r"probabilities \[N, C\]"),
        (PROBS.tolist(), LABELS, r"probabilities \[N, C\]"),
        (PROBS, LABELS[:3], r"shape \[4\]"),
        (PROBS, LABELS.float(), "int64"),
        (PROBS, LABELS + 1, r"in \[0, 2\]"),
        (PROBS[:0], LABELS[:0], r"probabilities \[N, C\]"),
        (predictive(Gaussian(1.0), torch.randn(1, 4, 3), 1), LABELS, "of classes"),
        (predictive(Bernoulli(), torch.randn(1, 4), 1), LABELS, "of classes"),
    ],
)
def test_what_is_no_prediction_is_refused(prediction: Any, labels: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        score(prediction, labels)
