"""Environments are pure functions of seed and step; agents learn what they observed, and go on after anything."""

import json
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from scipy import stats
from torch import Tensor

from bayesbackprop import Bayesian, Gaussian, Normal, save
from bayesbackprop._files import read_checkpoint, write_checkpoint
from bayesbackprop._networks import mlp
from bayesbackprop.bandits import (
    Agent,
    Environment,
    EpsilonGreedy,
    LinearThompson,
    Table,
    ThompsonSampling,
    Uniform,
    Wheel,
    classification,
    load,
    simulate,
    simulation,
)
from bayesbackprop.bandits.network import RewardNetwork
from bayesbackprop_paper import data
from bayesbackprop_paper.data import Classification, FetchError, Mushrooms
from bayesbackprop_paper.environments import adult, covertype, mushroom
from ztests import assert_mean, assert_p_value, assert_variance, assert_z

pytestmark = pytest.mark.identities

FEATURES, ACTIONS = 3, 4
TIMEOUT = 300


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C counts, also where the tests run in the background, whose processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


@pytest.mark.parametrize("place", PLACES)
def test_agents_with_the_same_seed_meet_the_same(place: str) -> None:
    first, second = PLACES[place](3), PLACES[place](3)
    others = [PLACES[place](4), PLACES[place](2)]
    seen, rewards, foreign = [], [], []
    for t in range(20):
        assert first.t == second.t == t
        assert torch.equal(first.context, second.context)
        assert torch.equal(first.expected, second.expected)
        assert first.best == float(first.expected.max())
        seen.append(first.context.clone())
        foreign.append([other.context.clone() for other in others])
        rewards.append(first.step(t % first.actions))
        second.step((t + 1) % second.actions)
        for other in others:
            other.step(0)
    for t in (7, 0, 19, 7):
        first.t = t
        assert torch.equal(first.context, seen[t])
        assert first.step(t % first.actions) == rewards[t]
        assert first.t == t + 1
    for mine, theirs in ((seen, foreign), (seen[1:], foreign), (seen, foreign[1:])):
        for number in range(len(others)):
            assert not all(torch.equal(a, b[number]) for a, b in zip(mine, theirs, strict=False))


