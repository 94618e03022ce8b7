"""``bbb bench`` does what it says. That it is fast is measured there, not asserted here, but for one coarse guard."""

import itertools
import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from bayesbackprop import _timing
from bayesbackprop._cli import app
from bayesbackprop._engine import cpu as fused
from bayesbackprop_paper.bench import cases, memory, report
from bayesbackprop_paper.bench.contenders import OURS, SGD, Contender, Task
from bayesbackprop_paper.bench.peers import PEERS, Peer
from bayesbackprop_paper.cli import bench

pytestmark = pytest.mark.identities

TINY = {
    "step": ["--units", "8", "--units", "5"],
    "small": [],
    "predict": ["--units", "8", "--draws", "3", "--images", "1", "--images", "2"],
}
PLAIN = {"step": ("sgd", "dropout"), "small": ("sgd", "dropout"), "predict": ("passes",)}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def tiny(what: str, *arguments: str) -> Result:
    return call(what, *TINY[what], "--rounds", "2", "--threads", "1", *arguments)


def a_run(rounds: int = 2) -> report.Run:
    return report.this_run("step", "bbb bench step", threads=1, rounds=rounds, seed=0)


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

    page = tmp_path / "page.md"
    result = call("report", *map(str, files.values()), "--out", str(page))
    assert result.exit_code == 0, result.output
    text = page.read_text()
    for row in itertools.chain(*rows.values()):
        assert f"`{row['command']}`" in text
        assert f" {report.figure(row['milliseconds'])} |" in text
    assert torch.__version__ in text
    assert str(tmp_path) not in text


def same_task(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(row[key] == other[key] for key in ("network", "batch"))


def check_row(row: dict[str, Any], base: dict[str, dict[str, Any]]) -> None:
    lower, upper = row["quartiles"]
    assert 0 < lower <= row["milliseconds"] <= upper
    for plain in ("sgd", "dropout", "passes", "bayesbackprop"):
        ratio = row[f"ratio_{plain}"]
        if plain in base:
            assert ratio == pytest.approx(row["milliseconds"] / base[plain]["milliseconds"])
        else:
            assert ratio is None
    assert row["versions"]["torch"] == torch.__version__
    assert (row["memory"] is None) == (row["what"] != "step")


@pytest.fixture(scope="module")
def moderate() -> dict[str, report.Row]:
    """Of 784-400-400-10."""
    return {row.name: row for row in cases.step(cases.Config(a_run(rounds=15)), units=[400])}


def test_a_step_holds_one_tensor_of_weights_more_than_its_parameters_and_gradients(
    moderate: dict[str, report.Row],
) -> None:
    ours, plain = moderate[OURS.name], moderate[SGD.name]
    assert plain.memory is not None
    assert ours.memory is not None
    assert 0 < plain.memory < 0.5  # activations of 128 images alone
    assert ours.memory_activations == plain.memory
    if fused.available():
        assert 1 <= ours.memory < 1.5


def test_memory_counts_what_lives_at_the_same_time_and_what_was_built_before() -> None:
    kept: list[torch.Tensor] = []

    def build() -> Any:
        kept.append(torch.empty(1000))  # 4000 bytes, there during every step
        torch.empty(90_000)  # gone before the first step

        def step() -> None:
            for _ in range(2):
                torch.empty(500)  # 2000 bytes, one after the other

        return step

    assert memory.peak_memory(build) == 6000


def test_each_is_timed_as_often_after_the_warm_up_and_the_order_changes() -> None:
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = _timing.interleaved(runs, 20, 3, 0, lambda rounds, title: rounds, "")
    rounds = [tuple(calls[start : start + 3]) for start in range(0, len(calls), 3)]
    assert len(rounds) == 23
    assert all(set(each) == set("abc") for each in rounds)
    assert len(set(rounds)) > 1
    assert list(times) == list("abc")


def test_a_measurement_leaves_threads_and_random_numbers_as_they_were() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    cases.small(cases.Config(report.this_run("small", "", threads=threads + 1, rounds=2, seed=3)))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


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


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.distribution)
@pytest.mark.filterwarnings("default")
def test_a_peer_that_is_installed_learns_and_predicts(peer: Peer) -> None:
    if util.find_spec(peer.modules[0].partition(".")[0]) is None:
        pytest.skip(f"{peer.distribution} is not installed (`make bench-peers` does it)")
    assert peer.is_installed()
    for contender, sizes in itertools.product(peer.contenders, [(6, 5, 5, 3), (6, 5, 5, 1)]):
        task = Task(sizes)
        x, y = task.data(4)
        trainee = contender.build(task)
        parameters = list(trainee.parameters)
        trainee.cost(x, y).backward()
        learnt = sum(parameter.numel() for parameter in parameters if parameter.grad is not None)
        assert learnt == contender.tensors * task.weights
        assert trainee.forward(x).shape == (4, sizes[-1])
        assert not torch.equal(trainee.forward(x), trainee.forward(x))


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


def test_json_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    row = report.Row(a_run(), "sgd", "", "1-1-1", 1, 1, 1.0, (1.0, 1.0))
    report.write_json([row], path)
    before = path.read_text()
    assert report.read_json(path) == [row]

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(report.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        report.write_json([row, row], path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not fused.available(), reason="without a C compiler the plain equations are slower")
def test_a_step_is_not_absurdly_slow(moderate: dict[str, report.Row]) -> None:
    ratio = moderate[OURS.name].ratio_sgd
    assert ratio is not None
    assert ratio < 4
