"""Predictive distributions whose components are given as numbers."""

import numpy as np
import torch
from torch import Tensor, nn

from bayesbackprop import Ensemble


def from_outputs(likelihood, outputs: list[list[list[float]]]):
    """The prediction for networks that give ``outputs`` [draws, B, D]: a bias for each draw, and inputs of 0."""
    values = torch.tensor(outputs, dtype=torch.float64)
    _, examples, width = values.shape

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(examples, width, dtype=torch.float64))

        def forward(self, rows: Tensor) -> Tensor:
            return self.table[rows]

    return Ensemble(Table(), likelihood, {"table": values}).predict(torch.arange(examples))


# Means and the s of noise = log(1 + exp(s)) of three networks for two examples.
MIXTURE = [[[0.0, 0.0], [1.0, -2.0]], [[2.0, 1.0], [1.1, -2.5]], [[-1.0, -1.0], [4.0, 0.5]]]

LEVELS = (1e-4, 0.05, 0.25, 0.5, 0.9, 0.999)


def mixture_parts(example: int) -> tuple[np.ndarray, np.ndarray]:
    parts = np.array(MIXTURE)[:, example]
    return parts[:, 0], np.log1p(np.exp(parts[:, 1]))
