"""The tasks on which defaults are compared with plain training, and what is said of them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from bayesbackprop_paper.experiments import defaults
from bayesbackprop_paper.experiments.truth import Run

pytestmark = pytest.mark.equivalence

SMALL = [name for name in defaults.TASKS if not name.startswith("MNIST")]


@pytest.mark.parametrize("name", SMALL)
def test_a_network_fits_its_task(name: str) -> None:
    task, again, other = defaults.TASKS[name](1), defaults.TASKS[name](1), defaults.TASKS[name](2)
    assert torch.equal(task.x, again.x)
    assert not torch.equal(task.x, other.x)
    outputs = task.net()(task.x[:5])
    assert task.likelihood().log_prob(outputs, task.y[:5]).isfinite().all()
    if task.y.is_floating_point():
        assert task.y.mean() == pytest.approx(0, abs=1e-5)
        assert task.y.std() == pytest.approx(1, abs=1e-5)
    else:
        assert outputs.shape[1] == len(task.y.unique()) == len(task.test_y.unique())


@pytest.mark.learning
@pytest.mark.parametrize("method", defaults.METHODS)
def test_every_method_learns_wine_and_repeats(method: str) -> None:
    figures = defaults.measure(Run("wine", method, 3))
    assert figures["accuracy"] > 90
    assert defaults.measure(Run("wine", method, 3)) == figures


def found(ours: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Any]:
    task = "diabetes" if "RMSE" in ours else "wine"
    methods = {"plain, Adam 1e-3": other, "Bayesian, defaults": ours}
    return {name: {"task": task, "method": name, "figures": figures} for name, figures in methods.items()}


@pytest.mark.parametrize(
    ("ours", "good"),
    [
        ({"accuracy": 95.5, "NLL": 0.3}, 1),
        ({"accuracy": 95.4, "NLL": 0.3}, 0),
        ({"accuracy": 99.0, "NLL": 0.31}, 0),
        ({"RMSE": 1.004, "NLL": 0.3}, 1),
        ({"RMSE": 1.006, "NLL": 0.3}, 0),
    ],
)
def test_as_good_is_within_half_a_point_and_half_a_percent(ours: dict[str, float], good: int) -> None:
    other = {"accuracy": 96.0, "NLL": 0.3} if "accuracy" in ours else {"RMSE": 1.0, "NLL": 0.3}
    assert f'As good as "plain, Adam 1e-3" on {good} of 1 tasks' in defaults.verdicts(found(ours, other))
    assert "on 0 of 0 tasks: none." in defaults.verdicts(found(ours, other))
