import gc
import os
import shutil
from importlib import util
from pathlib import Path

import pytest

# Files of tests are in memory where there is room: to replace one on a disk takes milliseconds, thousands of times.
MEMORY, ROOM = Path("/dev/shm"), 2**30
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before any test file is imported, but not in a process that only hands the tests to others: torch takes long."""
    if session.config.getoption("numprocesses", None):
        return
    import torch

    # Without a GPU the Triton kernels are tested under Triton's interpreter, and that is chosen when triton is
    # imported. This is done here, because other libraries that tests import would do it first.
    if util.find_spec("triton") and not torch.cuda.is_available():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            import triton.language  # noqa: F401


def pytest_collection_finish() -> None:
    """What is imported by now stays: whoever collects garbage, as measuring memory does, need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    # Not torch.manual_seed: without a GPU, it notes for one that may come whoever called it, which takes 2 ms.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
