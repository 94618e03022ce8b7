"""A linear layer at a draw, under each rule of ``rules.py``: forward, and back by hand.

With G the gradient of the output, r and s random signs, zeta normal numbers, and W = mu + sigma * eps:

===========  ================================================  ========================================================
``shared``   x W^T                                             G^T x by W
``flipout``  x mu^T + r * ((s * x) (W - mu)^T)                 G^T x by mu, (r * G)^T (s * x) by W - mu
``local``    x mu^T + sqrt(x^2 (sigma^2)^T) * zeta             G^T x by mu, (G * zeta / (2 sqrt(...)))^T x^2 by sigma^2
===========  ================================================  ========================================================
"""

from abc import ABC, abstractmethod
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
_NOTHING: tuple[None, None] = (None, None)


class Layer(NamedTuple):
    """The weight and the bias of a layer, as drawn and as means, and where its noise comes from.

    Under ``flipout`` what is drawn is W - mu.
    """

    drawn: Pair
    mean: Pair
    parameters: Parameters  # these two
    key: Key
    number: int  # of the weight among all parameters

    def signs(self, like: Tensor, role: Role) -> Tensor:
        """Random signs like a tensor."""
        return ops.signs(tuple(like.shape), self.key, stream(self.number, role), like.dtype, like.device)


class Gradients(NamedTuple):
    """By the drawn weight and bias, by their means and by their variances; None where they are not used."""

    drawn: tuple[Tensor | None, Tensor | None] = _NOTHING
    mean: tuple[Tensor | None, Tensor | None] = _NOTHING
    variance: tuple[Tensor | None, Tensor | None] = _NOTHING


class Rule(ABC):
    """How the noise of a layer's weights enters its outputs."""

    @abstractmethod
    def forward(self, x: Tensor, layer: Layer) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output, in memory of its own, and what :meth:`backward` needs besides."""

    @abstractmethod
    def backward(
        self, gradient: Tensor, x: Tensor, layer: Layer, kept: tuple[Tensor, ...], to_input: bool
    ) -> tuple[Gradients, Tensor]:
        """The gradients of the layer, in memory of their own, and that of ``x`` (anything, if it is not wanted)."""


class Shared(Rule):
    """One draw for the whole batch."""

    def forward(self, x: Tensor, layer: Layer) -> tuple[Tensor, tuple[Tensor, ...]]:
        return F.linear(x, *layer.drawn), ()

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        layer: Layer,
        kept: tuple[Tensor, ...],  # noqa: ARG002
        to_input: bool,
    ) -> tuple[Gradients, Tensor]:
        weight, bias = layer.drawn
        return Gradients(drawn=_products(gradient, x, bias)), gradient @ weight if to_input else gradient


class Flipout(Rule):
    """One sign flip of a shared draw for each example."""

    def forward(self, x: Tensor, layer: Layer) -> tuple[Tensor, tuple[Tensor, ...]]:
        mean = F.linear(x, *layer.mean)
        s, r = layer.signs(x, Role.INPUT_SIGN), layer.signs(mean, Role.OUTPUT_SIGN)
        return mean.addcmul_(r, F.linear(s * x, *layer.drawn)), (s, r)

    def backward(
        self, gradient: Tensor, x: Tensor, layer: Layer, kept: tuple[Tensor, ...], to_input: bool
    ) -> tuple[Gradients, Tensor]:
        (mu, bias), (deviation, _), (s, r) = layer.mean, layer.drawn, kept
        flipped = r * gradient
        to_x = torch.addcmul(gradient @ mu, s, flipped @ deviation) if to_input else gradient
        return Gradients(drawn=_products(flipped, s * x, bias), mean=_products(gradient, x, bias)), to_x


class Local(Rule):
    """One draw for each output."""

    def forward(self, x: Tensor, layer: Layer) -> tuple[Tensor, tuple[Tensor, ...]]:
        mean, deviation = F.linear(x, *layer.mean), F.linear(x.square(), *ops.variances(layer.parameters)).sqrt_()
        of_outputs = stream(layer.number, Role.ACTIVATION)
        zeta = ops.normal(tuple(mean.shape), layer.key, of_outputs, mean.dtype, mean.device)
        output = mean.addcmul_(deviation, zeta)
        # By the variance; a unit whose inputs are all 0 has none.
        return output, (zeta.div_(deviation.mul_(2)).nan_to_num_(0.0, 0.0, 0.0),)

    def backward(
        self, gradient: Tensor, x: Tensor, layer: Layer, kept: tuple[Tensor, ...], to_input: bool
    ) -> tuple[Gradients, Tensor]:
        (mu, bias), (slope,) = layer.mean, kept
        by_variance, to_x = gradient * slope, gradient
        if to_input:  # the variances are computed again, and gone before the products need memory
            to_x = torch.addcmul(gradient @ mu, x, by_variance @ ops.variances(layer.parameters)[0], value=2)
        return Gradients(mean=_products(gradient, x, bias), variance=_products(by_variance, x.square(), bias)), to_x


RULES: dict[Estimator, Rule] = {"shared": Shared(), "flipout": Flipout(), "local": Local()}


def _products(gradient: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return gradient.t() @ x, None if bias is None else gradient.sum(0)
