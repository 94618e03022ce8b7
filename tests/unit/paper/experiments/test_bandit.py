"""The bandit experiment: jobs, milestones and Figure 6."""

import csv
import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bandit_jobs import REGRETS, points, serial
from bayesbackprop import bandits
from bayesbackprop._files import read_checkpoint
from bayesbackprop.training import TerminatedError
from bayesbackprop_paper import data
from bayesbackprop_paper.data import Mushrooms
from bayesbackprop_paper.environments import Wheel
from bayesbackprop_paper.experiments import bandit
from bayesbackprop_paper.experiments.bandit import Job, Point
from bayesbackprop_paper.experiments.figures import published
from processes import FORKED

pytestmark = pytest.mark.identities

WHEEL = Job("wheel-0.5", ("uniform",), (3, 4), 120, 1)


# --- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nowhere", ("bbb",), (0,), 1, 1), "environment"),
        (("mushroom", ("nobody",), (0,), 1, 1), "agent"),
        (("mushroom", ("bbb", "greedy"), (0,), 1, 1), "agents"),
        (("mushroom", ("uniform", "linear"), (0,), 1, 1), "agents"),
        (("mushroom", (), (0,), 1, 1), "agents"),
        (("mushroom", ("bbb",), (), 1, 1), "agents"),
        (("mushroom", ("bbb",), (0,), 0, 1), "steps"),
        (("mushroom", ("bbb",), (0,), 1, 0), "updates"),
    ],
)
def test_a_job_that_cannot_be_done_is_refused(arguments: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"The '{named}' parameter of Job must be"):
        Job(*arguments)


def test_the_name_of_a_job_leaves_out_only_its_length() -> None:
    jobs = [
        WHEEL,
        Job("wheel-0.7", ("uniform",), (3, 4), 120, 1),
        Job("wheel-0.5", ("linear",), (3, 4), 120, 1),
        Job("wheel-0.5", ("uniform",), (3, 5), 120, 1),
        Job("wheel-0.5", ("uniform",), (4,), 120, 1),
        Job("wheel-0.5", ("uniform",), (3, 4), 120, 2),
    ]
    assert len({job.name for job in jobs}) == len(jobs)
    assert Job("wheel-0.5", ("uniform",), (3, 4), 500, 1).name == WHEEL.name


@pytest.mark.parametrize(
    ("agents", "kind"),
    [
        (("bbb",), bandits.ThompsonSampling),
        (("greedy", "epsilon-1", "epsilon-5"), bandits.EpsilonGreedy),
        (("epsilon-5",), bandits.EpsilonGreedy),
        (("linear",), bandits.LinearThompson),
        (("uniform",), bandits.Uniform),
    ],
)
def test_each_agent_has_each_seed(agents: tuple[str, ...], kind: type) -> None:
    job = Job("wheel-0.9", agents, (7, 8), 10, 3)
    agent, environments = bandit.make(job)
    made: Any = agent
    assert type(agent) is kind
    assert (agent.features, agent.actions, agent.replicas, agent.seed) == (2, 5, 2 * len(agents), 7)
    assert job.runs == [(name, seed) for name in agents for seed in (7, 8)]
    assert [environment.seed for environment in environments] == [7, 8] * len(agents)
    assert all(isinstance(each, Wheel) and each.delta == 0.9 for each in environments)
    if kind is bandits.EpsilonGreedy:
        assert made.epsilon == [{"greedy": 0, "epsilon-1": 0.01, "epsilon-5": 0.05}[name] for name, _ in job.runs]
    if "bbb" in agents or kind is bandits.EpsilonGreedy:
        assert made.updates == 3


def test_environments_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wheel-0.5", "wheel-0.7", "wheel-0.9", "wheel-0.95", "wheel-0.99"):
        made: Any = bandit.ENVIRONMENTS[name](5)
        assert (f"wheel-{made.delta}", made.seed) == (name, 5)
    monkeypatch.setattr(data, "mushroom", lambda: Mushrooms(torch.eye(4), torch.arange(4) > 1))
    assert bandit.ENVIRONMENTS["mushroom"](6).described()["seed"] == 6
    sizes = {"digits": (64, 10), "delayed": (64, 10), "clicks": (10, 10), "items": (5, 100), "switched": (64, 10)}
    for name, size in sizes.items():
        made = bandit.ENVIRONMENTS[name](5)
        assert (made.features, made.actions, made.seed, made.delay) == (*size, 5, 100 if name == "delayed" else 0)


