"""What a network keeps on itself of a call is copied without its graph."""

from typing import Any

from torch import nn

from bayesbackprop._engine.sharding import divided
from bayesbackprop._errors import Described, invalid
from bayesbackprop._trees import kept_tensors

# The attributes of any module.
OF_ALL_MODULES = frozenset(vars(nn.Module()))


def memo_of(net: nn.Module) -> dict[int, Any]:
    """A memo for ``copy.deepcopy(net, memo)``, with copies of what ``net`` has kept of a call.

    Torch copies no tensor that belongs to a graph, and so no network that stored one on itself while it was trained.
    """
    if divided(net):
        constraint = "whole where it is copied: save the model inside unsharded(...), and load it in one process"
        raise invalid("net", "a copy", constraint, Described("one that fully_shard has divided"))
    memo: dict[int, Any] = {}
    for module in net.modules():
        kept = [value for name, value in vars(module).items() if name not in OF_ALL_MODULES]
        for tensor in kept_tensors([*kept, *module._buffers.values()]):
            if tensor.grad_fn is not None and id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
    return memo
