"""The same verdict on several methods, each trained on a user's own network and data in as many epochs.

The methods themselves are in ``_methods.py``.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bayesbackprop import _page
from bayesbackprop._batches import Data
from bayesbackprop._errors import (
    Described,
    check_callable,
    check_choice,
    check_count,
    check_flag,
    check_list,
    check_positive,
    check_probability,
    check_seed,
    check_text,
    check_type,
    invalid,
    tensors_of,
)
from bayesbackprop._methods import IVON_SETTINGS, METHODS, SkippedError, Task, seeded
from bayesbackprop._page import Table
from bayesbackprop.likelihoods import Categorical, Gaussian, Joint, Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.verdict import LABELS, Predictor, Verdict, evaluate, figure_of, shown

__all__ = ["METHODS", "Comparison", "compare"]

# What is better when it is higher, and what when it is nearest to a value.
_HIGHER, _NEAREST = ("accuracy", "auroc"), {"coverage_50": 0.5, "coverage_90": 0.9}


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """What :func:`compare` found. ``print(comparison)`` shows a table, :meth:`save_html` writes a page.

    Attributes:
        verdicts: By method.
        models: What predicts, by method: each has ``predict(*inputs, draws=..., seed=...)``.
        seconds: The time that the training of each took.
        notes: What was done for each method; of those without a verdict, why there is none.
    """

    verdicts: Mapping[str, Verdict]
    models: Mapping[str, Predictor]
    seconds: Mapping[str, float]
    notes: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Verdicts, seconds and notes as plain data that JSON can hold."""
        verdicts = {method: verdict.to_dict() for method, verdict in self.verdicts.items()}
        return {"verdicts": verdicts, "seconds": dict(self.seconds), "notes": dict(self.notes)}

    def __repr__(self) -> str:
        return "\n\n".join(table.text() for table in self.tables())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return "".join(table.html() for table in self.tables())

    def tables(self) -> list[Table]:
        """What the text and the page show; the best of each column is marked."""
        notes = [f"{method}: {note}" for method, note in self.notes.items()]
        if not self.verdicts:
            return [Table("No method could be run", [], [], words=notes)]
        first = next(iter(self.verdicts.values()))
        names = first.scores._fields
        columns = [[getattr(verdict.scores, name) for verdict in self.verdicts.values()] for name in names]
        rows = [
            [method, *(shown(name, getattr(verdict.scores, name)) for name in names), f"{self.seconds[method]:.1f}"]
            for method, verdict in self.verdicts.items()
        ]
        best = frozenset(
            (row, number + 1)
            for number, name in enumerate(names)
            for row in _best(columns[number], name in _HIGHER, _NEAREST.get(name))
        )
        title = f"{first.examples:,} examples; the best of each column is marked"
        tables = [Table(title, ["method", *(LABELS[name] for name in names), "seconds"], rows, best, notes)]
        for data, scores in first.outside.items():
            found = [[verdict.outside[data][by].auroc for by in scores] for verdict in self.verdicts.values()]
            name = "" if list(first.outside) == ["outside"] else f": {data}"
            tables.append(self._grid(f"AUROC of outside data{name}", list(scores), found, "{:.4f}", higher=True))
        if first.shifts:
            shifts = list(first.shifts)
            nlls = [[verdict.shifts[shift].nll for shift in shifts] for verdict in self.verdicts.values()]
            tables.append(self._grid("NLL under shifts, nats", shifts, nlls, "{:.4g}", higher=False))
        return tables

    def _grid(self, title: str, columns: list[str], values: list[list[float]], form: str, higher: bool) -> Table:
        rows = [[method, *map(form.format, numbers)] for method, numbers in zip(self.verdicts, values, strict=True)]
        best = frozenset(
            (row, number + 1)
            for number, column in enumerate(zip(*values, strict=True))
            for row in _best(column, higher, None)
        )
        return Table(title, ["method", *columns], rows, best)

    def figure(self) -> Any:
        """A matplotlib figure with a curve for each method."""
        return figure_of(self.verdicts)

    def save_html(self, path: str | os.PathLike[str], title: str = "Comparison") -> None:
        """Write one self-contained page with the tables and the figure."""
        check_text("Comparison.save_html", title=title)
        _page.save(path, title, self.tables(), self.figure(), "Comparison.save_html")


def _best(values: Sequence[float], higher: bool, nearest: float | None) -> list[int]:
    """The rows with the best value, by what is shown of it."""
    costs = [-value if higher else value if nearest is None else round(abs(value - nearest), 9) for value in values]
    known = [cost for cost in costs if not math.isnan(cost)]
    return [row for row, cost in enumerate(costs) if known and cost <= min(known)]


