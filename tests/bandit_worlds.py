"""Small environments and an agent of each kind for the tests of the bandits, and a process that is killed with them."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesbackprop import Gaussian, Normal
from bayesbackprop._files import read_checkpoint
from bayesbackprop.bandits import (
    Agent,
    Environment,
    EpsilonGreedy,
    LinearThompson,
    Table,
    ThompsonSampling,
    Uniform,
    simulate,
    simulation,
)
from bayesbackprop_paper.environments import Wheel

FEATURES, ACTIONS = 3, 4

# --- environments ----------------------------------------------------------------------------------------------------

ROWS = torch.arange(15.0).reshape(5, 3)
GAINS = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))

PLACES: dict[str, Callable[[int], Environment]] = {
    "rows": lambda seed: Table(ROWS, GAINS[0], seed),
    "outcomes": lambda seed: Table(ROWS, GAINS, seed),
    "wheel": lambda seed: Wheel(0.5, seed),
}


def all_rewards(environment: Environment, t: int) -> list[float]:
    """What each action would get at step t."""
    rewards = []
    for action in range(environment.actions):
        environment.t = t
        rewards.append(environment.step(action))
    environment.t = t
    return rewards


def walk(environment: Environment, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Contexts, expected rewards and rewards of all actions."""
    for t in range(steps):
        rewards = torch.tensor(all_rewards(environment, t))
        yield environment.context, environment.expected, rewards


BAD_ACTIONS = (-1, ACTIONS, True, 1.0, None, "1")


# --- agents ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"hidden": [6], "updates": 2, "batch_size": 4, "memory": 8, "learning_rate": 0.01}

# Thompson sampling as in the paper, with several draws.
_PAPER: dict[str, Any] = {
    "encoding": "input", "likelihood": Gaussian(0.5), "scale": 2.0, "exploration": 1.0, "settling": None, "sigma": 0.3,
    "draws": 2, "rho_rate": 3.0, "temperature": 0.5, "optimism": None,
}  # fmt: skip

KINDS: dict[str, Callable[..., Agent]] = {
    "uniform": lambda **kw: Uniform(FEATURES, ACTIONS, **kw),
    "linear": lambda **kw: LinearThompson(FEATURES, ACTIONS, precision=0.5, a=2.0, b=3.0, **kw),
    "thompson, input": lambda **kw: ThompsonSampling(FEATURES, ACTIONS, **{**SMALL, **_PAPER, **kw}),
    "thompson, output": lambda **kw: ThompsonSampling(
        FEATURES, ACTIONS, **{**SMALL, "sigma": 0.2, "prior": Normal(0.4), **kw}
    ),
    "epsilon, input": lambda **kw: EpsilonGreedy(
        FEATURES, ACTIONS, **{**SMALL, "encoding": "input", "epsilon": 0.3, "scale": 2.0, **kw}
    ),
    "epsilon, output": lambda **kw: EpsilonGreedy(FEATURES, ACTIONS, **{**SMALL, "hidden": [5, 4], **kw}),
}
LEARNING = [kind for kind in KINDS if kind != "uniform"]
NEURAL = [kind for kind in LEARNING if kind != "linear"]


def neighbours(agent: Agent, t: int) -> tuple[Tensor, Tensor]:
    """Contexts and, for each action, rewards, by the number of a step."""
    random = torch.Generator().manual_seed(t)
    size = agent.replicas
    return torch.randn(size, FEATURES, generator=random), torch.randn(size, ACTIONS, generator=random)


def live(agent: Agent, steps: Sequence[int]) -> list[list[int]]:
    """Act and observe; gives the actions."""
    chosen = []
    for t in steps:
        contexts, rewards = neighbours(agent, t)
        actions = agent.act_all(contexts)
        agent.observe_all(contexts, actions, [float(row[a]) for row, a in zip(rewards, actions, strict=True)])
        chosen.append(actions)
    return chosen


def snapshot(agent: Agent) -> dict[str, Tensor]:
    counts = {"acted": torch.tensor(agent.acted), "observed": torch.tensor(agent.observed)}
    return {**{name: tensor.clone() for name, tensor in agent.tensors().items()}, **counts}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not different, different


GOOD = [0.1, 0.2, 0.3]
NAN = float("nan")


def layers_of(net: Any) -> list[Any]:
    """The linear layers of the network of an agent, alone or with replicas."""
    return list(getattr(net, "layers", net)[::2])


@torch.no_grad()
def expected_reward(agent: Any, contexts: Tensor, actions: Tensor) -> Tensor:
    """The expected rewards ``[B, replicas]`` by the network at its means, in units of the scale."""
    output = agent.net(agent._inputs(contexts, actions)).reshape(*actions.shape, -1)
    column = actions if agent.encoding == "output" else torch.zeros_like(actions)
    found: Tensor = agent._likelihood.expected(output.gather(-1, column[..., None])[..., 0])
    return found


def greedy_actions(agent: Any, contexts: Tensor) -> list[int]:
    each = [torch.full((1, agent.replicas), action) for action in range(ACTIONS)]
    return torch.stack([expected_reward(agent, contexts[None], action)[0] for action in each]).argmax(0).tolist()


# --- runs ------------------------------------------------------------------------------------------------------------

STEPS, LAST = 14, 9


def start(kind: str) -> tuple[list[Environment], Agent]:
    """A run of two replicas, not yet begun."""
    return [PLACES["outcomes"](seed) for seed in (5, 6)], KINDS[kind](replicas=2, seed=6)


def assert_goes_on(kind: str, checkpoint: Path, whole: Path) -> None:
    """A run that is resumed ends as one that was never stopped."""
    environments, agent = start(kind)
    expected = simulate(environments, agent, STEPS, whole)
    other_environments, other = start(kind)
    assert torch.equal(simulate(other_environments, other, STEPS, checkpoint), expected)
    assert_same(snapshot(agent), snapshot(other))
    assert [each.t for each in other_environments] == [STEPS] * 2
    assert live(agent, range(3)) == live(other, range(3))
    assert checkpoint.read_bytes() == whole.read_bytes()


def done_in(checkpoint: Path) -> tuple[int, int, int, list[int]]:
    tensors, metadata = read_checkpoint(checkpoint)
    return tensors["regret"].shape[1], metadata["acted"], metadata["observed"], metadata["t"]


def be_killed(folder: Path) -> None:
    """Run each kind in a process of its own, which dies between acting and the end of a step."""
    torch.set_num_threads(1)
    simulation._SECONDS = 0.0
    ends = {}
    for kind in KINDS:
        child = os.fork()
        if child == 0:

            def kill(step: int, _: Tensor) -> None:
                if step == LAST + 1:
                    os.kill(os.getpid(), signal.SIGKILL)

            simulate(*start(kind), STEPS, folder / kind, kill)
            os._exit(0)
        ends[kind] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (folder / "ends.json").write_text(json.dumps(ends))
