"""One form for every error a user can cause: which parameter, of what, must be what, and what it got."""

import math
import reprlib
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


def invalid(parameter: str, owner: str, constraint: str, got: object) -> ValueError:
    """The error to raise when ``parameter`` of ``owner`` breaks its ``constraint``.

    Examples:
        >>> print(invalid("sigma1", "ScaleMixture", "a float in (0, inf)", -1))
        The 'sigma1' parameter of ScaleMixture must be a float in (0, inf). Got -1 instead.
    """
    shown = got if isinstance(got, Described) else _short.repr(got)
    return ValueError(f"The '{parameter}' parameter of {owner} must be {constraint}. Got {shown} instead.")


class Described(str):
    """Text that stands for a value in an error message and is printed without quotes."""


def tensor_shape(value: Tensor) -> Described:
    """How an error message shows a tensor: its shape and type, never its numbers."""
    return Described(f"a tensor of shape {list(value.shape)} and type {value.dtype}")


def check_positive(owner: str, **values: object) -> None:
    """Refuse whatever is not a finite number above 0."""
    for name, value in values.items():
        if not _is_number(value) or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
            raise invalid(name, owner, "a float in (0, inf)", value)


def check_not_negative(owner: str, **values: object) -> None:
    """Refuse whatever is not a finite number of at least 0."""
    for name, value in values.items():
        if not _is_number(value) or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
            raise invalid(name, owner, "a float in [0, inf)", value)


def check_callable(owner: str, **values: object) -> None:
    """Refuse whatever cannot be called."""
    for name, value in values.items():
        if not callable(value):
            raise invalid(name, owner, "a function", value)


def check_probability(owner: str, **values: object) -> None:
    """Refuse whatever is not a number in [0, 1]."""
    for name, value in values.items():
        if not _is_number(value) or not 0 <= float(value) <= 1:  # type: ignore[arg-type]
            raise invalid(name, owner, "a float in [0, 1]", value)


def check_count(owner: str, *, least: int = 1, **values: object) -> None:
    """Refuse whatever is not an int of at least ``least``."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise invalid(name, owner, f"an int in [{least}, inf)", value)


def check_finite(parameter: str, owner: str, value: Tensor) -> None:
    """Refuse NaN and infinities.

    Inside ``torch.compile`` the check is an operation of the graph, so it breaks no graph and still stops the step.
    """
    if not value.is_floating_point():
        return
    value = value.detach()
    if torch.compiler.is_compiling():
        message = f"The '{parameter}' parameter of {owner} must be finite. Got NaN or inf instead."
        torch._assert_async(value.isfinite().all(), message)
    elif not math.isfinite(value.sum().item()) and not value.isfinite().all():  # the sum is quick, and may overflow
        bad = int((~value.isfinite()).sum())
        got = Described(f"NaN or inf in {bad} of {value.numel()} numbers")
        raise invalid(parameter, owner, "finite", got)


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors inside ``values``."""
    if isinstance(values, Tensor):
        return [values]
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def check_batch(parameter: str, owner: str, tensors: Sequence[Tensor]) -> None:
    """Refuse a batch without examples, and NaN and infinities in it.

    The first tensor is the data. Those after it may be masks, where -inf is a usual number.
    """
    for number, tensor in enumerate(tensors):
        if tensor.dim() and len(tensor) == 0:
            raise invalid(parameter, owner, "a minibatch of at least one example", Described("an empty one"))
        check_finite(parameter, owner, tensor.clamp(min=-1) if number and tensor.is_floating_point() else tensor)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