def compare(
    make_net: Callable[[], nn.Module],
    train: Iterable[Any],
    test: Data,
    *,
    epochs: int,
    likelihood: Likelihood | None = None,
    methods: Sequence[str] = tuple(METHODS),
    wrap: Callable[[nn.Module], Bayesian | FreeEnergy] | None = None,
    outside: Any = None,
    shifts: Mapping[str, Callable[[Any], Any]] | None = None,
    n: int | None = None,
    lr: float | None = None,
    dropout: float = 0.1,
    ivon: Mapping[str, Any] | None = None,
    draws: int = 100,
    seed: int = 0,
    progress: bool = True,
) -> Comparison:
    """Train a network by several methods, in as many epochs each, and judge them on the same data.

    The seed decides everything: initial weights, the order of the examples, and all draws. All methods start from the
    same initial weights (of the ensemble, the first member). A method that cannot be run on the network is skipped,
    and a note says why.

    Args:
        make_net: Makes a new network with random weights, such as ``lambda: nn.Sequential(...)``.
        train: The training set, as :func:`fit` takes it: read once in each epoch.
        test: What to judge by, as :func:`evaluate` takes it; also read once for each method.
        epochs: Passes over ``train`` for each network.
        likelihood: Unless given, ``Categorical()`` for targets of int64 and ``Gaussian("learnt")`` for floats.
        methods: Some of ``bayesbackprop``, ``plain``, ``deep ensemble``, ``MC dropout``, ``Laplace`` and ``IVON``.
        wrap: What makes a network Bayesian, with a prior of your own, say; it may return a :class:`FreeEnergy`. Unless
            given, ``Bayesian(net, likelihood)``.
        outside: Data unlike the training set, for :func:`evaluate`.
        shifts: Functions of the inputs by name, for :func:`evaluate`.
        n: The number of training examples, where ``train`` does not say it.
        lr: The learning rate of Adam, for all methods but IVON. Unless given, ours has what :func:`fit` chooses, the
            others 0.001.
        dropout: The probability of dropout, where the network has none of its own.
        ivon: Settings of :class:`IVON`, such as ``{"lr": 0.02, "hess_init": 5.0}``: it is sensitive to both.
        draws: Networks to average, for the methods that draw.
        seed: Of everything.
        progress: Whether to show it: a bar on a terminal, and a line for each method.

    Examples:
        >>> import torch
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> y = (x[:, 0] > 0).long()
        >>> from bayesbackprop import Batches
        >>> batches, methods = Batches(x, y, 20), ["plain", "MC dropout"]
        >>> found = compare(lambda: nn.Linear(2, 2), batches, (x, y), epochs=2, methods=methods, progress=False)
        >>> print(found.notes["MC dropout"])
        the network has no dropout: 0.1 was put before its last linear layer ''
    """
    check_callable("compare", make_net=make_net)
    if wrap is not None:
        check_callable("compare", wrap=wrap)
    epochs, draws = check_count("compare", epochs=epochs, draws=draws).values()
    if lr is not None:
        lr = check_positive("compare", lr=lr)["lr"]
    check_type("compare", Mapping | None, "None or a mapping of settings, such as {'lr': 0.1}", ivon=ivon)
    if ivon is not None and not ivon.keys() <= set(IVON_SETTINGS):
        raise invalid("ivon", "compare", f"a mapping of some of {list(IVON_SETTINGS)}", ivon)
    dropout = check_probability("compare", dropout=dropout)["dropout"]
    seed = check_seed("compare", seed=seed)["seed"]
    progress = check_flag("compare", progress=progress)["progress"]
    for method in list(check_list("compare", methods=methods)) or [""]:
        check_choice("compare", list(METHODS), methods=method)
    check_type("compare", Likelihood | None, "None or a Likelihood, such as Categorical()", likelihood=likelihood)
    if isinstance(likelihood, Joint):
        constraint = "of one target (of several: train the model yourself, then evaluate(model, data, head=...))"
        raise invalid("likelihood", "compare", constraint, Described("a Joint"))
    with seeded(seed):
        first = _first_batch(train)
        n = _examples(train) if n is None else check_count("compare", n=n)["n"]
    if likelihood is None:
        likelihood = Gaussian("learnt") if first[1].is_floating_point() else Categorical()
    task = Task(make_net, train, n, likelihood, epochs, lr, dropout, seed, progress, wrap, dict(ivon or {}))
    verdicts: dict[str, Verdict] = {}
    models: dict[str, Predictor] = {}
    seconds: dict[str, float] = {}
    notes: dict[str, str] = {}
    for method in methods:
        task.method, task.note, task.seconds = method, "", 0.0
        try:
            with seeded(seed):
                model = METHODS[method](task)
            with seeded(seed):  # so that a shift that is random is the same for all
                verdict = evaluate(model, test, outside=outside, shifts=shifts, draws=draws, seed=seed)
        except SkippedError as error:
            notes[method] = f"skipped: {error}"
        else:
            verdicts[method], models[method], notes[method] = verdict, model, task.note
            seconds[method] = task.seconds
        if progress:
            print(f"{method}: {_line(verdicts[method]) if method in verdicts else notes[method]}", file=sys.stderr)
    return Comparison(verdicts, models, seconds, notes)


def _line(verdict: Verdict) -> str:
    """A verdict in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in verdict.scores._asdict().items())


def _first_batch(train: Iterable[Any]) -> Any:
    """The first pair of the training set, from which the kind of its targets is known."""
    if not isinstance(train, Iterable) or not getattr(train, "ndim", 1):
        raise invalid("train", "compare", "a DataLoader, Batches or another iterable of pairs", train)
    batch = next(iter(train), None)
    if isinstance(batch, tuple | list) and len(batch) == 3:
        constraint = "pairs (inputs, targets), since the methods of others know no weights of examples"
        raise invalid("train", "compare", constraint, Described("batches (inputs, targets, weights)"))
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Mapping | tuple | list):
        constraint = "pairs with one tensor of targets (of several: train the model yourself, then judge each by "
        raise invalid("train", "compare", f"{constraint}evaluate(model, data, head=...))", Described("several"))
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        got = Described("one without batches" if batch is None else f"one of {type(batch).__name__}s")
        raise invalid("train", "compare", "an iterable of pairs (inputs, targets)", got)
    if iter(train) is train:
        raise invalid("train", "compare", "an iterable that can be read in each epoch anew", Described("an iterator"))
    return batch


def _examples(train: Any) -> int:
    """The number of examples of the training set, counted where it does not say."""
    for owner, name in ((train, "examples"), (getattr(train, "dataset", None), "__len__")):
        value = getattr(owner, name, None)
        if value is not None:
            return int(value() if callable(value) else value)
    return sum(len(tensors_of(targets)[0]) for _, targets in train)
