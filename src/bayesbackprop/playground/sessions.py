"""Sessions: one for each page, each with a thread that trains what the page has put to it."""

import threading
import time
from dataclasses import dataclass

from bayesbackprop.playground.activities import Activity
from bayesbackprop.playground.bandit import Contest
from bayesbackprop.playground.requests import Bandit, Regression, Snapshot, Status, Trained, Work
from bayesbackprop.playground.training import Training
from bayesbackprop.serving.access import RefusedError

# Seconds of work, and of rest after it: the page that shows it, and other programs, need the processor too.
_WORK, _REST = 0.03, 0.01
# Seconds from one snapshot to the next, which is so many times what it takes to make one.
_BETWEEN, _TIMES = 0.25, 4


@dataclass(frozen=True)
class Limits:
    """How much a playground does.

    Attributes:
        sessions: How many there may be at a time.
        rest: Seconds without a question after which a session trains no more, until there is one.
        expiry: Seconds without a question after which it is forgotten.
        body: Bytes of a request.
    """

    sessions: int = 8
    rest: float = 15.0
    expiry: float = 600.0
    body: int = 100_000


class Session:
    """What one page has put here, and a thread that works on it. It ends with :meth:`close`.

    Args:
        turn: Held by the session that works: together they take one processor.
        rest: Seconds without a question after which it waits.
    """

    def __init__(self, turn: threading.Lock, rest: float) -> None:
        self._turn, self._rest = turn, rest
        self._changed = threading.Condition()
        self._work: Work | None = None
        self._number, self._version = 0, 0
        self._next: Activity | None = None
        self._closed = False
        self._snapshot: Snapshot | None = None
        self.asked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="playground", daemon=True)
        self._thread.start()

    # --- what requests call ------------------------------------------------------------------------------------------

    def put(self, work: Work) -> int:
        """Work on this from now on; its number. What the library refuses raises a ``ValueError``, and changes nothing.

        Another pace alone is the same work.
        """
        with self._changed:
            self.asked = time.monotonic()
            if self._work is None or _without_pace(self._work) != _without_pace(work):
                self._next = Contest(work) if isinstance(work, Bandit) else Training(work)
                self._number += 1
            self._work = work
            self._changed.notify_all()
            return self._number

    def newest(self, after: int) -> Snapshot | None:
        """The newest snapshot, unless there is none after the version ``after``."""
        with self._changed:
            self.asked = time.monotonic()
            self._changed.notify_all()
            found = self._snapshot
            return found if found is not None and found.version > after else None

    def close(self) -> None:
        """End the thread, after the step that it takes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended."""
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        """Whether its thread has not ended yet."""
        return self._thread.is_alive()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        before: Activity | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next is not None)
                if self._closed or self._next is None or self._work is None:
                    return
                activity, self._next, task = self._next, None, self._work.task
                number = self._number
            with self._turn:
                stretch = _Stretch(self, activity, number, task)
                try:
                    if before is not None:
                        activity.take_over(before)
                    stretch.show("training")
                    activity.run(stretch.goes_on)
                    if not self._is_over():
                        stretch.show("settled")
                    before = activity
                except Exception as error:  # the page says it, and waits for other settings
                    stretch.show("failed", str(error))
                    before = None  # its numbers may be none any more

    def _is_over(self) -> bool:
        """Whether there is another work, or none any more."""
        return self._closed or self._next is not None

    def _wait(self, due: float) -> None:
        """Give the others their turn; come back when there is something to do, and not before ``due``."""
        self._turn.release()
        try:
            time.sleep(_REST)
            with self._changed:
                while not self._is_over():
                    now, pace = time.monotonic(), self.pace
                    if now - self.asked > self._rest or pace == 0:
                        self._changed.wait()
                    elif now < due:
                        self._changed.wait(due - now)
                    else:
                        break
        finally:
            self._turn.acquire()

    @property
    def pace(self) -> float | None:
        """Steps a second at most."""
        return None if self._work is None else self._work.pace

    def _publish(self, snapshot: Snapshot) -> None:
        with self._changed:
            self._snapshot = snapshot


