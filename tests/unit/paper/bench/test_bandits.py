"""Bandits beside other libraries: the same contexts and coins for all, and no run twice."""

import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import Tensor

from bayesbackprop.bandits import Agent, Environment, LinearThompson, simulate
from bayesbackprop_paper.bench import bandits
from bayesbackprop_paper.bench.bandits import Entry, Found, Job
from bayesbackprop_paper.environments import Items, Wheel
from processes import FORKED

pytestmark = pytest.mark.identities


# --- other libraries -------------------------------------------------------------------------------------------------


class Recorder:
    """A bandit of mabwiser or contextualbandits that always takes action 2, and remembers what it was told."""

    told: ClassVar[list[tuple[str, int, float]]] = []
    made: ClassVar[list[Any]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.made.append((arguments, options))

    def fit(self, actions: Any, rewards: Any, contexts: Any) -> None:
        assert contexts.shape == (1, 2)
        self.told.append(("fit", actions[0], rewards[0]))

    def partial_fit(self, *given: Any) -> None:
        contexts = next(each for each in given if np.ndim(each) == 2)
        actions, rewards = (each for each in given if np.ndim(each) == 1)
        assert contexts.shape == (1, 2)
        self.told.append(("partial_fit", int(actions[0]), float(rewards[0])))

    def predict(self, contexts: Any) -> Any:
        assert contexts.shape == (1, 2)
        return 2


class OfMany(Recorder):
    """Gives an action for each context, as contextualbandits does."""

    def predict(self, contexts: Any) -> Any:
        return np.array([super().predict(contexts)])


class Workspace(Recorder):
    """vowpalwabbit's, of two equally probable actions: 2 and the last."""

    seen: ClassVar[list[list[str]]] = []

    def predict(self, lines: list[str]) -> list[float]:
        self.seen.append(lines)
        return [0.5 if number in (2, len(lines) - 2) else 0.0 for number in range(len(lines) - 1)]

    def learn(self, lines: list[str]) -> None:
        self.seen.append(lines)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = SimpleNamespace(LinTS=lambda **options: ("LinTS", options), LinUCB=lambda **options: ("LinUCB", options))
    modules: dict[str, Any] = {
        "mabwiser.mab": {"MAB": Recorder, "LearningPolicy": policies},
        "contextualbandits.online": {"LinTS": OfMany, "LinUCB": OfMany},
        "vowpalwabbit": {"Workspace": Workspace},
    }
    for name, content in modules.items():
        module: Any = ModuleType(name)
        module.__dict__.update(content)
        package = name.partition(".")[0]
        monkeypatch.setitem(sys.modules, package, module if package == name else ModuleType(package))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(bandits.metadata, "version", lambda name: f"version of {name}")
    for kind, attribute in ((Recorder, "told"), (Recorder, "made"), (Workspace, "seen")):
        monkeypatch.setattr(kind, attribute, [])


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", ["mabwiser LinUCB", "mabwiser LinTS, tuned", "contextualbandits LinTS, tuned"])
def test_a_peer_meets_the_steps_of_ours_and_learns_from_each(name: str) -> None:
    found = bandits.run(Job("wheel-0.5", name, 3, 6, 60.0))
    assert (found.environment, found.agent, found.seed, found.steps, found.done) == ("wheel-0.5", name, 3, 6, 6)
    package = name.partition(" ")[0]
    assert (found.version, found.error) == (f"version of {package}", "")
    environment = Wheel(0.5, seed=3)
    told, lost = Recorder.told, 0.0
    assert [what for what, _, _ in told[1:]] == 5 * ["partial_fit"]
    assert told[0][0] == ("fit" if package == "mabwiser" else "partial_fit")
    assert [action for _, action, _ in told[1:]] == 5 * [2]
    for _, action, reward in told:
        lost += environment.best - reward
        assert environment.step(action) == reward
    assert found.regret == pytest.approx(lost)
    ((arguments, options),) = Recorder.made
    if package == "mabwiser":
        policy = ("LinUCB", {}) if name == "mabwiser LinUCB" else ("LinTS", {"alpha": 0.1})
        assert (arguments, options) == (([0, 1, 2, 3, 4], policy), {"seed": 3})
    else:
        assert arguments == (5,)
        assert {**options, "njobs": 1, "random_state": 4, "sample_from": "ci"} == options


@pytest.mark.usefixtures("libraries")
def test_vowpalwabbit_learns_costs_with_the_probability_of_the_action_however_late() -> None:
    environment = Wheel(0.5, seed=1)
    environment.delay = 2
    agent = bandits.AGENTS["vowpalwabbit bag"].build(environment, 7)
    taken = []
    choose = agent._choose
    agent._choose = lambda xs: taken.append(choose(xs)[0]) or taken[-1:]  # type: ignore[method-assign,func-returns-value]
    simulate([environment], agent, 5)
    (arguments, _), *rest = Recorder.made
    assert not rest
    assert arguments[0].split() == ["--cb_explore_adf", "--bag", "5", "-q", "CA", "--quiet", "--random_seed", "7"]
    learnt = [lines for lines in Workspace.seen if any(":0.5 |A" in line for line in lines)]
    assert (len(Workspace.seen), len(learnt)) == (5 + 3, 3)
    again = Wheel(0.5, seed=1)
    for lines, action in zip(learnt, taken, strict=False):
        x, y = again.context.tolist()
        assert lines[0] == f"shared |C 0:{x:.6g} 1:{y:.6g}"
        reward = again.step(action)
        expected = [f"|A action{number}" for number in range(5)]
        expected[action] = f"{action}:{-reward:.6g}:0.5 {expected[action]}"
        assert lines[1:] == expected
    assert set(taken) <= {2, 4}


@pytest.mark.usefixtures("libraries")
def test_vowpalwabbit_is_told_what_actions_are() -> None:
    environment = Items(0)
    bandits.AGENTS["vowpalwabbit squarecb"].build(environment, 7).act(environment.context)
    ((_, *actions),) = Workspace.seen
    assert len(actions) == 100
    assert environment.action_features is not None
    numbers = [float(part.partition(":")[2]) for part in actions[42].split()[2:]]
    assert numbers == pytest.approx(environment.action_features[42].tolist(), rel=1e-4)


def test_ours_have_their_defaults_and_know_what_actions_are() -> None:
    environment = Items(0)
    assert environment.action_features is not None
    agent: Any
    for name in bandits.OURS:
        agent = bandits.OURS[name].build(environment, 5)
        assert (type(agent).__name__, agent.features, agent.actions, agent.seed) == (name, 5, 100, 5)
        if name in ("ThompsonSampling", "EpsilonGreedy"):
            assert agent.action_features == environment.action_features.tolist()
            plain, same = type(agent)(5, 100), ("updates", "batch_size", "learning_rate", "halving", "memory")
            assert [getattr(agent, each) for each in same] == [getattr(plain, each) for each in same]


@pytest.mark.parametrize("name", bandits.PEERS)
def test_installed_peers_run(name: str) -> None:
    if not bandits.is_installed(bandits.PEERS[name].package):
        pytest.skip(f"{bandits.PEERS[name].package} is not installed.")
    found = bandits.run(Job("wheel-0.5", name, 3, 8, 60.0))
    assert (found.done, found.error) == (8, "")


# --- runs ------------------------------------------------------------------------------------------------------------


class Failing(LinearThompson):
    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        if self.observed == 3:
            raise ArithmeticError("too much")


def failing(environment: Environment, seed: int) -> Agent:
    return Failing(environment.features, environment.actions, seed=seed)


def test_what_a_peer_raises_is_said_and_what_ours_raise_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = {"theirs": Entry("torch", failing), "ours": Entry("bayesbackprop", failing)}
    monkeypatch.setattr(bandits, "AGENTS", agents)
    found = bandits.run(Job("wheel-0.5", "theirs", 0, 9, 60.0))
    assert (found.done, found.error) == (3, "ArithmeticError: too much")
    with pytest.raises(ArithmeticError, match="too much"):
        bandits.run(Job("wheel-0.5", "ours", 0, 9, 60.0))


def test_a_run_that_is_too_slow_says_what_it_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: Iterator[float] = iter([0.0, 0.0, 3.0, 6.0, 9.0, 12.0, 15.0])
    monkeypatch.setattr(bandits.time, "process_time", lambda: next(seconds))
    found = bandits.run(Job("wheel-0.5", "Uniform", 4, 9, 10.0))
    assert (found.done, found.seconds, found.error) == (4, 15.0, "")
    monkeypatch.undo()
    whole = bandits.run(Job("wheel-0.5", "Uniform", 4, 4, 10.0))
    assert found.regret == whole.regret


def test_a_stopped_run_is_repeated_if_it_may_take_longer() -> None:
    found = Found("wheel-0.5", "Uniform", 4, 9, 4, 1.0, 12.0, "1")
    job = Job("wheel-0.5", "Uniform", 4, 9, 10.0)
    assert found.answers(job)
    assert not found.answers(job._replace(limit=20.0))
    assert replace(found, error="ValueError").answers(job._replace(limit=20.0))
    assert replace(found, done=9).answers(job._replace(limit=20.0))
    for other in (job._replace(seed=5), job._replace(steps=10), job._replace(agent="x"), job._replace(environment="x")):
        assert not replace(found, done=9).answers(other)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes begin as copies of one that has imported torch. Without this they import it themselves."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORKED)


def of(found: list[Found]) -> list[tuple[Any, ...]]:
    """All but the time it took, in order."""
    return sorted((each.environment, each.agent, each.seed, each.done, each.regret) for each in found)


@pytest.mark.usefixtures("forked")
def test_processes_find_what_is_found_here_and_each_run_once(tmp_path: Path) -> None:
    jobs = bandits.jobs_of(["wheel-0.5", "clicks"], ["Uniform", "LinearThompson"], [3, 4], 12, 60.0)
    assert len(set(jobs)) == 8
    bandits.run_all(jobs[:3], tmp_path, 1)
    first = bandits.read(tmp_path)
    assert of(first) == of([bandits.run(job) for job in jobs[:3]])
    bandits.run_all(jobs, tmp_path, 2)
    assert of(bandits.read(tmp_path)) == of([bandits.run(job) for job in jobs])
    assert bandits.read(tmp_path)[:3] == first
    assert len((tmp_path / "bandits.jsonl").read_text().split()) > 8
    before = (tmp_path / "bandits.jsonl").read_text()
    bandits.run_all(jobs, tmp_path, 2)
    assert (tmp_path / "bandits.jsonl").read_text() == before


def test_a_line_that_was_cut_is_run_again_and_harms_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = bandits.jobs_of(["wheel-0.5"], ["Uniform"], [3, 4], 5, 60.0)
    for job in jobs:
        bandits._record(job, tmp_path)
    assert "wheel-0.5, Uniform, seed 3: " in capsys.readouterr().err
    path = tmp_path / "bandits.jsonl"
    whole = bandits.read(tmp_path)
    path.write_text(path.read_text().rstrip()[:-20])
    assert bandits.read(tmp_path) == whole[:1]
    bandits._record(jobs[1], tmp_path)
    assert of(bandits.read(tmp_path)) == of(whole)


def test_a_process_that_fails_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORKED)
    jobs = [Job("nowhere", "Uniform", 0, 5, 60.0)]
    with pytest.raises(RuntimeError, match=r"ended with the code 1\. The same command goes on"):
        bandits.run_all(jobs, tmp_path, 1)
