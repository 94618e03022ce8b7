"""Comparisons with what is known or with what others reach: figures of many runs, each kept once it is there.

An experiment is a list of :class:`Run` and a function that measures one. :func:`collect` measures those that its file
does not have yet, so that a stopped one goes on, and :func:`table` shows them.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from bayesbackprop._errors import Described, invalid
from bayesbackprop._files import write_atomically
from bayesbackprop._version import __version__
from bayesbackprop_paper.experiments.records import locked

Figures = Mapping[str, float]


class Run(NamedTuple):
    """One method on one task, with one seed."""

    task: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Under which its figures are kept."""
        return f"{self.task}/{self.method}/{self.seed}"


def collect(path: Path, runs: Iterable[Run], measure: Callable[[Run], Figures], command: str) -> dict[str, Any]:
    """The entries of the file at ``path`` by name, with those of ``runs`` that it did not have, measured now."""
    for run in runs:
        if run.name in entries(path):
            continue
        began = time.perf_counter()
        figures = dict(measure(run))
        seconds = round(time.perf_counter() - began, 2)
        about = {"seconds": seconds, "command": command, "version": __version__}
        with locked(path.parent):
            known = entries(path) | {run.name: {**run._asdict(), "figures": figures, **about}}
            write_atomically(path, json.dumps(known, indent=1).encode())
    return entries(path)


def entries(path: Path) -> dict[str, Any]:
    """What :func:`collect` wrote, nothing if there is no file. A file that it did not write is refused."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise invalid(
            "path", "entries", "a file of JSON that `bbb truth` wrote", Described(f"{path}: {error}")
        ) from None
    if not isinstance(found, dict):
        raise invalid("path", "entries", "a file with an entry for each run", Described(str(path)))
    for name, entry in found.items():
        if wrong := _wrong(entry):
            constraint = "a file whose entries have " + ", ".join(_FIELDS)
            raise invalid("path", "entries", constraint, Described(f"{path}, whose entry {name!r} has no such {wrong}"))
    return found


# What an entry has, and of which type each is.
_FIELDS: Mapping[str, Any] = {
    "task": str,
    "method": str,
    "seed": int,
    "figures": dict,
    "seconds": int | float,
    "command": str,
    "version": str,
}


def _wrong(entry: Any) -> str:
    """Which field of an entry is missing or of another type; empty if none is."""
    if not isinstance(entry, dict):
        return "fields"
    for name, kind in _FIELDS.items():
        if not isinstance(entry.get(name), kind):
            return name
    return "" if all(isinstance(value, int | float) for value in entry["figures"].values()) else "figures"


def table(found: Mapping[str, Any]) -> str:
    """A table in Markdown for each task: of each method the mean of each figure over seeds, and its least and most."""
    parts: list[str] = []
    for task in dict.fromkeys(entry["task"] for entry in found.values()):
        those = [entry for entry in found.values() if entry["task"] == task]
        columns = list(dict.fromkeys(name for entry in those for name in entry["figures"]))
        lines = [f"| {task} | seeds | {' | '.join(columns)} | seconds |", "|---" * (len(columns) + 3) + "|"]
        for method in dict.fromkeys(entry["method"] for entry in those):
            own = [entry for entry in those if entry["method"] == method]
            values = [[entry["figures"][name] for entry in own if name in entry["figures"]] for name in columns]
            seconds = mean(entry["seconds"] for entry in own)
            cells = [method, str(len(own)), *map(_shown, values), f"{seconds:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def write_table(path: Path, found: Mapping[str, Any]) -> str:
    """Write :func:`table` beside the file of the entries; it is given back."""
    text = table(found)
    write_atomically(path.with_suffix(".md"), text.encode())
    return text


def _shown(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
    return f"{mean(values):.4g}{spread}"
