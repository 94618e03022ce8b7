"""Activation checkpointing: its second pass would see the means, so it is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bayesbackprop import FreeEnergy
from layers import each_estimator, wrap


class Checkpointed(nn.Module):
    """Activations of the first layer are computed a second time in the backward pass, if ``active``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.outer = nn.Linear(4, 2)
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        def first(x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x))

        return self.outer(checkpoint(first, x, use_reentrant=False) if self.active else first(x))


@pytest.mark.equivalence
@each_estimator
def test_checkpointed_activations_are_right_or_refused(estimator: str) -> None:
    """The second computation must see the draw as well: gradients at the mean, without a word, would be the worst."""
    start, x, y = Checkpointed(), torch.randn(4, 3).double(), torch.randn(4, 2).double()

    def gradients(active: bool) -> list[Tensor | None]:
        net = copy.deepcopy(start)
        net.active = active
        model = wrap(net, estimator)
        FreeEnergy(model, n=20)(x, y).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(active=False)
    try:
        got = gradients(active=True)
    except RuntimeError:
        return
    torch.testing.assert_close(got, expected)
