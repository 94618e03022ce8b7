"""The state of a training run in a file: taken apart for writing, and compared with the run before it is loaded."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from bayesbackprop._errors import check_finite, tensor_shape
from bayesbackprop._files import check_counter, check_number, check_same
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim import IVON, Adam

_Value = TypeVar("_Value")


def under(prefix: str, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """What of ``values`` has a name that begins with ``prefix.``, by the rest of its name."""
    start = prefix + "."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def split(parts: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The tensors of all parts by ``part.name``, and what else each part holds."""
    tensors, plain = {}, {part: dict(values) for part, values in parts.items()}
    for part, values in parts.items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{part}.{name}"] = plain[part].pop(name)
    return tensors, plain


def of_objective(objective: nn.Module) -> dict[str, Any]:
    """The state of an objective, each tensor under its first name: weights may be tied."""
    state: dict[str, Any] = objective.state_dict()
    first: dict[Any, str] = {}
    for name, value in state.items():
        stored = isinstance(value, Tensor) and value.numel()
        first.setdefault((value.data_ptr(), value.shape, value.stride()) if stored else name, name)
    return {name: state[name] for name in first.values()}


def tensors_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What of a state is a tensor."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def check_objective(objective: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse what is not a state of ``objective``."""
    own = of_objective(objective)
    if own.keys() != state.keys():
        raise ValueError(f"{sorted(own.keys() ^ state.keys())} missing or besides")
    buffers = dict(objective.named_buffers(remove_duplicate=False))
    check_same("the objective", tensors_in(state), tensors_in(own), buffers)
    for name, value in tensors_in(state).items():
        if not value.dim() and not value.is_floating_point() and int(own[name]) >= 0 > int(value):
            raise ValueError(f"{name} {int(value)}")  # a counter or a seed
    if isinstance(objective, FreeEnergy):
        check_counter("step", int(state["step"]))


def load_objective(objective: nn.Module, state: Mapping[str, Any]) -> None:
    """Give ``objective`` the state that :func:`check_objective` let pass."""
    first = of_objective(objective)
    others = {name: value for name, value in objective.state_dict().items() if name not in first}
    objective.load_state_dict({**others, **state})  # the others are the same memory as a first name


def check_run(state: Mapping[str, Any]) -> None:
    """Refuse what no run says of itself."""
    step, taken, examples = (check_counter(name, state[name]) for name in ("step", "taken", "examples"))
    sums, seconds, records = dict(state["sums"]), state["seconds"], state["records"]
    for value in (seconds, *sums.values()):
        check_number("a sum", value)
    if not isinstance(records, list) or step < len(records) or (sums and not examples) or examples < taken:
        raise ValueError(f"step {step} after {len(records)} epochs and {taken} batches of {examples} examples")
    for number, record in enumerate(records, 1):
        if record["epoch"] != number:
            raise ValueError(f"a record {record!r:.80}")
        check_number("a cost", record.get("cost", 0))  # of version 0.2 they have none
        check_number("a time", record["seconds"])


# Slots that torch's optimisers make of the shape of their parameter, and that its fused ones write to unchecked.
# Averages of squares are never negative, and may overflow.
_AS_LARGE = ("exp_avg", "momentum_buffer", "grad_avg", "exp_inf", "ax", "prev", "step_size")
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta")
# What Adam needs of each parameter that it has stepped, and choices of how, not of what, to compute.
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_HOW = ("foreach", "fused", "capturable", "differentiable")


