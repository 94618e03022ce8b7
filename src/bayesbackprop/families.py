"""Families of posteriors: how the weights of a network vary together.

Every weight has its mean mu and its spread sigma = log(1 + exp(rho)). A family adds to them, for the parameters it is
given for, one tensor ``joint`` that makes their n weights vary together; with joint = 0 each is the diagonal one.

=====================  ========================================  ====================================================
``Diagonal()``         w = mu + sigma * eps                      nothing is added
``LowRank(rank)``      w = mu + sigma * eps + U z                U [n, rank]; covariance diag(sigma^2) + U U^T
``FullCovariance()``   w = mu + (diag(sigma) + L) eps            L [n, n] strictly lower: the root of any covariance
=====================  ========================================  ====================================================

The paper's cost needs no closed form: any of them goes with any prior.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bayesbackprop._errors import check_count, invalid

# The weights that a full covariance is for: 8192^2 floats are 256 megabytes.
_MOST = 8192


@dataclass(frozen=True)
class Family(ABC):
    """How n weights with standard deviations sigma of their own vary together, by what a tensor ``joint`` says."""

    @abstractmethod
    def start(self, sigma: Tensor, generator: torch.Generator) -> Tensor:
        """The tensor ``joint`` of weights whose initial spread is ``sigma [n]``."""

    @abstractmethod
    def deviation(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:
        """w - mu from standard normal numbers ``eps [n]`` and ``z [k]``."""

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
class LowRank(Family):
    """Each weight by itself, and all of them along ``rank`` directions: covariance diag(sigma^2) + U U^T.

    Examples:
        >>> LowRank(2).variance(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        tensor([3., 8.])
    """

    rank: int = 8

    def __post_init__(self) -> None:
        vars(self).update(check_count("LowRank", rank=self.rank))

    def start(self, sigma: Tensor, generator: torch.Generator) -> Tensor:
        if self.rank > len(sigma):
            raise invalid("rank", "LowRank", f"at most the number of weights, {len(sigma)}", self.rank)
        directions = torch.randn(len(sigma), self.rank, generator=generator, dtype=torch.float64)
        return (0.1 / math.sqrt(self.rank) * directions).to(sigma) * sigma[:, None]  # at 0 the cost is flat

    def deviation(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:
        return sigma * eps + joint @ z

    def distance(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:
        scaled, root = self._root(sigma, joint)
        whitened = eps + scaled @ z.to(scaled)  # (w - mu) / sigma
        along = torch.linalg.solve_triangular(root, (scaled.mT @ whitened)[:, None], upper=False)
        distance: Tensor = whitened.square().sum() - along.square().sum()
        return distance

    def log_root(self, sigma: Tensor, log_sigma: Tensor, joint: Tensor) -> Tensor:
        _, root = self._root(sigma, joint)
        return log_sigma.sum() + root.diagonal().log().sum()

    def variance(self, sigma: Tensor, joint: Tensor) -> Tensor:
        return sigma.square() + joint.square().sum(1)

    def size(self, joint: Tensor) -> int:
        return joint.shape[1]

    @staticmethod
    def _root(sigma: Tensor, joint: Tensor) -> tuple[Tensor, Tensor]:
        """U / sigma, and the Cholesky root of I + U^T diag(sigma)^-2 U: all that determinant and inverse need."""
        wide = joint.to(torch.promote_types(joint.dtype, torch.float32))  # roots have no narrower type
        scaled = wide / sigma[:, None]
        return scaled, torch.linalg.cholesky(torch.eye(joint.shape[1]).to(wide) + scaled.mT @ scaled)


@dataclass(frozen=True)
class FullCovariance(Family):
    """Any covariance, (diag(sigma) + L) (diag(sigma) + L)^T: for small networks, or a last layer.

    Here sigma is the diagonal of the root: the standard deviation of a weight given those before it.

    Examples:
        >>> FullCovariance().variance(torch.tensor([1.0, 2.0]), torch.tensor([[0.0, 9.0], [3.0, 0.0]]))
        tensor([ 1., 13.])
    """

    def start(self, sigma: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        if len(sigma) > _MOST:
            constraint = f"for at most {_MOST} weights together (use LowRank, or a pattern such as '4.*')"
            raise invalid("family", "Bayesian", f"FullCovariance {constraint}", len(sigma))
        return sigma.new_zeros(len(sigma), len(sigma))

    def deviation(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:  # noqa: ARG002
        return sigma * eps + joint.tril(-1) @ eps

    def distance(self, sigma: Tensor, joint: Tensor, eps: Tensor, z: Tensor) -> Tensor:  # noqa: ARG002
        return eps.square().sum()

    def log_root(self, sigma: Tensor, log_sigma: Tensor, joint: Tensor) -> Tensor:  # noqa: ARG002
        return log_sigma.sum()

    def variance(self, sigma: Tensor, joint: Tensor) -> Tensor:
        return sigma.square() + joint.tril(-1).square().sum(1)


@dataclass(frozen=True)
class Diagonal:
    """Each weight by itself, as in the paper."""


AnyFamily = Family | Diagonal

_BY_NAME: dict[str, type[Any]] = {kind.__name__: kind for kind in (Diagonal, LowRank, FullCovariance)}


def describe(family: AnyFamily) -> dict[str, Any]:
    """A family as plain data for a file."""
    return {"kind": type(family).__name__, **asdict(family)}


def from_description(description: dict[str, Any]) -> AnyFamily:
    """The family that :func:`describe` described."""
    arguments = {name: value for name, value in description.items() if name != "kind"}
    made: AnyFamily = _BY_NAME[description["kind"]](**arguments)
    return made
