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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bayesbackprop._errors import (
    Described,
    check_callable,
    check_count,
    check_finite,
    check_path,
    check_probability,
    check_text,
    check_type,
    invalid,
    tensor_shape,
)
from bayesbackprop._files import check_counter, check_same, read, write_atomically, write_checkpoint
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim import Adam
from bayesbackprop.training import Callback, Record, Run

__all__ = ["Averaging", "Best", "Callback", "Checkpoint", "EarlyStopping", "Progress", "Records", "TensorBoard"]

_Value = TypeVar("_Value")

# What a checkpoint is that does not fit the run.
_OTHER = "which is damaged or of another run"


class Checkpoint(Callback):
    """Keeps all that a run needs to go on bit for bit in one file, and goes on from it if it is there.

    It is written before the first step, after each epoch, and when Ctrl-C or SIGTERM ends the run: then of the very
    step. A crash in the middle of a write leaves the old file intact. The file is never unpickled.

    Args:
        path: The file.
        about: What makes a run the same, as far as JSON can say it. A file that says otherwise is refused.
        every: Write it after every so many steps as well.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, about: Mapping[str, Any] | None = None, every: int | None = None
    ) -> None:
        check_path("Checkpoint", path=path)
        check_type("Checkpoint", Mapping | None, "None, or a mapping that JSON can hold", about=about)
        if every is not None:
            every = check_count("Checkpoint", every=every)["every"]
        try:  # as a file will give it back
            self.about: dict[str, Any] = json.loads(json.dumps(dict(about or {})))
        except (TypeError, ValueError) as error:
            raise invalid("about", "Checkpoint", "None, or a mapping that JSON can hold", about) from error
        self.path, self.every = Path(path), every

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
            _check_run(metadata["state"])
        changed = sorted(name for name in {*began, *now} if began.get(name) != now.get(name))
        if changed:
            before, after = ({name: which.get(name) for name in changed} for which in (began, now))
            constraint = f"what the run in {self.path.parent} began with, {before}; or choose another folder"
            raise invalid("about", "Checkpoint", constraint, Described(after))
        probe = copy.copy(run)
        probe.history = []
        probe.load_state_dict(metadata["state"])  # refuses other settings; the run itself is left alone
        with file.understanding(_OTHER):
            objective = {**under("objective", tensors), **metadata.get("objective", {})}
            _check_objective(run.objective, objective)
            optimiser = _optimiser_state(run.optimiser, under("optimiser", tensors), metadata["optimiser"])
            schedule: dict[str, Any] = {}
            if run.scheduler is not None:
                schedule = _like(run.scheduler.state_dict(), metadata["scheduler"], _is_torchs(type(run.scheduler)))
            states = {name: {**metadata["callbacks"].get(name, {}), **under(name, tensors)} for name in self._states}
        with file.understanding(_OTHER), _all_or_nothing(run, self._states.values()):
            for name, state in states.items():
                self._states[name].load_state_dict(state)
            if run.scheduler is not None:
                run.scheduler.load_state_dict(schedule)
            run.optimiser.load_state_dict(optimiser)
            _load_objective(run.objective, objective)
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
        tensors = _tensors_in(run.objective.state_dict())
        check_same("Checkpoint", tensors, tensors, dict(run.objective.named_buffers(remove_duplicate=False)))
        state = run.optimiser.state_dict()
        slots = {f"{number}.{name}": value for number, each in state["state"].items() for name, value in each.items()}
        parts = {"objective": _objective_state(run.objective)}
        parts["optimiser"] = {name: value for name, value in slots.items() if value is not None}
        tensors, plain = _split(parts | {name: callback.state_dict() for name, callback in self._states.items()})
        metadata = {
            "about": self.about,
            "state": run.state_dict(),
            "objective": plain.pop("objective"),
            "optimiser": {"groups": _in_json(state["param_groups"]), "slots": plain.pop("optimiser")},
            "scheduler": None if run.scheduler is None else _in_json(run.scheduler.state_dict()),
            "callbacks": plain,
        }
        try:
            json.dumps(metadata)
        except TypeError as error:
            constraint = "one whose optimiser, scheduler and callbacks hold tensors and what JSON can say"
            raise invalid("run", "Checkpoint", constraint, Described(error)) from error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(self.path, tensors, metadata)


class Best(Callback):
    """Keeps the parameters of the epoch with the lowest value of ``monitor`` in a file; of equals the first.

    Args:
        path: The file.
        monitor: The name of a value in the records.
    """

    def __init__(self, path: str | os.PathLike[str], monitor: str = "validation_nll") -> None:
        check_path("Best", path=path)
        check_text("Best", monitor=monitor)
        self.path, self.monitor = Path(path), monitor

    def on_epoch(self, run: Run) -> None:
        if run.rank or best(run.history, self.monitor) != run.epoch:
            return
        with run.evaluating():
            tensors, plain = _split({"objective": _objective_state(run.objective)})
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(self.path, tensors, {"epoch": run.epoch, **(plain if plain["objective"] else {})})

    def load(self, objective: nn.Module) -> int:
        """Give ``objective``, or the ``Bayesian`` that was fitted, these parameters; the epoch they are of."""
        check_type("Best.load", nn.Module, "the objective or the Bayesian that was fitted", objective=objective)
        file = read(self.path, "checkpoint", "Best.load")
        with file.understanding(_OTHER):
            state: dict[str, Any] = {**under("objective", file.tensors), **file.contents.get("objective", {})}
            if isinstance(objective, Bayesian):  # it was trained as the model of a FreeEnergy
                state = under("model", state)
            epoch = check_counter("epoch", file.contents["epoch"])
            _check_objective(objective, state)
            _load_objective(objective, state)
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
    1 - ``factor``, so that the average spans 1 / (1 - factor) steps. Until a third of the steps so far are that many
    they have 3 / (2 + step): the average soon forgets where the run began.

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


# What a record holds besides what was measured on held-out data.
_TRAINING = ("epoch", "cost", "likelihood", "complexity", "seconds")


def _measured(record: Record) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in record.items() if name not in _TRAINING)


def _costs(means: Mapping[str, float]) -> str:
    if "likelihood" not in means:
        return f"cost {means['cost']:.4f}"
    return f"likelihood {means['likelihood']:.4f}  complexity {means['complexity']:.4g}"


class Progress(Callback):
    """Shows how far a run is: on a terminal as a bar with its costs, elsewhere as a line for each epoch.

    Args:
        title: What is being trained.
        describe: What to say of the record of an epoch; unless given, all that was measured on held-out data.
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
        total = None if run.steps is None else run.epochs * run.steps
        self._task = self._bar.add_task(self._title, total=total, completed=run.step, speed="")
        # The costs go below the bar, so that both fit a narrow terminal.
        self._below = rich.text.Text(no_wrap=True, overflow="ellipsis")
        shown = rich.console.Group(self._bar, self._below)
        self._live = rich.live.Live(shown, console=console, refresh_per_second=10)
        self._live.start()

    def on_step(self, run: Run) -> None:
        if self._live is not None:
            speed = (run.step - self._first) / (time.perf_counter() - self._started)
            self._below.plain = f"epoch {run.epoch + 1}/{run.epochs}  {_costs(run.means)}{self._last}"
            self._bar.update(self._task, completed=run.step, speed=f"{speed:.0f} steps/s")

    def on_epoch(self, run: Run) -> None:
        record = run.history[-1]
        measured = self._describe(record)
        self._last = f"  {measured}" if measured else ""
        if self._live is None and run.rank == 0:
            told = f"{self._title}: epoch {run.epoch}/{run.epochs}  {_costs(record)}{self._last}"
            left = record["seconds"] * (run.epochs - run.epoch) / 60
            print(f"{told}  {record['seconds']:.1f} s, {left:.1f} min left", file=sys.stderr, flush=True)

    def on_end(self, run: Run) -> None:  # noqa: ARG002
        if self._live is not None:
            self._live.stop()
            self._live = None


