"""What is measured is what its name says."""

import pytest
import torch
from torch import nn

from bayesbackprop import Bayesian, Normal
from bayesbackprop_paper.bench.contenders import OURS, UnsupportedError, compiled, fully_connected, ours

pytestmark = pytest.mark.identities


def test_a_task_counts_the_weights_of_its_network() -> None:
    task = fully_connected((7, 5, 4, 3))
    assert task.weights == sum(parameter.numel() for parameter in task.net().parameters()) == 40 + 24 + 15
    assert (task.name, task.units, task.classes) == ("7-5-4-3", 5, 3)


def test_our_rows_have_the_prior_the_estimator_and_the_objective_they_are_given() -> None:
    task = fully_connected((4, 3, 3, 2))
    contender = ours("a", "b", prior=Normal(0.3), estimator="local", energy={"draws": 2}, optimiser="Adam")
    assert (contender.name, contender.objective, contender.optimiser) == ("a", "b", "Adam")
    trainee = contender.build(task)
    model = trainee.module
    assert isinstance(model, Bayesian)
    assert {(entry.prior, entry.estimator) for entry in model.plan} == {(Normal(0.3), "local")}
    assert trainee.cost.draws == 2
    assert trainee.cost.model is model


def test_every_contender_begins_with_the_same_network() -> None:
    task = fully_connected((4, 3, 3, 2))
    torch.manual_seed(1)
    expected = task.net()
    torch.manual_seed(1)
    model = OURS.build(task).module
    assert isinstance(model, Bayesian)
    assert all(map(torch.equal, expected.parameters(), model.net.parameters()))


def test_without_a_compiler_compiled_code_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match="no no-such-compiler"):
        compiled(nn.Linear(2, 1), "inductor")
    assert compiled(nn.Linear(2, 1), "eager")(torch.zeros(1, 2)).shape == (1, 1)  # which needs none
