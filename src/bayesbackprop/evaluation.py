"""How good predicted probabilities of classes are: error, NLL, Brier score and calibration.

Each takes a prediction, from ``predict`` or a tensor of probabilities ``[N, C]``, and the true classes ``[N]``.
Probabilities are averaged over the draws first.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bayesbackprop._errors import Described, check_count, invalid
from bayesbackprop.prediction import ClassPredictive, Predictive

__all__ = ["BINS", "Calibration", "Scores", "brier", "calibration", "error", "nll", "score"]

# The usual number of bins of the expected calibration error.
BINS = 15


class Calibration(NamedTuple):
    """How often predictions of each confidence come true, in bins of equal width over [0, 1].

    ``examples`` counts those in a bin, ``confidence`` is the mean probability of the predicted class, ``accuracy`` how
    often it was the true one; the last two are NaN in an empty bin.
    """

    examples: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def ece(self) -> float:
        """The expected calibration error, sum_b n_b / N * abs(accuracy_b - confidence_b)."""
        gaps = (self.accuracy - self.confidence).abs().nan_to_num(0.0)
        return float((self.examples * gaps).sum() / self.examples.sum())


class Scores(NamedTuple):
    """``error`` in [0, 1], ``nll`` in nats per example, ``brier`` in [0, 2], ``ece`` in [0, 1]; lower is better."""

    error: float
    nll: float
    brier: float
    ece: float


def error(prediction: Predictive | Tensor, labels: Tensor) -> float:
    """The fraction of examples whose most probable class is not the true one.

    Examples:
        >>> error(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
        0.5
    """
    probs = _probabilities(prediction, labels, "error")
    return float((probs.argmax(1) != labels).double().mean())


def nll(prediction: Predictive | Tensor, labels: Tensor) -> float:
    """The mean negative log-probability of the true class, -log P(y|x), in nats; inf where that is 0.

    Examples:
        >>> nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))  # log(2)
        0.6931471805599453
    """
    probs = _probabilities(prediction, labels, "nll")
    if isinstance(prediction, Predictive):  # whose logarithms are exact where the probability would be 0
        return float(-prediction.log_prob(labels).double().mean())
    return float(-probs.gather(1, labels[:, None]).log().mean())


def brier(prediction: Predictive | Tensor, labels: Tensor) -> float:
    """The mean over examples of sum_c (p_c - [y = c])^2, the squared distance to the truth over all classes.

    Examples:
        >>> brier(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 0]))
        0.25
    """
    probs = _probabilities(prediction, labels, "brier")
    return float((probs.square().sum(1) - 2 * probs.gather(1, labels[:, None])[:, 0] + 1).mean())


def calibration(prediction: Predictive | Tensor, labels: Tensor, bins: int = BINS) -> Calibration:
    """Whether confidence is what it says: of predictions with probability p, the fraction p should be true.

    A bin holds the confidences in (k / bins, (k + 1) / bins].

    Examples:
        >>> calibration(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]), bins=1).ece  # .75 against .5
        0.25
    """
    bins = check_count("calibration", bins=bins)["bins"]
    probs = _probabilities(prediction, labels, "calibration")
    confidence, predicted = probs.max(1)
    bin_of = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)
    examples = bin_of.bincount(minlength=bins)
    totals = (bin_of.bincount(value, bins) for value in (confidence, (predicted == labels).double()))
    return Calibration(examples, *(total / examples for total in totals))


def score(prediction: Predictive | Tensor, labels: Tensor) -> Scores:
    """All four of them."""
    ece = calibration(prediction, labels).ece
    return Scores(error(prediction, labels), nll(prediction, labels), brier(prediction, labels), ece)


def _probabilities(prediction: Predictive | Tensor, labels: Tensor, owner: str) -> Tensor:
    """The probabilities ``[N, C]`` in double precision, checked."""
    probs = prediction.probs if isinstance(prediction, ClassPredictive) else prediction
    if not isinstance(probs, Tensor) or probs.dim() != 2 or not probs.is_floating_point() or len(probs) == 0:
        raise invalid("prediction", owner, "a prediction of classes, or their probabilities [N, C]", probs)
    probs = probs.double()
    if not (probs >= 0).all() or not ((probs.sum(1) - 1).abs() < 1e-3).all():
        constraint = "probabilities: none below 0, each row with the sum 1 (not logits)"
        raise invalid("prediction", owner, constraint, Described("others"))
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != probs.shape[:1]:
        raise invalid("labels", owner, f"a tensor of shape [{len(probs)}] and type torch.int64", labels)
    low, high = map(int, labels.aminmax())
    if low < 0 or high >= probs.shape[1]:
        got = Described(f"labels from {low} to {high}")
        raise invalid("labels", owner, f"class indices in [0, {probs.shape[1] - 1}]", got)
    return probs
