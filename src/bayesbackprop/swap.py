"""Finding the parameters of a module by name and running it with other tensors in their place, quickly.

``torch.func.functional_call`` does the second; for a small network it costs as much as the forward pass. The places are
looked up once and checked at each use, so that a module exchanged in between is noticed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Places:
    """Where parameters or buffers of these names stand in ``root``."""

    def __init__(self, root: nn.Module, names: Sequence[str]) -> None:
        self.names = list(names)
        self.tensors: list[Tensor] = []
        self.slots: list[tuple[dict[str, Any], str]] = []
        self._path: list[tuple[dict[str, Any], str, object]] = []
        for name in names:
            *path, leaf = name.split(".")
            module = root
            for part in path:
                child = module.get_submodule(part)
                self._path.append((module._modules, part, child))
                module = child
            slot: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
            self.slots.append((slot, leaf))
            self.tensors.append(slot[leaf])
            self._path.append((slot, leaf, slot[leaf]))

    def hold(self) -> bool:
        """Whether everything still stands where it stood."""
        for slot, name, value in self._path:  # noqa: SIM110
            if slot.get(name) is not value:
                return False
        return True


def is_simple(net: nn.Module) -> bool:
    """Whether each parameter stands in one place: no tied weights, no second list as recurrent layers keep."""
    places = [id(value) for module in net.modules() for value in module._parameters.values() if value is not None]
    return len(places) == len(set(places)) and not any(isinstance(module, nn.RNNBase) for module in net.modules())


def call_with(
    net: nn.Module,
    places: Places,
    weights: Sequence[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    simple: bool,
) -> Any:
    """``net(*args, **kwargs)`` with ``weights`` in ``places``.

    Compiled code and networks that are not :func:`is_simple` go through ``functional_call``.
    """
    if not simple or torch.compiler.is_compiling():
        return functional_call(net, dict(zip(places.names, weights, strict=True)), args, kwargs)
    try:
        for (slot, name), weight in zip(places.slots, weights, strict=True):
            slot[name] = weight
        return net(*args, **kwargs)
    finally:
        for (slot, name), parameter in zip(places.slots, places.tensors, strict=True):
            slot[name] = parameter
