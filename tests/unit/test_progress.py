"""Progress: live lines on a terminal, plain lines elsewhere, TensorBoard if it is there."""

import re
import sys
from pathlib import Path

import pytest
import rich.console

import digits
from bayesbackprop._progress import Progress
from bayesbackprop.training import Examples
from bayesbackprop_paper.experiments import mnist

pytestmark = pytest.mark.identities


def show(progress: Progress, folder: Path) -> None:
    training, validation, _ = digits.images()
    mnist.prepare(digits.RECIPES["bbb-mixture"], digits.N, folder).train(
        Examples(*training), {"validation": Examples(*validation)}, progress
    )


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(Progress("mixture"), tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == digits.EPOCHS
    for record, line in zip(digits.metrics(tmp_path), lines, strict=True):
        assert line.startswith(
            f"mixture: epoch {record['epoch']}/3  likelihood {record['likelihood']:.4f}  complexity "
        )
        assert f"validation {record['validation_error']:.2f} %" in line
        assert line.endswith("min left")
        assert "\x1b" not in line


def test_quiet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(Progress(quiet=True), tmp_path)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [80, 160])
def test_live_lines_on_a_terminal(width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("bbb-mixture-1200-t0.1-60epochs-seed2")
    progress._console = rich.console.Console(stderr=True, force_terminal=True, width=width)
    show(progress, tmp_path)
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    last = f"{digits.metrics(tmp_path)[-2]['validation_error']:.2f}"
    # Whole, however narrow: the costs and the error, the bar, the speed and the time left.
    assert re.search(rf"epoch 3/3  likelihood \d\.\d{{4}}  complexity \S+  validation {last} %", said)
    assert re.search(r"seed2 ━+ \d+ steps/s 0:00:0\d", said)
    assert "min left" not in said
    assert max(map(len, re.split(r"[\r\n]", said))) <= width


def test_a_live_line_of_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("mixture")
    progress._console = rich.console.Console(stderr=True, force_terminal=True, width=160)
    with progress.run(epochs=3, batches=7, done=9):
        progress.step({"likelihood": 6.0, "complexity": 30.0})  # the third of the second epoch
    said = capsys.readouterr().err
    assert "\nepoch 2/3  likelihood 2.0000  complexity 10\n" in said


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    show(Progress(quiet=True, tensorboard=tmp_path / "board"), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for name in ("likelihood", "complexity", "validation_error", "seconds"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [1, 2, 3]
        if name != "seconds":
            expected = [record[name] for record in digits.metrics(tmp_path / "run")]
            assert [value for _, value in found] == pytest.approx(expected)


def test_tensorboard_of_a_run_that_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, epochs, value in ((0, (1, 2), 5.0), (7, (2, 3), 6.0)):  # killed when the second epoch was shown, not kept
        progress = Progress(quiet=True, tensorboard=tmp_path)
        with progress.run(epochs=3, batches=7, done=done):
            for epoch in epochs:
                progress.epoch({"epoch": epoch, "validation_error": value})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("validation_error")] == [(1, 5), (2, 6), (3, 6)]


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    show(Progress(quiet=True, tensorboard=tmp_path / "board"), tmp_path / "run")
    assert not (tmp_path / "board").exists()
