"""Files are written whole or not at all; tensors and metadata come back."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bayesbackprop._files import read_checkpoint, write_atomically, write_checkpoint

pytestmark = pytest.mark.identities


def _no_space(*_: Any) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"before")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, _no_space)
        with pytest.raises(OSError, match="no space"):
            write_atomically(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"after")
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events, fsync, replace_file = tmp_path / "file", [], os.fsync, os.replace

    def synced(number: int) -> None:
        events.append(("fsync", os.fstat(number).st_size, path.exists()))
        fsync(number)

    def replaced(source: Path, target: Path) -> None:
        events.append(("replace", source.stat().st_size, path.exists()))
        assert source.parent == target.parent
        replace_file(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_atomically(path, b"12345")
    assert events == [("fsync", 5, False), ("replace", 5, False)]


def test_tensors_and_metadata_come_back(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4).T,
        "b": torch.tensor(7),
        "c.d": torch.randn(2, dtype=torch.float64, requires_grad=True),
    }
    metadata = {"numbers": [0.1, 1e-300], "text": "é", "nested": {"none": None}}
    write_checkpoint(tmp_path / "file", tensors, metadata)
    found, about = read_checkpoint(tmp_path / "file")
    assert about == metadata
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        read_checkpoint(tmp_path / "nothing")
