"""``bbb train``: what it takes, what it refuses, and how it goes on."""

import json
import math
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import digits
from bayesbackprop import training
from bayesbackprop.training import DivergenceError
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import mnist, table1
from bayesbackprop_paper.experiments.recipe import BEST, CHECKPOINT, METRICS
from digits import BATCHES, checkpoint, metrics
from training_runs import OPTIONS, assert_same_run, bbb, succeed

pytestmark = pytest.mark.equivalence


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands train on the small data set, by small recipes."""
    monkeypatch.setattr(data, "mnist", digits.images)
    monkeypatch.setattr(table1, "RECIPES", digits.RECIPES)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # which takes long to start


@pytest.mark.usefixtures("small")
def test_what_a_search_found_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[mnist.Config] = []
    run = mnist.run

    def spy(config: mnist.Config, *arguments: Any) -> mnist.Result:
        configs.append(config)
        return run(config, *arguments)

    monkeypatch.setattr(mnist, "run", spy)
    found = {"pi": 0.75, "sigma1": 0.5, "sigma2": 0.25, "sigma": 0.0625}
    rates = {"learning_rate": 0.01, "rho_rate": 0.5}
    options = chain.from_iterable((f"--{name.replace('_', '-')}", value) for name, value in {**found, **rates}.items())
    succeed("train", *OPTIONS["mixture"], *options, "--folder", tmp_path)
    (config,) = configs
    assert {name: getattr(config, name) for name in found} == found
    assert {name: getattr(config.schedule, name) for name in rates} == rates


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("sgd", "--pi"),
        ("sgd", "--temperature"),
        ("bbb-gaussian", "--sigma1"),
        ("bbb-mixture", "--prior-sigma"),
        ("dropout", "--draws"),
        ("dropout", "--rho-rate"),
        ("sgd", "--dropout"),
        ("map-gaussian", "--sigma"),
    ],
)
def test_options_without_a_meaning_are_refused(method: str, option: str, tmp_path: Path) -> None:
    value = 2 if option == "--draws" else 0.5
    result = bbb("train", "--method", method, "--units", 8, option, value, "--folder", tmp_path / "run")
    assert result.exit_code == 2
    assert f"no meaning for {method}" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
def test_resuming_where_there_is_no_run_is_refused(tmp_path: Path) -> None:
    result = bbb("train", *OPTIONS["momentum"], "--folder", tmp_path / "none", "--resume")
    assert result.exit_code == 2
    assert "There is no run in" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", OPTIONS)
def test_a_run_killed_in_its_first_epoch_begins_again_as_it_began(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = succeed("train", *OPTIONS[method], "--folder", tmp_path / "whole")

    def die(*_: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(training, "_add", die)
        bbb("train", *OPTIONS[method], "--folder", tmp_path / "run")
    assert checkpoint(tmp_path / "run")[1]["state"]["step"] == 0
    assert succeed("train", "--folder", tmp_path / "run", "--resume") == expected
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.usefixtures("small")
def test_a_finished_run_resumed_does_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("train", *OPTIONS["averaged"], "--folder", tmp_path)
    expected = succeed(*command)
    before = {name: (tmp_path / name).read_bytes() for name in (CHECKPOINT, BEST, METRICS, mnist.MODEL)}
    monkeypatch.setattr(training, "_batches_left", None)
    monkeypatch.setattr(training, "_end_epoch", None)
    assert succeed(*command, "--resume") == expected
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def spoil(folder: Path, how: str) -> None:
    path = folder / CHECKPOINT
    whole = path.read_bytes()
    if how == "foreign":
        path.write_bytes((folder / mnist.MODEL).read_bytes())
    elif how == "best":
        path.write_bytes((folder / BEST).read_bytes())
    else:
        content = {"truncated": whole[:-1], "header only": whole[:9], "empty": b"", "text": b"not a checkpoint at all"}
        path.write_bytes(content[how])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", ["truncated", "header only", "empty", "text", "foreign", "best"])
def test_a_file_that_is_no_checkpoint_is_refused(how: str, tmp_path: Path) -> None:
    command = ("train", *OPTIONS["mixture"], "--folder", tmp_path)
    succeed(*command)
    spoil(tmp_path, how)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    result = bbb(*command, "--resume")
    assert isinstance(result.exception, ValueError)
    assert str(tmp_path) in str(result.exception)
    assert ("whole safetensors file" in str(result.exception)) == (how not in ("foreign", "best"))
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


CHANGES = {
    "schedule.epochs": ["--epochs", 5],
    "schedule.learning_rate": ["--learning-rate", 0.5],
    "schedule.averaging": ["--averaging", 0.5],
    "units": ["--units", 9],
    "temperature": ["--temperature", 0.5],
    "draws": ["--draws", 2],
    "seed": ["--seed", 3],
    "method": ["--method", "bbb-gaussian"],
}


@pytest.mark.usefixtures("small")
def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    options = ["train", *OPTIONS["mixture"], "--folder", tmp_path]
    succeed(*options)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for name, change in CHANGES.items():
        result = bbb(*options, "--resume", *change)
        assert isinstance(result.exception, ValueError)
        assert f"'{name}': {change[1]!r}" in str(result.exception)
        assert "'pi'" not in str(result.exception)
        result = bbb(*options, *change)
        assert result.exit_code == 2
        said = re.sub(r"[\s│]+", " ", result.output)  # which is broken into lines
        assert "holds a run already" in said
        assert f"{change[1]!r}" in said
        assert "--resume" in said
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", OPTIONS)
def test_the_very_same_command_goes_on(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a scheduler and torchrun start it again."""
    expected = succeed("train", *OPTIONS[method], "--folder", tmp_path / "whole")
    command = ("train", *OPTIONS[method], "--folder", tmp_path / "run")
    end = training._end_epoch

    def die(run: training.Run, *arguments: Any) -> None:
        if run.history:
            raise SystemExit
        end(run, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_end_epoch", die)
        bbb(*command)
    assert checkpoint(tmp_path / "run")[1]["state"]["step"] == BATCHES
    result = bbb(*command, "--json")
    assert f"Going on with the run in {tmp_path / 'run'}." in result.stderr.splitlines()
    assert {**json.loads(result.stdout), "seconds": 0} == {**expected, "seconds": 0}
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.usefixtures("small")
def test_the_command_of_a_run_that_is_complete_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("train", *OPTIONS["mixture"], "--folder", tmp_path)
    expected = succeed(*command)

    def files() -> dict[Path, tuple[bytes, int]]:
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir() if path.is_file()}

    before = files()
    monkeypatch.setattr(data, "mnist", None)
    for more in ((), ("--resume",)):
        assert succeed(*command, *more) == expected
        assert f"The run in {tmp_path} is complete." in bbb(*command, *more).stderr.splitlines()
        assert files() == before


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", ["absent", "damaged", "of another run", "without its model"])
def test_a_result_that_does_not_belong_to_the_run_is_made_again(how: str, tmp_path: Path) -> None:
    command = ("train", *OPTIONS["mixture"], "--folder", tmp_path)
    expected = succeed(*command)
    path, model = tmp_path / mnist.RESULT, (tmp_path / mnist.MODEL).read_bytes()
    if how == "absent":
        path.unlink()
    elif how == "damaged":
        path.write_text(path.read_text()[:-9])
    elif how == "of another run":
        was = json.loads(path.read_text())
        path.write_text(json.dumps({**was, "made": {**was["made"], "seed": 9}}))
    else:
        (tmp_path / mnist.MODEL).unlink()
    assert succeed(*command) == expected
    assert (tmp_path / mnist.MODEL).read_bytes() == model
    assert json.loads(path.read_text())["made"]["seed"] == 0


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("error")
def test_a_run_that_diverges_says_so_and_keeps_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = training._add

    def overflow(run: training.Run, *arguments: Any) -> None:
        add(run, *arguments)
        if run.history:
            run.sums["likelihood"] = math.nan

    monkeypatch.setattr(training, "_add", overflow)
    result = bbb("train", *OPTIONS["mixture"], "--learning-rate", 0.25, "--folder", tmp_path)
    assert isinstance(result.exception, DivergenceError)
    assert "epoch 2" in str(result.exception)
    assert "below 0.25" in str(result.exception)
    assert checkpoint(tmp_path)[1]["state"]["step"] == BATCHES
    assert len(metrics(tmp_path)) == 1


@pytest.fixture(autouse=True)
def _no_temporary_file_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("**/.*"))
