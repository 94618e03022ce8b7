"""Thompson sampling against epsilon-greedy (section 5.3 of the paper): figure 6, and the other environments."""

import functools
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch

from bayesbackprop import bandits
from bayesbackprop._errors import check_count, invalid
from bayesbackprop.bandits import Agent, Environment
from bayesbackprop.likelihoods import Gaussian
from bayesbackprop.training import interrupt_deferred
from bayesbackprop_paper.environments import (
    Clicks,
    Items,
    Wheel,
    adult,
    covertype,
    delayed,
    digits,
    mushroom,
    switched,
)
from bayesbackprop_paper.experiments.figures import finish, published, start
from bayesbackprop_paper.experiments.records import read_rows, write_line, write_rows

ENVIRONMENTS: Mapping[str, Callable[[int], Environment]] = {
    "mushroom": mushroom,
    "adult": adult,
    "covertype": covertype,
    **{f"wheel-{delta}": functools.partial(Wheel, delta) for delta in (0.5, 0.7, 0.9, 0.95, 0.99)},
    "digits": digits,
    "delayed": delayed,
    "clicks": Clicks,
    "items": Items,
    "switched": switched,
}

# How the epsilon-greedy agents are called.
_EPSILONS = {"greedy": 0.0, "epsilon-1": 0.01, "epsilon-5": 0.05}
AGENTS = ("bbb", *_EPSILONS, "linear", "uniform")

# Those of figure 6: plain networks are one batch, whatever their epsilon.
GROUPS: tuple[tuple[str, ...], ...] = (("bbb",), tuple(_EPSILONS))

# The agents of figure 6: the colour, the name, and the column of the published curve.
STYLE = {
    "epsilon-5": ("#c0392b", "5 % greedy", "eps_greedy_5pct"),
    "epsilon-1": ("#e67e22", "1 % greedy", "eps_greedy_1pct"),
    "greedy": ("#7f8c8d", "greedy", "greedy"),
    "bbb": ("#3f51b5", "Bayes by Backprop", "bayes_by_backprop"),
}

# Seconds until a signal is noticed while no job has news.
_PATIENCE = 0.2

# The size of a large reward, for the greedy agents, where it is not 1.
_SCALES = {"mushroom": 10.0, **{name: 10.0 for name in ENVIRONMENTS if name.startswith("wheel")}}


@dataclass(frozen=True)
class Job:
    """Several runs of one kind of agent side by side, one for each seed."""

    environment: str
    agents: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    updates: int

    def __post_init__(self) -> None:
        if self.environment not in ENVIRONMENTS:
            raise invalid("environment", "Job", f"one of {', '.join(ENVIRONMENTS)}", self.environment)
        for agent in self.agents:
            if agent not in AGENTS:
                raise invalid("agent", "Job", f"one of {', '.join(AGENTS)}", agent)
        if len(self.agents) > 1 and not set(self.agents) <= set(_EPSILONS):
            raise invalid("agents", "Job", f"one, or some of {', '.join(_EPSILONS)}", self.agents)
        if not self.agents or not self.seeds:
            raise invalid("agents", "Job", "at least one, with a seed", (self.agents, self.seeds))
        check_count("Job", steps=self.steps, updates=self.updates)

    @property
    def name(self) -> str:
        """For its folder."""
        first, last = self.seeds[0], self.seeds[-1]
        return f"{self.environment}-{'+'.join(self.agents)}-{self.updates}updates-seeds{first}to{last}"

    @property
    def runs(self) -> list[tuple[str, int]]:
        """The agent and the seed of each replica."""
        return [(agent, seed) for agent in self.agents for seed in self.seeds]


def jobs_of(
    environment: str, groups: Iterable[tuple[str, ...]], seeds: tuple[int, ...], steps: int, updates: int
) -> list[Job]:
    """The runs of groups of agents; of Thompson sampling each is a job, for an agent alone is quicker."""
    return [
        Job(environment, group, some, steps, updates)
        for group in groups
        for some in ([(seed,) for seed in seeds] if group == ("bbb",) else [seeds])
    ]


@dataclass(frozen=True)
class Point:
    """The cumulative regret of an agent after a number of steps."""

    agent: str
    seed: int
    step: int
    regret: float


