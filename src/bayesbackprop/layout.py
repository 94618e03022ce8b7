"""Where the pieces of a model stand, looked up once and checked at each use."""

from functools import cached_property

from torch import nn

from bayesbackprop import noise
from bayesbackprop._engine import Parameter, Parameters
from bayesbackprop._engine.stack import stack_of
from bayesbackprop._errors import invalid, tensor_shape
from bayesbackprop._specification import Entry
from bayesbackprop.estimators import Estimator
from bayesbackprop.noise import Role
from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.rowwise import chain_of
from bayesbackprop.swap import Places


class Layout:
    """The Bayesian parameters of a model as the kernels take them, and where they stand in the network."""

    def __init__(
        self, net: nn.Module, likelihood: nn.Module, rho: nn.Module, centre: nn.Module | None, plan: list[Entry]
    ) -> None:
        priors = {entry.name: entry.prior for entry in plan if entry.prior is not None}
        names = list(priors)
        self._means, self._rhos = Places(net, names), Places(rho, names)
        self._centres = None if centre is None else Places(centre, names)
        self.shared = Places(net, [entry.name for entry in plan if entry.estimator == "shared"])
        # What may be trained without being random: the other parameters of the network, and those of the likelihood.
        self._others = Places(net, [entry.name for entry in plan if entry.prior is None])
        self._noise = Places(likelihood, [name for name, _ in likelihood.named_parameters()])
        self.others = self._others.tensors + self._noise.tensors
        self.rules: dict[str, Estimator] = {
            e.name: e.estimator for e in plan if e.estimator and e.estimator != "shared"
        }
        for name, mu, rho_ in zip(names, self._means.tensors, self._rhos.tensors, strict=True):
            if mu.shape != rho_.shape:
                constraint = f"the network that was wrapped: '{name}' had shape {list(rho_.shape)}"
                raise invalid("net", "Bayesian", constraint, tensor_shape(mu))
        centres = [None] * len(names) if self._centres is None else self._centres.tensors
        self.parameters = Parameters(
            {
                name: Parameter(WeightPosterior(mu, rho), prior, centre, noise.stream(number, Role.WEIGHT))
                for number, (name, prior, mu, rho, centre) in enumerate(
                    zip(names, priors.values(), self._means.tensors, self._rhos.tensors, centres, strict=True)
                )
            },
            stack_of(net, self._means.tensors),
        )

    @cached_property
    def chain(self) -> list[nn.Module] | None:
        """The layers of the network, if it treats each example by itself."""
        return chain_of(self.shared.root, self._means.tensors)

    def holds(self, net: nn.Module) -> bool:
        """Whether everything still stands where it stood, in ``net``."""
        if net is not self.shared.root:
            return False
        places = (self._means, self._rhos, self._centres, self._others, self._noise)
        return all(place is None or place.hold() for place in places)
