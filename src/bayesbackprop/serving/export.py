"""The log as a table: what ``bandits.Log.read_csv`` reads, and whatever reads CSV."""

import csv
from collections.abc import Container
from pathlib import Path
from typing import Any

from sqlalchemy.engine import RowMapping

from bayesbackprop._files import written_atomically
from bayesbackprop.serving.arms import Arms
from bayesbackprop.serving.log import Log


def export(log: Log, path: Path, *, waiting: bool = False) -> int:
    """Write all decisions that have a reward, and those that have none if ``waiting``; how many there were.

    The columns: ``id``, ``time`` in seconds since 1970, ``context_0`` and so on, ``action``, ``reward``,
    ``propensity``, and of every action ``probability_0`` and so on, and ``allowed_0`` and so on: 0 for those that the
    mask forbade, that were retired or not there yet. If requests had features of the actions, ``feature_0_1`` and so on
    for the second number of the first action: empty for requests without, and 0 for actions that were not there yet.
    """
    agent, count = log.open(), 0
    first, changes = Arms.of(agent), log.changes()
    actions = first.after(changes).actions
    contexts = [f"context_{number}" for number in range(agent.features)]
    arms = [[f"{name}_{action}" for action in range(actions)] for name in ("probability", "allowed")]
    numbers = log.described()
    features = [f"feature_{action}_{number}" for action in range(actions) for number in range(numbers)]
    header = ["id", "time", *contexts, "action", "reward", "propensity", *arms[0], *arms[1], *features]
    with written_atomically(path) as stream:
        stream.write(_line(header))
        for row in log.rows(waiting=waiting):
            before = [change for change in changes if change.decided < row["number"]]
            cells = _cells(row, actions, first.after(before).retired)
            stream.write(_line([*cells, *_features(row["features"], actions, numbers)]))
            count += 1
    return count


def _cells(row: RowMapping, actions: int, retired: Container[int]) -> list[Any]:
    """Of a decision; actions that were not there yet had the probability 0 and were not allowed."""
    there = len(row["probabilities"])
    probabilities = [*row["probabilities"], *[0.0] * (actions - there)]
    mask = [True] * there if row["mask"] is None else row["mask"]
    allowed = [
        int(action < min(there, len(mask)) and mask[action] and action not in retired) for action in range(actions)
    ]
    reward = "" if row["reward"] is None else row["reward"]
    known = [row["action"], reward, row["propensity"], *probabilities]
    return [row["id"], row["time"], *row["context"], *known, *allowed]


def _features(given: list[list[float]] | None, actions: int, numbers: int) -> list[Any]:
    """Those of a request, for all actions."""
    if given is None:
        return [""] * (actions * numbers)
    return [each for row in given[:actions] for each in row] + [0.0] * (actions - len(given)) * numbers


class _Text:
    """Keeps the line that a writer of CSV makes."""

    def write(self, line: str) -> None:
        self.line = line


def _line(cells: list[Any]) -> bytes:
    text = _Text()
    csv.writer(text).writerow(cells)
    return text.line.encode()
