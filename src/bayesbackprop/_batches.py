"""Data as users have them: a pair of tensors, a data set, or any iterable of batches."""

from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset

from bayesbackprop._errors import Described, check_weights, invalid, tensor_shape, tensors_of

# A pair (inputs, targets), a Dataset of such pairs, or an iterable of batches of them, such as a DataLoader.
Data = tuple[Any, Any] | Dataset[Any] | Iterable[Any]

# Examples to look at in one go where the data come without batches.
ROWS = 1024

# What predict takes besides the arguments of a network.
OPTIONS = frozenset(("draws", "seed", "memory", "estimator", "inputs"))

_KNOWN = "a pair of tensors (inputs, targets), a Dataset, or an iterable of pairs such as a DataLoader"


def arguments(inputs: Any, owner: str = "FreeEnergy") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a batch as arguments of the network: a tuple holds positional ones, a mapping those by name."""
    if isinstance(inputs, Mapping):
        if not all(isinstance(name, str) for name in inputs):
            raise invalid("inputs", owner, "a mapping from names of arguments where it is one", list(inputs))
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    return (inputs,), {}


def call_arguments(
    owner: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a network from those of a prediction: as they are, or as ``inputs`` has them."""
    if inputs is None:
        found = args, kwargs
    elif args or kwargs:
        constraint = "given alone: a tensor, a tuple of positional or a mapping of keyword arguments"
        raise invalid("inputs", owner, constraint, Described(f"{len(args)} positional, and {list(kwargs)} besides"))
    else:
        found = arguments(inputs, owner)
    check_arguments(owner, *found)
    return found


def check_arguments(owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what a user may take for a batch, with a word on what to do; arguments with a tensor are the network's."""
    values = (*args, *kwargs.values())
    if any(map(tensors_of, values)):
        return
    for value in values:
        if hint := hint_for(value):
            kind = type(value).__name__
            raise invalid("inputs", owner, f"tensors, as the network takes them ({hint})", Described(f"a {kind}"))


def hint_for(value: Any) -> str | None:
    """What to do with a value that is not in the form of a batch; None for what a network may want as it is."""
    if isinstance(value, np.ndarray) or hasattr(value, "to_numpy"):
        made = "x" if isinstance(value, np.ndarray) else "x.to_numpy()"
        return f"torch.as_tensor({made}) makes one of an array, with dtype=torch.float32 for what most networks take"
    if isinstance(value, DataLoader | Dataset):
        return "give one batch at a time, as in `for x, y in loader`; fit, evaluate and diagnose take loaders"
    if isinstance(value, list | tuple) and value:
        leaves = tree_leaves(value)
        if all(isinstance(leaf, Real | np.ndarray) for leaf in leaves):
            return "torch.tensor(x) makes one of a list of numbers, torch.as_tensor of an array"
    return None


def _hints(*values: Any) -> str:
    """In brackets, what to do with the first of ``values``, or of what is in them, for which there is a hint."""
    for value in values:
        for each in (value, *(value if isinstance(value, tuple | list) else ())):
            if not isinstance(each, DataLoader | Dataset) and (hint := hint_for(each)):
                return f" ({hint})"
    return ""


def _kind_of(batch: Any) -> Described:
    return Described(f"batches of type {type(batch).__name__}")


def labelled(
    data: Any, parameter: str, owner: str, device: torch.device | None = None, head: str | int | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """The batches ``(inputs, targets)`` of ``data``, on ``device`` if given; of several targets those of ``head``."""
    for inputs, targets, weights in weighted(data, parameter, owner, device):
        if weights is not None:
            constraint = f"pairs (inputs, targets), since {owner} counts each example once: "
            constraint += "leave the weights out, as in ((x, y) for x, y, _ in loader)"
            raise invalid(parameter, owner, constraint, Described("batches (inputs, targets, weights)"))
        if head is not None:
            known = isinstance(targets, Mapping) if isinstance(head, str) else isinstance(targets, tuple | list)
            if not known or head not in (targets if isinstance(head, str) else range(len(targets))):
                constraint = f"data whose targets have one for the head {head!r}"
                raise invalid(parameter, owner, constraint, Described(_names(targets)))
            targets = targets[head]
        if not isinstance(targets, Tensor):
            raise invalid(parameter, owner, f"{_KNOWN}, with a tensor of targets", Described(_names(targets)))
        yield inputs, targets


def weighted(
    data: Any, parameter: str, owner: str, device: torch.device | None = None
) -> Iterator[tuple[Any, Any, Tensor | None]]:
    """The batches ``(inputs, targets, weights)`` of ``data``, on ``device`` if given; at least one.

    Targets are a tensor, or a mapping, tuple or list of tensors for several heads. Weights are None where there are
    none.
    """
    count = 0
    for batch in _batches(data, parameter, owner):
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3) or not tensors_of(batch[1]):
            raise invalid(parameter, owner, f"{_KNOWN}, with a tensor of targets{_hints(data, batch)}", _kind_of(batch))
        inputs, targets, *weights = batch
        if not tensors_of(inputs) or not all(tensor.dim() for tensor in tensors_of(targets)):
            raise invalid(parameter, owner, f"{_KNOWN}{_hints(inputs)}", Described("a batch without examples"))
        if weights:
            check_weights(owner, weights[0], len(tensors_of(targets)[0]))
        yield on(inputs, device), on(targets, device), on(weights[0], device) if weights else None
        count += 1
    if not count:
        raise invalid(parameter, owner, _KNOWN, Described("no batch (what can be read once has been read?)"))


def _names(targets: Any) -> str:
    """What an error says of targets that are no tensor, or of no head."""
    if isinstance(targets, Mapping):
        return f"targets for {list(targets)}"
    return f"{len(targets)} targets" if isinstance(targets, tuple | list) else "one tensor of targets"


def unlabelled(data: Any, parameter: str, owner: str, device: torch.device | None = None) -> Iterator[Any]:
    """The inputs of the batches of ``data``, which may come with targets or, as tensors, without."""
    count = 0
    for batch in _batches(data, parameter, owner):
        inputs = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not tensors_of(inputs):
            raise invalid(parameter, owner, f"a tensor of inputs, {_KNOWN}{_hints(data, inputs)}", _kind_of(batch))
        yield on(inputs, device)
        count += 1
    if not count:
        raise invalid(parameter, owner, f"a tensor of inputs, {_KNOWN}", Described("no batch"))


def _batches(data: Any, parameter: str, owner: str) -> Iterable[Any]:
    if isinstance(data, Tensor):
        if not data.dim() or not len(data) or data.layout is not torch.strided or data.is_meta:
            raise invalid(parameter, owner, f"a tensor with a row for each example, {_KNOWN}", tensor_shape(data))
        return ((rows,) for rows in data.split(ROWS))
    if isinstance(data, tuple) and len(data) in (2, 3) and _is_whole(data):  # a list holds batches
        return _rows(data, parameter, owner)
    if isinstance(data, Dataset) and not isinstance(data, Iterable):
        return DataLoader(data, ROWS)
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | Mapping) or not getattr(data, "ndim", 1):
        raise invalid(parameter, owner, f"{_KNOWN}{_hints(data)}", data)
    if isinstance(data, np.ndarray) or hasattr(data, "to_numpy"):
        raise invalid(parameter, owner, f"{_KNOWN}{_hints(data)}", _kind_of(data))
    return data


