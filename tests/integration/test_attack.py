"""`make attack` itself, and a short version of the parts that have no tests elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import full_disk
import model_threads
from attack import BAD, OUTCOMES, Attempt, harness
from processes import run_apart
from repository import ROOT

pytestmark = pytest.mark.identities

PARTS = {
    "wrong": "def run(seed, seconds):\n    yield from [('a', 'equal'), ('b', 'accepted wrong', f'seed {seed}')]",
    "crash": "import os\ndef run(seed, seconds):\n    yield 'a', 'equal'\n    os.abort()",
    "error": "def run(seed, seconds):\n    yield 'a', 'refused clearly'\n    raise KeyError('gone')",
    "hang": "import time\ndef run(seed, seconds):\n    yield 'a', 'equal'\n    time.sleep(1000)",
    "hungry": "def run(seed, seconds):\n    bytearray(2**32)\n    yield 'a', 'equal'",
    "absent": "def run(seed, seconds):\n    import no_such_module\n    yield 'a', 'equal'",
}


def attacked(part: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> harness.Report:
    (folder / f"{part}.py").write_text(PARTS[part])
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(harness, "DEATHS", 2)
    return harness.run("part", part, seed=7, seconds=1.0, grace=3.0, megabytes=1024)


def test_what_was_wrong_is_counted_with_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = attacked("wrong", tmp_path, monkeypatch)
    assert report.counts == {"a": {"equal": 1}, "b": {"accepted wrong": 1}}
    assert report.bad == {"b: accepted wrong (seed 7): seed 7": 1}
    head, *_, last = harness.table({"part": report}).splitlines()
    assert head.split() == ["what", "tried", *" ".join(OUTCOMES).split()]
    assert last.split() == ["all", "2", "0", "1", "1", "0", "0"]


@pytest.mark.parametrize(("part", "end"), [("crash", "crashed"), ("error", "crashed"), ("hungry", "crashed")])
def test_a_child_that_dies_is_counted_and_another_follows(
    part: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = attacked(part, tmp_path, monkeypatch)
    assert report.counts["part"] == {end: 2}
    assert [name.split(": exit")[0] for name in report.bad] == [f"part: {end} (seed {seed})" for seed in (7, 8)]
    assert ("MemoryError" in str(report.bad)) == (part == "hungry")
    assert report.counts.get("a", {}).keys() <= {"equal", "refused clearly"}


def test_a_child_that_hangs_is_ended_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = attacked("hang", tmp_path, monkeypatch)
    assert report.counts == {"a": {"equal": 1}, "part": {"hung": 1}}


def test_a_part_whose_module_is_missing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = attacked("absent", tmp_path, monkeypatch)
    assert "not available: No module named 'no_such_module'" in harness.table({"part": report})
    assert not report.bad


def test_an_unknown_part_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attack", "nothing"], cwd=ROOT / "tests", capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no such part: nothing" in done.stderr


# --- short versions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", model_threads.cases(), ids=lambda case: f"{case.name}, {case.estimator}")
def test_a_model_that_is_trained_is_read_as_its_means(case: model_threads.Case) -> None:
    """Whatever another thread draws meanwhile."""
    said = [*model_threads.attempt(case, calls=20, seed=1)]
    assert len(said) >= 20
    assert [each for each in said if each.outcome != "equal"] == []


def test_a_full_disk_loses_nothing() -> None:
    """In a process of its own, since no file may grow there."""
    found = [Attempt(*json.loads(line)) for line in run_apart(full_disk.main, timeout=300).splitlines()]
    assert list(dict.fromkeys(attempt.what for attempt in found)) == [*full_disk.writers()]
    assert [attempt for attempt in found if attempt.outcome in BAD] == []
