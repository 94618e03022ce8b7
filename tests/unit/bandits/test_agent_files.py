"""Damaged files of agents and of simulations are refused with the one error, and change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bayesbackprop.bandits import LinearThompson, ThompsonSampling, load, simulate
from bayesbackprop_paper.environments import Wheel
from rewriting import rewrite

pytestmark = pytest.mark.identities

Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
REFUSED = r"^The 'path' parameter of {} must be a file of bayesbackprop that holds {}\. Got .+, which is damaged "

AGENT: dict[str, Change] = {
    "no agent": lambda contents, _: contents.pop("agent"),
    "an unknown agent": lambda contents, _: contents.update(agent="Popen"),
    "an agent that is a list": lambda contents, _: contents.update(agent=["Uniform"]),
    "no arguments": lambda contents, _: contents.pop("arguments"),
    "arguments that are a list": lambda contents, _: contents.update(arguments=[1]),
    "an unknown argument": lambda contents, _: contents["arguments"].update(shell=True),
    "an argument that is missing": lambda contents, _: contents["arguments"].pop("features"),
    "an argument out of range": lambda contents, _: contents["arguments"].update(actions=0),
    "an unknown prior": lambda contents, _: contents["arguments"]["prior"].update(kind="X"),
    "a prior that is text": lambda contents, _: contents["arguments"].update(prior="Normal"),
    "no count of decisions": lambda contents, _: contents.pop("acted"),
    "a count that is text": lambda contents, _: contents.update(observed="3"),
    "a negative count": lambda contents, _: contents.update(acted=-1),
    "a tensor is missing": lambda _, tensors: tensors.pop("rewards"),
    "a tensor too many": lambda _, tensors: tensors.update(more=torch.zeros(1)),
    "a tensor of another shape": lambda _, tensors: tensors.update(rewards=torch.zeros(1, 1)),
    "a tensor of another type": lambda _, tensors: tensors.update(rewards=tensors["rewards"].double()),
}


@pytest.mark.parametrize("change", AGENT.values(), ids=list(AGENT))
def test_a_damaged_agent_is_refused(change: Change, tmp_path: Path) -> None:
    path = tmp_path / "agent"
    agent = ThompsonSampling(2, 3, hidden=(4,), updates=2, batch_size=4, memory=6)
    agent.observe([0.1, 0.2], agent.act([0.1, 0.2]), 1.0)
    agent.save(path)
    assert load(path).acted == 1
    rewrite(path, lambda header, tensors: change(header["contents"], tensors))
    with pytest.raises(ValueError, match=REFUSED.format(r"bandits\.load", "an agent")):
        load(path)


RUN: dict[str, Change] = {
    "no regret": lambda _, tensors: tensors.pop("regret"),
    "the regret of one replica": lambda _, tensors: tensors.update(regret=tensors["regret"][:1]),
    "regret without steps": lambda _, tensors: tensors.update(regret=tensors["regret"][0]),
    "no times": lambda contents, _: contents.pop("t"),
    "the time of one environment": lambda contents, _: contents.update(t=[4]),
    "times that are text": lambda contents, _: contents.update(t=["four", "four"]),
    "no count of decisions": lambda contents, _: contents.pop("acted"),
    "a tensor of the agent is missing": lambda _, tensors: tensors.pop("agent.moment"),
    "a tensor of the agent of another shape": lambda _, tensors: tensors.update({"agent.moment": torch.zeros(2)}),
}


@pytest.mark.parametrize("change", RUN.values(), ids=list(RUN))
def test_a_damaged_run_is_refused_and_changes_nothing(change: Change, tmp_path: Path) -> None:
    path = tmp_path / "run"
    simulate([Wheel(0.5, 1), Wheel(0.5, 2)], LinearThompson(2, 5, replicas=2), 4, path)
    rewrite(path, lambda header, tensors: change(header["contents"], tensors))
    environments, agent, damaged = [Wheel(0.5, 1), Wheel(0.5, 2)], LinearThompson(2, 5, replicas=2), path.read_bytes()
    before = {name: tensor.clone() for name, tensor in agent.tensors().items()}
    with pytest.raises(ValueError, match=REFUSED.format("simulate", "a checkpoint")):
        simulate(environments, agent, 7, path)
    assert path.read_bytes() == damaged
    assert (agent.acted, agent.observed, [each.t for each in environments]) == (0, 0, [0, 0])
    assert all(torch.equal(before[name], tensor) for name, tensor in agent.tensors().items())