def _is_whole(data: tuple[Any, ...]) -> bool:
    """Whether these are all inputs and all targets, and not two batches of them."""
    inputs, targets, *weights = data
    heads = list(targets.values()) if isinstance(targets, Mapping) else targets
    # A batch is no tensor: a tensor, and a tuple of them, are inputs and targets of several heads.
    of_heads = isinstance(targets, Mapping) or (isinstance(targets, tuple | list) and isinstance(inputs, Tensor))
    known = isinstance(targets, Tensor) or (of_heads and all(isinstance(each, Tensor) for each in heads))
    return known and all(isinstance(each, Tensor) and each.dim() == 1 for each in weights)


def _rows(data: tuple[Any, ...], parameter: str, owner: str) -> Iterator[tuple[Any, ...]]:
    """Whole tensors, some rows at a time."""
    inputs, *rest = data
    tensors = [*tensors_of(inputs), *tensors_of(rest)]
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if not tensors_of(inputs) or len(lengths) > 1 or 0 in lengths:
        got = Described(f"lengths {[len(tensor) if tensor.dim() else 0 for tensor in tensors]}")
        raise invalid(parameter, owner, "a pair (inputs, targets) with a row for each example in both", got)
    for start in range(0, lengths.pop(), ROWS):
        rows = itemgetter(slice(start, start + ROWS))
        yield tuple(tree_map_only(Tensor, rows, data))


def on(values: Any, device: torch.device | None) -> Any:
    """The tensors in ``values`` on ``device``, if given."""
    return values if device is None else tree_map_only(Tensor, lambda tensor: tensor.to(device), values)
