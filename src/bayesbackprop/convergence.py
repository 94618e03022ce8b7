"""When a run has converged, and how its learning rate falls.

The cost of a step is noisy: it is of some examples and of some draws. So whether it still falls is a question for a
test. The costs of all steps so far are cut into quarters. With a and b the means of the third and of the last, and
e the standard error of a - b, the cost has stopped falling where

    a - b <= max(e, tolerance).

Neighbouring costs have parameters in common, so e is by the means of ten stretches of each quarter. The test is made
when a run is ``first`` steps old, and whenever it has become a third older. What is left then is the noise of the steps
themselves, which a learning rate that falls to 0 averages away.

What the rules are worth, and what they were chosen from, is in the decisions of the documentation.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bayesbackprop._errors import Described, check_count, invalid
from bayesbackprop._files import check_counter, check_number
from bayesbackprop._runs import Callback, Run
from bayesbackprop.objective import FreeEnergy

__all__ = ["Convergence", "ConvergenceWarning", "Fall", "fall", "falling"]

# Stretches of a quarter whose means say how noisy that of the quarter is.
_STRETCHES = 10
# What a checkpoint holds of a run besides its costs and the last test.
_COUNTERS = ("next", "begin", "end", "epochs")
# How much older a run must be for another test, and the length of what follows the last.
_OLDER, _REST = 1.3, 0.5


class ConvergenceWarning(UserWarning):
    """A run ended before it had converged."""


class Fall(NamedTuple):
    """By how much costs fell from their third quarter to the last, and the standard error of that."""

    drop: float
    standard_error: float


def fall(costs: Sequence[float]) -> Fall:
    """How much costs are still falling, as above.

    Examples:
        >>> fall([8.0] * 10 + [4.0] * 10 + [2.0] * 10 + [1.0] * 10)
        Fall(drop=1.0, standard_error=0.0)
    """
    quarter = len(costs) // (4 * _STRETCHES) * _STRETCHES
    if not quarter:
        raise invalid("costs", "fall", f"at least {4 * _STRETCHES} numbers", Described(f"{len(costs)} of them"))
    recent = torch.as_tensor(costs[-2 * quarter :], dtype=torch.float64)
    stretches = recent.view(2, _STRETCHES, -1).mean(2)
    before, last = stretches.mean(1).tolist()
    return Fall(before - last, math.sqrt(float((stretches.var(1) / _STRETCHES).sum())))


class Convergence(Callback):
    """Ends a run when its cost has stopped falling.

    From then on the learning rate falls linearly to 0 within half as many steps again, if nobody gave :func:`fit` a
    scheduler. A run that must end earlier, by its ``epochs`` or after ``most`` steps, lets it fall in time, and says
    with a :class:`ConvergenceWarning` that it has not converged. All this happens at the end of an epoch.

    Args:
        first: The steps before the first test.
        most: The steps after which a run ends, converged or not, but for the rest of its epoch.
    """

    name = "convergence"
    warning: type[ConvergenceWarning] = ConvergenceWarning

    def __init__(self, first: int = 1000, most: int = 100_000) -> None:
        self._first = check_count("Convergence", least=4 * _STRETCHES, first=first)["first"]
        self._most = check_count("Convergence", least=self._first, most=most)["most"]
        self._forget()

    def _forget(self) -> None:
        self._costs: list[float] = []
        self._next = self._first
        self._begin = self._end = self._epochs = 0
        self._last: Fall | None = None

    def rate(self, step: int) -> float:
        """The learning rate after so many steps, as a fraction of that at the start."""
        return falling(step, self._begin, self._end) if self._end else 1.0

    def on_start(self, run: Run) -> None:
        if not run.step:  # and not one that was resumed
            self._forget()
        elif self._end and not self._has_stopped(run) and self._begin < self._begin_at_most(run):
            self._begin = self._end = self._epochs = 0  # it was made to end, and now may go on
        elif self._end:
            run.epochs = min(run.epochs, self._epochs)

    def on_step(self, run: Run) -> None:
        objective = run.objective
        if not self._end and not (isinstance(objective, FreeEnergy) and int(objective.step) <= objective.warmup):
            self._costs.append(run.cost)

    def on_epoch(self, run: Run) -> None:
        if self._end:
            return
        is_late = run.step >= self._begin_at_most(run)
        if len(self._costs) < self._next and not is_late:
            return
        if len(self._costs) >= 4 * _STRETCHES:
            self._last = fall(self._costs)
            self._next = math.ceil(_OLDER * len(self._costs))
        if is_late or self._has_stopped(run):
            epochs = math.ceil(_REST * run.epoch)
            self._epochs = run.epochs = int(min(run.epochs, run.epoch + epochs))
            self._begin, self._end = run.step, run.step + (self._epochs - run.epoch) * round(run.step / run.epoch)
            if self._epochs == run.epoch:
                run.stop()

    def on_end(self, run: Run) -> None:
        was_stopped = not self._end and run.epoch < run.epochs  # by another callback, for reasons of its own
        if run.complete and not was_stopped and not run.rank and not self._has_stopped(run):
            falls = (
                "" if self._last is None else f" (by {self._last.drop:.2g} ± {self._last.standard_error:.2g} lately)"
            )
            warnings.warn(
                f"The cost was still falling{falls} when the run ended after {run.step:,} steps: it has not converged. "
                "Allow more epochs or steps, or a higher learning rate.",
                self.warning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        counters = {name: getattr(self, f"_{name}") for name in _COUNTERS}
        return {"costs": torch.tensor(self._costs, dtype=torch.float64), "last": self._last, **counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:  # of a run that has this callback only since it was resumed
            return
        costs, last = state["costs"], state["last"]
        if costs.dim() != 1 or costs.dtype != torch.float64 or not bool(costs.isfinite().all()):
            raise ValueError(f"costs of shape {list(costs.shape)}")
        counters = {name: check_counter(name, state[name]) for name in _COUNTERS}
        if counters["end"] < counters["begin"] or bool(counters["end"]) is not bool(counters["epochs"]):
            raise ValueError(f"a rate that falls as {counters} say")
        self._costs = costs.tolist()
        for number in last or ():
            check_number("a fall", number)
        self._last = None if last is None else Fall(*last)
        for name, value in counters.items():
            setattr(self, f"_{name}", value)

    def _begin_at_most(self, run: Run) -> float:
        """The step after which the rate must fall, to be 0 in time."""
        steps = run.step / run.epoch if run.epoch else math.inf
        return min(self._most, run.epochs * steps) / (1 + _REST)

    def _has_stopped(self, run: Run) -> bool:
        """By the last test. A nat in all is less than anybody can see, also where there is no noise."""
        tolerance = 1 / run.objective.n if isinstance(run.objective, FreeEnergy) else 0.0
        return self._last is not None and self._last.drop <= max(self._last.standard_error, tolerance)


def falling(step: float, begin: float, end: float) -> float:
    """1 up to the step ``begin``, then linearly to 0 at ``end``: a learning rate, as a fraction of that at the start.

    Examples:
        >>> [falling(step, 2, 4) for step in range(5)]
        [1.0, 1.0, 1.0, 0.5, 0.0]
    """
    return 1.0 if step <= begin else max(0.0, (end - step) / (end - begin))
