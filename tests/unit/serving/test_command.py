"""``bbb serve``: what it refuses before it listens."""

from pathlib import Path
from typing import Any

import pytest

from commands import bbb
from services import rewarded, serving, settings_in

from bayesbackprop.bandits import LinearThompson, Uniform  # isort: skip
from bayesbackprop.serving import Log, Settings, command  # isort: skip
from bayesbackprop.serving.app import open_log  # isort: skip

pytestmark = pytest.mark.identities


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been run."""
    calls: list[Any] = []

    class Recorded:
        def __init__(self, config: Any, _: Any) -> None:
            self.config = config

        def run(self) -> None:
            calls.append((self.config.app, vars(self.config)))

    monkeypatch.setattr(command, "Server", Recorded)
    monkeypatch.setattr(command, "prepare_process", lambda: None)
    monkeypatch.delenv("BBB_SERVE_TOKEN", raising=False)
    monkeypatch.delenv("BBB_SERVE_READ_TOKEN", raising=False)
    return calls


def test_by_default_it_listens_to_this_machine(tmp_path: Path, started: list[Any]) -> None:
    done = bbb("serve", "--features", 3, "--actions", 2, "--log", tmp_path / "a" / "log.sqlite", "--agent", "linear")
    assert done.exit_code == 0, done.exception
    ((_, options),) = started
    assert (options["host"], options["port"]) == ("127.0.0.1", 8000)
    assert (tmp_path / "a" / "log.sqlite").exists()


def test_it_goes_on_with_a_log_that_knows_its_sizes(tmp_path: Path, started: list[Any]) -> None:
    log = tmp_path / "log.sqlite"
    assert bbb("serve", "--features", 3, "--actions", 2, "--log", log, "--agent", "linear").exit_code == 0
    assert bbb("serve", "--log", log).exit_code == 0
    assert bbb("serve", "--log", log, "--features", 3, "--agent", "linear").exit_code == 0
    assert len(started) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--features", 4), "'features' parameter of bbb serve must be that of the log"),
        (("--actions", 3), "'actions' parameter of bbb serve must be that of the log"),
        (("--agent", "uniform"), "which was made for LinearThompson"),
        (("--agent", "nonsense"), "which was made for LinearThompson"),
    ],
)
def test_a_log_of_another_bandit_is_refused(
    options: tuple[Any, ...], said: str, tmp_path: Path, started: list[Any]
) -> None:
    log = tmp_path / "log.sqlite"
    bbb("serve", "--features", 3, "--actions", 2, "--log", log, "--agent", "linear")
    done = bbb("serve", "--log", log, *options)
    assert said in str(done.exception)
    assert len(started) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--features", 3), "'actions' parameter of bbb serve must be given where the log is new"),
        (("--actions", 3), "'features' parameter of bbb serve must be given where the log is new"),
        (("--features", 3, "--actions", 2, "--agent", "nonsense"), "a file that agent.save wrote"),
        (("--features", 3, "--actions", 2, "--host", "0.0.0.0"), "unless there is a token"),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_made(
    options: tuple[Any, ...], said: str, tmp_path: Path, started: list[Any]
) -> None:
    done = bbb("serve", "--log", tmp_path / "log.sqlite", *options)
    assert said in str(done.exception)
    assert not started
    assert not (tmp_path / "log.sqlite").exists()


def test_other_machines_need_a_token_or_a_word(tmp_path: Path, started: list[Any], monkeypatch: Any) -> None:
    options = ("serve", "--features", 3, "--actions", 2, "--log", tmp_path / "log.sqlite", "--host", "0.0.0.0")
    assert bbb(*options, "--no-token").exit_code == 0
    file = tmp_path / "token"
    file.write_text("a-token-of-many-letters\n")
    assert bbb(*options, "--token-file", file).exit_code == 0
    monkeypatch.setenv("BBB_SERVE_TOKEN", "a-token-of-many-letters")
    assert bbb(*options).exit_code == 0
    assert len(started) == 3


def test_a_token_for_reading_alone_protects_nothing(tmp_path: Path, started: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("BBB_SERVE_READ_TOKEN", "a-token-of-many-letters")
    done = bbb("serve", "--features", 3, "--actions", 2, "--log", tmp_path / "log.sqlite")
    assert "alone it protects nothing" in str(done.exception)


def test_the_agent_may_be_a_file(tmp_path: Path) -> None:
    agent = LinearThompson(3, 2, precision=2.0)
    agent.observe([1.0, 0.0, 0.0], 1, 5.0)
    agent.save(tmp_path / "warm.agent")
    settings = settings_in(tmp_path, agent=str(tmp_path / "warm.agent"))
    log = Log(settings.url)
    found = open_log(log, settings)
    assert isinstance(found, LinearThompson)
    assert (found.precision, found.observed) == (2.0, 1)
    with pytest.raises(ValueError, match="which was made for 3"):
        open_log(log, Settings(settings.log, features=4))
    Uniform(3, 2).save(tmp_path / "other.agent")
    with pytest.raises(ValueError, match="which was made for LinearThompson"):
        open_log(log, Settings(settings.log, agent=str(tmp_path / "other.agent")))
    log.close()


def test_decisions_that_wait_in_a_file_are_said_to_stay_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    agent, log = LinearThompson(3, 2), tmp_path / "log.sqlite"
    agent.decide_many([[1.0, 0.0, 0.0]] * 3)
    agent.save(tmp_path / "waits.agent")
    settings = settings_in(tmp_path, agent=str(tmp_path / "waits.agent"))
    for said in (True, False):  # once, when the log is made
        open_log(Log(settings.url), settings)
        found = capfd.readouterr().err
        assert ("3 decisions wait for a reward in the agent" in found) is said
        assert ("/reward does not know them" in found) is said
    assert log.exists()


def test_replicas_are_refused(tmp_path: Path) -> None:
    LinearThompson(3, 2, replicas=2).save(tmp_path / "many.agent")
    with pytest.raises(ValueError, match="one agent, not several replicas"):
        settings_in(tmp_path, agent=str(tmp_path / "many.agent")).make_agent()


def test_a_file_that_is_no_log_is_refused(tmp_path: Path, started: list[Any]) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("These are notes, and no database at all. " * 50)
    done = bbb("serve", "--features", 3, "--actions", 2, "--log", file)
    assert f"The log sqlite:///{file} cannot be opened: file is not a database" in str(done.exception)
    assert isinstance(done.exception, OSError)
    assert file.read_text().startswith("These are notes")


def test_a_damaged_log_is_refused_with_one_line(tmp_path: Path, started: list[Any]) -> None:
    """Forty bytes anywhere behind the first page: it starts, or says which log cannot be opened."""
    settings, refused = settings_in(tmp_path), 0
    with serving(settings) as client:
        rewarded(client, 30)
        client.post("/arms", json={})
    whole = Path(settings.log).read_bytes()
    for place in range(4096, len(whole) - 40, 1024):
        for file in tmp_path.glob("*.sqlite*"):
            if file.is_file():
                file.unlink()
        flipped = bytes(255 - each for each in whole[place : place + 40])
        Path(settings.log).write_bytes(whole[:place] + flipped + whole[place + 40 :])
        for options in ([], ["export", tmp_path / "a.csv"]):
            done = bbb("serve", *options, "--log", settings.log)
            if done.exception is not None:
                assert isinstance(done.exception, OSError), done.exception
                assert f"The log sqlite:///{settings.log} cannot be opened: " in str(done.exception)
                assert len(str(done.exception).splitlines()) == 1
                refused += 1
    assert refused > 5
    assert started


def test_a_database_that_does_not_answer_is_said_without_its_password(started: list[Any]) -> None:
    pytest.importorskip("psycopg")
    url = "postgresql://me:secret@127.0.0.1:1/none"
    done = bbb("serve", "--features", 3, "--actions", 2, "--log", url)
    assert "cannot be opened" in str(done.exception)
    assert "secret" not in str(done.exception)


def test_urls() -> None:
    assert Settings("a.sqlite").url == f"sqlite:///{Path('a.sqlite').absolute()}"
    assert Settings("postgres://u@h/d").url == Settings("postgresql://u@h/d").url == "postgresql+psycopg://u@h/d"
    assert str(Settings("/x/a.sqlite").folder) == "/x/a.sqlite.snapshots"
    assert str(Settings("postgresql://u@h/d", "/y").folder) == "/y"


def test_help() -> None:
    done = bbb("serve", "--help")
    assert done.exit_code == 0
    for option in ("--features", "--token-file", "--workers", "export"):
        assert option in done.output