def of_optimiser(
    optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of ``optimiser`` in a file, after all of it has been compared with the parameters."""
    own, strict = optimiser.state_dict()["param_groups"], _is_torchs(type(optimiser))
    extends = any(map(_is_torchs, type(optimiser).__mro__))  # and so may run its fused kernels
    pairs = zip(plain["groups"], own, strict=True)
    groups = _like(own, [{**theirs, **_how(mine, theirs)} for theirs, mine in pairs], strict)
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    slots: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **plain["slots"]}.items():
        digits, _, slot = name.partition(".")
        number = int(digits)
        parameter = parameters[check_counter("parameter", number)]
        if extends:
            _check_slot(f"'{slot}' of parameter {number}", slot, value, parameter)
        slots.setdefault(number, {})[slot] = value
    for mine, group in zip(own, groups, strict=True):
        if mine["params"] != group["params"]:
            raise ValueError(f"parameters {group['params']!r:.80} of a group")
        if strict and any(type(value) is bool and group[name] is not value for name, value in mine.items()):
            raise ValueError(f"settings {group!r:.200}")
        if not all(0 <= beta < 1 for beta in group.get("betas", ())):
            raise ValueError(f"betas {group['betas']}")
        known = [set(slots[number]) for number in mine["params"] if number in slots]
        needed = _ADAM | ({"max_exp_avg_sq"} if group.get("amsgrad") else set())
        is_adam = type(optimiser) in (torch.optim.Adam, torch.optim.AdamW, Adam)
        if strict and any(names != (needed if is_adam else known[0]) for names in known):
            raise ValueError(f"slots {sorted(set().union(*known))}, not of all parameters")
    return {"state": slots, "param_groups": groups}


def _how(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that need not be those of the file."""
    names = _HOW if theirs.get("weight_decay") else (*_HOW, "decoupled_weight_decay")
    return {name: mine[name] for name in names if name in mine}


def of_scheduler(scheduler: LRScheduler | None, plain: Any) -> dict[str, Any]:
    """The state of ``scheduler`` in a file, of the types that it has; without a scheduler nothing."""
    known = {} if scheduler is None else scheduler.state_dict()
    return {} if scheduler is None else dict(_like(known, plain, _is_torchs(type(scheduler))))


def _check_slot(name: str, slot: str, value: Any, parameter: Tensor) -> None:
    if slot in (*_AS_LARGE, *_SQUARES):
        check_same("the optimiser", {name: value}, {name: parameter}, (name,) if slot in _SQUARES else ())
        if slot in _SQUARES and bool((value < 0).any()):
            raise ValueError(f"{name} is negative")
    elif isinstance(value, Tensor):
        check_finite(name, "the optimiser", value)
        if slot == "step" and (value.dim() or not value.is_floating_point()):
            raise ValueError(f"{name} is {tensor_shape(value)}")
    if slot == "step":
        steps = float(value)
        check_counter(name, int(steps) if steps.is_integer() else steps)


def in_json(settings: Any) -> Any:
    """Settings as JSON has them: a learning rate can be a tensor."""
    return tree_map_only(Tensor, Tensor.item, settings)


def _is_torchs(kind: type) -> bool:
    """Whether it is an optimiser or a scheduler of torch, or ours, so that it is known what its settings can be."""
    return kind in (Adam, IVON) or (kind.__module__.startswith("torch.optim.") and kind is not torch.optim.Optimizer)


def _like(mine: Any, value: Any, strict: bool) -> Any:
    """A setting from JSON with the types that it has in ``mine``: JSON knows no tuples, and no keys but text.

    Where it is ``strict``, names, lengths and types must be those of ``mine``, and numbers finite and of its sign.
    """
    if isinstance(mine, Tensor):
        return torch.full_like(mine, _like(mine.item(), value, strict=True))
    if isinstance(mine, dict):
        keys = {str(key): key for key in mine}
        if strict:  # but for flags, which other versions of torch do not know
            value = {**{name: mine[key] for name, key in keys.items() if isinstance(mine[key], bool | None)}, **value}
            if keys.keys() != value.keys():
                raise ValueError(f"settings {sorted(value)!r:.200}")
        return type(mine)(
            {keys.get(name, name): _like(mine.get(keys.get(name)), each, strict) for name, each in value.items()}
        )
    if isinstance(mine, list | tuple) and isinstance(value, list) and len(mine) == len(value):
        return type(mine)(_like(*pair, strict) for pair in zip(mine, value, strict=True))
    if strict and isinstance(mine, list | tuple):
        raise ValueError(f"settings {value!r:.80}, not {len(mine)} of them")
    if strict and isinstance(mine, int | float) and not isinstance(mine, bool):
        check_number("a setting", value)
        if value < 0 <= mine:
            raise ValueError(f"a setting {value!r}")
    elif strict and type(mine) is not type(value):
        raise TypeError(f"a setting {value!r:.80} of another type")
    return value
