"""Tables without code: a table of a user's own in, a Bayesian network and a verdict on held-out rows out.

:func:`fit_table` guesses what each column is and says so; :meth:`TableModel.predict` adds predictions to new rows. What
scikit-learn's transformers have learnt is kept as plain numbers and words, so a file of it never runs code.
"""

import html
import io
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bayesbackprop import _columns, _page, saving
from bayesbackprop._columns import Column, Frame, marks_in, numbers_of, pd, read_table, words_of
from bayesbackprop._errors import (
    Described,
    check_choice,
    check_count,
    check_flag,
    check_list,
    check_path,
    check_probability,
    check_text,
    invalid,
)
from bayesbackprop._files import check_counter, read, write
from bayesbackprop._networks import drawn_from, from_file, mlp
from bayesbackprop._page import Table
from bayesbackprop._rivals import Predicting, promises, rivals, trust, worth
from bayesbackprop.comparison import Comparison
from bayesbackprop.likelihoods import NegativeBinomial
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.prediction import Predictive
from bayesbackprop.priors import Normal
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesbackprop.training import Batches, Callback, Run, fit
from bayesbackprop.verdict import evaluate, panels_of

__all__ = ["Column", "TableModel", "fit_table"]

Kind = Literal["regression", "classification", "counts"]

# Rows that are needed, to learn from some and judge by others.
_FEWEST = 10
# Whole numbers of at most so many values are taken for classes. There can be so many classes.
_GRADES, _CLASSES = 10, 100
# Rows to predict at a time, of whose outputs there are ``draws`` times as many; and points in a picture.
_ROWS, _POINTS = 2**12, 300
_QUANTILES = {"q05": 0.05, "q50": 0.5, "q95": 0.95}
_OURS = "Bayesian network"


# --- what is fitted --------------------------------------------------------------------------------------------------