class _Stretch:
    """The time a session spends on one work: when it rests, and when it shows how far it is."""

    def __init__(self, session: Session, activity: Activity, number: int, task: str) -> None:
        self._session, self._activity, self._number, self._task = session, activity, number, task
        self._began = self._shown = time.monotonic()
        self._pause, self._step = 0.0, activity.step

    def goes_on(self) -> bool:
        """Called between two steps: rests, shows, and says whether there is to be another step."""
        session, now = self._session, time.monotonic()
        if session._is_over():
            return False
        if now - self._shown >= self._pause:
            self.show("training")
        pace, watched = session.pace, now - session.asked <= session._rest
        if pace is not None or not watched or now - self._began >= _WORK:
            session._wait(now + (1 / pace if pace else 0))
            self._began = time.monotonic()
        return not session._is_over()

    def show(self, status: Status, message: str = "") -> None:
        """Make a snapshot of the activity; of one that failed, only of what went wrong."""
        start, session, activity = time.monotonic(), self._session, self._activity
        steps, seconds = activity.step - self._step, start - self._shown
        seen = None if status == "failed" else activity.look()
        session._version += 1
        session._publish(
            Snapshot(
                version=session._version,
                work=self._number,
                task=self._task,  # type: ignore[arg-type]
                step=activity.step,
                rate=round(steps / seconds, 1) if seconds > 0 else 0.0,
                status=status,
                message=message,
                trained=seen if isinstance(seen, Trained) else None,
                played=seen if not isinstance(seen, Trained) else None,
            )
        )
        self._shown, self._step = time.monotonic(), activity.step
        self._pause = max(_BETWEEN, _TIMES * (self._shown - start))


class Sessions:
    """All sessions by the names their pages have given them."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._turn = limits, threading.Lock()
        self._lock = threading.Lock()
        self._by_name: dict[str, Session] = {}

    def put(self, name: str, work: Work) -> int:
        """Put a work to the session of this name, which is made if it is new; the number of the work."""
        with self._lock:
            self._forget()
            session = self._by_name.get(name)
            if session is None:
                self._make_room()
                session = Session(self._turn, self._limits.rest)
                try:
                    number = session.put(work)
                except ValueError:
                    session.close()
                    raise
                self._by_name[name] = session
                return number
        return session.put(work)

    def newest(self, name: str, after: int) -> Snapshot | None:
        """The newest snapshot of the session of this name."""
        with self._lock:
            self._forget()
            session = self._by_name.get(name)
        if session is None:
            raise RefusedError(404, "no_session", "There is no such session, or no longer: put a work to it.")
        return session.newest(after)

    def close(self, name: str) -> None:
        """End the session of this name, if there is one."""
        with self._lock:
            session = self._by_name.pop(name, None)
        if session is not None:
            session.close()

    def end(self) -> None:
        """End all of them."""
        with self._lock:
            ended, self._by_name = self._by_name, {}
        for session in ended.values():
            session.close()
        for session in ended.values():
            session.join(timeout=10)

    def __len__(self) -> int:
        return len(self._by_name)

    def _forget(self, after: float | None = None) -> None:
        """End those that nobody has asked for long."""
        limit = time.monotonic() - (self._limits.expiry if after is None else after)
        for name, session in list(self._by_name.items()):
            if session.asked < limit:
                del self._by_name[name]
                session.close()

    def _make_room(self) -> None:
        """Where there are as many as there may be, those that rest make room; or there is none."""
        if len(self._by_name) >= self._limits.sessions:
            self._forget(self._limits.rest)
        if len(self._by_name) >= self._limits.sessions:
            message = f"There are {self._limits.sessions} pages open already. Close one, and reload this one."
            raise RefusedError(503, "too_many_sessions", message)


def warm_up() -> None:
    """Take a first step now: torch imports half of itself in it, for which a page would have to wait."""
    activity = Training(Regression(task="regression", points=[]))
    activity.run(lambda: False)
    activity.look()


def _without_pace(work: Work) -> Work:
    return work.model_copy(update={"pace": None})
