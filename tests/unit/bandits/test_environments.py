"""Environments are pure functions of seed and step, and refuse what is no table, no wheel and no action."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bandit_worlds import BAD_ACTIONS, GAINS, PLACES, ROWS, walk
from bayesbackprop.bandits import Environment, Table, Uniform, classification
from bayesbackprop_paper import data
from bayesbackprop_paper.data import Classification
from bayesbackprop_paper.environments import Wheel, adult, covertype

pytestmark = pytest.mark.identities


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


def test_a_table_without_outcomes_gives_what_it_says() -> None:
    for _, expected, rewards in walk(Table(ROWS, GAINS[0]), 50):
        assert torch.equal(rewards, expected)
    whole = Table(torch.ones(1, 1), torch.tensor([[3, 4]]))
    assert (whole.step(1), whole.best, whole.actions, whole.features) == (4.0, 4.0, 2, 1)


def test_naming_a_class_pays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Classification(torch.eye(3), torch.tensor([2, 0, 2]), 4)
    asked: list[Any] = []
    monkeypatch.setattr(data, "adult", lambda **options: asked.append(options) or examples)
    monkeypatch.setattr(data, "covertype", lambda: examples)
    for make in (adult, covertype, lambda seed: classification(*examples, seed=seed)):
        environment = make(1)
        assert (environment.features, environment.actions) == (3, 4)
        for context, expected, rewards in walk(environment, 20):
            assert rewards.tolist() == expected.tolist()
            assert rewards.tolist() == [float(k == examples.labels[int(context.argmax())]) for k in range(4)]
    assert asked == [{"label": "occupation"}]


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


@pytest.mark.parametrize("delay", [-1, 1.0, True, None, "1"])
def test_a_delay_is_a_number_of_steps(delay: Any) -> None:
    environment = PLACES["rows"](0)
    with pytest.raises(ValueError, match="'delay' parameter of Table must be an int"):
        environment.delay = delay
    assert environment.delay == 0


def test_a_delay_is_part_of_what_an_environment_is() -> None:
    plain, late = PLACES["rows"](0), PLACES["rows"](0)
    late.delay = 3
    assert plain.described() == {key: value for key, value in late.described().items() if key != "delay"}
    assert late.described()["delay"] == 3
