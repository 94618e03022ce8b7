"""What a network for a table must be better than: a linear model and a constant; and the verdict in two sentences."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributions

from bayesbackprop.evaluation import Calibration
from bayesbackprop.likelihoods import NegativeBinomial
from bayesbackprop.prediction import ClassPredictive, Predictive, ValuePredictive
from bayesbackprop.verdict import LABELS, Verdict, shown

Rows = NDArray[Any]

# Held-out rows without which nothing can be said, and standard errors beyond which a difference is one: one in eighty
# is larger by chance.
_TELLING, _ERRORS = 20, 2.5
# The least standard deviation of a line's residuals, in those of the targets.
_LEAST = 1e-6
# The central intervals by which numbers are judged.
_LEVELS = (0.5, 0.9)


class Predicting(NamedTuple):
    """What :func:`~bayesbackprop.evaluate` takes, of a function from rows to their prediction."""

    predictive: Callable[[Rows], Predictive]

    def predict(self, *args: Any, draws: int, seed: int | None, **kwargs: Any) -> Predictive:  # noqa: ARG002
        """The prediction of one tensor of rows, whatever the draws."""
        (rows,) = args
        return self.predictive(rows.numpy())


def rivals(kind: str, x: Rows, y: Rows) -> dict[str, Predicting]:
    """A linear model of the rows, then one that does not look at them."""
    from sklearn.linear_model import BayesianRidge, LogisticRegression, PoissonRegressor

    if kind == "classification":
        logistic = LogisticRegression(max_iter=1000).fit(x, y)
        shares = np.unique(y, return_counts=True)[1] / len(y)
        return {
            "logistic model": Predicting(lambda rows: _classes(logistic.predict_proba(rows))),
            "class frequencies": Predicting(lambda rows: _classes(np.tile(shares, (len(rows), 1)))),
        }
    target = y[:, 0]
    mean, sd = target.mean(), target.std()
    if kind == "regression":
        ridge = BayesianRidge().fit(x.astype(np.float64), target)

        def line(rows: Rows) -> Predictive:
            with np.errstate(invalid="ignore"):  # without noise, rounding may make its variance negative
                middle, spread = ridge.predict(rows.astype(np.float64), return_std=True)
            return _normal(middle, np.maximum(np.nan_to_num(spread), _LEAST * sd))

        return {
            "linear model": Predicting(line),
            "mean alone": Predicting(lambda rows: _normal(np.full(len(rows), mean), np.full(len(rows), sd))),
        }
    poisson = PoissonRegressor(alpha=1e-3, max_iter=1000).fit(x, target)
    around_line, around_mean = _dispersion(target, poisson.predict(x)), _dispersion(target, np.full(len(x), mean))
    return {
        "log-linear model": Predicting(lambda rows: _counts(poisson.predict(rows), around_line)),
        "mean alone": Predicting(lambda rows: _counts(np.full(len(rows), mean), around_mean)),
    }


def _classes(probs: Rows) -> Predictive:
    return ClassPredictive(distributions.Categorical(torch.tensor(probs)), 1)


def _normal(mean: Rows, sd: Rows) -> Predictive:
    return ValuePredictive(distributions.Normal(torch.tensor(mean[:, None]), torch.tensor(sd[:, None])), 1)


def _counts(mean: Rows, dispersion: float) -> Predictive:
    return ValuePredictive(NegativeBinomial(dispersion).distribution(torch.tensor(mean[:, None]).log()), 1)


def _dispersion(y: Rows, mean: Rows) -> float:
    """Of counts whose variance is mean + dispersion mean^2, by their moments."""
    return max(1e-6, float((np.square(y - mean) - mean).sum() / np.square(mean).sum()))


def worth(verdicts: Mapping[str, Verdict], costs: Mapping[str, Tensor]) -> str:
    """Whether the network, the first of three, is worth it: by the NLL of each row under all of them."""
    ours, linear, trivial = verdicts
    count = len(costs[ours])
    if count < _TELLING:
        return f"{count} held-out rows are too few to say whether the network is worth it."

    def gain(other: str) -> tuple[float, float]:
        each = costs[other] - costs[ours]
        return float(each.mean()), float(each.std()) / math.sqrt(count)

    more, error = gain(trivial)
    if more < _ERRORS * error:
        return f"Not worth it: on {count:,} held-out rows the network is not clearly better than the {trivial}."
    more, error = gain(linear)
    score = verdicts[ours].scores._fields[0]
    values = [f"{shown(score, verdicts[name].scores[0])} ({name})" for name in (ours, linear)]
    verdict = "Worth it" if more > 0 else "Not worth it"
    better = f"{abs(more):.2g} ± {error:.1g} nats a row {'better' if more > 0 else 'worse'} than the {linear}"
    if abs(more) < _ERRORS * error:
        verdict, better = "Not needed", f"neither clearly better nor worse than the {linear}"
    return f"{verdict}: on {count:,} held-out rows the network is {better}; {LABELS[score]} {' and '.join(values)}."


def promises(predictions: Iterable[Predictive]) -> dict[float, float]:
    """The mean probability of the central intervals by their level: more than the level where targets are whole."""
    held: dict[float, list[Tensor]] = {level: [] for level in _LEVELS}
    for prediction in predictions:
        assert isinstance(prediction, ValuePredictive)
        for level, parts in held.items():
            low, high = prediction.quantiles([(1 - level) / 2, (1 + level) / 2])
            parts.append(prediction.cdf(high) - prediction.cdf(low - int(prediction.is_whole)))
    return {level: float(torch.cat(parts).double().mean()) for level, parts in held.items()}


def trust(verdict: Verdict, promised_by: Mapping[float, float] | None = None) -> str:
    """Whether the uncertainty can be trusted: the confidence in classes, and the intervals of numbers.

    Those of counts hold more than their level by nature: ``promised_by`` is what :func:`promises` found of them.
    """
    scores, diagram, count = verdict.scores, verdict.diagram, verdict.examples
    if count < _TELLING:
        return f"{count} held-out rows are too few to say whether its uncertainty can be trusted."
    if isinstance(diagram, Calibration):
        rows, confidence = diagram.examples.double(), diagram.confidence.double().nan_to_num()
        promised, kept = float((rows * confidence).sum()) / count, scores[0]  # the accuracy
        spread = math.sqrt(float((rows * confidence * (1 - confidence)).sum())) / count
        excess = [(kept - promised) / max(spread, 1 / count)]
        said = f"its mean confidence is {100 * promised:.1f} %, its accuracy {100 * kept:.1f} %"
    else:
        held = dict(zip(diagram.level.tolist(), diagram.observed.tolist(), strict=True))
        due = promised_by or {level: level for level in _LEVELS}
        spreads = [math.sqrt(max(share * (1 - share) / count, count**-2)) for share in due.values()]
        excess = [(held[level] - due[level]) / spread for level, spread in zip(_LEVELS, spreads, strict=True)]
        half, most = (f"{100 * held[level]:.0f} %" for level in _LEVELS)
        said = f"{half} of the targets lie in the 50 % intervals, {most} in the 90 % intervals"
        if promised_by:
            half, most = (f"{100 * share:.0f} %" for share in due.values())
            said += f" (as these are of whole numbers, they hold more by nature: {half} and {most} here)"
    lowest, highest = min(excess), max(excess)
    mixed = lowest < 0 < highest  # of what some intervals are, others are the opposite: each speaks for itself
    if lowest < -_ERRORS:
        narrow = f"{100 * _LEVELS[excess.index(lowest)]:.0f} % intervals, which are too narrow"
        return f"Do not trust its {narrow if mixed else 'uncertainty, which is too small'}: {said}."
    if highest > _ERRORS:
        wide = f"{100 * _LEVELS[excess.index(highest)]:.0f} % intervals are on the safe side, wider than they need be"
        return f"Its {wide if mixed else 'uncertainty is on the safe side, larger than it need be'}: {said}."
    return f"Its uncertainty can be trusted: {said}."
