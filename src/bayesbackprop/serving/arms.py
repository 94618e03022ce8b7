"""Actions that are added or retired while the service runs: changes, which have their place in the order of the log.

A change comes after the rewards and decisions that were in the log before it, and before all others. So whoever learns
the log makes the same change at the same place, and the log says which actions a decision could take.
"""

import uuid
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sql
from sqlalchemy.engine import Connection

from bayesbackprop.bandits import Agent
from bayesbackprop.serving import tables


class Change(NamedTuple):
    """Actions that were added, or one that was retired.

    Attributes:
        number: Of the changes: 1, 2, 3 and so on.
        id: Tells it from the change of this number in another log.
        decided: How many decisions the log had.
        position: How many rewards the log had.
        action: The first that was added, or the one that was retired.
        added: How many were added; 0 where one was retired.
        features: Numbers that describe each of the new ones.
    """

    number: int
    id: str
    decided: int
    position: int
    action: int
    added: int
    features: list[list[float]] | None

    def make(self, agent: Agent) -> None:
        """Change an agent that has learnt the rewards before."""
        if not self.added:
            agent.retire(self.action)
            return
        found = agent.add_arms(self.added, self.features)
        if found[0] != self.action:
            raise RuntimeError(f"Change {self.number} of the log adds action {self.action}; the agent has {found[0]}.")


class Arms(NamedTuple):
    """The actions after so many ``changes``: of ``first`` at the start, and those ``retired``."""

    first: int
    actions: int
    retired: frozenset[int]
    changes: int

    @staticmethod
    def of(agent: Agent) -> "Arms":
        """Those of the agent of a log before the first change."""
        return Arms(agent.actions, agent.actions, frozenset(agent.retired), 0)

    def after(self, changes: Sequence[Change]) -> "Arms":
        """After more of them."""
        gone = {change.action for change in changes if not change.added}
        added = sum(change.added for change in changes)
        return Arms(self.first, self.actions + added, self.retired | gone, self.changes + len(changes))


class NoSuchArmError(LookupError):
    """There is no such action to retire."""


class LastArmError(ValueError):
    """It is the only action that is left."""


_FIELDS = [tables.changes.c[name] for name in Change._fields]


def changes_after(connection: Connection, number: int) -> list[Change]:
    """The changes behind the one with this number."""
    query = sql.select(*_FIELDS).where(tables.changes.c.number > number).order_by(tables.changes.c.number)
    return [Change(*row) for row in connection.execute(query)]


def add(
    connection: Connection,
    place: tuple[float, int, int],
    first: Arms,
    count: int,
    features: list[list[float]] | None,
    request: str | None,
) -> tuple[Change, bool]:
    """Add actions; the change, and whether a request of this name had asked for one before.

    Args:
        connection: Of a transaction that has locked the counts.
        place: The time, and how many decisions and rewards there are.
        first: The actions before the first change.
        count: How many.
        features: Numbers that describe each.
        request: A name of the client's.
    """
    if request is not None:
        row = connection.execute(sql.select(*_FIELDS).where(tables.changes.c.request == request)).one_or_none()
        if row is not None:
            return Change(*row), True
    found = first.after(changes_after(connection, 0))
    return _append(connection, place, (found.changes + 1, found.actions, count, features), request), False


def retire(connection: Connection, place: tuple[float, int, int], first: Arms, action: int) -> None:
    """Retire an action; one that is retired stays so. The arguments are as for :func:`add`."""
    found = first.after(changes_after(connection, 0))
    if not 0 <= action < found.actions:
        raise NoSuchArmError(f"There are {found.actions} actions, from 0 on.")
    if action in found.retired:
        return
    if len(found.retired) == found.actions - 1:
        raise LastArmError("It is the last action that is left. Add another one first.")
    _append(connection, place, (found.changes + 1, action, 0, None), None)


def _append(
    connection: Connection,
    place: tuple[float, int, int],
    what: tuple[int, int, int, list[list[float]] | None],
    request: str | None,
) -> Change:
    """Write a change. From the first on, older versions of the library could not use the log."""
    (now, decided, position), (number, action, added, features) = place, what
    change = Change(number, uuid.uuid4().hex, decided, position, action, added, features)
    connection.execute(tables.changes.insert().values(**change._asdict(), time=now, request=request))
    connection.execute(tables.service.update().values(format=tables.FORMAT))
    if added:
        connection.execute(tables.arms.insert(), [tables.new_arm(action + n) for n in range(added)])
    return change
