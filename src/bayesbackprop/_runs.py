"""A run of training as its callbacks see it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bayesbackprop._errors import invalid
from bayesbackprop._ranks import rank_of_ranks

# One epoch in numbers: "epoch", "cost", what the cost consists of, what was measured on held-out data, "seconds".
Record = dict[str, float]


class Callback:
    """What else happens in a run. All methods do nothing here; a subclass overrides what it needs.

    Callbacks are called in the order in which :func:`fit` got them. What :meth:`state_dict` returns, tensors and what
    JSON can hold, is part of every checkpoint under the callback's ``name``.
    """

    name: ClassVar[str] = "callback"

    def restore(self, run: "Run") -> None:
        """Put ``run`` back to where it was left, before any callback's :meth:`on_start`."""

    def on_start(self, run: "Run") -> None:
        """The first step is about to be taken."""

    def on_step(self, run: "Run") -> None:
        """The optimiser has taken a step."""

    def on_epoch(self, run: "Run") -> None:
        """An epoch is over, and ``run.history[-1]`` is its record."""

    def on_end(self, run: "Run") -> None:
        """The run is over: complete, stopped, interrupted or failed."""

    def evaluating(self, run: "Run") -> AbstractContextManager[None]:  # noqa: ARG002
        """Within it ``run`` is evaluated: its parameters are those that count."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this callback."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned."""


class Run:
    """How far a training run is. Callbacks read it, and end it with :meth:`stop`.

    Attributes:
        objective: The module whose call gives the cost of a minibatch.
        optimiser: The optimiser.
        scheduler: Of the learning rate, or None.
        epochs: How many there will be; ``math.inf`` as long as nobody knows, in a run that ends when it has converged.
        steps: The steps of an epoch, or None where the loader has no length.
        step: Steps taken.
        cost: The mean cost of the examples of the last step.
        taken: Batches taken of the running epoch.
        examples: Examples in them, over all ranks.
        sums: The costs of the running epoch, summed over its examples.
        seconds: The time spent on training in the running epoch.
        history: A record for each epoch that is over.
        interrupted: Whether Ctrl-C or SIGTERM ended it.
        complete: Whether it reached its end, or was stopped by a callback.
        seed: Of what is random.
        accumulate: Batches of a step.
        rank: The number of this process.
        ranks: The number of processes.
    """

    def __init__(
        self,
        objective: nn.Module,
        optimiser: Optimizer,
        scheduler: LRScheduler | None,
        epochs: float,
        steps: int | None,
        callbacks: Sequence[Callback],
        seed: int = 0,
        accumulate: int = 1,
    ) -> None:
        self.seed, self.accumulate = seed, accumulate
        self.objective, self.optimiser, self.scheduler = objective, optimiser, scheduler
        self.epochs, self.steps, self.callbacks = epochs, steps, callbacks
        self.rank, self.ranks = rank_of_ranks()
        self.step = self.taken = self.examples = 0
        self.sums: dict[str, float] = {}
        self.seconds = self.cost = 0.0
        self.history: list[Record] = []
        self.interrupted = self.complete = self._stopped = False

    @property
    def epoch(self) -> int:
        """Epochs that are over."""
        return len(self.history)

    @property
    def means(self) -> dict[str, float]:
        """The costs of the running epoch so far, averaged over its examples."""
        return {name: total / self.examples for name, total in self.sums.items()}

    @property
    def goes_on(self) -> bool:
        """Whether there is another epoch."""
        return self.epoch < self.epochs and not self._stopped

    def stop(self) -> None:
        """Let the running epoch be the last."""
        self._stopped = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the parameters are those that the callbacks want evaluated: their averages, say."""
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.evaluating(self))
            yield

    def state_dict(self) -> dict[str, Any]:
        """How far the run is, as far as JSON can say it."""
        names = ("step", "taken", "examples", "sums", "seconds", "seed", "accumulate")
        return {**{name: getattr(self, name) for name in names}, "records": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned, of a run with the same settings."""
        for name, now in (("seed", self.seed), ("accumulate", self.accumulate)):
            if state.get(name, now) != now:
                constraint = f"{state[name]}, as in the run that the checkpoint is of; or choose another file"
                raise invalid(name, "fit", constraint, now)
        self.step, self.taken, self.examples = state["step"], state["taken"], state["examples"]
        self.sums, self.seconds = dict(state["sums"]), state["seconds"]
        self.history[:] = state["records"]
