"""Agents in environments: the regret of a run, which can be killed at any moment."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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

    Ctrl-C and SIGTERM end it after the running step, as they end :func:`~bayesbackprop.fit`, with a checkpoint.

    Args:
        environments: One for each replica.
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
    regret = torch.zeros(agent.replicas, steps, dtype=torch.float64)
    path = None if checkpoint is None else Path(checkpoint)
    done = _resume(path, agent, environments, regret) if path is not None and path.exists() else 0
    written, moment = done, time.monotonic()
    with interrupt_deferred() as interrupted:
        for t in range(done, steps):
            if interrupted():
                break
            contexts, best = [e.context for e in environments], [e.best for e in environments]
            actions = agent.act_all(contexts)
            rewards = [e.step(action) for e, action in zip(environments, actions, strict=True)]
            agent.observe_all(contexts, actions, rewards)
            lost = torch.tensor(best, dtype=torch.float64) - torch.tensor(rewards, dtype=torch.float64)
            regret[:, t] = lost + (regret[:, t - 1] if t else 0)
            done = t + 1
            if watch is not None:
                watch(done, regret[:, t])
            if path is not None and time.monotonic() - moment > _SECONDS:
                _write(path, agent, environments, regret[:, :done])
                written, moment = done, time.monotonic()
        if path is not None and written < done:
            _write(path, agent, environments, regret[:, :done])
    return regret


def _about(agent: Agent, environments: Sequence[Environment]) -> dict[str, object]:
    described = [environment.described() for environment in environments]
    return {"agent": type(agent).__name__, "arguments": agent.described()["arguments"], "environments": described}


def _write(path: Path, agent: Agent, environments: Sequence[Environment], regret: Tensor) -> None:
    """The agent and the regret in one file, so that they are always of the same step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"agent.{name}": tensor for name, tensor in agent.tensors().items()}
    counts = {"acted": agent.acted, "observed": agent.observed, "t": [e.t for e in environments]}
    write(path, "checkpoint", {**tensors, "regret": regret}, {"about": _about(agent, environments), **counts})


def _resume(path: Path, agent: Agent, environments: Sequence[Environment], regret: Tensor) -> int:
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
        known = {name.removeprefix("agent."): tensor for name, tensor in file.tensors.items() if name != "regret"}
        agent.restore(known, file.contents["acted"], file.contents["observed"])
    regret[:, :done] = past[:, :done]
    for environment, t in zip(environments, times, strict=True):
        environment.t = t
    return done
