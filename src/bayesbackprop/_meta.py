"""Networks on the meta device: shapes without values, which get their memory where their values are loaded."""

import torch
from torch import Tensor, nn

from bayesbackprop._errors import Described, invalid


def is_meta(module: nn.Module) -> bool:
    """Whether parameters or buffers are on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def check_in_memory(parameter: str, owner: str, module: nn.Module) -> None:
    """Refuse a module on the meta device."""
    if is_meta(module):
        constraint = "in memory: to_empty(device=...) first, and then load its weights (or load(path, net))"
        raise invalid(parameter, owner, constraint, Described("one on the meta device"))


def materialise(module: nn.Module, device: torch.device | str | int | None = None) -> None:
    """Give memory to what is on the meta device, and leave its values undefined; a shared tensor stays shared.

    ``nn.Module.to_empty`` would make two tensors of a weight that two layers share.

    Args:
        module: The module.
        device: Where; None for torch's default device.
    """
    default = torch.get_default_device()
    place = torch.device(device) if device is not None else torch.device("cpu") if default.type == "meta" else default
    made: dict[Tensor, Tensor] = {}
    for each in module.modules():
        for values in (each._parameters, each._buffers):
            for name, tensor in list(values.items()):
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    memory = torch.empty_like(tensor, device=place)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
                setattr(each, name, made[tensor])  # recurrent layers keep a second list of their weights
