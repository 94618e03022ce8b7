"""The demonstration: what it trains, what it says, and that nothing is done twice."""

import re
from pathlib import Path

import pytest
import rich.filesize
import torch
from typer.testing import CliRunner

import digits
from bayesbackprop import load_sparse
from bayesbackprop._cli import app
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import bandit, demo, regression, report, table1
from bayesbackprop_paper.experiments.recipe import Examples, error_percent
from report_runs import points, text_of

pytestmark = pytest.mark.identities


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "mnist", lambda folder=None: digits.images())
    monkeypatch.setattr(data, "mushroom", lambda folder=None: None)
    monkeypatch.setitem(table1.RECIPES, "bbb-mixture", digits.RECIPES["bbb-mixture"])
    for name, value in {"_UNITS": 8, "_EPOCHS": 2, "_CURVE_STEPS": 3}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(bandit, "run_all", lambda *_: points())


@pytest.mark.usefixtures("small")
def test_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["demo", "--folder", str(tmp_path / "demo"), "--results", str(tmp_path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    for number in range(1, 7):
        assert f"{number}/6" in result.output
    small = load_sparse(tmp_path / "demo" / "network" / "sparse.safetensors")
    error, size = (
        error_percent(small, Examples(*digits.images().test)),
        (tmp_path / "demo/network/sparse.safetensors").stat().st_size,
    )
    assert f"Without 95% of them: test error {error:.2f} %, {rich.filesize.decimal(size)} on disk." in result.output
    assert "Regret: 5 % greedy 300, 1 % greedy 300, greedy 300, Bayes by Backprop 300." in result.output
    path = tmp_path / "demo" / "index.html"
    assert str(path) in result.output
    first = path.read_bytes()
    headings = re.findall("<h2>(.*?)</h2>", text_of(path))
    assert headings[:2] == ["The digits it is least sure about", "Most weights can go"]
    assert headings[2:] == ["It is unsure where it has seen nothing", "It explores by itself"]

    # Again: nothing is trained or fitted twice, and the page is the same.
    monkeypatch.setattr(torch.optim.Adam, "step", None)
    path.unlink()
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert path.read_bytes() == first


@pytest.mark.usefixtures("small")
def test_curves_that_are_there_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[regression.Config] = []
    fit = regression.fit

    def once(config: regression.Config) -> regression.Curve:
        if fitted:
            raise KeyboardInterrupt
        fitted.append(config)
        return fit(config)

    monkeypatch.setattr(regression, "fit", once)
    with pytest.raises(KeyboardInterrupt):
        demo.curves(tmp_path, 0, iter)
    monkeypatch.setattr(regression, "fit", lambda config: fitted.append(config) or fit(config))
    demo.curves(tmp_path, 0, iter)
    assert [config.method for config in fitted] == ["bbb", "standard"]
    assert len(regression.read_curves(tmp_path / "curves" / report.CURVES)) == 2
