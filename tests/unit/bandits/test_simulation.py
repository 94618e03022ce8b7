"""Runs: what regret is, what an agent hears, and that a stopped run resumes where it stood."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bandit_worlds import GAINS, LAST, PLACES, ROWS, STEPS, assert_goes_on, assert_same, done_in, snapshot, start
from bayesbackprop._files import read_checkpoint, write
from bayesbackprop.bandits import Agent, Environment, LinearThompson, Table, Uniform, simulate, simulation
from bayesbackprop.training import TerminatedError
from bayesbackprop_paper.environments import Wheel

pytestmark = pytest.mark.identities


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C counts, also where the tests run in the background, whose processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Scripted(Agent):
    """Does as it is told, and writes down what it hears."""

    def __init__(self, features: int, actions: int, *, replicas: int = 1, seed: int = 0) -> None:
        super().__init__(features, actions, replicas=replicas, seed=seed)
        self.heard: list[tuple[Tensor, list[int], list[float]]] = []

    def _choose(self, contexts: Tensor) -> list[int]:
        return [(self.acted + r) % self.actions for r in range(self.replicas)]

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        self.heard.append((contexts, actions.tolist(), rewards.tolist()))

    def _tensors(self) -> dict[str, Tensor]:
        return {}


def late(environment: Environment, delay: int) -> Environment:
    environment.delay = delay
    return environment


def test_regret_is_what_the_oracle_expects_less_what_was_received() -> None:
    outcomes = torch.tensor([[[0.0, 5.0], [0.0, 5.0]], [[0.0, -35.0], [0.0, 5.0]]])
    places = [Table(torch.eye(2), outcomes, seed) for seed in range(2)]
    agent, told = Scripted(2, 2, replicas=2), []
    regret = simulate(places, agent, 40, watch=lambda step, now: told.append((step, now.tolist())))
    assert (regret.shape, regret.dtype, [place.t for place in places]) == ((2, 40), torch.float64, [40, 40])
    for r in range(2):
        again, total = Table(torch.eye(2), outcomes, r), 0.0
        for t in range(40):
            total += again.best - again.step((t + r) % 2)
            assert float(regret[r, t]) == total
    assert {*regret.diff(dim=1).flatten().tolist()} == {
        0.0,
        -5.0,
        35.0,
        5.0,
    }  # luck counts, also where it beats the oracle
    assert told == [(t + 1, regret[:, t].tolist()) for t in range(40)]


def test_an_agent_hears_what_it_did_where_it_was() -> None:
    places, agent = [PLACES["outcomes"](seed) for seed in range(3)], Scripted(3, 4, replicas=3)
    simulate(places, agent, 10)
    assert (agent.acted, agent.observed, len(agent.heard)) == (10, 10, 10)
    for t, (contexts, actions, rewards) in enumerate(agent.heard):
        for r, place in enumerate(places):
            place.t = t
            assert torch.equal(contexts[r], place.context)
            assert actions[r] == (t + r) % 4
            assert rewards[r] == place.step(actions[r])


@pytest.mark.parametrize(
    ("environments", "steps", "named"),
    [
        ([Wheel(), Wheel()], 0, "steps"),
        ([Wheel(), Wheel()], 1.0, "steps"),
        ([Wheel()], 3, "environments"),
        ([Wheel()] * 2, 3, "environments"),
        ([Wheel(), PLACES["rows"](0)], 3, "environments"),
        ([Wheel(), late(Wheel(), 1)], 3, "environments"),
    ],
)
def test_runs_that_cannot_be_are_refused(environments: list[Environment], steps: Any, named: str) -> None:
    agent = Uniform(2, 5, replicas=2)
    with pytest.raises(ValueError, match=f"'{named}' parameter of simulate"):
        simulate(environments, agent, steps)
    assert (agent.acted, [environment.t for environment in environments]) == (0, [0] * len(environments))


@pytest.mark.parametrize("kind", ["uniform", "linear", "thompson, input"])
@pytest.mark.parametrize("step", [0, 1, LAST, STEPS])
def test_ctrl_c_leaves_a_checkpoint(kind: str, step: int, tmp_path: Path) -> None:
    def press(now: int, _: Tensor) -> None:
        if now == step:
            signal.raise_signal(signal.SIGINT)

    environments, agent = start(kind)
    if step == 0:  # while the agent chooses for the first time
        choose = agent._choose
        agent._choose = lambda xs: signal.raise_signal(signal.SIGINT) or choose(xs)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        simulate(environments, agent, STEPS, tmp_path / "new" / "run", press)
    done = max(step, 1)
    assert done_in(tmp_path / "new" / "run") == (done, done, done, [done] * 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_goes_on(kind, tmp_path / "new" / "run", tmp_path / "whole")


def test_sigterm_leaves_a_checkpoint(tmp_path: Path) -> None:
    def send(now: int, _: Tensor) -> None:
        if now == LAST:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(TerminatedError):
        simulate(*start("linear"), STEPS, tmp_path / "run", send)
    assert done_in(tmp_path / "run") == (LAST, LAST, LAST, [LAST] * 2)
    assert_goes_on("linear", tmp_path / "run", tmp_path / "whole")


def test_a_run_resumed_again_and_again(tmp_path: Path) -> None:
    kind = "thompson, output"
    for steps in (1, 4, 5, 12):
        assert simulate(*start(kind), steps, tmp_path / "run").shape == (2, steps)
    assert_goes_on(kind, tmp_path / "run", tmp_path / "whole")


def test_fewer_steps_than_there_are_give_those(tmp_path: Path) -> None:
    whole = simulate(*start("linear"), STEPS, tmp_path / "run")
    before, told = (tmp_path / "run").read_bytes(), []
    for steps in (1, 6, STEPS):
        environments, agent = start("linear")
        part = simulate(environments, agent, steps, tmp_path / "run", lambda step, _: told.append(step))
        assert torch.equal(part, whole[:, :steps])
    assert told == []
    assert (tmp_path / "run").read_bytes() == before


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, list(range(1, 6))), (1e9, [5])])
def test_checkpoints_are_written_now_and_then_and_at_the_end(
    seconds: float, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(simulation, "_SECONDS", seconds)
    monkeypatch.setattr(simulation, "_write", lambda path, agent, places, regret, late: written.append(regret.shape[1]))
    simulate(*start("uniform"), 5, tmp_path / "run")
    assert written == expected


OTHERS: dict[str, Callable[[], tuple[list[Environment], Agent]]] = {
    "kind": lambda: ([Wheel(0.5, 1)], Uniform(2, 5)),
    "argument": lambda: ([Wheel(0.5, 1)], LinearThompson(2, 5, a=3.0)),
    "seed of the agent": lambda: ([Wheel(0.5, 1)], LinearThompson(2, 5, seed=1)),
    "seed of the environment": lambda: ([Wheel(0.5, 2)], LinearThompson(2, 5)),
    "delta": lambda: ([Wheel(0.7, 1)], LinearThompson(2, 5)),
    "kind of environment": lambda: ([Table(torch.ones(2, 2), torch.ones(2, 5), 1)], LinearThompson(2, 5)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_checkpoint_of_another_run_is_refused(what: str, tmp_path: Path) -> None:
    simulate([Wheel(0.5, 1)], LinearThompson(2, 5), 5, tmp_path / "run")
    before = (tmp_path / "run").read_bytes()
    environments, agent = OTHERS[what]()
    state = snapshot(agent)
    with pytest.raises(ValueError, match="'checkpoint' parameter of simulate must be of the same agent and environ"):
        simulate(environments, agent, 7, tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == before
    assert_same(snapshot(agent), state)
    assert environments[0].t == 0


def test_tables_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    simulate([Table(ROWS, GAINS, 1)], Uniform(3, 4), 3, tmp_path / "run")
    assert simulate([Table(ROWS.clone(), GAINS.clone(), 1)], Uniform(3, 4), 3, tmp_path / "run").shape == (1, 3)
    changed = GAINS.clone()
    changed[1, 4, 3] += 1
    for table in (Table(ROWS + 1, GAINS, 1), Table(ROWS, changed, 1), Table(ROWS, GAINS[0], 1)):
        with pytest.raises(ValueError, match="'checkpoint' parameter of simulate"):
            simulate([table], Uniform(3, 4), 3, tmp_path / "run")


def test_a_file_that_is_no_checkpoint_of_a_run_is_refused(tmp_path: Path) -> None:
    LinearThompson(2, 5).save(tmp_path / "agent")
    (tmp_path / "text").write_text("regret")
    for name in ("agent", "text"):
        with pytest.raises(ValueError, match="parameter of"):
            simulate([Wheel()], LinearThompson(2, 5), 3, tmp_path / name)


# --- rewards that are late -------------------------------------------------------------------------------------------


def test_an_agent_hears_a_late_reward_of_what_it_did_then() -> None:
    places, agent = [late(PLACES["outcomes"](seed), 4) for seed in range(2)], Scripted(3, 4, replicas=2)
    regret = simulate(places, agent, 10)
    assert (agent.acted, agent.observed, [place.t for place in places]) == (10, 6, [10, 10])
    on_time = Scripted(3, 4, replicas=2)
    assert torch.equal(simulate([PLACES["outcomes"](seed) for seed in range(2)], on_time, 10), regret)
    for heard, expected in zip(agent.heard, on_time.heard[:6], strict=True):
        assert torch.equal(heard[0], expected[0])
        assert heard[1:] == expected[1:]


def test_a_learning_agent_knows_nothing_until_the_first_late_reward() -> None:
    agent = LinearThompson(3, 4)
    before = snapshot(agent)
    simulate([late(PLACES["outcomes"](0), 5)], agent, 5)
    assert_same({**snapshot(agent), "acted": before["acted"]}, before)


def start_late(kind: str, delay: int) -> tuple[list[Environment], Agent]:
    environments, agent = start(kind)
    return [late(environment, delay) for environment in environments], agent


@pytest.mark.parametrize("delay", [1, 4, 50])
@pytest.mark.parametrize("kind", ["linear", "thompson, output"])
def test_a_run_goes_on_with_the_rewards_that_were_on_their_way(kind: str, delay: int, tmp_path: Path) -> None:
    environments, agent = start_late(kind, delay)
    whole = simulate(environments, agent, STEPS, tmp_path / "whole")
    for steps in (1, 3, LAST, LAST + 1, STEPS):
        other_environments, other = start_late(kind, delay)
        part = simulate(other_environments, other, steps, tmp_path / "run")
        assert torch.equal(part, whole[:, :steps])
    assert_same(snapshot(other), snapshot(agent))
    assert [each.t for each in other_environments] == [STEPS] * 2
    assert (tmp_path / "run").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_checkpoint_of_another_delay_is_refused(tmp_path: Path) -> None:
    simulate(*start_late("linear", 2), LAST, tmp_path / "run")
    for delay in (0, 3):
        with pytest.raises(
            ValueError, match="'checkpoint' parameter of simulate must be of the same agent and environ"
        ):
            simulate(*start_late("linear", delay), STEPS, tmp_path / "run")


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        torch.zeros(1, 2, dtype=torch.int64),
        torch.zeros(2, 2),
        torch.full((2, 2), -1),
        torch.full((2, 2), 4),
    ],
)
def test_late_actions_that_cannot_be_are_refused(wrong: Tensor | None, tmp_path: Path) -> None:
    simulate(*start_late("linear", 2), LAST, tmp_path / "run")
    tensors, contents = read_checkpoint(tmp_path / "run")
    others = {name: tensor for name, tensor in tensors.items() if name != "late"}
    write(tmp_path / "run", "checkpoint", others if wrong is None else {**others, "late": wrong}, contents)
    environments, agent = start_late("linear", 2)
    before = snapshot(agent)
    with pytest.raises(ValueError, match="run"):
        simulate(environments, agent, STEPS, tmp_path / "run")
    assert_same(snapshot(agent), before)
    assert [each.t for each in environments] == [0, 0]
