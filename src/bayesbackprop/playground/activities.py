"""What a session does with a work."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from bayesbackprop.playground.requests import Played, Trained

# Asked between two steps. When it says no, the activity ends at once.
GoesOn = Callable[[], bool]


class Activity(ABC):
    """A work in progress."""

    step: int = 0

    @abstractmethod
    def take_over(self, before: "Activity") -> None:
        """Start from what the activity before it has learnt, where the two are alike enough."""

    @abstractmethod
    def run(self, goes_on: GoesOn) -> None:
        """Work until there is nothing left to do, or ``goes_on`` says no."""

    @abstractmethod
    def look(self) -> Trained | Played:
        """What there is to be seen now."""


class History:
    """Numbers of each step, as a curve of few points: means over stretches, which grow longer as there are more."""

    _MOST = 200

    def __init__(self, columns: int) -> None:
        self.steps: list[int] = []
        self.columns: list[list[float]] = [[] for _ in range(columns)]
        self._length = 1
        self._forget_sums()

    def _forget_sums(self) -> None:
        self._sums, self._count = [0.0] * len(self.columns), 0

    def add(self, step: int, *values: float) -> None:
        """Those of a step."""
        self._sums = [total + value for total, value in zip(self._sums, values, strict=True)]
        self._count += 1
        if self._count < self._length:
            return
        self.steps.append(step)
        for column, total in zip(self.columns, self._sums, strict=True):
            column.append(total / self._count)
        self._forget_sums()
        if len(self.steps) == self._MOST:
            # Two stretches become one, which ends where the second did.
            self.steps = self.steps[1::2]
            self.columns = [
                [(one + other) / 2 for one, other in zip(column[::2], column[1::2], strict=True)]
                for column in self.columns
            ]
            self._length *= 2
