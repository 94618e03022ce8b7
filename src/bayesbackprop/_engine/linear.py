"""A linear layer whose weights are random: at a draw, forward and back by hand, and in prediction.

With G the gradient of the output, r and s random signs, zeta normal numbers, and W = mu + sigma * eps:

===========  ================================================  ========================================================
``shared``   x W^T                                             G^T x by W
``flipout``  x mu^T + r * ((s * x) (W - mu)^T)                 G^T x by mu, (r * G)^T (s * x) by W - mu
``local``    x mu^T + sqrt(x^2 (sigma^2)^T) * zeta             G^T x by mu, (G * zeta / (2 sqrt(...)))^T x^2 by sigma^2
===========  ================================================  ========================================================
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesbackprop._engine import ops
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop._engine.rules import Estimator
from bayesbackprop.noise import Key, Role, stream

# A weight and its bias.
Pair = tuple[Tensor, Tensor | None]


class Layer(NamedTuple):
    """A random linear layer: its weight and bias by their numbers among a network's parameters, and as its own."""

    weight: int
    bias: int | None
    own: Parameters
    rule: "Rule"

    @staticmethod
    def of(parameters: Parameters, weight: int, bias: int | None, estimator: Estimator) -> "Layer":
        """The layer whose weight and bias have these numbers."""
        names = list(parameters.by_name)
        own = parameters.subset([names[number] for number in (weight, bias) if number is not None])
        return Layer(weight, bias, own, RULES[estimator])

    def pair(self, tensors: Sequence[Tensor]) -> Pair:
        """Of one tensor for each parameter of the network those of this layer."""
        return tensors[self.weight], None if self.bias is None else tensors[self.bias]

    # --- in prediction -----------------------------------------------------------------------------------------------

    def moments(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The means and standard deviations of the outputs, from the variances of ``weight`` and ``bias``."""
        return F.linear(x, *self.own.mus), F.linear(x.square(), weight, bias).sqrt_()

    def spread(self, mean: Tensor, deviation: Tensor, key: Key, many: int, one_row: bool) -> Tensor:
        """Draws of the outputs from ``key`` on; with ``one_row`` of noise for all, a row's draws are its own matter."""
        rows, units = mean.shape[-2:]
        shape = (1 if one_row else rows, units)
        zeta = ops.normals(many, shape, key, stream(self.weight, Role.ACTIVATION), mean.dtype, mean.device)
        return torch.addcmul(mean, zeta, deviation) if one_row and rows > 1 else zeta.mul_(deviation).add_(mean)

    def drawn(self, x: Tensor, key: Key) -> Tensor:
        """The outputs for a draw of the weights."""
        return F.linear(x, *(w[0] for w in ops.draws(self.own, key, 1)))


class At(NamedTuple):
    """Where a layer is evaluated: its input, the weights drawn for the network, the noise, what forward has kept."""

    x: Tensor
    ws: Sequence[Tensor]
    key: Key
    kept: tuple[Tensor, ...] = ()


class Gradients(NamedTuple):
    """By the drawn weights, the means and the variances of a network's parameters; None where they are not used."""

    drawn: list[Tensor | None]
    mean: list[Tensor | None]
    variance: list[Tensor | None]

    @staticmethod
    def none(count: int) -> "Gradients":
        """Places for those of ``count`` parameters."""
        return Gradients([None] * count, [None] * count, [None] * count)


class Rule(ABC):
    """How the noise of a layer's weights enters its outputs."""

    @abstractmethod
    def forward(self, layer: Layer, at: At) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output, in memory of its own, and what is to be kept for the way back."""

    @abstractmethod
    def to_input(self, layer: Layer, at: At, gradient: Tensor) -> Tensor:
        """The gradient by the input."""

    @abstractmethod
    def to_parameters(self, layer: Layer, at: At, gradient: Tensor, to: Gradients) -> None:
        """Put the gradients by the layer's parameters, in memory of their own, into their places."""


class Shared(Rule):
    """One draw for the whole batch."""

    def forward(self, layer: Layer, at: At) -> tuple[Tensor, tuple[Tensor, ...]]:
        return F.linear(at.x, *layer.pair(at.ws)), ()

    def to_input(self, layer: Layer, at: At, gradient: Tensor) -> Tensor:
        return gradient @ at.ws[layer.weight]

    def to_parameters(self, layer: Layer, at: At, gradient: Tensor, to: Gradients) -> None:
        _put_products(to.drawn, layer, gradient, at.x)


class Flipout(Rule):
    """One sign flip of a shared draw for each example. What is drawn for it is W - mu."""

    def forward(self, layer: Layer, at: At) -> tuple[Tensor, tuple[Tensor, ...]]:
        mean = F.linear(at.x, *layer.own.mus)
        s, r = _signs(at.x, layer, at.key, Role.INPUT_SIGN), _signs(mean, layer, at.key, Role.OUTPUT_SIGN)
        return mean.addcmul_(r, F.linear(s * at.x, *layer.pair(at.ws))), (s, r)

    def to_input(self, layer: Layer, at: At, gradient: Tensor) -> Tensor:
        s, r = at.kept
        return torch.addcmul(gradient @ layer.own.mus[0], s, (r * gradient) @ at.ws[layer.weight])

    def to_parameters(self, layer: Layer, at: At, gradient: Tensor, to: Gradients) -> None:
        s, r = at.kept
        _put_products(to.drawn, layer, r * gradient, s * at.x)
        _put_products(to.mean, layer, gradient, at.x)


class Local(Rule):
    """One draw for each output."""

    def forward(self, layer: Layer, at: At) -> tuple[Tensor, tuple[Tensor, ...]]:
        mean, deviation = layer.moments(at.x, *ops.variances(layer.own))
        of_outputs = stream(layer.weight, Role.ACTIVATION)
        zeta = ops.normal(tuple(mean.shape), at.key, of_outputs, mean.dtype, mean.device)
        output = mean.addcmul_(deviation, zeta)
        # By the variance; a unit whose inputs are all 0 has none.
        return output, (zeta.div_(deviation.mul_(2)).nan_to_num_(0.0, 0.0, 0.0),)

    def to_input(self, layer: Layer, at: At, gradient: Tensor) -> Tensor:
        (slope,) = at.kept
        by_square = (gradient * slope) @ ops.variances(layer.own)[0]  # which are computed again, and not kept
        return torch.addcmul(gradient @ layer.own.mus[0], at.x, by_square, value=2)

    def to_parameters(self, layer: Layer, at: At, gradient: Tensor, to: Gradients) -> None:
        (slope,) = at.kept
        _put_products(to.mean, layer, gradient, at.x)
        _put_products(to.variance, layer, gradient * slope, at.x.square())


RULES: dict[Estimator, Rule] = {"shared": Shared(), "flipout": Flipout(), "local": Local()}


def _put_products(to: list[Tensor | None], layer: Layer, gradient: Tensor, x: Tensor) -> None:
    to[layer.weight] = gradient.t() @ x
    if layer.bias is not None:
        to[layer.bias] = gradient.sum(0)


def put_into(to: Gradients) -> Callable[[Layer, At, Tensor], None]:
    """A function that puts the gradients by a layer's parameters into their places, given that by its output."""
    return lambda layer, at, gradient: layer.rule.to_parameters(layer, at, gradient, to)


def add_products(to: Sequence[Tensor], first: bool, layer: Layer, at: At, gradient: Tensor) -> None:
    """Under ``shared``: add the gradients by the drawn weights to ``to``, or put the ``first`` there."""
    to[layer.weight].addmm_(gradient.t(), at.x, beta=0 if first else 1)
    if layer.bias is not None:
        by_bias = gradient.sum(0)
        to[layer.bias].copy_(by_bias) if first else to[layer.bias].add_(by_bias)


def _signs(like: Tensor, layer: Layer, key: Key, role: Role) -> Tensor:
    return ops.signs(tuple(like.shape), key, stream(layer.weight, role), like.dtype, like.device)
