"""The tensors in what a network takes, returns or keeps: in tuples, dicts, dataclasses, and objects such as caches."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributions, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from bayesbackprop._errors import Described, invalid

# What holds no tensors of its own, or holds them for others.
_WHOLE = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, str, bytes, bool, int, float)
# What is compared between draws.
_PLAIN = (bool, int, float, complex, str)


def map_tensors(function: Callable[[Tensor], Any], value: Any, _made: dict[int, Any] | None = None) -> Any:
    """The same structure with ``function`` of each tensor in it; ``value`` is left as it is.

    The structure is what torch's pytree knows (tuples, lists, dicts, and what libraries register with it, such as the
    ``ModelOutput`` of transformers), and the attributes of any other object, of which a copy is made if they have
    tensors: dataclasses, caches.
    """
    if isinstance(value, Tensor):
        return function(value)
    made = {} if _made is None else _made  # of objects, which may be found again, even in themselves
    leaves, structure = tree_flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return tree_unflatten([map_tensors(function, leaf, made) for leaf in leaves], structure)
    if id(value) in made:
        return made[id(value)]
    attributes = _attributes(value)
    if not tensors_in(list(attributes.values())):
        return value
    copied = made[id(value)] = copy.copy(value)
    for name, each in attributes.items():
        object.__setattr__(copied, name, map_tensors(function, each, made))  # also of a frozen dataclass
    return copied


def tensors_in(value: Any, _seen: set[int] | None = None) -> list[Tensor]:
    """All tensors that :func:`map_tensors` maps, in its order."""
    if isinstance(value, Tensor):
        return [value]
    seen = set() if _seen is None else _seen
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif id(leaf) not in seen and (attributes := _attributes(leaf)):
            seen.add(id(leaf))
            for each in attributes.values():
                found += tensors_in(each, seen)
    return found


def has_objects(value: Any) -> bool:
    """Whether there are tensors in objects that are no tuples, lists or dicts."""
    return any(not isinstance(leaf, Tensor) and tensors_in(leaf) for leaf in tree_leaves(value))


def own_objects(value: Any) -> Any:
    """The same with copies of objects that hold tensors: a network may write into a cache that it is given."""
    leaves, structure = tree_flatten(value)
    return tree_unflatten(
        [leaf if isinstance(leaf, Tensor) else map_tensors(Tensor.clone, leaf) for leaf in leaves], structure
    )


# --- outputs of several draws ----------------------------------------------------------------------------------------


class Outputs:
    """Outputs of several draws as lists of tensors, and what they have in common besides.

    :meth:`taken_apart` gives the tensors of an output, which may be stacked, and :meth:`put_together` an output of such
    tensors. What is no tensor must be the same in all draws.
    """

    def __init__(self) -> None:
        self._first: Any = None
        self._plain: list[Any] | None = None

    def taken_apart(self, output: Any) -> tuple[Tensor, ...]:
        """The tensors of the output of a draw, or of some draws in parallel."""
        tensors = tensors_in(output)
        plain: list[Any] = [None] if isinstance(output, Tensor) else _checked(output, tensors)
        if self._plain is None:
            self._first, self._plain = output, plain
        elif self._plain != plain:
            raise _refused("is of the same form in all draws", "one whose draws give others")
        return tuple(tensors)

    def put_together(self, tensors: Iterable[Tensor]) -> Any:
        """An output like those that were taken apart, with other tensors."""
        each = iter(tensors)
        return map_tensors(lambda _: next(each), self._first)


def with_draw(output: Any) -> Any:
    """The output of one draw, with a first dimension for draws."""
    outputs = Outputs()
    return outputs.put_together([tensor.unsqueeze(0) for tensor in outputs.taken_apart(output)])


def _checked(output: Any, tensors: Sequence[Tensor]) -> list[Any]:
    """What of an output is compared between draws: its structure, and leaves that are no tensors."""
    leaves, structure = tree_flatten(output)
    for leaf in leaves:
        if isinstance(leaf, np.ndarray | distributions.Distribution):
            raise _refused("is a tensor, or holds them", f"one whose output holds a {type(leaf).__name__}")
    if not tensors:
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise _refused("is a tensor, or holds them", f"one whose output holds a {', '.join(kinds) or 'nothing'}")
    return [structure, len(tensors), *(leaf if isinstance(leaf, _PLAIN) else type(leaf) for leaf in leaves)]


def _refused(constraint: str, got: str) -> ValueError:
    form = f"a network whose output {constraint} in tuples, dicts or objects (Bayesian(..., output=...) picks them)"
    return invalid("net", "predict", form, Described(got))


# --- tensors that a transform of torch.func has left behind ----------------------------------------------------------


def revive(value: Any, _seen: set[int] | None = None) -> Any:
    """``value`` with the last draw of each tensor that ``vmap`` has left in it: outside of it nobody can use these.

    Lists, dicts and objects are changed, not copied.
    """
    if isinstance(value, Tensor):
        return _last_draw(value)
    seen = set() if _seen is None else _seen
    if id(value) in seen or isinstance(value, _WHOLE):
        return value
    seen.add(id(value))
    if type(value) is tuple:
        parts = [revive(each, seen) for each in value]
        return tuple(parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    places: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, each in list(places):
        if (revived := revive(each, seen)) is not each:
            value[place] = revived
    for name, each in _attributes(value).items():
        if (revived := revive(each, seen)) is not each:
            object.__setattr__(value, name, revived)
    return value


def kept_tensors(value: Any, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in what a network keeps, which may contain itself."""
    seen = set() if _seen is None else _seen
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, _WHOLE):
        seen.add(id(value))
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
        for part in (*parts, *_attributes(value).values()):
            yield from kept_tensors(part, seen)


def _last_draw(tensor: Tensor) -> Tensor:
    functorch = torch._C._functorch  # torch has no public names for these
    while functorch.is_functorch_wrapped_tensor(tensor):
        dim = functorch.maybe_get_bdim(tensor) if functorch.is_batchedtensor(tensor) else None
        tensor = functorch.get_unwrapped(tensor).detach()
        if dim is not None and dim >= 0:
            tensor = tensor.select(dim, -1).clone()  # the others need not be kept
    return tensor


def _attributes(value: Any) -> dict[str, Any]:
    if value is None or isinstance(value, _WHOLE):
        return {}
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        return dict(own)
    if dataclasses.is_dataclass(value):  # with slots
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {}
