"""Experiments are by their seed, and leave torch's generator as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import digits
from bayesbackprop_paper.experiments import mnist, regression
from bayesbackprop_paper.experiments.recipe import seeded

pytestmark = pytest.mark.identities

WORK: dict[str, Callable[[Path], Any]] = {
    "a network for MNIST": lambda _: mnist.network(digits.RECIPES["dropout"]),
    "a run on MNIST": lambda folder: mnist.run(digits.RECIPES["dropout"], digits.images(), folder),
    "a regression curve": lambda _: regression.fit(regression.Config(points=40, hidden=8, steps=3, draws=5)),
}


@pytest.mark.parametrize("what", WORK)
def test_the_generator_is_as_it_was(what: str, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    WORK[what](tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_decides_the_initial_weights() -> None:
    config = digits.recipe("sgd")
    one = mnist.network(config)
    torch.rand(3)
    assert all(map(torch.equal, one.parameters(), mnist.network(config).parameters()))
    # As it has always been, so that recorded runs can be made again.
    torch.manual_seed(config.seed)
    first = nn.Linear(784, config.units)
    nn.init.kaiming_normal_(first.weight, nonlinearity="relu")
    assert torch.equal(one[0].weight, first.weight)


def test_an_error_leaves_the_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), seeded(3):
        raise RuntimeError(float(torch.rand(())))
    assert torch.equal(torch.get_rng_state(), before)