class Records(Callback):
    """Keeps the records of a run in a file, a line of JSON for each epoch."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_path("Records", path=path)
        self.path = Path(path)

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
        check_path("TensorBoard", folder=folder)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError("TensorBoard is not installed: pip install tensorboard") from error
        self._make, self._folder = SummaryWriter, Path(folder)
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


def under(prefix: str, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """What of ``values`` has a name that begins with ``prefix.``, by the rest of its name."""
    start = prefix + "."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


# --- what a file holds -----------------------------------------------------------------------------------------------


def _split(parts: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The tensors of all parts by ``part.name``, and what else each part holds."""
    tensors, plain = {}, {part: dict(values) for part, values in parts.items()}
    for part, values in parts.items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{part}.{name}"] = plain[part].pop(name)
    return tensors, plain


def _objective_state(objective: nn.Module) -> dict[str, Any]:
    """The state of an objective, each tensor under its first name: weights may be tied."""
    state: dict[str, Any] = objective.state_dict()
    first: dict[Any, str] = {}
    for name, value in state.items():
        stored = isinstance(value, Tensor) and value.numel()
        first.setdefault((value.data_ptr(), value.shape, value.stride()) if stored else name, name)
    return {name: state[name] for name in first.values()}


def _tensors_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _check_objective(objective: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse what is not a state of ``objective``."""
    own = _objective_state(objective)
    if own.keys() != state.keys():
        raise ValueError(f"{sorted(own.keys() ^ state.keys())} missing or besides")
    buffers = dict(objective.named_buffers(remove_duplicate=False))
    check_same("the objective", _tensors_in(state), _tensors_in(own), buffers)
    for name, value in _tensors_in(state).items():
        if not value.dim() and not value.is_floating_point() and int(own[name]) >= 0 > int(value):
            raise ValueError(f"{name} {int(value)}")  # a counter or a seed
    if isinstance(objective, FreeEnergy):
        check_counter("step", int(state["step"]))


def _load_objective(objective: nn.Module, state: Mapping[str, Any]) -> None:
    first = _objective_state(objective)
    others = {name: value for name, value in objective.state_dict().items() if name not in first}
    objective.load_state_dict({**others, **state})  # the others are the same memory as a first name


@contextmanager
def _all_or_nothing(run: Run, callbacks: Iterable[Callback]) -> Iterator[None]:
    """Within it the parts of ``run`` get their states; a failure leaves all of them as they were."""
    parts = [run.optimiser, *callbacks]
    before = [dict(vars(part)) for part in parts]
    schedule = {} if run.scheduler is None else copy.deepcopy(run.scheduler.state_dict())
    # What is loaded last, and has been checked, fails only where modules have states of their own that are no tensors.
    objective = run.objective.state_dict()
    if len(_tensors_in(objective)) < len(objective):
        objective = copy.deepcopy(objective)
    try:
        yield
    except BaseException:
        for part, values in zip(parts, before, strict=True):
            vars(part).clear()
            vars(part).update(values)
        if run.scheduler is not None:
            run.scheduler.load_state_dict(schedule)
        run.objective.load_state_dict(objective)
        raise


def _check_run(state: Mapping[str, Any]) -> None:
    """Refuse what no run says of itself."""
    step, taken, examples = (check_counter(name, state[name]) for name in ("step", "taken", "examples"))
    sums, seconds, records = dict(state["sums"]), state["seconds"], state["records"]
    for value in (seconds, *sums.values()):
        _check_number("a sum", value)
    if not isinstance(records, list) or step < len(records) or (sums and not examples) or examples < taken:
        raise ValueError(f"step {step} after {len(records)} epochs and {taken} batches of {examples} examples")
    for number, record in enumerate(records, 1):
        if record["epoch"] != number:
            raise ValueError(f"a record {record!r:.80}")
        _check_number("a cost", record.get("cost", 0))  # of version 0.2 they have none
        _check_number("a time", record["seconds"])


# Slots that torch's optimisers make of the shape of their parameter, and that its fused ones write to unchecked.
# Averages of squares are never negative, and may overflow.
_AS_LARGE = ("exp_avg", "momentum_buffer", "grad_avg", "exp_inf", "ax", "prev", "step_size")
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta")
# What Adam needs of each parameter that it has stepped, and choices of how, not of what, to compute.
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_HOW = ("foreach", "fused", "capturable", "differentiable")


def _optimiser_state(
    optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of ``optimiser`` in a file, after all of it has been compared with the parameters."""
    own, strict = optimiser.state_dict()["param_groups"], _is_torchs(type(optimiser))
    extends = any(map(_is_torchs, type(optimiser).__mro__))  # and so may run its fused kernels
    pairs = zip(plain["groups"], own, strict=True)
    groups = _like(own, [{**theirs, **_how(mine, theirs)} for theirs, mine in pairs], strict)
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    slots: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **plain["slots"]}.items():
        digits, _, slot = name.partition(".")
        number = int(digits)
        parameter = parameters[check_counter("parameter", number)]
        if extends:
            _check_slot(f"'{slot}' of parameter {number}", slot, value, parameter)
        slots.setdefault(number, {})[slot] = value
    for mine, group in zip(own, groups, strict=True):
        if mine["params"] != group["params"]:
            raise ValueError(f"parameters {group['params']!r:.80} of a group")
        if strict and any(type(value) is bool and group[name] is not value for name, value in mine.items()):
            raise ValueError(f"settings {group!r:.200}")
        if not all(0 <= beta < 1 for beta in group.get("betas", ())):
            raise ValueError(f"betas {group['betas']}")
        known = [set(slots[number]) for number in mine["params"] if number in slots]
        needed = _ADAM | ({"max_exp_avg_sq"} if group.get("amsgrad") else set())
        is_adam = type(optimiser) in (torch.optim.Adam, torch.optim.AdamW, Adam)
        if strict and any(names != (needed if is_adam else known[0]) for names in known):
            raise ValueError(f"slots {sorted(set().union(*known))}, not of all parameters")
    return {"state": slots, "param_groups": groups}


