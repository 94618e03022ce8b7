"""How steps and predictions are measured: all contenders of a table in turn, and rows of what they took."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim import Adam
from bayesbackprop_paper.bench.contenders import (
    OPTIMISERS,
    OURS,
    OWN,
    Contender,
    Part,
    Task,
    UnsupportedError,
    bayesian,
)
from bayesbackprop_paper.bench.memory import peak_memory
from bayesbackprop_paper.bench.report import Row, Run
from bayesbackprop_paper.timing import CPU, Quartiles, Track, interleaved

# Ours, with the ensemble drawn once and used again.
KEPT = f"{OURS.name} kept"

# More fields of a row, by the name of its contender.
Extra = Mapping[str, Mapping[str, Any]]

FLOAT_BYTES = 4
_BASES = ("sgd", "dropout", "passes", OURS.name)


@dataclass(frozen=True)
class Config:
    """How to measure: what every row says of the run, the other libraries, what shows the progress, and where."""

    run: Run
    peers: Sequence[Contender] = ()
    optimiser: bool = True
    track: Track = lambda rounds, _: rounds
    device: torch.device = CPU


@contextmanager
def settings(config: Config, threads: int | None = None) -> Iterator[None]:
    """The run's threads, or as many as told, and its seed; afterwards those from before."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.run.threads if threads is None else threads)
    try:
        with torch.random.fork_rng(devices=[config.device] if config.device.type == "cuda" else []):
            torch.manual_seed(config.run.seed)
            yield
    finally:
        torch.set_num_threads(before)


class Step:
    """A training step of a contender on one batch, ready to be repeated."""

    def __init__(self, contender: Contender, task: Task, x: Tensor, y: Tensor) -> None:
        trainee = contender.build(task)
        self._cost, self._x, self._y = trainee.cost, x, y
        self._parameters = list(trainee.module.parameters())
        self._optimiser = trainee.optimiser or OPTIMISERS[contender.optimiser](self._parameters)
        parts: dict[Part, Callable[[], object]] = {
            "step": self._step,
            "gradients": self._gradients,
            "update": self._optimiser.step,
        }
        self._part, self._times = parts[contender.part], range(contender.repeat)
        if contender.part == "update":
            self._gradients()  # to have some

    def __call__(self) -> None:
        """Take the step, or the part of it that is measured, as often as the contender says."""
        for _ in self._times:
            self._part()

    def _step(self) -> None:
        if isinstance(self._optimiser, Adam) and isinstance(self._cost, FreeEnergy):
            self._optimiser.minimise(self._cost, self._x, self._y)
        else:
            self._gradients()
            self._optimiser.step()

    def _gradients(self) -> None:
        self._optimiser.zero_grad()
        cost = self._cost(self._x, self._y)
        if isinstance(self._optimiser, Adam) and isinstance(cost, Tensor):
            self._optimiser.backward(cost)
        else:
            cost.backward()

    def held(self) -> int:
        """Bytes of what is there between two steps: what is learnt, its gradients and the state of the optimiser.

        Of gradients that our Adam does not write there is as much as if it did.
        """
        state = self._optimiser.state
        learnt = [parameter for parameter in self._parameters if parameter.grad is not None or parameter in state]
        kept: list[object] = [*learnt, *learnt]
        for values in (*self._optimiser.state.values(), *self._optimiser.param_groups):  # some keep it in the groups
            kept += values.values() if isinstance(values, Mapping) else [values]
        return sum(each.nbytes for each in kept if isinstance(each, Tensor))


def steps(
    config: Config,
    task: Task,
    batch: int,
    contenders: Sequence[Contender],
    warm_up: int,
    *,
    extra: Extra | None = None,
    table: str | None = None,
) -> list[Row]:
    """Training steps of all ``contenders`` on one batch, in turn.

    Args:
        config: How to measure.
        task: The network and its data.
        batch: Examples of a step.
        contenders: What to measure; the row of one that cannot be built says why.
        warm_up: Rounds before anything counts.
        extra: More fields of the rows.
        table: The title of their table; None for the network and the batch.
    """
    made, notes = _build(contenders, partial(_step, config, task, *task.data(batch)))
    title = f"{table or task.name}, steps"
    times = interleaved(made, config.run.rounds, warm_up, config.run.seed, config.track, title, config.device)
    both = {each.name: {"against": each.against, **(extra or {}).get(each.name, {})} for each in contenders}
    return rows(config.run, task, batch, times, notes, both, table)


