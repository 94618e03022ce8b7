"""Batch normalisation: running statistics for the weights that a network is to be used with."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from bayesbackprop._batches import Data, arguments, unlabelled
from bayesbackprop._engine import evaluating, normalising
from bayesbackprop._errors import check_batch, check_count, check_seed, check_type, tensors_of
from bayesbackprop.model import Bayesian

__all__ = ["update_batchnorm"]

_OWNER = "update_batchnorm"


def update_batchnorm(
    model: Bayesian | nn.Module, data: Data, *, draws: int = 0, seed: int | None = None
) -> Bayesian | nn.Module:
    """Re-estimate the running statistics of batch normalisation in ``model`` from ``data``, and return it.

    During training these layers average over minibatches, and over the networks that were drawn. The network at the
    mean, or what is left of it after pruning, has other activations. This replaces the running mean and variance of
    each layer by the averages over the batches of ``data``. All other layers are in evaluation mode meanwhile, so there
    is no dropout. Nothing else changes, and after an error nothing has.

    Args:
        model: A Bayesian, whose network is run at the posterior mean, or any other network.
        data: Inputs, with or without targets: a tensor, a pair, a ``Dataset``, or an iterable of batches. Batches of
            the size that training had give statistics like those of training.
        draws: Networks to draw for each batch, where the model is to predict by draws; 0 for the mean.
        seed: Of the draws; None for the model's own.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        >>> x = torch.tensor([[0.0], [2.0]])
        >>> with torch.no_grad():
        ...     parameters = net[0].weight.fill_(1.0), net[0].bias.fill_(0.0)
        >>> update_batchnorm(Bayesian(net, Gaussian(1.0)), x).net[1].running_mean
        tensor([1.])
    """
    check_type(_OWNER, nn.Module, "a Bayesian, or another torch.nn.Module", model=model)
    draws = check_count(_OWNER, least=0, draws=draws)["draws"]
    if seed is not None:
        check_seed(_OWNER, seed=seed)
    if not isinstance(model, Bayesian):
        check_count(_OWNER, least=0, below=1, draws=draws)
    elif not draws:
        model.check_about_mu(_OWNER)
    net = model.net if isinstance(model, Bayesian) else model
    layers = normalising(net)
    before = [(layer, layer.momentum, {name: b.clone() for name, b in layer.named_buffers()}) for layer in layers]
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    with evaluating(net):
        try:
            update_bn(_wrapped(data, device), _Called(model, net, draws, seed))
        except BaseException:
            for layer, momentum, buffers in before:
                layer.momentum = momentum
                for name, value in buffers.items():
                    layer.get_buffer(name).copy_(value)
            raise
    return model


def _wrapped(data: Data, device: torch.device | None) -> Iterator[list[Any]]:
    """Batches as ``update_bn`` takes them: it hands the first of a list to the network."""
    for inputs in unlabelled(data, "data", _OWNER, device):
        yield [inputs]


class _Called(nn.Module):
    """A network that takes the inputs of a batch, and whose mode is that of batch normalisation alone."""

    def __init__(self, model: nn.Module, net: nn.Module, draws: int, seed: int | None) -> None:
        super().__init__()
        self.net, self.training = net, False
        self._run: list[Any] = [net]  # in a list, where its parameters are not looked for
        if draws:
            assert isinstance(model, Bayesian)
            self._run = [model.draw(0, index, seed) for index in range(draws)]

    def train(self, mode: bool = True) -> "_Called":
        for layer in normalising(self.net):
            layer.training = mode
        return self

    def forward(self, inputs: Any) -> None:
        args, kwargs = arguments(inputs, _OWNER)
        check_batch("data", _OWNER, tensors_of((args, kwargs)))
        for run in self._run:
            run(*args, **kwargs)
