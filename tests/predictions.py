"""Predictions of fully connected networks that are far from their means."""

import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Gaussian


def nested_net(bias: bool = True) -> nn.Sequential:
    """Nested, with Flatten first, and Dropout, which does nothing in evaluation."""
    inner = nn.Sequential(nn.Linear(6, 5, bias), nn.Tanh(), nn.Dropout(0.5))
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6, bias), nn.ReLU(), inner, nn.Linear(5, 2, bias))


def spread_out(net: nn.Module, **options: object) -> Bayesian:
    """The network with random weights, and a standard deviation of half their size."""
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.6)
    return Bayesian(net, Gaussian(0.1), sigma=0.3, seed=3, **options)


def drawn(model: Bayesian, x: Tensor, draws: int, estimator: str | None) -> Tensor:
    """The outputs behind a prediction, ``[draws, examples, units]``."""
    predicted = model.predict(x, draws=draws, estimator=estimator)
    return predicted.components.mean.reshape(draws, len(x), -1)
