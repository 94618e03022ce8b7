"""Modules that ``torch.distributed.fsdp.fully_shard`` has divided, so that each rank keeps a part of each parameter.

A draw, its complexity and the way back need parameters whole. So they are gathered for a whole step, whatever modules
they were divided with, and each rank draws from them by itself, as with ``DistributedDataParallel``. The modules inside
the network gather nothing while it runs: what they would gather are means, in the place of drawn weights.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_divided(module: nn.Module) -> bool:
    """Whether ``module`` itself was divided."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)  # who has divided has imported it
    return kind is not None and isinstance(module, kind)


def divided(module: nn.Module) -> list[Any]:
    """The modules in ``module``, itself included, that were divided."""
    return [each for each in module.modules() if is_divided(each)]


def is_called(module: Any) -> bool:
    """Whether a divided module is being called, so that its hooks gather parameters and average gradients."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # no public name

    return bool(module._get_fsdp_state()._training_state == TrainingState.FORWARD)


@contextmanager
def gathered(objective: Any) -> Iterator[None]:
    """For a call of a divided objective: all parameters are whole until the backward pass, or the call, is over."""
    modules = divided(objective)
    inner = [each for each in modules if each is not objective]
    keeps = torch.is_grad_enabled()
    objective.set_reshard_after_forward(not keeps, recurse=False)
    try:
        for each in inner:
            each.unshard()
        if keeps:
            _average_others(objective, modules)
        yield
    except BaseException:
        keeps = False
        objective.set_reshard_after_forward(True, recurse=False)
        objective.reshard()
        raise
    finally:
        if not keeps:
            for each in inner:
                each.reshard()


def _average_others(objective: nn.Module, modules: Sequence[Any]) -> None:
    """Have the gradients of parameters averaged that were not divided, as numbers without dimensions cannot be."""
    states = [module._get_fsdp_state() for module in modules]
    groups = [
        group for s in states for group in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group] if group
    ]
    divided = {id(parameter.unsharded_param) for group in groups for parameter in group.fsdp_params}
    for parameter in objective.parameters():
        known = (parameter._backward_hooks or {}).values()
        if parameter.requires_grad and id(parameter) not in divided and _average not in known:
            parameter.register_hook(_average)


def _average(gradient: Tensor) -> Tensor:
    average = gradient.clone()
    dist.all_reduce(average)
    return average / dist.get_world_size()


@contextmanager
def at_rest(modules: Sequence[Any]) -> Iterator[None]:
    """Within it, divided modules that are called neither gather their parameters nor divide them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # no public name

    states = [module._get_fsdp_state() for module in modules]
    before = [state._training_state for state in states]
    try:
        for state in states:
            state._training_state = TrainingState.PRE_BACKWARD  # as in a part that is computed a second time
        yield
    finally:
        for state, its_own in zip(states, before, strict=True):
            state._training_state = its_own


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Within it, parameters that ``fully_shard`` has divided among ranks are whole: to predict, to report or to save.

    All ranks must enter it. There are no gradients inside, and what is written to the parameters there is lost.

    Args:
        module: The objective, the model or another module with divided ones in it.

    Examples:
        >>> with unsharded(nn.Linear(2, 1)):  # of what is not divided nothing changes
        ...     pass
    """
    modules = divided(module)
    with torch.no_grad(), at_rest(modules):
        for each in modules:
            each.unshard()
        try:
            yield
        finally:
            for each in modules:
                each.reshard()