class Thirsty(Environment):
    """Takes many random numbers at each step."""

    def make(self, random: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.from_numpy(random.random(50)), torch.zeros(1), torch.zeros(1)


def test_no_step_has_the_random_numbers_of_another() -> None:
    drawn = []
    for seed in (0, 1, 2, 2**64):
        environment = Thirsty(50, 1, seed)
        for environment.t in range(10):
            drawn += environment.context.tolist()
    assert len(set(drawn)) == len(drawn) == 2000


def test_a_reward_does_not_depend_on_what_was_looked_at() -> None:
    for make in PLACES.values():
        looking, blind = make(1), make(1)
        for t in range(10):
            _ = looking.context, looking.expected, looking.best
            assert looking.step(t % 4) == blind.step(t % 4)


@pytest.mark.statistical
def test_rows_and_outcomes_come_at_even_odds_and_expectations_are_means() -> None:
    seen, seen_outcomes = torch.zeros(5), torch.zeros(5, 2)
    losses = []
    for context, expected, rewards in walk(Table(ROWS, GAINS, 1), 2000):
        row = int(context[0]) // 3
        assert torch.equal(context, ROWS[row])
        assert torch.allclose(expected, GAINS[:, row].mean(0))
        outcome = next(k for k in range(2) if torch.equal(rewards, GAINS[k, row]))
        seen[row] += 1
        seen_outcomes[row, outcome] += 1
        losses.append(rewards - expected)
    assert_p_value(stats.chisquare(seen).pvalue, "rows")
    assert_p_value(stats.chisquare(seen_outcomes.flatten()).pvalue, "outcomes of each row")
    assert_mean(torch.stack(losses), 0.0, "rewards of a table")


def test_a_table_without_outcomes_gives_what_it_says() -> None:
    for _, expected, rewards in walk(Table(ROWS, GAINS[0]), 50):
        assert torch.equal(rewards, expected)
    whole = Table(torch.ones(1, 1), torch.tensor([[3, 4]]))
    assert (whole.step(1), whole.best, whole.actions, whole.features) == (4.0, 4.0, 2, 1)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Mushrooms:
    """Four mushrooms instead of thousands; the second and third are poisonous."""
    mushrooms = Mushrooms(torch.eye(4), torch.tensor([True, False, False, True]))
    monkeypatch.setattr(data, "mushroom", lambda: mushrooms)
    return mushrooms


@pytest.mark.statistical
def test_mushrooms_pay_as_in_the_paper(few: Mushrooms) -> None:
    eaten: list[float] = []
    environment = mushroom(seed=5)
    assert (environment.features, environment.actions) == (4, 2)
    for t, (context, expected, rewards) in enumerate(walk(environment, 3000)):
        environment.t = t
        assert rewards[0] == 0
        if few.edible[int(context.argmax())]:
            assert (expected.tolist(), environment.best, float(rewards[1])) == ([0, 5], 5, 5)
        else:
            assert (expected.tolist(), environment.best) == ([0, -15], 0)
            eaten.append(float(rewards[1]))
    assert set(eaten) == {5, -35}
    assert_mean(torch.tensor(eaten), -15, "the reward for eating poison")
    assert_z(torch.tensor([(len(eaten) - 1500) / math.sqrt(750)]), "half of the mushrooms are poisonous")


def test_the_real_mushrooms_are_a_bandit() -> None:
    try:
        environment = mushroom(3)
    except FetchError as error:
        if not error.unreachable:
            raise
        pytest.skip(f"the mushrooms cannot be fetched here: {error}")
    assert (environment.features, environment.actions) == (117, 2)
    assert {environment.best for environment.t in range(50)} == {0, 5}


def test_naming_a_class_pays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Classification(torch.eye(3), torch.tensor([2, 0, 2]), 4)
    asked: list[Any] = []
    monkeypatch.setattr(data, "adult", lambda **options: asked.append(options) or examples)
    monkeypatch.setattr(data, "covertype", lambda: examples)
    for make in (adult, covertype, lambda seed: classification(*examples, seed)):
        environment = make(1)
        assert (environment.features, environment.actions) == (3, 4)
        for context, expected, rewards in walk(environment, 20):
            assert rewards.tolist() == expected.tolist()
            assert rewards.tolist() == [float(k == examples.labels[int(context.argmax())]) for k in range(4)]
    assert asked == [{"label": "occupation"}]


@pytest.mark.statistical
def test_the_wheel_is_as_riquelme_et_al_describe_it() -> None:
    delta, radii, angles, noise = 0.7, [], [], []
    for context, expected, rewards in walk(Wheel(delta, seed=2), 2500):
        x, y = context.tolist()
        radii.append(math.hypot(x, y))
        angles.append(math.atan2(y, x))
        quadrant = {(True, True): 1, (False, True): 2, (False, False): 3, (True, False): 4}[x > 0, y > 0]
        pays = [1.2, 1.0, 1.0, 1.0, 1.0]
        if radii[-1] > delta:
            pays[quadrant] = 50.0
        assert expected.tolist() == pytest.approx(pays)
        noise.append((rewards.double() - expected.double()) / 0.01)
    beyond = sum(radius > delta for radius in radii) / 2500
    share = 1 - delta**2
    assert_z(torch.tensor([(beyond - share) / math.sqrt(share * (1 - share) / 2500)]), "the ring")
    assert_p_value(stats.kstest([radius**2 for radius in radii], "uniform").pvalue, "uniform on the disc: radius")
    assert_p_value(stats.kstest(angles, stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue, "angle")
    assert_mean(torch.stack(noise), 0.0, "rewards of the wheel")
    assert_variance(torch.stack(noise), 1.0, "noise of the wheel")
    assert_z(torch.corrcoef(torch.stack(noise).T)[0, 1:] * math.sqrt(len(noise)), "correlations of the noise")


@pytest.mark.parametrize("delta", [0, 1, -0.5, 1.5, float("nan"), True, "half", None])
def test_a_wheel_needs_a_radius_within_it(delta: Any) -> None:
    with pytest.raises(ValueError, match=r"'delta' parameter of Wheel must be a float in \(0, 1\)"):
        Wheel(delta)


@pytest.mark.parametrize(
    ("contexts", "rewards", "named"),
    [
        (torch.zeros(3), torch.zeros(3, 2), "contexts"),
        (torch.zeros(0, 3), torch.zeros(0, 2), "contexts"),
        ([[1.0]], torch.zeros(1, 2), "contexts"),
        (torch.zeros(2, 0), torch.zeros(2, 2), "features"),
        (torch.zeros(2, 3), torch.zeros(2), "rewards"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "rewards"),
        (torch.zeros(2, 3), torch.zeros(2, 3, 2), "rewards"),
        (torch.zeros(2, 3), torch.zeros(0, 2, 2), "rewards"),
        (torch.zeros(2, 3), [[1.0], [2.0]], "rewards"),
        (torch.zeros(2, 3), torch.zeros(2, 0), "actions"),
        (torch.full((2, 3), float("nan")), torch.zeros(2, 2), "contexts"),
        (torch.zeros(2, 3), torch.full((2, 2), float("inf")), "rewards"),
    ],
)
def test_a_table_that_is_none_is_refused(contexts: Any, rewards: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"The '{named}' parameter of Table must be"):
        Table(contexts, rewards)


@pytest.mark.parametrize("seed", [-1, 1.0, True, None])
def test_a_seed_is_a_count(seed: Any) -> None:
    with pytest.raises(ValueError, match="'seed' parameter of Wheel"):
        Wheel(seed=seed)
    with pytest.raises(ValueError, match="'seed' parameter of Uniform"):
        Uniform(1, 1, seed=seed)


BAD_ACTIONS = (-1, ACTIONS, True, 1.0, None, "1")


@pytest.mark.parametrize("action", BAD_ACTIONS)
def test_what_is_no_action_is_refused_and_nothing_happens(action: Any) -> None:
    for make in (PLACES["rows"], PLACES["outcomes"]):
        environment = make(0)
        environment.step(0)
        context = environment.context.clone()
        with pytest.raises(ValueError, match=r"'action' parameter of Table must be an int in \[0, 4\)"):
            environment.step(action)
        assert environment.t == 1
        assert torch.equal(environment.context, context)


# --- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["input", "output"])
@pytest.mark.parametrize("hidden", [(), (6,), (6, 5)])
@torch.no_grad()
def test_replicas_are_networks_of_their_own(encoding: Any, hidden: tuple[int, ...]) -> None:
    net = RewardNetwork(FEATURES, ACTIONS, hidden, encoding, 3, seed=1)
    for layer in net.layers[::2]:
        layer.bias.normal_()
    contexts, actions = torch.randn(7, 3, FEATURES), torch.randint(ACTIONS, (7, 3))
    expected = torch.empty(7, 3)
    for b in range(7):
        for r in range(3):
            one_of = torch.eye(ACTIONS)[actions[b, r]]
            value = torch.cat([contexts[b, r], one_of]) if encoding == "input" else contexts[b, r]
            for number, layer in enumerate(net.layers[::2]):
                value = layer.weight[r] @ (value.relu() if number else value) + layer.bias[r, 0]
            expected[b, r] = value[0] if encoding == "input" else value[actions[b, r]]
    assert torch.allclose(net(contexts, actions), expected, atol=1e-5)
    again, other = (RewardNetwork(FEATURES, ACTIONS, hidden, encoding, 3, seed=seed) for seed in (1, 2))
    assert torch.equal(net.layers[0].weight, again.layers[0].weight)
    assert not torch.equal(net.layers[0].weight, other.layers[0].weight)
    assert not torch.equal(net.layers[0].weight[0], net.layers[0].weight[1])


# --- agents: files ---------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"hidden": [6], "updates": 2, "batch_size": 4, "memory": 8, "learning_rate": 0.01, "scale": 2.0}

KINDS: dict[str, Callable[..., Agent]] = {
    "uniform": lambda **kw: Uniform(FEATURES, ACTIONS, **kw),
    "linear": lambda **kw: LinearThompson(FEATURES, ACTIONS, precision=0.5, a=2.0, b=3.0, **kw),
    "thompson, input": lambda **kw: ThompsonSampling(
        FEATURES, ACTIONS, **{**SMALL, "sigma": 0.3, "draws": 2, "rho_rate": 3.0, "temperature": 0.5, **kw}
    ),
    "thompson, output": lambda **kw: ThompsonSampling(
        FEATURES, ACTIONS, **{**SMALL, "encoding": "output", "sigma": 0.2, "prior": Normal(0.4), **kw}
    ),
    "epsilon, input": lambda **kw: EpsilonGreedy(FEATURES, ACTIONS, **{**SMALL, "epsilon": 0.3, **kw}),
    "epsilon, output": lambda **kw: EpsilonGreedy(
        FEATURES, ACTIONS, **{**SMALL, "encoding": "output", "hidden": [5, 4], **kw}
    ),
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


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_agent_goes_on_bit_for_bit(kind: str, replicas: int, tmp_path: Path) -> None:
    agent, unsaved = (KINDS[kind](replicas=replicas, seed=4) for _ in range(2))
    for start in (0, 3, 11):  # new, with memory to spare, and with the oldest forgotten
        for each in (agent, unsaved):
            each.act_all(neighbours(each, start)[0])  # and never hears of it
        agent.save(tmp_path / "agent")
        copy = load(str(tmp_path / "agent"))
        assert type(copy) is type(agent)
        assert copy.described() == agent.described()
        assert_same(snapshot(copy), snapshot(agent))
        steps = range(start, start + 8)
        assert live(copy, steps) == live(agent, steps) == live(unsaved, steps)
        assert_same(snapshot(copy), snapshot(agent))
        assert_same(snapshot(agent), snapshot(unsaved))


def test_the_actions_of_the_kinds_are_by_the_seed() -> None:
    for make in KINDS.values():
        runs = [live(make(seed=seed, replicas=4), range(12)) for seed in (0, 0, 1)]
        assert runs[0] == runs[1] != runs[2]
        assert runs[0][1:] != runs[2][:-1]


@pytest.mark.parametrize("seed", [20_260_101, 2**31, 2**63 - 1])
def test_a_large_seed_is_a_seed(seed: int) -> None:
    for make in KINDS.values():
        live(make(seed=seed), range(2))


class Own(Normal):
    pass


def test_a_prior_of_the_users_own_is_asked_for(tmp_path: Path) -> None:
    agent = KINDS["thompson, input"](prior=Own(0.3))
    agent.save(tmp_path / "agent")
    with pytest.raises(ValueError, match=r"'prior' parameter of bandits.load must be given"):
        load(tmp_path / "agent")
    copy = load(tmp_path / "agent", prior=Own(0.3))
    assert live(copy, range(5)) == live(agent, range(5))
    assert_same(snapshot(copy), snapshot(agent))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_loading_runs_no_code_and_refuses_other_files(tmp_path: Path) -> None:
    torch.save({"agent": Evil(tmp_path / "ran")}, tmp_path / "torch")
    (tmp_path / "pickle").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    (tmp_path / "text").write_text('{"agent": "Uniform"}')
    (tmp_path / "empty").touch()
    safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / "tensors")
    save(Bayesian(mlp((2, 1)), Gaussian(1.0)), tmp_path / "model")
    write_checkpoint(tmp_path / "checkpoint", {"w": torch.zeros(1)}, {"step": 3})
    write_checkpoint(tmp_path / "stranger", {}, {"agent": "Popen", "arguments": {"args": ["ls"]}})
    KINDS["linear"]().save(tmp_path / "agent")
    (tmp_path / "half").write_bytes((tmp_path / "agent").read_bytes()[:-8])
    for path in sorted(tmp_path.iterdir()):
        if path.name != "agent":
            with pytest.raises(ValueError, match="'path' parameter of"):
                load(path)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", LEARNING)
def test_tensors_of_another_agent_are_refused(kind: str) -> None:
    agent, larger = KINDS[kind](), KINDS[kind](replicas=2)
    before = snapshot(agent)
    for tensors in (larger.tensors(), {}, {**agent.tensors(), "more": torch.zeros(1)}):
        with pytest.raises(ValueError, match=r"'tensors' parameter of .* must be those of an agent like this one"):
            agent.restore(tensors, 1, 1)
        assert_same(snapshot(agent), before)


# --- agents: what they take ------------------------------------------------------------------------------------------

GOOD = [0.1, 0.2, 0.3]
NAN = float("nan")


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_learnt_from_is_refused_and_changes_nothing(kind: str) -> None:
    agent = KINDS[kind](seed=2)
    live(agent, range(3))
    before = snapshot(agent)
    contexts: list[Any] = [GOOD[:2], [*GOOD, 0.4], [GOOD], 0.1, None, "abc", ["a", "b", "c"], [0.1, None, 0.3]]
    contexts += [[0.1, NAN, 0.2], [float("inf"), 0, 0], [1e300, 0, 0]]
    rewards: list[Any] = [NAN, float("inf"), -float("inf"), 1e16, -1e300, None, "1", [1.0], torch.ones(2)]
    for context in contexts:
        with pytest.raises(ValueError, match=rf"'context' parameter of {type(agent).__name__} must be .*\. Got .*\.$"):
            agent.act(context)
        with pytest.raises(ValueError, match="'context' parameter of"):
            agent.observe(context, 0, 1.0)
    for action in BAD_ACTIONS:
        with pytest.raises(ValueError, match=r"'action' parameter of .* must be an int in \[0, 4\)"):
            agent.observe(GOOD, action, 1.0)
    for reward in rewards:
        with pytest.raises(
            ValueError, match=r"'reward' parameter of .* must be a number .* leave out what is not known"
        ):
            agent.observe(GOOD, 0, reward)
    assert_same(snapshot(agent), before)
    other = KINDS[kind](seed=2)
    assert live(other, range(6))[3:] == live(agent, range(3, 6))
    assert_same(snapshot(other), snapshot(agent))


@pytest.mark.parametrize("kind", KINDS)
def test_each_replica_needs_its_own(kind: str) -> None:
    agent = KINDS[kind](replicas=2)
    before = snapshot(agent)
    for contexts in ([GOOD], [GOOD] * 3, []):
        with pytest.raises(ValueError, match=r"'contexts' parameter of .* one for each of 2 replicas"):
            agent.act_all(contexts)
    for actions, rewards in (([0], [0.0]), ([0, 0], [0.0]), ([0] * 3, [0.0] * 3), ([0], [0.0, 0.0])):
        with pytest.raises(ValueError, match=r"'actions' parameter of .* for each of 2"):
            agent.observe_all([GOOD] * 2, actions, rewards)
    for gains in ([1.0, NAN], [[1.0], [2.0]], torch.ones(2, 1), [1.0, None]):
        with pytest.raises(ValueError, match="'reward' parameter of"):
            agent.observe_all([GOOD] * 2, [0, 1], gains)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 replicas: use act_all"):
        agent.act(GOOD)
    with pytest.raises(ValueError, match="2 replicas: use observe_all"):
        agent.observe(GOOD, 0, 0.0)
    assert_same(snapshot(agent), before)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_come_as_lists_arrays_and_tensors(kind: str) -> None:
    forms: list[Callable[[list[float]], Any]] = [
        list,
        tuple,
        torch.tensor,
        lambda x: torch.tensor(x).numpy(),
        lambda x: torch.tensor(x, requires_grad=True) * 1,  # the embedding of some network
    ]
    agents = [KINDS[kind](seed=1) for _ in forms]
    for _ in range(3):
        actions = [agent.act(form(GOOD)) for agent, form in zip(agents, forms, strict=True)]
        assert len(set(actions)) == 1
        for agent, form in zip(agents, forms, strict=True):
            agent.observe(form(GOOD), actions[0], 1.0)
    for agent in agents[1:]:
        assert_same(snapshot(agent), snapshot(agents[0]))
        assert not any(tensor.requires_grad for tensor in agent.tensors().values())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Uniform(0, 2), "features"),
        (lambda: Uniform(2, 0), "actions"),
        (lambda: Uniform(2, 2, replicas=0), "replicas"),
        (lambda: LinearThompson(2, 2, precision=0), "precision"),
        (lambda: LinearThompson(2, 2, a=0), "a"),
        (lambda: LinearThompson(2, 2, b=-1), "b"),
        (lambda: EpsilonGreedy(2, 2, epsilon=1.1), "epsilon"),
        (lambda: EpsilonGreedy(2, 2, epsilon=NAN), "epsilon"),
        (lambda: EpsilonGreedy(2, 2, epsilon=True), "epsilon"),
        (lambda: EpsilonGreedy(2, 2, epsilon=[0.1, 0.2]), "epsilon"),
        (lambda: EpsilonGreedy(2, 2, encoding="both"), "encoding"),  # type: ignore[arg-type]
        (lambda: EpsilonGreedy(2, 2, hidden=[3, 0]), "hidden"),
        (lambda: EpsilonGreedy(2, 2, updates=0), "updates"),
        (lambda: EpsilonGreedy(2, 2, batch_size=0), "batch_size"),
        (lambda: EpsilonGreedy(2, 2, halving=0), "halving"),
        (lambda: ThompsonSampling(2, 2, halving=2.5), "halving"),  # type: ignore[arg-type]
        (lambda: EpsilonGreedy(2, 2, memory=0), "memory"),
        (lambda: EpsilonGreedy(2, 2, scale=0), "scale"),
        (lambda: EpsilonGreedy(2, 2, learning_rate=-1), "learning_rate"),
        (lambda: ThompsonSampling(2, 2, draws=0), "draws"),
        (lambda: ThompsonSampling(2, 2, rho_rate=0), "rho_rate"),
        (lambda: ThompsonSampling(2, 2, noise=0), "noise"),
        (lambda: ThompsonSampling(2, 2, noise="learnt"), "noise"),  # type: ignore[arg-type]
        (lambda: ThompsonSampling(2, 2, sigma=0), "sigma"),
        (lambda: ThompsonSampling(2, 2, temperature=-1), "temperature"),
        (lambda: ThompsonSampling(2, 2, prior="wide"), "prior"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"The '{named}' parameter of"):
        make()


# --- agents: what they remember --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_come_late_in_any_order_or_never(kind: str) -> None:
    agent, listener = KINDS[kind](seed=3), KINDS[kind](seed=3)
    asked = []
    for t in range(5):
        contexts, rewards = neighbours(agent, t)
        action = agent.act(contexts[0])
        asked.append((contexts[0], action, float(rewards[0, action])))
    unchanged = snapshot(listener)
    assert {name: bool(torch.equal(tensor, unchanged[name])) for name, tensor in snapshot(agent).items()} == {
        name: name != "acted" for name in unchanged
    }
    for number in (3, 0, 4, 1):
        agent.observe(*asked[number])
        listener.observe(*asked[number])
    assert (agent.acted, agent.observed, listener.acted) == (5, 4, 0)
    # What is learnt depends on what was observed, not on when the agent acted.
    assert_same({**snapshot(agent), "acted": torch.tensor(0)}, snapshot(listener))


@pytest.mark.parametrize("kind", NEURAL)
def test_the_newest_takes_the_place_of_the_oldest(kind: str) -> None:
    agent = KINDS[kind](memory=4, replicas=2, scale=10.0)
    for t in range(6):
        agent.observe_all([[t, 0, 0], [0, t, 0]], [t % 4, (t + 1) % 4], [t, 100 + t])
        kept = [max((n for n in range(t + 1) if n % 4 == place), default=None) for place in range(4)]
        tensors = agent.tensors()
        for place, number in enumerate(kept):
            n = 0 if number is None else number
            there = [0.0, 0.0] if number is None else [n / 10, (100 + n) / 10]
            assert tensors["rewards"][place].tolist() == pytest.approx(there)
            assert tensors["contexts"][place].tolist() == [[n, 0, 0], [0, n, 0]]
            assert tensors["actions"][place].tolist() == ([0, 0] if number is None else [n % 4, (n + 1) % 4])


@pytest.mark.parametrize("kind", NEURAL)
def test_minibatches_are_of_what_is_remembered(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = KINDS[kind](memory=6, batch_size=4, updates=40, replicas=2, scale=1.0, learning_rate=1e-9)
    cost, calls = agent._cost, []

    def record(contexts: Tensor, actions: Tensor, rewards: Tensor, remembered: int) -> Any:
        calls.append((contexts, actions, rewards, remembered))
        return cost(contexts, actions, rewards, remembered)

    monkeypatch.setattr(agent, "_cost", record)
    places: list[Tensor] = []
    for t in range(9):
        agent.observe_all([[t, 0, 0], [0, t, 0]], [t % 4, (t + 1) % 4], [t, -t])
        assert len(calls) == 40
        kept = range(max(0, t - 5), t + 1)
        chosen = torch.stack([rewards for _, _, rewards, _ in calls])
        assert set(chosen[:, :, 0].flatten().tolist()) == set(kept)
        assert set(chosen[:, :, 1].flatten().tolist()) == {-n for n in kept}
        assert t == 0 or not torch.equal(chosen[:, :, 0], -chosen[:, :, 1])  # each replica draws its own
        for contexts, actions, rewards, remembered in calls:
            assert len(rewards) == min(4, len(kept))
            assert remembered == len(kept)
            for r, sign in ((0, 1), (1, -1)):
                assert torch.equal(contexts[:, r, r], sign * rewards[:, r])
                assert torch.equal(actions[:, r], (sign * rewards[:, r].long() + r) % 4)
        places.append(chosen[:, :, 0] % 6)
        calls.clear()
    assert not torch.equal(places[-1][0], places[-1][1])  # nor are minibatches alike, within an observation or after it
    assert not torch.equal(places[-1], places[-2])


def test_the_complexity_is_shared_among_those_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = KINDS["thompson, input"](memory=5, batch_size=3, temperature=0.25, replicas=2)
    cost, weights = agent._cost, []

    def record(*arguments: Any) -> Any:
        made = cost(*arguments)
        weights.append(float(made.complexity_weight))
        return made

    monkeypatch.setattr(agent, "_cost", record)
    live(agent, range(8))
    assert weights == pytest.approx([0.25 / n for n in (1, 2, 3, 4, 5, 5, 5, 5) for _ in range(2)])
    assert int(agent.tensors()["step"]) == len(weights)


# --- agents: replicas ------------------------------------------------------------------------------------------------


def of_replica(agent: Agent, r: int) -> dict[str, Tensor]:
    """The tensors that belong to one replica."""
    tensors = {name: tensor.clone() for name, tensor in agent.tensors().items() if tensor.dim()}
    return {name: t[:, r] if name in ("contexts", "actions", "rewards") else t[r] for name, t in tensors.items()}


@pytest.mark.parametrize("kind", LEARNING)
def test_replicas_do_not_hear_of_each_other(kind: str) -> None:
    one, other = (KINDS[kind](replicas=3, seed=5) for _ in range(2))
    chosen: list[list[list[int]]] = [[], []]
    for t in range(12):
        contexts, rewards = neighbours(one, t)
        elsewhere = contexts.clone()
        elsewhere[1] += 1
        for number, (agent, xs) in enumerate(((one, contexts), (other, elsewhere))):
            actions = agent.act_all(xs)
            chosen[number].append(actions)
            gains = [float(row[a]) for row, a in zip(rewards, actions, strict=True)]
            if agent is other:
                actions, gains = [actions[0], (actions[1] + 1) % 4, actions[2]], [gains[0], 50.0, gains[2]]
            agent.observe_all(xs, actions, gains)
    for r in (0, 2):
        assert_same(of_replica(one, r), of_replica(other, r))
        assert [actions[r] for actions in chosen[0]] == [actions[r] for actions in chosen[1]]
    changed, unchanged = of_replica(one, 1), of_replica(other, 1)
    assert not any(torch.equal(changed[name], unchanged[name]) for name in changed if not name.endswith("step"))


def singles(agent: Any, **options: Any) -> list[Any]:
    """The replicas of an agent as agents of their own."""
    found: list[Any] = []
    for r in range(agent.replicas):
        single: Any = type(agent)(FEATURES, ACTIONS, **{**SMALL, **options})
        mine, its = agent.tensors(), single.tensors()
        for name in its:
            if name.startswith("parameter."):
                its[name].copy_(mine[name][r : r + 1])
        found.append(single)
    return found


def batch(replicas: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(5, replicas, FEATURES), torch.randint(ACTIONS, (5, replicas)), torch.randn(5, replicas)


@torch.no_grad()
def test_the_cost_of_replicas_is_the_sum_of_theirs() -> None:
    contexts, actions, rewards = batch(3)
    parts = [(contexts[:, [r]], actions[:, [r]], rewards[:, [r]]) for r in range(3)]
    greedy: Any = EpsilonGreedy(FEATURES, ACTIONS, replicas=3, **SMALL)
    costs = [float(each._cost(*part, 8)) for each, part in zip(singles(greedy), parts, strict=True)]
    assert float(greedy._cost(contexts, actions, rewards, 8)) == pytest.approx(sum(costs))
    assert costs[1] == pytest.approx(
        sum(float(singles(greedy)[1].net(*(x[[b]] for x in parts[1][:2])) - rewards[b, 1]) ** 2 for b in range(5)) / 5
    )
    # Without noise, the likelihood; and the complexity where it has a closed form.
    options: Any = {"sigma": 1e-12, "prior": Normal(0.7), "noise": 0.3}
    thompson: Any = ThompsonSampling(FEATURES, ACTIONS, replicas=3, **SMALL, **options)
    alone = singles(thompson, **options)
    made = [each._cost(*part, 8) for each, part in zip(alone, parts, strict=True)]
    whole = thompson._cost(contexts, actions, rewards, 8)
    assert float(whole.likelihood) == pytest.approx(sum(float(cost.likelihood) for cost in made), rel=1e-5)
    assert float(whole.complexity_weight) == float(made[0].complexity_weight) == 1 / 8
    closed = [float(each.model.complexity_closed()) for each in alone]
    assert float(thompson.model.complexity_closed()) == pytest.approx(sum(closed), rel=1e-5)
    normal = torch.distributions.Normal(alone[0].net(*parts[0][:2]), 0.3)
    assert float(made[0].likelihood) == pytest.approx(-float(normal.log_prob(parts[0][2]).mean()), rel=1e-5)


@pytest.mark.parametrize("kind", ["thompson, input", "thompson, output"])
def test_mean_and_spread_learn_at_their_rates(kind: str) -> None:
    agent: Any = KINDS[kind](learning_rate=1e-3, rho_rate=5.0, updates=1)
    before = [[p.detach().clone() for p in part.parameters()] for part in (agent.net, agent.model.rho)]
    live(agent, range(1))
    for part, old, rate in zip((agent.net, agent.model.rho), before, (1e-3, 5e-3), strict=True):
        # The first step of Adam goes as far as the rate says.
        moved = torch.cat([(p.detach() - was).abs().flatten() for p, was in zip(part.parameters(), old, strict=True)])
        assert float(moved.max()) == pytest.approx(rate, rel=0.01)


# --- agents: how they choose -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ThompsonSampling, EpsilonGreedy])
@pytest.mark.parametrize("halving", [None, 1, 40])
def test_the_rate_falls_with_what_was_observed(kind: Any, halving: int | None, tmp_path: Path) -> None:
    options = {"rho_rate": 0.5} if kind is ThompsonSampling else {}
    rates: list[list[float]] = []

    def watch(agent: Any) -> None:
        step = agent._optimiser.step
        agent._optimiser.step = lambda: rates.append([group["lr"] for group in agent._optimiser.param_groups]) or step()

    agent = kind(3, 2, updates=2, hidden=(4,), learning_rate=0.01, halving=halving, **options)
    watch(agent)
    for observed in range(4):
        if observed == 2:  # a loaded agent is as far as it was
            agent.save(tmp_path / "agent.safetensors")
            agent = load(tmp_path / "agent.safetensors")
            watch(agent)
        agent.observe([1.0, 0.0, 0.0], 1, 1.0)
        rate = 0.01 if halving is None else 0.01 / (1 + observed / halving)
        expected = [rate, 0.5 * rate] if options else [rate]
        assert rates == [pytest.approx(expected)] * 2
        rates.clear()


def counts(actions: list[int]) -> list[int]:
    return torch.tensor(actions).bincount(minlength=ACTIONS).tolist()


@pytest.mark.statistical
@pytest.mark.parametrize(
    "make",
    [KINDS["uniform"], lambda **kw: KINDS["epsilon, input"](epsilon=1.0, **kw)],
    ids=["uniform", "epsilon 1"],
)
def test_acting_at_random_is_uniform_and_independent(make: Callable[..., Agent]) -> None:
    agent = make(replicas=2, seed=1)
    chosen = [agent.act_all([GOOD, GOOD]) for _ in range(2000)]
    first, second = ([actions[r] for actions in chosen] for r in range(2))
    assert_p_value(stats.chisquare(counts(first)).pvalue, "actions")
    for what, pairs in (("replicas", (first, second)), ("steps", (first[:-1], first[1:]))):
        table = torch.zeros(ACTIONS, ACTIONS)
        for a, b in zip(*pairs, strict=True):
            table[a, b] += 1
        assert_p_value(stats.chisquare(table.flatten()).pvalue, f"pairs of {what}")


def greedy_actions(agent: Any, contexts: Tensor) -> list[int]:
    with torch.no_grad():
        values = [agent.net(contexts[None], torch.full((1, agent.replicas), action))[0] for action in range(ACTIONS)]
    return torch.stack(values).argmax(0).tolist()


@pytest.mark.parametrize("kind", ["epsilon, input", "epsilon, output"])
def test_epsilon_0_always_does_what_is_best(kind: str) -> None:
    agent = KINDS[kind](epsilon=0, replicas=3)
    found = set()
    for t in range(30):
        contexts, _ = neighbours(agent, t)
        found |= set(agent.act_all(contexts))
        assert agent.act_all(contexts) == agent.act_all(contexts) == greedy_actions(agent, contexts)
        live(agent, [t])
    assert len(found) > 2


@pytest.mark.statistical
def test_each_replica_explores_as_often_as_its_epsilon_says() -> None:
    epsilons = [0.0, 0.3, 0.8]
    agent = KINDS["epsilon, input"](epsilon=epsilons, replicas=3, seed=2)
    contexts, _ = neighbours(agent, 0)
    best, n = greedy_actions(agent, contexts), 2000
    chosen = torch.tensor([agent.act_all(contexts) for _ in range(n)])
    other = (chosen != torch.tensor(best)).double().mean(0)
    assert other[0] == 0
    expected = 0.75 * torch.tensor(epsilons[1:], dtype=torch.float64)
    assert_z((other[1:] - expected) / (expected * (1 - expected) / n).sqrt(), "actions that are not the best")


@pytest.mark.statistical
@pytest.mark.parametrize("draws", [1, 3])
def test_thompson_sampling_takes_an_action_as_often_as_its_draws_find_it_best(draws: int) -> None:
    # A linear network: the difference of two outputs is normal, and its average over draws too.
    agent: Any = ThompsonSampling(2, 2, hidden=(), encoding="output", sigma=0.5, draws=draws, replicas=3, seed=3)
    with torch.no_grad():
        agent.net.layers[0].weight.zero_()
        agent.net.layers[0].bias.copy_(torch.tensor([0.0, 0.6]))
    contexts = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, -1.0]])
    n = 1500
    chosen = torch.tensor([agent.act_all(contexts) for _ in range(n)]).double()
    spread = 0.5 * (2 * (1 + contexts.double().square().sum(1)) / draws).sqrt()
    expected = torch.distributions.Normal(0, 1).cdf(0.6 / spread)
    assert_z((chosen.mean(0) - expected) / (expected * (1 - expected) / n).sqrt(), "the better action")
    # Replicas and decisions draw networks of their own.
    pairs = [(chosen[:, 0], chosen[:, 1]), (chosen[:, 1], chosen[:, 2]), (chosen[1:, 1], chosen[:-1, 1])]
    z = [float(torch.corrcoef(torch.stack(pair))[0, 1]) * math.sqrt(n) for pair in pairs]
    assert_z(torch.tensor(z), "correlations")


