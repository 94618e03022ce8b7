"""The writer: a thread that decides and commits, for all requests that wait, in one transaction.

A commit waits for the disk. While it does, requests gather, and the next commit is for all of them: the more clients,
the more share it.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy.exc import SQLAlchemyError

from bayesbackprop.serving.access import RefusedError, malformed
from bayesbackprop.serving.deciding import asked_again, decide
from bayesbackprop.serving.learning import Learner
from bayesbackprop.serving.log import ArmsChangedError, Conflict, Entry, Full, Log
from bayesbackprop.serving.requests import DecisionRequest, RewardRequest, RewardStatus
from bayesbackprop.serving.settings import Limits

# Decisions and rewards of one transaction, unless a single request has more.
_TOGETHER = 256

_say = logging.getLogger("bayesbackprop.serving")


@dataclass(eq=False)
class _Job:
    """A request that waits, with what is to be decided or the rewards to be written."""

    future: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop
    requests: Sequence[DecisionRequest] = ()
    rewards: Sequence[RewardRequest] = ()
    entries: Sequence[Entry] = ()
    result: Any = None

    def settle(self) -> None:
        """Answer, in the thread of the event loop; whoever asked may have gone."""
        if self.future.done():
            return
        if isinstance(self.result, Exception):
            self.future.set_exception(self.result)
        else:
            self.future.set_result(self.result)


class Writer(threading.Thread):
    """Takes requests from the event loop."""

    def __init__(self, log: Log, learner: Learner, limits: Limits) -> None:
        super().__init__(name="writer", daemon=True)
        self._log, self._learner, self._limits = log, learner, limits
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended = False
        self.arms = log.arms()  # those that decisions were last made with
        # Two workers, or one that was restarted, must not draw the same actions.
        self._random = np.random.default_rng()

    async def decide(self, requests: Sequence[DecisionRequest]) -> list[Entry]:
        """The decisions of one request, when they are in the log."""
        found: list[Entry] = await self._submit(requests=requests)
        return found

    async def reward(self, rewards: Sequence[RewardRequest]) -> list[RewardStatus]:
        """What became of the rewards of one request, when that is in the log."""
        found: list[RewardStatus] = await self._submit(rewards=rewards)
        return found

    async def _submit(self, **what: Any) -> Any:
        if self._queue.qsize() >= self._limits.queue or not self.is_alive():
            raise RefusedError(503, "overloaded", "Too many requests wait to be written. Try again.")
        loop = asyncio.get_running_loop()
        job = _Job(loop.create_future(), loop, **what)
        self._queue.put(job)
        return await job.future

    def end(self) -> None:
        """Write what waits, and end."""
        self._queue.put(None)
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Write until :meth:`end`."""
        while jobs := self._gathered():
            try:
                self._write(jobs)
            except SQLAlchemyError as error:  # nothing was written, or nobody can tell: clients ask again
                _refuse(jobs, unwritable(error))
            except Exception:  # a fault of ours: the others need not wait for ever
                _say.exception("The writer failed.")
                _refuse(jobs, RefusedError(500, "failed", "The service failed; its own log of errors says how."))
            for loop in {job.loop for job in jobs}:
                loop.call_soon_threadsafe(_settle, [job for job in jobs if job.loop is loop])

    def _gathered(self) -> list[_Job]:
        """The jobs that wait, at least one; none at the end."""
        jobs: list[_Job] = []
        size = 0
        while not self._ended and size < _TOGETHER and not (jobs and self._queue.empty()):
            job = self._queue.get()
            if job is None:
                self._ended = True
            else:
                jobs.append(job)
                size += len(job.requests) + len(job.rewards)
        return jobs

    def _write(self, jobs: Sequence[_Job]) -> None:
        while True:
            try:
                self._try_to_write(jobs)
                return
            except ArmsChangedError:
                self._has_changed()

    def _try_to_write(self, jobs: Sequence[_Job]) -> None:
        self._decide(jobs)
        deciding = [job for job in jobs if job.entries]
        rewarding = [job for job in jobs if job.rewards]
        rewards = [(each.id, each.reward) for job in rewarding for each in job.rewards]
        if not deciding and not rewarding:
            return
        limits = self._limits
        groups = [job.entries for job in deciding]
        answers, statuses = self._log.write(
            groups, rewards, most=limits.waiting, expire=limits.expire, changes=self.arms.changes
        )
        for job, answer in zip(deciding, answers, strict=True):
            job.result = _refusal(answer) if isinstance(answer, Full | Conflict) else answer
        first = 0
        for job in rewarding:
            job.result = statuses[first : first + len(job.rewards)]
            first += len(job.rewards)
        if "accepted" in statuses:
            self._learner.wake()

    def _has_changed(self) -> bool:
        """Whether there are other actions than decisions were last made with; now these are known."""
        before, self.arms = self.arms, self._log.arms()
        return self.arms != before

    def _decide(self, jobs: Sequence[_Job]) -> None:
        """Let the agent choose for all requests together; if it refuses, one by one, to find out whose it was."""
        deciding = [job for job in jobs if job.requests]
        if not deciding:
            return
        agent = self._learner.agent
        for job in deciding:
            job.entries, job.result = (), None
        try:
            requests = [each for job in deciding for each in job.requests]
            # What was decided before is not judged again: there may be other actions now.
            known = self._log.decided({each.request for each in requests if each.request is not None})
            new = iter(decide(agent, [each for each in requests if each.request not in known], self._random, self.arms))
            for job in deciding:
                job.entries = [
                    asked_again(known[each.request], each) if each.request in known else next(new)
                    for each in job.requests
                ]
        except (ValueError, RefusedError) as error:
            if len(deciding) > 1:
                for job in deciding:
                    self._decide([job])
            elif self._has_changed():
                self._decide(deciding)
            elif isinstance(error, RefusedError):
                deciding[0].result = error
            else:
                deciding[0].result = malformed(error, agent, "/decide")


def unwritable(error: Exception) -> RefusedError:
    """The refusal where the database failed."""
    _say.warning("The log cannot be written: %s", error)
    return RefusedError(503, "log_unavailable", "The log cannot be written now. Try the same again.")


def _refuse(jobs: Sequence[_Job], refusal: RefusedError) -> None:
    for job in jobs:
        job.result = job.result or refusal


def _settle(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.settle()


def _refusal(why: Full | Conflict) -> RefusedError:
    if isinstance(why, Full):
        message = f"{why.waiting:,} decisions wait for their reward, as many as may. Send rewards, or let them expire."
        return RefusedError(429, "too_many_waiting", message)
    differs = " and ".join(why.differs)
    if why.is_in_batch:
        message = f"Two entries of the batch are called {why.request!r}, and differ in their {differs}."
    else:
        message = f"The request {why.request!r} was decided before, with another {differs}."
    return RefusedError(409, "conflict", message)
