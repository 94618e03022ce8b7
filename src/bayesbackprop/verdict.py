"""A verdict in one call: how good a model's predictions, and its uncertainties, are on a user's own data."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributions
from torch.nn.functional import logsigmoid
from torch.utils._pytree import tree_map

from bayesbackprop import _page
from bayesbackprop._batches import Data
from bayesbackprop._errors import (
    Described,
    check_callable,
    check_text,
    check_type,
    invalid,
    tensor_shape,
)
from bayesbackprop._page import Table
from bayesbackprop._predictors import Estimator, Predictor, examples_of, inputs_of, predicting
from bayesbackprop.diagnostics import Diagnosis, DrawsAndMean, draws_and_mean, may_blur
from bayesbackprop.evaluation import (
    Calibration,
    RiskCoverage,
    auroc,
    brier,
    calibration,
    covered,
    crps,
    error,
    fpr95,
    risk_coverage,
)
from bayesbackprop.likelihoods import Joint
from bayesbackprop.model import Bayesian
from bayesbackprop.prediction import ClassPredictive, Ensemble, JointPredictive, Predictive, ValuePredictive

__all__ = ["ClassScores", "Coverage", "Detection", "Predictor", "ValueScores", "Verdict", "evaluate"]

# The central intervals whose coverage is measured.
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Where pictures and files show a risk-coverage curve.
_GRID = [number / 50 for number in range(1, 51)]


class ClassScores(NamedTuple):
    """Of classes. ``error_at_95`` is the error on the 95 % of the examples with the highest confidence."""

    accuracy: float
    nll: float
    brier: float
    ece: float
    error_at_95: float


class ValueScores(NamedTuple):
    """Of numbers. ``coverage_50`` is the fraction of targets in the central 50 % interval; likewise 90."""

    rmse: float
    nll: float
    crps: float
    coverage_50: float
    coverage_90: float


Scores = ClassScores | ValueScores


class Coverage(NamedTuple):
    """The fraction of targets in the central interval of each level, which it should equal."""

    level: Tensor
    observed: Tensor


class Detection(NamedTuple):
    """How well a measure of uncertainty tells outside data from inside data: see ``auroc`` and ``fpr95``."""

    auroc: float
    fpr95: float


@dataclass(frozen=True, eq=False, repr=False)
class Verdict:
    """What :func:`evaluate` found. ``print(verdict)`` shows a table, :meth:`save_html` writes a page.

    Attributes:
        examples: How many there were.
        draws: Networks that each prediction averages.
        scores: A :class:`ClassScores` or :class:`ValueScores`.
        standard_errors: Of those scores that are means over the examples, by name; of one example there are none.
        diagram: A :class:`Calibration` for classes, a :class:`Coverage` for numbers.
        risk_coverage: The error, or the mean squared error, of the least uncertain examples.
        outside: For each outside data set, a :class:`Detection` by each measure of uncertainty.
        shifts: The scores under each shift.
        diagnosis: Of the posterior, if :func:`evaluate` was given one.
        of_counts: Whether the targets are whole numbers, whose intervals hold more than they promise.
        draws_and_mean: The NLL of both, of a model with batch normalisation whose examples shared draws in training.
    """

    examples: int
    draws: int
    scores: Scores
    standard_errors: Mapping[str, float]
    diagram: Calibration | Coverage
    risk_coverage: RiskCoverage
    outside: Mapping[str, Mapping[str, Detection]] = field(default_factory=dict)
    shifts: Mapping[str, Scores] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    of_counts: bool = False
    draws_and_mean: DrawsAndMean | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data that JSON can hold; None where there is no number."""
        plain: dict[str, Any] = _plain(
            {
                "examples": self.examples,
                "draws": self.draws,
                "scores": self.scores,
                "standard_errors": self.standard_errors,
                "diagram": self.diagram,
                "risk_coverage": self.risk_coverage,
                "outside": self.outside,
                "shifts": self.shifts,
                "diagnosis": None if self.diagnosis is None else vars(self.diagnosis),
                "draws_and_mean": self.draws_and_mean,
            }
        )
        return plain

    def __repr__(self) -> str:
        return "\n\n".join(table.text() for table in self.tables())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return "".join(table.html() for table in self.tables())

    def tables(self) -> list[Table]:
        """What the text and the page show."""
        rows = []
        for name, value in self.scores._asdict().items():
            spread = self.standard_errors.get(name)
            said = "" if spread is None else f"± {shown(name, spread)}" if "%" in LABELS[name] else f"± {spread:.2g}"
            rows.append([LABELS[name], shown(name, value), said])
        examples, draws = (
            f"{count:,} {name}{'s' if count > 1 else ''}"
            for count, name in ((self.examples, "example"), (self.draws, "draw"))
        )
        words = [] if self.standard_errors else ["one example: no standard errors"]
        if self.of_counts:
            words.append(
                "counts: an interval ends at whole numbers and holds at least its level, of small counts far more. "
                "Coverage above the level is then no sign of too wide a prediction."
            )
        if self.draws_and_mean is not None:
            words.extend(self.draws_and_mean.advice())
        tables = [Table(f"{examples}, {draws}", ["score", "value", "standard error"], rows, words=words)]
        if self.outside:
            found = [
                [data, by, f"{each.auroc:.4f}", f"{each.fpr95:.4f}"]
                for data, scores in self.outside.items()
                for by, each in scores.items()
            ]
            tables.append(Table("Outside data", ["data", "by", "AUROC", "FPR95"], found))
        if self.shifts:
            names = self.scores._fields
            shifted = [
                [shift, *(shown(name, value) for name, value in zip(names, scores, strict=True))]
                for shift, scores in {"none": self.scores, **self.shifts}.items()
            ]
            tables.append(Table("Shifts", ["shift", *(LABELS[name] for name in names)], shifted))
        if self.diagnosis is not None:
            tables.append(Table("Has the posterior been learnt?", [], [], words=str(self.diagnosis).splitlines()))
        return tables

    def figure(self) -> Any:
        """A matplotlib figure: the diagram, the risk-coverage curve, outside data and shifts."""
        return figure_of({"": self})

    def save_html(self, path: str | os.PathLike[str], title: str = "Verdict") -> None:
        """Write one self-contained page with the tables and the figure."""
        check_text("Verdict.save_html", title=title)
        _page.save(path, title, self.tables(), self.figure(), "Verdict.save_html")