def _how(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that need not be those of the file."""
    names = _HOW if theirs.get("weight_decay") else (*_HOW, "decoupled_weight_decay")
    return {name: mine[name] for name in names if name in mine}


def _check_slot(name: str, slot: str, value: Any, parameter: Tensor) -> None:
    if slot in (*_AS_LARGE, *_SQUARES):
        check_same("the optimiser", {name: value}, {name: parameter}, (name,) if slot in _SQUARES else ())
        if slot in _SQUARES and bool((value < 0).any()):
            raise ValueError(f"{name} is negative")
    elif isinstance(value, Tensor):
        check_finite(name, "the optimiser", value)
        if slot == "step" and (value.dim() or not value.is_floating_point()):
            raise ValueError(f"{name} is {tensor_shape(value)}")
    if slot == "step":
        steps = float(value)
        check_counter(name, int(steps) if steps.is_integer() else steps)


def _in_json(settings: Any) -> Any:
    """Settings as JSON has them: a learning rate can be a tensor."""
    return tree_map_only(Tensor, Tensor.item, settings)


def _is_torchs(kind: type) -> bool:
    """Whether it is an optimiser or a scheduler of torch, or ours, so that it is known what its settings can be."""
    return kind is Adam or (kind.__module__.startswith("torch.optim.") and kind is not torch.optim.Optimizer)


def _like(mine: Any, value: Any, strict: bool) -> Any:
    """A setting from JSON with the types that it has in ``mine``: JSON knows no tuples, and no keys but text.

    Where it is ``strict``, names, lengths and types must be those of ``mine``, and numbers finite and of its sign.
    """
    if isinstance(mine, Tensor):
        return torch.full_like(mine, _like(mine.item(), value, strict=True))
    if isinstance(mine, dict):
        keys = {str(key): key for key in mine}
        if strict:  # but for flags, which other versions of torch do not know
            value = {**{name: mine[key] for name, key in keys.items() if isinstance(mine[key], bool | None)}, **value}
            if keys.keys() != value.keys():
                raise ValueError(f"settings {sorted(value)!r:.200}")
        return type(mine)(
            {keys.get(name, name): _like(mine.get(keys.get(name)), each, strict) for name, each in value.items()}
        )
    if isinstance(mine, list | tuple) and isinstance(value, list) and len(mine) == len(value):
        return type(mine)(_like(*pair, strict) for pair in zip(mine, value, strict=True))
    if strict and isinstance(mine, list | tuple):
        raise ValueError(f"settings {value!r:.80}, not {len(mine)} of them")
    if strict and isinstance(mine, int | float) and not isinstance(mine, bool):
        _check_number("a setting", value)
        if value < 0 <= mine:
            raise ValueError(f"a setting {value!r}")
    elif strict and type(mine) is not type(value):
        raise TypeError(f"a setting {value!r:.80} of another type")
    return value


def _check_number(name: str, value: object) -> None:
    """Refuse what is no finite number, and integers that no float can hold."""
    if type(value) not in (int, float) or not abs(value) < (2**53 if type(value) is int else math.inf):  # type: ignore[arg-type]
        raise ValueError(f"{name} {value!r:.80}")


@torch.no_grad()
def _copy(values: list[Tensor], objective: nn.Module) -> None:
    for parameter, value in zip(objective.parameters(), values, strict=True):
        parameter.copy_(value)
