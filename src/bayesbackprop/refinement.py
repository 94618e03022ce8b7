"""Markov chains that move draws of a posterior to the exact one: Hamiltonian Monte Carlo, for small networks.

This is not variational: it reaches posteriors that no family can represent, at the cost of many passes over all data.
Every drawn network is a chain of its own. In units of the prior's standard deviations theta, with momenta p ~ N(0, I),

U(theta) = -log P(D|w) - log P(w),  p <- p - e/2 dU/dtheta,  theta <- theta + e p,  p <- p - e/2 dU/dtheta

follows the density, and a proposal is taken with probability min(1, exp(-change of U + p^2/2)) (Metropolis): so the
exact posterior stays as it is, whatever the step e (Neal, "MCMC using Hamiltonian dynamics", 2011).
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from bayesbackprop._batches import Data, arguments, labelled
from bayesbackprop._engine import Slots, call_with
from bayesbackprop._errors import Described, check_count, check_flag, check_seed, check_type, invalid
from bayesbackprop._trees import Outputs, map_tensors, tensors_in
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.prediction import Ensemble, predicting
from bayesbackprop.priors import Prior

__all__ = ["Refined", "refine", "split_r_hat"]

# Above this, chains that have been everywhere would hardly differ so much (Gelman et al. use 1.1, for a few long ones).
_CONVERGED = 1.1
# The share of proposals to be taken, at which trajectories are about as long as they can be at their cost; and that
# below which chains stay where they are, so that they have nothing to agree about.
_ACCEPTED, _STUCK = 0.8, 0.01
# The step to begin with, and how often it may be doubled or halved.
_FIRST_STEP, _DOUBLINGS = 0.02, 20
# By how much a step of each trajectory may be longer or shorter, so that none closes upon itself.
_JITTER = 0.2
# Examples whose predictions are watched, and draws that tell how wide a prior is.
_WATCHED, _OF_PRIOR = 16, 10_000


class Refined(Ensemble):
    """An ensemble by Markov chains, not by variational inference.

    Attributes:
        acceptance: The share of proposals that were taken, once the step was fixed.
        r_hat: The largest split R-hat of the log joint density and of predictions on training examples.
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        weights: Mapping[str, Tensor],
        acceptance: float,
        r_hat: float,
        output: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(net, likelihood, weights, output)
        self.acceptance, self.r_hat = acceptance, r_hat

    def __repr__(self) -> str:
        return (
            f"Refined(draws={self.draws}, acceptance={self.acceptance:.2f}, r_hat={self.r_hat:.2f}, "
            f"likelihood={self.likelihood!r})"
        )

    @property
    def has_converged(self) -> bool:
        """Whether the chains move and can no longer be told apart: R-hat is below 1.1, acceptance at least 1 %."""
        return self.acceptance >= _STUCK and self.r_hat < _CONVERGED


def refine(
    model: Bayesian,
    data: Data,
    *,
    draws: int = 200,
    iterations: int = 100,
    leapfrogs: int = 30,
    seed: int | None = None,
    progress: bool = True,
) -> Refined:
    """Draws from the posterior of ``model``, moved to the exact one by Hamiltonian Monte Carlo.

    For small networks: there are ``iterations * leapfrogs`` passes over all the data, forward and back, of all
    ``draws`` networks at once. In the first half of the iterations the step is adapted; it is then fixed. A warning
    says when the chains have not converged. The likelihood, and what is not Bayesian, stay as they are.

    Args:
        model: The model; it is not changed.
        data: The whole training set: a pair of tensors, a ``Dataset``, or an iterable of batches.
        draws: How many networks, each a chain of its own.
        iterations: Trajectories of each.
        leapfrogs: Steps of a trajectory.
        seed: Of all its noise; None for the model's own.
        progress: Whether to show a bar on a terminal.

    Examples:
        >>> from bayesbackprop import Gaussian, Normal
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> model = Bayesian(torch.nn.Linear(1, 1), Gaussian(0.1), Normal(1.0), seed=0)
        >>> refined = refine(model, (x, 2 * x), draws=20, iterations=200, leapfrogs=5, progress=False)
        >>> refined.has_converged
        True
    """
    check_type("refine", Bayesian, "a Bayesian", model=model)
    draws, leapfrogs = check_count("refine", draws=draws, leapfrogs=leapfrogs).values()
    iterations = check_count("refine", least=8, iterations=iterations)["iterations"]
    check_flag("refine", progress=progress)
    seed = model.seed if seed is None else check_seed("refine", seed=seed)["seed"]
    random = torch.Generator().manual_seed(seed)
    target = _Target(model, data, draws, random, seed)
    chains = _Chains(target, random)
    watched, taken = list[Tensor](), list[float]()
    for number in _shown(range(iterations), progress):
        share = chains.move(leapfrogs)
        if number < iterations // 2:
            chains.adapt(share, number)
        else:
            watched.append(torch.cat([chains.at.energy[:, None], chains.at.outputs], 1).double())
            taken.append(share)
    r_hat, acceptance = split_r_hat(torch.stack(watched)), sum(taken) / len(taken)
    weights = {name: w.detach() for name, w in zip(target.names, target.weights(chains.theta), strict=True)}
    refined = Refined(model.net, model.likelihood, weights, acceptance, r_hat, model.output)
    if not refined.has_converged:
        found = f"split R-hat is {r_hat:.2f}, not below {_CONVERGED} (acceptance {acceptance:.0%})"
        if acceptance < _STUCK:
            found = f"they stay where they are (acceptance {acceptance:.0%})"
        warnings.warn(
            f"The chains of refine have not converged: {found}. "
            "Give more iterations or leapfrogs, or train the model longer before it.",
            stacklevel=2,
        )
    return refined


