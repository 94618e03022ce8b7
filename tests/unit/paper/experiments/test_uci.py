"""The regression sets of UCI: splits, units, and what is said of all rows."""

import math
from typing import Any

import pytest
import torch

from bayesbackprop._methods import METHODS, SkippedError
from bayesbackprop_paper import data
from bayesbackprop_paper.data.fetching import FetchError
from bayesbackprop_paper.data.loading import Regression
from bayesbackprop_paper.experiments import uci
from bayesbackprop_paper.experiments.truth import Run


@pytest.fixture(autouse=True)
def line(monkeypatch: pytest.MonkeyPatch) -> Regression:
    """A table of a line with noise, in units far from 1, instead of any data set."""
    random = torch.Generator().manual_seed(0)
    x = 50 + 10 * torch.randn(200, 2, generator=random)
    made = Regression(
        torch.cat([x, torch.ones(200, 1)], 1), 1000 + 20 * x[:, 0] + 5 * torch.randn(200, generator=random)
    )
    monkeypatch.setattr(data, "regression", lambda _: made)
    return made


@pytest.mark.identities
def test_a_split_is_standardised_by_what_is_learnt_from(line: Regression) -> None:
    given, other = uci.split("boston", 0), uci.split("boston", 1)
    assert (len(given.y), len(given.test_y)) == (180, 20)
    assert given.hidden == 50
    assert uci.split("protein", 0).hidden == 100
    for values in (given.x[:, :2], given.y):
        assert values.mean(0).abs().max() < 1e-5
        assert (values.std(0, correction=0) - 1).abs().max() < 1e-5
    assert given.x[:, 2].abs().max() == 0  # a constant
    assert not torch.equal(given.test_y, other.test_y)
    both = torch.cat([given.y, given.test_y]).flatten().sort().values
    everything = line.targets.sort().values
    assert given.unit * both.diff() == pytest.approx(everything.diff().numpy(), abs=1e-3)


@pytest.mark.learning
@pytest.mark.parametrize("method", ["ours, defaults", "plain"])
def test_figures_are_in_the_units_of_the_target(method: str) -> None:
    figures = uci.measure(Run("boston", method, 0))
    assert 3 < figures["RMSE"] < 15
    gaussian = math.log(figures["RMSE"]) + 0.5 * math.log(2 * math.pi * math.e)
    assert figures["NLL"] == pytest.approx(gaussian, abs=0.7)
    assert 0 <= figures["in 50 %"] <= figures["in 90 %"] <= 1


@pytest.mark.identities
def test_a_method_that_cannot_be_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def skipped(_: object) -> None:
        raise SkippedError("there is no reason")

    monkeypatch.setitem(METHODS, "Laplace", skipped)
    with pytest.raises(RuntimeError, match="Laplace: skipped: there is no reason"):
        uci.measure(Run("boston", "Laplace, one noise", 0))


@pytest.mark.identities
def test_what_cannot_be_fetched_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str) -> None:
        if name == "energy":
            raise FetchError("no energy here")

    monkeypatch.setattr(uci.fetching, "fetch", fetch)
    with pytest.warns(UserWarning, match="energy is left out: no energy here"):
        assert uci.available() == [name for name in uci.SPLITS if name != "energy"]


def _entry(task: str, method: str, nll: float, half: float = 0.5) -> dict[str, Any]:
    return {"task": task, "method": method, "figures": {"NLL": nll, "in 50 %": half, "in 90 %": 0.9}}


@pytest.mark.identities
def test_the_verdict_counts_sets_by_their_means() -> None:
    rows = [
        _entry("boston", "ours, defaults", 1.0, 0.4),
        _entry("boston", "ours, defaults", 3.0, 0.6),
        _entry("boston", "deep ensemble", 2.0),
        _entry("yacht", "ours, defaults", 1.0, 0.6),
        _entry("yacht", "deep ensemble", 0.9),
        _entry("wine", "deep ensemble", 0.9),
    ]
    text = uci.verdicts({str(number): row for number, row in enumerate(rows)})
    assert "NLL at or below that of deep ensemble on 1 of 2 sets: boston." in text
    assert "in 50 % intervals of ours: 0.550 (0.500 to 0.600)" in text
