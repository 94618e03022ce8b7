"""Finding the parameters of a module by name and running it with other tensors in their place, quickly.

``torch.func.functional_call`` does the second; for a small network it costs as much as the forward pass. The places are
looked up once and checked at each use, so that a module exchanged in between is noticed.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules import module as modules

# What a user may have put on a module that expects to be called.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# While a network runs with other weights in its places, nobody else may.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


class Places:
    """Where parameters or buffers of these names stand in ``root``, in every module that shares them."""

    def __init__(self, root: nn.Module, names: Sequence[str]) -> None:
        self.root = root
        self.names = list(names)
        self.tensors = [_find(root, name) for name in names]
        self.slots: list[tuple[str, dict[str, Any], str, int]] = []
        self._path: list[tuple[dict[str, Any], str, object]] = []
        self._children = [(module._modules, len(module._modules)) for module in root.modules()]
        numbers = {tensor: number for number, tensor in enumerate(self.tensors)}
        for path, module in root.named_modules():
            self._path += [(module._modules, name, child) for name, child in module._modules.items()]
            for values in (module._parameters, module._buffers):
                for name, value in values.items():
                    number = None if value is None else numbers.get(value)
                    if number is not None:
                        self.slots.append((f"{path}.{name}" if path else name, values, name, number))
                        self._path.append((values, name, value))
        # Recurrent layers keep a second list of their weights, which only ``functional_call`` knows to change.
        self.simple = not any(isinstance(module, nn.RNNBase) for module in root.modules())
        self.checked = False

    def hold(self) -> bool:
        """Whether everything still stands where it stood."""
        for slot, name, value in self._path:
            if slot.get(name) is not value:
                return False
        for children, count in self._children:  # noqa: SIM110
            if len(children) != count:
                return False
        return True


def call_with(places: Places, weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``root(*args, **kwargs)`` with ``weights`` in ``places``."""
    net = places.root
    if torch.compiler.is_compiling():
        return _functional(places, weights, args, kwargs)
    with lock(net), _checking(places):
        if not places.simple:
            return _functional(places, weights, args, kwargs)
        try:
            for _, slot, name, number in places.slots:
                slot[name] = weights[number]
            return net(*args, **kwargs)
        finally:
            for _, slot, name, number in places.slots:
                slot[name] = places.tensors[number]


def _functional(places: Places, weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = {full: weights[number] for full, _, _, number in places.slots}
    return functional_call(places.root, named, args, kwargs, tie_weights=False)


def _find(root: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    tensor = module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]
    assert tensor is not None
    return tensor


def untouched(net: Iterable[nn.Module]) -> bool:
    """Whether calling these modules does nothing but their own ``forward``: no hooks, nothing put in its place."""
    if modules._has_any_global_hook():
        return False
    for own in map(vars, net):  # loops, here and below: a generator would take longer than what it does
        if "forward" in own:
            return False
        for name in _HOOKS:
            if own[name]:
                return False
    return True


def lock(net: nn.Module) -> threading.RLock:
    """What to hold while ``net`` must be as it is."""
    found = _locks.get(net)
    return _locks.setdefault(net, threading.RLock()) if found is None else found


@contextmanager
def _checking(places: Places) -> Iterator[None]:
    """The first time, look out for activation checkpointing, whose second forward pass would see other weights."""
    if places.checked or not torch.is_grad_enabled():
        yield
        return
    handle = modules.register_module_forward_pre_hook(_refuse_checkpointing)
    try:
        yield
    finally:
        handle.remove()
    places.checked = True


def _refuse_checkpointing(module: nn.Module, args: Any) -> None:  # noqa: ARG001
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and any("checkpoint" in getattr(hook, "__qualname__", "") for hook in hooks):
        raise RuntimeError(
            "The network uses torch.utils.checkpoint, which computes a part of it a second time during backward, then "
            "with the means instead of the drawn weights. Switch checkpointing off, or use estimator 'flipout'."
        )
