"""What is drawn from a prior is distributed as its density says."""

from typing import Any

import pytest
import torch
from scipy import stats

from bayesbackprop import Laplace, Normal, Prior, ScaleMixture
from ztests import assert_p_value

pytestmark = pytest.mark.statistical


@pytest.mark.parametrize(
    ("prior", "distribution"),
    [
        (Normal(0.3), lambda x: stats.norm.cdf(x, scale=0.3)),
        (Laplace(0.2), lambda x: stats.laplace.cdf(x, scale=0.2)),
        (
            ScaleMixture(0.25, 1.0, 0.01),
            lambda x: 0.25 * stats.norm.cdf(x) + 0.75 * stats.norm.cdf(x, scale=0.01),
        ),
    ],
)
def test_samples_are_distributed_as_the_density_says(prior: Prior, distribution: Any) -> None:
    like, random = torch.empty(50, 200, dtype=torch.float64), torch.Generator().manual_seed(0)
    samples = prior.sample(like, random)
    assert samples.shape == like.shape
    assert samples.dtype == torch.float64
    assert_p_value(stats.kstest(samples.flatten().numpy(), distribution).pvalue, f"samples of {prior}")
