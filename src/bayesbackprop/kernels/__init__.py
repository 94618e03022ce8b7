"""Drawing all the weights of a network, and taking all their gradients, in one call.

Each function here has a fast twin in C (``fused``) and a plain one in the words of the paper (``reference``). The fast
one runs on CPUs in float32 and float64 for the library's own priors. Everything else, a user's prior, other devices,
and whatever happens inside ``torch.compile`` or ``vmap``, goes through the plain one, which the compiler fuses itself.
"""

import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bayesbackprop import noise
from bayesbackprop.kernels import fused, reference
from bayesbackprop.kernels.parameter import Parameter
from bayesbackprop.noise import Key

__all__ = ["Parameter", "all_fused", "draw_leaves", "draw_many", "normal", "plain", "sample", "signs"]

_enabled = os.environ.get("BAYESBACKPROP_KERNELS", "fused") != "plain"

if _enabled and not fused.available():
    warnings.warn(
        "bayesbackprop was installed without its compiled kernels (no C compiler was found), so training steps take "
        "several times as long. To get them, install a C compiler and reinstall bayesbackprop. To silence this, set "
        "BAYESBACKPROP_KERNELS=plain.",
        stacklevel=2,
    )


@contextmanager
def plain() -> Iterator[None]:
    """Within it, everything runs on the plain equations: to compare, or to differentiate twice."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def all_fused(parameters: Collection[Parameter]) -> bool:
    """Whether the fast twin treats all of these."""
    return all(_fits(p) for p in parameters) and len({p.q.mu.dtype for p in parameters}) == 1


def normal(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers, a pure function of ``key`` and ``stream``."""
    if _runs(dtype, device):
        return fused.normal(shape, key, stream, dtype)
    return noise.normal(shape, key, stream, dtype, device)


def signs(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs, a pure function of ``key`` and ``stream``."""
    if _runs(dtype, device):
        return fused.signs(shape, key, stream, dtype)
    return noise.signs(shape, key, stream, dtype, device)


def sample(parameters: Sequence[Parameter], key: Key) -> tuple[list[Tensor], Tensor]:
    """w = mu + log(1 + exp(rho)) * eps of each parameter, and log q(w|theta) - log P(w) over all, differentiably."""
    groups: dict[torch.dtype | None, list[int]] = {}
    for index, p in enumerate(parameters):
        groups.setdefault(p.q.mu.dtype if _fits(p) else None, []).append(index)
    weights: dict[int, Tensor] = {}
    costs: list[Tensor] = []
    for dtype, indices in groups.items():
        chosen = [parameters[index] for index in indices]
        ws, cost = reference.sample(chosen, key) if dtype is None else fused.sample(chosen, key)
        weights.update(zip(indices, ws, strict=True))
        costs.append(cost)
    total = costs[0] if len(costs) == 1 else torch.stack([cost.to(costs[0].dtype) for cost in costs]).sum()
    return [weights[index] for index in range(len(parameters))], total


def draw_leaves(parameters: Sequence[Parameter], key: Key) -> tuple[list[Tensor], float]:
    """As :func:`sample` for parameters that are :func:`all_fused`, but as leaves of a graph of their own."""
    ws, complexity = fused.draw(parameters, key)
    return [w.requires_grad_() for w in ws], complexity


def draw_many(parameters: Sequence[Parameter], key: Key, many: int) -> list[Tensor]:
    """``many`` draws of each parameter, ``[many, ...]``, counted from ``key.draw``, without gradients."""
    with torch.no_grad():
        if parameters and all_fused(parameters):
            return fused.draw_many(parameters, key, many)
        return reference.draw_many(parameters, key, many)


def _runs(dtype: torch.dtype, device: torch.device) -> bool:
    return (
        _enabled
        and fused.available()
        and device.type == "cpu"
        and dtype in fused.TYPES
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None  # not inside vmap or another transform
    )


def _fits(p: Parameter) -> bool:
    mu, rho = p.q
    return (
        _runs(mu.dtype, mu.device)
        and type(p.prior) in fused.PRIORS
        and rho.dtype == mu.dtype
        and mu.is_contiguous()
        and rho.is_contiguous()
        and (p.centre is None or (p.centre.dtype == mu.dtype and p.centre.is_contiguous()))
    )
