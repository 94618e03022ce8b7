"""A file names the layers of a fully connected network, and another function in their place is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bayesbackprop import Bayesian, Gaussian, load, save

pytestmark = pytest.mark.identities


def network(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), *between, nn.Linear(3, 1))


def test_another_activation_is_refused(tmp_path: Path) -> None:
    save(Bayesian(network(nn.ReLU()), Gaussian(0.1), seed=0), tmp_path / "model")
    with pytest.raises(ValueError, match=r"'net' parameter of load must be of the layers .*ReLU.*Got .*Tanh"):
        load(tmp_path / "model", network(nn.Tanh()))


def test_layers_that_do_nothing_in_evaluation_may_differ(tmp_path: Path) -> None:
    model = Bayesian(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1), nn.Linear(3, 1)), Gaussian(0.1), seed=0)
    save(model, tmp_path / "model")
    found = load(tmp_path / "model", nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)))
    x = torch.randn(4, 2)
    assert torch.equal(found.predict_mean(x).mean, model.predict_mean(x).mean)