# Thompson sampling has the defaults of its class. The greedy agents are the paper's and learn by the squared error, at
# a rate that was chosen on seeds 100 to 102, which are not those that are reported (docs/decisions/bandits.md).
_GREEDY: Mapping[str, Any] = {
    "encoding": "input",
    "likelihood": Gaussian(math.sqrt(0.5)),
    "memory": 4096,
    "learning_rate": 3e-4,
}

# What the agents of figure 6 are, for the pages that show them beside the paper's.
OURS = (
    f"our default agent (temperature {bandits.ThompsonSampling.temperature:g}, a linear regression beside the network)"
)
DIFFERENCES = (
    f"Ours is {OURS}: not the paper's cost, which is that of temperature 1. It also has an output for each action and "
    f"a memory of {bandits.ThompsonSampling.memory:,}. The greedy agents have the paper's kind of settings: the action "
    f"as an input, a memory of {_GREEDY['memory']:,}, a rate of {_GREEDY['learning_rate']:g}, and no regression. "
    f"Unless the command says otherwise, all learn from {bandits.ThompsonSampling.updates} minibatches a step; the "
    "paper's learn from 64."
)


def make(job: Job) -> tuple[Agent, list[Environment]]:
    """The agents of a job, and where they act."""
    environments = [ENVIRONMENTS[job.environment](seed) for _, seed in job.runs]
    shared: dict[str, Any] = {
        "features": environments[0].features,
        "actions": environments[0].actions,
        "replicas": len(environments),
        "seed": job.seeds[0],
    }
    if job.agents == ("uniform",):
        return bandits.Uniform(**shared), environments
    if job.agents == ("linear",):
        return bandits.LinearThompson(**shared), environments
    shared |= {"updates": job.updates, **of_actions(environments[0])}
    if job.agents == ("bbb",):
        return bandits.ThompsonSampling(**shared), environments
    shared |= {**_GREEDY, "scale": _SCALES.get(job.environment, 1.0)}
    epsilon = [_EPSILONS[agent] for agent, _ in job.runs]
    return bandits.EpsilonGreedy(**shared, epsilon=epsilon), environments


def of_actions(environment: Environment) -> dict[str, Any]:
    """The arguments by which a neural agent knows what its actions are, if there are numbers that say so."""
    features = environment.action_features
    return {} if features is None else {"encoding": "input", "action_features": features.tolist()}


def run(job: Job, folder: Path, says: Callable[[str, int, float], None] | None = None) -> list[Point]:
    """A job from wherever it is, on one core; ``says`` hears its name, its step and its mean regret."""
    torch.set_num_threads(1)
    agent, environments = make(job)
    regret = bandits.simulate(
        environments,
        agent,
        job.steps,
        folder / job.name / "checkpoint.safetensors",
        None if says is None else lambda step, now: says(job.name, step, float(now.mean())),
    )
    return [
        Point(name, seed, step, float(row[step - 1]))
        for (name, seed), row in zip(job.runs, regret, strict=True)
        for step in milestones(job.steps)
    ]


def milestones(steps: int) -> list[int]:
    """The steps to record: those of the published curve that the run reaches, and its end."""
    known = [int(step) for step in published("bandit_regret")["step"] if step <= steps]
    return known if known[-1:] == [steps] else [*known, steps]


def run_all(jobs: Sequence[Job], folder: Path, cores: int, says: Callable[[str, int, float], None]) -> list[Point]:
    """All jobs, each in a process of its own, so many at a time. However it ends, each leaves a checkpoint of its step.

    Raises:
        RuntimeError: A process was killed. The same call goes on where each job was.
    """
    context = multiprocessing.get_context("spawn")
    waiting, running = list(jobs), dict[Connection, tuple[Job, BaseProcess]]()
    found: dict[Job, list[Point]] = {}
    with interrupt_deferred() as interrupted:
        try:
            while (waiting or running) and not interrupted():
                while waiting and len(running) < cores:
                    job = waiting.pop(0)
                    # A pipe for each: a process that is killed while it writes harms no other.
                    ours, theirs = context.Pipe(duplex=False)
                    process: BaseProcess = context.Process(target=_run_and_tell, args=(job, folder, theirs))
                    process.start()
                    theirs.close()
                    running[ours] = job, process
                for pipe in _ready(running, _PATIENCE):
                    job, process = running[pipe]
                    try:
                        news = pipe.recv()
                    except EOFError:
                        del running[pipe]
                        process.join()
                        if job not in found:
                            raise RuntimeError(_stopped(job, process.exitcode)) from None
                        continue
                    if isinstance(news, Exception):
                        raise news
                    if isinstance(news, list):
                        found[job] = news
                    else:
                        says(job.name, *news)
        finally:
            _end(running)
    return [point for job in jobs for point in found[job]]


