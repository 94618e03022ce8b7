"""Bandits beside other libraries: each agent in the same environments, with the same contexts and coins.

Every run of an agent is a line of a file, written when it is over; what has a line is not run again.
"""

import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesbackprop import bandits
from bayesbackprop._version import __version__
from bayesbackprop.bandits import Agent, Environment, simulate
from bayesbackprop_paper.experiments.bandit import ENVIRONMENTS, of_actions
from bayesbackprop_paper.experiments.records import locked

COMPARED = (
    *("mushroom", "adult", "covertype", "wheel-0.95", "wheel-0.99"),
    *("digits", "delayed", "clicks", "items", "switched"),
)

_OURS = "bayesbackprop"
_FILE = "bandits.jsonl"

_Numbers = NDArray[np.float32]


# --- agents ----------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """An agent that is compared: its package, how it is made for an environment with a seed, and by which options.

    Some are ``tuned``: their options are not the defaults, and were chosen on some of these environments.
    """

    package: str
    build: Callable[[Environment, int], Agent]
    options: str = ""
    tuned: bool = False

    @property
    def version(self) -> str:
        """Of the package, which is installed."""
        return __version__ if self.package == _OURS else metadata.version(self.package)


def is_installed(package: str) -> bool:
    """Whether agents of this package can be run here."""
    return package == _OURS or importlib.util.find_spec(package) is not None


def _ours(kind: type[Agent]) -> Entry:
    """An agent of ours, with its defaults; one with a network hears of the features of actions, if there are any."""

    def build(environment: Environment, seed: int) -> Agent:
        arguments = of_actions(environment) if kind in (bandits.ThompsonSampling, bandits.EpsilonGreedy) else {}
        return kind(environment.features, environment.actions, seed=seed, **arguments)

    return Entry(_OURS, build)


class _Peer(Agent):
    """An agent of another library: what chooses an action, and what learns from a reward."""

    def __init__(
        self,
        environment: Environment,
        seed: int,
        predict: Callable[[_Numbers], int],
        learn: Callable[[_Numbers, int, float], None],
        *,
        from_nothing: bool = False,
    ) -> None:
        super().__init__(environment.features, environment.actions, seed=seed)
        self._predict, self._take, self._from_nothing = predict, learn, from_nothing

    def _choose(self, contexts: Tensor) -> list[int]:
        if not self.observed and not self._from_nothing:  # it refuses to predict before its first reward
            return torch.randint(self.actions, (1,), generator=self._random(2 * self.acted)).tolist()
        return [self._predict(contexts.numpy())]

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        self._take(contexts.numpy(), int(actions[0]), float(rewards[0]))

    def _tensors(self) -> dict[str, Tensor]:
        return {}


def _said(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _mabwiser(policy: str, *, tuned: bool = False, **options: Any) -> Entry:
    def build(environment: Environment, seed: int) -> Agent:
        library: Any = importlib.import_module("mabwiser.mab")
        chosen = getattr(library.LearningPolicy, policy)(**options)
        bandit = library.MAB(list(range(environment.actions)), chosen, seed=seed)
        fit = iter([bandit.fit])

        def learn(x: _Numbers, action: int, reward: float) -> None:
            next(fit, bandit.partial_fit)([action], [reward], x)

        return _Peer(environment, seed, lambda x: int(bandit.predict(x)), learn)

    return Entry("mabwiser", build, _said(options), tuned)


def _contextualbandits(policy: str, *, tuned: bool = False, **options: Any) -> Entry:
    def build(environment: Environment, seed: int) -> Agent:
        library: Any = importlib.import_module("contextualbandits.online")
        # It refuses the seed 0.
        bandit = getattr(library, policy)(environment.actions, random_state=seed + 1, njobs=1, **options)

        def learn(x: _Numbers, action: int, reward: float) -> None:
            bandit.partial_fit(x, np.array([action]), np.array([reward]))

        return _Peer(environment, seed, lambda x: int(bandit.predict(x)[0]), learn)

    return Entry("contextualbandits", build, _said(options), tuned)


def _vowpalwabbit(options: str, *, tuned: bool = False) -> Entry:
    """Costs of action-dependent features, which interact with those of the context.

    An action is its number and, where there are any, the features that say what it is. Its probability is part of what
    is learnt; rewards come in the order of their actions.
    """

    def build(environment: Environment, seed: int) -> Agent:
        library: Any = importlib.import_module("vowpalwabbit")
        bandit = library.Workspace(f"--cb_explore_adf {options} -q CA --quiet --random_seed {seed}")
        random, probabilities = np.random.default_rng(seed), deque[float]()
        described = environment.action_features
        features = [[]] * environment.actions if described is None else described.tolist()
        actions = [
            " ".join([f"|A action{action}", *(f"feature{i}:{value:.6g}" for i, value in enumerate(values))])
            for action, values in enumerate(features)
        ]

        def lines(x: _Numbers) -> list[str]:
            return ["shared |C " + " ".join(f"{i}:{v:.6g}" for i, v in enumerate(x[0].tolist()) if v), *actions]

        def predict(x: _Numbers) -> int:
            each = np.array(bandit.predict(lines(x)))
            action = int(random.choice(len(each), p=each / each.sum()))
            probabilities.append(each[action] / each.sum())
            return action

        def learn(x: _Numbers, action: int, reward: float) -> None:
            known = lines(x)
            known[1 + action] = f"{action}:{-reward:.6g}:{probabilities.popleft():.6g} {known[1 + action]}"
            bandit.learn(known)

        return _Peer(environment, seed, predict, learn, from_nothing=True)

    return Entry("vowpalwabbit", build, options, tuned)


OURS: Mapping[str, Entry] = {
    "ThompsonSampling": _ours(bandits.ThompsonSampling),
    "LinearThompson": _ours(bandits.LinearThompson),
    "EpsilonGreedy": _ours(bandits.EpsilonGreedy),
    "Uniform": _ours(bandits.Uniform),
}
# With their defaults, and with options chosen on five of the environments with the seeds 200 and 201, which are not
# reported (docs/decisions/bandit_peers.md).
PEERS: Mapping[str, Entry] = {
    "vowpalwabbit bag": _vowpalwabbit("--bag 5"),
    "vowpalwabbit bag, tuned": _vowpalwabbit("--bag 10 -l 1", tuned=True),
    "vowpalwabbit squarecb": _vowpalwabbit("--squarecb"),
    "vowpalwabbit squarecb, tuned": _vowpalwabbit("--squarecb --gamma_scale 100 -l 1", tuned=True),
    "contextualbandits LinTS": _contextualbandits("LinTS"),
    "contextualbandits LinTS, tuned": _contextualbandits("LinTS", sample_from="ci", v_sq=0.1, tuned=True),
    "contextualbandits LinUCB": _contextualbandits("LinUCB"),
    "mabwiser LinTS": _mabwiser("LinTS"),
    "mabwiser LinTS, tuned": _mabwiser("LinTS", alpha=0.1, tuned=True),
    "mabwiser LinUCB": _mabwiser("LinUCB"),
    "mabwiser LinUCB, tuned": _mabwiser("LinUCB", alpha=0.25, tuned=True),
}
AGENTS: Mapping[str, Entry] = {**OURS, **PEERS}


# --- runs ------------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A run of an agent; its limit is in seconds of a core."""

    environment: str
    agent: str
    seed: int
    steps: int
    limit: float


