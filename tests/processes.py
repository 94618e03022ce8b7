"""Processes of their own for tests: forked from one that has imported torch, which takes seconds."""

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANKS = 2

FORKED = multiprocessing.get_context("forkserver")
IMPORTED = [
    "torch._dynamo",  # by torch's optimisers, slowly
    "bayesbackprop._cli",
    "bayesbackprop.bandits",
    "bayesbackprop_paper.cli.reproduce",
    "bayesbackprop_paper.experiments.bandit",
]
FORKED.set_forkserver_preload(IMPORTED)


def run_apart(function: Callable[..., None], *arguments: Any, timeout: float) -> str:
    """Call a function of a module of tests in another process, wait for its end, and give what it printed."""
    return run_all(partial(function, *arguments), timeout=timeout)[0]


def run_script(*command: object, timeout: float) -> str:
    """As ``python PATH ARGUMENTS``; gives what it printed."""
    return run_apart(be_script, *map(str, command), timeout=timeout)


def be_script(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def run_ranks(path: str, folder: str, timeout: float) -> None:
    """Run a script, which calls :func:`be_rank`, in as many processes as there are ranks."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("This torch was built without gloo.")
    commands = [(path, folder, str(rank), str(timeout)) for rank in range(RANKS)]
    run_all(*(partial(be_script, *command) for command in commands), timeout=timeout)


def be_rank(run: Callable[[str, int], None]) -> None:
    """Call ``run`` with the folder and the number of this rank, in the group of all."""
    _, folder, rank, timeout = sys.argv
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit, at = timedelta(seconds=float(timeout)), f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=at, rank=int(rank), world_size=RANKS, timeout=limit)
    run(folder, int(rank))
    dist.destroy_process_group()


def run_all(*calls: Callable[[], None], timeout: float) -> list[str]:
    """Make each call in a process of its own, all at the same time, and give what each printed."""
    until = time.monotonic() + timeout
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in calls]
        processes = [
            FORKED.Process(target=_print_to, args=(file.name, call)) for file, call in zip(files, calls, strict=True)
        ]
        for process in processes:
            process.start()
            stack.callback(_end, process)
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        said = [Path(file.name).read_text() for file in files]
        codes = [process.exitcode for process in processes]  # None of one that hangs, -11 after a segmentation fault
        assert codes == [0] * len(calls), f"ended with {codes}: " + "\n".join(each[-3000:] for each in said)
    return said


def _print_to(path: str, call: Callable[[], None]) -> None:
    output = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    call()


def _end(process: Any) -> None:
    process.kill()
    process.join()
    process.close()
