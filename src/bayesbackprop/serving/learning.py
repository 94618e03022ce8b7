"""The learner: a thread that makes of the log an agent.

The agent after the first n rewards of the log is a pure function of them. So it does not matter who learns: of several
workers one holds the office, by a lease in the database, and the others take over its snapshots. If two should ever
learn at the same time, because one was stopped for longer than its lease, they write the same snapshots. No reward is
learnt twice, because an agent and the number of rewards that it has learnt are kept, saved and loaded together.
"""

import logging
import os
import socket
import threading
import time
import uuid

from bayesbackprop.bandits import Agent, load
from bayesbackprop.serving.log import Log, Observation
from bayesbackprop.serving.settings import Settings
from bayesbackprop.serving.snapshots import Snapshots

# Observations that are read at a time.
_TOGETHER = 64
# Seconds between two looks at what others have written, and between two attempts after a failure.
_POLL, _PAUSE = 0.2, 1.0
# A snapshot is written so rarely that it takes at most this part of the time.
_SHARE = 0.1
# Seconds between two sweeps of decisions that have expired.
_SWEEP = 5.0

_say = logging.getLogger("bayesbackprop.serving")


class Learner(threading.Thread):
    """Keeps the agent by which this worker decides.

    Attributes:
        agent: The agent; another object when a snapshot was taken over.
        position: How many rewards of the log it has learnt.
        is_learner: Whether this worker holds the office.
        snapshot: The position of the newest snapshot that was written or taken over.
        skipped: Rewards that the agent refused.
        trouble: What failed last, or None.
    """

    def __init__(self, log: Log, base: Agent, settings: Settings) -> None:
        super().__init__(name="learner", daemon=True)
        self.agent, self.position = base, 0
        self.is_learner, self.snapshot, self.skipped = False, 0, 0
        self.trouble: str | None = None
        self._log, self._settings = log, settings
        self._snapshots = Snapshots(settings.folder / log.name)
        # What an agent of this log must be.
        self._kind, self._arguments, self._observed = type(base), base.described()["arguments"], base.observed
        self._me = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex}"
        self._wake, self._ending = threading.Event(), threading.Event()
        self._last = ""  # the decision of the last reward that was learnt
        self._mangled: set[str] = set()
        self._asked = self._saved = self._swept = -float("inf")
        self._pause = settings.snapshot_seconds

    def wake(self) -> None:
        """There is something to learn."""
        self._wake.set()

    def end(self) -> None:
        """Finish the observation that is being learnt, write a snapshot, and end."""
        self._ending.set()
        self._wake.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Learn until :meth:`end`."""
        while not self._ending.is_set():
            try:
                self._turn()
                self.trouble = None
            except Exception as error:  # the database is away, the disk is full: decisions go on, and so will this
                self._complain(error)
                self._ending.wait(_PAUSE)
        try:
            if self.is_learner:
                self._save()
                self._log.release(self._me)
        except Exception as error:
            self._complain(error)
        self.is_learner = False

    def take_over(self) -> None:
        """Become the newest good snapshot that has learnt more."""
        for found in self._snapshots.found():
            if found.position <= self.position:
                return
            if found.path.name in self._mangled:
                continue
            try:
                if self._log.decision_at(found.position) != found.decision:
                    raise ValueError("it has learnt a reward that the log has not: of an older copy of the log?")
                agent = load(found.path)
                self._check(agent, found.position)
            except FileNotFoundError:  # a newer one took its place
                continue
            except ValueError as error:
                self._mangled.add(found.path.name)
                _say.warning("The snapshot %s is skipped: %s", found.path, error)
                continue
            self.agent, self.position, self._last = agent, found.position, found.decision
            self.snapshot = found.position
            return

    def _check(self, agent: Agent, position: int) -> None:
        """Refuse what is no agent of this log after so many rewards, of which it may have refused some."""
        if type(agent) is not self._kind or agent.described()["arguments"] != self._arguments:
            raise ValueError("it is of another agent than the log.")
        if not 0 <= agent.observed - self._observed <= position:
            raise ValueError(f"it has learnt {agent.observed} rewards, and its name says {position}.")

    def _turn(self) -> None:
        if not self._hold():
            self.take_over()
            self._rest()
            return
        learnt = self._learn()
        if time.monotonic() - self._saved > self._pause:
            self._save()
        if time.monotonic() - self._swept > _SWEEP and not self._log.sweep(self._settings.limits.expire):
            self._swept = time.monotonic()
        if not learnt:
            self._rest()

    def _rest(self) -> None:
        self._wake.wait(_POLL)
        self._wake.clear()

    def _hold(self) -> bool:
        """Whether this worker is the learner; the lease is renewed in good time."""
        now, seconds = time.monotonic(), self._settings.lease_seconds
        if now - self._asked < seconds / (3 if self.is_learner else 10):
            return self.is_learner
        before = self._log.holder()
        held = self._log.hold(self._me, seconds, instead_of=before if _is_dead(before) else None)
        if held and not self.is_learner:
            self.take_over()  # as far as the one before came
        self.is_learner, self._asked = held, now
        return held

    def _learn(self) -> int:
        """Learn what is next in the log, for less time than the lease has; how many rewards that were."""
        until, learnt = time.monotonic() + self._settings.lease_seconds / 3, 0
        for each in self._log.after(self.position, _TOGETHER):
            if self._ending.is_set() or time.monotonic() > until:
                break
            learn(self.agent, each, self)
            self.position, self._last = each.position, each.decision
            learnt += 1
        return learnt

    def _save(self) -> None:
        if self.position > self.snapshot:
            began = time.monotonic()
            self._snapshots.write(self.agent, self.position, self._last)
            self._saved, self.snapshot = time.monotonic(), self.position
            self._pause = max(self._settings.snapshot_seconds, (self._saved - began) / _SHARE)

    def _complain(self, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        if said != self.trouble:
            _say.warning("The learner waits: %s", said)
        self.trouble = said


def learn(agent: Agent, each: Observation, learner: Learner | None = None) -> None:
    """Let ``agent`` learn one entry of the log.

    A reward that it refuses (a context whose squares are too large for a linear model) is skipped: by every agent that
    learns this log, so that all remain the same.
    """
    options = {} if each.features is None else {"features": each.features}
    try:
        agent.observe(each.context, each.action, each.reward, **options)
    except ValueError as error:
        _say.warning("The reward at position %d is skipped: %s", each.position, error)
        if learner is not None:
            learner.skipped += 1


def rebuilt(log: Log) -> Agent:
    """The agent that has learnt all rewards of ``log``, from the log alone."""
    agent, position = log.open(), 0
    while some := log.after(position, _TOGETHER):
        for each in some:
            learn(agent, each)
        position = some[-1].position
    return agent


def _is_dead(holder: str) -> bool:
    """Whether the process of a learner is on this machine and has ended."""
    host, _, rest = holder.partition("/")
    process = rest.partition("/")[0]
    if host != socket.gethostname() or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