def memory(config: Config, task: Task, batch: int, contenders: Sequence[Contender]) -> Extra:
    """The peak of a step with SGD or our Adam above what is there between two steps, in units of all weights.

    Torch's Adam needs more for a moment, for itself. Beside it stands that of the first contender, a plain step, which
    is activations alone.
    """
    x, y = task.data(batch)
    weights = FLOAT_BYTES * task.weights
    above: dict[str, float] = {}
    for _, each in zip(config.track(range(len(contenders)), f"{task.name}, memory"), contenders, strict=True):
        made: list[Step] = []
        each = each if each.optimiser == OWN else each._replace(optimiser="SGD")

        def build(each: Contender = each, made: list[Step] = made) -> Step:
            made.append(_step(config, task, x, y, each))
            made[-1]()  # a compiler needs memory, too
            return made[-1]

        try:
            peak = peak_memory(build, config.device)
        except UnsupportedError:
            continue  # its row will say why
        above[each.name] = (peak - made[-1].held()) / weights
    activations = above[contenders[0].name]
    return {name: {"memory": value, "memory_activations": activations} for name, value in above.items()}


def _step(config: Config, task: Task, x: Tensor, y: Tensor, contender: Contender) -> Step:
    return Step(contender if config.optimiser else contender._replace(part="gradients"), task, x, y)


def predictions(config: Config, task: Task, number: int, draws: int, table: str | None = None) -> list[Row]:
    """The probabilities of ``draws`` networks for ``number`` inputs, beside as many plain passes."""
    notes = {"passes": "one plain network", OURS.name: "predict(x)", KEPT: "ensemble().predict(x)"}
    with torch.no_grad():
        x, _ = task.data(number)
        model = bayesian(task).eval()
        runs: dict[str, Callable[[], object]] = {
            "passes": partial(passes, model.net, x, draws),
            OURS.name: partial(model.predict, x, draws=draws),
            KEPT: partial(model.ensemble(draws).predict, x),
        }
        peers = [peer._replace(objective="a loop over draws") for peer in config.peers]
        loops, notes_of_peers = _build(peers, partial(_loop, task, x, draws))
        runs, notes = runs | loops, notes | notes_of_peers
        title = f"{task.name}, {draws} draws for {number}"
        times = interleaved(runs, config.run.rounds, 1, config.run.seed, config.track, title, config.device)
    shared = {"images": number, "draws": draws}
    return rows(config.run, task, number, times, notes, dict.fromkeys(notes, shared), table)


def _loop(task: Task, x: Tensor, draws: int, contender: Contender) -> Callable[[], Tensor]:
    trainee = contender.build(task)
    trainee.module.eval()
    return partial(_average, trainee.forward, x, draws)


def passes(forward: Callable[[Tensor], Tensor], x: Tensor, draws: int) -> list[Tensor]:
    """The outputs of ``draws`` passes, one after the other."""
    return [forward(x) for _ in range(draws)]


def _average(forward: Callable[[Tensor], Tensor], x: Tensor, draws: int) -> Tensor:
    """The mean probabilities, by a loop: the layers of other libraries draw one set of weights a call."""
    return torch.stack(passes(forward, x, draws)).softmax(-1).mean(0)


def _build(
    contenders: Iterable[Contender], make: Callable[[Contender], Callable[[], object]]
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """What is to be timed, and the note of each contender: its objective, or why it is left out."""
    made: dict[str, Callable[[], object]] = {}
    notes: dict[str, str] = {}
    for each in contenders:
        notes[each.name] = each.objective
        try:
            made[each.name] = make(each)
        except UnsupportedError as error:
            notes[each.name] = f"left out: {error}"
    return made, notes


def rows(
    run: Run,
    task: Task,
    batch: int,
    times: Mapping[str, Quartiles],
    notes: Mapping[str, str],
    extra: Extra,
    table: str | None = None,
) -> list[Row]:
    """A row for each name in ``notes``; without a time where there is none.

    Where ``extra`` gives rows to divide by, as ``against``, there are these ratios alone.
    """
    bases = () if any(more.get("against") for more in extra.values()) else _BASES

    def measured(time: Quartiles, against: str | None) -> dict[str, Any]:
        ratios = {f"ratio_{base}": time.median / times[base].median for base in bases if base in times}
        if against is not None and against in times:
            ratios["ratio"] = time.median / times[against].median
        return {"milliseconds": time.median, "quartiles": (time.lower, time.upper), **ratios}

    made: list[Row] = []
    for name, note in notes.items():
        more = extra.get(name, {})
        figures = measured(times[name], more.get("against")) if name in times else {}
        fields: dict[str, Any] = {"network": task.name, "units": task.units, "batch": batch, "table": table}
        made.append(Row(run=run, name=name, note=note, **{**fields, **figures, **more}))
    return made
