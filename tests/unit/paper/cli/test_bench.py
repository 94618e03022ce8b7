"""``bbb bench`` measures, writes and shows what it is asked for, and leaves out what is not installed."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from bayesbackprop._cli import app
from bayesbackprop_paper.bench import bandits, regrets, report
from bayesbackprop_paper.bench.contenders import SGD, Contender
from bayesbackprop_paper.bench.measuring import Config
from bayesbackprop_paper.bench.peers import Peer
from bayesbackprop_paper.cli import bench

pytestmark = pytest.mark.identities

TINY = {
    "step": ["--units", "8", "--units", "5"],
    "small": [],
    "predict": ["--units", "8", "--draws", "3", "--images", "1", "--images", "2"],
    "size": ["--quick"],
    "growth": ["--quick"],
}
PLAIN = {
    "step": ("sgd", "dropout"),
    "small": ("sgd", "dropout"),
    "predict": ("passes",),
    "size": ("plain",),
    "growth": ("plain",),
}
CASES = {
    "paths": bench.paths_case,
    "networks": bench.networks_case,
    "size": bench.size_case,
    "growth": bench.growth_case,
}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def tiny(what: str, *arguments: str) -> Result:
    return call(what, *TINY[what], "--rounds", "2", "--threads", "1", *arguments)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {what: tmp_path / f"{what}.json" for what in TINY}
    for what, path in paths.items():
        result = tiny(what, "--json", str(path))
        assert result.exit_code == 0, result.output
        assert "bayesbackprop" in result.stdout
        assert torch.__version__ in result.stdout
    return paths


def test_the_json_says_what_was_measured_and_the_page_shows_it(files: dict[str, Path], tmp_path: Path) -> None:
    rows = {what: json.loads(path.read_text()) for what, path in files.items()}
    for what, each in rows.items():
        assert {row["name"] for row in each} >= {*PLAIN[what], "bayesbackprop"}
        for row in each:
            base = {other["name"]: other for other in each if same_task(row, other)}
            check_row(row, base)
    assert {row["units"] for row in rows["step"]} == {8, 5}
    assert {(row["units"], row["batch"], row["threads"]) for row in rows["small"]} == {(100, 64, 1)}
    assert {(row["images"], row["draws"]) for row in rows["predict"]} == {(1, 3), (2, 3)}
    assert {row["axis"] for row in rows["growth"]} == {"units", "batch", "draws"}

    page = tmp_path / "page.md"
    result = call("report", *map(str, files.values()), "--out", str(page))
    assert result.exit_code == 0, result.output
    text = page.read_text()
    for row in itertools.chain(*rows.values()):
        assert f"`{row['command']}`" in text
        assert f" {report.figure(row['milliseconds'])} |" in text
        assert f"{row['table'] or row['network']}" in text
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    growth = [f"page/growth-{axis}.png" for axis in ("units", "batch", "draws")]
    assert pictures == [*(f"page/{what}.png" for what in TINY if what != "growth"), *growth]
    assert {str(path.relative_to(tmp_path)) for path in (tmp_path / "page").iterdir()} == set(pictures)
    assert torch.__version__ in text
    assert str(tmp_path) not in text


def same_task(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(row[key] == other[key] for key in ("network", "batch", "table", "draws"))


def check_row(row: dict[str, Any], base: dict[str, dict[str, Any]]) -> None:
    lower, upper = row["quartiles"]
    assert 0 < lower <= row["milliseconds"] <= upper
    for plain in ("sgd", "dropout", "passes", "bayesbackprop"):
        ratio = row[f"ratio_{plain}"]
        if plain in base and row["what"] not in CASES:
            assert ratio == pytest.approx(row["milliseconds"] / base[plain]["milliseconds"])
        else:
            assert ratio is None
    if row["against"] is not None:
        assert row["ratio"] == pytest.approx(row["milliseconds"] / base[row["against"]]["milliseconds"])
    assert row["versions"]["torch"] == torch.__version__
    assert (row["memory"] is None) == (row["what"] != "step")


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("what", CASES)
def test_a_case_is_measured_as_told(what: str, quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = CASES[what], []

    def measure(config: Config, sizes: object) -> list[report.Row]:
        asked.append((config.run.rounds, config.run.seed, config.run.threads, sizes))
        return [report.Row(config.run, "plain", "", "1-1-1", 1, 1, 1.0, (1.0, 1.0))]

    monkeypatch.setattr(case, what, measure)
    path = tmp_path / "rows.json"
    options = ["--rounds", "7", "--seed", "3", "--threads", "2", *(["--quick"] if quick else [])]
    result = call(what, *options, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert asked == [(7, 3, 2, case.QUICK if quick else case.Sizes())]
    (row,) = report.read_json(path)
    said = " --quick" if quick else ""
    assert (row.run.what, row.run.command) == (what, f"bbb bench {what}{said} --rounds 7 --seed 3 --threads 2")


def test_files_of_the_same_name_are_refused_since_their_pictures_would_be_one(tmp_path: Path) -> None:
    files = [tmp_path / folder / "small.json" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        assert tiny("small", "--json", str(file)).exit_code == 0
    result = call("report", *map(str, files), "--out", str(tmp_path / "page.md"))
    assert "files of different names" in str(result.exception)
    assert not (tmp_path / "page.md").exists()


@pytest.mark.parametrize("what", ["small", "predict"])
def test_a_missing_peer_is_one_line_and_the_rest_goes_on(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    present = Peer("numpy", ("numpy",), (Contender("another", "plain loss", SGD.build),))
    monkeypatch.setattr(bench, "PEERS", (Peer("no-such-library", ("no_such_library",), ()), present))
    result = tiny(what, "--peers")
    assert result.exit_code == 0, result.output
    notices = [line for line in result.stderr.splitlines() if line]
    assert len(notices) == 1
    assert "no-such-library" in notices[0]
    assert 'pip install "bayesbackprop[peers]"' in notices[0]
    assert "another" in result.stdout


@pytest.mark.parametrize(
    "arguments", [["step", "--unit-of-measure"], ["step", "--rounds", "1"], ["small", "--threads", "0"], ["walk"]]
)
def test_what_it_does_not_know_it_refuses(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code != 0
    assert "Error" in result.stderr


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"name": "sgd"}]'])
def test_a_file_of_another_kind_changes_no_page(text: str, tmp_path: Path) -> None:
    file, page = tmp_path / "other.json", tmp_path / "page.md"
    file.write_text(text)
    page.write_text("before")
    result = call("report", str(file), "--out", str(page))
    assert result.exit_code != 0
    assert "other.json" in str(result.exception)
    assert page.read_text() == "before"


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> list[bandits.Job]:
    """Runs of bandits are made in this process; gives those that were asked for."""
    asked: list[bandits.Job] = []

    def run_all(jobs: list[bandits.Job], folder: Path, cores: int) -> None:
        asked.extend(jobs)
        for job in jobs:
            bandits._record(job, folder)

    monkeypatch.setattr(bandits, "run_all", run_all)
    return asked


def test_bandit_leaves_out_what_is_not_installed_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turn: list[bandits.Job]
) -> None:
    monkeypatch.setattr(bandits, "is_installed", lambda package: package == "bayesbackprop")
    elsewhere = bandits.Found("wheel-0.9", "mabwiser LinUCB", 5, 6, 6, 3.0, 1.0, "9")
    (tmp_path / "bandits").mkdir()
    with monkeypatch.context() as context:
        context.setattr(bandits, "run", lambda _: elsewhere)
        bandits._record(bandits.Job("wheel-0.9", "mabwiser LinUCB", 5, 6, 60.0), tmp_path / "bandits")
    path, page = tmp_path / "rows.json", tmp_path / "page.md"
    options = ["--environment", "wheel-0.9", "--steps", "6", "--seeds", "2", "--seed", "5", "--peers"]
    result = call("bandit", *options, "--runs", str(tmp_path), "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "mabwiser is not installed and left out" in result.stderr
    assert in_turn == bandits.jobs_of(["wheel-0.9"], list(bandits.OURS), [5, 6], 6, 300.0)
    written = regrets.read_json(path)
    assert written is not None
    assert written.run.command == (
        "bbb bench bandit --environment wheel-0.9 --steps 6 --seed 5 --seeds 2 --limit 300 --peers"
    )
    assert [(row.agent, row.seeds) for row in written.rows] == [
        *((name, [5, 6]) for name in bandits.OURS),
        ("mabwiser LinUCB", [5]),  # of which a run was made elsewhere
    ]
    assert written.run.versions["mabwiser"] == "9"
    for row in written.rows:
        assert f"{row.mean:.0f}" in result.stdout
    result = call("report", str(path), "--out", str(page))
    assert result.exit_code == 0, result.output
    assert regrets.section(written, []).splitlines()[0] in page.read_text()
    assert (tmp_path / "page" / "rows.png").exists()


def test_bandit_runs_the_agents_that_it_is_told(tmp_path: Path, in_turn: list[bandits.Job]) -> None:
    options = ["--agent", "Uniform", "--environment", "clicks", "--environment", "wheel-0.5", "--steps", "3"]
    result = call("bandit", *options, "--seeds", "1", "--runs", str(tmp_path), "--limit", "7")
    assert result.exit_code == 0, result.output
    assert in_turn == bandits.jobs_of(["clicks", "wheel-0.5"], ["Uniform"], [0], 3, 7.0)


@pytest.mark.parametrize("option", ["--agent", "--environment"])
def test_bandit_refuses_names_that_it_does_not_know(option: str, tmp_path: Path) -> None:
    result = call("bandit", option, "nobody", "--runs", str(tmp_path))
    assert f"'{option[2:]}' parameter of bbb bench bandit must be one of" in str(result.exception)
    assert list(tmp_path.iterdir()) == []
