"""Damaged files of agents and of simulations are refused with the one error, and change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bayesbackprop.bandits import Agent, EpsilonGreedy, LinearThompson, ThompsonSampling, load, simulate
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
    "NaN": lambda _, tensors: tensors["rewards"].fill_(torch.nan),
    "infinity in a weight": lambda _, tensors: tensors["parameter.0"].fill_(torch.inf),
    "an action that there is not": lambda _, tensors: tensors["actions"].fill_(3),
    "a negative action": lambda _, tensors: tensors["actions"].fill_(-1),
    "a negative square": lambda _, tensors: tensors["optimiser.0.exp_avg_sq"].fill_(-1),
    "a negative step": lambda _, tensors: tensors["step"].fill_(-1),
    "half a step": lambda _, tensors: tensors["optimiser.0.step"].fill_(0.5),
    "an absurd count": lambda contents, _: contents.update(acted=10**400),
    "a count that is true": lambda contents, _: contents.update(acted=True),
    "a tiny noise": lambda contents, _: contents["arguments"].update(noise=1e-320),
    "an absurd scale": lambda contents, _: contents["arguments"].update(scale=2**64),
    "an absurd seed": lambda contents, _: contents["arguments"].update(seed=10**400),
    "an argument that has a default is missing": lambda contents, _: contents["arguments"].pop("memory"),
}

# Sizes of gigabytes that an agent would allocate before its tensors were compared.
CLAIMS: dict[str, Any] = {
    "memory": 10**9, "features": 10**9, "actions": 10**6, "replicas": 10**9, "hidden": [10**6, 10**6],
}  # fmt: skip


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


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("encoding", ["input", "output"])
@pytest.mark.parametrize("kind", [ThompsonSampling, EpsilonGreedy, LinearThompson])
def test_no_agent_is_made_larger_than_its_file(
    kind: type[Any], encoding: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = tmp_path / "agent", {"hidden": (4,), "memory": 6, "encoding": encoding}
    kind(2, 3, **({} if kind is LinearThompson else options)).save(path)
    assert type(load(path)) is kind
    rewrite(path, lambda header, _: header["contents"]["arguments"].update({name: CLAIMS[name]}))
    monkeypatch.setattr(Agent, "__post_init__", lambda _: pytest.fail("made"))
    with pytest.raises(ValueError, match=REFUSED.format(r"bandits\.load", "an agent")):
        load(path)


LINEAR: dict[str, Change] = {
    "another matrix": lambda _, tensors: tensors["matrix"].fill_(0.5),
    "a root that is not positive": lambda _, tensors: tensors["root"].zero_(),
    "a negative count": lambda _, tensors: tensors["count"].fill_(-1),
    "a negative square": lambda _, tensors: tensors["square"].fill_(-1),
    "infinity": lambda _, tensors: tensors["moment"].fill_(torch.inf),
}


@pytest.mark.parametrize("change", LINEAR.values(), ids=list(LINEAR))
def test_a_damaged_linear_agent_is_refused(change: Change, tmp_path: Path) -> None:
    LinearThompson(2, 3).save(tmp_path / "agent")
    rewrite(tmp_path / "agent", lambda header, tensors: change(header["contents"], tensors))
    with pytest.raises(ValueError, match=REFUSED.format(r"bandits\.load", "an agent")):
        load(tmp_path / "agent")


def test_an_agent_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    agent = ThompsonSampling(2, 3, hidden=(4,), memory=6)
    with torch.no_grad():
        next(agent.net.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match=r"'parameter\.0' parameter of ThompsonSampling\.save must be finite"):
        agent.save(tmp_path / "agent")
    assert list(tmp_path.iterdir()) == []


RUN: dict[str, Change] = {
    "no regret": lambda _, tensors: tensors.pop("regret"),
    "the regret of one replica": lambda _, tensors: tensors.update(regret=tensors["regret"][:1]),
    "regret without steps": lambda _, tensors: tensors.update(regret=tensors["regret"][0]),
    "no times": lambda contents, _: contents.pop("t"),
    "the time of one environment": lambda contents, _: contents.update(t=[4]),
    "times that are text": lambda contents, _: contents.update(t=["four", "four"]),
    "times that are fractions": lambda contents, _: contents.update(t=[4.5, 4.5]),
    "absurd times": lambda contents, _: contents.update(t=[10**400, 4]),
    "regret that is not finite": lambda _, tensors: tensors["regret"].fill_(torch.nan),
    "regret of another type": lambda _, tensors: tensors.update(regret=tensors["regret"].float()),
    "no count of decisions": lambda contents, _: contents.pop("acted"),
    "NaN in the agent": lambda _, tensors: tensors["agent.moment"].fill_(torch.nan),
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