# How scores are called where people read them.
LABELS = {
    "accuracy": "accuracy %",
    "nll": "NLL, nats",
    "brier": "Brier",
    "ece": "ECE %",
    "error_at_95": "error % at 95 % coverage",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage_50": "in 50 % interval, %",
    "coverage_90": "in 90 % interval, %",
}


def shown(name: str, value: float) -> str:
    """A score as people read it: fractions in per cent."""
    return f"{100 * value:.2f}" if "%" in LABELS[name] else f"{value:.4g}"


def figure_of(verdicts: Mapping[str, Verdict]) -> Any:
    """One figure of all verdicts, which are of the same data: a curve for each by name."""
    return _page.figure(panels_of(verdicts), named=len(verdicts) > 1)


def panels_of(verdicts: Mapping[str, Verdict]) -> dict[str, Callable[[Any], None]]:
    """What :func:`figure_of` draws, by title."""
    first = next(iter(verdicts.values()))
    panels: dict[str, Callable[[Any], None]] = {}
    of_classes = isinstance(first.scores, ClassScores)
    diagrams: dict[str, Any] = {name: verdict.diagram for name, verdict in verdicts.items()}
    if of_classes:
        panels["Are probabilities true?"] = lambda axes: _page.reliability(axes, diagrams)
    else:
        levels = {name: (diagram.level.tolist(), diagram.observed.tolist()) for name, diagram in diagrams.items()}
        panels["Do intervals hold what they promise?"] = lambda axes: _page.coverage(axes, levels)
    risks: dict[str, _page.Curve] = {}
    for name, verdict in verdicts.items():
        risk = [verdict.risk_coverage.at(coverage) for coverage in _GRID]
        risks[name] = _GRID, risk if of_classes else [math.sqrt(each) for each in risk]
    said = "error" if of_classes else "RMSE"
    panels[f"The {said} if only the surest are answered"] = lambda axes: _page.curves(
        axes, risks, "fraction answered", said
    )
    if first.outside:
        found = {
            name: {
                f"{data}: {by}" if len(first.outside) > 1 else by: each.auroc
                for data, scores in verdict.outside.items()
                for by, each in scores.items()
            }
            for name, verdict in verdicts.items()
        }
        panels["Is outside data recognised?"] = lambda axes: _page.dots(axes, found, "AUROC", (0.48, 1.02))
    if first.shifts:
        nlls = {
            name: {shift: scores.nll for shift, scores in {"none": verdict.scores, **verdict.shifts}.items()}
            for name, verdict in verdicts.items()
        }
        panels["What shifts of the inputs cost"] = lambda axes: _page.dots(axes, nlls, "NLL, nats")
    return panels


# --- measuring -------------------------------------------------------------------------------------------------------


