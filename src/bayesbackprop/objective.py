"""The objective: the variational free energy, the one function that training, tests and docs share.

F(D, theta) = KL[q(w|theta) || P(w)] - E_q[log P(D|w)]                                              (1)

is a *complexity cost* and a *likelihood cost* over the whole data set D of N examples. A minibatch D_i carries the
share pi_i of the complexity (9), and its cost is averaged over its examples, as the paper averages its gradients:

total = -mean_b log P(y_b|x_b,w)  +  T * pi_i / |D_i| * (log q(w|theta) - log P(w))

with pi_i = |D_i| / N in the uniform scheme, so that every example carries 1/N of the complexity, however short its
batch. The average over the examples of an epoch is F / N: nats per example. Where examples have weights v_b, they stand
before log P(y_b|x_b,w) and N is still the number of examples: F is then KL[q || P] - sum_b v_b E_q[log P(y_b|x_b,w)].
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from numbers import Integral
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bayesbackprop._batches import arguments, check_arguments
from bayesbackprop._engine import Taker, costs, gathered, is_called, is_divided, unmoved
from bayesbackprop._errors import (
    Described,
    check_batch,
    check_choice,
    check_count,
    check_finite,
    check_flag,
    check_not_negative,
    check_type,
    check_weights,
    invalid,
    is_checkpointed,
    is_on_the_stack,
    tensors_of,
)
from bayesbackprop._meta import is_meta
from bayesbackprop._ranks import rank_of_ranks
from bayesbackprop.complexity import minibatch_weights as checked_weights
from bayesbackprop.likelihoods import Weighted
from bayesbackprop.model import Bayesian
from bayesbackprop.noise import WORDS, Word

_OWNER = "FreeEnergy"


class Cost(Tensor):
    """The cost of a minibatch: a loss, total = likelihood + complexity_weight * complexity, in nats per example.

    It is a tensor like any other loss: ``cost.backward()``, ``float(cost)``, ``(cost / 4).backward()``. Its parts are
    attributes, and it unpacks: ``total, likelihood, complexity, weight = cost``.

    Args:
        likelihood: The likelihood cost: the mean negative log-likelihood of an example.
        complexity: The complexity cost: the estimate of the whole KL[q || P] in nats, not yet weighted.
        complexity_weight: The weight of the complexity in the total.
    """

    likelihood: Tensor
    complexity: Tensor
    _weight: float | Tensor

    # What is computed from a cost is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, likelihood: Tensor, complexity: Tensor, complexity_weight: float | Tensor) -> "Cost":
        for name, part in (("likelihood", likelihood), ("complexity", complexity)):
            if not isinstance(part, Tensor) or part.dim() or not part.is_floating_point():
                raise invalid(name, "Cost", "a float tensor without dimensions", part)
        if isinstance(complexity_weight, Tensor):
            if complexity_weight.dim():
                constraint = "a number, or a tensor without dimensions"
                raise invalid("complexity_weight", "Cost", constraint, complexity_weight)
            total = likelihood + complexity_weight.to(complexity) * complexity
        else:
            if type(complexity_weight) is not float or not 0 <= complexity_weight < math.inf:
                checked = check_not_negative("Cost", complexity_weight=complexity_weight)
                complexity_weight = checked["complexity_weight"]
            total = torch.add(likelihood, complexity, alpha=complexity_weight)
        cost = total.as_subclass(cls)
        cost.likelihood, cost.complexity, cost._weight = likelihood, complexity, complexity_weight
        return cost

    def alone(self) -> "Cost":
        """The same cost as no view of another tensor, and with parts that have no gradients.

        For ``fully_shard``, which waits for the backward pass of the tensor that a module returns, and of no other.
        """
        cost: Cost = _Alone.apply(self)  # type: ignore[no-untyped-call]
        cost.likelihood, cost.complexity, cost._weight = (
            self.likelihood.detach(),
            self.complexity.detach(),
            self._weight,
        )
        return cost

    @property
    def total(self) -> Tensor:
        """What is minimised: the cost itself."""
        return self

    @property
    def complexity_weight(self) -> Tensor:
        """The weight of the complexity in the total."""
        return torch.as_tensor(self._weight, dtype=self.complexity.dtype, device=self.complexity.device)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.total, self.likelihood, self.complexity, self.complexity_weight))

    def __float__(self) -> float:
        return float(self.item())  # without the warning that torch has for tensors that require gradients

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec else repr(self)  # torch formats no subclass as a number

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = {name: getattr(self, name).item() for name in ("total", "likelihood", "complexity")}
        shown = ", ".join(f"{name}={value:.6g}" for name, value in parts.items())
        return f"Cost({shown}, weight={float(self.complexity_weight):.3g})"


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cost: Tensor) -> Tensor:  # noqa: ARG004
        alone: Tensor = Tensor._make_subclass(Cost, cost.clone())
        return alone

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient


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
        step: Steps taken before, from which the noise and the warm-up go on.
        own_averaging: Where several processes train, whether you average their gradients yourself. If not, each step
            must be a call of the ``DistributedDataParallel`` that holds this module: else the ranks would drift apart.

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
        step: int = 0,
        own_averaging: bool = False,
    ) -> None:
        super().__init__()
        check_type(_OWNER, Bayesian, "a Bayesian", model=model)
        self.n, self.draws = check_count(_OWNER, n=n, draws=draws).values()
        self.warmup, step = check_count(_OWNER, least=0, warmup=warmup, step=step).values()
        # Each step, and each draw of it, has a word of the counter of the noise.
        check_count(_OWNER, least=0, below=WORDS, draws=draws, step=step)
        self.temperature = check_not_negative(_OWNER, temperature=temperature)["temperature"]
        check_choice(_OWNER, ("sampled", "closed"), complexity=complexity)
        self.own_averaging = check_flag(_OWNER, own_averaging=own_averaging)["own_averaging"]
        if is_meta(model):
            constraint = "in memory: to_empty(device=...) first, and then load its weights (or load(path, net))"
            raise invalid("model", _OWNER, constraint, Described("one on the meta device"))
        self.model = model
        self.complexity = complexity
        self.batch_size = batch_size
        # The noise and the warm-up depend on it: it is part of the state_dict, so that a run can be resumed.
        self.register_buffer("step", torch.tensor(step))
        self.register_buffer("_pi", checked_weights(minibatch_weights, self.n, batch_size), persistent=False)
        self._pi: Tensor | None
        if complexity == "closed":
            with torch.no_grad():
                model.draw(closed=True).complexity()  # now, not at the first step, says which prior has none

    def forward(
        self,
        inputs: Any,
        targets: Any,
        batch: int | None = None,
        *,
        weights: Tensor | None = None,
        n: int | None = None,
        step: int | None = None,
    ) -> Cost:
        """The cost of a minibatch.

        In training each call has new noise. In evaluation (``eval()`` of the objective or the model, or without
        gradients) nothing changes: neither the noise nor the warm-up advances, nor do running statistics of batch
        normalisation. In training these move once a step, however many draws it has.

        Args:
            inputs: What the network takes: a tensor, a tuple of positional or a mapping of keyword arguments.
            targets: What the likelihood takes.
            batch: Which minibatch of the epoch this is, from 0; only for minibatch weights that are not uniform.
            weights: A number for each example, ``[B]``, by which its likelihood cost is multiplied; 2 is as if it were
                there twice. ``n`` still counts examples: weights whose mean is not 1 are more or less data.
            n: The number of examples in the whole training set, where it is not always the same, as in a stream.
            step: The number of this step, from 1; None for the one after the last.
        """
        if type(self) is FreeEnergy or not is_divided(self):  # fully_shard changes the class of a module
            return self._cost(None, inputs, targets, batch, weights, n, step)
        if torch.compiler.is_compiling():  # no compiler understands what gathers parameters
            run: Callable[..., Cost] = torch.compiler.disable(self._gathered_cost)
            return run(inputs, targets, batch, weights, n, step)
        return self._gathered_cost(inputs, targets, batch, weights, n, step)

    def _gathered_cost(self, *args: Any) -> Cost:
        with gathered(self):
            return self._cost(None, *args).alone()

    def cost_at_once(
        self,
        takes: Taker,
        inputs: Any,
        targets: Any,
        batch: int | None = None,
        *,
        weights: Tensor | None = None,
        n: int | None = None,
        step: int | None = None,
    ) -> Cost:
        """The cost of a minibatch, as of a call, whose way back has been gone without autograd if ``takes`` takes it.

        Then the cost requires no gradient, and ``takes`` has what the gradients of mu and rho are computed from. For
        an optimiser that knows of nothing else to be trained: :meth:`Adam.minimise`.
        """
        return self._cost(takes, inputs, targets, batch, weights, n, step)

    def _cost(
        self,
        takes: Taker | None,
        inputs: Any,
        targets: Any,
        batch: int | None,
        weights: Tensor | None,
        n: int | None,
        step: int | None,
    ) -> Cost:
        model = self.model
        args, kwargs = ((inputs,), {}) if isinstance(inputs, Tensor) else arguments(inputs)
        given, wanted = tensors_of(inputs if isinstance(inputs, Tensor) else (args, kwargs)), tensors_of(targets)
        if not given:
            check_arguments(_OWNER, args, kwargs)
        check_batch("inputs", _OWNER, given)
        check_batch("targets", _OWNER, wanted)
        rank, ranks = rank_of_ranks() if dist.is_initialized() else (0, 1)
        advances = self.training and model.training and torch.is_grad_enabled()
        if advances and dist.is_initialized() and not torch.compiler.is_compiling():
            self._check_averaged(ranks)
        if advances and step is None and not torch.compiler.is_compiling() and is_checkpointed():
            raise RuntimeError(
                "The objective runs inside torch.utils.checkpoint, which would call it a second time during backward, "
                "then with other noise. Call it outside."
            )
        number, examples = self._next_step(step), _examples(wanted or given)
        weight = self._complexity_weight(examples, ranks, batch, number, n)
        weighted = model.likelihood
        if weights is not None:
            check_weights(_OWNER, weights, examples)
            weighted = Weighted(model.likelihood, weights)

        closed = self.complexity == "closed"
        # (2), averaged over the draws.
        draws = [model.draw(number, rank * self.draws + k, closed=closed) for k in range(self.draws)]
        if advances and model.is_divided and type(self) is FreeEnergy:
            constraint = "divided together with the objective: fully_shard(free_energy), after its parts"
            raise invalid("model", _OWNER, constraint, Described("one of which parts are divided alone"))
        with nullcontext() if advances else unmoved(draws[0].engine.normalising):
            cost = Cost(*costs(draws, weighted, args, kwargs, targets, weight, takes), weight)
        _check_parts(cost)
        if advances:
            self._advance(step, cost)
        return cost

    def _check_averaged(self, ranks: int) -> None:
        """Refuse a step of one of several ranks whose gradients nobody averages."""
        own = type(self) is not FreeEnergy and is_divided(self)
        if own and not is_called(self):
            constraint = "called as a module that fully_shard has divided, free_energy(inputs, targets)"
            raise invalid("model", _OWNER, constraint, Described("another way, on which nobody averages gradients"))
        if ranks == 1 or self.own_averaging or own:
            return
        # A frame runs the code of the method that was called, whoever wraps this module.
        if is_on_the_stack(lambda code: code is DistributedDataParallel.forward.__code__):
            return
        constraint = f"True where {ranks} ranks train outside of DistributedDataParallel, each with its own gradients"
        advice = "wrap the objective in it, divide it by fully_shard, or average them"
        raise invalid("own_averaging", _OWNER, f"{constraint} ({advice})", False)

    @property
    def weighs_minibatches(self) -> bool:
        """Whether the minibatches have weights of their own, so that each call must say which ``batch`` it has."""
        return self._pi is not None

    def param_groups(
        self, lr: float | None = None, *, rho_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """The parameters in groups for an optimiser, as :meth:`Bayesian.param_groups`."""
        return self.model.param_groups(lr, rho_lr=rho_lr, weight_decay=weight_decay)

    def _advance(self, step: int | None, cost: Cost) -> None:
        if step is not None:
            self.step.fill_(step)
        elif torch.compiler.is_compiling():  # a compiler may let this happen before the check of the cost
            self.step.add_(cost.detach().isfinite().to(self.step.dtype))
        else:
            self.step.add_(1)

    def _next_step(self, step: int | None) -> Word:
        if step is not None:
            return check_count(f"{_OWNER}.forward", step=step)["step"]
        return self.step + 1 if torch.compiler.is_compiling() else int(self.step) + 1

    def _complexity_weight(
        self, examples: int, ranks: int, batch: int | None, step: Word, n: int | None
    ) -> float | Tensor:
        """T * pi_i / |D_i|, and the warm-up."""
        n = self.n if n is None else check_count(_OWNER, n=n)["n"]
        if examples > -(-n // ranks):  # a DistributedSampler repeats examples so that all ranks have as many
            constraint = f"the size of the training set, at least the {examples * ranks} examples of this minibatch"
            raise invalid("n", _OWNER, constraint, n)
        weight = self.temperature * self._share_per_example(examples, ranks, batch, n)
        if not self.warmup:
            return weight
        if isinstance(step, Tensor):
            return weight * (step.double() / self.warmup).clamp(max=1)
        return weight * min(1.0, step / self.warmup)

    def _share_per_example(self, examples: int, ranks: int, batch: int | None, n: int) -> float | Tensor:
        """pi_i / |D_i|, where each of the ``ranks`` has as many ``examples``."""
        if self._pi is None:
            if batch is not None:
                constraint = "left out with uniform weights, where all minibatches are alike"
                raise invalid("batch", _OWNER, constraint, batch)
            return 1 / n
        assert self.batch_size is not None
        if n != self.n:
            raise invalid("n", f"{_OWNER}.forward", f"left out, or {self.n}, where minibatch weights are given", n)
        batches = len(self._pi)
        if not isinstance(batch, Integral) or isinstance(batch, bool) or not 0 <= batch < batches:
            raise invalid("batch", _OWNER, f"the number of the minibatch in its epoch, an int in [0, {batches})", batch)
        size = min(self.batch_size, self.n - batch * self.batch_size)
        size += -size % ranks  # with those that a DistributedSampler repeats
        examples *= ranks
        if examples != size:
            constraint = (
                f"as long as n={self.n} and batch_size={self.batch_size} say: minibatch {batch} has {size} examples"
            )
            raise invalid("inputs", _OWNER, constraint, Described(f"{examples} examples"))
        return self._pi[batch] / examples


def _check_parts(cost: Cost) -> None:
    """Refuse a cost that is not finite, and say which part is not; one look at the total is enough if all is well."""
    if torch.compiler.is_compiling() or not math.isfinite(cost.item()):
        check_finite("likelihood cost", _OWNER, cost.likelihood)
        check_finite("complexity cost", _OWNER, cost.complexity)
        check_finite("total cost", _OWNER, cost)


def _examples(tensors: list[Tensor]) -> int:
    for tensor in tensors:
        if tensor.dim():
            return tensor.shape[0]
    raise invalid("inputs", _OWNER, "a minibatch of tensors", Described("none"))