def test_no_two_decisions_nor_an_update_draw_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = KINDS["thompson, input"](draws=3)
    draw, drawn = agent.model.draw, []
    monkeypatch.setattr(agent.model, "draw", lambda step, number: drawn.append((step, number)) or draw(step, number))
    live(agent, range(4))
    assert drawn == [(0, number) for number in range(12)]  # updates count their steps from 1


# --- the linear agent ------------------------------------------------------------------------------------------------


def linear_data(n: int, replicas: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(8)
    contexts = torch.randn(n, 2, generator=random)
    rewards = contexts @ torch.tensor([1.0, -2.0]) + 0.5 + 0.3 * torch.randn(n, generator=random)
    return contexts[:, None].expand(n, replicas, 2), torch.zeros(n, replicas, dtype=torch.int64), rewards


def test_the_linear_posterior_is_ridge_regression() -> None:
    agent = LinearThompson(FEATURES, 2, precision=0.3, replicas=2, seed=1)
    random = torch.Generator().manual_seed(2)
    seen: dict[tuple[int, int], list[tuple[Tensor, float]]] = {(r, a): [] for r in range(2) for a in range(2)}
    for _ in range(30):
        contexts = torch.randn(2, FEATURES, generator=random)
        actions = torch.randint(2, (2,), generator=random).tolist()
        rewards = torch.randn(2, generator=random).tolist()
        agent.observe_all(contexts, actions, rewards)
        for r in range(2):
            seen[r, actions[r]].append((torch.cat([contexts[r].double(), torch.ones(1)]), rewards[r]))
    tensors = agent.tensors()
    for place, pairs in seen.items():
        x, y = torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs], dtype=torch.float64)
        # sqrt(precision) I under X, and zeros under y: least squares on these is ridge regression.
        more = torch.cat([x, math.sqrt(0.3) * torch.eye(FEATURES + 1, dtype=torch.float64)])
        ridge = torch.linalg.lstsq(more, torch.cat([y, torch.zeros(FEATURES + 1)])[:, None]).solution[:, 0]
        assert torch.allclose(tensors["matrix"][place], more.T @ more)
        assert torch.allclose(tensors["root"][place] @ tensors["root"][place].T, more.T @ more)
        assert torch.allclose(torch.linalg.solve(tensors["matrix"][place], tensors["moment"][place]), ridge)
        assert float(tensors["square"][place]) == pytest.approx(float(y.square().sum()))
        assert tensors["count"][place] == len(pairs) > 5


