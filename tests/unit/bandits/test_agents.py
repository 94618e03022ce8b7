"""Agents learn what they observed, refuse what they cannot learn from, and choose by the seed."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bandit_worlds import (
    ACTIONS,
    BAD_ACTIONS,
    FEATURES,
    GOOD,
    KINDS,
    LEARNING,
    NAN,
    NEURAL,
    SMALL,
    assert_same,
    expected_reward,
    greedy_actions,
    live,
    neighbours,
    snapshot,
)
from bayesbackprop import Categorical, Gaussian, Normal
from bayesbackprop.bandits import Agent, EpsilonGreedy, LinearThompson, ThompsonSampling, Uniform, load
from bayesbackprop.bandits._rates import learns

pytestmark = pytest.mark.identities


def test_the_actions_of_the_kinds_are_by_the_seed() -> None:
    for make in KINDS.values():
        runs = [live(make(seed=seed, replicas=4), range(12)) for seed in (0, 0, 1)]
        assert runs[0] == runs[1] != runs[2]
        assert runs[0][1:] != runs[2][:-1]


@pytest.mark.parametrize(("seed", "low_bits"), [(20_260_101, 20_260_101 % 2**16), (2**31, 0), (2**63 - 1, 2**31 - 1)])
def test_a_large_seed_is_a_seed_with_all_its_bits(seed: int, low_bits: int) -> None:
    for make in KINDS.values():
        runs = [live(make(seed=each, replicas=4), range(12)) for each in (seed, seed, low_bits)]
        assert runs[0] == runs[1] != runs[2]


# --- what they take --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_learnt_from_is_refused_and_changes_nothing(kind: str) -> None:
    agent = KINDS[kind](seed=2)
    live(agent, range(3))
    before, name = snapshot(agent), type(agent).__name__
    contexts: list[Any] = [GOOD[:2], [*GOOD, 0.4], [GOOD], 0.1, None, "abc", ["a", "b", "c"], [0.1, None, 0.3]]
    contexts += [[0.1, NAN, 0.2], [float("inf"), 0, 0], [1e300, 0, 0]]
    rewards: list[Any] = [NAN, float("inf"), -float("inf"), 1e16, -1e300, None, "1", [1.0], torch.ones(2)]
    for context in contexts:
        with pytest.raises(ValueError, match=rf"'context' parameter of {name}\.act must be .*\. Got .*\.$"):
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
        (lambda: ThompsonSampling(2, 2, likelihood=Categorical()), "likelihood"),
        (lambda: ThompsonSampling(2, 2, likelihood=Gaussian("learnt"), replicas=2), "likelihood"),
        (lambda: EpsilonGreedy(2, 2, likelihood="normal"), "likelihood"),  # type: ignore[arg-type]
        (lambda: ThompsonSampling(2, 2, exploration=-1), "exploration"),
        (lambda: ThompsonSampling(2, 2, settling=0), "settling"),
        (lambda: ThompsonSampling(2, 2, sigma=0), "sigma"),
        (lambda: ThompsonSampling(2, 2, temperature=-1), "temperature"),
        (lambda: ThompsonSampling(2, 2, prior="wide"), "prior"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"The '{named}' parameter of"):
        make()


# --- what they remember ----------------------------------------------------------------------------------------------


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
    minimise, calls = agent._minimise, []

    def record(inputs: Tensor, targets: Tensor, remembered: int) -> Any:
        contexts, coded, (columns, rewards) = inputs[..., :FEATURES], inputs[..., FEATURES:], targets.unbind(-1)
        actions = columns.long() if agent.encoding == "output" else coded.argmax(-1)
        assert agent.encoding == "output" or (torch.equal(coded, torch.eye(ACTIONS)[actions]) and not columns.any())
        calls.append((contexts, actions, rewards, remembered))
        return minimise(inputs, targets, remembered)

    monkeypatch.setattr(agent, "_minimise", record)
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
    minimise, weights = agent._minimise, []

    def record(*arguments: Any) -> Any:
        made = minimise(*arguments)
        weights.append(float(made.complexity_weight))
        return made

    monkeypatch.setattr(agent, "_minimise", record)
    live(agent, range(8))
    assert weights == pytest.approx([0.25 / n for n in (1, 2, 3, 4, 5, 5, 5, 5) for _ in range(2)])
    assert int(agent.tensors()["step"]) == len(weights)


# --- replicas --------------------------------------------------------------------------------------------------------


def of_replica(agent: Agent, r: int) -> dict[str, Tensor]:
    """The tensors that belong to one replica."""
    tensors = {name: tensor.clone() for name, tensor in agent.tensors().items() if tensor.dim()}
    behind = ("contexts", "actions", "rewards", "errors")  # where replicas are the second dimension
    return {name: t[:, r] if name in behind else t[r] for name, t in tensors.items()}


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
    assert not any(
        torch.equal(changed[name], unchanged[name])
        for name in changed
        if not name.endswith(("step", "is_number", "began", "regression.count"))
    )


def singles(agent: Any, **options: Any) -> list[Any]:
    """The replicas of an agent as agents of their own."""
    found: list[Any] = []
    for r in range(agent.replicas):
        single: Any = type(agent)(FEATURES, ACTIONS, **{**SMALL, **options})
        mine, its = agent.tensors(), single.tensors()
        single.restore(
            {name: mine[name][r : r + 1] if name.startswith("parameter.") else its[name] for name in its}, 0, 0
        )
        found.append(single)
    return found


def batch(replicas: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(5, replicas, FEATURES), torch.randint(ACTIONS, (5, replicas)), torch.randn(5, replicas)


def cost_of(agent: Any, contexts: Tensor, actions: Tensor, rewards: Tensor) -> Any:
    options = {"n": 8} if isinstance(agent, ThompsonSampling) else {}
    return agent._objective(agent._inputs(contexts, actions), agent._targets(actions, rewards), **options)


@pytest.mark.parametrize("encoding", ["input", "output"])
@torch.no_grad()
def test_the_cost_of_replicas_is_the_sum_of_theirs(encoding: str) -> None:
    contexts, actions, rewards = batch(3)
    parts = [(contexts[:, [r]], actions[:, [r]], rewards[:, [r]]) for r in range(3)]
    shared: Any = {"encoding": encoding, "likelihood": Gaussian(0.3)}
    greedy: Any = EpsilonGreedy(FEATURES, ACTIONS, replicas=3, **SMALL, **shared)
    costs = [float(cost_of(each, *part)) for each, part in zip(singles(greedy, **shared), parts, strict=True)]
    assert float(cost_of(greedy, contexts, actions, rewards)) == pytest.approx(sum(costs), rel=1e-5)
    # Without noise, the likelihood; and the complexity where it has a closed form.
    options: Any = {"sigma": 1e-12, "prior": Normal(0.7), "temperature": 1.0, **shared}
    thompson: Any = ThompsonSampling(FEATURES, ACTIONS, replicas=3, **SMALL, **options)
    alone = singles(thompson, **options)
    made = [cost_of(each, *part) for each, part in zip(alone, parts, strict=True)]
    whole = cost_of(thompson, contexts, actions, rewards)
    assert float(whole.likelihood) == pytest.approx(sum(float(cost.likelihood) for cost in made), rel=1e-5)
    assert float(whole.complexity_weight) == float(made[0].complexity_weight) == 1 / 8
    closed = [float(each.model.complexity_closed()) for each in alone]
    assert float(thompson.model.complexity_closed()) == pytest.approx(sum(closed), rel=1e-5)
    normal = torch.distributions.Normal(expected_reward(alone[0], *parts[0][:2]), 0.3)
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


@pytest.mark.parametrize("replicas", [1, 2])
def test_from_a_tenth_of_the_rate_on_updates_are_rarer(replicas: int) -> None:
    agent: Any = EpsilonGreedy(1, 2, hidden=(2,), updates=1, batch_size=1, memory=8, halving=2, replicas=replicas)
    learnt: list[int] = []
    step = agent._optimiser.step
    agent._optimiser.step = lambda: learnt.append(agent.observed) or step()
    for _ in range(200):
        agent.observe_all([[1.0]] * replicas, [1] * replicas, [1.0] * replicas)
    assert learnt == [n for n in range(200) if learns(n, 2)]
    assert learnt[:19] == list(range(19))
    assert 50 < len(learnt) < 80


def test_a_replica_that_began_anew_learns_while_another_rests() -> None:
    agent: Any = EpsilonGreedy(1, 2, hidden=(2,), updates=1, batch_size=1, memory=8, halving=2, replicas=2)
    agent.observed = next(n for n in range(100) if not learns(n, 2))
    agent._began[0] = agent.observed
    before = [p.detach().clone() for p in agent.net.parameters()]
    agent.observe_all([[1.0]] * 2, [1] * 2, [1.0] * 2)
    for replica, moves in enumerate((True, False)):
        pairs = zip(agent.net.parameters(), before, strict=True)
        assert any(not p[replica].equal(old[replica]) for p, old in pairs) == moves


# --- how they choose -------------------------------------------------------------------------------------------------


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


def test_no_two_decisions_nor_an_update_draw_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = KINDS["thompson, input"](draws=3)
    draw, drawn = agent.model.draw, []

    def spy(step: int, number: int, **options: bool) -> Any:
        drawn.append((step, number))
        return draw(step, number, **options)

    monkeypatch.setattr(agent.model, "draw", spy)
    live(agent, range(4))
    decisions = [key for key in drawn if key[0] == 0]
    assert decisions == [(0, number) for number in range(12)]
    updates = [key for key in drawn if key[0] > 0]  # which count their steps from 1
    assert updates == [(step, 0) for step in range(1, 1 + len(updates))]
    assert len(updates) == 4 * agent.updates


# --- the linear agent ------------------------------------------------------------------------------------------------


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


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_errors_name_the_class_and_the_method_that_was_called(kind: str) -> None:
    agent, short = KINDS[kind](), [0.0]
    calls: dict[str, Callable[[], Any]] = {
        "act": lambda: agent.act(short),
        "act_all": lambda: agent.act_all([short]),
        "observe": lambda: agent.observe(short, 0, 1.0),
        "observe_all": lambda: agent.observe_all([short], [0], [1.0]),
        "decide": lambda: agent.decide(short),
        "decide_many": lambda: agent.decide_many([short]),
        "explain": lambda: agent.explain(short),
        "explain_many": lambda: agent.explain_many([short]),
        "warm_start": lambda: agent.warm_start([short], [0], [1.0]),
    }
    for method, call in calls.items():
        with pytest.raises(ValueError, match=rf"'context' parameter of {type(agent).__name__}\.{method} must"):
            call()
    with pytest.raises(TypeError, match=rf"{type(agent).__name__}\.__init__\(\) missing .* 'actions'"):
        type(agent)(features=3)  # type: ignore[call-arg]


def test_features_that_an_agent_does_not_take_are_shown_as_they_were_given() -> None:
    with pytest.raises(ValueError, match=r"unless the agent has action_features\. Got \[\[1\.0\], \[2\.0\]\] instead"):
        Uniform(FEATURES, 2).decide(GOOD, features=[[1.0], [2.0]])


# --- features that are too large -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_features_that_no_network_can_square_are_refused_and_change_nothing(kind: str) -> None:
    agent: Any = KINDS[kind]()
    context = [0.1] * agent.features
    agent.observe(context, 0, 1.0)
    before = agent.tensors()
    for large in (1e8, 1e30, -1e7, 1e300):
        for call in (
            lambda large=large: agent.act([large] * agent.features),
            lambda large=large: agent.observe([large] * agent.features, 0, 1.0),
        ):
            with pytest.raises(ValueError, match=r"'context' parameter of .* scale the features"):
                call()
    after = agent.tensors()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    agent.observe(context, 0, 1.0)
    assert agent.observed == 2


def test_a_precision_without_a_root_is_refused_and_changes_nothing() -> None:
    agent = LinearThompson(2, 2, precision=1e-30)
    before = agent.tensors()
    with pytest.raises(ValueError, match="'context' parameter of LinearThompson"):
        agent.observe([1e6, 1e6], 0, 1.0)
    assert all(torch.equal(value, agent.tensors()[name]) for name, value in before.items())
    assert agent.observed == 0
