"""One process at a time works in a folder."""

import threading
from pathlib import Path

import pytest

from bayesbackprop_paper.experiments.records import locked

pytestmark = pytest.mark.identities


def test_one_at_a_time_in_a_folder(tmp_path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with locked(tmp_path / "new"):
            entered.set()

    other = threading.Thread(target=enter)
    with locked(tmp_path / "new"):
        other.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    other.join()
