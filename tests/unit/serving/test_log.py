"""The log: numbers without gaps, once and for all, in SQLite and PostgreSQL."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services import postgres

from bayesbackprop.bandits import LinearThompson  # isort: skip
from bayesbackprop.serving import Settings  # isort: skip
from bayesbackprop.serving.log import Conflict, Entry, Full, Log  # isort: skip

pytestmark = pytest.mark.identities

ROOM = {"most": 1000, "expire": 1000.0}


def entry(number: int, request: str | None = None, action: int = 0, loss: float = 0.0) -> Entry:
    context = [0.1, 1 / 3, 1e-300]  # which must come back as they are
    return Entry(
        f"{number:032x}",
        request,
        context,
        None,
        None,
        action,
        0.5,
        [0.5, 0.5],
        [1.0, 2.0],
        [0.1, 0.2],
        action == 0,
        loss,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield Settings(str(tmp_path / "log.sqlite")).url
        return
    import psycopg

    found: str = request.getfixturevalue("server")
    with psycopg.connect(found, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    yield Settings(found).url


@pytest.fixture
def log(url: str) -> Iterator[Log]:
    made = Log(url)
    assert not made.exists()
    made.create(LinearThompson(3, 2, seed=5))
    made.open()
    yield made
    made.close()


def test_it_knows_its_agent(log: Log, url: str) -> None:
    other = Log(url)
    assert other.exists()
    other.create(LinearThompson(9, 9))  # too late
    found = other.open()
    assert (type(found), found.features, found.actions, found.seed) == (LinearThompson, 3, 2, 5)
    assert other.name == log.name
    other.close()


def test_what_was_written_is_read_exactly(log: Log) -> None:
    written = replace(
        entry(1), mask=[True, False], features=[[1.0], [0.2]], probabilities=[0.1, 0.9], means=[1 / 3, 2e-5]
    )
    (answer,), (status,) = log.write([[written]], [(written.id, 0.1 + 0.2)], **ROOM)
    assert (answer, status) == ([written], "accepted")
    (row,) = log.rows(waiting=False)
    assert all(row[name] == getattr(written, name) for name in ("id", "context", "mask", "features", "means", "action"))
    (found,) = log.after(0, 10)
    assert found == (1, written.id, written.context, written.features, 0, 0.1 + 0.2)
    assert log.decision_at(1) == written.id
    assert log.decision_at(2) is None


def test_a_reward_may_come_with_its_decision_and_counts_once(log: Log) -> None:
    _, statuses = log.write([[entry(1)]], [(entry(1).id, 1.0), (entry(1).id, 1.0), (entry(1).id, 2.0)], **ROOM)
    assert statuses == ["accepted", "known", "conflict"]
    _, statuses = log.write([], [(entry(1).id, 1.0), (entry(2).id, 1.0)], **ROOM)
    assert statuses == ["known", "unknown"]
    assert log.counts()[:2] == (1, 1)


def test_groups_are_written_or_not(log: Log) -> None:
    groups = [[entry(1, "a")], [entry(2, "a")], [entry(3), replace(entry(4, "a"), context=[0.0])], [entry(5), entry(6)]]
    (first, again, conflict, full), _ = log.write(groups, [], most=2, expire=1000.0)
    assert first == [entry(1, "a")]
    assert again == [replace(entry(1, "a"), repeated=True)]
    assert (conflict, full) == (Conflict("a", ("context",)), Full(1))
    assert [row["id"] for row in log.rows(waiting=True)] == [entry(1).id]


def test_sums_are_those_of_the_rows(log: Log) -> None:
    log.write(
        [[entry(n, action=n % 2, loss=n / 10) for n in range(6)]], [(entry(3).id, 2.0), (entry(1).id, 4.0)], **ROOM
    )
    counts = log.counts()
    assert (counts.decided, counts.rewarded, counts.explored, counts.waiting) == (6, 2, 3, 4)
    watched = log.watch(recent=4, seconds=10.0, points=3)
    assert [(arm["chosen"], arm["rewarded"], arm["total"], arm["square"]) for arm in watched.arms] == [
        (3, 0, 0.0, 0.0),
        (3, 2, 6.0, 20.0),
    ]
    assert [number for number, _, _ in watched.history] == [2, 4, 6]
    assert [regret for _, _, regret in watched.history] == pytest.approx([0.1, 0.6, 1.5])
    assert watched.history[-1][2] == pytest.approx(counts.regret)
    assert len(watched.recent) == 4
    assert (watched.decisions_per_second, watched.rewards_per_second) == (0.6, 0.2)


def test_what_has_expired_is_swept_once(log: Log) -> None:
    log.write([[entry(n) for n in range(5)]], [(entry(2).id, 1.0)], **ROOM)
    assert log.sweep(1000.0) == 0
    assert log.counts().waiting == 4
    assert log.sweep(-1.0) == 5  # as if a second had passed
    assert (log.counts().lost, log.counts().waiting) == (4, 0)
    assert log.sweep(-1.0) == 0
    _, statuses = log.write([[entry(9)]], [(entry(0).id, 1.0), (entry(2).id, 1.0), (entry(9).id, 1.0)], **ROOM)
    assert statuses == ["expired", "known", "accepted"]
    assert log.counts().waiting == 0


def test_numbers_have_no_gaps_whoever_writes(log: Log, url: str) -> None:
    """Several writers, each with connections of its own, of which some write what was written before."""
    problems: list[BaseException] = []

    def write(number: int) -> None:
        try:
            mine = Log(url)
            for n in range(20):
                ids = [1000 * number + 10 * n + k for k in range(3)]
                mine.write([[entry(i, f"{i}"), entry(i + 5, f"{n}")] for i in ids], [], **ROOM)
                mine.write([], [(entry(i).id, float(i)) for i in ids], **ROOM)
            mine.close()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    rows = list(log.rows(waiting=True))
    assert [row["number"] for row in rows] == list(range(1, 1 + 3 * 20 * 3 + 20))
    assert len({row["request"] for row in rows}) == len(rows)
    assert [each.position for each in log.after(0, 1000)] == list(range(1, 1 + 3 * 20 * 3))
    assert log.counts()[:2] == (200, 180)


def test_the_office_of_the_learner_has_one_holder(log: Log) -> None:
    assert log.hold("a", 100.0)
    assert log.hold("a", 100.0)
    assert not log.hold("b", 100.0)
    assert log.hold("b", 100.0, instead_of="a")
    assert not log.hold("a", 100.0)
    log.release("a")
    assert (log.holder(), log.hold("a", 100.0)) == ("b", False)
    log.release("b")
    assert log.hold("a", -1.0)
    assert log.hold("c", 100.0)  # after its time


def test_a_log_of_a_newer_format_is_refused(log: Log) -> None:
    import sqlalchemy

    from bayesbackprop.serving import tables

    with log.engine.begin() as connection:
        connection.execute(sqlalchemy.update(tables.service).values(format=tables.FORMAT + 1))
    with pytest.raises(ValueError, match=f"of format {tables.FORMAT} at most"):
        log.open()


def test_a_database_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="a file, or a URL such as postgresql"):
        Log("nonsense://a/b")


def test_sqlite_keeps_what_was_committed_through_a_power_failure(tmp_path: Path) -> None:
    log = Log(Settings(str(tmp_path / "log.sqlite")).url)
    log.create(LinearThompson(3, 2))
    with log.engine.connect() as connection:
        for name, value in {"journal_mode": "wal", "synchronous": 2}.items():
            assert connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() == value
    log.close()
