"""What an experiment leaves in ``results/``: rows as CSV, and beside a figure the line that says what it shows."""

import csv
import io
import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from bayesbackprop._files import write_atomically
from bayesbackprop._version import __version__

_Row = TypeVar("_Row")

_CONVERT: dict[type, type] = {int: int, float: float, str: str}


def write_rows(path: Path, kind: type[Any], rows: Iterable[Any]) -> None:
    """Write dataclasses of one ``kind``, a column for each field, numbers to six digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(kind)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: as_written(value) for name, value in asdict(row).items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode())


def as_written(value: Any) -> Any:
    """A value as a table has it: numbers to six digits."""
    return f"{value:.6g}" if isinstance(value, float) else value


def read_rows(path: Path, kind: type[_Row]) -> list[_Row]:
    """What :func:`write_rows` wrote, none if there is no file. A number that has no column yet is NaN."""
    if not path.exists():
        return []
    convert = {field.name: _CONVERT[field.type] for field in fields(kind)}  # type: ignore[index,arg-type]
    with path.open(newline="") as file:
        return [
            kind(**{name: of(row.get(name, "nan")) for name, of in convert.items()}) for row in csv.DictReader(file)
        ]


def remember(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Add an entry to a file of them, or write it anew."""
    entries = json.loads(path.read_text()) if path.exists() else {}
    entries[name] = entry
    write_atomically(path, json.dumps(entries, indent=1, sort_keys=True).encode())


# Options that say where files are, which changes nothing in them.
_PLACES = ("--runs", "--results")


def command() -> str:
    """The command that runs, as anyone may repeat it: without the folders that this one has."""
    words = ["bbb"]
    for before, word in pairwise(["", *sys.argv[1:]]):
        if before not in _PLACES and word.partition("=")[0] not in _PLACES:
            words.append(word)
    return shlex.join(words)


def arithmetic() -> dict[str, Any]:
    """What decides how sums are rounded. Training is chaotic: where it is another, the figures are others as well."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"threads": torch.get_num_threads(), "torch": str(torch.__version__), "instructions": capability}


def write_line(path: Path, line: str, command: str, curves: Iterable[str] = ()) -> None:
    """Write what a figure shows, and the command that drew it, or these curves of it: others keep theirs."""
    about: dict[str, Any] = {"line": line, "command": command, "version": __version__}
    if curves:
        known = json.loads(path.read_text()).get("commands", {}) if path.exists() else {}
        about["commands"] = {**known, **dict.fromkeys(curves, command)}
    write_atomically(path, json.dumps(about, indent=1).encode())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of the same block for the same folder. A process that dies releases the lock."""
    import fcntl  # not on every system

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process that is alive holds the lock of :func:`locked`."""
    import fcntl

    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
