"""Memory that is used again."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

# How many tensors share a storage; where torch does not say, memory is always new.
_use_count = getattr(torch._C, "_storage_Use_Count", None)

# Threads take turns.
_taking = threading.Lock()


class Room:
    """Memory for a list of tensors, given out again once nobody holds them.

    What a training step frees is tens of megabytes, which the C library hands back to the operating system; paging it
    in again at the next step takes up to a third of a plain one.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like these, with whatever is in them."""
        with _taking:
            if len(self._kept) != len(like):
                self._kept = [torch.empty_like(tensor, requires_grad=False) for tensor in like]
            for number, (kept, wanted) in enumerate(zip(self._kept, like, strict=True)):
                if kept.dtype is not wanted.dtype or kept.shape != wanted.shape or _is_held(kept):
                    self._kept[number] = torch.empty_like(wanted, requires_grad=False)
            return [kept.detach() for kept in self._kept]


def _is_held(tensor: Tensor) -> bool:
    # One count is the tensor's own, one that of the storage object asked. Other processes are not counted.
    storage = tensor.untyped_storage()
    held = _use_count is None or storage.is_shared() or _use_count(storage._cdata) > 2
    return held or tensor.is_inference()  # which could not be trained with
