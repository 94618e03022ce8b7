"""Networks that tests wrap, and a batch for the smallest of them."""

from typing import Any

import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Gaussian

_generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(16, 3, generator=_generator), torch.randn(16, 1, generator=_generator)


def regressor() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def regression_model(**options: Any) -> Bayesian:
    """A model for the batch ``X``, ``Y``."""
    return Bayesian(regressor(), Gaussian(0.3), seed=0, **options)


def classifier(function: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), function(), nn.Linear(5, 3))


class Tied(nn.Module):
    """An embedding and a decoder that share their weight, under the name of whichever comes first."""

    def __init__(self, decoder_first: bool = False, tied: bool = True) -> None:
        super().__init__()
        modules = [("embedding", nn.Embedding(5, 3)), ("decoder", nn.Linear(3, 5))]
        for name, module in reversed(modules) if decoder_first else modules:
            self.add_module(name, module)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(x)
        return embedded, self.decoder(torch.eye(3, dtype=embedded.dtype))


def net_with_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
