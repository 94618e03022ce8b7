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

from bayesbackprop.kernels import fused
from bayesbackprop.kernels.parameter import Parameters


@dataclass(frozen=True)
class Graph:
    """The likelihood cost as a function of leaves: the weights of each draw, and the other trained tensors."""

    parameters: Parameters
    draws: Sequence[Sequence[Tensor]]
    others: Sequence[Tensor]
    likelihood: Tensor
    complexity: Tensor
    complexity_weight: float
    versions: list[int]

    @property
    def inputs(self) -> list[Tensor]:
        """What the caller's graph is to be connected to."""
        return [*self.parameters.mus, *self.parameters.rhos, *self.others]

    def backward(self, retain_graph: bool) -> None:
        """Add the gradients of the total, likelihood + complexity_weight * complexity, to ``.grad``."""
        self._check_unchanged()
        self.likelihood.backward(retain_graph=retain_graph)
        for ws in self.draws:
            to_mu = [fused.dense(w.grad, w) for w in ws]
            to_rho = self._scale_and_shift(ws, to_mu, self.complexity_weight)
            for parameter, gradient in zip(self.inputs, to_mu + to_rho, strict=False):
                _accumulate(parameter, gradient)
            for w in ws:
                w.grad = None

    def gradients(self, of_likelihood: float, of_complexity: float) -> list[Tensor | None]:
        """The gradients of all ``inputs``; what else the likelihood depends on has its own added to ``.grad``."""
        self._check_unchanged()
        before = [other.grad for other in self.others]
        for other in self.others:
            other.grad = None
        self.likelihood.backward(torch.full_like(self.likelihood, of_likelihood), retain_graph=True)
        of_others = [other.grad for other in self.others]
        for other, gradient in zip(self.others, before, strict=True):
            other.grad = gradient
        sums: list[Tensor] = []
        for ws in self.draws:
            to_mu = [fused.dense(w.grad, w) for w in ws]
            both = to_mu + self._scale_and_shift(ws, to_mu, of_complexity)
            sums = [a + b for a, b in zip(sums, both, strict=True)] if sums else both
            for w in ws:
                w.grad = None
        return [*sums, *of_others]

    def _scale_and_shift(self, ws: Sequence[Tensor], to_mu: Sequence[Tensor], of_complexity: float) -> list[Tensor]:
        return fused.backward(self.parameters, ws, to_mu, of_complexity / len(self.draws))

    def _check_unchanged(self) -> None:
        if self.versions != self.parameters.versions:
            raise RuntimeError(
                "The weights were changed (by an optimiser step?) between computing the cost and backward: compute the "
                "cost anew."
            )


class _Connect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        likelihood = graph.likelihood.detach()
        return likelihood + graph.complexity_weight * graph.complexity, likelihood, graph.complexity

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        fused.refuse_second_derivatives()
        total, likelihood, complexity = (0.0 if gradient is None else float(gradient) for gradient in gradients)
        with torch.enable_grad():
            return (None, *ctx.graph.gradients(total + likelihood, total * ctx.graph.complexity_weight + complexity))


def connect(graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
    """The total, the likelihood cost and the complexity as differentiable functions of mu, rho and the rest."""
    total, likelihood, complexity = _Connect.apply(graph, *graph.inputs)  # type: ignore[no-untyped-call]
    return total, likelihood, complexity


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