def evaluate(
    model: Predictor | Ensemble | Estimator,
    data: Data,
    *,
    outside: Tensor | Data | Mapping[str, Tensor | Data] | None = None,
    shifts: Mapping[str, Callable[[Any], Any]] | None = None,
    head: str | int | None = None,
    diagnosis: Diagnosis | None = None,
    draws: int = 100,
    seed: int | None = None,
) -> Verdict:
    """Judge the predictions of ``model`` on held-out data.

    Args:
        model: A :class:`Bayesian`, an :class:`Ensemble`, what :func:`calibrate_temperature` returned, or anything with
            a method ``predict(*inputs, draws=..., seed=...)`` that gives a :class:`Predictive`. Or a fitted estimator
            of :mod:`bayesbackprop.sklearn`, or a pipeline that ends with one: ``data`` is then the pair ``(X, y)`` in
            the form and units that ``score`` takes, ``outside`` is an ``X``, and shifts get rows of it.
        data: Examples with their targets: a pair of tensors, a ``Dataset``, or an iterable of batches, which is read
            once. Targets of several elements count as so many examples for all scores but the NLL, which adds them up.
            Every example counts once: batches with weights are refused. Targets of ``ignore_index`` are left out.
        outside: Inputs that are unlike the training data, or a mapping from names to several such sets. A tensor, or as
            ``data``; targets are ignored.
        shifts: Functions of the inputs by name, such as one that adds noise: the same scores on what they return.
        head: Of a model with several targets (:class:`Joint`), the name or number of the one to judge.
        diagnosis: What :func:`diagnose` said of the posterior on the training set, to be shown with the rest.
        draws: Networks to average. An :class:`Ensemble` and an estimator have their own number.
        seed: Of the draws; None for the model's own, which is that of an estimator always.

    Examples:
        >>> from bayesbackprop import Bayesian, Gaussian
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> model = Bayesian(torch.nn.Linear(1, 1), Gaussian(1.0), seed=0)
        >>> verdict = evaluate(model, (x, 2 * x), outside=x + 100, draws=10)
        >>> verdict.outside["outside"]["variance"].auroc
        1.0
    """
    predict, device = predicting(model, draws, seed, "evaluate", head)
    _check_head(model, head)
    known = "None, or what diagnose() returned"
    check_type("evaluate", Diagnosis | None, known, diagnosis=diagnosis)
    check_type("evaluate", Mapping | None, "None, or a mapping from names to functions of the inputs", shifts=shifts)
    functions = dict(shifts or {})
    for name, function in functions.items():
        check_text("evaluate", shifts=name)
        check_callable("evaluate", shifts=function)
    sets = {} if outside is None else dict(outside) if isinstance(outside, Mapping) else {"outside": outside}
    for name in sets:
        check_text("evaluate", outside=name)

    found: dict[str | None, list[_Measured]] = {name: [] for name in (None, *functions)}
    at_mean: list[_Measured] = []
    for inputs, targets in examples_of(model, data, "data", "evaluate", device, head):
        for shift, parts in found.items():
            prediction = predict(inputs if shift is None else functions[shift](inputs))
            parts.append(_measure(prediction, targets))
        if isinstance(model, Bayesian) and may_blur(model):
            single = model.predict_mean(inputs=inputs)
            at_mean.append(_measure(single[head] if isinstance(single, JointPredictive) else single, targets))
    whole = {name: _joined(parts) for name, parts in found.items()}
    inside = whole[None]
    if not inside.examples:
        raise invalid("data", "evaluate", "with targets other than ignore_index", Described("none"))
    detections: dict[str, dict[str, Detection]] = {}
    for name, inputs_only in sets.items():
        batches = inputs_of(model, inputs_only, "outside", "evaluate", device)
        detections[name] = {
            by: Detection(auroc(inside.uncertainty[by], scores), fpr95(inside.uncertainty[by], scores))
            for by, scores in _joined([_uncertainty(predict(inputs)) for inputs in batches]).items()
        }
    return Verdict(
        examples=inside.examples,
        draws=prediction.draws,
        scores=inside.scores(),
        standard_errors=inside.standard_errors(),
        diagram=inside.diagram(),
        risk_coverage=inside.risk_coverage(),
        outside=detections,
        shifts={name: measured.scores() for name, measured in whole.items() if name is not None},
        diagnosis=diagnosis,
        of_counts=isinstance(prediction, ValuePredictive) and prediction.is_whole,
        draws_and_mean=draws_and_mean([inside.log_prob], [each.log_prob for each in at_mean]) if at_mean else None,
    )


