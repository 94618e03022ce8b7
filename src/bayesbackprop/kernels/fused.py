"""The fast twin: ``fused.c`` as torch sees it. All tensors are contiguous and on the CPU; ``kernels`` sees to that."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayesbackprop.kernels.parameter import Parameter
from bayesbackprop.noise import Key
from bayesbackprop.priors import Laplace, Normal, Prior, ScaleMixture

try:
    from bayesbackprop.kernels import _fused  # type: ignore[attr-defined]
except ImportError:  # installed without a compiler
    _fused = None

TYPES = (torch.float32, torch.float64)
PRIORS = (Normal, ScaleMixture, Laplace)

# A row of the table in fused.c: n, stream, seven addresses, the prior's kind; three numbers of the prior.
_ROW = struct.Struct("=10q3d")


def available() -> bool:
    """Whether the compiled kernels are there."""
    return _fused is not None


def normal(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers: the twin of ``noise.normal``."""
    return _fill(_fused.normal, torch.empty(shape, dtype=dtype), key, stream)


def signs(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype) -> Tensor:
    """Random signs: the twin of ``noise.signs``."""
    return _fill(_fused.signs, torch.empty(shape, dtype=dtype), key, stream)


def draw(parameters: Sequence[Parameter], key: Key) -> tuple[list[Tensor], float]:
    """The weights of all ``parameters``, and log q(w|theta) - log P(w) over all of them."""
    ws = [torch.empty_like(p.q.mu, memory_format=torch.contiguous_format) for p in parameters]
    table = [_row(p, w=w) for p, w in zip(parameters, ws, strict=True)]
    return ws, _launch(_fused.draw, table, ws[0].dtype, key, 1.0)


def draw_many(parameters: Sequence[Parameter], key: Key, many: int) -> list[Tensor]:
    """``many`` draws of each parameter, ``[many, ...]``, counted from ``key.draw``."""
    ws = [p.q.mu.new_empty((many, *p.q.mu.shape)) for p in parameters]
    table = [_row(p, w=w) for p, w in zip(parameters, ws, strict=True)]
    _launch(_fused.draw_many, table, ws[0].dtype, key, float(many))
    return ws


def backward(
    parameters: Sequence[Parameter], ws: Sequence[Tensor], gradients: Sequence[Tensor], complexity_gradient: float
) -> list[Tensor]:
    """Delta_rho of each parameter from df/dw, which becomes Delta_mu in place, and the complexity's own gradient.

    (3), (4): Delta_mu = df/dw + df/dmu, Delta_rho = df/dw * eps / (1 + exp(-rho)) + df/drho.
    """
    to_rho = [torch.empty_like(w) for w in ws]
    table = [_row(p, w, g, h) for p, w, g, h in zip(parameters, ws, gradients, to_rho, strict=True)]
    _launch(_fused.backward, table, ws[0].dtype, Key(0), complexity_gradient)
    return to_rho


def dense(gradient: Tensor | None, w: Tensor) -> Tensor:
    """A gradient of ``w`` as the kernels take it: there, strided and contiguous."""
    if gradient is None:
        return torch.zeros_like(w)
    return (gradient.to_dense() if gradient.is_sparse else gradient).contiguous()


class _Sample(torch.autograd.Function):
    """The weights and their complexity as a function of all mu and rho."""

    @staticmethod
    def forward(ctx: Any, parameters: Sequence[Parameter], key: Key, *_: Tensor) -> tuple[Tensor, ...]:
        ws, cost = draw(parameters, key)
        ctx.parameters = parameters
        ctx.save_for_backward(*ws)
        ctx.set_materialize_grads(False)
        return (*ws, ws[0].new_tensor(cost))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ws, (*of_ws, of_cost) = ctx.saved_tensors, gradients
        # Copies: what autograd hands over may be seen by others as well.
        to_mu = [dense(g, w).clone() for w, g in zip(ws, of_ws, strict=True)]
        to_rho = backward(ctx.parameters, ws, to_mu, 0.0 if of_cost is None else float(of_cost))
        return (None, None, *to_mu, *to_rho)


def sample(parameters: Sequence[Parameter], key: Key) -> tuple[list[Tensor], Tensor]:
    """As :func:`draw`, differentiably."""
    inputs = [p.q.mu for p in parameters] + [p.q.rho for p in parameters]
    *ws, cost = _Sample.apply(parameters, key, *inputs)  # type: ignore[no-untyped-call]
    return ws, cost


def _row(p: Parameter, w: Tensor, gradient: Tensor | None = None, to_rho: Tensor | None = None) -> bytes:
    to_mu = 0 if gradient is None else gradient.data_ptr()
    return _ROW.pack(
        p.q.mu.numel(),
        p.stream,
        p.q.mu.data_ptr(),
        p.q.rho.data_ptr(),
        w.data_ptr(),
        to_mu,
        to_mu,
        0 if to_rho is None else to_rho.data_ptr(),
        0 if p.centre is None else p.centre.data_ptr(),
        *_numbers(p.prior),
    )


def _numbers(prior: Prior) -> tuple[int, float, float, float]:
    if isinstance(prior, Normal):
        return 1, prior.sigma, 0.0, 0.0
    if isinstance(prior, ScaleMixture):
        return 2, prior.pi, prior.sigma1, prior.sigma2
    assert isinstance(prior, Laplace)
    return 3, prior.scale, 0.0, 0.0


def _fill(kernel: Callable[..., float], out: Tensor, key: Key, stream: int) -> Tensor:
    row = _ROW.pack(out.numel(), stream, 0, 0, out.data_ptr(), 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    _launch(kernel, [row], out.dtype, key, 0.0)
    return out


def _launch(kernel: Callable[..., float], table: list[bytes], dtype: torch.dtype, key: Key, last: float) -> float:
    rows = bytearray(b"".join(table))
    return kernel(rows, dtype == torch.float64, torch.get_num_threads(), key.seed, int(key.step), int(key.draw), last)