class _Counts:
    """A regressor of counts: what is used here of the interface of ``BayesianMLPRegressor``, and its recipe."""

    def __init__(self, *, random_state: int = 0, draws: int = 100, max_iter: int = 500, verbose: bool = False) -> None:
        self.random_state, self.draws, self.max_iter, self.verbose = random_state, draws, max_iter, verbose

    def fit(self, X: NDArray[Any], y: NDArray[Any]) -> Self:  # noqa: N803 (scikit-learn's name)
        random = torch.Generator().manual_seed(self.random_state)
        net = mlp([X.shape[1], 50, 1], linear=drawn_from(random))
        nn.init.constant_(net[-1].bias, math.log(y.mean()))  # type: ignore[arg-type]
        self.model_ = Bayesian(net, NegativeBinomial(), Normal(1.0), sigma=0.01, seed=self.random_state)
        batches = Batches(torch.tensor(X), torch.tensor(y, dtype=torch.float32), max(32, len(X) // 50))
        steps = self.max_iter * len(batches)
        optimiser = torch.optim.Adam(self.model_.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
        free_energy = FreeEnergy(self.model_, len(X), warmup=int(0.8 * steps))
        lines = [_Line()] if self.verbose else []
        fit(free_energy, batches, epochs=self.max_iter, optimiser=optimiser, scheduler=scheduler, callbacks=lines)
        return self

    @property
    def n_features_in_(self) -> int:
        return int(next(self.model_.net.parameters()).shape[1])

    def predictive(self, X: NDArray[Any]) -> Predictive:  # noqa: N803
        return self.model_.predict(torch.tensor(X), draws=self.draws, estimator="shared")

    def save(self, path: Path) -> None:
        saving.save(self.model_, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        made, model = cls(), from_file(path)
        if not isinstance(model, Bayesian) or not isinstance(model.likelihood, NegativeBinomial):
            raise invalid("path", "TableModel.load", "the file of a model of counts", Described(path))
        made.model_ = model
        return made


class _Line(Callback):
    def on_epoch(self, run: Run) -> None:
        print(f"Iteration {run.epoch}")


_ESTIMATORS: Mapping[str, Any] = {
    "regression": BayesianMLPRegressor,
    "classification": BayesianMLPClassifier,
    "counts": _Counts,
}


@contextmanager
def _bar(title: str, passes: int) -> Iterator[None]:
    """A bar on the terminal, which each line that is printed within moves on."""
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    columns = ("{task.description}", rich.progress.BarColumn(None), rich.progress.TimeRemainingColumn())
    with rich.progress.Progress(
        *columns, console=console, disable=not console.is_terminal, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task(title, total=passes)

        class Lines(io.TextIOBase):
            def write(self, text: str) -> int:
                bar.advance(task, text.count("\n"))
                return len(text)

        with redirect_stdout(Lines()):
            yield


# --- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class TableModel:
    """A network for the rows of a table. ``print(model)`` says what its columns are, and how good it is.

    Attributes:
        target: The column that it predicts.
        kind: ``"regression"``, ``"classification"`` or ``"counts"``.
        columns: What each other column is: a :class:`Column` of a kind, a note, and what was learnt of it.
        estimator: What predicts, from the encoded columns.
        sentences: The verdict in words: whether the network is worth it, and whether its uncertainty is true.
        notes: What else there is to say of the table.
        comparison: The verdicts on the network, a linear model and a trivial one, on the same held-out rows; None in a
            model that was loaded.
    """

    target: str
    kind: Kind
    columns: tuple[Column, ...]
    estimator: Any
    sentences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    comparison: Comparison | None = None
    _points: Mapping[str, list[float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n\n".join([*(table.text() for table in self.tables()), "\n".join(self.sentences)])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        said = "".join(f"<p>{html.escape(each)}</p>" for each in self.sentences)
        return said + "".join(table.html() for table in self.tables())

    def tables(self) -> list[Table]:
        """What the text and the page show."""
        rows = [[column.name, column.kind, column.note] for column in self.columns]
        title = f"Columns, to predict '{self.target}' ({self.kind})"
        about = Table(title, ["column", "taken for", "note"], rows, words=self.notes)
        return [about, *([] if self.comparison is None else self.comparison.tables())]

    def predict(self, table: Any) -> Any:
        """The table with further columns; a warning says what was not as in training, and an error what cannot be.

        They are ``mean``, ``sd``, ``q05``, ``q50``, ``q95`` and ``epistemic``, the standard deviation of the mean, for
        numbers and counts; for classes ``predicted``, ``p_<class>`` for each, ``entropy`` and ``epistemic``, the part
        of it that the draws disagree about, in nats. Where the table has one of these names, all begin with
        ``predicted_``.

        Args:
            table: As :func:`fit_table` takes it. A frame of polars gives one of polars, others give one of pandas.
        """
        owner = "TableModel.predict"
        frame, notes = read_table(table, owner)
        inputs = self._inputs(frame, owner, notes)
        parts = [self._summary(self.estimator.predictive(x)) for x in np.array_split(inputs, -(-len(inputs) // _ROWS))]
        added = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        prefix = "predicted_" if set(added) & set(frame.columns) else ""
        result = pd.concat([frame, pd.DataFrame(added).add_prefix(prefix)], axis=1)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        if isinstance(table, pd.DataFrame):
            return result.set_index(table.index)
        if type(table).__module__.startswith("polars"):
            import polars

            return polars.from_pandas(result)
        return result

    def _inputs(self, frame: Frame, owner: str, notes: list[str]) -> NDArray[Any]:
        """What the network sees of a table."""
        used = [column for column in self.columns if column.kind != "dropped"]
        if missing := [column.name for column in used if column.name not in frame]:
            constraint = f"a table with the columns {[column.name for column in used]}"
            raise invalid("table", owner, constraint, Described(f"one without {missing}"))
        if extra := [name for name in frame if name not in {self.target, *(column.name for column in self.columns)}]:
            notes.append(f"Columns that training had not are ignored: {extra}.")
        parts = []
        for column in used:
            values = column.read(frame[column.name], owner, notes)
            if unseen := column.unseen(values):
                shown = ", ".join(map(repr, unseen[:3])) + (f" and {len(unseen) - 3:,} more" if unseen[3:] else "")
                notes.append(f"Training had not seen {shown} in '{column.name}'.")
            parts.append(column.encoded(values))
        return np.concatenate(parts, axis=1).astype(np.float32)

    def _summary(self, prediction: Predictive) -> dict[str, NDArray[Any]]:
        """The columns that a prediction adds."""
        if self.kind == "classification":
            probs = prediction.mean.double().numpy()
            classes = self.estimator.classes_
            found = {"predicted": classes[probs.argmax(1)].astype(object)}
            found |= {f"p_{name}": probs[:, number] for number, name in enumerate(classes)}
            parts = {"entropy": prediction.entropy, "epistemic": prediction.epistemic}
        else:
            found, levels = {}, prediction.quantiles(list(_QUANTILES.values()))
            parts = {"mean": prediction.mean, "sd": prediction.stddev, **dict(zip(_QUANTILES, levels, strict=True))}
            parts["epistemic"] = prediction.epistemic.sqrt()
        return found | {name: part.double().numpy().reshape(len(part)) for name, part in parts.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file, atomically: the estimator's own, with the columns added to it."""
        check_path("TableModel.save", path=path)
        with tempfile.TemporaryDirectory() as folder:
            self.estimator.save(Path(folder, "estimator"))
            file = read(Path(folder, "estimator"), None, "TableModel.save")
        about = {"target": self.target, "kind": self.kind, "draws": self.estimator.draws}
        about |= {"sentences": self.sentences, "notes": self.notes}
        columns = [column.to_json() for column in self.columns]
        write(path, file.kind, file.tensors, {**file.contents, "table": {**about, "columns": columns}})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The model in a file that :meth:`save` wrote. No code runs from the file."""
        file = read(path, None, "TableModel.load")
        if "table" not in file.contents:
            got = Described(f"{os.fspath(path)}, which has no table")
            raise invalid("path", "TableModel.load", "a file that `bbb fit` or TableModel.save wrote", got)
        with file.understanding():
            about = dict(file.contents["table"])
            columns = tuple(Column.from_json(each) for each in about.pop("columns"))
            draws = check_counter("draws", about.pop("draws"))
            said = [about[name] for name in ("target", "kind")] + [*about["sentences"], *about["notes"]]
            if not all(isinstance(each, str) for each in said):
                raise TypeError("words of the table that are no text")
            estimator = _ESTIMATORS[about["kind"]].load(Path(path))
            estimator.draws = check_count("TableModel", draws=draws)["draws"]
            if estimator.n_features_in_ != sum(column.inputs for column in columns):
                raise ValueError(f"{estimator.n_features_in_} features, which are not those of the columns")
        sentences, notes = (tuple(about[name]) for name in ("sentences", "notes"))
        return cls(about["target"], about["kind"], columns, estimator, sentences, notes)

    def save_html(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Write one self-contained page: the verdict in words and as a picture, then the tables."""
        title = f"Predicting '{self.target}'" if title is None else title
        check_text("TableModel.save_html", title=title)
        if self.comparison is None:
            raise invalid("model", "TableModel.save_html", "one that was just fitted", Described("a loaded one"))
        calibration, risk = panels_of({"": self.comparison.verdicts[_OURS]}).items()
        points = ("Held-out rows", lambda axes: _page.intervals(axes, **self._points))
        drawn = _page.figure(dict([points, calibration] if self._points else [calibration, risk]), named=False)
        about, *verdicts = self.tables()
        _page.save(path, title, [*verdicts, about], drawn, "TableModel.save_html", self.sentences)


# --- fitting ---------------------------------------------------------------------------------------------------------


def fit_table(
    table: Any,
    target: str,
    *,
    kind: Kind | None = None,
    drop: Sequence[str] = (),
    held_out: float = 0.2,
    epochs: int | None = None,
    draws: int = 100,
    seed: int = 0,
    progress: bool = False,
) -> TableModel:
    """A Bayesian network that predicts one column of a table by the others, and the verdict on it on held-out rows.

    Args:
        table: A DataFrame of pandas or polars, or the path of a csv, tsv or parquet file.
        target: The column to predict. Rows without it are left out.
        kind: ``"regression"``, ``"classification"`` or ``"counts"``. None guesses: whole numbers of up to ten values,
            text, and yes or no are classes, all other numbers are for regression.
        drop: Columns to leave out.
        held_out: The share of rows, in (0, 1), on which the model is judged and not trained.
        epochs: Passes over the data; None for 100, of counts 500. All are made.
        draws: Networks to average in a prediction.
        seed: Of the choice of held-out rows, the initial weights and the draws.
        progress: Show a bar on the terminal.

    Examples:
        >>> frame = pd.DataFrame({"size": range(40, 140), "town": ["Bonn", "Kiel"] * 50})
        >>> frame["price"] = 3.0 * frame["size"] + 20.0 * (frame["size"] % 7) + 50.0 * (frame["town"] == "Kiel")
        >>> model = fit_table(frame, "price", epochs=1000)
        >>> [column.kind for column in model.columns]
        ['number', 'category']
        >>> list(model.predict(frame).columns)
        ['size', 'town', 'price', 'mean', 'sd', 'q05', 'q50', 'q95', 'epistemic']
    """
    owner = "fit_table"
    check_text(owner, target=target)
    if kind is not None:
        check_choice(owner, get_args(Kind), kind=kind)
    for name in check_list(owner, drop=drop):
        check_text(owner, drop=name)
    check_flag(owner, progress=progress)
    share = check_probability(owner, held_out=held_out)["held_out"]
    options = check_count(owner, draws=draws) | check_count(owner, least=0, below=2**32, seed=seed)
    options["random_state"] = options.pop("seed")
    if epochs is not None:
        options["max_iter"] = check_count(owner, epochs=epochs)["epochs"]
    frame, notes = read_table(table, owner)
    for name, value in (("target", target), *(("drop", each) for each in drop)):
        if value not in frame:
            raise invalid(name, owner, f"one of the columns {list(frame)}", value)
    if target in drop:
        raise invalid("drop", owner, "other columns than the target", list(drop))
    frame, y, kind = _targets(frame, target, kind, notes, owner)
    others = [name for name in frame if name != target]
    columns = [Column(name, "dropped", "as asked") if name in drop else _columns.guess(frame[name]) for name in others]
    if all(column.kind == "dropped" for column in columns):
        got = Described("; ".join(f"'{column.name}': {column.note}" for column in columns) or "no other column")
        raise invalid("table", owner, "a table with columns that can say something about the target", got)
    train, test = _split(y, share, options["random_state"], kind, owner)
    columns = _columns.learn(columns, frame.loc[train].reset_index(drop=True), owner)
    estimator = _ESTIMATORS[kind](**options)
    model = TableModel(target, kind, tuple(columns), estimator, (), tuple(notes))
    x = model._inputs(frame, owner, [])

    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if progress:
            estimator.verbose = True
            with _bar(f"fitting {len(train):,} rows, {x.shape[1]} inputs", estimator.max_iter):
                estimator.fit(x[train], y[train])
            estimator.verbose = False
        else:
            estimator.fit(x[train], y[train])
    for each in said:  # in the words of this function, at the line that called it
        warnings.warn(
            str(each.message).replace("a larger max_iter", "more epochs").replace("max_iter", "epochs"),
            each.category,
            stacklevel=2,
        )
    return _judged(model, x, y, train, test, time.perf_counter() - started)


def _targets(
    frame: Frame, target: str, kind: Kind | None, notes: list[str], owner: str
) -> tuple[Frame, NDArray[Any], Kind]:
    """The rows that have a target, the targets as estimators take them, and what kind they are."""
    guessed, words = _columns.guess(frame[target]), words_of(frame[target])
    form = guessed.form if guessed.kind == "number" else ""
    numbers = numbers_of(frame[target], form)
    words = words.where(~words.isin(guessed.absent), None)
    distinct = words.nunique()
    if not distinct:
        raise invalid("target", owner, "a column with values", Described(f"'{target}', where all are missing"))
    if distinct == 1:
        raise invalid("target", owner, "a column of at least two different values", words.dropna().iloc[0])
    if kind is None:
        are_grades = distinct <= _GRADES and bool((numbers[words.notna()] % 1 == 0).all())
        is_number = guessed.kind == "number" or (guessed.kind == "dropped" and not np.isnan(numbers).any())
        kind = "regression" if is_number and not are_grades else "classification"
        notes.append(f"'{target}' is taken for {kind}; kind (--kind) can say otherwise.")
    if form and kind != "classification":
        notes.append(f"'{target}' is written as {form}; predictions are plain numbers.")
    if guessed.kind == "date":
        raise invalid("target", owner, "a column of numbers or classes", Described(f"'{target}', which holds dates"))
    if kind == "classification":
        known = words.notna()
        if distinct > min(_CLASSES, known.sum() / 2):
            constraint = f"a column of at most {_CLASSES} classes, each in two rows on average (or choose another kind)"
            got = f"'{target}' with {distinct:,} different values"
            looks = marks_in(words[known])
            raise invalid("target", owner, constraint, Described(got + (f", which look like {looks}" if looks else "")))
        y: NDArray[Any] = words[known].to_numpy(dtype=str)
    else:
        known = pd.Series(~np.isnan(numbers))
        odd = words[~known & words.notna()]
        y = numbers[known][:, None]
        is_count = bool(((y >= 0) & (y % 1 == 0)).all())
        if len(odd) or (kind == "counts" and not is_count):
            got = f"'{target}' with {odd.iloc[0] if len(odd) else float(y[(y < 0) | (y % 1 != 0)][0])!r}"
            got += f", which looks like {looks}" if len(odd) and (looks := marks_in(odd)) else ""
            raise invalid("target", owner, f"a column of {'counts' if kind == 'counts' else 'numbers'}", Described(got))
    if len(y) < _FEWEST:
        raise invalid("table", owner, f"a table with at least {_FEWEST} rows that have a target", len(y))
    if len(y) < len(frame):
        notes.append(f"{len(frame) - len(y):,} rows without '{target}' are left out.")
    return frame[known.to_numpy()].reset_index(drop=True), y, kind


def _split(y: NDArray[Any], share: float, seed: int, kind: Kind, owner: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rows to train on and those to judge by; of each class at least one is trained on."""
    order = np.random.default_rng(seed).permutation(len(y))
    first = np.unique(y[order], return_index=True)[1] if kind == "classification" else np.arange(2)
    order = np.concatenate([order[first], np.delete(order, first)])
    count = round(share * len(y))
    if not 1 <= count <= len(y) - len(first):
        raise invalid("held_out", owner, f"a share in (0, 1) that leaves rows of {len(y)} on both sides", share)
    return order[:-count], order[-count:]


def _judged(
    model: TableModel, x: NDArray[Any], y: NDArray[Any], train: NDArray[Any], test: NDArray[Any], seconds: float
) -> TableModel:
    """The model, whose fit took so long, with the verdict on it."""
    of_classes = model.kind == "classification"
    known = torch.tensor(np.searchsorted(model.estimator.classes_, y) if of_classes else y)
    started = time.perf_counter()
    with warnings.catch_warnings():  # a linear model that has not quite converged is one still
        warnings.simplefilter("ignore")
        models: dict[str, Any] = {
            _OURS: Predicting(model.estimator.predictive),
            **rivals(model.kind, x[train], y[train]),
        }
    taken = dict(zip(models, (seconds, time.perf_counter() - started, 0.0), strict=True))
    blocks = list(zip(torch.tensor(x[test]).split(_ROWS), known[test].split(_ROWS), strict=True))
    verdicts = {name: evaluate(each, blocks, draws=model.estimator.draws) for name, each in models.items()}
    costs = {
        name: torch.cat([-each.predictive(rows.numpy()).log_prob(truth).double() for rows, truth in blocks])
        for name, each in models.items()
    }
    points, promised = {}, None
    if model.kind == "counts":
        promised = promises(model.estimator.predictive(rows.numpy()) for rows, _ in blocks)
    if not of_classes:
        found = model._summary(model.estimator.predictive(x[test[:_POINTS]]))
        points = {"mean": found["mean"], "low": found["q05"], "high": found["q95"], "y": y[test[:_POINTS], 0]}
    return replace(
        model,
        sentences=(worth(verdicts, costs), trust(verdicts[_OURS], promised)),
        comparison=Comparison(verdicts, models, taken, {}),
        _points={name: values.tolist() for name, values in points.items()},
    )
