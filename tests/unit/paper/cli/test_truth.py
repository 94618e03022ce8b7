"""``bbb truth``: one row after the other, and the table of all."""

import json
from pathlib import Path

import pytest
import typer

from bayesbackprop_paper.cli import truth as command
from bayesbackprop_paper.experiments import compression, lora, networks, nuts, ood, uci
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


def test_networks_by_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = []
    figures = {"error %": 1.0, "NLL": 0.1, "ECE %": 0.5, "AUROC entropy": 0.9, "seconds of training": 1.0}
    monkeypatch.setattr(networks, "measure", lambda task, run: measured.append((task, run)) or figures)
    options = ("truth", "networks", "--network", "LeNet-5", "--results", tmp_path, "--seeds", 1)
    for epochs in (2, 2, 3):  # the second finds all of them
        result = bbb(*options, "--epochs", epochs)
        assert result.exit_code == 0, result.output
    assert [task.extent.epochs for task, _ in measured] == [2] * 2 * len(networks.METHODS) + [3] * 2 * len(
        networks.METHODS
    )
    assert all(task.name == run.task for task, run in measured)
    assert [run.method for _, run in measured[: len(networks.METHODS)]] == list(networks.METHODS)
    assert list(dict.fromkeys(task.data for task, _ in measured)) == ["MNIST", "Fashion-MNIST"]
    assert "of the single networks, plain has the lowest NLL" in result.stdout
    for option in ("--method", "--data", "--network"):
        assert bbb("truth", "networks", option, "guess").exit_code == 2


def test_compression_by_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = []
    monkeypatch.setattr(compression, "measure", lambda plan, run: measured.append(run) or {"error % at 1x": 0.5})
    for _ in range(2):
        result = bbb("truth", "compression", "--results", tmp_path, "--seeds", 2)
        assert result.exit_code == 0, result.output
    methods = list(compression.METHODS)
    assert [(run.method, run.seed) for run in measured] == [(name, seed) for seed in (0, 1) for name in methods]
    assert "pruned, the smallest network with 1 % error or less: 1x." in result.stdout
    assert bbb("truth", "compression", "--method", "guess").exit_code == 2


def test_what_is_quick_is_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    figures = {"error %": 1.0, "NLL": 0.1, "ECE %": 0.5}
    monkeypatch.setattr(networks, "measure", lambda *_: figures)
    monkeypatch.setattr(compression, "measure", lambda *_: {"error % at 1x": 0.5})
    for name in ("networks", "compression"):
        result = bbb("truth", name, "--quick", "--seeds", 1)
        assert result.exit_code == 0, result.output
        assert (tmp_path / "runs" / "quick" / f"{name}.json").exists()
    assert not (tmp_path / "results").exists()


def test_names_are_checked() -> None:
    assert command.chosen(None, ["a", "b"], "--method") == ["a", "b"]
    with pytest.raises(typer.BadParameter, match="'c' is none of a, b"):
        command.chosen(["c"], ["a", "b"], "--method")
