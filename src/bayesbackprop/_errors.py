"""One form for every error a user can cause: which parameter, of what, must be what, and what it got."""

import math
import os
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_CHECKPOINT = torch.utils.checkpoint.__file__
# The hooks for saved tensors that are active, if any. Torch has no public name for it, and torch 2.6 none at all.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120

# Counts and seeds stay below this, so that they fit a signed 64-bit integer wherever they are stored.
INT64 = 2**63


def invalid(parameter: str, owner: str, constraint: str, got: object) -> ValueError:
    """The error to raise when ``parameter`` of ``owner`` breaks its ``constraint``.

    Examples:
        >>> print(invalid("sigma1", "ScaleMixture", "a float in (0, inf)", -1))
        The 'sigma1' parameter of ScaleMixture must be a float in (0, inf). Got -1 instead.
    """
    return ValueError(f"The '{parameter}' parameter of {owner} must be {constraint}. Got {_shown(got)} instead.")


class Described(str):
    """Text that stands for a value in an error message and is printed without quotes."""


def tensor_shape(value: Tensor) -> Described:
    """How an error message shows a tensor: its shape and type, never its numbers."""
    return Described(f"a tensor of shape {list(value.shape)} and type {value.dtype}")


def check_positive(owner: str, **values: object) -> dict[str, float]:
    """Refuse whatever is not a finite number above 0.

    Like the other checks of numbers it takes numpy's as well, and returns what it was given as Python's own by name.
    """
    return _floats(owner, values, "a float in (0, inf)", lambda number: 0 < number < math.inf)


def check_not_negative(owner: str, **values: object) -> dict[str, float]:
    """Refuse whatever is not a finite number of at least 0."""
    return _floats(owner, values, "a float in [0, inf)", lambda number: 0 <= number < math.inf)


def check_probability(owner: str, **values: object) -> dict[str, float]:
    """Refuse whatever is not a number in [0, 1]."""
    return _floats(owner, values, "a float in [0, 1]", lambda number: 0 <= number <= 1)


def check_betas(owner: str, betas: Any) -> tuple[float, float]:
    """Refuse whatever is not what two running means keep at each step: two numbers in [0, 1)."""
    pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not pair or not all(isinstance(b, Real) and not isinstance(b, bool) and 0 <= float(b) < 1 for b in betas):
        raise invalid("betas", owner, "two floats in [0, 1)", betas)
    return float(betas[0]), float(betas[1])


def check_count(owner: str, *, least: int = 1, below: int | None = None, **values: object) -> dict[str, int]:
    """Refuse whatever is not an int of at least ``least``, and ``below`` a limit: that of 64 bits unless given."""
    for name, value in values.items():
        number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else least - 1
        end = INT64 if below is None and number >= INT64 else below
        if number < least or (end is not None and number >= end):
            raise invalid(name, owner, f"an int in [{least}, {'inf' if end is None else end})", value)
    return {name: int(value) for name, value in values.items()}  # type: ignore[call-overload]


def check_seed(owner: str, **values: object) -> dict[str, int]:
    """Refuse whatever is not a seed: an int that fits a signed 64-bit integer, wherever it is stored."""
    return check_count(owner, least=0, below=INT64, **values)


def check_flag(owner: str, **values: object) -> dict[str, bool]:
    """Refuse whatever is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool | np.bool_):
            raise invalid(name, owner, "True or False", value)
    return {name: bool(value) for name, value in values.items()}


def check_choice(owner: str, options: Sequence[str], **values: object) -> None:
    """Refuse whatever is none of ``options``."""
    for name, value in values.items():
        if not isinstance(value, str) or value not in options:
            raise invalid(name, owner, f"one of {list(options)}", value)


def check_callable(owner: str, **values: object) -> None:
    """Refuse whatever cannot be called."""
    check_type(owner, Callable, "a function", **values)


def check_text(owner: str, **values: object) -> None:
    """Refuse whatever is not text."""
    check_type(owner, str, "a str", **values)


def check_path(owner: str, **values: Any) -> Path:
    """Refuse whatever is not a path; the last of them."""
    check_type(owner, str | os.PathLike, "a path", **values)
    return Path([*values.values()][-1])


def check_list(owner: str, **values: object) -> Sequence[Any]:
    """Refuse whatever is neither a sequence, a tensor nor an array with at least one dimension; the last of them."""
    for name, value in values.items():
        if not is_list(value):
            raise invalid(name, owner, "a list, an array or a tensor", value)
    return value  # type: ignore[return-value]


def is_list(value: object) -> bool:
    """Whether it is a sequence, a tensor or an array with at least one dimension, and no text."""
    many = value.ndim > 0 if isinstance(value, Tensor | np.ndarray) else isinstance(value, Sequence)
    return many and not isinstance(value, str | bytes)


def check_type(owner: str, kind: Any, constraint: str, **values: object) -> None:
    """Refuse whatever is not of ``kind``, which ``constraint`` describes."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise invalid(name, owner, constraint, value)


