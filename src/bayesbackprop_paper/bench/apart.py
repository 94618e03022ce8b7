"""Processes of their own, for what must begin with empty memory or runs on several ranks."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

# Where there can be, a server that has imported torch forks them: the import takes longer than most of what they do.
_SERVED = "forkserver" in multiprocessing.get_all_start_methods()
_CONTEXT: Any = multiprocessing.get_context("forkserver" if _SERVED else "spawn")
IMPORTED = ["torch._dynamo", "bayesbackprop_paper.bench.measuring"]  # the first by torch's optimisers, slowly


def call_apart(function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
    """What ``function`` returns for the arguments of each of ``calls``, each in a fresh process, at the same time."""
    if _SERVED:
        _CONTEXT.set_forkserver_preload(IMPORTED)
    with ProcessPoolExecutor(len(calls), _CONTEXT, max_tasks_per_child=1) as processes:
        futures = [processes.submit(function, *arguments) for arguments in calls]
        return [future.result() for future in futures]
