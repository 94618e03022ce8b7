"""Gradients that are not finite: refused before a step is taken with them, with what is to blame."""

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bayesbackprop._ranks import rank_of_ranks
from bayesbackprop.objective import FreeEnergy


class DivergenceError(RuntimeError):
    """The cost of a run, or a gradient, is no longer finite."""


class Postponing(Optimizer):
    """An optimiser that computes some gradients only where it uses them."""

    @property
    def postponed_squares(self) -> float:
        """The sum of squares of what it will compute gradients from."""
        raise NotImplementedError

    def materialise(self) -> None:
        """Compute them now; from now on they are in ``.grad``."""
        raise NotImplementedError


def check_gradients(objective: nn.Module, optimiser: Optimizer, *, norm: bool = False) -> Tensor | None:
    """Refuse gradients that are not finite before ``optimiser`` takes a step with them; their norm, if wanted."""
    if norm:
        total = nn.utils.get_total_norm(p.grad for p in objective.parameters() if p.grad is not None)
        if math.isfinite(total.item()):
            return total
    elif _has_finite_gradients(optimiser):
        return None
    if isinstance(optimiser, Postponing):
        optimiser.materialise()
    for name, parameter in objective.named_parameters():
        if (gradient := parameter.grad) is not None:
            numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
            if not bool(numbers.isfinite().all()):
                found = f"The gradient of '{name}' is not finite, so no step was taken."
                raise DivergenceError(f"{found} {_advice(objective, parameter)}")
    if norm:  # to scale the gradient by 1 / inf would make it 0
        raise DivergenceError("The norm of the gradient overflows, so no step was taken. Lower the learning rate.")
    return None


def _has_finite_gradients(optimiser: Optimizer) -> bool:
    """Whether the sum of all gradients is finite: if so, each is. It takes a hundredth of a step.

    Of those that are postponed it is the sum of squares of what they are computed from: while that is finite, there is
    room for another factor.
    """
    gradients = [p.grad for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
    if isinstance(optimiser, Postponing) and not math.isfinite(optimiser.postponed_squares):
        return False
    if gradients and gradients[0].device.type != "cpu":  # where to wait for each sum would take longer
        return math.isfinite(nn.utils.get_total_norm(gradients).item())
    return math.isfinite(sum([gradient.sum().item() for gradient in gradients]))


def _advice(objective: nn.Module, parameter: nn.Parameter) -> str:
    """Which part of the cost a gradient that is not finite comes from, and what helps."""
    if not isinstance(objective, FreeEnergy):
        return "Lower the learning rate."
    model, (rank, _) = objective.model, rank_of_ranks()
    draws = [model.draw(int(objective.step), rank * objective.draws + k) for k in range(objective.draws)]
    sampled = objective.complexity == "sampled"
    costs = [draw.complexity() for draw in draws] if sampled else [model.complexity_closed()]
    (slope,) = torch.autograd.grad(torch.stack(costs).sum(), parameter, allow_unused=True)
    if slope is not None and not bool(slope.isfinite().all()):
        return "The complexity cost is to blame: choose a wider prior, or a smaller initial sigma."
    return "The likelihood cost is to blame: lower the learning rate, or scale the data."
