"""The code of docs/training.md runs from top to bottom."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.learning

PAGE = next(parent / "docs" / "training.md" for parent in Path(__file__).parents if (parent / "docs").is_dir())
BLOCKS = re.findall(r"```py(?:thon)?\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_every_block_runs_after_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    lengths = []
    for block in BLOCKS:
        exec(block, names)
        lengths.append(len(names["history"]))
    assert lengths[0] == 20
    assert lengths[1] > 100  # until it has converged
    assert 3 < lengths[2] <= 20  # stopped early, since what is held out is noise
    assert lengths[3:] == [4, 4, 2, 2, 2]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["best.safetensors", "checkpoint.safetensors"]
    assert names["lowest"].lowest < float("inf")
    assert "epoch" in capsys.readouterr().out


def test_the_first_block_learns_and_ends_with_three_lines_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    assert sum("bbb." in line for line in BLOCKS[0].splitlines()) == 2  # and the import
    history = names["history"]
    assert str(history[-1]) in capsys.readouterr().out
    assert history[-1]["cost"] < history[0]["cost"]
