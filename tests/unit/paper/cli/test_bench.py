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
from bayesbackprop_paper.bench import bandits, report
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


def test_bandit_leaves_out_what_is_not_installed_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    path = tmp_path / "bandit.json"
    options = ["--environment", "wheel-0.9", "--steps", "5", "--updates", "1", "--seeds", "1", "--peers"]
    result = CliRunner().invoke(app, ["bench", "bandit", *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "mabwiser is not installed and left out" in result.output
    written = json.loads(path.read_text())
    assert written["run"]["command"].startswith("bbb bench bandit --environment wheel-0.9 --steps 5")
    assert [row["agent"] for row in written["rows"]] == list(bandits.OURS)