@pytest.mark.statistical
@pytest.mark.parametrize("n", [0, 5])
def test_linear_draws_are_of_the_exact_posterior(n: int) -> None:
    # Against an action whose reward is known to be v, the other is taken as often as its draws exceed v, and those
    # have a multivariate t-distribution.
    replicas, precision, a, b = 1500, 0.5, 1.5, 2.0
    contexts, actions, rewards = linear_data(n, replicas)
    x = torch.cat([contexts[:, 0].double(), torch.ones(n, 1)], 1)
    matrix = precision * torch.eye(3, dtype=torch.float64) + x.T @ x
    mean = torch.linalg.solve(matrix, x.T @ rewards.double())
    a_n = a + n / 2
    b_n = b + 0.5 * float(rewards.double().square().sum() - mean @ matrix @ mean)
    agent = LinearThompson(2, 2, precision=precision, a=a, b=b, replicas=replicas, seed=n)
    for xs, each, reward in zip(contexts, actions, rewards, strict=True):
        agent.observe_all(xs, each.tolist(), reward.expand(replicas))
    z = []
    for context in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]):
        at = torch.tensor([*context, 1.0], dtype=torch.float64)
        scale = math.sqrt(b_n / a_n * float(at @ torch.linalg.solve(matrix, at)))
        posterior = stats.t(2 * a_n, float(at @ mean), scale)
        for share in (0.05, 0.3, 0.9, 0.99):
            known = agent.tensors()
            known["matrix"][:, 1] = 1e20 * torch.eye(3, dtype=torch.float64)
            known["root"][:, 1] = 1e10 * torch.eye(3, dtype=torch.float64)
            known["moment"][:, 1] = torch.tensor([0.0, 0.0, 1e20 * posterior.isf(share)], dtype=torch.float64)
            taken = agent.act_all(at[:2].expand(replicas, 2)).count(0) / replicas
            z.append((taken - share) / math.sqrt(share * (1 - share) / replicas))
    assert_z(torch.tensor(z), "draws of the linear model")


