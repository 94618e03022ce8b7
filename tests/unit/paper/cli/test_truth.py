"""``bbb truth``: one row after the other, and the table of all."""

import json
from pathlib import Path

import pytest
import typer

from bayesbackprop_paper.cli import truth as command
from bayesbackprop_paper.experiments import lora, nuts, ood, uci
from commands import bbb

pytestmark = pytest.mark.identities


def test_nuts_by_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = []
    monkeypatch.setattr(nuts, "measure", lambda run: measured.append(run) or {"TV near": 0.5})
    options = ("truth", "nuts", "--problem", "moons", "--method", "diagonal", "--results", tmp_path)
    for seeds in (1, 2):
        result = bbb(*options, "--seeds", seeds)
        assert result.exit_code == 0, result.output
    assert [(run.task, run.method, run.seed) for run in measured] == [("moons", "diagonal", seed) for seed in (0, 1)]
    assert result.stdout.strip() == (tmp_path / "nuts.md").read_text().strip()
    rows = json.loads((tmp_path / "nuts.json").read_text())
    assert [row["seed"] for row in rows.values()] == [0, 1]
    assert bbb("truth", "nuts", "--method", "guess").exit_code == 2


def test_ood_by_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = []
    monkeypatch.setattr(ood, "measure", lambda run: measured.append(run) or {"AUROC entropy": 0.5})
    for _ in range(2):  # the second finds all of them
        result = bbb("truth", "ood", "--results", tmp_path, "--seeds", 2)
        assert result.exit_code == 0, result.output
    assert [(run.method, run.seed) for run in measured] == [(name, seed) for seed in (0, 1) for name in ood.METHODS]
    assert "AUROC entropy" in result.stdout
    assert bbb("truth", "ood", "--method", "guess").exit_code == 2


def test_lora_by_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = []
    monkeypatch.setattr(lora, "measure", lambda run: measured.append(run) or {"NLL": 0.5})
    result = bbb("truth", "lora", "--method", "plain", "--results", tmp_path, "--seeds", 2)
    assert result.exit_code == 0, result.output
    assert [(run.method, run.seed) for run in measured] == [("plain", 0), ("plain", 1)]
    assert result.stdout.strip() == (tmp_path / "lora.md").read_text().strip()
    assert bbb("truth", "lora", "--method", "guess").exit_code == 2


def test_uci_by_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = []
    figures = {"NLL": 1.0, "RMSE": 1.0, "in 50 %": 0.5, "in 90 %": 0.9}
    monkeypatch.setattr(uci, "measure", lambda run: measured.append(run) or figures)
    monkeypatch.setattr(uci, "available", lambda: ["protein", "yacht"])
    result = bbb("truth", "uci", "--method", "ours, defaults", "--splits", 5, "--results", tmp_path)
    assert result.exit_code == 0, result.output
    numbers = {task: [run.seed for run in measured if run.task == task] for task in ("protein", "yacht")}
    assert numbers == {"protein": [0, 1, 2], "yacht": [0, 1, 2, 3, 4]}
    assert "in 90 % intervals of ours: 0.900" in result.stdout
    assert bbb("truth", "uci", "--task", "iris").exit_code == 2


def test_names_are_checked() -> None:
    assert command.chosen(None, ["a", "b"], "--method") == ["a", "b"]
    with pytest.raises(typer.BadParameter, match="'c' is none of a, b"):
        command.chosen(["c"], ["a", "b"], "--method")