def split_r_hat(values: Tensor) -> float:
    """The largest split R-hat of quantities in chains, ``[iterations, chains, quantities]``.

    Each chain is cut into two of T iterations. With the mean W of their variances and the variance B of their means,
    R-hat^2 = (T - 1)/T + B/W: it is 1 where they all say the same (Gelman et al., Bayesian Data Analysis, 11.4). It is
    inf where chains stay in different places, and where there is NaN or inf among the values.

    Examples:
        >>> split_r_hat(torch.tensor([0.0, 1, 0, 1])[:, None, None].expand(4, 3, 1)) < 1
        True
        >>> split_r_hat(torch.tensor([0.0, 1, 8, 9])[:, None, None].expand(4, 3, 1)) > 5
        True
    """
    half = len(values) // 2
    halves = torch.cat([values[:half], values[-half:]], 1)
    within, between = halves.var(0).mean(0), halves.mean(0).var(0)
    squares = (half - 1) / half + between / within
    # Where nothing moves there is nothing to compare, unless the chains are in different places.
    squares = torch.where((within == 0) & (between == 0), 1.0, squares)
    return math.sqrt(float(squares.nan_to_num(math.inf, math.inf).max()))


class _At(NamedTuple):
    """Of each chain: U, its gradient, and what some training examples are predicted to be."""

    energy: Tensor
    gradient: Tensor
    outputs: Tensor

    def where(self, taken: Tensor, other: "_At") -> "_At":
        return _At(
            *(torch.where(taken.view(-1, *(1,) * (a.dim() - 1)), a, b) for a, b in zip(self, other, strict=True))
        )


