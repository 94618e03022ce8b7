"""``bbb reproduce``: tables and figures by command, of networks that take no time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bayesbackprop_paper.experiments import regression
from bayesbackprop_paper.experiments.regression import Config, Curve
from commands import bbb

pytestmark = pytest.mark.identities


def curve(config: Config) -> Curve:
    levels = torch.linspace(-1, 1, 5)[:, None].expand(5, len(regression.GRID))
    return Curve(levels.double().numpy() * (1 + config.seed), levels[:1].double().numpy(), 0.5, 0.9)


def test_figure_5_by_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fitted: list[Config] = []
    monkeypatch.setattr(regression, "fit", lambda config: fitted.append(config) or curve(config))
    result = bbb("reproduce", "fig5", "--seeds", 2, "--steps", 7, "--variant", "formula", "--results", tmp_path)
    assert result.exit_code == 0, result.output
    assert fitted == [Config(method, "formula", seed=seed, steps=7) for seed in (0, 1) for method in regression.METHODS]
    names = {"fig5-curves.json", *(f"fig5.{x}" for x in ("csv", "json", "png", "svg"))}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "Bayes by Backprop, formula, 2 seeds" in result.stdout
    assert isinstance(bbb("reproduce", "fig5", "--variant", "neither").exception, ValueError)


def test_a_quick_figure_5_is_kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(regression, "fit", curve)
    monkeypatch.setattr(regression, "fig5", lambda *arguments: drawn.append(arguments) or "drawn")
    assert bbb("reproduce", "fig5", "--quick", "--runs", tmp_path / "runs").stdout == "drawn\n"
    ((curves, results, _),) = drawn
    assert list(curves) == [
        Config(method, variant, steps=500) for variant in regression.VARIANTS for method in regression.METHODS
    ]
    assert results == tmp_path / "runs" / "quick"
