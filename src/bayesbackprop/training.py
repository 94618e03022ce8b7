"""Training: one loop for every method, that can be killed at any moment.

The order of the examples is a pure function of (seed, epoch), the noise of (seed, step), the learning rate of the step.
So a checkpoint needs no state of any generator, and a run that was killed goes on bit for bit as if it had not been.
"""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bayesbackprop._errors import Described, check_count, check_not_negative, check_positive, check_probability, invalid
from bayesbackprop._files import read_checkpoint, write_atomically, write_checkpoint
from bayesbackprop._progress import Progress

CHECKPOINT = "checkpoint.safetensors"
BEST = "best.safetensors"
METRICS = "metrics.jsonl"

# Seeds of epochs and steps must not meet those of neighbouring runs.
_STRIDE = 1_000_003

# Examples to classify at a time.
_EVALUATED = 5000


class Examples(NamedTuple):
    """Inputs and targets, one row each."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Schedule:
    """How to train.

    Args:
        epochs: Passes over the training set.
        batch_size: Examples of a minibatch, over all ranks.
        optimiser: ``"adam"`` or ``"sgd"``.
        learning_rate: At the start.
        rho_rate: The learning rate of rho, as a multiple of that of mu.
        momentum: Of ``"sgd"``.
        decay: ``"cosine"`` lets the learning rate fall to 0 at the end; ``"constant"`` keeps it.
        averaging: Evaluate and select not the parameters themselves but their exponential average over steps, with
            this factor, or a smaller one at the start (see :meth:`newest`); 0 for none.
        seed: Of the order of the examples, and of dropout where there is any.
    """

    epochs: int = 40
    batch_size: int = 128
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    rho_rate: float = 1.0
    momentum: float = 0.0
    decay: Literal["cosine", "constant"] = "cosine"
    averaging: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("Schedule", epochs=self.epochs, batch_size=self.batch_size)
        check_count("Schedule", least=0, seed=self.seed)
        check_positive("Schedule", learning_rate=self.learning_rate, rho_rate=self.rho_rate)
        check_not_negative("Schedule", momentum=self.momentum)
        check_probability("Schedule", averaging=self.averaging)
        if self.averaging == 1:
            raise invalid("averaging", "Schedule", "below 1, where the average would never move", self.averaging)
        if self.optimiser not in ("adam", "sgd"):
            raise invalid("optimiser", "Schedule", "'adam' or 'sgd'", self.optimiser)
        if self.decay not in ("cosine", "constant"):
            raise invalid("decay", "Schedule", "'cosine' or 'constant'", self.decay)

    def rate(self, step: int, steps: int) -> float:
        """The factor on the learning rate at ``step`` of ``steps``."""
        return 1.0 if self.decay == "constant" else 0.5 * (1 + math.cos(math.pi * step / steps))

    def newest(self, step: int) -> float:
        """The weight of the parameters after ``step`` in their average, which soon forgets where they started.

        1 - averaging, the inverse of the number of steps it spans, once a third of the steps so far are that many.
        """
        return max(1 - self.averaging, 3 / (2 + step))


class DivergenceError(RuntimeError):
    """The cost of a run is no longer finite."""


@dataclass
class State:
    """How far a run is: the steps taken, the sums of the running epoch, and a record for each epoch that is over."""

    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    records: list[dict[str, float]] = field(default_factory=list)

    @property
    def selected(self) -> dict[str, float]:
        """The record of the epoch with the lowest validation error, the first of equals."""
        return min(self.records, key=lambda record: record["validation_error"])


class Run:
    """One training run in a folder of its own.

    Args:
        objective: Gives the cost of a minibatch, with ``backward()``, ``likelihood`` and ``complexity``: a
            ``FreeEnergy``, say.
        net: The network to evaluate: that of the means.
        schedule: How to train.
        folder: For checkpoints and metrics. If there is a checkpoint of the same run in it, it goes on there.
        rho: The parameters that ``schedule.rho_rate`` applies to.
        about: What else, beside the schedule, makes a run the same, as far as JSON can say it.
        error: Measures the error of ``net`` on examples; the percentage of wrong classes unless given.
    """

    def __init__(
        self,
        objective: nn.Module,
        net: nn.Module,
        schedule: Schedule,
        folder: Path,
        rho: nn.Module | None = None,
        about: Mapping[str, Any] | None = None,
        error: Callable[[nn.Module, Examples], float] | None = None,
    ) -> None:
        self.objective, self.net, self.schedule, self.folder = objective, net, schedule, folder
        self._error = error
        self._about = {**(about or {}), **{f"schedule.{name}": value for name, value in asdict(schedule).items()}}
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.optimiser = _optimiser(objective, rho, schedule)
        self.state = State()
        self._average = [p.detach().clone() for p in objective.parameters()] if schedule.averaging else []
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / CHECKPOINT).exists():
            self._resume()

    def train(self, training: Examples, watched: Mapping[str, Examples], progress: Progress) -> State:
        """Run to the end, from wherever the run is. Ctrl-C leaves a checkpoint of the very step.

        Args:
            training: The training set.
            watched: What to measure the error on after each epoch. ``"validation"``, which must be there, selects.
            progress: Shows how far the run is.
        """
        schedule, state = self.schedule, self.state
        if schedule.batch_size % self.ranks or len(training.inputs) % schedule.batch_size % self.ranks:
            constraint = f"such that {self.ranks} ranks can share each minibatch evenly, the last of an epoch too"
            raise invalid("batch_size", "Schedule", constraint, schedule.batch_size)
        batches = -(-len(training.inputs) // schedule.batch_size)
        objective = DistributedDataParallel(self.objective) if self.ranks > 1 else self.objective
        if not (self.folder / CHECKPOINT).exists():
            self._save()  # so that it is known from the first step on what was being run
        with progress.run(schedule.epochs, batches, state.step), interrupt_deferred() as interrupted:
            for epoch in range(state.step // batches, schedule.epochs):
                started = time.perf_counter() - state.seconds
                order = _order(schedule.seed, epoch, len(training.inputs))
                for batch in order.split(schedule.batch_size)[state.step % batches :]:
                    if self._any_rank(interrupted()):
                        state.seconds = time.perf_counter() - started
                        self._save()
                        raise KeyboardInterrupt
                    own = batch[self.rank :: self.ranks]
                    self._step(objective, training.inputs[own], training.targets[own], schedule.epochs * batches)
                    progress.step(state.sums)
                state.seconds = time.perf_counter() - started
                self._end_epoch(epoch + 1, batches, watched)
                progress.epoch(state.records[-1])
        self._any_rank(False)  # nobody goes on to read the best parameters before they are written
        return state

    def _step(self, objective: nn.Module, inputs: Tensor, targets: Tensor, steps: int) -> None:
        state = self.state
        factor = self.schedule.rate(state.step, steps)
        for group in self.optimiser.param_groups:
            group["lr"] = group["base"] * factor
        # For dropout, which is the only noise that does not come from the objective.
        torch.default_generator.manual_seed(self.schedule.seed * _STRIDE + state.step * self.ranks + self.rank)
        self.optimiser.zero_grad()
        cost = objective(inputs, targets)
        cost.backward()
        self.optimiser.step()
        for name in ("likelihood", "complexity"):
            state.sums[name] = state.sums.get(name, 0.0) + float(getattr(cost, name).detach())
        state.step += 1
        if self._average:
            newest = self.schedule.newest(state.step)
            torch._foreach_lerp_(self._average, list(self.objective.parameters()), newest)

    def _any_rank(self, says: bool) -> bool:
        """Whether a rank says so; all wait for the last to answer."""
        if self.ranks == 1:
            return says
        votes = torch.tensor(int(says))
        dist.all_reduce(votes)
        return bool(votes)

    def _end_epoch(self, epoch: int, batches: int, watched: Mapping[str, Examples]) -> None:
        state = self.state
        means = {name: total / batches for name, total in state.sums.items()}
        if not all(map(math.isfinite, means.values())):
            raise DivergenceError(
                f"The cost of epoch {epoch} is not a number: choose a learning rate below "
                f"{self.schedule.learning_rate:g} and another folder than {self.folder}."
            )
        error = self._error or error_of
        with self.averaged():
            errors = {f"{name}_error": error(self.net, examples) for name, examples in watched.items()}
            state.records.append({"epoch": epoch, **means, **errors, "seconds": state.seconds})
            state.sums, state.seconds = {}, 0.0
            if self.rank == 0 and state.selected is state.records[-1]:
                tensors = {f"objective.{name}": value for name, value in self.objective.state_dict().items()}
                write_checkpoint(self.folder / BEST, tensors, {"epoch": epoch})
        self._save()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the parameters are their averages, if there are any."""
        if not self._average:
            yield
            return
        parameters: list[Tensor] = list(self.objective.parameters())
        own = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            torch._foreach_copy_(parameters, self._average)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, own)

    def load_best(self) -> None:
        """Give the objective the parameters of the epoch that the validation set selects."""
        tensors, _ = read_checkpoint(self.folder / BEST)
        self.objective.load_state_dict(_under("objective", tensors))

    def _save(self) -> None:
        if self.rank:
            return
        tensors = {f"objective.{name}": value for name, value in self.objective.state_dict().items()}
        tensors |= {f"average.{number}": value for number, value in enumerate(self._average)}
        for number, slots in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{name}": v for name, v in slots.items() if isinstance(v, Tensor)}
        # The metrics first: a run that is killed between the two writes them again.
        lines = "".join(json.dumps(record) + "\n" for record in self.state.records)
        write_atomically(self.folder / METRICS, lines.encode())
        write_checkpoint(self.folder / CHECKPOINT, tensors, {"about": self._about, "state": asdict(self.state)})

    def _resume(self) -> None:
        tensors, metadata = read_checkpoint(self.folder / CHECKPOINT)
        began = metadata.get("about", {})
        changed = sorted(name for name in {*began, *self._about} if began.get(name) != self._about.get(name))
        if changed:
            before, now = ({name: which.get(name) for name in changed} for which in (began, self._about))
            constraint = f"what the run in {self.folder} began with, {before}; or choose another folder"
            raise invalid("configuration", "Run", constraint, Described(now))
        self.objective.load_state_dict(_under("objective", tensors))
        for number, value in _under("average", tensors).items():
            self._average[int(number)].copy_(value)
        slots: dict[int, dict[str, Tensor]] = {}
        for name, value in _under("optimiser", tensors).items():
            number, _, slot = name.partition(".")
            slots.setdefault(int(number), {})[slot] = value
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": slots})
        self.state = State(**metadata["state"])


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The records of a run, epoch by epoch."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def error_of(net: nn.Module, examples: Examples) -> float:
    """The percentage of examples that ``net`` puts in the wrong class."""
    training = net.training
    net.eval()
    with torch.no_grad():
        parts = zip(examples.inputs.split(_EVALUATED), examples.targets.split(_EVALUATED), strict=True)
        wrong = sum(int((net(x).argmax(1) != y).sum()) for x, y in parts)
    net.train(training)
    return 100 * wrong / len(examples.targets)


@contextmanager
def distributed() -> Iterator[None]:
    """Within it, a process that ``torchrun`` started belongs to its group; any other runs alone."""
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) < 2:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def interrupt_deferred() -> Iterator[Callable[[], bool]]:
    """Within it Ctrl-C cuts nothing in two: it only makes the function given answer True, and counts at the end."""
    pressed: list[int] = []
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored, as in the background
    )
    if ours:
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


def _order(seed: int, epoch: int, n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed * _STRIDE + epoch))


def _optimiser(objective: nn.Module, rho: nn.Module | None, schedule: Schedule) -> torch.optim.Optimizer:
    spread = [] if rho is None else list(rho.parameters())
    numbers = set(map(id, spread))
    others = [parameter for parameter in objective.parameters() if id(parameter) not in numbers]
    rates = ((others, schedule.learning_rate), (spread, schedule.learning_rate * schedule.rho_rate))
    groups: list[dict[str, Any]] = [
        {"params": parameters, "lr": rate, "base": rate} for parameters, rate in rates if parameters
    ]
    if schedule.optimiser == "adam":
        return torch.optim.Adam(groups, fused=True)
    return torch.optim.SGD(groups, momentum=schedule.momentum)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = prefix + "."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