@pytest.mark.parametrize("agent", ["bbb", "greedy"])
def test_agents_with_a_network_know_what_their_actions_are(agent: str) -> None:
    made: Any
    made, (environment,) = bandit.make(Job("items", (agent,), (3,), 10, 1))
    assert environment.action_features is not None
    assert (made.encoding, made.action_features) == ("input", environment.action_features.tolist())
    made, _ = bandit.make(Job("clicks", (agent,), (3,), 10, 1))
    assert made.action_features is None


def test_milestones_are_those_of_the_paper_and_the_end() -> None:
    steps = published("bandit_regret")["step"].astype(int).tolist()
    assert bandit.milestones(50) == [50]
    assert bandit.milestones(100) == [100]
    assert bandit.milestones(250) == [100, 200, 250]
    assert bandit.milestones(steps[-1]) == steps
    assert bandit.milestones(steps[-1] + 1) == [*steps, steps[-1] + 1]
    assert bandit.milestones(steps[-1] - 1) == [*steps[:-1], steps[-1] - 1]


def test_a_job_is_a_run_of_each_seed_and_goes_on(tmp_path: Path) -> None:
    heard: list[tuple[str, int, float]] = []
    points = bandit.run(WHEEL, tmp_path, lambda *news: heard.append(news))
    agent, environments = bandit.make(WHEEL)
    regret = bandits.simulate(environments, agent, 120)
    assert points == [
        Point("uniform", seed, step, float(row[step - 1]))
        for seed, row in zip((3, 4), regret, strict=True)
        for step in (100, 120)
    ]
    assert [(name, step) for name, step, _ in heard] == [(WHEEL.name, step) for step in range(1, 121)]
    assert heard[-1][2] == pytest.approx(float(regret[:, -1].mean()))
    assert (tmp_path / WHEEL.name / "checkpoint.safetensors").exists()
    heard.clear()
    assert bandit.run(WHEEL, tmp_path, lambda *news: heard.append(news)) == points
    assert heard == []


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes begin as copies of one that has imported torch. Without this they import it themselves."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORKED)


@pytest.mark.equivalence
@pytest.mark.usefixtures("forked")
def test_jobs_in_processes_find_what_they_find_in_turn(tmp_path: Path) -> None:
    jobs = [
        Job("wheel-0.5", ("linear",), (0,), 30, 1),
        Job("wheel-0.5", ("uniform",), (0, 1), 45, 1),
        Job("wheel-0.7", ("uniform",), (0,), 10, 1),
    ]
    heard: list[tuple[str, int, float]] = []

    def slow(*news: Any) -> None:
        if not heard:
            time.sleep(1)  # whoever listens so slowly hears everything all the same
        heard.append(news)

    points = bandit.run_all(jobs, tmp_path / "a", 2, slow)
    assert points == serial(jobs, tmp_path / "b", 1, lambda *_: None)
    for job in jobs:
        assert [step for name, step, _ in heard if name == job.name] == [*range(20, job.steps, 20), job.steps]
        mine, theirs = (tmp_path / place / job.name / "checkpoint.safetensors" for place in "ab")
        assert mine.read_bytes() == theirs.read_bytes()


SLOW = [Job("wheel-0.5", ("uniform",), (seed,), 100_000, 1) for seed in (0, 1)]


@pytest.mark.equivalence
@pytest.mark.usefixtures("forked")
def test_a_killed_process_ends_all_and_they_go_on(tmp_path: Path) -> None:
    heard: set[str] = set()

    def kill(name: str, *_: Any) -> None:
        if len(heard | {name}) > len(heard) == len(SLOW) - 1:  # all have begun
            (victim, _other) = multiprocessing.active_children()
            os.kill(victim.pid or 0, signal.SIGKILL)
        heard.add(name)

    with pytest.raises(RuntimeError, match=r"wheel-0.5-uniform.* was stopped \(signal 9\)\. The same command goes on"):
        bandit.run_all(SLOW, tmp_path, 2, kill)
    assert not multiprocessing.active_children()
    assert len(list(tmp_path.glob("*/checkpoint.safetensors"))) == 1  # of the one that was not killed
    short = [replace(job, steps=500) for job in SLOW]
    assert bandit.run_all(short, tmp_path, 2, lambda *_: None) == serial(short, tmp_path / "b", 1, lambda *_: None)


