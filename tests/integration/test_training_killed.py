"""A run that was killed at any moment goes on bit for bit."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

import digits
from bayesbackprop._files import read_checkpoint, write_checkpoint, written_atomically
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import mnist, recipe, table1
from bayesbackprop_paper.experiments.recipe import BEST, CHECKPOINT, METRICS, Schedule, error_percent
from digits import BATCHES, EPOCHS, MIDDLE, checkpoint, metrics
from processes import run_apart
from training_runs import OPTIONS, assert_resumes, assert_same_run, ctrl_c_counts, parts, start, succeed

pytestmark = pytest.mark.equivalence

TIMEOUT = 300
SIGNALS = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    with ctrl_c_counts():
        yield


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands train on the small data set, by small recipes."""
    monkeypatch.setattr(data, "mnist", digits.images)
    monkeypatch.setattr(table1, "RECIPES", digits.RECIPES)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # which takes long to start


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, one for each method and signal, whose process got the signal within a step."""
    folder = tmp_path_factory.mktemp("stopped")
    cases = {
        f"{method}-{way}": (number, ["train", *options, "--folder", str(folder / f"{method}-{way}")])
        for method, options in OPTIONS.items()
        for way, number in SIGNALS.items()
    }
    run_apart(digits.fork_and_kill, cases, folder, timeout=TIMEOUT)
    return folder


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", OPTIONS)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(method: str, stopped: Path, tmp_path: Path) -> None:
    ends = json.loads((stopped / "ends.json").read_text())
    expected = succeed("train", *OPTIONS[method], "--folder", tmp_path)
    assert expected["epochs"] == EPOCHS
    assert len(metrics(tmp_path)) == EPOCHS
    for way in SIGNALS:
        folder, said = stopped / f"{method}-{way}", (stopped / f"{method}-{way}.txt").read_text()
        if way == "kill":
            assert ends[f"{method}-{way}"] == -signal.SIGKILL
        else:
            assert ends[f"{method}-{way}"] == 128 + SIGNALS[way]
            assert "Traceback" not in said
            assert "Error" not in said
            assert said.splitlines()[-1] == "Stopped."
        _, metadata = checkpoint(folder)
        assert metadata["state"]["step"] == (BATCHES if way == "kill" else MIDDLE + 1)
        assert bool(metadata["state"]["sums"]) == bool(metadata["state"]["seconds"]) == (way != "kill")
        assert metrics(folder) == metrics(tmp_path)[:1]
        if way != "kill":
            assert f"bbb train --folder {folder} --resume" in said
        # With --resume, what it began with need not be said again; the very same command needs no --resume.
        options = ["--resume"] if way == "interrupt" else OPTIONS[method]
        assert succeed("train", *options, "--folder", folder) == expected
        assert_same_run(folder, tmp_path)
        if "bbb" in OPTIONS[method][1]:
            assert (folder / mnist.MODEL).read_bytes() == (tmp_path / mnist.MODEL).read_bytes()


def interrupt(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("epoch", [1, EPOCHS])
def test_ctrl_c_during_an_evaluation_waits_for_its_end(
    epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = start(tmp_path / "run"), []

    def evaluate(*arguments: Any) -> float:
        calls.append(0)
        if len(calls) == epoch:
            interrupt()
        return error_percent(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "error_percent", evaluate)
        with pytest.raises(KeyboardInterrupt):
            run.train(*parts())
    assert len(metrics(tmp_path / "run")) == len(calls) == epoch
    assert checkpoint(tmp_path / "run")[1]["state"]["step"] == epoch * BATCHES
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_resumes(tmp_path / "run", tmp_path / "whole")


def test_ctrl_c_again_and_again(tmp_path: Path) -> None:
    config = replace(digits.RECIPES["dropout"], schedule=Schedule(EPOCHS, digits.BATCH, averaging=0.8))
    stops = 0
    while True:
        hook = digits.send_in_step(signal.SIGINT, 4)
        try:
            start(tmp_path / "run", config).train(*parts())
        except KeyboardInterrupt:
            stops += 1
            assert checkpoint(tmp_path / "run")[1]["state"]["step"] == 5 * stops
        else:
            break
        finally:
            hook.remove()
    assert stops == EPOCHS * BATCHES // 5
    assert_resumes(tmp_path / "run", tmp_path / "whole", config)


def as_version_02_wrote_it(path: Path) -> None:
    """Without settings of optimiser and scheduler, and with costs summed over batches instead of examples."""
    tensors, metadata = read_checkpoint(path)
    state = metadata["state"]
    sums = {name: total / digits.BATCH for name, total in state["sums"].items() if name != "cost"}
    state = {"step": state["step"], "sums": sums, "seconds": state["seconds"], "records": state["records"]}
    write_checkpoint(path, tensors, {"about": metadata["about"], "state": state})


@pytest.mark.parametrize("stop", [2, BATCHES - 1, MIDDLE])
@pytest.mark.parametrize("method", ["bbb-mixture", "dropout", "sgd", "map-laplace"])
def test_a_checkpoint_of_version_02_is_resumed(method: str, stop: int, tmp_path: Path) -> None:
    config = digits.RECIPES[method]
    config = replace(config, schedule=replace(config.schedule, averaging=0.8, rho_rate=0.5))
    hook = digits.send_in_step(signal.SIGINT, stop)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", config).train(*parts())
    hook.remove()
    as_version_02_wrote_it(tmp_path / "run" / CHECKPOINT)
    start(tmp_path / "run", config).train(*parts())
    start(tmp_path / "whole", config).train(*parts())
    (mine, _), (whole, _) = checkpoint(tmp_path / "run"), checkpoint(tmp_path / "whole")
    torch.testing.assert_close(mine, whole, rtol=0, atol=0)
    for found, expected in zip(metrics(tmp_path / "run"), metrics(tmp_path / "whole"), strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def test_ctrl_c_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    hook = digits.send_in_step(signal.SIGINT, 2)
    try:
        start(tmp_path).train(*parts())
        assert checkpoint(tmp_path)[1]["state"]["step"] == EPOCHS * BATCHES
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        hook.remove()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", [CHECKPOINT, BEST, METRICS])
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_an_error_in_any_write_of_an_epoch_leaves_a_run_that_goes_on(
    function: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, epochs = written_atomically, []
    second = 2 if name == BEST else 3  # the others are written before the first epoch as well

    @contextmanager
    def written(path: Path) -> Iterator[BinaryIO]:
        epochs.append(path.name)
        with monkeypatch.context() as patch:
            if epochs.count(name) == second and path.name == name:
                patch.setattr(os, function, _no_space)
            with original(path) as stream:
                yield stream

    errors = iter([3.0, 2.0])  # every epoch is the best so far, so that the best is written each time
    run = start(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "error_percent", lambda *_: next(errors))
        patch.setattr("bayesbackprop._files.written_atomically", written)
        with pytest.raises(OSError, match="no space"):
            run.train(*parts())
    assert {path.name for path in (tmp_path / "run").iterdir()} == {CHECKPOINT, BEST, METRICS}
    assert checkpoint(tmp_path / "run")[1]["state"]["step"] == BATCHES
    for folder, errors in (("run", iter([2.0, 1.0])), ("whole", iter([3.0, 2.0, 1.0]))):
        with monkeypatch.context() as patch:
            patch.setattr(recipe, "error_percent", lambda *_, left=errors: next(left))
            start(tmp_path / folder).train(*parts())
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def _no_space(*_: Any) -> None:
    raise OSError("no space left")


@pytest.fixture(autouse=True)
def _no_temporary_file_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("**/.*"))
