"""The linear agent: the exact posterior of a linear model of each action's reward."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesbackprop._errors import Described, check_count, check_positive, invalid
from bayesbackprop.bandits.agents import Agent
from bayesbackprop.bandits.decisions import Beliefs, Requests, by_draws


@dataclass(eq=False, repr=False, kw_only=True)
class LinearThompson(Agent):
    """Thompson sampling on a Bayesian linear model of each action's reward, with the exact posterior.

    Weights and noise have a normal-inverse-gamma prior: sigma^2 ~ IG(a, b), w ~ N(0, sigma^2 / precision). The
    arguments besides those of :class:`Agent`:

    Args:
        precision: Of the weights, in units of the noise's.
        a: Of the prior of the noise.
        b: Of the prior of the noise.
        candidates: Draws of a decision with an id: how often each action is the best of them is its probability.
    """

    precision: float = 0.25
    a: float = 6.0
    b: float = 6.0
    candidates: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        vars(self).update(check_positive(owner, precision=self.precision, a=self.a, b=self.b))
        vars(self).update(check_count(owner, candidates=self.candidates))
        each, size = (self.replicas, self.actions), self.features + 1  # and a constant
        # The precision matrix of w, its square root, X^T y, y^T y and how many y.
        self._matrix = (self.precision * torch.eye(size, dtype=torch.float64)).repeat(*each, 1, 1)
        self._root = torch.linalg.cholesky(self._matrix)
        self._moment = torch.zeros(*each, size, dtype=torch.float64)
        self._square = torch.zeros(each, dtype=torch.float64)
        self._count = torch.zeros_like(self._square)

    def _choose(self, contexts: Tensor) -> list[int]:
        random = self._random(2 * self.acted)
        mean, scale = self._posterior()
        numbers = np.random.Generator(np.random.Philox(int(torch.randint(2**62, (), generator=random))))
        gamma = torch.from_numpy(numbers.standard_gamma(self.a + 0.5 * self._count.numpy()))
        spread = (scale / gamma).sqrt()
        noise = torch.randn(mean.shape, dtype=torch.float64, generator=random)
        # The precision is L L^T: L^-T z has its inverse as covariance.
        weights = mean + spread[..., None, None] * torch.linalg.solve_triangular(self._root.mT, noise, upper=True)
        return self._best((weights[..., 0] * _with_constant(contexts)[:, None]).sum(-1))

    def _posterior(self) -> tuple[Tensor, Tensor]:
        """The mean of the weights, ``[replicas, actions, features + 1, 1]``, and b of the noise given what was seen."""
        mean = torch.cholesky_solve(self._moment[..., None], self._root)
        left = (self._moment[..., None, :] @ mean)[..., 0, 0]
        return mean, self.b + 0.5 * (self._square - left).clamp(min=0)

    def _believe(self, requests: Requests, random: np.random.Generator) -> Beliefs:
        x = _with_constant(requests.contexts)
        (weights,), (scale,) = self._posterior()
        means = (weights[..., 0] @ x.t()).t()
        # The precision is L L^T, so the variance of the reward is that of the noise times |L^-1 x|^2. With the
        # noise unknown, a reward has Student's t-distribution; those of the actions are independent.
        variance = torch.linalg.solve_triangular(self._root[0], x.t().expand(self.actions, -1, -1), upper=False)
        shape = self.a + 0.5 * self._count[0]
        width = (variance.square().sum(1).t() * scale / shape).sqrt()
        t = random.standard_t(2 * shape.numpy(), size=(self.candidates, *means.shape))
        return by_draws(means.numpy() + width.numpy() * t, means.numpy(), requests.allowed)

    def _learn(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        x, rows = _with_constant(contexts), torch.arange(self.replicas)
        self._add((rows, actions), x[:, :, None] * x[:, None, :], x * rewards[:, None], rewards**2, 1)

    def _learn_many(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        x, taken = _with_constant(contexts), torch.arange(self.actions)
        sums = [
            torch.zeros(self.actions, *size, dtype=torch.float64) for size in (2 * x.shape[1:], x.shape[1:], (), ())
        ]
        for action in taken:
            its, gains = x[actions == action], rewards[actions == action]
            for total, each in zip(sums, (its.t() @ its, its.t() @ gains, gains @ gains), strict=False):
                total[action] = each
            sums[-1][action] = len(gains)
        self._add((torch.zeros_like(taken), taken), *sums)

    def _add(
        self, places: tuple[Tensor, Tensor], matrix: Tensor, moment: Tensor, square: Tensor, count: Tensor | int
    ) -> None:
        """Add the sums of x x^T, x y and y^2, and how many there are, to those of some replicas and actions."""
        matrix = self._matrix[places] + matrix
        root, failed = torch.linalg.cholesky_ex(matrix)
        if bool(failed.any()):  # nothing has changed yet
            constraint = "such that the precision of the weights has a root; scale the features to about 1"
            got = Described(f"numbers up to {float(matrix.abs().max().sqrt()):g}")
            raise invalid("context", type(self).__name__, constraint, got)
        self._matrix[places], self._root[places] = matrix, root
        self._moment[places] += moment
        self._square[places] += square
        self._count[places] += count

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, f"_{name}") for name in ("matrix", "root", "moment", "square", "count")}


def _with_constant(contexts: Tensor) -> Tensor:
    return F.pad(contexts.double(), (0, 1), value=1.0)