def _ready(running: Mapping[Connection, object], seconds: float | None = None) -> list[Connection]:
    """The pipes with news, or whose process is over."""
    return cast(list[Connection], wait(list(running), seconds))


def _end(running: dict[Connection, tuple[Job, BaseProcess]]) -> None:
    """Let each process finish its step and write its checkpoint; a second signal kills those that are left."""
    try:
        for _, process in running.values():
            process.terminate()
        while running:
            for pipe in _ready(running):
                try:
                    pipe.recv()  # a process may wait until it is heard
                except EOFError:
                    running.pop(pipe)[1].join()
    finally:
        for _, process in running.values():
            process.kill()


def _stopped(job: Job, code: int | None) -> str:
    why = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return f"The process of {job.name} was stopped ({why}). The same command goes on where it was."


def _run_and_tell(job: Job, folder: Path, pipe: Connection) -> None:
    """Run a job; send its steps and regrets, and at the end its points or what went wrong."""

    def says(_: str, step: int, regret: float) -> None:
        if step % 20 == 0 or step == job.steps:
            try:
                pipe.send((step, regret))
            except OSError:  # nobody listens any more: the process that began this one is gone
                signal.raise_signal(signal.SIGTERM)

    try:
        pipe.send(run(job, folder, says))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        pipe.send(error)


def write(path: Path, points: Iterable[Point]) -> None:
    """Write ``fig6.csv``, or another file of regrets."""
    write_rows(path, Point, points)


def read(path: Path) -> list[Point]:
    """What :func:`write` wrote."""
    return read_rows(path, Point)


def means(points: Iterable[Point]) -> dict[str, dict[int, float]]:
    """The mean regret over the seeds, by agent and step."""
    found: dict[str, dict[int, list[float]]] = {}
    for point in points:
        found.setdefault(point.agent, {}).setdefault(point.step, []).append(point.regret)
    return {agent: {step: mean(each) for step, each in steps.items()} for agent, steps in found.items()}


def ends(points: Iterable[Point]) -> dict[str, list[float]]:
    """The regrets after the last step, one for each seed, by agent."""
    points = list(points)
    last = max((point.step for point in points), default=0)
    found: dict[str, list[float]] = {}
    for point in points:
        if point.step == last:
            found.setdefault(point.agent, []).append(point.regret)
    return found


def fig6(points: Sequence[Point], results: Path, command: str) -> str:
    """The regret of each agent over the published curves."""
    figure, axes = start("step", "cumulative regret")
    curves, theirs = means(points), published("bandit_regret")
    said: list[str] = []
    for agent, (colour, label, column) in STYLE.items():
        if agent not in curves:
            continue
        steps, regrets = zip(*sorted(curves[agent].items()), strict=True)
        axes.plot(steps, regrets, color=colour, label=label)
        axes.plot(theirs["step"], theirs[column], color=colour, linestyle=":", label=f"{label}, paper")
        at = dict(zip(theirs["step"].astype(int).tolist(), theirs[column].tolist(), strict=True)).get(steps[-1])
        said.append(f"{label} {regrets[-1]:.0f}" + ("" if at is None else f" (paper {at:.0f})"))
    axes.set_xscale("log")
    axes.set_yscale("log")
    line = f"Mushrooms: cumulative regret after {max(p.step for p in points)} steps: {', '.join(said)}."
    write(results / "fig6.csv", points)
    write_line(results / "fig6.json", line, command)
    return finish(figure, axes, results / "fig6", line)
