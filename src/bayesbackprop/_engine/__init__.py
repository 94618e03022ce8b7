"""Drawing all the weights of a network, and taking all their gradients, in one call.

Each function here has a fast twin in C (``fused``) and a plain one in the words of the paper (``reference``). The fast
one runs on CPUs in float32 and float64 for the library's own priors. Everything else, a user's prior, other devices,
and whatever happens inside ``torch.compile`` or ``vmap``, goes through the plain one, which the compiler fuses itself.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from bayesbackprop import noise
from bayesbackprop._engine import cpu as fused
from bayesbackprop._engine import reference
from bayesbackprop._engine.parameter import Parameter, Parameters
from bayesbackprop.noise import Key

__all__ = [
    "Parameter",
    "Parameters",
    "all_fused",
    "draw",
    "draw_many",
    "normal",
    "plain",
    "sample",
    "signs",
    "variances",
]

_enabled: ContextVar[bool] = ContextVar("_enabled", default=os.environ.get("BAYESBACKPROP_KERNELS", "fused") != "plain")

if _enabled.get() and not fused.available():
    warnings.warn(
        "bayesbackprop was installed without its compiled kernels (no C compiler was found), so training steps take "
        "several times as long. To get them, install a C compiler and reinstall bayesbackprop. To silence this, set "
        "BAYESBACKPROP_KERNELS=plain.",
        stacklevel=2,
    )


@contextmanager
def plain() -> Iterator[None]:
    """Within it, everything in this thread runs on the plain equations: to compare, or to differentiate twice."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def all_fused(parameters: Parameters) -> bool:
    """Whether the fast twin treats all of these."""
    return parameters.fused_priors and _all_fit(parameters)


def normal(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers, a pure function of ``key`` and ``stream``."""
    if _runs(dtype, device):
        return fused.normal(shape, key, stream, dtype)
    if _may_run(dtype, device) and isinstance(key.step, int) and isinstance(key.draw, Tensor):
        return fused.normal_in_vmap(shape, key, stream, dtype)
    return noise.normal(shape, key, stream, dtype, device)


def signs(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs, a pure function of ``key`` and ``stream``."""
    if _runs(dtype, device):
        return fused.signs(shape, key, stream, dtype)
    return noise.signs(shape, key, stream, dtype, device)


def sample(parameters: Parameters, key: Key) -> tuple[list[Tensor], Tensor]:
    """w = mu + log(1 + exp(rho)) * eps of each parameter, and log q(w|theta) - log P(w) over all, differentiably."""
    if all_fused(parameters):
        return fused.sample(parameters, key)
    groups: dict[torch.dtype | None, list[str]] = {}
    for name, p in parameters.by_name.items():
        groups.setdefault(p.q.mu.dtype if all_fused(parameters.subset([name])) else None, []).append(name)
    weights: dict[str, Tensor] = {}
    costs: list[Tensor] = []
    for group, names in groups.items():
        twin = reference if group is None else fused
        ws, cost = twin.sample(parameters.subset(names), key)
        weights.update(zip(names, ws, strict=True))
        costs.append(cost.to(parameters.mus[0].dtype))
    return [weights[name] for name in parameters.by_name], torch.stack(costs).sum()


def variances(parameters: Parameters) -> list[Tensor]:
    """sigma^2 of each parameter, without gradients."""
    with torch.no_grad():
        return fused.variance(parameters) if _all_fit(parameters) else [p.q.variance for p in parameters.each]


def draw(parameters: Parameters, key: Key) -> list[Tensor]:
    """A draw of each parameter, without gradients."""
    with torch.no_grad():
        if _all_fit(parameters):
            return fused.draw(parameters, key)
        return [ws[0] for ws in reference.draw_many(parameters, key, 1)]


def draw_many(parameters: Parameters, key: Key, many: int) -> list[Tensor]:
    """``many`` draws of each parameter, ``[many, ...]``, counted from ``key.draw``, without gradients."""
    with torch.no_grad():
        if _all_fit(parameters):
            return fused.draw_many(parameters, key, many)
        return reference.draw_many(parameters, key, many)


def _runs(dtype: torch.dtype, device: torch.device) -> bool:
    return _may_run(dtype, device) and torch._C._functorch.peek_interpreter_stack() is None  # not inside vmap


def _may_run(dtype: torch.dtype, device: torch.device) -> bool:
    return (
        not torch.compiler.is_compiling()
        and _enabled.get()
        and fused.available()
        and device.type == "cpu"
        and dtype in fused.TYPES
    )


def _all_fit(parameters: Parameters) -> bool:
    if not parameters.mus:
        return False
    dtype = parameters.mus[0].dtype
    if not _runs(dtype, parameters.mus[0].device):
        return False
    for tensor in parameters.tensors:  # noqa: SIM110
        if tensor.dtype is not dtype or not tensor.is_contiguous():
            return False
    return True