def is_finite(value: Tensor) -> bool:
    """Whether all numbers are finite. A look at the sum is quick; but it may overflow where they do not."""
    return math.isfinite(value.sum().item()) or bool(value.isfinite().all())


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
    elif not is_finite(value):
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
        if tensor.dim() and tensor.shape[0] == 0:  # len() takes eight times as long
            raise invalid(parameter, owner, "a minibatch of at least one example", Described("an empty one"))
        check_finite(parameter, owner, tensor.clamp(min=-1) if number and tensor.is_floating_point() else tensor)


def check_weights(owner: str, weights: Any, examples: int) -> None:
    """Refuse weights of examples that are not a finite number of at least 0 for each."""
    is_float = isinstance(weights, Tensor) and weights.is_floating_point() and weights.layout is torch.strided
    if not is_float or tuple(weights.shape) != (examples,):
        got = tensor_shape(weights) if isinstance(weights, Tensor) else weights
        raise invalid("weights", owner, f"a float tensor of shape [{examples}], one number for each example", got)
    check_finite("weights", owner, weights)
    if not torch.compiler.is_compiling() and bool((weights < 0).any()):
        raise invalid("weights", owner, "at least 0", Described(f"{float(weights.min()):g} among them"))


def check_whole(parameter: str, owner: str, module: nn.Module) -> None:
    """Refuse a module of which each rank holds a part alone: the parts of a DTensor would be taken for the whole."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())  # who has divided has imported it
    for name, value in module.named_parameters():
        if isinstance(value, kind):
            constraint = (
                "whole on each rank (what fully_shard has divided is whole in calls of a FreeEnergy that it has "
                "divided too, and inside `with bayesbackprop.unsharded(free_energy):`)"
            )
            raise invalid(parameter, owner, constraint, Described(f"one with a part of '{name}'"))


def is_on_the_stack(found: Callable[[CodeType], bool]) -> bool:
    """Whether a function for whose code ``found`` is true has called the caller."""
    frame = sys._getframe(1)
    while frame is not None:
        if found(frame.f_code):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_checkpointed() -> bool:
    """Whether activation checkpointing runs the caller, and will run it again to go back.

    Checkpointing runs a function without gradients or under hooks for saved tensors. So may others: its file on the
    stack tells.
    """
    if torch.is_grad_enabled() and _top_hooks is not None and _top_hooks(True) is None:
        return False
    return is_on_the_stack(lambda code: code.co_filename == _CHECKPOINT)


@contextmanager
def all_or_nothing(*owners: object) -> Iterator[None]:
    """Within it ``owners`` get other attributes; a failure leaves them with those that they had."""
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    except BaseException:
        for owner, values in zip(owners, before, strict=True):
            vars(owner).clear()
            vars(owner).update(values)
        raise


def _floats(
    owner: str, values: Mapping[str, object], constraint: str, allows: Callable[[float], bool]
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        number = math.nan
        if isinstance(value, Real) and not isinstance(value, bool):
            with suppress(OverflowError):  # an int beyond all floats stays NaN, which no range has
                number = float(value)
        if not allows(number):
            raise invalid(name, owner, constraint, value)
        numbers[name] = number
    return numbers


def _shown(got: object) -> str:
    if isinstance(got, Described):
        return got
    if isinstance(got, Tensor):
        return tensor_shape(got)
    try:
        return _short.repr(got)
    except ValueError:  # Python prints no int of more than 4300 digits
        return f"a {type(got).__name__} that is too large to print"