def _check_head(model: object, head: object) -> None:
    """Refuse a head that a model has not, and none where it has several."""
    likelihood = getattr(model, "likelihood", None)
    heads: list[Any] = [None]
    constraint = "None for a model with one target"
    if isinstance(likelihood, Joint):
        heads = list(likelihood.names or range(len(likelihood.heads)))
        constraint = f"one of {heads}, the targets of the model: each has a verdict of its own"
    if not any(type(head) is type(each) and head == each for each in heads):
        raise invalid("head", "evaluate", constraint, head)


class _Classes(NamedTuple):
    """What is measured of predicted classes, with a row for each element of the targets."""

    log_prob: Tensor  # of examples
    probs: Tensor
    labels: Tensor
    uncertainty: dict[str, Tensor]
    elements: Tensor  # how many each example has

    @property
    def examples(self) -> int:
        return len(self.log_prob)

    def scores(self) -> ClassScores:
        known = self.probs, self.labels
        at_95 = self.risk_coverage().at(0.95)
        return ClassScores(
            1 - error(*known), float(-self.log_prob.mean()), brier(*known), calibration(*known).ece, at_95
        )

    def standard_errors(self) -> dict[str, float]:
        if self.examples == 1:
            return {}
        of_truth = self.probs.gather(1, self.labels[:, None])[:, 0]
        squares = self.probs.square().sum(1) - 2 * of_truth + 1  # as in ``brier``
        return {
            "accuracy": _standard_error(self._right(), self.elements),
            "nll": _standard_error(self.log_prob, torch.ones_like(self.elements)),
            "brier": _standard_error(squares, self.elements),
        }

    def diagram(self) -> Calibration:
        return calibration(self.probs, self.labels)

    def risk_coverage(self) -> RiskCoverage:
        return risk_coverage(self.uncertainty["max probability"], 1 - self._right())

    def _right(self) -> Tensor:
        return (self.probs.argmax(1) == self.labels).double()


