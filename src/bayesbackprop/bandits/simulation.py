"""Agents in environments: the regret of a run, which can be killed at any moment."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bayesbackprop._errors import Described, check_count, check_type, invalid
from bayesbackprop._files import check_counter, check_same, read, write
from bayesbackprop._signals import interrupt_deferred
from bayesbackprop.bandits.agents import Agent
from bayesbackprop.bandits.environments import Environment
from bayesbackprop.bandits.state import completed

# Between checkpoints.
_SECONDS = 60.0


def simulate(
    environments: Sequence[Environment],
    agent: Agent,
    steps: int,
    checkpoint: str | os.PathLike[str] | None = None,
    watch: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Let each replica of ``agent`` act in its environment.

    An environment may have a ``delay``: a reward is observed so many steps after its action. Those of the last steps
    are still on their way when the run ends; if it goes on from its checkpoint, they arrive.

    Ctrl-C and SIGTERM end it after the running step, as they end :func:`~bayesbackprop.fit`, with a checkpoint.

    Args:
        environments: One for each replica, all with the same delay.
        agent: The agent. It and the environments are used as they are, and changed.
        steps: How many interactions each replica has.
        checkpoint: A file to go on from, if it is there, and to write now and then: a run that was killed goes on with
            the same regret as if it had not been.
        watch: Called after each step with the number of steps taken and the cumulative regret of each replica.

    Returns:
        The cumulative regret ``[replicas, steps]``: the oracle's expected reward less the one that was received.
    """
    steps = check_count("simulate", steps=steps)["steps"]
    check_type("simulate", Agent, "an agent", agent=agent)
    check_type("simulate", Sequence, "a list of environments", environments=environments)
    for environment in environments:
        check_type("simulate", Environment, "a list of environments", environments=environment)
    check_type("simulate", str | os.PathLike | None, "None or a path", checkpoint=checkpoint)
    check_type("simulate", Callable | None, "None or a function", watch=watch)
    if not len(environments) == len(set(map(id, environments))) == agent.replicas:
        raise invalid("environments", "simulate", f"one for each of {agent.replicas} replicas", environments)
    for environment in environments:
        if (environment.features, environment.actions) != (agent.features, agent.actions):
            constraint = f"of {agent.features} features and {agent.actions} actions, as the agent is"
            got = Described(f"{environment.features} and {environment.actions}")
            raise invalid("environments", "simulate", constraint, got)
    delays = {environment.delay for environment in environments}
    if len(delays) > 1:
        raise invalid("environments", "simulate", "of the same delay", Described(f"delays of {sorted(delays)}"))
    regret = torch.zeros(agent.replicas, steps, dtype=torch.float64)
    # What is not observed yet, the oldest first.
    late: deque[_Taken] = deque()
    path = None if checkpoint is None else Path(checkpoint)
    done = _resume(path, agent, environments, regret, late) if path is not None and path.exists() else 0
    written, moment = done, time.monotonic()
    with interrupt_deferred() as interrupted:
        for t in range(done, steps):
            if interrupted():
                break
            contexts, best = [e.context for e in environments], [e.best for e in environments]
            late.append(_take(environments, agent.act_all(contexts)))
            lost = torch.tensor(best, dtype=torch.float64) - torch.tensor(late[-1].rewards, dtype=torch.float64)
            if len(late) > environments[0].delay:
                agent.observe_all(*late.popleft())
            regret[:, t] = lost + (regret[:, t - 1] if t else 0)
            done = t + 1
            if watch is not None:
                watch(done, regret[:, t])
            if path is not None and time.monotonic() - moment > _SECONDS:
                _write(path, agent, environments, regret[:, :done], late)
                written, moment = done, time.monotonic()
        if path is not None and written < done:
            _write(path, agent, environments, regret[:, :done], late)
    return regret


class _Taken(NamedTuple):
    """What each replica did, where, and what it got."""

    contexts: list[Tensor]
    actions: list[int]
    rewards: list[float]


def _take(environments: Sequence[Environment], actions: list[int]) -> _Taken:
    contexts = [e.context for e in environments]
    return _Taken(contexts, actions, [e.step(action) for e, action in zip(environments, actions, strict=True)])


def _about(agent: Agent, environments: Sequence[Environment]) -> dict[str, object]:
    described = [environment.described() for environment in environments]
    return {"agent": type(agent).__name__, "arguments": agent.described()["arguments"], "environments": described}


def _write(
    path: Path, agent: Agent, environments: Sequence[Environment], regret: Tensor, late: Sequence[_Taken]
) -> None:
    """The agent, the regret and the actions whose rewards are late in one file, always of the same step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"agent.{name}": tensor for name, tensor in agent.tensors().items()}
    if late:
        tensors["late"] = torch.tensor([taken.actions for taken in late])
    counts = {"acted": agent.acted, "observed": agent.observed, "t": [e.t for e in environments]}
    write(path, "checkpoint", {**tensors, "regret": regret}, {"about": _about(agent, environments), **counts})


def _resume(path: Path, agent: Agent, environments: Sequence[Environment], regret: Tensor, late: deque[_Taken]) -> int:
    """Become what the file says. What a late action met and got is what the environment gives it again."""
    file = read(path, "checkpoint", "simulate")
    about = file.contents.get("about")
    if isinstance(about, dict) and isinstance(about.get("arguments"), dict):
        about = {**about, "arguments": completed(type(agent), about["arguments"])}
    if about != _about(agent, environments):
        constraint = "of the same agent and environments; or choose another"
        raise invalid("checkpoint", "simulate", constraint, Described(f"{path}, of {about}"))
    with file.understanding():
        past, times = file.tensors["regret"], [check_counter("t", t) for t in file.contents["t"]]
        done = min(past.shape[1], regret.shape[1])
        if len(times) != agent.replicas:
            raise ValueError(f"times {times!r:.80}")
        check_same("simulate", {"regret": past}, {"regret": regret.new_empty(agent.replicas, past.shape[1])})
        waiting = min(environments[0].delay, past.shape[1])
        actions = file.tensors.get("late", torch.zeros(0, agent.replicas, dtype=torch.int64))
        expected = torch.zeros(waiting, agent.replicas, dtype=torch.int64)
        check_same("simulate", {"late": actions}, {"late": expected})
        if waiting and (min(times) < waiting or not 0 <= int(actions.min()) <= int(actions.max()) < agent.actions):
            raise ValueError("late actions that cannot have been")
        others = ("regret", "late")
        known = {name.removeprefix("agent."): tensor for name, tensor in file.tensors.items() if name not in others}
        agent.restore(known, file.contents["acted"], file.contents["observed"])
    regret[:, :done] = past[:, :done]
    for environment, t in zip(environments, times, strict=True):
        environment.t = t - waiting
    late.extend(_take(environments, row) for row in actions.tolist())
    return done
