"""The bandit of the playground: its worlds, and two agents that meet the same contexts and coins."""

import pytest
import torch

from playgrounds import bandit

from bayesbackprop.playground.bandit import WORLDS, Contest, World  # isort: skip

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("name", WORLDS)
def test_probabilities_are_some(name: str) -> None:
    found = World(name, 0).probabilities(torch.linspace(-1, 1, 101))
    assert found.shape == (3, 101)
    assert 0 < float(found.min()) < float(found.max()) < 1


def test_in_crossing_each_is_the_best_somewhere() -> None:
    best = World("crossing", 0).probabilities(torch.linspace(-1, 1, 101)).argmax(0)
    assert best.unique_consecutive().tolist() == [2, 1, 0]


@pytest.mark.statistical
def test_rewards_come_as_often_as_they_should() -> None:
    world, rewards, expected = World("crossing", 3), 0.0, 0.0
    variance = 0.0
    for step in range(2000):
        p = float(world.expected[step % 3])
        rewards, expected, variance = rewards + world.step(step % 3), expected + p, variance + p * (1 - p)
    assert abs(rewards - expected) < 4 * variance**0.5


def test_the_regret_is_what_was_lost_against_the_best_action() -> None:
    contest = Contest(bandit(seed=5))
    contest.run(lambda: contest.step < 12)
    played = contest.look()
    assert contest.step == 12
    assert [player.name for player in played.players] == ["ThompsonSampling", "EpsilonGreedy"]
    assert played.steps == list(range(1, 13))
    for player, contestant in zip(played.players, contest._contestants, strict=True):
        assert sum(player.chosen) == contestant.agent.observed == 12
        assert player.regret == sorted(player.regret)
        assert 0 <= player.regret[0] <= player.regret[-1] == pytest.approx(contestant.regret, abs=1e-4)
        assert {len(curve) for curve in (*player.means, *player.spreads, *played.truth)} == {len(played.contexts)}
    one, two = contest._contestants
    assert torch.equal(one.world.context, two.world.context)
    assert max(map(max, played.players[0].spreads)) > 0 == max(map(max, played.players[1].spreads))


def test_an_agent_that_never_explores_has_no_draws() -> None:
    contest = Contest(bandit(exploration=0, epsilon=0))
    contest.run(lambda: contest.step < 3)
    assert max(map(max, contest.look().players[0].spreads)) == 0
