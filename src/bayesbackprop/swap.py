"""Running a module with other tensors in the place of its parameters, quickly."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def find(root: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a dotted name."""
    module, attribute = _owner(root, name)
    tensor = module._parameters[attribute] if attribute in module._parameters else module._buffers[attribute]
    assert tensor is not None
    return tensor


def is_simple(net: nn.Module) -> bool:
    """Whether each parameter stands in one place: no tied weights, no second list as recurrent layers keep."""
    places = [id(value) for module in net.modules() for value in module._parameters.values() if value is not None]
    return len(places) == len(set(places)) and not any(isinstance(module, nn.RNNBase) for module in net.modules())


def call_with(
    net: nn.Module, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], *, simple: bool
) -> Any:
    """``torch.func.functional_call``, without its overhead, which for a small network is that of its forward pass.

    Compiled code and networks that are not :func:`is_simple` get the original.
    """
    if not simple or torch.compiler.is_compiling():
        return functional_call(net, dict(weights), args, kwargs)
    places = [(*_owner(net, name), weight) for name, weight in weights.items()]
    before = [module._parameters[attribute] for module, attribute, _ in places]
    try:
        for module, attribute, weight in places:
            module._parameters[attribute] = weight  # type: ignore[assignment]
        return net(*args, **kwargs)
    finally:
        for (module, attribute, _), parameter in zip(places, before, strict=True):
            module._parameters[attribute] = parameter


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    for part in path.split(".") if path else ():
        child = root._modules[part]
        assert child is not None
        root = child
    return root, attribute
