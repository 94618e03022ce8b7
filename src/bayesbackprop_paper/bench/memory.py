"""The peak memory of training steps, and of whole processes."""

import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bayesbackprop_paper.timing import CPU

# Several, so that what a step keeps for the next one counts too.
_STEPS = 3
_MARK = "bayesbackprop steps"

# What Linux says of this process in kB: the memory that it holds, and the most that it held since the mark was taken
# back, which is done by writing 5 to another file.
_STATUS, _RESIDENT, _HIGHEST = Path("/proc/self/status"), "VmRSS", "VmHWM"
_TAKE_BACK = Path("/proc/self/clear_refs"), "5"


def peak_memory(build: Callable[[], Callable[[], object]], device: torch.device = CPU) -> int:
    """The most bytes of tensors that exist at a time during the steps that ``build`` returns.

    Counted is everything allocated since before ``build`` began, so parameters, gradients and buffers are in it, and so
    is what is kept from step to step. The source is the record of torch's own allocator of the device, which sees every
    tensor, whoever fills it.
    """
    return _peak_on_gpu(build, device) if device.type == "cuda" else _peak_on_cpu(build)


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


def resident_memory() -> int | None:
    """The bytes that this process holds, where Linux says it."""
    return _read_status(_RESIDENT)


def process_peak(run: Callable[[], object]) -> int | None:
    """The most bytes that this process holds at a time during ``run``, whoever allocates them, where Linux says it."""
    path, mark = _TAKE_BACK
    if path.exists():
        path.write_text(mark)
    run()
    return _read_status(_HIGHEST)


def _read_status(field: str) -> int | None:
    if not _STATUS.exists():
        return None
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(fields[field].removesuffix("kB")) * 1024