class _Target:
    """U and its gradient for many networks at once, whose weights are ``base + scale * theta``, ``[draws, d]``."""

    def __init__(self, model: Bayesian, data: Data, draws: int, random: torch.Generator, seed: int) -> None:
        posterior = model.posterior
        self.names, self._model = list(posterior), model
        self._slots = Slots(model.net, self.names)
        engine = model.engine()
        self._parameters = list(engine.parameters.by_name.values())
        start = engine.draws(model._key(0, 0, seed), draws, self.names)
        self._shapes = [w.shape for w in start]
        device = start[0].device
        self._batches = [
            (arguments(inputs, "refine"), targets.repeat(draws, *(1,) * (targets.dim() - 1)))
            for inputs, targets in labelled(data, "data", "refine", device)
        ]
        self._random = [q.random for q in posterior.values()]
        widths = [_width(p.prior, random) * where for p, where in zip(self._parameters, self._random, strict=True)]
        self._scale = torch.cat([width.flatten() for width in widths]).to(start[0])  # 0 of constant weights
        flat = torch.cat([w.flatten(1) for w in start], 1)
        self.start = torch.where(self._scale > 0, flat / self._scale, 0.0)
        self._base = torch.where(self._scale > 0, 0.0, flat)

    def weights(self, theta: Tensor) -> list[Tensor]:
        """The weights of each parameter, ``[draws, ...]``."""
        parts = (self._base + self._scale * theta).split([shape[1:].numel() for shape in self._shapes], 1)
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def __call__(self, theta: Tensor) -> _At:
        theta = theta.detach().requires_grad_()
        with torch.enable_grad():
            ws = self.weights(theta)
            energy, outputs = self._minus_log_prior(ws), list[Tensor]()
            for (args, kwargs), targets in self._batches:
                found = self._run(ws, args, kwargs)
                flat = map_tensors(lambda output: output.flatten(0, 1) if output.dim() > 1 else output, found)
                log_probs = self._model.likelihood.log_prob(flat, targets)
                energy = energy - log_probs.view(len(theta), -1).sum(1)
                rows = [output.detach() for output in tensors_in(found) if output.dim() > 1]
                outputs += [output[:, :_WATCHED].flatten(1) for output in rows][: not outputs]
            (gradient,) = torch.autograd.grad(energy.sum(), theta)
        return _At(energy.detach(), gradient, outputs[0])

    def _run(self, ws: list[Tensor], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        net = self._model.net
        try:
            with predicting(net), torch.enable_grad():
                outputs, pick = Outputs(), self._model.engine().pick
                found = vmap(lambda each: outputs.taken_apart(pick(call_with(self._slots, each, args, kwargs))))(ws)
                return outputs.put_together(found)
        except RuntimeError as error:
            if "vmap" not in str(error) and "Batching rule" not in str(error):
                raise
            raise invalid("model", "refine", "of a network that torch.vmap runs", Described(str(error))) from error

    def _minus_log_prior(self, ws: list[Tensor]) -> Tensor:
        total = torch.zeros(len(ws[0])).to(ws[0])
        for p, w, where in zip(self._parameters, ws, self._random, strict=True):
            log_density = p.prior.log_density(w if p.centre is None else w - p.centre)
            total = total - torch.where(where, log_density, 0.0).flatten(1).sum(1)
        return total


class _Chains:
    """Where each chain is, and the step that all of them take."""

    def __init__(self, target: _Target, random: torch.Generator) -> None:
        self._target, self._random, self.step = target, random, _FIRST_STEP
        self.theta = target.start
        self.at = target(self.theta)
        unknown = int((~self.at.energy.isfinite()).sum())
        if unknown:  # from there no chain would ever move
            got = Described(f"NaN or inf of {unknown} of {len(self.theta)}")
            raise invalid("data", "refine", "of a finite probability by all networks drawn from the model", got)
        # Doubled, or halved, until about as many as are wanted are taken after one leapfrog (Hoffman and Gelman, 2014).
        longer = self._chance(*self._propose(1, self.step)) > _ACCEPTED
        for _ in range(_DOUBLINGS):
            step = self.step * (2 if longer else 0.5)
            if (self._chance(*self._propose(1, step)) > _ACCEPTED) != longer:
                break
            self.step = step

    def move(self, leapfrogs: int) -> float:
        """A trajectory of each; the probability that it is taken, averaged over the chains."""
        jitter = 1 + _JITTER * (2 * float(torch.rand((), generator=self._random)) - 1)
        theta, at, change = self._propose(leapfrogs, self.step * jitter)
        chance = torch.rand(len(theta), generator=self._random, dtype=torch.float64).to(theta)
        taken = chance.log() < -change  # not where it is NaN, as of a trajectory that ran away
        self.theta = torch.where(taken[:, None], theta, self.theta)
        self.at = at.where(taken, self.at)
        return self._chance(theta, at, change)

    def adapt(self, chance: float, number: int) -> None:
        """Lengthen the step where more than is wanted was taken, by less and less (Robbins and Monro)."""
        self.step *= math.exp((chance - _ACCEPTED) / (1 + number / 10) ** 0.6)

    def _propose(self, leapfrogs: int, step: float) -> tuple[Tensor, _At, Tensor]:
        """Where trajectories end, and the change of U + p^2/2 on the way."""
        theta, at = self.theta, self.at
        p = torch.randn(theta.shape, generator=self._random, dtype=torch.float64).to(theta)
        before = at.energy + 0.5 * p.square().sum(1)
        for _ in range(leapfrogs):
            p = p - 0.5 * step * at.gradient
            theta = theta + step * p
            at = self._target(theta)
            p = p - 0.5 * step * at.gradient
        return theta, at, at.energy + 0.5 * p.square().sum(1) - before

    @staticmethod
    def _chance(theta: Tensor, at: _At, change: Tensor) -> float:  # noqa: ARG004
        return float((-change.double()).exp().clamp(max=1).nan_to_num(0.0).mean())


def _width(prior: Prior, random: torch.Generator) -> float:
    """The standard deviation of a prior; 1 where it cannot be drawn from."""
    try:
        return float(prior.sample(torch.empty(_OF_PRIOR), random).std())
    except NotImplementedError:
        return 1.0


def _shown(numbers: range, progress: bool) -> Iterable[int]:
    if not progress or not sys.stderr.isatty():
        return numbers
    import rich.console  # here and not above: the library does not need it
    import rich.progress

    return rich.progress.track(numbers, "refining", console=rich.console.Console(stderr=True))
