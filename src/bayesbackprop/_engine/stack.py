"""Plain stacks of linear layers, without autograd.

For a small network autograd's bookkeeping takes several times as long as the arithmetic. The networks of the paper are
``nn.Sequential`` of ``nn.Linear`` and an elementwise function, whose backward pass is three lines; whatever is more
than that goes through autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesbackprop.swap import untouched

_ops = torch.ops.aten

# Each function, in place, and its derivative from its own result.
_FUNCTIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (torch.relu_, lambda gradient, h: _ops.threshold_backward(gradient, h, 0)),
    nn.Tanh: (torch.tanh_, _ops.tanh_backward),
    nn.Sigmoid: (torch.sigmoid_, _ops.sigmoid_backward),
}


class Stack:
    """``net`` as a stack: ``weights`` says where in the list of weights those of each linear layer stand."""

    def __init__(self, net: nn.Sequential, weights: dict[Tensor, int]) -> None:
        self._modules = [net, *net]
        self._layers = [
            (type(module), weights[module.weight], None if module.bias is None else weights[module.bias])
            if isinstance(module, nn.Linear)
            else (type(module), -1, None)
            for module in net
        ]

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> bool:
        """Whether nothing but the arithmetic would happen if the network were called with these."""
        if len(args) != 1 or kwargs or torch.is_autocast_enabled("cpu"):
            return False
        x = args[0]
        if type(x) is not Tensor or x.dim() != 2 or x.dtype is not dtype or x.device.type != "cpu":
            return False
        if x.layout is not torch.strided or x.is_inference():
            return False
        return untouched(self._modules)

    def forward(self, ws: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        """The input, and what comes out of each layer; an elementwise function takes the place of its own input."""
        hs = [x]
        for kind, weight, bias in self._layers:
            if kind is nn.Linear:
                w = ws[weight].t()
                hs.append(hs[-1] @ w if bias is None else torch.addmm(ws[bias], hs[-1], w))
            else:
                _FUNCTIONS[kind][0](hs[-1])
        return hs

    def backward(self, ws: Sequence[Tensor], hs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
        """The gradients of ``ws`` from that of the output."""
        gradients: list[Tensor | None] = [None] * len(ws)
        number = len(hs) - 1
        for kind, weight, bias in reversed(self._layers):
            if kind is nn.Linear:
                number -= 1
                gradients[weight] = gradient.t() @ hs[number]
                if bias is not None:
                    gradients[bias] = gradient.sum(0)
                if number:
                    gradient = gradient @ ws[weight]
            else:
                gradient = _FUNCTIONS[kind][1](gradient, hs[number])
        return [torch.zeros_like(w) if g is None else g for w, g in zip(ws, gradients, strict=True)]


def stack_of(net: nn.Module, weights: Sequence[Tensor]) -> Stack | None:
    """``net`` as a stack, if it is one and all its weights are among ``weights``."""
    if type(net) is not nn.Sequential or not net or type(net[0]) is not nn.Linear:
        return None
    for before, module in zip(net, [*net][1:], strict=False):
        if type(module) is not nn.Linear and not (type(module) in _FUNCTIONS and type(before) is nn.Linear):
            return None
    numbers = {weight: number for number, weight in enumerate(weights)}
    linear = [module for module in net if type(module) is nn.Linear]
    used = [tensor for module in linear for tensor in (module.weight, module.bias) if tensor is not None]
    if len(set(used)) != len(used) or not all(tensor in numbers for tensor in used):
        return None
    return Stack(net, numbers)
