"""A network gets smaller level by level, and what is gone stays away."""

from typing import Any

import pytest
from torch import nn

import digits
from bayesbackprop.pruning import weights_left
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import compression
from bayesbackprop_paper.experiments.truth import Run

pytestmark = pytest.mark.identities

WEIGHTS = 784 * 8 + 8 + 8 * 10 + 10
PLAN = compression.Plan(
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10)),
    epochs=2,
    epochs_after=1,
    levels=(2, 10),
    batch_size=32,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "mnist", digits.images)
    compression._trained.cache_clear()


@pytest.mark.parametrize("method", compression.METHODS)
def test_each_level_has_as_many_weights_as_it_says(method: str) -> None:
    for level, model in compression.METHODS[method](PLAN, 0):
        assert weights_left(model) == WEIGHTS - round((1 - 1 / level) * WEIGHTS)
        zeros = sum(int((parameter == 0).sum()) for parameter in model.net.parameters())
        assert zeros == WEIGHTS - weights_left(model)
    assert weights_left(compression._trained(PLAN, 0)) == WEIGHTS


def test_all_methods_start_from_the_same_network_and_differ_afterwards() -> None:
    at_once, step_by_step = (compression.measure(PLAN, Run(PLAN.task, name, 0)) for name in compression.METHODS)
    assert list(at_once) == list(step_by_step) == ["error % at 1x", "error % at 2x", "error % at 10x"]
    assert at_once["error % at 1x"] == step_by_step["error % at 1x"]
    means = [dict(method(PLAN, 0))[10].net[1].weight for method in compression.METHODS.values()]
    assert not (means[0] == means[1]).all()
    compression._trained.cache_clear()
    assert compression.measure(PLAN, Run(PLAN.task, "pruned", 0)) == at_once


@pytest.mark.learning
def test_training_on_brings_errors_back() -> None:
    plan = PLAN._replace(epochs=20, epochs_after=20, levels=(10, 50), rate=0.01)
    at_once, step_by_step = (compression.measure(plan, Run(plan.task, name, 0)) for name in compression.METHODS)
    assert step_by_step["error % at 50x"] < at_once["error % at 50x"] - 5


def test_training_of_another_length_is_another_task() -> None:
    assert (
        len({PLAN.task, PLAN._replace(epochs=3).task, PLAN._replace(epochs_after=2).task, compression.QUICK.task}) == 4
    )


def _entry(method: str, *errors: float) -> dict[str, Any]:
    figures = {f"error % at {level}x": error for level, error in zip((1, 63, 100), errors, strict=True)}
    return {"task": "digits", "method": method, "figures": figures}


def test_the_verdict_is_the_most_that_every_seed_bears() -> None:
    rows = [
        _entry("pruned and trained on", 0.8, 0.9, 1.0),
        _entry("pruned and trained on", 0.8, 1.0, 1.01),
        _entry("pruned", 1.1, 2.0, 3.0),
    ]
    text = compression.verdicts({str(number): row for number, row in enumerate(rows)})
    assert "digits, pruned, the smallest network with 1 % error or less: none.\n" in text
    assert "digits, pruned and trained on, the smallest network with 1 % error or less: 63x.\n" in text
    assert "Molchanov et al. (2017) 280x at 0.75 %" in text
