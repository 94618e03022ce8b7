"""What a process takes is its own time and its own memory."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from bayesbackprop_paper.bench import memory, report, size
from bayesbackprop_paper.bench.apart import call_apart
from bayesbackprop_paper.bench.measuring import Config

pytestmark = pytest.mark.identities

MEGABYTE = 2**20

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from Linux's /proc")


@on_linux
def test_the_peak_of_a_process_is_of_what_runs_and_not_of_what_was_before() -> None:
    # In a process of its own: one that has run other tests may take what those have left.
    code = f"""
import torch
from bayesbackprop_paper.bench import memory
held = memory.resident_memory()
torch.ones({100 * MEGABYTE // 4})
print(held, memory.process_peak(lambda: torch.ones({40 * MEGABYTE // 4})))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    held, peak = map(int, said.split())
    assert 38 * MEGABYTE < peak - held < 80 * MEGABYTE


def test_where_linux_does_not_say_it_there_is_no_peak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(memory, "_TAKE_BACK", (tmp_path / "clear", ""))
    ran: list[int] = []
    assert memory.process_peak(partial(ran.append, 1)) is None
    assert memory.resident_memory() is None
    assert ran == [1]
    assert list(tmp_path.iterdir()) == []


@on_linux
def test_construction_holds_the_weights_and_twice_as_many_in_ours(tmp_path: Path) -> None:
    sizes = size.Sizes((1000, 5000, 1000))
    weights = 4 * 10_006_000
    asked = [size.Asked("construction", name, sizes, 1, 0, tmp_path) for name in ("plain", "bayesbackprop")]
    plain, ours = (call_apart(size.take, [(each,)])[0] for each in asked)
    assert plain.peak is not None
    assert ours.peak is not None
    assert 1 <= plain.peak / weights < 2
    assert ours.peak / weights >= 2
    assert plain.milliseconds > 0


def test_every_phase_has_a_row_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = size.size(Config(report.this_run("size", "", threads=1, rounds=2, seed=0)), size.QUICK)
    tables = {title.partition(": ")[2]: group for title, group in report.by_table(rows)}
    assert list(tables) == ["construction", "first step", "prediction", "saving", "loading"]
    for plain, ours in tables.values():
        assert (plain.name, ours.name, ours.against) == ("plain", "bayesbackprop", "plain")
        assert ours.ratio == pytest.approx((ours.milliseconds or 0) / (plain.milliseconds or 0))
        assert (ours.megabytes is not None) == (sys.platform == "linux")
    assert list(tmp_path.iterdir()) == []
