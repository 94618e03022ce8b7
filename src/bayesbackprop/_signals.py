"""Ctrl-C and SIGTERM: what is being done is finished, and then they count."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

# Seconds in which SIGTERM is no second signal: a launcher passes on what its processes were sent themselves.
_TOGETHER = 1.0


class TerminatedError(SystemExit):
    """SIGTERM has ended a run. The process exits with 143, as shells count it, unless someone catches this."""

    def __init__(self, code: int = 128 + signal.SIGTERM) -> None:
        super().__init__(code)


# What a signal raises when it counts. SIGTERM is what schedulers send.
ENDINGS: dict[int, type[BaseException]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: TerminatedError}


class _Terminate:
    """A handler of SIGTERM that raises, so that what is open is closed; for SIGINT Python has such a one.

    Python drops what a handler raises within a finaliser. ``came`` remembers that the signal came all the same.
    """

    came = False

    def __call__(self, _number: int, _frame: Any) -> None:
        self.came = True
        raise TerminatedError


terminate = _Terminate()


class _Deferral:
    """The handler of both signals while they are deferred. It remembers the first."""

    def __init__(self) -> None:
        self.number, self._moment = 0, 0.0
        self._process = os.getpid()
        ours: dict[int, tuple[Any, ...]] = {
            signal.SIGINT: (signal.default_int_handler,),
            signal.SIGTERM: (signal.SIG_DFL, terminate),
        }
        before = {number: signal.getsignal(number) for number in ours}
        self._before = {number: before[number] for number, handlers in ours.items() if before[number] in handlers}
        if terminate in self._before.values() and terminate.came:
            self.number = signal.SIGTERM

    def __call__(self, number: int, _frame: Any) -> None:
        if os.getpid() != self._process:  # a child that was forked: it has nothing to finish
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
            return
        now = time.monotonic()
        if not self.number:
            self.number, self._moment = number, now
        elif number == signal.SIGINT or now - self._moment > _TOGETHER:
            raise ENDINGS[number]

    def __enter__(self) -> None:
        for number in self._before:
            signal.signal(number, self)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def interrupt_deferred() -> Iterator[Callable[[], int]]:
    """Within it Ctrl-C and SIGTERM cut nothing in two: the function given answers their number, or 0.

    At the end they count: ``KeyboardInterrupt`` or :class:`TerminatedError` is raised. A second one counts at once:
    what is being done may never end. Within another, the inner one ends first, by the same signal. A handler of the
    user's, and one that ignores the signal, as in the background, is left alone. In other threads than the main one,
    nothing is deferred.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    outer = next((each for each in map(signal.getsignal, ENDINGS) if isinstance(each, _Deferral)), None)
    deferral = outer or _Deferral()
    with nullcontext() if outer else deferral:
        yield lambda: deferral.number
    if deferral.number:
        raise ENDINGS[deferral.number]
