"""The fast twin: ``fused.c`` as torch sees it. All tensors are contiguous and on the CPU; ``kernels`` sees to that."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesbackprop._engine.parameter import ROW, Parameters
from bayesbackprop.noise import Key

try:
    from bayesbackprop._engine import _cpu as _fused  # type: ignore[attr-defined]
except ImportError:  # installed without a compiler
    _fused = None

TYPES = (torch.float32, torch.float64)

# Where the addresses stand in a row of the table, in words of 8 bytes.
_WORDS = ROW.size // 8
_MU, _RHO, _W, _GW, _GMU, _GRHO, _CENTRE = range(2, 9)

# Of kernels that draw nothing.
_NO_KEY = Key(0)


def available() -> bool:
    """Whether the compiled kernels are there."""
    return _fused is not None


def normal(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers: the twin of ``noise.normal``."""
    return _fill(_fused.normal, torch.empty(shape, dtype=dtype), key, stream)


def signs(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype) -> Tensor:
    """Random signs: the twin of ``noise.signs``."""
    return _fill(_fused.signs, torch.empty(shape, dtype=dtype), key, stream)


@torch.library.custom_op("bayesbackprop::normal", mutates_args=())
def _normal_of_draw(draw: Tensor, seed: int, step: int, stream: int, shape: Sequence[int], double: bool) -> Tensor:
    dtype = torch.float64 if double else torch.float32
    return normal(tuple(shape), Key(seed, step, int(draw)), stream, dtype)


@_normal_of_draw.register_vmap
def _(
    info: Any,  # noqa: ARG001
    in_dims: tuple[int | None, ...],
    draw: Tensor,
    seed: int,
    step: int,
    stream: int,
    shape: Sequence[int],
    double: bool,
) -> tuple[Tensor, int]:
    assert in_dims[0] == 0
    out = torch.empty((len(draw), *shape), dtype=torch.float64 if double else torch.float32)
    for index, each in zip(draw.tolist(), out, strict=True):
        _fill(_fused.normal, each, Key(seed, step, index), stream)
    return out, 0


def normal_in_vmap(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype) -> Tensor:
    """As :func:`normal`, where ``vmap`` runs over the number of the draw."""
    assert isinstance(key.draw, Tensor)
    numbers: Tensor = _normal_of_draw(key.draw, key.seed, int(key.step), stream, shape, dtype == torch.float64)
    return numbers


def draw(parameters: Parameters, key: Key) -> list[Tensor]:
    """The weights of all ``parameters``."""
    ws = parameters.room_for_weights.take(parameters.mus)
    _launch(_fused.draw, parameters, {_W: ws}, key)
    return ws


def complexity(parameters: Parameters, ws: Sequence[Tensor]) -> float:
    """log q(w|theta) - log P(w) over all weights, as they were drawn."""
    return _launch(_fused.complexity, parameters, {_W: ws})


def variance(parameters: Parameters) -> list[Tensor]:
    """sigma^2 of each parameter."""
    squares = [torch.empty_like(mu) for mu in parameters.mus]
    _launch(_fused.variance, parameters, {_W: squares})
    return squares


def draw_many(parameters: Parameters, key: Key, many: int) -> list[Tensor]:
    """``many`` draws of each parameter, ``[many, ...]``, counted from ``key.draw``."""
    ws = [mu.new_empty((many, *mu.shape)) for mu in parameters.mus]
    _launch(_fused.draw_many, parameters, {_W: ws}, key, float(many))
    return ws


def backward(
    parameters: Parameters, ws: Sequence[Tensor], gradients: Sequence[Tensor], complexity_gradient: float
) -> tuple[list[Tensor], float]:
    """Delta_rho of each parameter from df/dw, which becomes Delta_mu in place; and the complexity.

    (3), (4): Delta_mu = df/dw + df/dmu, Delta_rho = df/dw * eps / (1 + exp(-rho)) + df/drho.
    """
    to_rho = parameters.room_for_gradients.take(gradients)
    columns = {_W: ws, _GW: gradients, _GMU: gradients, _GRHO: to_rho}
    return to_rho, _launch(_fused.backward, parameters, columns, last=complexity_gradient)


def dense(gradient: Tensor | None, w: Tensor) -> Tensor:
    """A gradient of ``w`` as the kernels take it: there, strided and contiguous."""
    if gradient is None:
        return torch.zeros_like(w)
    return (gradient.to_dense() if gradient.is_sparse else gradient).contiguous()


def refuse_second_derivatives() -> None:
    """To be called in a backward pass: the kernels have no derivative of their own."""
    if torch.is_grad_enabled():  # which in a backward pass means create_graph=True
        raise RuntimeError(
            "The fused kernels cannot be differentiated twice. Compute the cost inside "
            "`with bayesbackprop._engine.plain():` to use create_graph=True."
        )


class _Sample(torch.autograd.Function):
    """The weights and their complexity as a function of all mu and rho."""

    @staticmethod
    def forward(ctx: Any, parameters: Parameters, key: Key, *_: Tensor) -> tuple[Tensor, ...]:
        ws = draw(parameters, key)
        ctx.parameters = parameters
        ctx.save_for_backward(*ws, *parameters.mus, *parameters.rhos)  # all, so that a change in between is noticed
        ctx.set_materialize_grads(False)
        return (*ws, ws[0].new_tensor(complexity(parameters, ws)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        *of_ws, of_cost = gradients
        ws = ctx.saved_tensors[: len(of_ws)]
        # Copies: what autograd hands over may be seen by others as well.
        to_mu = [dense(gradient, w).clone() for w, gradient in zip(ws, of_ws, strict=True)]
        to_rho, _ = backward(ctx.parameters, ws, to_mu, 0.0 if of_cost is None else float(of_cost))
        return (None, None, *to_mu, *to_rho)


def sample(parameters: Parameters, key: Key) -> tuple[list[Tensor], Tensor]:
    """The weights of all ``parameters`` and their complexity, differentiably."""
    *ws, cost = _Sample.apply(parameters, key, *parameters.mus, *parameters.rhos)  # type: ignore[no-untyped-call]
    return ws, cost


def _fill(kernel: Callable[..., float], out: Tensor, key: Key, stream: int) -> Tensor:
    row = bytearray(ROW.pack(out.numel(), stream, 0, 0, out.data_ptr(), 0, 0, 0, 0, 0, 0.0, 0.0, 0.0))
    kernel(row, out.dtype == torch.float64, torch.get_num_threads(), key.seed, int(key.step), int(key.draw), 0.0)
    return out


def _launch(
    kernel: Callable[..., float],
    parameters: Parameters,
    columns: dict[int, Sequence[Tensor]],
    key: Key = _NO_KEY,
    last: float = 0.0,
) -> float:
    table = bytearray(parameters.table)
    words = memoryview(table).cast("q")
    for column, tensors in ((_MU, parameters.mus), (_RHO, parameters.rhos), *columns.items()):
        at = column
        for tensor in tensors:
            words[at] = tensor.data_ptr()
            at += _WORDS
    for number, parameter in enumerate(parameters.each):
        if parameter.centre is not None:
            words[number * _WORDS + _CENTRE] = parameter.centre.data_ptr()
    words.release()
    double = parameters.mus[0].dtype == torch.float64
    return kernel(table, double, torch.get_num_threads(), key.seed, int(key.step), int(key.draw), last)
