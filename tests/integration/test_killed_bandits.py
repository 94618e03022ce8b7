"""Processes that are killed in the middle of a run: whoever starts again ends where the whole run ends."""

import json
import signal
from pathlib import Path

import pytest

from bandit_worlds import KINDS, LAST, assert_goes_on, be_killed, done_in
from processes import run_apart

pytestmark = pytest.mark.equivalence

TIMEOUT = 300


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, one of each kind, whose process was killed."""
    folder = tmp_path_factory.mktemp("killed")
    run_apart(be_killed, folder, timeout=TIMEOUT)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_goes_on_bit_for_bit(kind: str, killed: Path, tmp_path: Path) -> None:
    ends = json.loads((killed / "ends.json").read_text())
    assert ends[kind] == -signal.SIGKILL
    assert done_in(killed / kind) == (LAST, LAST, LAST, [LAST] * 2)
    assert_goes_on(kind, killed / kind, tmp_path / "whole")
