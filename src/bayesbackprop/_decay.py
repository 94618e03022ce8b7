"""Weight decay on rho: refused at the first step of an optimiser that has it.

``torch.optim.AdamW(model.parameters())`` decays all that it is given by 0.01, and so draws rho to 0 and sigma to 0.69.
In a loop of the user's own nobody but the optimiser knows it, so a hook of torch looks at each optimiser before it
steps: once, and again when the decays of its groups have changed.
"""

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from bayesbackprop._errors import invalid

_spreads: WeakSet[nn.Module] = WeakSet()
_passed: WeakKeyDictionary[Optimizer, list[Any]] = WeakKeyDictionary()
_adding = Lock()


def watch(*spreads: nn.Module) -> None:
    """From now on no optimiser decays a parameter of these modules."""
    with _adding:
        if check_decay not in _global_optimizer_pre_hooks.values():
            register_optimizer_step_pre_hook(check_decay)
        _spreads.update(spreads)


def check_decay(optimiser: Optimizer, _args: Any = None, _kwargs: Any = None) -> None:
    """Refuse an optimiser that decays a parameter that is watched."""
    if torch.compiler.is_compiling():  # where nothing can be looked up
        return
    decays = [group.get("weight_decay") for group in optimiser.param_groups]
    if _passed.get(optimiser) == decays:
        return
    if any(decays):
        with _adding:
            spreads = {parameter for module in _spreads for parameter in module.parameters()}
        for group, decay in zip(optimiser.param_groups, decays, strict=True):
            if decay and not spreads.isdisjoint(group["params"]):
                advice = "make it with model.param_groups(weight_decay=...)"
                constraint = f"0 for rho, since it would draw sigma to 0.69: {advice}"
                raise invalid("weight_decay", type(optimiser).__name__, constraint, decay)
    _passed[optimiser] = decays