class _Values(NamedTuple):
    """What is measured of predicted numbers, with a row for each element of the targets."""

    log_prob: Tensor  # of examples
    squares: Tensor
    crps: Tensor
    covered: Tensor
    uncertainty: dict[str, Tensor]  # of examples

    @property
    def examples(self) -> int:
        return len(self.log_prob)

    def scores(self) -> ValueScores:
        coverage = dict(zip(LEVELS, self.diagram().observed.tolist(), strict=True))
        means = float(-self.log_prob.mean()), float(self.crps.mean())
        return ValueScores(math.sqrt(self.squares.mean()), *means, coverage[0.5], coverage[0.9])

    def standard_errors(self) -> dict[str, float]:
        if self.examples == 1:
            return {}
        each = {"nll": self.log_prob, "crps": self.crps}
        each |= {f"coverage_{level:.0%}"[:-1]: self.covered[:, LEVELS.index(level)] for level in (0.5, 0.9)}
        found = {name: _standard_error(values, self._elements(values)) for name, values in each.items()}
        root = math.sqrt(self.squares.mean())  # d sqrt(m) = dm / (2 sqrt(m))
        spread = _standard_error(self.squares, self._elements(self.squares)) / (2 * root) if root else 0.0
        return {"rmse": spread, **found}

    def _elements(self, values: Tensor) -> Tensor:
        return torch.full((self.examples,), len(values) // self.examples)

    def diagram(self) -> Coverage:
        return Coverage(torch.tensor(LEVELS, dtype=torch.float64), self.covered.mean(0))

    def risk_coverage(self) -> RiskCoverage:
        return risk_coverage(self.uncertainty["variance"], self.squares.view(self.examples, -1).mean(1))


_Measured = _Classes | _Values


def _measure(prediction: Predictive, targets: Tensor) -> _Measured:
    """What is measured of a batch, on the CPU and in double precision."""
    if isinstance(prediction, ClassPredictive):
        probs = _table(prediction.probs, prediction)
        ignored = getattr(prediction.components, "ignore_index", None)
        known = torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets != ignored
        _check_classes(targets.masked_fill(~known, 0), prediction, probs.shape[1])
        log_prob, uncertainty = _per_example(prediction, targets), _uncertainty(prediction)
        rows = known.flatten().cpu()
        elements = rows.view(len(log_prob), -1).sum(1)
        examples = elements > 0
        return _Classes(
            log_prob[examples],
            probs[rows],
            targets.flatten().long().cpu()[rows],
            {name: values[rows] for name, values in uncertainty.items()},
            elements[examples],
        )
    if not isinstance(prediction, ValuePredictive):
        got = Described(f"one that gives a {type(prediction).__name__}")
        raise invalid("model", "evaluate", "one that predicts classes or numbers", got)
    log_prob = _per_example(prediction, targets)  # which refuses targets of another shape
    squares = (prediction.mean - targets).double().square().flatten().cpu()
    try:
        score = crps(prediction, targets).flatten().cpu()
        inside = covered(prediction, targets, LEVELS).flatten(1).T.double().cpu()
    except NotImplementedError:  # a distribution without quantiles
        score, inside = (torch.full(shape, math.nan) for shape in (squares.shape, (len(squares), len(LEVELS))))
    return _Values(log_prob, squares, score, inside, _uncertainty(prediction))


def _uncertainty(prediction: Predictive) -> dict[str, Tensor]:
    """The measures of uncertainty: of each element of the targets for classes, of each example for numbers."""
    if not isinstance(prediction, ClassPredictive):
        if not bool(prediction.variance.isfinite().all()):
            constraint = "a model whose predictions have a variance (a Student t has one from 2 degrees of freedom on)"
            raise invalid("model", "evaluate", constraint, Described("one whose variance is not finite"))
        parts = {"variance": prediction.variance, "epistemic": prediction.epistemic}
        return {name: part.double().reshape(len(part), -1).sum(1).cpu() for name, part in parts.items()}
    probs = _table(prediction.probs, prediction)
    by_draw = _table(prediction.components.probs, prediction).view(prediction.draws, *probs.shape)
    return {
        "entropy": prediction.entropy.double().flatten().cpu(),
        "max probability": 1 - probs.max(1).values,
        # Of one draw it is 0, but for rounding.
        "epistemic": prediction.epistemic.double().flatten().cpu() * (prediction.draws > 1),
        "variance": by_draw.var(0, correction=0).sum(1),  # of the probabilities, over the draws
        "reverse information": _reverse_information(prediction, probs),
    }


def _reverse_information(prediction: ClassPredictive, probs: Tensor) -> Tensor:
    """E_w KL[P(y|x) || P(y|x,w)], where the epistemic part is E_w KL[P(y|x,w) || P(y|x)].

    It counts draws that all but rule out what the others believe, by how much they do.
    """
    components = prediction.components
    logits = components.logits.double().cpu()
    if isinstance(components, distributions.Bernoulli):
        log_by_draw = torch.stack([logsigmoid(-logits), logsigmoid(logits)], -1)
    else:
        log_by_draw = logits.log_softmax(-1)
    mean_of_logs = log_by_draw.flatten(0, -2).view(prediction.draws, *probs.shape).mean(0)
    gained = torch.xlogy(probs, probs) - probs * mean_of_logs
    return gained.sum(1).clamp(min=0) * (prediction.draws > 1)  # below 0, and of one draw not 0, only by rounding


def _table(probs: Tensor, prediction: ClassPredictive) -> Tensor:
    """Probabilities ``[elements, classes]``; yes and no are the classes 1 and 0."""
    probs = probs.double().cpu()
    if isinstance(prediction.components, distributions.Bernoulli):
        return torch.stack([1 - probs, probs], -1).flatten(0, -2)
    return probs.flatten(0, -2)


def _check_classes(targets: Tensor, prediction: ClassPredictive, classes: int) -> None:
    yes_or_no = isinstance(prediction.components, distributions.Bernoulli)
    known = (targets == targets.long()) & (targets >= 0) & (targets < classes)
    if (targets.dtype != torch.int64 and not yes_or_no) or not bool(known.all()):
        constraint = f"data whose targets are class indices in [0, {classes - 1}]"
        constraint += "" if yes_or_no else " of type torch.int64"
        raise invalid("data", "evaluate", constraint, tensor_shape(targets))


def _per_example(prediction: Predictive, targets: Tensor) -> Tensor:
    """log P(y|x) of each example; the elements of its target add up."""
    log_prob = prediction.log_prob(targets).double().cpu()
    return log_prob.flatten(1).sum(1) if log_prob.dim() > 1 else log_prob


def _joined(parts: list[Any]) -> Any:
    """Batches one after the other, tensor by tensor."""
    return tree_map(lambda *tensors: torch.cat(tensors), *parts)


def _standard_error(values: Tensor, elements: Tensor) -> float:
    """Of the mean over all elements, of which those of one example need not be independent.

    It is that of the ratio of two means over examples: of the sums of their values, and of how many they are.
    """
    example = torch.arange(len(elements)).repeat_interleave(elements)
    sums = torch.zeros(len(elements), dtype=values.dtype).index_add_(0, example, values - values.mean())
    return float(sums.std() * math.sqrt(len(elements)) / len(values))


def _plain(value: Any) -> Any:
    if isinstance(value, RiskCoverage):
        return {"coverage": _GRID, "risk": _plain([value.at(coverage) for coverage in _GRID])}
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
