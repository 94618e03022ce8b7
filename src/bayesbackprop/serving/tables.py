"""The tables of the log, and the database that they are in."""

from typing import Any

import sqlalchemy as sql
from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Integer, LargeBinary, String, Table
from sqlalchemy.engine import Connection, Engine

# Of the tables. It rises when an older version of the library could not use them: a log has the second from its first
# change of actions on.
FORMAT, FIRST_FORMAT = 2, 1
# Seconds that a writer waits for another one.
_PATIENCE = 30

everything = sql.MetaData()
# In SQLite the key of the rows is an INTEGER, which has 64 bits.
_Long = BigInteger().with_variant(Integer, "sqlite")

# What never changes: which log this is, and the agent before the first reward, as a compressed file.
service = Table(
    "bbb_service",
    everything,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("format", Integer, nullable=False),
    Column("name", String(32), nullable=False),
    Column("agent", LargeBinary, nullable=False),
)
# One row, the lock of all writers. Decisions up to ``swept`` have expired, ``lost`` of them without a reward.
counts = Table(
    "bbb_counts",
    everything,
    Column("one", Integer, primary_key=True, autoincrement=False),
    *(Column(name, _Long, nullable=False) for name in ("decided", "rewarded", "explored", "swept", "lost")),
    Column("regret", Double, nullable=False),
)
# ``regret`` is the sum of the estimated losses up to this decision.
decisions = Table(
    "bbb_decisions",
    everything,
    Column("number", _Long, primary_key=True, autoincrement=False),
    Column("id", String(32), nullable=False, unique=True),
    Column("request", String(100), unique=True),
    Column("time", Double, nullable=False),
    Column("context", sql.JSON, nullable=False),
    Column("mask", sql.JSON(none_as_null=True)),
    Column("features", sql.JSON(none_as_null=True)),
    Column("action", Integer, nullable=False),
    Column("propensity", Double, nullable=False),
    Column("probabilities", sql.JSON, nullable=False),
    Column("means", sql.JSON, nullable=False),
    Column("spreads", sql.JSON, nullable=False),
    Column("explored", Boolean, nullable=False),
    Column("regret", Double, nullable=False),
)
rewards = Table(
    "bbb_rewards",
    everything,
    Column("position", _Long, primary_key=True, autoincrement=False),
    Column("decision", _Long, ForeignKey("bbb_decisions.number"), nullable=False, unique=True),
    Column("reward", Double, nullable=False),
    Column("time", Double, nullable=False),
)
# Sums over the log by action, kept so that nobody need add them up.
arms = Table(
    "bbb_arms",
    everything,
    Column("action", Integer, primary_key=True, autoincrement=False),
    *(Column(name, _Long, nullable=False) for name in ("chosen", "rewarded")),
    *(Column(name, Double, nullable=False) for name in ("total", "square")),
)
# Actions that were added or retired, each after so many decisions and rewards; ``added`` is 0 where one was retired.
changes = Table(
    "bbb_changes",
    everything,
    Column("number", _Long, primary_key=True, autoincrement=False),
    Column("id", String(32), nullable=False, unique=True),
    Column("request", String(100), unique=True),
    Column("time", Double, nullable=False),
    *(Column(name, _Long, nullable=False) for name in ("decided", "position")),
    *(Column(name, Integer, nullable=False) for name in ("action", "added")),
    Column("features", sql.JSON(none_as_null=True)),
)
leases = Table(
    "bbb_leases",
    everything,
    Column("name", String(32), primary_key=True),
    Column("holder", String(200), nullable=False),
    Column("until", Double, nullable=False),
)


def new_arm(action: int) -> dict[str, Any]:
    """The sums of an action that was never taken."""
    return {"action": action, "chosen": 0, "rewarded": 0, "total": 0.0, "square": 0.0}


def connect_to(url: str) -> Engine:
    """The database at ``url``, as the log needs it."""
    made = sql.create_engine(url, pool_pre_ping=not url.startswith("sqlite"), pool_size=10)
    if made.dialect.name != "sqlite":
        return made

    @sql.event.listens_for(made, "connect")
    def connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin below, not by themselves
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {_PATIENCE * 1000}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")  # what is committed survives a power failure
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @sql.event.listens_for(made, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")

    return made
