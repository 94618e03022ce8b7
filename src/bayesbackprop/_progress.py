"""What a long run shows: a live line on a terminal, plain lines elsewhere, and TensorBoard if it is installed."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.console
import rich.progress
import rich.text


class Progress:
    """Of one training run.

    Args:
        title: What is being trained.
        quiet: Show nothing.
        tensorboard: A folder for TensorBoard's files; without TensorBoard nothing is written.
    """

    def __init__(self, title: str = "training", *, quiet: bool = False, tensorboard: Path | None = None) -> None:
        self._title = title
        self._quiet = quiet
        self._folder = tensorboard
        self._console = rich.console.Console(stderr=True)
        self._live: _TwoLines | None = None
        self._task: rich.progress.TaskID | None = None
        self._writer: Any = None
        self._last = ""

    @contextmanager
    def run(self, epochs: int, batches: int, done: int) -> Iterator[None]:
        """Show a run of so many epochs of so many steps, of which ``done`` steps are over."""
        self._epochs, self._batches = epochs, batches
        self._done, self._started, self._first = done, time.perf_counter(), done
        self._writer = _tensorboard(self._folder, done // batches)
        try:
            if self._quiet or not self._console.is_terminal:
                yield
                return
            columns = (
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(bar_width=None),
                rich.progress.TextColumn("{task.fields[speed]}"),
                rich.progress.TimeRemainingColumn(),
            )
            with _TwoLines(*columns, console=self._console, expand=True) as self._live:
                self._task = self._live.add_task(self._title, total=epochs * batches, completed=done, speed="")
                yield
        finally:
            self._live = None
            if self._writer is not None:
                self._writer.close()

    def step(self, sums: Mapping[str, float]) -> None:
        """One step is over; ``sums`` are those of the costs of the epoch so far."""
        self._done += 1
        if self._live is None or self._task is None:
            return
        within = (self._done - 1) % self._batches + 1
        speed = (self._done - self._first) / (time.perf_counter() - self._started)
        says = f"epoch {(self._done - 1) // self._batches + 1}/{self._epochs}  {_costs(sums, within)}{self._last}"
        self._live.says = says
        self._live.update(self._task, completed=self._done, speed=f"{speed:.0f} steps/s")

    def epoch(self, record: Mapping[str, float]) -> None:
        """An epoch is over."""
        self._last = f"  validation {record['validation_error']:.2f} %"
        if self._writer is not None:
            for name, value in record.items():
                self._writer.add_scalar(name, value, int(record["epoch"]))
        if self._live is None and not self._quiet:
            left = record["seconds"] * (self._epochs - record["epoch"])
            print(
                f"{self._title}: epoch {int(record['epoch'])}/{self._epochs}  {_costs(record, 1)}{self._last}  "
                f"{record['seconds']:.1f} s, {left / 60:.1f} min left",
                file=sys.stderr,
                flush=True,
            )


class _TwoLines(rich.progress.Progress):
    """A bar, and below it what there is to say, so that both fit a narrow terminal."""

    says = ""

    def get_renderables(self) -> Iterable[rich.console.RenderableType]:
        yield from super().get_renderables()
        yield rich.text.Text(self.says, no_wrap=True, overflow="ellipsis")


def _costs(sums: Mapping[str, float], count: int) -> str:
    return f"likelihood {sums['likelihood'] / count:.4f}  complexity {sums['complexity'] / count:.4g}"


def _tensorboard(folder: Path | None, epoch: int) -> Any:
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=epoch + 1)
