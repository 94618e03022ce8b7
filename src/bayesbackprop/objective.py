"""The objective: the variational free energy, the one function that training, tests and docs share.

F(D, theta) = KL[q(w|theta) || P(w)] - E_q[log P(D|w)]                                              (1)

is a *complexity cost* and a *likelihood cost* over the whole data set D of N examples. A minibatch D_i carries the
share pi_i of the complexity (9), and its cost is averaged over its examples, as the paper averages its gradients:

total = -mean_b log P(y_b|x_b,w)  +  T * pi_i / |D_i| * (log q(w|theta) - log P(w))

with pi_i = |D_i| / N in the uniform scheme, so that every example carries 1/N of the complexity, however short its
batch. The average over the examples of an epoch is F / N: nats per example.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bayesbackprop._engine import all_fused
from bayesbackprop._engine.leaves import Graph, connect, run
from bayesbackprop._errors import (
    Described,
    check_batch,
    check_count,
    check_finite,
    check_not_negative,
    invalid,
    tensors_of,
)
from bayesbackprop.complexity import minibatch_weights as checked_weights
from bayesbackprop.layout import Layout
from bayesbackprop.model import Bayesian, Draw
from bayesbackprop.noise import Key, Word

_OWNER = "FreeEnergy"


class Cost:
    """The cost of a minibatch: ``total = likelihood + complexity_weight * complexity``, in nats per example.

    ``likelihood`` is the mean negative log-likelihood of an example; ``complexity`` the estimate of the whole
    KL[q || P] in nats, not yet weighted. All four are tensors, the first three differentiable. What is not asked for is
    not computed: training needs only :meth:`backward`. It unpacks: ``total, likelihood, complexity, weight = cost``.
    """

    def __init__(self, parts: "Graph | tuple[Tensor, Tensor]", complexity_weight: float | Tensor) -> None:
        self._graph: Graph | None = None
        self._weight = complexity_weight
        self._values: tuple[Tensor, Tensor, Tensor] | None = None
        if isinstance(parts, Graph):
            self._graph = parts
        else:
            likelihood, complexity = parts
            self._weight = torch.as_tensor(complexity_weight, dtype=complexity.dtype, device=complexity.device)
            self._values = likelihood + self._weight * complexity, likelihood, complexity

    @property
    def total(self) -> Tensor:
        """What is minimised."""
        return self._parts()[0]

    @property
    def likelihood(self) -> Tensor:
        """The likelihood cost."""
        return self._parts()[1]

    @property
    def complexity(self) -> Tensor:
        """The complexity cost."""
        return self._parts()[2]

    @property
    def complexity_weight(self) -> Tensor:
        """The weight of the complexity in the total."""
        return torch.as_tensor(self._weight, dtype=self.total.dtype, device=self.total.device)

    def backward(self, retain_graph: bool = False) -> None:
        """Add the gradients of the total to the parameters' ``.grad``, as ``total.backward()`` but faster."""
        if self._graph is None:
            self.total.backward(retain_graph=retain_graph)
        else:
            self._graph.backward(retain_graph)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((*self._parts(), self.complexity_weight))

    def __repr__(self) -> str:
        total, likelihood, complexity = (part.item() for part in self._parts())
        return f"Cost({total=:.6g}, {likelihood=:.6g}, {complexity=:.6g}, weight={float(self._weight):.3g})"

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._values is None:
            assert self._graph is not None
            self._values = connect(self._graph)
        return self._values


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class FreeEnergy(nn.Module):
    """The variational free energy of a model, minibatch by minibatch.

    Args:
        model: The Bayesian network.
        n: The number of examples in the whole training set, which sets the scale of the complexity.
        draws: Monte Carlo samples to average over at each step.
        complexity: ``"sampled"``, log q(w|theta) - log P(w) at the draw that makes the prediction (the paper's way), or
            ``"closed"`` where the prior has a closed form.
        minibatch_weights: How the minibatches of an epoch share the complexity. ``"uniform"``; ``"geometric"``, the
            paper's pi_i = 2^(M-i) / (2^M - 1); or a sequence that sums to 1. All but the first need ``batch_size``, and
            each call then says which ``batch`` of the epoch it has, counted from 0.
        batch_size: The examples of a full minibatch, over all ranks.
        temperature: A factor on the complexity. 1 is Bayes; below 1 the posterior is "cold".
        warmup: Steps over which the complexity rises linearly to its full weight.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> model = Bayesian(nn.Linear(3, 1), Gaussian(0.1), seed=0)
        >>> free_energy = FreeEnergy(model, n=100)
        >>> cost = free_energy(torch.zeros(20, 3), torch.zeros(20, 1))
        >>> cost.backward()
    """

    step: Tensor

    def __init__(
        self,
        model: Bayesian,
        n: int,
        *,
        draws: int = 1,
        complexity: Literal["sampled", "closed"] = "sampled",
        minibatch_weights: Literal["uniform", "geometric"] | Sequence[float] | Tensor = "uniform",
        batch_size: int | None = None,
        temperature: float = 1.0,
        warmup: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(model, Bayesian):
            raise invalid("model", _OWNER, "a Bayesian", model)
        check_count(_OWNER, n=n, draws=draws)
        check_count(_OWNER, least=0, warmup=warmup)
        check_not_negative(_OWNER, temperature=temperature)
        if complexity not in ("sampled", "closed"):
            raise invalid("complexity", _OWNER, "'sampled' or 'closed'", complexity)
        self.model = model
        self.n = n
        self.draws = draws
        self.complexity = complexity
        self.temperature = temperature
        self.warmup = warmup
        self.batch_size = batch_size
        # The noise and the warm-up depend on it: it is part of the state_dict, so that a run can be resumed.
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("_pi", checked_weights(minibatch_weights, n, batch_size), persistent=False)
        self._pi: Tensor | None
        if complexity == "closed":
            with torch.no_grad():
                model.complexity_closed()  # now, not at the first step, says which prior has none

    def forward(self, inputs: Any, targets: Any, batch: int | None = None) -> Cost:
        """The cost of a minibatch, with new noise at every call.

        Args:
            inputs: What the network takes: a tensor, a tuple of positional or a mapping of keyword arguments.
            targets: What the likelihood takes.
            batch: Which minibatch of the epoch this is, from 0; only for weights that are not uniform.
        """
        args, kwargs = _arguments(inputs)
        given, wanted = tensors_of(inputs if isinstance(inputs, Tensor) else (args, kwargs)), tensors_of(targets)
        check_batch("inputs", _OWNER, given)
        check_batch("targets", _OWNER, wanted)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

        step = self.step + 1 if torch.compiler.is_compiling() else int(self.step) + 1
        weight = self._complexity_weight(_examples(wanted or given) * ranks, batch, step)

        model, layout = self.model, self.model.layout()
        keys = [Key(model.seed, step, rank * self.draws + k) for k in range(self.draws)]  # (2), averaged over them
        if self._takes_leaves(layout, [*given, *wanted]):
            parameters, likelihood = layout.parameters, model.likelihood
            passes = [run(layout.shared, parameters, likelihood, key, args, kwargs, targets) for key in keys]
            for each in passes:
                check_finite("likelihood cost", _OWNER, each.cost)
            others = [tensor for tensor in layout.others if tensor.requires_grad]
            cost = Cost(Graph(parameters, passes, others, float(weight)), weight)
        else:
            draws = [Draw(model, key, layout) for key in keys]
            of_likelihood = _mean([model.likelihood.cost(draw(*args, **kwargs), targets) for draw in draws])
            check_finite("likelihood cost", _OWNER, of_likelihood)
            sampled = self.complexity == "sampled"
            of_complexity = _mean([draw.complexity() for draw in draws]) if sampled else model.complexity_closed()
            check_finite("complexity cost", _OWNER, of_complexity)
            cost = Cost((of_likelihood, of_complexity), weight)
        self.step.add_(1)
        return cost

    def _takes_leaves(self, layout: Layout, data: list[Tensor]) -> bool:
        """Whether the way from the weights to mu and rho can be taken in one call."""
        parameters = layout.parameters
        if (
            self.complexity != "sampled"
            or layout.rules
            or not torch.is_grad_enabled()
            or dist.is_initialized()  # where gradients are averaged by hooks of the graph
            or not all_fused(parameters)
        ):
            return False
        for tensor in data:
            if tensor.requires_grad:
                return False
        for tensor in parameters.trained:
            if not tensor.requires_grad or _has_hooks(tensor):
                return False
        return not any(map(_has_hooks, layout.others))

    def _complexity_weight(self, examples: int, batch: int | None, step: Word) -> float | Tensor:
        """T * pi_i / |D_i|, and the warm-up."""
        if examples > self.n:
            constraint = f"the size of the training set, at least the {examples} examples of this minibatch"
            raise invalid("n", _OWNER, constraint, self.n)
        weight = self.temperature * self._share_per_example(examples, batch)
        if not self.warmup:
            return weight
        if isinstance(step, Tensor):
            return weight * (step.double() / self.warmup).clamp(max=1)
        return weight * min(1.0, step / self.warmup)

    def _share_per_example(self, examples: int, batch: int | None) -> float | Tensor:
        """pi_i / |D_i|."""
        if self._pi is None:
            if batch is not None:
                constraint = "left out with uniform weights, where all minibatches are alike"
                raise invalid("batch", _OWNER, constraint, batch)
            return 1 / self.n
        assert self.batch_size is not None
        batches = len(self._pi)
        if not isinstance(batch, int) or isinstance(batch, bool) or not 0 <= batch < batches:
            raise invalid("batch", _OWNER, f"the number of the minibatch in its epoch, an int in [0, {batches})", batch)
        size = min(self.batch_size, self.n - batch * self.batch_size)
        if examples != size:
            constraint = (
                f"as long as n={self.n} and batch_size={self.batch_size} say: minibatch {batch} has {size} examples"
            )
            raise invalid("inputs", _OWNER, constraint, Described(f"{examples} examples"))
        return self._pi[batch] / examples


def _examples(tensors: list[Tensor]) -> int:
    for tensor in tensors:
        if tensor.dim():
            return len(tensor)
    raise invalid("inputs", _OWNER, "a minibatch of tensors", Described("none"))


def _mean(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).mean()


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    return (inputs,), {}