@pytest.mark.statistical
def test_decisions_of_the_linear_agent_are_independent() -> None:
    agent = LinearThompson(2, 2, replicas=2, seed=9)
    chosen = torch.tensor([agent.act_all(torch.ones(2, 2)) for _ in range(1000)]).double()
    assert_mean(chosen, 0.5, "either action")
    pairs = [(chosen[:, 0], chosen[:, 1]), (chosen[1:, 0], chosen[:-1, 0])]
    z = [float(torch.corrcoef(torch.stack(pair))[0, 1]) * math.sqrt(1000) for pair in pairs]
    assert_z(torch.tensor(z), "correlations")


@pytest.mark.learning
def test_the_linear_agent_finds_the_best_action() -> None:
    contexts = torch.randn(200, 2, generator=torch.Generator().manual_seed(1))
    rewards = contexts @ torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]]) + torch.tensor([0.0, 0.2, -0.2])
    places = [[Table(contexts, rewards, seed) for seed in range(5)] for _ in range(2)]
    regret = simulate(places[0], LinearThompson(2, 3, replicas=5), 200)
    random = simulate(places[1], Uniform(2, 3, replicas=5), 200)
    assert float(regret[:, -1].max()) < 0.15 * float(random[:, -1].min())
    assert float((regret[:, -1] - regret[:, 99]).mean()) < 0.02 * float((random[:, -1] - random[:, 99]).mean())


