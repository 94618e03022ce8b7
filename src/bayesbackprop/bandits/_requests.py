"""What people hand to an agent: checked, and as tensors of its own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesbackprop._errors import Described, check_finite, check_list, invalid

# Of a reward: squares of larger ones, and of their gradients, are not finite in single precision.
LARGEST_REWARD = 1e15
# Of a number in a context, for the same reason.
_LARGEST_FEATURE = 1e6


def listed(owner: str, **values: Any) -> Sequence[Any]:
    """As :func:`check_list`; of tables and columns, as those of pandas, the arrays that they are for numpy."""
    return check_list(owner, **{name: as_array(value) for name, value in values.items()})


def as_array(value: Any) -> Any:
    """A table, a column or whatever else says that it is an array for numpy, as one; all else as it is."""
    known = isinstance(value, Tensor | np.ndarray | np.generic | type)
    return np.array(value) if hasattr(value, "__array__") and not known else value  # of its own: pandas lets none write


def checked_contexts(owner: str, contexts: Any, features: int) -> Tensor:
    """Contexts as ``[B, features]``, in memory of their own."""
    given = listed(owner, contexts=contexts)
    if isinstance(given, Tensor | np.ndarray):
        together = as_numbers(given, torch.float32).clone()
    else:
        rows = [as_numbers(context, torch.float32) for context in given]
        alike = all(row.shape == (features,) for row in rows)
        together = torch.stack(rows) if rows and alike else torch.empty(0)
    is_matrix = together.layout is torch.strided and together.dim() == 2 and together.shape[1] == features
    if is_matrix and bool((together.abs() <= _LARGEST_FEATURE).all()):  # which NaN is not
        return together
    for context in given:
        row = as_numbers(context, torch.float64)  # in which what is too large is not infinite
        if row.shape != (features,):
            raise invalid("context", owner, f"a vector of {features} numbers", context)
        check_finite("context", owner, row)
        if bool((row.abs() > _LARGEST_FEATURE).any()):
            constraint = f"of numbers in [-{_LARGEST_FEATURE:g}, {_LARGEST_FEATURE:g}]; scale the features to about 1"
            raise invalid("context", owner, constraint, Described(f"one of {float(row.abs().max()):g}"))
    return torch.empty(0, features)


def checked_masks(owner: str, masks: Any, count: int, actions: int, retired: Sequence[int]) -> NDArray[np.bool_]:
    """Which actions may be taken, ``[count, actions]``; None for all of them that are not retired."""
    allowed = np.ones((count, actions), dtype=np.bool_)
    if masks is not None:
        given = listed(owner, masks=masks)
        if len(given) != count:
            raise invalid("masks", owner, f"one for each of {count} contexts", len(given))
        for number, mask in enumerate(given):
            mask = as_array(mask)
            row = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask) if _is_row(mask) else np.empty(0)
            if row.dtype != np.bool_ or row.shape != (actions,):
                raise invalid("mask", owner, f"None, or {actions} of True and False", mask)
            allowed[number] = row
    if retired:
        allowed[:, list(retired)] = False
    if (masks is not None or retired) and not allowed.any(1).all():
        raise invalid("mask", owner, "True for at least one action that is not retired", Described("none"))
    return allowed


def checked_features(owner: str, features: Any, taken: Tensor | None, own: Tensor | None) -> Tensor | None:
    """The numbers of the actions ``taken`` in each request, ``[*taken.shape, numbers]``; None for the agent's own.

    Each request gives them for all actions, ``[actions, numbers]``, or for one that was taken, ``[numbers]``; or None,
    for those that the agent has of its ``own``.
    """
    if features is None or taken is None:
        return None
    given = listed(owner, features=features)
    if len(given) != len(taken):
        raise invalid("features", owner, f"those of each of {len(taken)} requests", len(given))
    described = [each for each in given if each is not None]
    if not described:
        return None
    if own is None:
        raise invalid("features", owner, "None, unless the agent has action_features", described[0])
    (actions, numbers), rows = own.shape, list[Tensor]()
    for each, actions_taken in zip(given, taken, strict=True):
        codes = own if each is None else as_numbers(each, torch.float32)
        if codes.shape == (actions, numbers):
            codes = codes[actions_taken]
        if codes.shape != (*actions_taken.shape, numbers):
            constraint = f"{numbers} numbers for each of {actions} actions"
            raise invalid("features", owner, constraint, each)
        check_finite("features", owner, codes)
        rows.append(codes)
    return torch.stack(rows)


def checked_action(owner: str, action: Any, actions: int) -> int:
    """The number of an action as Python's own; of numpy, or a tensor of one, as well."""
    if isinstance(action, Tensor) and not action.dim() and not action.is_floating_point() and not action.is_complex():
        action = action.item()
    if not isinstance(action, int | np.integer) or isinstance(action, bool) or not 0 <= action < actions:
        raise invalid("action", owner, f"an int in [0, {actions})", action)
    return int(action)


def checked_actions(owner: str, actions: Any, count: int) -> Tensor:
    """Numbers of actions as a tensor of its own."""
    given = listed(owner, actions=actions)
    if isinstance(given, Tensor | np.ndarray) and given.ndim == 1:
        numbers = torch.as_tensor(given)
        whole = not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool)
        if whole and bool(((numbers >= 0) & (numbers < count)).all()):  # the usual case, and quick
            return numbers.to(torch.int64, copy=True)
    return torch.tensor([checked_action(owner, action, count) for action in given], dtype=torch.int64)


def checked_rewards(owner: str, rewards: Any, count: int) -> Tensor:
    """Rewards as ``[count]`` in double precision."""
    gains = as_numbers(rewards, torch.float64)
    if gains.shape != (count,) or not bool((gains.abs() <= LARGEST_REWARD).all()):
        constraint = f"a number in [-{LARGEST_REWARD:g}, {LARGEST_REWARD:g}]; leave out what is not known"
        raise invalid("reward", owner, constraint, rewards[0] if count == len(rewards) == 1 else rewards)
    return gains.clone()


def as_numbers(values: Any, dtype: torch.dtype) -> Tensor:
    """Values as a tensor; an empty matrix, which nobody asks for, if they are no numbers."""
    values = as_array(values)
    try:
        if values.is_complex() if isinstance(values, Tensor) else np.iscomplexobj(values):  # torch would drop a part
            return torch.empty(0, 0)
        return torch.as_tensor(values, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return torch.empty(0, 0)


def _is_row(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim == 1 and not getattr(value, "is_meta", False)
    return isinstance(value, Sequence) and all(isinstance(each, bool | np.bool_) for each in value)
