"""What a long run shows: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from bayesbackprop.training import Callback, Record, Run

# What a record holds besides what was measured on held-out data.
_TRAINING = ("epoch", "cost", "likelihood", "complexity", "seconds")


def _measured(record: Record) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in record.items() if name not in _TRAINING)


class Progress(Callback):
    """Shows how far a run is: on a terminal as a bar with its costs, elsewhere as a line for each epoch.

    Args:
        title: What is being trained.
        describe: What to say of the last epoch, made of its record; unless given, all that was measured on held-out
            data.
    """

    def __init__(self, title: str = "training", describe: Callable[[Record], str] = _measured) -> None:
        self._title, self._describe = title, describe
        self._console: Any = None
        self._live: Any = None
        self._exit = ExitStack()

    def on_start(self, run: Run) -> None:
        import rich.console  # here and not above: the library does not need it
        import rich.progress

        self._started, self._first, self._last = time.perf_counter(), run.step, ""
        console = self._console or rich.console.Console(stderr=True)
        if run.rank or not console.is_terminal:
            return
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[speed]}"),
            rich.progress.TimeRemainingColumn(),
        )
        self._live = self._exit.enter_context(_two_lines()(*columns, console=console, expand=True))
        total = None if run.steps is None else run.epochs * run.steps
        self._task = self._live.add_task(self._title, total=total, completed=run.step, speed="")

    def on_step(self, run: Run) -> None:
        if self._live is not None:
            speed = (run.step - self._first) / (time.perf_counter() - self._started)
            self._live.says = f"epoch {run.epoch + 1}/{run.epochs}  {_costs(run.means)}{self._last}"
            self._live.update(self._task, completed=run.step, speed=f"{speed:.0f} steps/s")

    def on_epoch(self, run: Run) -> None:
        record = run.history[-1]
        measured = self._describe(record)
        self._last = f"  {measured}" if measured else ""
        if self._live is None and run.rank == 0:
            left = record["seconds"] * (run.epochs - run.epoch) / 60
            told = f"epoch {run.epoch}/{run.epochs}  {_costs(record)}{self._last}"
            times = f"{record['seconds']:.1f} s, {left:.1f} min left"
            print(f"{self._title}: {told}  {times}", file=sys.stderr, flush=True)

    def on_end(self, run: Run) -> None:  # noqa: ARG002
        self._exit.close()
        self._live = None


def _costs(means: Mapping[str, float]) -> str:
    if "likelihood" not in means:
        return f"cost {means['cost']:.4f}"
    return f"likelihood {means['likelihood']:.4f}  complexity {means['complexity']:.4g}"


def _two_lines() -> Any:
    import rich.console
    import rich.progress
    import rich.text

    class TwoLines(rich.progress.Progress):
        """A bar, and below it what there is to say, so that both fit a narrow terminal."""

        says = ""

        def get_renderables(self) -> Iterable[rich.console.RenderableType]:
            yield from super().get_renderables()
            yield rich.text.Text(self.says, no_wrap=True, overflow="ellipsis")

    return TwoLines
