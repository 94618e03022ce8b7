"""The complexity cost KL[q(w|theta) || P(w)], sampled or closed, and how the minibatches of an epoch share it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bayesbackprop._errors import Described, check_count, check_probability, invalid
from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.priors import Prior


def sampled(q: WeightPosterior, prior: Prior, centre: Tensor | None, w: Tensor, eps: Tensor) -> Tensor:
    """log q(w|theta) - log P(w), summed over the weights of one parameter at the draw w = mu + sigma * eps.

    The summand of (2) that depends on the weights alone; its expectation over eps is the closed form.
    """
    return torch.where(q.random, q.log_density(eps), 0.0).sum() + prior_cost(q, prior, centre, w)


def prior_cost(q: WeightPosterior, prior: Prior, centre: Tensor | None, w: Tensor) -> Tensor:
    """-log P(w), summed over the weights of one parameter that are random."""
    return -torch.where(q.random, prior.log_density(w if centre is None else w - centre), 0.0).sum()


def closed(q: WeightPosterior, prior: Prior, centre: Tensor | None) -> Tensor:
    """KL[q(w|theta) || P(w)] = -H[q] - E_q[log P(w)], summed over the weights of one parameter."""
    sigma = torch.where(q.random, q.sigma, 1.0)  # a constant weight has no KL; 1 keeps its unused branch finite
    mu = q.mu if centre is None else q.mu - centre
    cost = -q.entropy() - prior.expected_log_density(mu, sigma)
    return torch.where(q.random, cost, 0.0).sum()


def geometric(batches: int) -> Tensor:
    """The paper's scheme for (9): pi_i = 2^(M-i) / (2^M - 1), i = 1 .. M, written so that it cannot overflow.

    Examples:
        >>> geometric(3)
        tensor([0.5714, 0.2857, 0.1429], dtype=torch.float64)
    """
    i = torch.arange(1, batches + 1, dtype=torch.float64)
    return torch.exp2(-i) / -math.expm1(-batches * math.log(2))


def minibatch_weights(scheme: str | Sequence[float] | Tensor, n: int, batch_size: int | None) -> Tensor | None:
    """The pi_i of an epoch over ``n`` examples, checked: one per minibatch, in [0, 1], summing to 1; None if uniform.

    A sequence may leave out a short last minibatch, as ``DataLoader(drop_last=True)`` does.
    """
    owner, known = "FreeEnergy", "'uniform', 'geometric' or a sequence that sums to 1"
    if batch_size is not None:
        check_count(owner, batch_size=batch_size)
    if isinstance(scheme, str) and scheme == "uniform":
        return None
    if isinstance(scheme, str) and scheme != "geometric":
        raise invalid("minibatch_weights", owner, known, scheme)
    if batch_size is None:
        raise invalid("batch_size", owner, "given where the minibatch weights are not uniform", None)
    if batch_size > n:
        raise invalid("batch_size", owner, f"at most n={n}", batch_size)
    full, short = divmod(n, batch_size)
    batches = full + bool(short)
    if isinstance(scheme, str):
        return geometric(batches)
    try:
        weights = torch.as_tensor(scheme, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise invalid("minibatch_weights", owner, known, scheme) from error
    if weights.dim() == 0:
        raise invalid("minibatch_weights", owner, known, scheme)
    if weights.dim() != 1 or len(weights) not in (batches, full):
        raise invalid(
            "minibatch_weights",
            owner,
            f"a sequence of {batches} numbers, one for each minibatch of an epoch",
            Described(f"shape {list(weights.shape)}"),
        )
    for weight in weights.tolist():
        check_probability(owner, minibatch_weights=weight)
    total = float(weights.sum())
    if not math.isclose(total, 1.0, rel_tol=1e-6):  # what float32 weights may be off by
        raise invalid("minibatch_weights", owner, "a sequence that sums to 1", Described(f"a sum of {total:.6g}"))
    return weights
