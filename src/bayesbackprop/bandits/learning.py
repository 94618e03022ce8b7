"""A thread that learns what an agent was given, while others decide."""

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Learner:
    """Learns observations one after the other, in the order in which they were given.

    An error of its thread surfaces at the next call of the agent; the observation is not learnt, those after it are.

    Args:
        learn: Learns one observation.
        most: How many may wait to be learnt; who gives one more waits as well.
    """

    def __init__(self, learn: Callable[..., None], most: int) -> None:
        self._learn, self._most = learn, most
        self._given = self._done = 0
        self._queue: deque[tuple[Any, ...]] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ended = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="bayesbackprop-learning", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong in the thread since the last look, and refuse a process that has no such thread."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "This process was forked from one in which a thread learns for this agent; threads are not forked, and "
                "the agent may have been in the middle of an update. Fork before learning(), or load a saved agent."
            )
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError("The thread of learning() could not learn an observation.") from error

    def give(self, *observation: Any) -> bool:
        """Hand over an observation; False if the thread has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._queue) < self._most)
            if self._ended:
                return False
            self._queue.append(observation)
            self._given += 1
            self._changed.notify_all()
        return True

    def settle(self) -> None:
        """Wait until all that was given before is learnt."""
        self.check()
        with self._changed:
            until = self._given
            self._changed.wait_for(lambda: self._done >= until)
        self.check()

    def end(self) -> None:
        """Let the thread learn what it has been given, and end it."""
        if os.getpid() == self._process:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._thread.join()
            self.check()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if not self._queue:
                    return
                observation = self._queue.popleft()
            try:
                self._learn(*observation)
            except BaseException as error:
                self._error = error
            with self._changed:
                self._done += 1
                self._changed.notify_all()
