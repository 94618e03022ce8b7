"""Time, interleaved, and peak memory."""

import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# Wraps the rounds of a measurement to show how far it is: (rounds, what is measured) -> the same rounds.
Track = Callable[[Iterable[int], str], Iterable[int]]

CPU = torch.device("cpu")

# Several, so that what a step keeps for the next one counts too.
_STEPS = 3
_MARK = "bayesbackprop steps"


class Quartiles(NamedTuple):
    """The times of one contender over all rounds, in milliseconds; half of them lie between ``lower`` and ``upper``."""

    lower: float
    median: float
    upper: float


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int,
    seed: int,
    track: Track,
    title: str,
    device: torch.device = CPU,
) -> dict[str, Quartiles]:
    """The time of each of ``runs``, each once in every round, so that a busy machine slows all of them alike.

    The order changes from round to round, so that none always runs behind the same neighbour, on the caches it left.
    A GPU works behind the program's back, so the clock starts when it is idle and stops when it is idle again.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(seed).shuffle
    for number in track(range(warm_up + rounds), title):
        shuffle(order)
        for name in order:
            _wait(device)
            start = time.perf_counter_ns()
            runs[name]()
            _wait(device)
            elapsed = time.perf_counter_ns() - start
            if number >= warm_up:
                times[name].append(elapsed / 1e6)
    return {name: Quartiles(*statistics.quantiles(values, n=4, method="inclusive")) for name, values in times.items()}


def peak_memory(build: Callable[[], Callable[[], object]], device: torch.device = CPU) -> int:
    """The most bytes of tensors that exist at a time during the steps that ``build`` returns.

    Counted is everything allocated since before ``build`` began, so parameters, gradients and buffers are in it, and so
    is what is kept from step to step. The source is the record of torch's own allocator of the device, which sees every
    tensor, whoever fills it.
    """
    return _peak_on_gpu(build, device) if device.type == "cuda" else _peak_on_cpu(build)


def _wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_on_gpu(build: Callable[[], Callable[[], object]], device: torch.device) -> int:
    build()()  # once in vain: what the libraries of the GPU allocate for themselves is there from then on
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    step = build()
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_STEPS):
        step()
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(build: Callable[[], Callable[[], object]]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr when it starts and stops
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step = build()
        gc.collect()
        with record_function(_MARK):
            for _ in range(_STEPS):
                step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _peak(events)


def _peak(events: list[dict[str, Any]]) -> int:
    begin = next(event["ts"] for event in events if event.get("name") == _MARK)
    held: dict[int, int] = {}
    total = peak = 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            held[address] = size
            total += size
        else:
            total -= held.pop(address, 0)  # 0: it is older than this record
        if event["ts"] >= begin:
            peak = max(peak, total)
    return peak
