"""Activation checkpointing computes a part of a network a second time, then without the drawn weights: it is refused.

Checkpointing runs a function without gradients or under hooks for saved tensors. So may others: its file on the stack
tells.
"""

import sys
from types import CodeType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

_FILE = torch.utils.checkpoint.__file__
# The hooks for saved tensors that are active, if any. Torch has no public name for it, and torch 2.6 none at all.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def call(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``net(*args, **kwargs)``. What is outside may be checkpointed: it would draw the same weights a second time."""
    return net(*args, **kwargs)


def refuse_checkpointing() -> None:
    """To be called where a network that is trained reads a drawn weight."""
    if (not torch.is_grad_enabled() or _has_hooks()) and _is_on_the_stack(up_to=call.__code__):
        raise RuntimeError(
            "The network uses torch.utils.checkpoint, which computes a part of it a second time during backward, "
            "then with the means instead of the drawn weights. Switch activation checkpointing off."
        )


def refuse_checkpointed_objective() -> None:
    """To be called by what counts its steps: checkpointing would call it a second time, with the next step's noise."""
    if _has_hooks() and _is_on_the_stack():
        raise RuntimeError(
            "The objective runs inside torch.utils.checkpoint, which would call it a second time during backward, then "
            "with other noise. Call it outside."
        )


def _has_hooks() -> bool:
    return _top_hooks is None or _top_hooks(True) is not None


def _is_on_the_stack(up_to: CodeType | None = None) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not up_to:
        if frame.f_code.co_filename == _FILE:
            return True
        frame = frame.f_back
    return False
