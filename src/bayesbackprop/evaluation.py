"""Metrics of predictive distributions, one function each.

Those of classes (``error``, ``nll``, ``brier``, ``calibration``) take a prediction, from ``predict`` or a tensor of
probabilities ``[N, C]``, and the true classes ``[N]``; those of numbers (``rmse``, ``nll``, ``crps``, ``covered``) a
prediction and the true values. Predictions are averaged over the draws first. ``auroc``, ``fpr95`` and
``risk_coverage`` judge any measure of uncertainty.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributions

from bayesbackprop import _crps
from bayesbackprop._errors import (
    Described,
    check_count,
    check_finite,
    check_list,
    check_probability,
    invalid,
    tensor_shape,
)
from bayesbackprop.prediction import ClassPredictive, Predictive, ValuePredictive

__all__ = [
    "BINS",
    "Calibration",
    "RiskCoverage",
    "Scores",
    "auroc",
    "brier",
    "calibration",
    "covered",
    "crps",
    "error",
    "fpr95",
    "nll",
    "risk_coverage",
    "rmse",
    "score",
]

# The usual number of bins of the expected calibration error.
BINS = 15

# The CRPS of counts is a sum over all of them where these are no more; they reach so many standard deviations.
_MOST_COUNTS, _REACH = 4096, 6


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
    """The mean negative log-probability of the truth, -log P(y|x), in nats per example; inf where that is 0.

    For classes and, of a prediction, for numbers. The elements of an example's target add up.

    Examples:
        >>> nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))  # log(2)
        0.6931471805599453
    """
    if isinstance(prediction, ValuePredictive):
        return float(-prediction.log_prob(labels).double().sum() / len(labels))
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


# --- numbers ---------------------------------------------------------------------------------------------------------


def rmse(prediction: Predictive, targets: Tensor) -> float:
    """The root of the mean squared distance between the predictive mean and the target."""
    _check_numbers(prediction, targets, "rmse")
    return float((prediction.mean.double() - targets).square().mean().sqrt())


def crps(prediction: Predictive, targets: Tensor) -> Tensor:
    """The continuous ranked probability score of each element: the integral of (F(z) - [z >= y])^2 over z.

    It has the target's unit, is |mean - y| where there is no spread, and lower is better. For Gaussian components it is
    exact, and for counts that do not reach far; otherwise the integral is by quadrature, to about 1e-3.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> from bayesbackprop.prediction import predictive
        >>> prediction = predictive(Gaussian(1.0), torch.zeros(1, 1, 1), draws=1)
        >>> crps(prediction, torch.zeros(1, 1))  # (sqrt(2) - 1) / sqrt(pi)
        tensor([[0.2337]], dtype=torch.float64)
    """
    _check_numbers(prediction, targets, "crps")
    assert isinstance(prediction, ValuePredictive)
    y = targets.double().flatten()
    if (gaussians := _gaussians(prediction)) is not None:
        return _crps.of_gaussians(*gaussians, y).view_as(targets)
    if prediction.is_whole:
        components, (first, last) = prediction.components, prediction.ends
        reach = _REACH * components.stddev.double() + _REACH
        low = max(first, math.floor(torch.minimum((components.mean - reach).min(), y.min())))
        high = min(last, math.ceil(torch.maximum((components.mean + reach).max(), y.max())))
        if high - low <= _MOST_COUNTS:
            each = _crps.probabilities(components, range(int(low), int(high) + 1))
            probs = (of_all.reshape(prediction.draws, -1) for of_all in each)
            return _crps.by_summation(probs, int(low), y).view_as(targets)

    def cdf(points: Tensor) -> Tensor:
        return prediction.cdf(points.view_as(targets)).flatten()

    score = _crps.by_quadrature(cdf, _quantiles(prediction), prediction.draws, y, whole=prediction.is_whole)
    return score.view_as(targets)


def covered(prediction: Predictive, targets: Tensor, levels: Sequence[float]) -> Tensor:
    """Whether the central interval of each of the ``levels`` holds the target: booleans ``[levels, ...]``.

    The interval of level c lies between the quantiles (1 - c) / 2 and (1 + c) / 2. The mean over the elements is the
    coverage, which should be c.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> from bayesbackprop.prediction import predictive
        >>> prediction = predictive(Gaussian(1.0), torch.zeros(1, 1, 1), draws=1)
        >>> covered(prediction, torch.ones(1, 1), [0.5, 0.9])[:, 0, 0]  # the intervals are +-0.67 and +-1.64
        tensor([False,  True])
    """
    _check_numbers(prediction, targets, "covered")
    listed = check_list("covered", levels=levels)
    if not len(listed):
        raise invalid("levels", "covered", "a list of floats in [0, 1]", levels)
    checked = [check_probability("covered", levels=level)["levels"] for level in listed]
    if (gaussians := _gaussians(prediction)) is not None:
        mean, scale = gaussians
        below = distributions.Normal(mean, scale).cdf(targets.double().flatten()).mean(0).view_as(targets)
        return torch.stack([(2 * below - 1).abs() <= level for level in checked])
    # The quantile q_p is the least number with F(q_p) >= p: it is at most y where F(y) >= p, and at least y where no
    # number below y has F >= p.
    assert isinstance(prediction, ValuePredictive)
    y, is_whole = targets.double(), prediction.is_whole
    upto = prediction.cdf(y)
    below = prediction.cdf(y - 1) if is_whole else upto
    ends = [((1 - level) / 2, (1 + level) / 2) for level in checked]
    return torch.stack(
        [(upto >= p) & ((below < q) if is_whole and q < 1 else (below <= q)) for p, q in ends],
    )


def _check_numbers(prediction: object, targets: object, owner: str) -> None:
    if not isinstance(prediction, ValuePredictive):
        raise invalid("prediction", owner, "a prediction of numbers", prediction)
    shape = prediction.mean.shape
    if not isinstance(targets, Tensor) or targets.shape != shape:
        got = tensor_shape(targets) if isinstance(targets, Tensor) else targets
        raise invalid("targets", owner, f"a tensor of shape {list(shape)}", got)
    check_finite("targets", owner, targets)


def _gaussians(prediction: Predictive) -> tuple[Tensor, Tensor] | None:
    """Mean and standard deviation ``[draws, elements]`` of Gaussian components, in double precision."""
    components = prediction.components
    if not isinstance(components, distributions.Normal):
        return None
    return tuple(each.double().reshape(prediction.draws, -1) for each in (components.mean, components.stddev))  # type: ignore[return-value]


def _quantiles(prediction: ValuePredictive) -> Callable[[Tensor], Tensor]:
    """Quantiles of the components at levels, ``[levels, draws, elements]``, or what comes near: see :mod:`._crps`."""
    components = prediction.components

    def quantiles(levels: Tensor) -> Tensor:
        levels = levels.to(components.mean.device)
        column = levels.view(-1, *[1] * len(components.batch_shape))
        try:
            found = components.icdf(column.expand(-1, *components.batch_shape)).double()
        except NotImplementedError:
            centre, width = components.mean, components.stddev
            if isinstance(components, distributions.StudentT):  # which may have neither
                centre, width = components.loc, components.scale
            # Those of Student's t with 2 degrees of freedom, of which all moments but the first are infinite.
            found = centre.double() + (2 * column - 1) / (2 * column * (1 - column)).sqrt() * width.double()
        return found.reshape(len(levels), prediction.draws, -1)

    return quantiles


# --- uncertainty -----------------------------------------------------------------------------------------------------


class RiskCoverage(NamedTuple):
    """The mean loss of the ``coverage`` least uncertain examples, from one example to all."""

    coverage: Tensor
    risk: Tensor

    def at(self, coverage: float) -> float:
        """The risk when at least this fraction of the examples is answered, and no more than needed."""
        coverage = check_probability("RiskCoverage.at", coverage=coverage)["coverage"]
        return float(self.risk[max(0, math.ceil(round(coverage * len(self.risk), 9)) - 1)])

    @property
    def area(self) -> float:
        """The area under the curve: the mean risk over all coverages."""
        return float(self.risk.mean())


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """What is lost if only the least uncertain examples are answered.

    Of equally uncertain examples each has the mean loss of them all, so that their order plays no role.

    Examples:
        >>> risk_coverage(torch.tensor([0.1, 0.4, 0.2, 0.3]), torch.tensor([0.0, 1.0, 0.0, 0.0])).risk
        tensor([0.0000, 0.0000, 0.0000, 0.2500], dtype=torch.float64)
    """
    _check_scores("risk_coverage", uncertainty=uncertainty, loss=loss)
    if uncertainty.shape != loss.shape:
        raise invalid("loss", "risk_coverage", f"a tensor of shape {list(uncertainty.shape)}", tensor_shape(loss))
    values, group, size = uncertainty.unique(return_inverse=True, return_counts=True)  # sorted
    total = torch.zeros(len(values), dtype=torch.float64, device=loss.device).index_add_(0, group, loss.double())
    number = torch.arange(1, len(loss) + 1, dtype=torch.float64, device=loss.device)
    return RiskCoverage(number / len(loss), (total / size).repeat_interleave(size).cumsum(0) / number)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that an ``outside`` example is more uncertain than an ``inside`` one; of equals one half counts.

    Examples:
        >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.3]))
        0.875
    """
    _check_scores("auroc", inside=inside, outside=outside)
    ranked = inside.sort().values
    below = torch.searchsorted(ranked, outside, right=False) + torch.searchsorted(ranked, outside, right=True)
    return float(below.double().mean()) / (2 * len(inside))


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """The fraction of ``outside`` examples that pass the threshold which 95 % of those ``inside`` pass.

    Examples:
        >>> fpr95(torch.arange(100.0), torch.tensor([10.0, 94.0, 95.0, 200.0]))
        0.5
    """
    _check_scores("fpr95", inside=inside, outside=outside)
    threshold = inside.kthvalue(math.ceil(0.95 * len(inside))).values
    return float((outside <= threshold).double().mean())


def _check_scores(owner: str, **scores: object) -> None:
    for name, score in scores.items():
        fits = isinstance(score, Tensor) and score.dim() == 1 and len(score) and not score.is_complex()
        if not fits or not bool(score.isfinite().all()):  # type: ignore[attr-defined]
            got = tensor_shape(score) if isinstance(score, Tensor) else score
            raise invalid(name, owner, "a tensor of finite numbers, one for each example", got)


# --- checks ----------------------------------------------------------------------------------------------------------


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
