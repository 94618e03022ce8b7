"""The log as a table: what ``bandits.Log.read_csv`` reads, and whatever reads CSV."""

import csv
from pathlib import Path
from typing import Any

from sqlalchemy.engine import RowMapping

from bayesbackprop._files import written_atomically
from bayesbackprop.serving.log import Log


def export(log: Log, path: Path, *, waiting: bool = False) -> int:
    """Write all decisions that have a reward, and those that have none if ``waiting``; how many there were.

    The columns: ``id``, ``time`` in seconds since 1970, ``context_0`` and so on, ``action``, ``reward``,
    ``propensity``, and of every action ``probability_0`` and so on, and ``allowed_0`` and so on.
    """
    agent, count = log.open(), 0
    contexts = [f"context_{number}" for number in range(agent.features)]
    arms = [[f"{name}_{action}" for action in range(agent.actions)] for name in ("probability", "allowed")]
    header = ["id", "time", *contexts, "action", "reward", "propensity", *arms[0], *arms[1]]
    with written_atomically(path) as stream:
        stream.write(_line(header))
        for row in log.rows(waiting=waiting):
            stream.write(_line(_cells(row, agent.actions)))
            count += 1
    return count


def _cells(row: RowMapping, actions: int) -> list[Any]:
    allowed = [int(each) for each in row["mask"] or [True] * actions]
    reward = "" if row["reward"] is None else row["reward"]
    known = [row["action"], reward, row["propensity"], *row["probabilities"]]
    return [row["id"], row["time"], *row["context"], *known, *allowed]


class _Text:
    """Keeps the line that a writer of CSV makes."""

    def write(self, line: str) -> None:
        self.line = line


def _line(cells: list[Any]) -> bytes:
    text = _Text()
    csv.writer(text).writerow(cells)
    return text.line.encode()
