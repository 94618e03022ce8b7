"""Processes that are killed in the middle of a run: whoever starts again ends where the whole run ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bandit_worlds
from bandit_worlds import KINDS, LAST, assert_goes_on, done_in

pytestmark = pytest.mark.equivalence

TIMEOUT = 300


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, one of each kind, whose process was killed."""
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, bandit_worlds.__file__, str(folder)], env=environment, check=True, timeout=TIMEOUT)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_goes_on_bit_for_bit(kind: str, killed: Path, tmp_path: Path) -> None:
    ends = json.loads((killed / "ends.json").read_text())
    assert ends[kind] == -signal.SIGKILL
    assert done_in(killed / kind) == (LAST, LAST, LAST, [LAST] * 2)
    assert_goes_on(kind, killed / kind, tmp_path / "whole")
