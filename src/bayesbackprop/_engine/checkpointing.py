"""Activation checkpointing inside a network: what is computed a second time sees the same draw.

``torch.utils.checkpoint`` runs a part of a network in the forward pass and once more in the backward pass, when the
network has its means again. So a part that is checkpointed while a network runs on drawn weights is exchanged for one
that puts the draw back in place.

- With ``use_reentrant=True`` the second run has a backward pass of its own, which must end at the drawn weights: it
  would free the graph above them that other parts still need. So all tensors of the draw become inputs of the part.
- Otherwise the second run only replaces activations that were not kept; the graph is that of the first.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint

Tensors = Callable[[], Sequence[Tensor]]
Again = Callable[[Sequence[Tensor], Callable[..., Any], tuple[Any, ...]], Any]


class Running(NamedTuple):
    """A draw on which a network runs."""

    tensors: Tensors
    again: Again


class _Active(threading.local):
    """What this thread runs, the innermost last."""

    def __init__(self) -> None:
        self.each: list[Running] = []


_active = _Active()


@contextmanager
def repeating(tensors: Tensors, again: Again) -> Iterator[None]:
    """Within it, what this thread checkpoints is run again on the same draw.

    Args:
        tensors: Gives what the results of the network are differentiated by at this draw.
        again: Runs a part of the network, with its arguments, on the draw that has these tensors.
    """
    _active.each.append(Running(tensors, again))
    try:
        yield
    finally:
        _active.each.pop()


def _with_inputs(function: Callable[..., Any], running: Running) -> tuple[Callable[..., Any], Sequence[Tensor]]:
    """A function that takes the tensors of the draw after its own arguments, and these tensors."""
    tensors = running.tensors()

    def twice(*args: Any) -> Any:
        own, given = args[: -len(tensors)], args[-len(tensors) :]
        # The first run is without gradients, and the draw is in place.
        return running.again(given, function, own) if torch.is_grad_enabled() else function(*own)

    return twice, tensors


def _on_same_draw(function: Callable[..., Any], running: Running) -> Callable[..., Any]:
    tensors = running.tensors()
    return lambda *args: running.again(tensors, function, args)


def _apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """``CheckpointFunction.apply``, which is ``use_reentrant=True``."""
    for running in reversed(_active.each) if torch.is_grad_enabled() else ():
        function, tensors = _with_inputs(function, running)
        args = (*args, *tensors)
    return _apply_of_torch(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]


def _start_frame(frame: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """``__init__`` of what ``use_reentrant=False`` keeps of each part."""
    for running in reversed(_active.each) if torch.is_grad_enabled() else ():
        recompute = _on_same_draw(recompute, running)
    _start_frame_of_torch(frame, recompute, *args, **kwargs)


# Torch has no public place for this. Networks import ``checkpoint`` under names of their own; these are behind all.
_apply_of_torch = checkpoint.CheckpointFunction.apply
checkpoint.CheckpointFunction.apply = staticmethod(_apply)  # type: ignore[method-assign]
_start_frame_of_torch = checkpoint._CheckpointFrame.__init__
checkpoint._CheckpointFrame.__init__ = _start_frame  # type: ignore[method-assign, assignment]