@pytest.mark.equivalence
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("ending", [signal.SIGTERM, ValueError])
def test_whatever_ends_it_the_processes_leave_checkpoints(ending: Any, tmp_path: Path) -> None:
    steps: dict[str, int] = {}

    def end(name: str, step: int, _: float) -> None:
        steps[name] = step
        if len(steps) == len(SLOW):
            if ending is ValueError:
                raise ValueError
            signal.raise_signal(ending)

    with pytest.raises(TerminatedError if ending is signal.SIGTERM else ValueError):
        bandit.run_all(SLOW, tmp_path, 2, end)
    assert not multiprocessing.active_children()
    for job in SLOW:
        tensors, _ = read_checkpoint(tmp_path / job.name / "checkpoint.safetensors")
        assert tensors["regret"].shape[1] >= steps[job.name]


def test_an_error_in_a_process_is_the_callers(tmp_path: Path) -> None:
    (tmp_path / WHEEL.name).write_text("not a folder")
    with pytest.raises(OSError, match=WHEEL.name):
        bandit.run_all([WHEEL], tmp_path, 1, lambda *_: None)


def test_a_process_whose_parent_is_gone_stops(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    ours.close()
    with pytest.raises(TerminatedError):
        bandit._run_and_tell(WHEEL, tmp_path, theirs)
    tensors, _ = read_checkpoint(tmp_path / WHEEL.name / "checkpoint.safetensors")
    assert tensors["regret"].shape[1] == 20


# --- figure 6 --------------------------------------------------------------------------------------------------------


def test_the_table_of_regrets(tmp_path: Path) -> None:
    bandit.write(tmp_path / "new" / "fig6.csv", [Point("bbb", 0, 100, 12.5), Point("greedy", 1, 50_000, -1e-3)])
    text = (tmp_path / "new" / "fig6.csv").read_bytes()
    assert text == b"agent,seed,step,regret\nbbb,0,100,12.5\ngreedy,1,50000,-0.001\n"


def test_means_are_over_the_seeds() -> None:
    found = bandit.means(points())
    assert found == {agent: {100: regret / 2 + 5, 200: regret + 5} for agent, regret in REGRETS.items()}
    assert bandit.means([]) == {}


def test_figure_6_is_a_table_pictures_and_a_line(tmp_path: Path) -> None:
    lines = [bandit.fig6(points(), tmp_path / name, "bbb test") for name in ("a", "b")]
    expected = (
        "Mushrooms: cumulative regret after 200 steps: 5 % greedy 705 (paper 711), 1 % greedy 655 (paper 650), "
        "greedy 605 (paper 645), Bayes by Backprop -8 (paper 665)."
    )
    assert lines == [expected, expected]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["fig6.csv", "fig6.json", "fig6.png", "fig6.svg"]
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    about = json.loads((tmp_path / "a" / "fig6.json").read_text())
    assert (about["line"], about["command"]) == (lines[0], "bbb test")
    rows = list(csv.DictReader((tmp_path / "a" / "fig6.csv").read_text().splitlines()))
    assert [(r["agent"], int(r["seed"]), int(r["step"]), float(r["regret"])) for r in rows] == [
        (p.agent, p.seed, p.step, p.regret) for p in points()
    ]
    assert (tmp_path / "a" / "fig6.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in (tmp_path / "a" / "fig6.svg").read_bytes()


def test_a_figure_of_some_agents_at_another_step(tmp_path: Path) -> None:
    some = [point for point in points((30, 60)) if point.agent in ("bbb", "uniform")]
    assert bandit.fig6(some, tmp_path, "bbb test") == (
        "Mushrooms: cumulative regret after 60 steps: Bayes by Backprop -8."
    )
