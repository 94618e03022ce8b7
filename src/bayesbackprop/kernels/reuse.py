"""Tensors used again as soon as nobody else holds them.

A fresh tensor of a few megabytes costs page faults worth a tenth of a training step. Reusing one is safe if nothing can
tell: no other Python reference, no graph, no view.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

# Sets to keep: one is in use while the cost of the step before is still in a variable.
_SETS = 2


class Reused:
    """Sets of tensors like some others."""

    def __init__(self) -> None:
        self._sets: list[list[Tensor]] = []

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the shapes and types of these, with arbitrary numbers in them."""
        for kept in self._sets:
            if _free(kept):
                if all(_alike(a, b) for a, b in zip(kept, tensors, strict=True)):
                    return list(kept)
                self._sets.remove(kept)  # the model has been moved or cast
                break
        fresh = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        if len(self._sets) < _SETS:
            self._sets.append(list(fresh))
        return fresh


def _free(tensors: list[Tensor]) -> bool:
    for tensor in tensors:
        # Referred to by the list, by this loop and by the call itself; by the tensor and by the storage just asked for.
        if sys.getrefcount(tensor) > 3 or tensor._use_count() > 1:  # type: ignore[attr-defined]
            return False
        if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2:
            return False
    return True


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
