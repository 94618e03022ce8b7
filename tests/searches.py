"""The small data set as a search sees it, and the trials of a study. Tests without Optuna are skipped."""

from pathlib import Path
from typing import Any

import pytest

import digits
import disks
from bayesbackprop_paper.data import Images

optuna = pytest.importorskip("optuna")
disks.do_not_wait_for_databases()


def images() -> Images:
    """The small data set, whose test set cannot be looked at."""
    return digits.images()._replace(test=None)  # type: ignore[arg-type]


def trials_in(folder: Path, name: str = "study") -> list[Any]:
    address = f"sqlite:///{folder / 'search.db'}"
    storage = optuna.storages.RDBStorage(address, skip_compatibility_check=True, skip_table_creation=True)
    found: list[Any] = optuna.load_study(study_name=name, storage=storage).trials
    return found
