"""Threads that share an agent take turns."""

import threading


class Turns:
    """A lock that threads get in the order in which they ask for it.

    ``threading.Lock`` promises no order: a thread that releases it in a loop usually gets it again at once, and the
    others starve.
    """

    def __init__(self) -> None:
        # Those who asked, in order; the first has the turn. Each waits for a lock of its own, which its predecessor
        # releases.
        self._line: dict[int, threading.Lock] = {}
        self._guard = threading.RLock()  # of the line; reentrant, since a signal handler may interrupt its holder

    def __enter__(self) -> None:
        me, wakes = threading.get_ident(), threading.Lock()
        if me in self._line:
            raise RuntimeError(
                "This thread is in the middle of a call of the same agent. A signal handler, or a prior, must not call "
                "the agent that it interrupts: set a flag there, and call the agent afterwards."
            )
        wakes.acquire()
        try:
            with self._guard:
                self._line[me] = wakes
                waits = len(self._line) > 1
            if waits:
                wakes.acquire()
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Pass the turn on. Whoever was interrupted while waiting leaves the line as well."""
        me = threading.get_ident()
        with self._guard:
            if me not in self._line:
                return
            first, *others = self._line
            if first == me and others:
                self._line[others[0]].release()
            del self._line[me]

    def give_way(self) -> None:
        """Let those who wait by now go first."""
        if len(self._line) > 1:
            self.__exit__()
            self.__enter__()
