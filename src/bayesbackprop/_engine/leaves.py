"""From leaf weights back to mu and rho, in one call.

A likelihood computed from drawn weights has the paper's "usual gradients found by backpropagation" at those weights; to
get Delta_mu and Delta_rho one must "simply scale and shift them". So the network runs on weights that are leaves of a
graph of their own, or, where it is a plain stack of layers, of none; and this is the scaling and shifting: either as a
node of the caller's graph (:func:`connect`) or, when all that is wanted is ``.grad``, without one
(:meth:`Graph.backward`), which small networks notice.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesbackprop._engine import cpu as fused
from bayesbackprop._engine.parameter import Parameters
from bayesbackprop._engine.stack import Stack
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.noise import Key
from bayesbackprop.swap import Places, call_with


class Pass(NamedTuple):
    """The likelihood cost of one draw, and what is needed to go back from it to the drawn weights.

    Through autograd, whose leaves are the weights, or for a stack its output; or, if its ``slope`` by the output is
    known, without.
    """

    ws: list[Tensor]
    cost: Tensor
    output: Any
    stack: Stack | None = None
    activations: Sequence[Tensor] = ()
    version: int = 0  # of the input, which is the first of the activations
    slope: Tensor | None = None

    def gradients(self, factor: float, retain_graph: bool) -> list[Tensor]:
        """The gradients of ``factor`` times the cost: of the weights; others' are added to their ``.grad``."""
        slope = self.slope
        if self.activations and self.activations[0]._version != self.version:
            raise RuntimeError("The inputs were modified in place after the cost was computed: compute the cost anew.")
        if slope is None:
            if self.cost.requires_grad:  # or no weight has a part in it
                self.cost.backward(torch.full_like(self.cost, factor), retain_graph=retain_graph)
        elif factor != 1:
            slope = slope * factor
        if self.stack is None:
            gradients = [fused.dense(w.grad, w) for w in self.ws]
            for w in self.ws:
                w.grad = None
            return gradients
        if slope is None:
            slope, self.output.grad = fused.dense(self.output.grad, self.output), None
        with torch.no_grad():
            return self.stack.backward(self.ws, self.activations, slope)


def run(
    places: Places,
    parameters: Parameters,
    likelihood: Likelihood,
    key: Key,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: Any,
) -> Pass:
    """Draw the weights of parameters that are all fused, and run the network at ``places`` on them."""
    ws = fused.draw(parameters, key)
    stack = parameters.stack
    if stack is None or not stack.takes(args, kwargs, ws[0].dtype):
        for w in ws:
            w.requires_grad_()
        output = call_with(places, ws, args, kwargs)
        return Pass(ws, likelihood.cost(output, targets), output)
    (x,) = args
    with torch.no_grad():
        activations = stack.forward(ws, x)
    output = activations[-1]
    if likelihood.has_slope:
        cost, slope = likelihood.cost(output, targets), likelihood.slope(output, targets)
        return Pass(ws, cost, output, stack, activations, x._version, slope)
    cost = likelihood.cost(output.requires_grad_().clone(), targets)  # which may work in place
    return Pass(ws, cost, output, stack, activations, x._version)


class Graph:
    """The likelihood cost as a function of leaves: the weights of each draw, and the other trained tensors."""

    def __init__(
        self,
        parameters: Parameters,
        draws: Sequence[Pass],
        others: Sequence[Tensor],
        complexity_weight: float,
    ) -> None:
        self.parameters = parameters
        self.draws: Sequence[Pass] | None = draws
        costs = [each.cost.detach() for each in draws]
        # The likelihood cost, the mean over the draws; a value only.
        self.likelihood = costs[0] if len(costs) == 1 else torch.stack(costs).mean()
        self.others = others
        self.complexity_weight = complexity_weight
        self._state = parameters.state
        self._complexity: float | None = None

    @property
    def inputs(self) -> list[Tensor]:
        """What the caller's graph is to be connected to."""
        return [*self.parameters.trained, *self.others]

    @property
    def complexity(self) -> float:
        """log q(w|theta) - log P(w), the mean over the draws: a pass over all weights, unless backward has been."""
        if self._complexity is None:
            self._check_unchanged()
            assert self.draws is not None
            self._complexity = sum(fused.complexity(self.parameters, each.ws) for each in self.draws) / len(self.draws)
        return self._complexity

    def backward(self, retain_graph: bool) -> None:
        """Add the gradients of the total, likelihood + complexity_weight * complexity, to ``.grad``."""
        gradients = self._scale_and_shift(1.0, self.complexity_weight, retain_graph)
        for parameter, gradient in zip(self.inputs, gradients, strict=False):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def gradients(self, of_likelihood: float, of_complexity: float, retain_graph: bool) -> list[Tensor | None]:
        """The gradients of all ``inputs``; what else the likelihood depends on has its own added to ``.grad``."""
        before = [other.grad for other in self.others]
        for other in self.others:
            other.grad = None
        of_weights = self._scale_and_shift(of_likelihood, of_complexity, retain_graph)
        of_others = [other.grad for other in self.others]
        for other, gradient in zip(self.others, before, strict=True):
            other.grad = gradient
        return [*of_weights, *of_others]

    def _scale_and_shift(self, of_likelihood: float, of_complexity: float, retain_graph: bool) -> list[Tensor]:
        """The gradients of all mu and rho; unless told to keep the graph, a graph can be gone back once, as torch's."""
        if self.draws is None:
            raise RuntimeError(
                "Trying to backward through the cost a second time, after its drawn weights were freed. Specify "
                "retain_graph=True in the first backward to go back more than once."
            )
        self._check_unchanged()
        sums: list[Tensor] = []
        costs: list[float] = []
        share = 1 / len(self.draws)
        for each in self.draws:
            to_mu = each.gradients(of_likelihood * share, retain_graph)
            to_rho, cost = fused.backward(self.parameters, each.ws, to_mu, of_complexity * share)
            costs.append(cost)
            sums = [a.add_(b) for a, b in zip(sums, to_mu + to_rho, strict=True)] if sums else to_mu + to_rho
        self._complexity = sum(costs) * share
        if not retain_graph:
            self.draws = None
        if not math.isfinite(self._complexity):
            raise ValueError(
                "The complexity cost must be finite. Got NaN or inf instead: a mean or a rho is NaN or far too large."
            )
        return sums

    def _check_unchanged(self) -> None:
        if self._state != self.parameters.state:
            raise RuntimeError(
                "The weights were changed (by an optimiser step?) after the cost was computed, and before backward or "
                "before its parts were first read: compute the cost anew."
            )


# Whether the backward pass under way is to be repeated; where torch does not say, it may be.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class _Connect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        likelihood = graph.likelihood
        complexity = torch.tensor(graph.complexity, dtype=likelihood.dtype)
        return likelihood + graph.complexity_weight * complexity, likelihood, complexity

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        fused.refuse_second_derivatives()
        total, likelihood, complexity = (0.0 if gradient is None else float(gradient) for gradient in gradients)
        of_complexity = total * ctx.graph.complexity_weight + complexity
        with torch.enable_grad():
            return (None, *ctx.graph.gradients(total + likelihood, of_complexity, _keeps_graph()))


def connect(graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
    """The total, the likelihood cost and the complexity as differentiable functions of mu, rho and the rest."""
    total, likelihood, complexity = _Connect.apply(graph, *graph.inputs)  # type: ignore[no-untyped-call]
    return total, likelihood, complexity
