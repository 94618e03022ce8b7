"""The durable log: every decision and every reward, numbered in the order in which they were committed.

Whoever writes first locks the row of the counts, by ``FOR UPDATE`` in PostgreSQL and by ``BEGIN IMMEDIATE`` in SQLite.
So the numbers have no gaps, what has a higher number was committed later, and what a transaction looked up is still
true when it is committed. A sequence of the database promises none of that.
"""

import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sql
from sqlalchemy import Double, Table, func
from sqlalchemy.engine import Connection, RowMapping

from bayesbackprop._errors import Described, invalid
from bayesbackprop.bandits import Agent, load
from bayesbackprop.serving import arms, tables
from bayesbackprop.serving.arms import Arms, Change
from bayesbackprop.serving.requests import RewardStatus

# How many values a query names at a time: SQLite takes 32,766 of them.
_NAMED = 5_000
# Decisions that one sweep looks at, so that writers need not wait for long.
_SWEPT = 5_000


class Full(NamedTuple):
    """Why decisions were not written: so many wait for their reward already."""

    waiting: int


class Conflict(NamedTuple):
    """Why nothing was written: a request of this name asked for something else.

    Attributes:
        request: The name.
        differs: What is not the same.
        is_in_batch: Whether both are of one batch, and neither had been decided.
    """

    request: str
    differs: tuple[str, ...]
    is_in_batch: bool = False


class ArmsChangedError(Exception):
    """Why nothing was written: actions were added or retired since these decisions were made."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A decision to be written, or as it was written before."""

    id: str
    request: str | None
    context: list[float]
    mask: list[bool] | None
    features: list[list[float]] | None
    action: int
    propensity: float
    probabilities: list[float]
    means: list[float]
    spreads: list[float]
    explored: bool
    loss: float
    repeated: bool = False


class Observation(NamedTuple):
    """What there is to learn at a position of the log."""

    position: int
    decision: str
    context: list[float]
    features: list[list[float]] | None
    action: int
    reward: float


class Counts(NamedTuple):
    """The row of the counts."""

    decided: int
    rewarded: int
    explored: int
    swept: int
    lost: int
    regret: float

    @property
    def waiting(self) -> int:
        """Decisions that have no reward and have not expired, as far as has been swept."""
        return self.decided - self.rewarded - self.lost


