"""What a training run does besides training: each a small class with the methods of :class:`Callback`.

They are called in the order in which :func:`~bayesbackprop.fit` gets them. :class:`Checkpoint` goes after those whose
work it must hold.
"""

import copy
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bayesbackprop import _states as states
from bayesbackprop._batches import Data
from bayesbackprop._errors import (
    Described,
    all_or_nothing,
    check_callable,
    check_count,
    check_path,
    check_probability,
    check_text,
    check_type,
    invalid,
)
from bayesbackprop._files import check_counter, check_same, read, write_atomically, write_checkpoint
from bayesbackprop._runs import Callback, Record, Run
from bayesbackprop.convergence import Convergence, ConvergenceWarning
from bayesbackprop.diagnostics import Diagnosis, diagnosis_of
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy

__all__ = [
    "Averaging",
    "Best",
    "Callback",
    "Checkpoint",
    "Convergence",
    "ConvergenceWarning",
    "Diagnose",
    "DiagnosisWarning",
    "EarlyStopping",
    "Progress",
    "Records",
    "TensorBoard",
]

# What a checkpoint is that does not fit the run.
_OTHER = "which is damaged or of another run"


class Checkpoint(Callback):
    """Saves everything a run needs to resume bit for bit in one file, and resumes from that file if it exists.

    It is written before the first step, after each epoch, and when Ctrl-C or SIGTERM ends the run: then at the current
    step. A crash in the middle of a write leaves the old file intact. The file is never unpickled.

    Args:
        path: The file.
        about: What identifies the run, as JSON. A file of another run is refused.
        every: Also write it every so many steps.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, about: Mapping[str, Any] | None = None, every: int | None = None
    ) -> None:
        self.path, self.every = check_path("Checkpoint", path=path), every
        check_type("Checkpoint", Mapping | None, "None, or a mapping that JSON can hold", about=about)
        if every is not None:
            self.every = check_count("Checkpoint", every=every)["every"]
        try:  # as a file will give it back
            self.about: dict[str, Any] = json.loads(json.dumps(dict(about or {})))
        except (TypeError, ValueError) as error:
            raise invalid("about", "Checkpoint", "None, or a mapping that JSON can hold", about) from error

    def restore(self, run: Run) -> None:
        stateful = [each for each in run.callbacks if type(each).state_dict is not Callback.state_dict]
        self._states = {callback.name: callback for callback in stateful}
        if len(self._states) < len(stateful) or self._states.keys() & {"objective", "optimiser"}:
            constraint = "of different names, none of ['objective', 'optimiser'], where they have states"
            raise invalid("callbacks", "fit", constraint, Described([callback.name for callback in stateful]))
        later = run.callbacks[run.callbacks.index(self) + 1 :]
        if any(callback in later for callback in stateful):
            constraint = "in an order in which Checkpoint comes after all that have a state"
            raise invalid("callbacks", "fit", constraint, Described([type(each).__name__ for each in run.callbacks]))
        if not self.path.exists():
            return
        file = read(self.path, "checkpoint", "Checkpoint")
        tensors, metadata = file.tensors, file.contents
        if not {"state", "optimiser", "scheduler", "callbacks"} <= metadata.keys():
            raise invalid("path", "Checkpoint", "a file that Checkpoint wrote", Described(self.path))
        with file.understanding():
            began, now = dict(metadata["about"]), self.about
            states.check_run(metadata["state"])
        changed = sorted(name for name in {*began, *now} if began.get(name) != now.get(name))
        if changed:
            before, after = ({name: which.get(name) for name in changed} for which in (began, now))
            constraint = f"what the run in {self.path.parent} began with, {before}; or choose another folder"
            raise invalid("about", "Checkpoint", constraint, Described(after))
        probe = copy.copy(run)
        probe.history = []
        probe.load_state_dict(metadata["state"])  # refuses other settings; the run itself is left alone
        with file.understanding(_OTHER):
            objective = {**states.under("objective", tensors), **metadata.get("objective", {})}
            states.check_objective(run.objective, objective)
            optimiser = states.of_optimiser(run.optimiser, states.under("optimiser", tensors), metadata["optimiser"])
            schedule = states.of_scheduler(run.scheduler, metadata["scheduler"])
            plain = metadata["callbacks"]
            kept = {name: {**plain.get(name, {}), **states.under(name, tensors)} for name in self._states}
        with file.understanding(_OTHER), _all_parts_or_none(run, self._states.values()):
            for name, state in kept.items():
                self._states[name].load_state_dict(state)
            if run.scheduler is not None:
                run.scheduler.load_state_dict(schedule)
            run.optimiser.load_state_dict(optimiser)
            states.load_objective(run.objective, objective)
        run.load_state_dict(metadata["state"])

    def on_start(self, run: Run) -> None:
        if not self.path.exists():
            self._write(run)  # so that it is known from the first step on what was being run

    def on_step(self, run: Run) -> None:
        if self.every is not None and run.step % self.every == 0:
            self._write(run)

    def on_epoch(self, run: Run) -> None:
        self._write(run)

    def on_end(self, run: Run) -> None:
        if run.interrupted:
            self._write(run)

    def _write(self, run: Run) -> None:
        if run.rank:
            return
        tensors = states.tensors_in(run.objective.state_dict())
        check_same("Checkpoint", tensors, tensors, dict(run.objective.named_buffers(remove_duplicate=False)))
        state = run.optimiser.state_dict()
        slots = {f"{number}.{name}": value for number, each in state["state"].items() for name, value in each.items()}
        parts = {"objective": states.of_objective(run.objective)}
        parts["optimiser"] = {name: value for name, value in slots.items() if value is not None}
        tensors, plain = states.split(parts | {name: callback.state_dict() for name, callback in self._states.items()})
        metadata = {
            "about": self.about,
            "state": run.state_dict(),
            "objective": plain.pop("objective"),
            "optimiser": {"groups": states.in_json(state["param_groups"]), "slots": plain.pop("optimiser")},
            "scheduler": None if run.scheduler is None else states.in_json(run.scheduler.state_dict()),
            "callbacks": plain,
        }
        try:
            json.dumps(metadata)
        except TypeError as error:
            constraint = "one whose optimiser, scheduler and callbacks hold tensors and what JSON can say"
            raise invalid("run", "Checkpoint", constraint, Described(error)) from error
        write_checkpoint(self.path, tensors, metadata)


class Best(Callback):
    """Keeps the parameters of the epoch with the lowest value of ``monitor`` in a file; of equals the first.

    Args:
        path: The file.
        monitor: The name of a value in the records.
        after: How many epochs at the start do not count.
    """

    def __init__(self, path: str | os.PathLike[str], monitor: str = "validation_nll", *, after: int = 0) -> None:
        self.path, self.monitor = check_path("Best", path=path), monitor
        check_text("Best", monitor=monitor)
        self.after = check_count("Best", least=0, after=after)["after"]

    def on_epoch(self, run: Run) -> None:
        counted = run.history[self.after :]
        if run.rank or not counted or self.after + best(counted, self.monitor) != run.epoch:
            return
        with run.evaluating():
            tensors, plain = states.split({"objective": states.of_objective(run.objective)})
            write_checkpoint(self.path, tensors, {"epoch": run.epoch, **(plain if plain["objective"] else {})})

    def load(self, objective: nn.Module) -> int:
        """Give ``objective``, or the ``Bayesian`` that was fitted, these parameters; the epoch they are of."""
        check_type("Best.load", nn.Module, "the objective or the Bayesian that was fitted", objective=objective)
        file = read(self.path, "checkpoint", "Best.load")
        with file.understanding(_OTHER):
            state: dict[str, Any] = {**states.under("objective", file.tensors), **file.contents.get("objective", {})}
            if isinstance(objective, Bayesian):  # it was trained as the model of a FreeEnergy
                state = states.under("model", state)
            epoch = check_counter("epoch", file.contents["epoch"])
            states.check_objective(objective, state)
            states.load_objective(objective, state)
        return epoch


class EarlyStopping(Callback):
    """Ends a run after ``patience`` epochs without a new lowest value of ``monitor``."""

    def __init__(self, monitor: str = "validation_nll", patience: int = 5) -> None:
        check_text("EarlyStopping", monitor=monitor)
        self.monitor, self.patience = monitor, check_count("EarlyStopping", patience=patience)["patience"]

    def on_start(self, run: Run) -> None:
        if run.history:
            self.on_epoch(run)

    def on_epoch(self, run: Run) -> None:
        if run.epoch - best(run.history, self.monitor) >= self.patience:
            run.stop()


class Averaging(Callback):
    """Averages the parameters over the steps, exponentially.

    The averages are what is evaluated, and what the model has at the end. The newest parameters have the weight
    1 - ``factor``, so that the average spans 1 / (1 - factor) steps. While the run is shorter than three times that
    span, they have 3 / (2 + step): the average soon forgets the initial parameters.

    Args:
        factor: In [0, 1): .999 spans 1000 steps.
    """

    name = "average"

    def __init__(self, factor: float) -> None:
        factor = check_probability("Averaging", factor=factor)["factor"]
        if factor == 1:
            raise invalid("factor", "Averaging", "below 1, where the average would never move", factor)
        self.factor = factor
        self._averages: list[Tensor] = []

    def newest(self, step: int) -> float:
        """The weight of the parameters after ``step`` in their average."""
        return max(1 - self.factor, 3 / (2 + step))

    def restore(self, run: Run) -> None:
        self._parameters = list(run.objective.parameters())

    def on_start(self, run: Run) -> None:
        parameters = list(run.objective.parameters())
        if not run.step or not self._averages:
            self._averages = [parameter.detach().clone() for parameter in parameters]
        self._averages = [average.to(own.device) for average, own in zip(self._averages, parameters, strict=True)]

    @torch.no_grad()
    def on_step(self, run: Run) -> None:
        newest = self.newest(run.step)
        for average, parameter in zip(self._averages, run.objective.parameters(), strict=True):
            average.lerp_(parameter, newest)

    def on_end(self, run: Run) -> None:
        if run.complete:
            _copy(self._averages, run.objective)

    @contextmanager
    def evaluating(self, run: Run) -> Iterator[None]:
        own = [parameter.detach().clone() for parameter in run.objective.parameters()]
        _copy(self._averages, run.objective)
        try:
            yield
        finally:
            _copy(own, run.objective)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): average for number, average in enumerate(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:  # a run that averages only since it was resumed has none
            expected = {str(number): parameter for number, parameter in enumerate(self._parameters)}
            check_same("Averaging", state, expected)
        self._averages = [state[str(number)] for number in range(len(state))]


class DiagnosisWarning(UserWarning):
    """A posterior that has learnt nothing would be better than the one that was trained."""


class Diagnose(Callback):
    """Diagnoses the posterior at the end of a run: see :func:`~bayesbackprop.diagnose`.

    The record of the epoch then has ``free_energy`` and ``free_energy_error``, in nats per example at temperature 1,
    and ``median_sigma``. At the end it warns if a posterior that has learnt nothing has a clearly lower free energy.

    Args:
        data: The whole training set, as :func:`~bayesbackprop.diagnose` takes it. It is read anew each time.
        every: Diagnose after every so many epochs as well.
        draws: Draws of the posterior; at least 25.

    Attributes:
        diagnosis: The last one, which :func:`~bayesbackprop.evaluate` can show; None before.
    """

    def __init__(self, data: Data, every: int | None = None, *, draws: int = 25) -> None:
        self.data, self.every = data, every
        if every is not None:
            self.every = check_count("Diagnose", every=every)["every"]
        self.draws = check_count("Diagnose", least=25, draws=draws)["draws"]
        self.diagnosis: Diagnosis | None = None

    def on_start(self, run: Run) -> None:
        if not isinstance(run.objective, FreeEnergy):
            constraint = "without Diagnose where the objective is no FreeEnergy"
            raise invalid("callbacks", "fit", constraint, Described(f"one for a {type(run.objective).__name__}"))

    def on_epoch(self, run: Run) -> None:
        if not run.goes_on or (self.every is not None and run.epoch % self.every == 0):
            self._measure(run)

    def on_end(self, run: Run) -> None:
        if not run.complete or not run.history:
            return
        if "free_energy" not in run.history[-1]:  # a callback after this one has ended the run
            self._measure(run)
        if self.diagnosis is not None and self.diagnosis.is_worse_than_trivial and run.rank == 0:
            text = "\n".join(line.strip() for line in str(self.diagnosis).splitlines()[:2])
            warnings.warn(text, DiagnosisWarning, stacklevel=2)

    def _measure(self, run: Run) -> None:
        assert isinstance(run.objective, FreeEnergy)
        with run.evaluating():
            found = self.diagnosis = diagnosis_of(run.objective.model, self.data, self.draws, None, "Diagnose")
        mean, error = (value / found.examples for value in found.free_energy)
        figures = {"free_energy": mean, "free_energy_error": error, "median_sigma": found.spread.median}
        run.history[-1].update(figures)


# What a record holds besides what was measured on held-out data.
_TRAINING = ("epoch", "cost", "likelihood", "complexity", "seconds")


def _measured(record: Record) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in record.items() if name not in _TRAINING)


def _costs(means: Mapping[str, float]) -> str:
    if "likelihood" not in means:
        return f"cost {means['cost']:.4f}"
    return f"likelihood {means['likelihood']:.4f}  complexity {means['complexity']:.4g}"


def _of(run: Run) -> str:
    return "" if math.isinf(run.epochs) else f"/{run.epochs}"


class Progress(Callback):
    """Shows how far a run is: on a terminal as a bar with its costs, elsewhere as a line for each epoch.

    Args:
        title: What is being trained.
        describe: A description of the record of an epoch; by default everything measured on held-out data.
    """

    def __init__(self, title: str = "training", describe: Callable[[Record], str] = _measured) -> None:
        check_text("Progress", title=title)
        check_callable("Progress", describe=describe)
        self._title, self._describe = title, describe
        self._console: Any = None
        self._live: Any = None

    def on_start(self, run: Run) -> None:
        import rich.console  # here and not above: the library does not need it
        import rich.live
        import rich.progress
        import rich.text

        self._started, self._first, self._last = time.perf_counter(), run.step, ""
        console = self._console or rich.console.Console(stderr=True)
        if run.rank or not console.is_terminal:
            return
        bar, left = rich.progress.BarColumn(bar_width=None), rich.progress.TimeRemainingColumn()
        columns = ("{task.description}", bar, "{task.fields[speed]}", left)
        self._bar = rich.progress.Progress(*columns, console=console, expand=True)
        total = None if run.steps is None or math.isinf(run.epochs) else run.epochs * run.steps
        self._task = self._bar.add_task(self._title, total=total, completed=run.step, speed="")
        # The costs go below the bar, so that both fit a narrow terminal.
        self._below = rich.text.Text(no_wrap=True, overflow="ellipsis")
        shown = rich.console.Group(self._bar, self._below)
        self._live = rich.live.Live(shown, console=console, refresh_per_second=10)
        self._live.start()

    def on_step(self, run: Run) -> None:
        if self._live is not None:
            speed = (run.step - self._first) / (time.perf_counter() - self._started)
            self._below.plain = f"epoch {run.epoch + 1}{_of(run)}  {_costs(run.means)}{self._last}"
            self._bar.update(self._task, completed=run.step, speed=f"{speed:.0f} steps/s")

    def on_epoch(self, run: Run) -> None:
        record = run.history[-1]
        measured = self._describe(record)
        self._last = f"  {measured}" if measured else ""
        if self._live is None and run.rank == 0:
            told = f"{self._title}: epoch {run.epoch}{_of(run)}  {_costs(record)}{self._last}"
            left = record["seconds"] * (run.epochs - run.epoch) / 60
            known = "" if math.isinf(left) else f", {left:.1f} min left"
            print(f"{told}  {record['seconds']:.1f} s{known}", file=sys.stderr, flush=True)

    def on_end(self, run: Run) -> None:  # noqa: ARG002
        if self._live is not None:
            self._live.stop()
            self._live = None


class Records(Callback):
    """Keeps the records of a run in a file, a line of JSON for each epoch."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = check_path("Records", path=path)

    def on_start(self, run: Run) -> None:
        self.on_epoch(run)

    def on_epoch(self, run: Run) -> None:
        if run.rank == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(record) + "\n" for record in run.history)
            write_atomically(self.path, lines.encode())


