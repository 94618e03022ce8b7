"""The network of the neural agents: the expected reward of an action in a context, for several agents at once."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from bayesbackprop._networks import mlp

Encoding = Literal["input", "output"]


class Parallel(nn.Module):
    """``replicas`` linear layers of the same size side by side: each has its own weights, input and output."""

    def __init__(self, random: torch.Generator, replicas: int, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(replicas, outputs, inputs, generator=random).mul_(math.sqrt(2 / inputs))  # He et al.
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(replicas, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """``[replicas, B, inputs]`` to ``[replicas, B, outputs]``."""
        return torch.baddbmm(self.bias, x, self.weight.mT)


class RewardNetwork(nn.Module):
    """Fully connected, with rectified linear units: contexts and actions to expected rewards.

    A row of a batch holds one context and one action for each of the replicas: together they are one example, whose
    likelihood is the product of theirs, so the cost of a minibatch is the sum of the costs of the replicas. The
    arguments are those of :class:`bayesbackprop.bandits.agents.NeuralAgent`.
    """

    def __init__(
        self, features: int, actions: int, hidden: Sequence[int], encoding: Encoding, replicas: int, seed: int
    ) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        first, last = (features + actions, 1) if encoding == "input" else (features, actions)
        self.layers = mlp([first, *hidden, last], linear=partial(Parallel, random, replicas))
        self.encoding = encoding
        self.one_of = nn.Buffer(torch.eye(actions), persistent=False)

    def forward(self, contexts: Tensor, actions: Tensor) -> Tensor:
        """Contexts ``[B, replicas, features]`` and actions ``[B, replicas]`` to expected rewards ``[B, replicas]``."""
        if self.encoding == "input":
            inputs = torch.cat([contexts, self.one_of[actions]], dim=-1)
            rewards: Tensor = self.layers(inputs.transpose(0, 1))
            return rewards.squeeze(-1).t()
        outputs: Tensor = self.layers(contexts.transpose(0, 1)).transpose(0, 1)
        return outputs.gather(-1, actions[..., None]).squeeze(-1)
