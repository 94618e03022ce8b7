"""The Bayesian parameters of a network as the operators take them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesbackprop._errors import Described, invalid, tensor_shape
from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.priors import Laplace, Normal, Prior, ScaleMixture

# The counter of the noise has 32 bits for blocks of four numbers: beyond, numbers would repeat.
MOST_WEIGHTS = 2**34

# The priors that the kernels know, by the names they have in cpu.c, and their numbers.
KNOWN_PRIORS: dict[type[Prior], tuple[str, Callable[[Any], tuple[float, float, float]]]] = {
    Normal: ("NORMAL", lambda prior: (prior.sigma, 0.0, 0.0)),
    ScaleMixture: ("MIXTURE", lambda prior: (prior.pi, prior.sigma1, prior.sigma2)),
    Laplace: ("LAPLACE", lambda prior: (prior.scale, 0.0, 0.0)),
}
# Those of which the kernels also know KL[q || P] in closed form.
CLOSED_PRIORS: tuple[type[Prior], ...] = (Normal, ScaleMixture, Laplace)
PRIOR_KINDS = (
    "NONE",
    *(name for name, _ in KNOWN_PRIORS.values()),
    *(f"{KNOWN_PRIORS[prior][0]}_KL" for prior in CLOSED_PRIORS),
)


class Parameter(NamedTuple):
    """A Bayesian parameter: its posterior, its prior, what the prior is centred on, and the stream of its noise."""

    q: WeightPosterior
    prior: Prior
    centre: Tensor | None
    stream: int


def prior_numbers(prior: Prior, closed: bool = False) -> tuple[int, float, float, float]:
    """A prior as the kernels take it: its kind, 0 if they do not know it, and three numbers."""
    if type(prior) not in KNOWN_PRIORS:
        return 0, 0.0, 0.0, 0.0
    name, numbers = KNOWN_PRIORS[type(prior)]
    return PRIOR_KINDS.index(f"{name}_KL" if closed else name), *numbers(prior)


class Parameters:
    """The Bayesian parameters of a network by name, as lists, and what of them stays the same from call to call.

    Where they are ``closed`` the complexity of a draw is KL[q || P] itself; all their priors are then of
    ``CLOSED_PRIORS``. Of those whose names are among ``deviations`` a draw in C is w - mu instead of w.
    """

    def __init__(
        self, by_name: Mapping[str, Parameter], closed: bool = False, deviations: Collection[str] = ()
    ) -> None:
        self.by_name, self.closed = dict(by_name), closed
        self.deviates = [name in deviations for name in self.by_name]
        self.each = list(self.by_name.values())
        self.mus = [parameter.q.mu for parameter in self.each]
        self.rhos = [parameter.q.rho for parameter in self.each]
        # One for each parameter, or none at all.
        self.centres = [parameter.centre for parameter in self.each if parameter.centre is not None]
        self.trained = [*self.mus, *self.rhos]
        self.tensors = [*self.trained, *self.centres]
        self.numel = sum(mu.numel() for mu in self.mus)
        # Those whose prior only Python knows.
        self.own_priors = [number for number, p in enumerate(self.each) if type(p.prior) not in KNOWN_PRIORS]
        # Whether a kernel may read their memory: a tensor of another class need not have any of its own.
        self.plain = all(type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided for t in self.tensors)
        self.cache: dict[str, Any] = {}  # of the backend: its table, and buffers to use again
        if len(self.centres) not in (0, len(self.each)):
            raise invalid("centre", "Parameters", "given for all parameters or for none", Described("some"))
        for name, parameter in self.by_name.items():
            if parameter.q.mu.numel() > MOST_WEIGHTS:
                constraint = f"a module whose parameters have at most {MOST_WEIGHTS} weights each ('{name}' has more)"
                raise invalid("net", "Bayesian", constraint, tensor_shape(parameter.q.mu))

    def subset(self, names: Sequence[str]) -> "Parameters":
        """Only those of these names."""
        return Parameters({name: self.by_name[name] for name in names})

    def in_closed_form(self) -> "Parameters | None":
        """The same with the complexity in closed form, if the kernels know it for each prior."""
        known = all(type(p.prior) in CLOSED_PRIORS for p in self.each)
        return Parameters(self.by_name, closed=True) if known else None