@dataclass(frozen=True)
class Found:
    """What a run came to: the regret after ``done`` steps, fewer than ``steps`` if it was too slow or failed."""

    environment: str
    agent: str
    seed: int
    steps: int
    done: int
    regret: float
    seconds: float
    version: str
    error: str = ""

    def answers(self, job: Job) -> bool:
        """Whether ``job`` needs no run; one that was stopped may have more time now."""
        same = (self.environment, self.agent, self.seed, self.steps) == job[:4]
        return same and (self.done == self.steps or bool(self.error) or self.seconds >= job.limit)


class _TooSlowError(Exception):
    pass


def run(job: Job) -> Found:
    """Run a job here, on one thread. What another library raises is part of what is found."""
    torch.set_num_threads(1)
    entry, place = AGENTS[job.agent], ENVIRONMENTS[job.environment](job.seed)
    done, lost, error, started = 0, 0.0, "", time.process_time()

    def watch(step: int, regret: Tensor) -> None:
        nonlocal done, lost
        done, lost = step, float(regret[0])
        if step < job.steps and time.process_time() - started > job.limit:
            raise _TooSlowError

    try:
        with warnings.catch_warnings():
            if entry.package != _OURS:
                warnings.simplefilter("ignore")
            agent = entry.build(place, job.seed)
            started = time.process_time()  # the import of a library does not count
            simulate([place], agent, job.steps, watch=watch)
    except _TooSlowError:
        pass
    except Exception as problem:
        if entry.package == _OURS:
            raise
        error = f"{type(problem).__name__}: {problem}"
    seconds = time.process_time() - started
    return Found(*job[:4], done, lost, seconds, entry.version, error)


def run_all(jobs: Sequence[Job], folder: Path, cores: int) -> None:
    """Run the jobs that have no line in ``folder`` yet, in so many processes of one thread each.

    Raises:
        RuntimeError: A process failed or was killed. The same call goes on where it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    past = read(folder)
    missing = [job for job in jobs if not any(found.answers(job) for found in past)]
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # for the new processes
    context = multiprocessing.get_context("spawn")
    taken = context.Value("q", 0)
    processes = [
        context.Process(target=_work, args=(missing, taken, folder), daemon=True)
        for _ in range(min(cores, len(missing)))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if codes := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"A process ended with the code {codes[0]}. The same command goes on where it was.")


def _work(jobs: Sequence[Job], taken: Any, folder: Path) -> None:
    """Run the next job that nobody has taken, until there is none, or nobody who asked for it."""
    parent = multiprocessing.parent_process()
    while parent is None or parent.is_alive():
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(jobs):
            return
        _record(jobs[number], folder)


def _record(job: Job, folder: Path) -> None:
    found = run(job)
    # On a line of its own, whatever a process that was killed left before it.
    with locked(folder), (folder / _FILE).open("a") as file:
        file.write("\n" + json.dumps(asdict(found)) + "\n")
    how = f", stopped after {found.done} steps {found.error}" if found.done < found.steps else ""
    said = f"{job.environment}, {job.agent}, seed {job.seed}: {found.regret:.0f} in {found.seconds:.1f} s{how}"
    print(said, file=sys.stderr, flush=True)


def read(folder: Path) -> list[Found]:
    """The runs that have a line in ``folder``, of each the last."""
    path, found = folder / _FILE, dict[tuple[Any, ...], Found]()
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            each = Found(**json.loads(line))
        except (ValueError, TypeError):  # nothing, or what was being written when the process was killed
            continue
        found[each.environment, each.agent, each.seed, each.steps] = each
    return list(found.values())


def jobs_of(
    environments: Iterable[str], agents: Sequence[str], seeds: Sequence[int], steps: int, limit: float
) -> list[Job]:
    """Every agent with every seed in every environment."""
    return [Job(e, a, seed, steps, limit) for e in environments for a in agents for seed in seeds]
