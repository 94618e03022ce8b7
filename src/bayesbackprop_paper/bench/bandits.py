"""Bandits beside other libraries: the same environments in the same order, final regret and time."""

import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesbackprop.bandits import Agent, simulate
from bayesbackprop_paper.experiments.bandit import ENVIRONMENTS, Job, make

ENVIRONMENTS_OF_PEERS = ("mushroom", "adult", "covertype", "wheel-0.95")
OURS = ("bbb", "linear", "uniform")


@dataclass(frozen=True)
class Row:
    """What an agent lost, and how long it took for one run, over the seeds."""

    environment: str
    agent: str
    steps: int
    seeds: int
    regret: float
    spread: float
    seconds: float


class _Peer(Agent):
    """An agent of another library: what predicts an action, after a first reward, and what learns from one."""

    def __init__(
        self,
        features: int,
        actions: int,
        predict: Callable[[Any], int],
        learn: Callable[[Any, int, float], None],
        seed: int,
    ) -> None:
        super().__init__(features, actions, seed=seed)
        self._predict, self._take = predict, learn

    def _choose(self, contexts: Tensor) -> list[int]:
        if not self.observed:  # they refuse to predict from nothing
            return torch.randint(self.actions, (1,), generator=self._random(0)).tolist()
        return [self._predict(contexts.numpy())]

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        self._take(contexts.numpy(), int(actions[0]), float(rewards[0]))

    def _tensors(self) -> dict[str, Tensor]:
        return {}


def _mabwiser(policy: str) -> Callable[[int, int, int], Agent]:
    def build(features: int, actions: int, seed: int) -> Agent:
        library: Any = importlib.import_module("mabwiser.mab")
        bandit = library.MAB(list(range(actions)), getattr(library.LearningPolicy, policy)(), seed=seed)
        fit = iter([bandit.fit])

        def learn(x: Any, action: int, reward: float) -> None:
            next(fit, bandit.partial_fit)([action], [reward], x)

        return _Peer(features, actions, lambda x: int(bandit.predict(x)), learn, seed)

    return build


def _contextualbandits(policy: str) -> Callable[[int, int, int], Agent]:
    def build(features: int, actions: int, seed: int) -> Agent:
        library: Any = importlib.import_module("contextualbandits.online")
        bandit = getattr(library, policy)(actions, random_state=seed + 1, njobs=1)  # it refuses 0

        def learn(x: Any, action: int, reward: float) -> None:
            bandit.partial_fit(x, np.array([action]), np.array([reward]))

        return _Peer(features, actions, lambda x: int(bandit.predict(x)[0]), learn, seed)

    return build


# The package, and what it enters.
PEERS: Mapping[str, Mapping[str, Callable[[int, int, int], Agent]]] = {
    "mabwiser": {f"mabwiser {policy}": _mabwiser(policy) for policy in ("LinTS", "LinUCB")},
    "contextualbandits": {f"contextualbandits {policy}": _contextualbandits(policy) for policy in ("LinTS", "LinUCB")},
}


def compare(
    environments: Sequence[str], peers: Iterable[str], steps: int, updates: int, seeds: int, says: Callable[[str], None]
) -> list[Row]:
    """Each agent in each environment, one after the other, on one core."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    contenders = {name: build for peer in peers for name, build in PEERS[peer].items()}
    for environment in environments:
        for name in (*OURS, *contenders):
            says(f"{environment}: {name}")
            regrets: list[float] = []
            started = time.perf_counter()
            for seed in range(seeds):
                if name in OURS:
                    agent, places = make(Job(environment, (name,), (seed,), steps, updates))
                else:
                    places = [ENVIRONMENTS[environment](seed)]
                    agent = contenders[name](places[0].features, places[0].actions, seed)
                regrets.append(float(simulate(places, agent, steps)[0, -1]))
            seconds = (time.perf_counter() - started) / seeds
            spread = stdev(regrets) if seeds > 1 else float("nan")
            rows.append(Row(environment, name, steps, seeds, mean(regrets), spread, seconds))
    return rows
