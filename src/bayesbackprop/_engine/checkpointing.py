"""Activation checkpointing runs a part of a network a second time, then without the drawn weights: it is refused."""

from typing import Any

from torch import nn

from bayesbackprop._errors import is_checkpointed


def call(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``net(*args, **kwargs)``. What is outside may be checkpointed: it would draw the same weights a second time."""
    return net(*args, **kwargs)


def refuse_checkpointing() -> None:
    """To be called where a network that is trained reads a drawn weight."""
    if is_checkpointed(up_to=call.__code__):
        raise RuntimeError(
            "The network uses torch.utils.checkpoint, which computes a part of it a second time during backward, "
            "then with the means instead of the drawn weights. Switch activation checkpointing off."
        )
