"""The memory that a training step needs for itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bayesbackprop import Bayesian, FreeEnergy
from bayesbackprop_paper.bench.memory import peak_memory

WEIGHTS = 400 * 400 + 410 + 400 * 10


def memory_of_a_step(model_of: Callable[[nn.Module], Bayesian], **options: Any) -> float:
    """The peak of steps above mu, rho and their gradients, where 1 is a float32 for each weight.

    Args:
        model_of: Makes the model of a network 400-400-10 that classifies.
        **options: Of the objective.
    """

    def build() -> Callable[[], None]:
        model = model_of(nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)))
        free_energy = FreeEnergy(model, n=40, **options)

        def step() -> None:
            free_energy.zero_grad()
            free_energy(torch.ones(4, 400), torch.zeros(4, dtype=torch.int64)).backward()

        return step

    return peak_memory(build) / (4 * WEIGHTS) - 4
