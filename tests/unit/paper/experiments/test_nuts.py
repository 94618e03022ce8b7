"""The two problems whose exact predictions are known."""

import pytest
import torch

from bayesbackprop import Conditional
from bayesbackprop_paper.experiments import nuts
from bayesbackprop_paper.experiments.truth import Run

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("name", nuts.PROBLEMS)
def test_distances_are_zero_at_the_truth_and_differences_elsewhere(name: str) -> None:
    problem = nuts.PROBLEMS[name]()
    assert not any(problem.distances(problem.exact).values())
    shifted = {column: values + 0.25 for column, values in problem.exact.items()}
    assert problem.distances(shifted) == pytest.approx(dict.fromkeys(problem.distances(shifted), 0.25))


def test_the_regression_is_what_its_description_says() -> None:
    problem = nuts.regression()
    x, y = problem.inputs[:, 0], problem.targets[:, 0]
    assert len(x) == 50
    assert not ((x > -0.8) & (x < 0.4)).any()
    residuals = y - torch.sin(2 * x) - 0.3 * x
    assert 0.08 < float(residuals.std()) < 0.12
    means = {place: float(problem.exact["sd"][problem.region == place].mean()) for place in ("on", "gap", "out")}
    assert means == pytest.approx({"on": 0.109, "gap": 0.279, "out": 0.408}, abs=5e-4)


@pytest.mark.parametrize("name", nuts.PROBLEMS)
def test_a_method_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = nuts.PROBLEMS[name]()
    monkeypatch.setitem(nuts.METHODS, "exact", lambda *_: nuts.Found(problem.exact, {"F": 0.0}))
    figures = nuts.measure(Run(name, "exact", 0))
    assert list(figures)[-1] == "F"
    assert not any(figures.values())


def test_priors_are_those_of_the_description() -> None:
    wide, deep = nuts.regression(), nuts.moons()
    assert [wide.sigma(name) for name in ("0.weight", "0.bias", "2.weight", "2.bias")] == [2, 2, 2 / 50**0.5, 1]
    names = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
    assert [deep.sigma(name) for name in names] == [2 / 2**0.5, 1, 2 / 20**0.5, 1, 2 / 20**0.5, 1]


@pytest.mark.parametrize("name", nuts.PROBLEMS)
def test_a_family_is_trained_from_what_it_needs(name: str) -> None:
    method = nuts.variational(3, 0.1, 2, family=Conditional)
    problem = nuts.PROBLEMS[name]()
    found = method(problem, 0)
    assert found.besides["F"] > 0
    assert all(values.shape == (len(problem.grid),) for values in found.predicted.values())
