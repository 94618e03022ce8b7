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

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from bayesbackprop._engine import cpu, ops
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop.noise import Role, stream
from bayesbackprop.posterior import Moments, WeightPosterior

if TYPE_CHECKING:
    from bayesbackprop._engine.executors import Draw

Estimator = Literal["shared", "local", "flipout"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)


class Operation(NamedTuple):
    """The arguments of a bilinear operation in their order, and which dimension counts its channels.

    ``linear_in`` are the arguments besides the weight that the operation is linear in.
    """

    arguments: tuple[str, ...]
    linear_in: tuple[str, ...]
    channel: int


_CONVOLUTION = {d: Operation(("input", "weight", "bias"), ("input",), channel=-1 - d) for d in (1, 2, 3)}

OPERATIONS: dict[Callable[..., Any], Operation] = {
    F.linear: Operation(("input", "weight", "bias"), ("input",), channel=-1),
    F.bilinear: Operation(("input1", "input2", "weight", "bias"), ("input1", "input2"), channel=-1),
    F.conv1d: _CONVOLUTION[1],
    F.conv2d: _CONVOLUTION[2],
    F.conv3d: _CONVOLUTION[3],
    F.conv_transpose1d: _CONVOLUTION[1],
    F.conv_transpose2d: _CONVOLUTION[2],
    F.conv_transpose3d: _CONVOLUTION[3],
    F.embedding: Operation(("input", "weight"), (), channel=-1),  # the input is an index: a one-hot vector
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


def has_rule(module: nn.Module) -> bool:
    """Whether ``local`` and ``flipout`` have a rule for this layer."""
    return any(isinstance(module, layer) and type(module).forward is layer.forward for layer in _LAYERS)


# The keywords of torch.utils.checkpoint itself; others are those of the function that it calls.
_CHECKPOINT_OPTIONS = (*inspect.signature(checkpoint).parameters, "preserve_rng_state")


class Site(NamedTuple):
    """A parameter that has a rule: its number among all, its posterior or the moments of it, and the rule."""

    name: str
    number: int
    q: WeightPosterior | Moments
    rule: Estimator


class Rules(TorchFunctionMode):
    """While active, an operation on a parameter that has a rule is replaced by what the rule says.

    Args:
        parameters: The Bayesian parameters of the network.
        rules: The rule of each of them that has one, by name.
        draw: Where the noise comes from, and the weights where an operation needs them.
    """

    def __init__(self, parameters: Parameters, rules: Mapping[str, Estimator], draw: "Draw") -> None:
        super().__init__()
        self._sites = {
            p.q.mu: Site(name, number, draw.moments.get(name, p.q), rules[name])
            for number, (name, p) in enumerate(parameters.by_name.items())
            if name in rules
        }
        self._draw = draw
        self._trains = torch.is_grad_enabled()
        self._called: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is checkpoint:  # a compiler alone asks, and would compile the part without the rules
            with self:
                return args[0](*args[1:], **{name: kwargs[name] for name in kwargs if name not in _CHECKPOINT_OPTIONS})
        operation = OPERATIONS.get(func)
        if operation is not None:
            named = dict(zip(operation.arguments, args, strict=False))
            named.update({name: kwargs[name] for name in operation.arguments if name in kwargs})
            site = self._site(named.get("weight"))
            if site is not None:
                rest = args[len(operation.arguments) :]
                options = {name: value for name, value in kwargs.items() if name not in named}

                def call(**replaced: Tensor | None) -> Tensor:
                    output: Tensor = func(*(named | replaced).values(), *rest, **options)
                    return output

                return self._apply(call, operation, site, named)
        return func(*self._drawn(args), **self._drawn(kwargs))

    def _apply(self, call: Callable[..., Tensor], operation: Operation, site: Site, named: dict[str, Any]) -> Tensor:
        # A bias without a rule is an ordinary number, or drawn already: it belongs to the mean alone.
        bias = self._site(named.get("bias"))
        has_bias = "bias" in named
        mean = call(weight=site.q.mean, **({"bias": bias.q.mean} if bias else {}))
        if site.rule == "local":
            if site.name in self._called:
                raise RuntimeError(
                    f"The layer of '{site.name}' is called twice in one forward pass. With estimator 'local' the two "
                    f"calls would see different weights; give this parameter 'shared' or 'flipout' instead."
                )
            self._called.add(site.name)
            replaced: dict[str, Tensor | None] = {name: named[name].square() for name in operation.linear_in}
            if has_bias:
                replaced["bias"] = bias.q.variance if bias else None
            variance = call(weight=site.q.variance, **replaced)
            zeta = self._noise(ops.normal, tuple(mean.shape), site, Role.ACTIVATION, mean)
            return _spread(mean, variance, zeta)
        replaced = {}
        if operation.linear_in:
            x = named[operation.linear_in[0]]
            s = self._noise(ops.signs, _sign_shape(x, operation.channel), site, Role.INPUT_SIGN, x)
            replaced[operation.linear_in[0]] = s * x
        if has_bias:
            replaced["bias"] = self._deviation(bias) if bias else None
        deviation = call(weight=self._deviation(site), **replaced)
        r = self._noise(ops.signs, _sign_shape(mean, operation.channel), site, Role.OUTPUT_SIGN, mean)
        return torch.addcmul(mean, r, deviation)

    def _noise(
        self, generator: Callable[..., Tensor], shape: tuple[int, ...], site: Site, role: Role, like: Tensor
    ) -> Tensor:
        return generator(shape, self._draw.key, stream(site.number, role), like.dtype, like.device)

    def _deviation(self, site: Site) -> Tensor:
        """w - mu = sigma * eps, as ``shared`` draws it."""
        return self._weight(site) - site.q.mean

    def _weight(self, site: Site) -> Tensor:
        if self._draw.has_weights:
            return self._draw.weights[site.name]
        with torch.set_grad_enabled(self._trains):  # who asks first may be a part that runs without gradients
            return self._draw.weights[site.name]

    def _site(self, value: Any) -> Site | None:
        return self._sites.get(value) if isinstance(value, Tensor) else None

    def _drawn(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            items = [self._drawn(item) for item in value]
            same = all(item is before for item, before in zip(items, value, strict=True))
            return value if same else type(value)(items)  # a named tuple of results stays what it is
        if isinstance(value, dict):
            return {name: self._drawn(item) for name, item in value.items()}
        site = self._site(value)
        return value if site is None else self._weight(site)


def _sign_shape(x: Tensor, channel: int) -> tuple[int, ...]:
    """One sign for each example (the first dimension) and channel, the same at every position."""
    shape = [1] * x.dim()
    shape[channel] = x.shape[channel]
    if x.dim() > -channel:
        shape[0] = x.shape[0]
    return tuple(shape)


def _spread(mean: Tensor, variance: Tensor, zeta: Tensor) -> Tensor:
    """mean + sqrt(variance) * zeta, whose gradient is 0 and not NaN where the variance is exactly 0.

    It is 0 for a dead unit, and for an input that is all zeros.
    """
    if cpu.kernels_wanted() and not cpu.traced():
        return _Spread.apply(mean, variance, zeta)  # type: ignore[no-any-return, no-untyped-call]
    positive = variance > 0
    return mean + torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0) * zeta


class _Spread(torch.autograd.Function):
    """The same in half of the passes over memory, and with one tensor to keep."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, zeta: Tensor) -> Tensor:
        deviation = variance.sqrt()
        output = torch.addcmul(mean, deviation, zeta)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(torch.div(zeta, deviation.mul_(2), out=deviation).nan_to_num_(0.0, 0.0, 0.0))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        cpu.refuse_second_derivatives()
        return gradient, gradient * ctx.saved_tensors[0] if ctx.needs_input_grad[1] else None, None
