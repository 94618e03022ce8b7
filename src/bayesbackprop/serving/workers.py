"""Servers that say when they answer: one in this process, or several processes on one socket and who watches them.

uvicorn's own supervisor takes a worker for dead that does not answer within seconds. On a busy machine it takes longer
to import torch, and workers would be replaced for ever before one had started. Here a worker is replaced when its
process has ended, and not before.
"""

import logging
import multiprocessing
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import uvicorn

from bayesbackprop._signals import interrupt_deferred

# Makes the application of a worker.
_APPLICATION = "bayesbackprop.serving.app:from_environment"
# Seconds between two looks at whether a signal came.
_TICK = 0.2

_processes = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork

_say = logging.getLogger("bayesbackprop.serving")


class Server(uvicorn.Server):
    """A server that calls ``ready`` when it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._ready()


class _Worker:
    """A process that answers on a socket."""

    def __init__(self, listening: socket.socket, options: dict[str, Any]) -> None:
        self.told, tells = _processes.Pipe(duplex=False)
        self.process = _processes.Process(target=_work, args=(listening, options, tells))
        self.process.start()
        tells.close()  # its own end is the only one then
        self.started, self.answers = time.monotonic(), False

    def listen(self) -> None:
        """Take in whether it answers by now."""
        if not self.answers and self.told.poll():
            with suppress(EOFError):  # it has ended
                self.answers = self.told.recv()

    def why_ended(self) -> str:
        """What its process ended with."""
        code = self.process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"The worker {self.process.pid} {how} after {time.monotonic() - self.started:.0f} s"


def run_workers(count: int, options: dict[str, Any], announce: Callable[[], None]) -> None:
    """Answer with so many processes until Ctrl-C or SIGTERM; one that ends is replaced, with a message.

    Args:
        count: How many.
        options: Of uvicorn. The settings of the service are in the environment.
        announce: Called when the first of them answers.
    """
    with uvicorn.Config(_APPLICATION, **options).bind_socket() as listening, interrupt_deferred() as interrupted:
        workers = [_Worker(listening, options) for _ in range(count)]
        announced = False
        try:
            while not interrupted():
                waiting = [each.told for each in workers if not each.answers]
                wait([*waiting, *(each.process.sentinel for each in workers)], _TICK)
                for number, worker in enumerate(workers):
                    worker.listen()
                    if worker.answers and not announced:
                        announced = True
                        announce()
                    if not worker.process.is_alive() and not interrupted():
                        _judge(worker, any(each.answers for each in workers))
                        workers[number] = _Worker(listening, options)
            for worker in workers:
                worker.process.terminate()
            for worker in workers:
                worker.process.join()
        finally:  # after a second signal, or where one could not start
            for worker in workers:
                worker.process.kill()


def _judge(worker: _Worker, answers: bool) -> None:
    """Say that a worker has ended; refuse to go on where it ended by itself and none ``answers``: so would the next."""
    if not answers and (worker.process.exitcode or 0) >= 0:
        raise RuntimeError(f"{worker.why_ended()} and never answered. What it said is above.")
    _say.warning("%s. Another one takes its place.", worker.why_ended())


def _work(listening: socket.socket, options: dict[str, Any], tells: Connection) -> None:
    """What a worker does, in its process."""
    with suppress(KeyboardInterrupt):  # by then all is done
        config = uvicorn.Config(_APPLICATION, factory=True, **options)
        Server(config, lambda: tells.send(True)).run([listening])
