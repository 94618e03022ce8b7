"""The running statistics of batch normalisation: the draws of a step count once, and evaluation moves nothing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_T = TypeVar("_T")
_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def normalising(net: nn.Module) -> list[_BatchNorm]:
    """The layers of ``net`` that have running statistics."""
    return [layer for layer in net.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]


def _moving(layers: Sequence[_BatchNorm]) -> list[Tensor]:
    """The statistics that a call of the network would move."""
    found = (layer._buffers.get(name) for layer in layers if layer.training for name in _NAMES)
    return [tensor for tensor in found if tensor is not None]


@contextmanager
def unmoved(layers: Sequence[_BatchNorm]) -> Iterator[None]:
    """Within it statistics may move; afterwards they are as they were."""
    moving = _moving(layers)
    before = [tensor.clone() for tensor in moving]
    try:
        yield
    finally:
        _put(moving, before)


def counted_once(layers: Sequence[_BatchNorm], calls: Sequence[Callable[[], _T]]) -> list[_T]:
    """What ``calls`` return, which move the statistics as one call does: (1 - m) r + m * the mean over the calls of s.

    Here r is a running statistic, s that of a batch and m the momentum. Each call starts from the same r, and the
    results (1 - m) r + m s are averaged. A call that fails leaves all as it was.
    """
    moving = _moving(layers)
    if not moving:
        return [call() for call in calls]
    before = [tensor.clone() for tensor in moving]
    sums = [torch.zeros_like(tensor) for tensor in moving]
    results: list[_T] = []
    try:
        for call in calls:
            _put(moving, before)
            results.append(call())
            for total, tensor in zip(sums, moving, strict=True):
                total.add_(tensor)
    except BaseException:
        _put(moving, before)
        raise
    # Those of type int count batches: the same number after each call.
    _put(moving, [total.div_(len(calls)) if total.is_floating_point() else total // len(calls) for total in sums])
    return results


def _put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give them values in a way that autograd does not see: the backward pass uses the statistics of the batch."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data.copy_(value)