class Log:
    """The log in the database at ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self.engine = tables.connect_to(url)
            self._is_sqlite = self.engine.dialect.name == "sqlite"
        except sql.exc.NoSuchModuleError:
            raise invalid("log", "Log", "a file, or a URL such as postgresql://user@host/database", url) from None
        except ModuleNotFoundError as error:
            needs = f"The log {url.partition(':')[0]} needs {error.name}"
            raise ModuleNotFoundError(f'{needs}: pip install "bayesbackprop[postgres]"') from error
        self.name = ""
        self._first = Arms(0, 0, frozenset(), 0)  # before the first change
        self._writer = self.engine.execution_options(writes=True)
        # In PostgreSQL a reader would else see what is committed between two of its queries.
        options = {} if self._is_sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reader = self.engine.execution_options(**options)

    # --- opening -----------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether the database has a log."""
        path = self.engine.url.database
        if self._is_sqlite and path and not Path(path).exists():
            return False
        with self._readable():
            return sql.inspect(self.engine).has_table(tables.service.name)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Within it, whatever is wrong with the database or was damaged in it is one error, which names the log."""
        try:
            yield
        except (sql.exc.SQLAlchemyError, zlib.error, ValueError, TypeError) as error:
            where = self.engine.url.render_as_string(hide_password=True)
            said = f"{getattr(error, 'orig', None) or error}".strip()
            raise OSError(f"The log {where} cannot be opened: {said}") from error

    def create(self, agent: Agent) -> None:
        """Make the tables for this agent; if another process does it at the same time, one of them wins."""
        kept = zlib.compress(_bytes_of(agent))
        if self._is_sqlite:
            Path(self.engine.url.database or "").parent.mkdir(parents=True, exist_ok=True)
        with self._writing() as connection:
            self._make_alone(connection)
            if sql.inspect(connection).has_table(tables.service.name):
                return
            tables.everything.create_all(connection)
            about = {"one": 1, "format": tables.FIRST_FORMAT, "name": uuid.uuid4().hex, "agent": kept}
            connection.execute(tables.service.insert().values(about))
            nothing = dict.fromkeys(Counts._fields, 0)
            connection.execute(tables.counts.insert().values(one=1, **nothing))
            connection.execute(tables.arms.insert(), [tables.new_arm(action) for action in range(agent.actions)])
            connection.execute(tables.leases.insert().values(name="learner", holder="", until=0.0))

    def _make_alone(self, connection: Connection) -> None:
        """Let nobody else make tables until the end of the transaction."""
        if not self._is_sqlite:
            connection.execute(sql.select(func.pg_advisory_xact_lock(zlib.crc32(tables.service.name.encode()))))

    def open(self) -> Agent:
        """The agent before the first reward and the first change."""
        with self._readable(), self._reading() as connection:
            about = connection.execute(sql.select(tables.service)).mappings().one()
            complete = sql.inspect(connection).has_table(tables.changes.name)
            self._locked(connection, lock=False)
            if complete:
                arms.changes_after(connection, 0)
        if about["format"] > tables.FORMAT:
            constraint = f"of format {tables.FORMAT} at most, which this version of the library knows"
            raise invalid("log", "Log", constraint, Described(f"{about['format']}"))
        if not complete:  # an older version made it
            with self._writing() as connection:
                self._make_alone(connection)
                tables.changes.create(connection, checkfirst=True)
        with self._readable():
            self.name, agent = about["name"], _agent_of(zlib.decompress(about["agent"]))
        self._first = Arms.of(agent)
        return agent

    def close(self) -> None:
        """Let go of all connections."""
        self.engine.dispose()

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(
        self,
        groups: Sequence[Sequence[Entry]],
        rewards: Sequence[tuple[str, float]],
        *,
        most: int,
        expire: float,
        changes: int = 0,
    ) -> tuple[list[list[Entry] | Full | Conflict], list[RewardStatus]]:
        """Append groups of decisions, and rewards by id of their decisions, in one transaction.

        Args:
            groups: Of each, all decisions are written or none.
            rewards: Are written after the decisions.
            most: How many decisions may wait for their reward.
            expire: Seconds after which a decision waits no longer.
            changes: How many changes of the actions decisions were made after; if there are more, nothing is written.

        Returns:
            The decisions of each group, of which those whose request had been decided before are as they were then, or
            why it was refused; and what became of each reward.
        """
        with self._writing() as connection:
            now, counts = self._locked(connection)
            if groups and arms.changes_after(connection, changes):
                raise ArmsChangedError
            answers, new, counts = self._admit(connection, groups, counts, most)
            if new:
                self._insert(connection, new, counts, now)
            statuses, accepted = self._judge(connection, rewards, now - expire, counts.swept)
            if accepted:
                connection.execute(
                    tables.rewards.insert(),
                    [
                        {"position": counts.rewarded + n, "decision": number, "reward": reward, "time": now}
                        for n, (number, _, reward) in enumerate(accepted, 1)
                    ],
                )
            if new or accepted:
                self._add_up(connection, new, accepted)
                connection.execute(
                    tables.counts.update().values(counts._replace(rewarded=counts.rewarded + len(accepted))._asdict())
                )
        return answers, statuses

    def _admit(
        self, connection: Connection, groups: Sequence[Sequence[Entry]], counts: Counts, most: int
    ) -> tuple[list[list[Entry] | Full | Conflict], list[Entry], Counts]:
        """Which groups are written: the answer of each, the decisions that are new, and the counts after them."""
        known = self._named(connection, {e.request for group in groups for e in group if e.request is not None})
        answers: list[list[Entry] | Full | Conflict] = []
        new: list[Entry] = []
        for group in groups:
            answer, fresh = _match(group, known)
            if fresh and counts.waiting + len(fresh) > most:
                answer, fresh = Full(counts.waiting), []
            answers.append(answer)
            new += fresh
            known |= {entry.request: entry for entry in fresh if entry.request is not None}
            counts = counts._replace(
                decided=counts.decided + len(fresh),
                explored=counts.explored + sum(entry.explored for entry in fresh),
                regret=counts.regret + sum(entry.loss for entry in fresh),
            )
        return answers, new, counts

    def decided(self, requests: set[str]) -> dict[str | None, Entry]:
        """The decisions that were made before by requests of these names, by name."""
        if not requests:
            return {}
        with self._reading() as connection:
            return self._named(connection, requests)

    def _named(self, connection: Connection, requests: set[str]) -> dict[str | None, Entry]:
        rows = self._find(connection, tables.decisions, tables.decisions.c.request, requests)
        return {row["request"]: _entry(row) for row in rows}

    def _insert(self, connection: Connection, new: Sequence[Entry], counts: Counts, now: float) -> None:
        first, regret = counts.decided - len(new) + 1, counts.regret - sum(entry.loss for entry in new)
        rows = []
        for number, entry in enumerate(new, first):
            regret += entry.loss
            row = {name: getattr(entry, name) for name in _WRITTEN}
            rows.append({**row, "number": number, "time": now, "regret": regret})
        connection.execute(tables.decisions.insert(), rows)

    def _judge(
        self, connection: Connection, rewards: Sequence[tuple[str, float]], expired: float, swept: int
    ) -> tuple[list[RewardStatus], list[tuple[int, int, float]]]:
        """What becomes of each reward; and of those to be written the number and the action of the decision."""
        if not rewards:
            return [], []
        c = tables.decisions.c
        rows = self._find(connection, sql.select(c.id, c.number, c.action, c.time), c.id, {id for id, _ in rewards})
        found = {row["id"]: row for row in rows}
        numbers = {row["number"] for row in found.values()}
        known = {
            row["decision"]: row["reward"]
            for row in self._find(connection, tables.rewards, tables.rewards.c.decision, numbers)
        }
        statuses: list[RewardStatus] = []
        accepted = []
        for id, reward in rewards:
            decision = found.get(id)
            if decision is None:
                statuses.append("unknown")
            elif (number := decision["number"]) in known:
                statuses.append("known" if known[number] == reward else "conflict")
            elif number <= swept or decision["time"] < expired:
                statuses.append("expired")
            else:
                statuses.append("accepted")
                known[number] = reward
                accepted.append((number, decision["action"], reward))
        return statuses, accepted

    def _add_up(self, connection: Connection, new: Sequence[Entry], accepted: Sequence[tuple[int, int, float]]) -> None:
        arms: dict[int, list[float]] = {}
        for entry in new:
            arms.setdefault(entry.action, [0, 0, 0.0, 0.0])[0] += 1
        for _, action, reward in accepted:
            arm = arms.setdefault(action, [0, 0, 0.0, 0.0])
            arm[1] += 1
            arm[2] += reward
            arm[3] += reward * reward
        rows = [
            {"which": action, **{f"more_{column.name}": more for column, more in zip(_SUMS, arm, strict=True)}}
            for action, arm in arms.items()
        ]
        connection.execute(_ADD_UP, rows)

    # --- changes of the actions --------------------------------------------------------------------------------------

    def add_arms(
        self, count: int, features: list[list[float]] | None = None, request: str | None = None
    ) -> tuple[Change | Conflict, bool]:
        """Add actions; the change, and whether a request of this name had asked for it before."""
        with self._writing() as connection:
            change, repeated = arms.add(connection, self._place(connection), self._first, count, features, request)
        if repeated and (change.added, change.features) != (count, features):
            return Conflict(request or "", ("count", "features")), True
        return change, repeated

    def retire(self, action: int) -> None:
        """Retire an action; one that is retired stays so."""
        with self._writing() as connection:
            arms.retire(connection, self._place(connection), self._first, action)

    def _place(self, connection: Connection) -> tuple[float, int, int]:
        now, counts = self._locked(connection)
        return now, counts.decided, counts.rewarded

    def arms(self) -> Arms:
        """The actions after all changes."""
        return self._first.after(self.changes())

    def changes(self) -> list[Change]:
        """All changes of the actions, in their order."""
        with self._reading() as connection:
            return arms.changes_after(connection, 0)

    def sweep(self, expire: float) -> int:
        """Count decisions that have expired without a reward, so that they wait no longer; how many it looked at."""
        c = tables.decisions.c
        with self._writing() as connection:
            now, counts = self._locked(connection)
            ahead = sql.select(c.number, c.time).where(c.number > counts.swept).order_by(c.number).limit(_SWEPT)
            last = counts.swept
            for number, moment in connection.execute(ahead):
                if moment >= now - expire:
                    break
                last = number
            if last > counts.swept:
                between = (tables.rewards.c.decision > counts.swept) & (tables.rewards.c.decision <= last)
                rewarded = connection.execute(
                    sql.select(func.count()).select_from(tables.rewards).where(between)
                ).scalar_one()
                lost = counts.lost + (last - counts.swept) - rewarded
                connection.execute(tables.counts.update().values(swept=last, lost=lost))
        return last - counts.swept

    # --- the lease of the learner ------------------------------------------------------------------------------------

    def hold(self, holder: str, seconds: float, *, instead_of: str | None = None) -> bool:
        """Take or keep the office of the learner for so long: if it is free, one's own, or that of ``instead_of``."""
        with self._writing() as connection:
            now = self._now(connection)
            c = tables.leases.c
            free = (c.until < now) | c.holder.in_([holder, *([] if instead_of is None else [instead_of])])
            change = (
                tables.leases.update().where((c.name == "learner") & free).values(holder=holder, until=now + seconds)
            )
            return bool(connection.execute(change).rowcount == 1)

    def holder(self) -> str:
        """Who has, or had last, the office of the learner."""
        with self._reading() as connection:
            return str(connection.execute(sql.select(tables.leases.c.holder)).scalar_one())

    def release(self, holder: str) -> None:
        """Give up the office."""
        with self._writing() as connection:
            connection.execute(tables.leases.update().where(tables.leases.c.holder == holder).values(until=0.0))

    # --- reading -----------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """How much there is."""
        with self._reading() as connection:
            return self._locked(connection, lock=False)[1]

    def after(self, position: int, most: int, changes: int = 0) -> list[Observation | Change]:
        """What there is to learn after ``position`` and so many ``changes`` of the actions, in the order of the log."""
        d, r = tables.decisions.c, tables.rewards.c
        query = (
            sql.select(r.position, d.id, d.context, d.features, d.action, r.reward)
            .join_from(tables.rewards, tables.decisions, r.decision == d.number)
            .where(r.position > position)
            .order_by(r.position)
            .limit(most)
        )
        with self._reading() as connection:
            found = [Observation(*row) for row in connection.execute(query)]
            changed = arms.changes_after(connection, changes)
        last = found[-1].position if found else position
        # A change at a position follows its reward.
        both: list[Observation | Change] = [*found, *(change for change in changed if change.position <= last)]
        return sorted(both, key=lambda each: (each.position, isinstance(each, Change)))

    def decision_at(self, position: int) -> str | None:
        """The id of the decision whose reward has this position: which tells one log from another."""
        query = (
            sql.select(tables.decisions.c.id)
            .join_from(tables.decisions, tables.rewards)
            .where(tables.rewards.c.position == position)
        )
        with self._reading() as connection:
            found: str | None = connection.execute(query).scalar_one_or_none()
            return found

    def watch(self, recent: int, seconds: float, points: int) -> "Watched":
        """What the state is made of: of the last ``recent`` decisions, the last seconds, and a curve of ``points``."""
        d, r = tables.decisions.c, tables.rewards.c
        with self._reading() as connection:
            now, counts = self._locked(connection, lock=False)
            arms = connection.execute(sql.select(tables.arms).order_by(tables.arms.c.action)).mappings().all()
            newest = sql.select(d.action, d.mask, d.means, d.spreads, d.explored).where(
                d.number > counts.decided - recent
            )
            rows = connection.execute(newest).mappings().all()
            step = max(1, -(-counts.decided // points))
            wanted = {*range(step, counts.decided + 1, step), *([counts.decided] if counts.decided else [])}
            curve = sql.select(d.number, d.time, d.regret)
            found = self._find(connection, curve, d.number, wanted)
            rates = []
            for column, moment, last in ((d.number, d.time, counts.decided), (r.position, r.time, counts.rewarded)):
                # Among the newest alone: nobody need be told of more than so many a second.
                among = (column > last - int(seconds * 10_000)) & (moment > now - seconds)
                rates.append(connection.execute(sql.select(func.count()).where(among)).scalar_one() / seconds)
        history = sorted((row["number"], row["time"], row["regret"]) for row in found)
        return Watched(now, counts, arms, rows, history, rates[0], rates[1])

    def described(self) -> int:
        """How many numbers describe an action in the requests of the log that have features; 0 where none has."""
        features = tables.decisions.c.features
        with self._readable(), self._reading() as connection:
            found = connection.execute(
                sql.select(features).where(features.is_not(sql.null())).limit(1)
            ).scalar_one_or_none()
        return len(found[0]) if found else 0

    def rows(self, *, waiting: bool) -> Iterator[RowMapping]:
        """All decisions with their rewards, in the order of the decisions; with those that have none if ``waiting``."""
        d = tables.decisions.c
        query = (
            sql.select(tables.decisions, tables.rewards.c.reward)
            .join_from(tables.decisions, tables.rewards, tables.rewards.c.decision == d.number, isouter=waiting)
            .order_by(d.number)
        )
        with self._readable(), self._reading() as connection:
            yield from connection.execution_options(yield_per=1000).execute(query).mappings()

    # --- what they share ---------------------------------------------------------------------------------------------

    def _writing(self) -> Any:
        """A transaction that writes, on which others wait."""
        return self._writer.begin()

    def _reading(self) -> Any:
        """A transaction that reads what was committed before it began."""
        return self._reader.begin()

    def _now(self, connection: Connection) -> float:
        """The time: of SQLite this machine's, else that of the database, which all machines share."""
        return time.time() if self._is_sqlite else float(connection.execute(_CLOCK).scalar_one())

    def _locked(self, connection: Connection, *, lock: bool = True) -> tuple[float, Counts]:
        """The time and the counts; until the end of the transaction nobody else writes."""
        counts = Counts(*connection.execute(_COUNTS.with_for_update() if lock else _COUNTS).one())
        return self._now(connection), counts

    def _find(
        self, connection: Connection, what: Table | sql.Select[Any], column: sql.ColumnElement[Any], values: set[Any]
    ) -> list[RowMapping]:
        """The rows that have one of ``values`` in a column."""
        query, wanted = what if isinstance(what, sql.Select) else sql.select(what), [*values]
        found: list[RowMapping] = []
        for first in range(0, len(wanted), _NAMED):
            some = query.where(column.in_(wanted[first : first + _NAMED]))
            found += connection.execute(some).mappings()
        return found


class Watched(NamedTuple):
    """What the state is made of."""

    time: float
    counts: Counts
    arms: Sequence[RowMapping]
    recent: Sequence[RowMapping]
    history: list[tuple[int, float, float]]
    decisions_per_second: float
    rewards_per_second: float


_CLOCK = sql.select(sql.cast(func.extract("epoch", func.clock_timestamp()), Double))
_COUNTS = sql.select(*(tables.counts.c[name] for name in Counts._fields))
_SUMS = tuple(tables.arms.c[name] for name in ("chosen", "rewarded", "total", "square"))
_ADD_UP = (
    tables.arms.update()
    .where(tables.arms.c.action == sql.bindparam("which"))
    .values({column: column + sql.bindparam(f"more_{column.name}") for column in _SUMS})
)

# What of an entry a client asks, and what has a column of its name.
_ASKED = ("context", "mask", "features")
_WRITTEN = tuple(name for name in Entry.__slots__ if name not in ("loss", "repeated"))


def _match(
    group: Sequence[Entry], known: Mapping[str | None, Entry]
) -> tuple[list[Entry] | Full | Conflict, list[Entry]]:
    """The answer to a group, given the requests that were decided before, and those of its decisions that are new."""
    answer: list[Entry] = []
    fresh: dict[str, Entry] = {}
    for entry in group:
        before = None if entry.request is None else known.get(entry.request, fresh.get(entry.request))
        if before is None:
            fresh[entry.request or entry.id] = entry
            answer.append(entry)
        elif differs := tuple(name for name in _ASKED if getattr(before, name) != getattr(entry, name)):
            return Conflict(entry.request or "", differs, entry.request not in known), []
        else:
            answer.append(_repeated(before))
    return answer, [*fresh.values()]


def _entry(row: RowMapping) -> Entry:
    return Entry(**{name: row[name] for name in _WRITTEN}, loss=0.0)


def _repeated(entry: Entry) -> Entry:
    return Entry(**{name: getattr(entry, name) for name in _WRITTEN}, loss=0.0, repeated=True)


def _bytes_of(agent: Agent) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "agent")
        agent.save(path)
        return path.read_bytes()


def _agent_of(content: bytes) -> Agent:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "agent")
        path.write_bytes(content)
        return load(path)
