"""Processes of their own for tests that kill them: forked from one that has imported torch, which takes seconds."""

import multiprocessing
from collections.abc import Callable
from typing import Any

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(
    [
        "torch._dynamo",  # by torch's optimisers, slowly
        "bayesbackprop._cli",
        "bayesbackprop.bandits",
        "bayesbackprop_paper.experiments.table1",
    ]
)


def run_apart(function: Callable[..., None], *arguments: Any, timeout: float) -> None:
    """Call a function of a module of tests in another process, and wait for its end."""
    process = _FORKED.Process(target=function, args=arguments)
    process.start()
    process.join(timeout)
    try:
        assert process.exitcode == 0, f"{function.__name__} ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
        process.close()
