"""Pruning by the signal-to-noise ratio of the weights (section 5.1 of the paper, Table 2 and figure 4).

All weights of a model are ranked together by |mu| / sigma, and the lowest are removed. A removed weight has mu = 0 and
sigma = 0 exactly: it is no longer random, costs no complexity and has no gradient. :func:`bayesbackprop.sparse` makes
what is left small and fast.
"""

import copy
import math

import torch
from torch import Tensor

from bayesbackprop._errors import Described, check_finite, check_probability, check_type, invalid
from bayesbackprop._meta import check_in_memory
from bayesbackprop.model import Bayesian
from bayesbackprop.posterior import WeightPosterior, constant_rho

__all__ = ["forget_momentum", "prune", "snr", "threshold", "weights_left"]

# The rank of a weight that was removed before: below that of any other.
_REMOVED = -1.0


def prune(model: Bayesian, fraction: float) -> Bayesian:
    """A copy of ``model`` without the ``fraction`` of its Bayesian weights that has the lowest |mu| / sigma.

    Exactly ``round(fraction * n)`` of the n weights are removed, those removed before among them; of equal ones the
    first. It is a copy, so an optimiser of the old parameters cannot move the removed weights by its momentum. Under a
    new optimiser they stay at 0, weight decay or not; with the state of an old one, see :func:`forget_momentum`.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> model = Bayesian(torch.nn.Linear(9, 1), Gaussian(0.1))
        >>> weights_left(prune(model, 0.8)), weights_left(model)
        (2, 10)
    """
    ranks, count, largest = _ranked(model, fraction, "prune")
    goes = ranks < largest
    goes[(ranks == largest).nonzero().flatten()[: count - int(goes.sum())]] = True
    pruned = copy.deepcopy(model)
    posteriors = list(pruned.posterior.values())
    for q, part in zip(posteriors, goes.split([q.numel for q in posteriors]), strict=True):
        q.mu.detach().masked_fill_(part.view_as(q.mu), 0)
        q.rho.detach().masked_fill_(part.view_as(q.mu), constant_rho(q.rho.dtype))
    return pruned


def snr(model: Bayesian) -> Tensor:
    """The signal-to-noise ratio |mu| / sigma of all Bayesian weights ``[n]``, in the order of ``model.posterior``.

    It is 0 where mu is 0. Figure 4 shows the density and the distribution function of its ``log10()``.
    """
    return _ranks(model, "snr").clamp(min=0)


def threshold(model: Bayesian, fraction: float) -> float:
    """The largest |mu| / sigma among the weights that ``prune(model, fraction)`` removes; 0 if it removes none."""
    return max(0.0, _ranked(model, fraction, "threshold")[-1])


def weights_left(model: Bayesian) -> int:
    """How many Bayesian weights have not been pruned."""
    return int((_ranks(model, "weights_left") != _REMOVED).sum())


def forget_momentum(model: Bayesian, optimiser: torch.optim.Optimizer) -> None:
    """Set what ``optimiser`` remembers of the constant weights of ``model`` to 0.

    Needed once, when a pruned model is trained on with the state of an old optimiser: the gradients of removed weights
    are 0, but momentum would still move them. It works for every optimiser of torch but LBFGS.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> model = Bayesian(torch.nn.Linear(9, 1), Gaussian(0.1))
        >>> old, pruned = torch.optim.Adam(model.parameters()), prune(model, 0.8)
        >>> new = torch.optim.Adam(pruned.parameters())
        >>> new.load_state_dict(old.state_dict())
        >>> forget_momentum(pruned, new)
    """
    posteriors = _posteriors(model, "forget_momentum")
    check_type("forget_momentum", torch.optim.Optimizer, "an optimiser of torch.optim", optimiser=optimiser)
    held = {parameter for group in optimiser.param_groups for parameter in group["params"]}
    trained = [(q, tensor) for q in posteriors for tensor in q if tensor in held]
    if not trained:
        got = Described("one of another model (prune makes a copy)")
        raise invalid("optimiser", "forget_momentum", "one that trains the model", got)
    for q, tensor in trained:
        for name, value in optimiser.state.get(tensor, {}).items():
            if name != "step" and isinstance(value, Tensor) and value.shape == tensor.shape:
                value.detach().masked_fill_(~q.random, 0)


def _posteriors(model: object, owner: str) -> list[WeightPosterior]:
    if not isinstance(model, Bayesian):
        raise invalid("model", owner, "a Bayesian", model)
    model.check_about_mu(owner)
    check_in_memory("model", owner, model)
    for parameter in model.parameters():
        check_finite("model", owner, parameter)
    return list(model.posterior.values())


def _ranks(model: Bayesian, owner: str) -> Tensor:
    """|mu| / sigma of all weights, with those removed before at the bottom."""
    # Where sigma is too small for its type, a mean of 0 would give 0 / 0.
    ratios = ((q, torch.where(q.mu == 0, 0.0, q.snr)) for q in _posteriors(model, owner))
    return torch.cat([torch.where((q.mu == 0) & ~q.random, _REMOVED, ratio).detach().flatten() for q, ratio in ratios])


def _ranked(model: Bayesian, fraction: float, owner: str) -> tuple[Tensor, int, float]:
    """The ranks of all weights, how many weights go, and the largest rank among those."""
    fraction = check_probability(owner, fraction=fraction)["fraction"]
    ranks = _ranks(model, owner)
    count = round(fraction * len(ranks))
    return ranks, count, float(ranks.kthvalue(count).values) if count else -math.inf
