"""Snapshots of the agent: how far it is in the log is part of a file's name, so that both appear together."""

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bayesbackprop.bandits import Agent

# How many are kept: the newest may be mangled, and others may be reading the one before.
_KEPT = 3

_NAME = re.compile(r"(\d{12})-([0-9a-f]{32})(?:-(\d{6})-([0-9a-f]{32}))?\.agent")

# The decision of the last reward, and the last change, where there was none yet.
NONE = "0" * 32


class Snapshot(NamedTuple):
    """The file of an agent that has learnt so many rewards and changes of its actions, with the last of each."""

    position: int
    changes: int
    decision: str
    change: str
    path: Path


class Snapshots:
    """A folder of snapshots of one log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def found(self) -> list[Snapshot]:
        """All of them, the newest first."""
        if not self.folder.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        known = [
            Snapshot(int(match[1]), int(match[3] or 0), match[2], match[4] or NONE, path)
            for match, path in matches
            if match
        ]
        return sorted(known, reverse=True)

    def write(self, agent: Agent, position: int, decision: str, changes: int, change: str) -> None:
        """Write a snapshot, atomically, and remove old ones."""
        self.folder.mkdir(parents=True, exist_ok=True)
        changed = f"-{changes:06d}-{change}" if changes else ""
        agent.save(self.folder / f"{position:012d}-{decision}{changed}.agent")
        for old in self.found()[_KEPT:]:
            with suppress(OSError):  # another worker did it
                old.path.unlink()
