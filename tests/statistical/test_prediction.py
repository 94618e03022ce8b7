"""Quantiles of a predictive distribution hold their share of samples."""

import pytest
import torch

from bayesbackprop import Gaussian
from mixtures import LEVELS, MIXTURE, from_outputs, mixture_parts
from ztests import assert_mean

pytestmark = pytest.mark.statistical


def test_quantiles_hold_their_share_of_samples():
    quantiles = from_outputs(Gaussian("per-input"), MIXTURE).quantiles(LEVELS)
    for example in range(2):
        means, scales = (torch.from_numpy(part) for part in mixture_parts(example))
        which = torch.randint(3, (1_000_000,))
        y = means[which] + scales[which] * torch.randn(1_000_000, dtype=torch.float64)
        below = (y.unsqueeze(1) < quantiles[:, example, 0]).double()
        assert_mean(below, torch.tensor(LEVELS).double(), f"samples below the quantiles of example {example}")
