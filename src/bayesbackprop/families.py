"""Families of posteriors: how the weights of a network vary together.

Every weight has its mean mu and its spread sigma = log(1 + exp(rho)). A family adds to them, for the parameters it is
given for, one tensor ``joint`` that makes their n weights vary together.

=======================  ========================================  ==================================================
``Diagonal()``           w = mu + sigma * eps                      nothing is added
``LowRank(rank)``        w = mu + sigma * (eps + U z)              U [n, rank]: variances along rank directions
``FullCovariance()``     w = mu + sigma * (eps + L eps / sqrt(n))  L [n, n] strictly lower: the root of any covariance
``Mixture(components)``  w = mu_k + sigma_k * eps                  mu_k and rho_k [2, components, n], k one at random
``Conditional(inputs)``  each layer Gaussian, given those below    pseudo-inputs, pseudo-outputs and their precisions
=======================  ========================================  ==================================================

The first three are about mu: with joint = 0 each is the diagonal one. U and L are in units of sigma, and L in those of
a sum of n terms: a step of an optimiser is then as long for them as for rho. In the last two ``joint`` says everything:
mu and rho are only where they start, the network at mu predicts nothing, and no weight can be pruned.

The paper's cost needs no closed form: any of them goes with any prior, but for ``Conditional``.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesbackprop._errors import check_count, check_finite, invalid, tensor_shape

# The weights that a full covariance is for: 8192^2 floats are 256 megabytes.
_MOST = 8192


@dataclass(frozen=True)
class Family:
    """How weights vary together, by what a tensor ``joint`` says; ``_engine/joint.py`` draws them."""

    about_mu: ClassVar[bool] = True
    """Whether mu is its mean, so that the network at mu predicts and weights can be pruned."""


@dataclass(frozen=True)
class GaussianFamily(Family, ABC):
    """One Gaussian about mu, of n weights with standard deviations sigma of their own.

    Standard normal numbers ``eps [draws, n]`` and ``z [draws, k]`` make the draws.
    """

    @abstractmethod
    def start(self, sigma: Tensor, generator: torch.Generator) -> Tensor:
        """The tensor ``joint`` of weights whose initial spread is ``sigma [n]``."""

    @abstractmethod
    def deviation(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:
        """w - mu of each draw."""

    @abstractmethod
    def distance(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:
        """(w - mu)^T C^-1 (w - mu) at that deviation, with the covariance C."""

    @abstractmethod
    def log_root(self, sigma: Tensor, log_sigma: Tensor, joint: Tensor) -> Tensor:
        """log sqrt(det C)."""

    @abstractmethod
    def variance(self, sigma: Tensor, joint: Tensor) -> Tensor:
        """The variance of each weight."""

    def size(self, joint: Tensor) -> int:  # noqa: ARG002
        """How many numbers ``z`` there are."""
        return 0


@dataclass(frozen=True)
class LowRank(GaussianFamily):
    """Each weight by itself, and all of them along ``rank`` directions: covariance diag(sigma) (I + U U^T) diag(sigma).

    Examples:
        >>> LowRank(2).variance(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        tensor([ 3., 20.])
    """

    rank: int = 8

    def __post_init__(self) -> None:
        vars(self).update(check_count("LowRank", rank=self.rank))

    def start(self, sigma: Tensor, generator: torch.Generator) -> Tensor:
        if self.rank > len(sigma):
            raise invalid("rank", "LowRank", f"at most the number of weights, {len(sigma)}", self.rank)
        directions = torch.randn(len(sigma), self.rank, generator=generator, dtype=torch.float64)
        return (0.1 / math.sqrt(self.rank) * directions).to(sigma)  # at 0 the cost is flat

    def deviation(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:
        return sigma * (eps + z @ joint.mT)

    def distance(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:  # noqa: ARG002
        wide, root = self._root(joint)
        whitened = eps + z.to(wide) @ wide.mT  # (w - mu) / sigma
        along = torch.linalg.solve_triangular(root, (whitened @ wide).mT, upper=False)
        distance: Tensor = whitened.square().sum(-1) - along.square().sum(0)
        return distance

    def log_root(self, sigma: Tensor, log_sigma: Tensor, joint: Tensor) -> Tensor:  # noqa: ARG002
        _, root = self._root(joint)
        return log_sigma.sum() + root.diagonal().log().sum()

    def variance(self, sigma: Tensor, joint: Tensor) -> Tensor:
        return sigma.square() * (1 + joint.square().sum(1))

    def size(self, joint: Tensor) -> int:
        return joint.shape[1]

    @staticmethod
    def _root(joint: Tensor) -> tuple[Tensor, Tensor]:
        """U, and the Cholesky root of I + U^T U: all that determinant and inverse need."""
        wide = joint.to(torch.promote_types(joint.dtype, torch.float32))  # roots have no narrower type
        return wide, torch.linalg.cholesky(torch.eye(joint.shape[1]).to(wide) + wide.mT @ wide)


@dataclass(frozen=True)
class FullCovariance(GaussianFamily):
    """Any covariance, by its root diag(sigma) (I + L / sqrt(n)): for small networks, or a last layer.

    Here sigma is the diagonal of the root: the standard deviation of a weight given those before it.

    Examples:
        >>> FullCovariance().variance(torch.tensor([1.0, 2.0]), torch.tensor([[0.0, 9.0], [2.0, 0.0]]))
        tensor([ 1., 12.])
    """

    def start(self, sigma: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        if len(sigma) > _MOST:
            constraint = f"for at most {_MOST} weights together (use LowRank, or a pattern such as '4.*')"
            raise invalid("family", "Bayesian", f"FullCovariance {constraint}", len(sigma))
        return sigma.new_zeros(len(sigma), len(sigma))

    def deviation(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:  # noqa: ARG002
        return sigma * (eps + eps @ self._below(joint).mT)

    def distance(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:  # noqa: ARG002
        return eps.square().sum(-1)

    def log_root(self, sigma: Tensor, log_sigma: Tensor, joint: Tensor) -> Tensor:  # noqa: ARG002
        return log_sigma.sum()

    def variance(self, sigma: Tensor, joint: Tensor) -> Tensor:
        return sigma.square() * (1 + self._below(joint).square().sum(1))

    @staticmethod
    def _below(joint: Tensor) -> Tensor:
        """What is below the ones on the diagonal."""
        return joint.tril(-1) / math.sqrt(len(joint))


@dataclass(frozen=True)
class Mixture(Family):
    """Several diagonal posteriors, trained together and predicting as one: 1/K sum_k N(mu_k, sigma_k^2).

    The draws of a step, and of a prediction, take the components in turn. The first starts at the network's own
    weights; each of the others at these in another order, shuffled within each parameter, which for weights that were
    initialised independently of each other is as good as another initialisation. So it is for training from scratch,
    with as many draws a step as components, or a multiple.
    """

    components: int = 5
    about_mu: ClassVar[bool] = False

    def __post_init__(self) -> None:
        vars(self).update(check_count("Mixture", components=self.components))


@dataclass(frozen=True)
class Conditional(Family):
    """Each layer Gaussian given the drawn layers below it: as in a regression on M pseudo-examples that pass through.

    For small fully connected networks with Normal priors, where it comes far nearer to the true posterior than a
    Gaussian of all layers together. M pseudo-inputs are sent through the drawn layers. They reach a layer as Z [M, D],
    scaled by the prior's standard deviations, a constant for the bias among them. There each row of weights has, in
    units of the prior,

    precision P = I + Z^T diag(e^l) Z  and  mean P^-1 Z^T diag(e^l) v

    with pseudo-outputs v and log-precisions l of this layer. Learnt are pseudo-inputs, all v and all l. Given the
    layers below, KL[q || P] of a layer is closed: ``complexity="closed"`` uses it, and trains with less noise.

    Args:
        inputs: Training inputs to start from, 20 or more, ``[M, ...]``; or how many, which then start at N(0, 1).
    """

    inputs: int | Tensor = 50
    given: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    about_mu: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.inputs, Tensor):
            if self.inputs.dim() < 2 or not self.inputs.is_floating_point():
                raise invalid("inputs", "Conditional", "floats, a row for each", tensor_shape(self.inputs))
            check_finite("inputs", "Conditional", self.inputs)
            # A file keeps how many there are, which is all that matters once they are learnt.
            vars(self).update(given=self.inputs.detach().flatten(1).clone(), inputs=len(self.inputs))
        vars(self).update(check_count("Conditional", inputs=self.inputs))


@dataclass(frozen=True)
class Diagonal:
    """Each weight by itself, as in the paper."""


AnyFamily = Family | Diagonal

_BY_NAME: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Diagonal, LowRank, FullCovariance, Mixture, Conditional)
}


def describe(family: AnyFamily) -> dict[str, Any]:
    """A family as plain data for a file."""
    return {
        "kind": type(family).__name__,
        **({"units": "sigma"} if isinstance(family, GaussianFamily) else {}),
        **{each.name: getattr(family, each.name) for each in fields(family) if each.init},
    }


def from_description(description: dict[str, Any]) -> AnyFamily:
    """The family that :func:`describe` described."""
    kind = _BY_NAME[description["kind"]]
    if issubclass(kind, GaussianFamily) and description.get("units") != "sigma":
        raise ValueError(f"a {kind.__name__} that is not in units of sigma, as in files from before this version")
    arguments = {name: value for name, value in description.items() if name not in ("kind", "units")}
    made: AnyFamily = kind(**arguments)
    return made


def is_about_mu(description: dict[str, Any]) -> bool:
    """Whether mu is the mean of a described family."""
    kind = _BY_NAME[description["kind"]]
    return kind is Diagonal or bool(kind.about_mu)
