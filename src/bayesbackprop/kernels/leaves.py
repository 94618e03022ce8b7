"""From leaf weights back to mu and rho, in one call.

A likelihood computed from drawn weights has the paper's "usual gradients found by backpropagation" at those weights; to
get Delta_mu and Delta_rho one must "simply scale and shift them". So the network runs on weights that are leaves of a
graph of their own, and this is the scaling and shifting: either as a node of the caller's graph (:func:`connect`) or,
when all that is wanted is ``.grad``, without one (:meth:`Graph.backward`), which small networks notice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayesbackprop.kernels import fused
from bayesbackprop.kernels.parameter import Parameter


@dataclass(frozen=True)
class Graph:
    """The likelihood cost as a function of leaves: the weights of each draw, and the other trained tensors."""

    parameters: Sequence[Parameter]
    draws: Sequence[Sequence[Tensor]]
    others: Sequence[Tensor]
    likelihood: Tensor
    complexity: Tensor

    @property
    def inputs(self) -> list[Tensor]:
        """What the caller's graph is to be connected to."""
        return [p.q.mu for p in self.parameters] + [p.q.rho for p in self.parameters] + list(self.others)

    def backward(self, complexity_weight: float) -> None:
        """Add the gradients of likelihood + complexity_weight * complexity to ``.grad``."""
        self.likelihood.backward()
        for ws in self.draws:
            to_mu = [fused.dense(w.grad, w) for w in ws]
            to_rho = fused.backward(self.parameters, ws, to_mu, complexity_weight / len(self.draws))
            for p, gradient_mu, gradient_rho in zip(self.parameters, to_mu, to_rho, strict=True):
                _accumulate(p.q.mu, gradient_mu)
                _accumulate(p.q.rho, gradient_rho)

    def gradients(self, of_likelihood: Tensor, of_complexity: Tensor) -> list[Tensor | None]:
        """The gradients of all ``inputs``."""
        leaves = [w for ws in self.draws for w in ws]
        every = torch.autograd.grad(self.likelihood, [*leaves, *self.others], of_likelihood, allow_unused=True)
        mus = [torch.zeros_like(p.q.mu) for p in self.parameters]
        rhos = [torch.zeros_like(p.q.rho) for p in self.parameters]
        number = len(self.parameters)
        for k, ws in enumerate(self.draws):
            given = every[k * number : (k + 1) * number]
            # Copies: two of them may be one and the same tensor.
            to_mu = [fused.dense(g, w).clone() for w, g in zip(ws, given, strict=True)]
            to_rho = fused.backward(self.parameters, ws, to_mu, float(of_complexity) / len(self.draws))
            torch._foreach_add_(mus, to_mu)
            torch._foreach_add_(rhos, to_rho)
        return [*mus, *rhos, *every[len(leaves) :]]


class _Connect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, *_: Tensor) -> tuple[Tensor, Tensor]:
        ctx.graph = graph
        return graph.likelihood.detach().clone(), graph.complexity.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            return (None, *ctx.graph.gradients(*gradients))


def connect(graph: Graph) -> tuple[Tensor, Tensor]:
    """The likelihood cost and the complexity as differentiable functions of mu, rho and the rest."""
    likelihood, complexity = _Connect.apply(graph, *graph.inputs)  # type: ignore[no-untyped-call]
    return likelihood, complexity


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
