"""Pruning by the signal-to-noise ratio of the weights (section 5.1 of the paper, Table 2 and figure 4).

A weight whose mean is small beside its standard deviation says little: all weights of a model are ranked together by
|mu| / sigma, and the lowest are removed. A removed weight has mu = 0 and sigma = 0 exactly: it is no longer random,
costs no complexity and has no gradient.

Weights stay in the order of ``model.posterior``. :func:`bayesbackprop.sparse` makes what is left small and fast.
"""

import copy

import torch
from torch import Tensor

from bayesbackprop._errors import Described, check_finite, check_probability, invalid
from bayesbackprop.model import Bayesian
from bayesbackprop.posterior import WeightPosterior, constant_rho

__all__ = ["forget_momentum", "prune", "snr", "threshold", "weights_left"]


def prune(model: Bayesian, fraction: float) -> Bayesian:
    """A copy of ``model`` without the ``fraction`` of its Bayesian weights that has the lowest |mu| / sigma.

    Exactly ``round(fraction * n)`` of the n weights are removed, those removed before among them; of equal ones the
    first. The copy can be trained further: removed weights stay at 0 under any optimiser that is new, weight decay or
    not. With the state of an old one, see :func:`forget_momentum`.

    It is a copy so that one model can be pruned to many fractions, and so that an optimiser that still holds the old
    parameters cannot move the removed weights by its momentum.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> model = Bayesian(torch.nn.Linear(9, 1), Gaussian(0.1))
        >>> weights_left(prune(model, 0.8)), weights_left(model)
        (2, 10)
    """
    order, count = _ranked(model, fraction, "prune")
    goes = torch.zeros_like(order, dtype=torch.bool)
    if count:
        limit = order.kthvalue(count).values
        goes = order < limit
        goes[(order == limit).nonzero().flatten()[: count - int(goes.sum())]] = True
    pruned = copy.deepcopy(model)
    posteriors = list(pruned.posterior.values())
    with torch.no_grad():
        for q, part in zip(posteriors, goes.split([q.numel for q in posteriors]), strict=True):
            q.mu.masked_fill_(part.view_as(q.mu), 0)
            q.rho.masked_fill_(part.view_as(q.mu), constant_rho(q.rho.dtype))
    return pruned


def snr(model: Bayesian) -> Tensor:
    """The signal-to-noise ratio |mu| / sigma of all Bayesian weights ``[n]``; 0 where mu is 0.

    Figure 4 shows the density and the distribution function of its ``log10()``.
    """
    return torch.cat([_ratio(q) for q in _posteriors(model, "snr")])


def threshold(model: Bayesian, fraction: float) -> float:
    """The largest |mu| / sigma among the weights that ``prune(model, fraction)`` removes; 0 if it removes none."""
    order, count = _ranked(model, fraction, "threshold")
    return max(0.0, float(order.kthvalue(count).values)) if count else 0.0


def weights_left(model: Bayesian) -> int:
    """How many Bayesian weights have not been pruned."""
    return sum(q.numel - int(_removed(q).sum()) for q in _posteriors(model, "weights_left"))


def forget_momentum(model: Bayesian, optimiser: torch.optim.Optimizer) -> None:
    """Set what ``optimiser`` remembers of the constant weights of ``model`` to 0.

    Needed once, when a pruned model is trained on with the state of an optimiser from before: the gradients of removed
    weights are 0, but momentum would still move them. Once it is 0, it stays 0. It works for every optimiser that keeps
    its state weight by weight, which are all of torch but LBFGS.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> model = Bayesian(torch.nn.Linear(9, 1), Gaussian(0.1))
        >>> optimiser = torch.optim.Adam(model.parameters())
        >>> pruned = prune(model, 0.8)
        >>> again = torch.optim.Adam(pruned.parameters())
        >>> again.load_state_dict(optimiser.state_dict())
        >>> forget_momentum(pruned, again)
    """
    held = {parameter for group in optimiser.param_groups for parameter in group["params"]}
    trained = [(q, tensor) for q in _posteriors(model, "forget_momentum") for tensor in q if tensor in held]
    if not trained:
        got = Described("one of another model (prune makes a copy)")
        raise invalid("optimiser", "forget_momentum", "one that trains the model", got)
    with torch.no_grad():
        for q, tensor in trained:
            for name, value in optimiser.state.get(tensor, {}).items():
                if name != "step" and isinstance(value, Tensor) and value.shape == tensor.shape:
                    value.masked_fill_(~q.random, 0)


def _posteriors(model: object, owner: str) -> list[WeightPosterior]:
    if not isinstance(model, Bayesian):
        raise invalid("model", owner, "a Bayesian", model)
    posteriors = list(model.posterior.values())
    for q in posteriors:
        check_finite("model", owner, q.mu)
    return posteriors


def _ranked(model: Bayesian, fraction: float, owner: str) -> tuple[Tensor, int]:
    """What to rank the weights by, and how many are to go."""
    check_probability(owner, fraction=fraction)
    posteriors = _posteriors(model, owner)
    order = torch.cat([torch.where(_removed(q).flatten(), -1.0, _ratio(q)) for q in posteriors])
    return order, round(fraction * len(order))


def _ratio(q: WeightPosterior) -> Tensor:
    return torch.where(q.mu == 0, 0.0, q.snr).detach().flatten()  # with sigma too small for its type, 0 / 0


def _removed(q: WeightPosterior) -> Tensor:
    return (q.mu.detach() == 0) & ~q.random
