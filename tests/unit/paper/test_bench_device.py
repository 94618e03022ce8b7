"""``bbb bench --device``: what is measured on a GPU is waited for, and a device that is not there is refused."""

import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from bayesbackprop._cli import app
from bayesbackprop_paper import timing
from bayesbackprop_paper.bench import memory
from bayesbackprop_paper.bench.contenders import fully_connected

pytestmark = pytest.mark.identities

TINY = {
    "step": ["--units", "5"],
    "small": [],
    "predict": ["--units", "5", "--draws", "3", "--images", "2"],
}
CUDA = torch.device("cuda")
MEASURED = {"milliseconds", "quartiles", "ratio_sgd", "ratio_dropout", "ratio_passes", "ratio_bayesbackprop"}


def tiny(what: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", what, *TINY[what], "--rounds", "2", "--threads", "1", *arguments])


def written(path: Path, what: str, *arguments: str) -> list[dict[str, Any]]:
    result = tiny(what, *arguments, "--json", str(path))
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]


@pytest.mark.parametrize("what", TINY)
def test_the_cpu_is_what_is_measured_without_the_option(what: str, tmp_path: Path) -> None:
    before = written(tmp_path / "before.json", what)
    after = written(tmp_path / "after.json", what, "--device", "cpu")
    assert without_times(after) == without_times(before)
    assert "--device" not in before[0]["command"]


@pytest.mark.parametrize("what", TINY)
@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("cuda", 0, "finds no device cuda here"),
        ("cuda:1", 1, "finds no device cuda:1 here"),
        ("cuda:first", 1, "must be cpu, cuda or cuda:N"),
        ("tpu", 1, "must be cpu, cuda or cuda:N"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    what: str, device: str, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    result = tiny(what, "--device", device)
    assert result.exit_code != 0
    assert message in plain(result.stderr)


def test_other_libraries_are_measured_on_the_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = tiny("step", "--peers", "--device", "cuda")
    assert result.exit_code != 0
    assert "--peers and --device cuda exclude each other" in plain(result.stderr)


def plain(text: str) -> str:
    """A message without the frame that is drawn around it."""
    return " ".join(word for word in text.split() if word != "│")


def test_the_clock_runs_from_idle_to_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def clock() -> int:
        events.append("clock")
        return len(events)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(f"wait for {device}"))
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    timing.interleaved({"a": lambda: events.append("run")}, 2, 0, 0, lambda rounds, _: rounds, "", CUDA)
    assert events == ["wait for cuda", "clock", "run", "wait for cuda", "clock"] * 2


class Allocator:
    """Counts bytes as that of a GPU does."""

    def __init__(self) -> None:
        self.held = self.peak = 0

    def take(self, size: int, owner: object) -> None:
        """Hold ``size`` bytes for as long as ``owner`` lives."""
        self._add(size)
        weakref.finalize(owner, self._add, -size)

    def _add(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def reset(self, _: torch.device) -> None:
        self.peak = self.held


def test_memory_of_a_gpu_is_the_peak_of_the_steps_above_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, libraries = Allocator(), torch.empty(0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: gpu.held)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", gpu.reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: gpu.peak)

    def build() -> Callable[[], None]:
        gpu.take(90_000, torch.empty(0))  # gone before the first step
        model = torch.empty(0)
        gpu.take(300, model)

        def step() -> None:
            if gpu.held < 1000:
                gpu.take(1000, libraries)  # in the first step of the process, and for good
            gpu.take(50, model.clone())  # gone at once

        return step

    assert memory.peak_memory(build, CUDA) == 350


def test_data_and_network_of_a_task_are_on_its_device() -> None:
    task = fully_connected((4, 3, 2), torch.device("meta"))
    tensors = [*task.data(5), *task.net().parameters()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("what", TINY)
def test_a_gpu_is_measured(what: str, tmp_path: Path) -> None:
    for row in written(tmp_path / "rows.json", what, "--device", "cuda"):
        assert row["milliseconds"] > 0
        assert row["command"].endswith("--device cuda")
        assert torch.cuda.get_device_name() in row["machine"]
