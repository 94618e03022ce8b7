"""The reward network: its replicas are networks of their own."""

from typing import Any

import pytest
import torch

from bandit_worlds import ACTIONS, FEATURES
from bayesbackprop.bandits.network import RewardNetwork

pytestmark = pytest.mark.identities


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