# --- the neural agents learn -----------------------------------------------------------------------------------------


@pytest.mark.learning
def test_thompson_sampling_explores_and_then_loses_almost_nothing() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    places = [[Table(torch.eye(3), rewards, seed) for seed in range(8)] for _ in range(2)]
    learning: Any = {"hidden": [16], "updates": 16, "batch_size": 32, "learning_rate": 0.02}
    agent = ThompsonSampling(3, 2, prior=Normal(0.5), sigma=0.3, noise=0.1, replicas=8, seed=1, **learning)
    first = [set() for _ in range(8)]  # type: ignore[var-annotated]
    act_all = agent.act_all

    def watched(contexts: Any) -> list[int]:
        actions = act_all(contexts)
        for tried, action in zip(first, actions, strict=True):
            if agent.acted <= 15:
                tried.add(action)
        return actions

    agent.act_all = watched  # type: ignore[method-assign]
    regret = simulate(places[0], agent, 80)
    random = simulate(places[1], Uniform(3, 2, replicas=8), 80)
    assert all(len(tried) == 2 for tried in first)
    assert float(regret[:, 9].mean()) > 1
    assert float(regret[:, -1].mean()) < 0.4 * float(random[:, -1].mean())
    assert float((regret[:, -1] - regret[:, 49]).mean()) < 0.05 * float((random[:, -1] - random[:, 49]).mean())


