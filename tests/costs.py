"""A small model and data, for tests of what its cost is and does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, Likelihood, Normal
from opaque import Opaque

# A network that is trained as a fully connected one, and the same as any module.
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {"fully connected": lambda net: net, "any module": Opaque}
wraps = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def model_of(wrap: Callable[[nn.Module], nn.Module] = WRAPS["fully connected"], **options: Any) -> Bayesian:
    """Three inputs, four classes, in double precision, always with the same weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 4)).double()
    likelihood: Likelihood = options.pop("likelihood", None) or Categorical()
    return Bayesian(wrap(net), likelihood, Normal(0.4), sigma=0.1, seed=7, **options)


def data(batch: int = 6) -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (batch,), generator=generator)


def gradients(model: Bayesian) -> list[Tensor]:
    """As they are, of each parameter."""
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]
