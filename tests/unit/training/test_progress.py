"""Progress: live lines on a terminal, plain lines elsewhere, nothing from other ranks."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console
import torch
from torch import nn

import digits
from bayesbackprop import _runs
from bayesbackprop.callbacks import Callback, Progress
from bayesbackprop.training import Batches, fit
from bayesbackprop_paper.experiments.recipe import progress
from training_runs import parts, start

pytestmark = pytest.mark.identities


def show(progress: Callback, folder: Path) -> None:
    start(folder).train(*parts(), progress)


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(progress("mixture"), tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == digits.EPOCHS
    for record, line in zip(digits.metrics(tmp_path), lines, strict=True):
        assert line.startswith(
            f"mixture: epoch {record['epoch']}/3  likelihood {record['likelihood']:.4f}  complexity "
        )
        assert f"validation {record['validation_error']:.2f} %" in line
        assert line.endswith("min left")
        assert "\x1b" not in line


def test_without_it_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(Callback(), tmp_path)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [80, 160])
def test_live_lines_on_a_terminal(width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress("bbb-mixture-1200-t0.1-60epochs-seed2")
    shown._console = rich.console.Console(stderr=True, force_terminal=True, width=width)
    show(shown, tmp_path)
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    last = f"{digits.metrics(tmp_path)[-2]['validation_error']:.2f}"
    # Whole, however narrow: the costs and the error, the bar, the speed and the time left.
    assert re.search(rf"epoch 3/3  likelihood \d\.\d{{4}}  complexity \S+  validation {last} %", said)
    assert re.search(r"seed2 ━+ \d+ steps/s 0:00:0\d", said)
    assert "min left" not in said
    assert max(map(len, re.split(r"[\r\n]", said))) <= width


def test_a_live_line_of_a_run_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress("mixture")
    shown._console = rich.console.Console(stderr=True, force_terminal=True, width=160)
    run: Any = SimpleNamespace(epochs=3, steps=7, step=9, epoch=1, rank=0)
    shown.on_start(run)
    run.step, run.means = 10, {"cost": 2.5, "likelihood": 2.0, "complexity": 10.0}
    shown.on_step(run)
    shown.on_end(run)
    said = capsys.readouterr().err
    assert "\nepoch 2/3  likelihood 2.0000  complexity 10\n" in said


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.net(inputs) - targets).square().mean()


@pytest.mark.parametrize("live", [False, True])
def test_any_objective_and_what_was_measured(live: bool, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(10, 1)
    shown = Progress()
    if live:
        shown._console = rich.console.Console(stderr=True, force_terminal=True, width=160)
    stream = iter([(x, x), (x, x)])  # whose length nobody knows
    measured = {"validation_nll": 0.123456, "mine": 7.0}
    (record,) = fit(Plain(), stream, epochs=1, validation=lambda: measured, callbacks=[shown])
    said = capsys.readouterr().err
    if live:
        assert re.search(r"epoch 1/1  cost \d+\.\d{4}", said)
    else:
        assert f"training: epoch 1/1  cost {record['cost']:.4f}  validation_nll 0.1235  mine 7  " in said


@pytest.mark.parametrize("live", [False, True])
def test_other_ranks_say_nothing(
    live: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_runs, "rank_of_ranks", lambda: (1, 1))
    shown = Progress()
    if live:
        shown._console = rich.console.Console(stderr=True, force_terminal=True, width=160)
    fit(Plain(), Batches(torch.zeros(4, 1), torch.zeros(4, 1), 4), epochs=2, callbacks=[shown])
    assert capsys.readouterr() == ("", "")
