"""Numbers as arguments: numpy's are taken for Python's own, and absurd ones are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesbackprop as bbb

pytestmark = pytest.mark.identities

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

SEEDS: list[Any] = [-1, 2**63, 2**64 + 5, 10**400, 10**5000, 1.0, True, "1", torch.tensor(1)]


def test_numbers_of_numpy_are_numbers() -> None:
    own = bbb.FreeEnergy(bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian(np.float32(0.5)), seed=np.int64(3)), n=np.int64(9))
    assert (type(own.n), type(own.model.seed), type(own.model.likelihood.noise)) == (int, int, float)
    assert type(bbb.Normal(np.float32(0.25)).sigma) is float
    assert len(bbb.Batches(X, X, np.int32(2))) == 3
    assert own.model.predict(X, draws=np.int64(2), seed=np.int64(1)).draws == 2


@pytest.mark.parametrize("seed", SEEDS, ids=range(len(SEEDS)))
def test_seeds_are_64_bit_numbers_everywhere(seed: Any) -> None:
    model = bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian(0.5))
    calls: list[Callable[[], Any]] = [
        lambda: model.predict(X, seed=seed),
        lambda: model.ensemble(2, seed=seed),
        lambda: model.draw(seed=seed),
        lambda: setattr(model, "seed", seed),
        lambda: bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian(0.5), seed=seed),
        lambda: bbb.Batches(X, X, 2, seed=seed),
        lambda: bbb.fit(model, bbb.Batches(X, X[:, :1], 2), epochs=1, seed=seed),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"The 'seed' parameter of .* must be an int in"):
            call()


def test_far_seeds_have_orders_of_their_own() -> None:
    rows = torch.arange(50.0)[:, None]
    orders = {
        tuple(next(iter(bbb.Batches(rows, rows, 50, seed=seed)))[0].flatten().tolist())
        for seed in (5, 2**61 + 5, 2**62 + 5, 2**63 - 1)
    }
    assert len(orders) == 4
