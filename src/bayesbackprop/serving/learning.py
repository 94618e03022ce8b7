"""The learner: a thread that makes of the log an agent.

The agent after the first n rewards of the log is a pure function of them. So it does not matter who learns: of several
workers one holds the office, by a lease in the database, and the others take over its snapshots. If two should ever
learn at the same time, because one was stopped for longer than its lease, they write the same snapshots. No reward is
learnt twice, because an agent and the number of rewards that it has learnt are kept, saved and loaded together. Nor
is a change of its actions made twice: changes have their places among the rewards, and are counted as well.
"""

import copy
import logging
import os
import socket
import threading
import time
import uuid
from typing import Any

from bayesbackprop.bandits import Agent, load
from bayesbackprop.serving.arms import Arms, Change
from bayesbackprop.serving.log import Log, Observation
from bayesbackprop.serving.settings import Settings
from bayesbackprop.serving.snapshots import NONE, Snapshot, Snapshots

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
        agent: The agent; another object when a snapshot was taken over, or its actions changed.
        position: How many rewards of the log it has learnt.
        changes: How many changes of its actions it has made.
        is_learner: Whether this worker holds the office.
        snapshot: The position of the newest snapshot that was written or taken over.
        skipped: Rewards that the agent refused.
        trouble: What failed last, or None.
    """

    def __init__(self, log: Log, base: Agent, settings: Settings) -> None:
        super().__init__(name="learner", daemon=True)
        self.agent, self.position, self.changes = base, 0, 0
        self.is_learner, self.snapshot, self.skipped = False, 0, 0
        self.trouble: str | None = None
        self._log, self._settings = log, settings
        self._snapshots = Snapshots(settings.folder / log.name)
        # What an agent of this log must be.
        self._kind, self._arguments, self._observed = type(base), _fixed(base), base.observed
        self._first = Arms.of(base)
        self._me = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex}"
        self._wake, self._ending = threading.Event(), threading.Event()
        # The decision of the last reward that was learnt, the last change, and how many changes the snapshot has.
        self._last, self._change, self._snapshot_changes = NONE, NONE, 0
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
            if (found.position, found.changes) <= (self.position, self.changes):
                return
            if found.path.name in self._mangled:
                continue
            try:
                changes = self._log.changes()[: found.changes]
                last = changes[-1].id if changes else NONE
                decision = self._log.decision_at(found.position) if found.position else NONE
                if (decision, len(changes), last) != (found.decision, found.changes, found.change):
                    raise ValueError("it has learnt what is not in the log: of an older copy of the log?")
                agent = load(found.path)
                self._check(agent, found, self._first.after(changes))
            except FileNotFoundError:  # a newer one took its place
                continue
            except ValueError as error:
                self._mangled.add(found.path.name)
                _say.warning("The snapshot %s is skipped: %s", found.path, error)
                continue
            self.agent, self.position, self._last = agent, found.position, found.decision
            self.changes, self._change = found.changes, found.change
            self.snapshot, self._snapshot_changes = found.position, found.changes
            return

    def _check(self, agent: Agent, found: Snapshot, arms: Arms) -> None:
        """Refuse what is no agent of this log after so many rewards, of which it may have refused some."""
        if type(agent) is not self._kind or _fixed(agent) != self._arguments:
            raise ValueError("it is of another agent than the log.")
        if (agent.actions, frozenset(agent.retired)) != (arms.actions, arms.retired):
            raise ValueError(f"it has other actions than the log after {found.changes} changes.")
        if not 0 <= agent.observed - self._observed <= found.position:
            raise ValueError(f"it has learnt {agent.observed} rewards, and its name says {found.position}.")

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
        """Learn what is next in the log, for less time than the lease has; how many rewards and changes that were."""
        until, learnt = time.monotonic() + self._settings.lease_seconds / 3, 0
        for each in self._log.after(self.position, _TOGETHER, self.changes):
            if self._ending.is_set() or time.monotonic() > until:
                break
            if isinstance(each, Change):
                agent = copy.deepcopy(self.agent)  # others may be deciding by it
                learn(agent, each)
                self.agent, self.changes, self._change = agent, each.number, each.id
            else:
                learn(self.agent, each, self)
                self.position, self._last = each.position, each.decision
            learnt += 1
        return learnt

    def _save(self) -> None:
        if (self.position, self.changes) > (self.snapshot, self._snapshot_changes):
            began = time.monotonic()
            self._snapshots.write(self.agent, self.position, self._last, self.changes, self._change)
            self._saved, self.snapshot, self._snapshot_changes = time.monotonic(), self.position, self.changes
            self._pause = max(self._settings.snapshot_seconds, (self._saved - began) / _SHARE)

    def _complain(self, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        if said != self.trouble:
            _say.warning("The learner waits: %s", said)
        self.trouble = said


def _fixed(agent: Agent) -> dict[str, Any]:
    """The arguments of an agent that no change of its actions changes."""
    arguments = agent.described()["arguments"].items()
    return {name: value for name, value in arguments if name not in ("actions", "action_features")}


def learn(agent: Agent, each: Observation | Change, learner: Learner | None = None) -> None:
    """Let ``agent`` learn one entry of the log.

    A reward that it refuses (a context whose squares are too large for a linear model) is skipped: by every agent that
    learns this log, so that all remain the same.
    """
    if isinstance(each, Change):
        each.make(agent)
        return
    # Of the action alone: there may be more actions now than there were.
    options = {} if each.features is None else {"features": each.features[each.action]}
    try:
        agent.observe(each.context, each.action, each.reward, **options)
    except ValueError as error:
        _say.warning("The reward at position %d is skipped: %s", each.position, error)
        if learner is not None:
            learner.skipped += 1


def rebuilt(log: Log) -> Agent:
    """The agent that has learnt all of ``log``, from the log alone."""
    agent, position, changes = log.open(), 0, 0
    while some := log.after(position, _TOGETHER, changes):
        for each in some:
            learn(agent, each)
            changes = each.number if isinstance(each, Change) else changes
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