class TensorBoard(Callback):
    """Writes the records for TensorBoard into ``folder``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = check_path("TensorBoard", folder=folder)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError("TensorBoard is not installed: pip install tensorboard") from error
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def on_start(self, run: Run) -> None:
        if run.rank == 0:  # what a run wrote before it was killed, and now writes again, is not shown
            self._writer = self._make(str(self._folder), purge_step=run.epoch + 1)

    def on_epoch(self, run: Run) -> None:
        if self._writer is not None:
            for name, value in run.history[-1].items():
                self._writer.add_scalar(name, value, run.epoch)

    def on_end(self, run: Run) -> None:  # noqa: ARG002
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def best(history: list[Record], monitor: str) -> int:
    """The epoch, from 1, with the lowest value of ``monitor``; of equals the first."""
    if monitor not in history[-1]:
        raise invalid("monitor", "a callback", f"a value of the records: one of {list(history[-1])}", monitor)
    values = [record.get(monitor, math.inf) for record in history]
    return 1 + min(range(len(values)), key=lambda number: math.inf if math.isnan(values[number]) else values[number])


@contextmanager
def _all_parts_or_none(run: Run, callbacks: Iterable[Callback]) -> Iterator[None]:
    """Within it the parts of ``run`` get their states; a failure leaves all of them as they were."""
    schedule = {} if run.scheduler is None else copy.deepcopy(run.scheduler.state_dict())
    # What is loaded last, and has been checked, fails only where modules have states of their own that are no tensors.
    objective = run.objective.state_dict()
    if len(states.tensors_in(objective)) < len(objective):
        objective = copy.deepcopy(objective)
    try:
        with all_or_nothing(run.optimiser, *callbacks):
            yield
    except BaseException:
        if run.scheduler is not None:
            run.scheduler.load_state_dict(schedule)
        run.objective.load_state_dict(objective)
        raise


@torch.no_grad()
def _copy(values: list[Tensor], objective: nn.Module) -> None:
    for parameter, value in zip(objective.parameters(), values, strict=True):
        parameter.copy_(value)
