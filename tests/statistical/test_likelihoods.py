"""Learnt noise converges to the noise of the data."""

import math

import pytest
import torch
from torch import nn

from bayesbackprop import Bayesian, FreeEnergy, Gaussian

pytestmark = pytest.mark.learning


def fit(model, x, y, steps):
    free_energy = FreeEnergy(model, len(x))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        optimiser.zero_grad()
        free_energy(x, y).backward()
        optimiser.step()


def test_learnt_noise_converges_to_the_true_noise():
    n, noise = 1000, 0.3
    x = torch.randn(n, 2)
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.5 + noise * torch.randn(n, 1)
    model = Bayesian(nn.Linear(2, 1), Gaussian(), seed=0)
    fit(model, x, y, steps=400)
    standard_error = noise / math.sqrt(2 * n)
    assert model.likelihood.log_noise.exp().item() == pytest.approx(noise, abs=4 * standard_error)


def test_noise_per_input_converges_to_the_true_noise():
    n = 2000
    x = torch.randint(2, (n, 1)).float()
    y = torch.where(x == 1, 0.1, 0.5) * torch.randn(n, 1)
    model = Bayesian(nn.Linear(1, 2), Gaussian("per-input"), seed=0)
    fit(model, x, y, steps=500)
    scale = model.likelihood.distribution(model.net(torch.tensor([[0.0], [1.0]]))).stddev.flatten()
    assert scale.tolist() == pytest.approx([0.5, 0.1], rel=4 / math.sqrt(n) * 1.5)
