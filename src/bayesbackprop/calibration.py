"""Corrections of a trained model by held-out data: the temperature of its logits, and conformal intervals.

Both wrap the model and leave it as it is. The data must be new to it: neither trained on nor used to judge the result.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributions

from bayesbackprop._batches import Data, labelled
from bayesbackprop._errors import Described, check_positive, check_probability, invalid
from bayesbackprop._predictors import Estimator, Predictor, examples_of, is_estimator, predicting
from bayesbackprop.prediction import ClassPredictive, Ensemble, JointPredictive, Predictive, ValuePredictive

__all__ = ["ConformalIntervals", "Interval", "TemperatureScaled", "calibrate_temperature", "conformal_intervals"]

# Temperatures among which the best is searched. Beyond, probabilities are all but 0 and 1, or all but equal.
_COLDEST, _HOTTEST = 0.05, 20.0
# Steps of the search by golden sections: they narrow the logarithm of the temperature down to 1e-8.
_SECTIONS = 42
# How near to an end a temperature is that the search would have moved beyond.
_AT_THE_END = 1e-4
_TOO_COLD = (
    "no temperature makes these probabilities as sure as they are right. Either all of the data are predicted right "
    "without a doubt, or the average over the draws is blurred, which the temperature of each draw cannot mend: give a "
    "smaller sigma, make the last layer alone Bayesian, or train longer, so that sigma can shrink. evaluate() says "
    "whether batch normalisation is the cause."
)
_TOO_HOT = (
    "the probabilities are best where they say next to nothing. Are these data like those of training, and the classes "
    "in the same order? If so, the model has learnt nothing of them: train longer, or with fewer weights."
)


# --- the temperature of the logits -----------------------------------------------------------------------------------


class TemperatureScaled:
    """A model whose logits are divided by ``temperature``, in each draw, before the draws are averaged.

    The most probable class of a single draw stays the same. Above 1 the probabilities are less extreme.
    """

    def __init__(self, model: Predictor | Ensemble, temperature: float) -> None:
        self.model = model
        self.temperature = check_positive("TemperatureScaled", temperature=temperature)["temperature"]

    def predict(self, *args: Any, **kwargs: Any) -> ClassPredictive:
        """The predictive distribution of the model, with scaled logits."""
        return _scaled(self.model.predict(*args, **kwargs), self.temperature, "TemperatureScaled.predict")

    def __repr__(self) -> str:
        return f"TemperatureScaled(temperature={self.temperature:.4g})"


def calibrate_temperature(
    model: Predictor | Ensemble, held_out: Data, *, draws: int = 100, seed: int | None = None
) -> TemperatureScaled:
    """The model with the temperature of its logits that gives ``held_out`` data the lowest NLL (Guo et al., 2017).

    The search is between 0.05 and 20. Where the NLL still falls at an end of it, a warning says what that means.

    Args:
        model: As :func:`evaluate` takes it, of classes. It is wrapped, not changed.
        held_out: Examples with their classes, as :func:`evaluate` takes them.
        draws: Networks to average. Their logits for all of the data are held in memory.
        seed: Of the draws; None for the model's own.

    Examples:
        >>> from bayesbackprop import Bayesian, Categorical
        >>> net = torch.nn.Linear(2, 2)
        >>> _ = torch.nn.init.eye_(net.weight)
        >>> model = Bayesian(net, Categorical(), seed=0)
        >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
        >>> y = model.predict(x, draws=5).sample(1, torch.Generator().manual_seed(0))[0]
        >>> calibrated = calibrate_temperature(model, (x, y), draws=5)
        >>> calibrated.predict(x, draws=5).probs.shape
        torch.Size([100, 2])
    """
    if is_estimator(model):
        constraint = "a Bayesian or an Ensemble (of an estimator, sklearn.calibration.CalibratedClassifierCV does it)"
        raise invalid("model", "calibrate_temperature", constraint, model)
    predict, device = predicting(model, draws, seed, "calibrate_temperature")
    batches = labelled(held_out, "held_out", "calibrate_temperature", device)
    predictions = [(predict(inputs), targets) for inputs, targets in batches]

    def nll(log_temperature: float) -> float:
        scaled = (
            (_scaled(prediction, math.exp(log_temperature), "calibrate_temperature"), targets)
            for prediction, targets in predictions
        )
        return -sum(float(prediction.log_prob(targets).double().sum()) for prediction, targets in scaled)

    found = math.exp(_lowest(nll, math.log(_COLDEST), math.log(_HOTTEST)))
    for end, why in ((_COLDEST, _TOO_COLD), (_HOTTEST, _TOO_HOT)):
        if math.isclose(found, end, rel_tol=_AT_THE_END):
            message = f"The search of calibrate_temperature ended at its limit, {end:g}: {why}"
            warnings.warn(message, UserWarning, stacklevel=2)
    return TemperatureScaled(model, found)


def _scaled(prediction: Predictive, temperature: float, owner: str) -> ClassPredictive:
    if not isinstance(prediction, ClassPredictive):
        raise invalid("model", owner, "one that predicts classes", _other(prediction))
    components = prediction.components
    logits = components.logits / temperature
    if isinstance(components, distributions.Bernoulli):
        return ClassPredictive(distributions.Bernoulli(logits=logits, validate_args=True), prediction.draws)
    return ClassPredictive(distributions.Categorical(logits=logits, validate_args=True), prediction.draws)


def _lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is lowest, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(_SECTIONS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


# --- conformal intervals ---------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """The ends of an interval for each element of the targets."""

    low: Tensor
    high: Tensor


class ConformalIntervals:
    """Intervals that hold the fraction ``level`` of new targets, whatever the model: see :func:`conformal_intervals`.

    Attributes:
        level: What they promise.
        margin: By how much they are wider, on each side, than the model's own central intervals: one number for each
            element of a target, below 0 where those are too wide.
    """

    def __init__(self, predict: Callable[[Any], Predictive], level: float, margin: Tensor) -> None:
        self.level, self.margin = level, margin
        self._predict = predict

    def intervals(self, inputs: Any) -> Interval:
        """The intervals for the targets of ``inputs``: a tensor, or a tuple or mapping of what the network takes.

        Of an estimator, they are rows ``X``.
        """
        low, high = _central(self._predict(inputs), self.level, "ConformalIntervals.intervals")
        margin = self.margin.to(low)
        middle = (low + high) / 2  # where a margin below 0 would turn an interval inside out
        return Interval(torch.minimum(low - margin, middle), torch.maximum(high + margin, middle))

    def __repr__(self) -> str:
        return f"ConformalIntervals(level={self.level:g}, margin={self.margin.tolist()})"


def conformal_intervals(
    model: Predictor | Ensemble | Estimator,
    held_out: Data,
    *,
    level: float = 0.9,
    draws: int = 100,
    seed: int | None = None,
) -> ConformalIntervals:
    """Split-conformal intervals around the model's own quantiles: conformalised quantile regression.

    With q and q' the quantiles (1 - level) / 2 and (1 + level) / 2 of the prediction, the score of a held-out example
    is max(q - y, y - q'), how far it lies outside. Its quantile of rank ceil((n + 1) level) among n is the margin.
    Then a new target lies in [q - margin, q' + margin] with probability at least ``level``, and at most
    level + 1 / (n + 1), if it is exchangeable with the held-out ones: on average over inputs, not for each input
    (Romano et al., 2019).

    Args:
        model: As :func:`evaluate` takes it, of numbers; also a scikit-learn estimator. It is wrapped, not changed.
        held_out: Examples with their targets, as :func:`evaluate` takes them. Each element of a target has its own
            margin, and the promise is for each element by itself.
        level: What the intervals promise, in (0, 1).
        draws: Networks to average, here and in predictions.
        seed: Of the draws; None for the model's own.

    Examples:
        >>> from bayesbackprop import Bayesian, Gaussian
        >>> model = Bayesian(torch.nn.Linear(1, 1), Gaussian(0.001), seed=0)
        >>> x = torch.linspace(-1, 1, 99)[:, None]
        >>> found = conformal_intervals(model, (x, 3 * x), level=0.8, draws=5)
        >>> low, high = found.intervals(x)
        >>> int(((low <= 3 * x) & (3 * x <= high)).sum())  # of 99
        80
    """
    level = check_probability("conformal_intervals", level=level)["level"]
    predict, device = predicting(model, draws, seed, "conformal_intervals")
    if level in (0, 1):
        raise invalid("level", "conformal_intervals", "a float in (0, 1)", level)
    scores: list[Tensor] = []
    for inputs, targets in examples_of(model, held_out, "held_out", "conformal_intervals", device):
        low, high = _central(predict(inputs), level, "conformal_intervals")
        if targets.shape != low.shape:
            got = Described(f"targets of shape {list(targets.shape)}")
            raise invalid("held_out", "conformal_intervals", f"data whose targets have shape {list(low.shape)}", got)
        scores.append(torch.maximum(low - targets, targets - high))
    n = sum(map(len, scores))
    rank = math.ceil(round((n + 1) * level, 9))  # 0.9 * 10 must not be more than 9 by rounding
    if rank > n:
        needed = math.ceil(round(level / (1 - level), 9))
        raise invalid("held_out", "conformal_intervals", f"at least {needed} examples for the level {level:g}", n)
    return ConformalIntervals(predict, level, torch.cat(scores).kthvalue(rank, dim=0).values)


def _central(prediction: Predictive, level: float, owner: str) -> Interval:
    if not isinstance(prediction, ValuePredictive):
        raise invalid("model", owner, "one that predicts numbers", _other(prediction))
    return Interval(*prediction.quantiles([(1 - level) / 2, (1 + level) / 2]))


def _other(prediction: Predictive) -> Described:
    """What a model predicts that it should not."""
    kinds = {ClassPredictive: "classes", ValuePredictive: "numbers", JointPredictive: "several targets"}
    return Described(f"one that predicts {kinds.get(type(prediction), 'something else')}")
