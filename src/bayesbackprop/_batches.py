"""Data as users have them: a pair of tensors, a data set, or any iterable of batches."""

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from bayesbackprop._errors import Described, invalid, tensor_shape, tensors_of

# A pair (inputs, targets), a Dataset of such pairs, or an iterable of batches of them, such as a DataLoader.
Data = tuple[Any, Tensor] | Dataset[Any] | Iterable[Any]

# Examples to look at in one go where the data come without batches.
ROWS = 1024

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


def labelled(data: Any, parameter: str, owner: str, device: torch.device | None = None) -> Iterator[tuple[Any, Tensor]]:
    """The batches ``(inputs, targets)`` of ``data``, on ``device`` if given; at least one."""
    count = 0
    for batch in _batches(data, parameter, owner):
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            got = Described(f"batches of type {type(batch).__name__}")
            raise invalid(parameter, owner, f"{_KNOWN}, with a tensor of targets", got)
        inputs, targets = batch
        if not tensors_of(inputs) or not targets.dim():
            raise invalid(parameter, owner, _KNOWN, Described("a batch without examples"))
        yield _on(inputs, device), _on(targets, device)
        count += 1
    if not count:
        raise invalid(parameter, owner, _KNOWN, Described("no batch (what can be read once has been read?)"))


def unlabelled(data: Any, parameter: str, owner: str, device: torch.device | None = None) -> Iterator[Any]:
    """The inputs of the batches of ``data``, which may come with targets or, as tensors, without."""
    count = 0
    for batch in _batches(data, parameter, owner):
        inputs = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not tensors_of(inputs):
            raise invalid(parameter, owner, f"a tensor of inputs, {_KNOWN}", batch)
        yield _on(inputs, device)
        count += 1
    if not count:
        raise invalid(parameter, owner, f"a tensor of inputs, {_KNOWN}", Described("no batch"))


def _batches(data: Any, parameter: str, owner: str) -> Iterable[Any]:
    if isinstance(data, Tensor):
        if not data.dim() or not len(data) or data.layout is not torch.strided or data.is_meta:
            raise invalid(parameter, owner, f"a tensor with a row for each example, {_KNOWN}", tensor_shape(data))
        return ((rows,) for rows in data.split(ROWS))
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor):  # a list holds batches
        inputs, targets = data
        return _rows(inputs, targets, parameter, owner)
    if isinstance(data, Dataset) and not isinstance(data, Iterable):
        return DataLoader(data, ROWS)
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | Mapping) or not getattr(data, "ndim", 1):
        raise invalid(parameter, owner, _KNOWN, data)
    return data


def _rows(inputs: Any, targets: Tensor, parameter: str, owner: str) -> Iterator[tuple[Any, Tensor]]:
    """A pair of whole tensors, some rows at a time."""
    tensors = [*tensors_of(inputs), targets]
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if len(tensors) < 2 or len(lengths) > 1 or 0 in lengths:
        got = Described(f"lengths {[len(tensor) if tensor.dim() else 0 for tensor in tensors]}")
        raise invalid(parameter, owner, "a pair (inputs, targets) with a row for each example in both", got)
    for start in range(0, len(targets), ROWS):
        rows = itemgetter(slice(start, start + ROWS))
        yield tree_map_only(Tensor, rows, inputs), rows(targets)


def _on(values: Any, device: torch.device | None) -> Any:
    return values if device is None else tree_map_only(Tensor, lambda tensor: tensor.to(device), values)