@pytest.mark.learning
def test_epsilon_greedy_learns_the_mean_reward() -> None:
    outcomes = torch.tensor([[[4.0, 1.0]], [[-2.0, 2.0]]])
    agent: Any = EpsilonGreedy(
        1, 2, epsilon=1.0, hidden=[8], updates=4, learning_rate=0.01, batch_size=64, scale=10.0, encoding="output"
    )
    simulate([Table(torch.ones(1, 1), outcomes)], agent, 200)
    remembered = [
        10 * float(agent.tensors()["rewards"][:200][agent.tensors()["actions"][:200] == action].mean())
        for action in range(2)
    ]
    with torch.no_grad():
        learnt = [10 * float(agent.net(torch.ones(1, 1, 1), torch.tensor([[action]]))) for action in range(2)]
    assert learnt == pytest.approx(remembered, abs=0.3)
    assert agent._values(agent.net, torch.ones(1, 1)).flatten().tolist() == pytest.approx([x / 10 for x in learnt])


# --- runs ------------------------------------------------------------------------------------------------------------


class Scripted(Agent):
    """Does as it is told, and writes down what it hears."""

    def __init__(self, features: int, actions: int, *, replicas: int = 1, seed: int = 0) -> None:
        super().__init__(features, actions, replicas=replicas, seed=seed)
        self.heard: list[tuple[Tensor, list[int], list[float]]] = []

    def _choose(self, contexts: Tensor) -> list[int]:
        return [(self.acted + r) % self.actions for r in range(self.replicas)]

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        self.heard.append((contexts, actions.tolist(), rewards.tolist()))

    def tensors(self) -> dict[str, Tensor]:
        return {}


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
    ],
)
def test_runs_that_cannot_be_are_refused(environments: list[Environment], steps: Any, named: str) -> None:
    agent = Uniform(2, 5, replicas=2)
    with pytest.raises(ValueError, match=f"'{named}' parameter of simulate"):
        simulate(environments, agent, steps)
    assert (agent.acted, [environment.t for environment in environments]) == (0, [0] * len(environments))


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


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, one of each kind, whose process was killed."""
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, str(folder)], env=environment, check=True, timeout=TIMEOUT)
    return folder


@pytest.mark.equivalence
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_goes_on_bit_for_bit(kind: str, killed: Path, tmp_path: Path) -> None:
    ends = json.loads((killed / "ends.json").read_text())
    assert ends[kind] == -signal.SIGKILL
    assert done_in(killed / kind) == (LAST, LAST, LAST, [LAST] * 2)
    assert_goes_on(kind, killed / kind, tmp_path / "whole")


def _be_killed(folder: Path) -> None:
    """Run each kind in a process of its own, which dies between acting and the end of a step."""
    import torch._dynamo  # by torch's optimisers, slowly: here once for all

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
    monkeypatch.setattr(simulation, "_write", lambda path, agent, places, regret: written.append(regret.shape[1]))
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


if __name__ == "__main__":
    _be_killed(Path(sys.argv[1]))
