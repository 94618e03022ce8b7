"""How the noise of a weight enters an operation: three rules, one table of operations, no class per layer.

Every operation in the table is bilinear, op(x, w), in its input and its weight (a bias is a weight whose input is 1).
For a weight w = mu + sigma * eps:

===========  ===============================================  ========================================================
``shared``   op(x, mu + sigma * eps)                          the paper: one draw for the whole batch
``local``    op(x, mu) + sqrt(op(x^2, sigma^2)) * zeta        one draw for each output (Kingma et al., 2015)
``flipout``  op(x, mu) + r * op(s * x, sigma * eps)           one sign flip of a shared draw for each example
                                                              (Wen et al., 2018)
===========  ===============================================  ========================================================

All three give each output of each example the same distribution. What they say of several outputs together differs:
``shared`` uses one w for everything; ``flipout`` one w per example, coherent inside it; ``local`` matches the marginals
only, so the positions of a convolution, the steps of a sequence and the outputs of a layer are independent.

A weight that is used in any other way (transposed by hand, inside a fused attention kernel, ...) is drawn, as for
``shared``: no use of a Bayesian weight ever sees the mean by accident.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesbackprop import noise
from bayesbackprop.noise import Key, Role
from bayesbackprop.posterior import WeightPosterior

Estimator = Literal["shared", "local", "flipout"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)


class Operation(NamedTuple):
    """Where a bilinear operation has its inputs, weight and bias, and which dimension counts its channels."""

    inputs: tuple[int, ...]
    weight: int
    bias: int | None
    channel: int


_LINEAR = Operation(inputs=(0,), weight=1, bias=2, channel=-1)
_CONVOLUTION = {d: Operation(inputs=(0,), weight=1, bias=2, channel=-1 - d) for d in (1, 2, 3)}

OPERATIONS: dict[Callable[..., Any], Operation] = {
    F.linear: _LINEAR,
    F.bilinear: Operation(inputs=(0, 1), weight=2, bias=3, channel=-1),
    F.conv1d: _CONVOLUTION[1],
    F.conv2d: _CONVOLUTION[2],
    F.conv3d: _CONVOLUTION[3],
    F.conv_transpose1d: _CONVOLUTION[1],
    F.conv_transpose2d: _CONVOLUTION[2],
    F.conv_transpose3d: _CONVOLUTION[3],
    F.embedding: Operation(inputs=(), weight=1, bias=None, channel=-1),  # the input is an index, a one-hot vector
}

# The layers whose forward is one operation of the table on their own ``weight`` and ``bias``. It only serves to say in
# advance, in the report, what will happen; what does happen is decided where the operation is called.
_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
)


def treats(module: nn.Module) -> bool:
    """Whether ``local`` and ``flipout`` have a rule for this layer."""
    return any(isinstance(module, layer) and type(module).forward is layer.forward for layer in _LAYERS)


class Site(NamedTuple):
    """A parameter that a rule treats: its posterior, its rule and where its noise comes from."""

    name: str
    number: int
    q: WeightPosterior
    rule: Estimator
    draw: Callable[[], "Sample"]


class Sample(NamedTuple):
    """A drawn parameter and the noise it was made of: w = mu + sigma * eps."""

    w: Tensor
    eps: Tensor


class Estimating(TorchFunctionMode):
    """While active, an operation on a parameter that has a rule is replaced by what the rule says."""

    def __init__(self, sites: Mapping[Tensor, Site], key: Key) -> None:
        super().__init__()
        self._sites = sites
        self._key = key
        self._called: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operation = OPERATIONS.get(func)
        if operation is not None and operation.weight < len(args):
            site = self._site(args[operation.weight])
            if site is not None:
                return self._apply(func, operation, site, args, kwargs)
        result = func(*args, **kwargs)
        if _any_tensor(result) and (self._has_site(args) or self._has_site(kwargs)):
            result = func(*self._drawn(args), **self._drawn(kwargs))
        return result

    def _apply(
        self, func: Callable[..., Any], op: Operation, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        bias_at = op.bias if op.bias is not None and op.bias < len(args) else None
        bias = None if bias_at is None else args[bias_at]
        bias_site = self._site(bias)
        # A bias without a rule is an ordinary number, or drawn already: it belongs to the mean alone.

        def call(inputs: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
            replaced = list(args)
            for position, value in zip(op.inputs, inputs, strict=True):
                replaced[position] = value
            replaced[op.weight] = weight
            if bias_at is not None:
                replaced[bias_at] = bias
            output: Tensor = func(*replaced, **kwargs)
            return output

        inputs = [args[position] for position in op.inputs]
        mean = call(inputs, site.q.mean, bias if bias_site is None else bias_site.q.mean)
        if site.rule == "local":
            if site.name in self._called:
                raise RuntimeError(
                    f"The layer of '{site.name}' is called twice in one forward pass. With estimator 'local' the two "
                    f"calls would see different weights; give this parameter 'shared' or 'flipout' instead."
                )
            self._called.add(site.name)
            bias_variance = None if bias_site is None else bias_site.q.sigma.square()
            variance = call([x.square() for x in inputs], site.q.sigma.square(), bias_variance)
            zeta = self._noise(noise.normal, tuple(mean.shape), site, Role.ACTIVATION, mean)
            return mean + _sqrt(variance) * zeta
        flipped = inputs
        if inputs:
            x = inputs[0]
            s = self._noise(noise.signs, _sign_shape(x, op.channel), site, Role.INPUT_SIGN, x)
            flipped = [s * x, *inputs[1:]]
        bias_deviation = None if bias_site is None else bias_site.q.sigma * bias_site.draw().eps
        deviation = call(flipped, site.q.sigma * site.draw().eps, bias_deviation)
        r = self._noise(noise.signs, _sign_shape(mean, op.channel), site, Role.OUTPUT_SIGN, mean)
        return mean + r * deviation

    def _noise(
        self, generator: Callable[..., Tensor], shape: tuple[int, ...], site: Site, role: Role, like: Tensor
    ) -> Tensor:
        return generator(shape, self._key, noise.stream(site.number, role), like.dtype, like.device)

    def _site(self, value: Any) -> Site | None:
        return self._sites.get(value) if isinstance(value, Tensor) else None

    def _has_site(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(self._has_site(item) for item in value)
        if isinstance(value, dict):
            return any(self._has_site(item) for item in value.values())
        return self._site(value) is not None

    def _drawn(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._drawn(item) for item in value)
        if isinstance(value, dict):
            return {name: self._drawn(item) for name, item in value.items()}
        site = self._site(value)
        return value if site is None else site.draw().w


def _sign_shape(x: Tensor, channel: int) -> tuple[int, ...]:
    """One sign for each example (the first dimension) and channel, the same at every position."""
    shape = [1] * x.dim()
    shape[channel] = x.shape[channel]
    if x.dim() > -channel:
        shape[0] = x.shape[0]
    return tuple(shape)


def _sqrt(variance: Tensor) -> Tensor:
    """sqrt, with gradient 0 instead of NaN where the variance is exactly 0 (a dead unit, an all-zero input)."""
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)


def _any_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_any_tensor(item) for item in value)
    return isinstance(value, Tensor)
