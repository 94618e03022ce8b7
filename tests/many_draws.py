"""Many draws at once: by the plain equations, whose noise torch vectorises, the first of them also by the kernels.

Noise is a function of its key, so these are the draws that a loop would make, in a thirtieth of its time.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from bayesbackprop import FreeEnergy, plain_kernels

COMPARED = 3


def each_draw(function: Callable[[int | Tensor], Tensor], draws: int, first: int = 0) -> Tensor:
    """``function`` of the index of a draw, at ``draws`` indices from ``first``."""
    indices = torch.arange(first, first + draws)
    with torch.no_grad():
        with plain_kernels():
            samples = vmap(function)(indices)
        by_kernels = [function(index) for index in indices[:COMPARED].tolist()]
    torch.testing.assert_close(samples[:COMPARED], torch.stack(by_kernels), rtol=1e-9, atol=1e-9)
    return samples


class _Step(nn.Module):
    """What a free energy of one draw costs, per example, at any step."""

    def __init__(self, free_energy: FreeEnergy, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.model, self.n = free_energy.model, free_energy.n
        self.sampled = free_energy.complexity == "sampled"
        self.x, self.y = x, y

    def forward(self, step: Tensor) -> Tensor:
        draw = self.model.draw(step)
        complexity = draw.complexity() if self.sampled else self.model.complexity_closed()
        return self.model.likelihood.cost(draw(self.x), self.y) + complexity / self.n


def each_step(free_energy: FreeEnergy, x: Tensor, y: Tensor, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Costs and gradients of the next ``steps`` steps of training, all at the parameters as they are."""
    cost = _Step(free_energy, x, y)
    values = {name: parameter.detach() for name, parameter in cost.named_parameters()}
    numbers = int(free_energy.step) + 1 + torch.arange(steps)
    with plain_kernels():
        one = grad_and_value(lambda values, number: functional_call(cost, values, (number,)))
        gradients, costs = vmap(one, in_dims=(None, 0))(values, numbers)
    for number in range(COMPARED):
        free_energy.zero_grad()
        found = free_energy(x, y)
        found.backward()
        torch.testing.assert_close(costs[number], found.detach().as_subclass(Tensor), rtol=1e-9, atol=1e-9)
        for name, parameter in cost.named_parameters():
            torch.testing.assert_close(gradients[name][number], parameter.grad, rtol=1e-9, atol=1e-9)
    free_energy.step.fill_(int(numbers[-1]))
    return costs, gradients
