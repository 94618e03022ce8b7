"""Whether a posterior has been learnt: its free energy against trivial ones, its spread, and its distance to the truth.

All of it is at temperature 1, whatever the model was trained at, and on the training set: of held-out data
:func:`bayesbackprop.evaluate` gives a verdict. :func:`agreement` compares the predictions of several models.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributions

from bayesbackprop._batches import Data, arguments, on, unlabelled, weighted
from bayesbackprop._engine import Slots, call_with, evaluating, normalising
from bayesbackprop._errors import (
    INT64,
    Described,
    check_count,
    check_list,
    check_seed,
    check_type,
    invalid,
    tensor_shape,
    tensors_of,
)
from bayesbackprop.complexity import prior_cost
from bayesbackprop.families import LowRank
from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.prediction import ClassPredictive, Predictive, ValuePredictive
from bayesbackprop.priors import Prior

if TYPE_CHECKING:
    from bayesbackprop.model import Bayesian

__all__ = [
    "Agreement",
    "Diagnosis",
    "Distance",
    "DrawsAndMean",
    "Estimate",
    "Spread",
    "agreement",
    "diagnose",
    "pareto_k",
    "spread",
]

# The widths s of the trivial posteriors N(centre, s^2), and the draws to judge each by: most differ by far more than
# the noise of a few draws. Where more are asked for, it is one of so many.
_WIDTHS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
_TRIVIAL_DRAWS, _FOR_EACH_TRIVIAL = 3, 25
# Draws for the tail of the importance weights to have a shape: the fit is then to 5 of them.
_FEWEST = 25
# Below this ratio of the 95 % to the 5 % quantile, sigma is still what it was initialised with, give or take.
_UNMOVED = 1.5
# A weight with |mu| / sigma below this is noise to whoever draws it.
_LOW_SNR = 0.1
# How many standard errors make a difference.
_CLEARLY = 3.0
# By how many nats per example draws must predict worse than the mean to be called much worse.
_MUCH_WORSE = 0.1
# Distances between predictions below which they hardly matter: of probabilities, and in standard deviations.
_LITTLE, _LITTLE_OF_SD = 0.05, 0.25
# The limits of k-hat by Vehtari et al.: below the first all is well, beyond the second importance sampling fails.
_GOOD_K, _BAD_K = 0.5, 0.7
# The prior on k-hat of Vehtari et al.: as if 10 further exceedances had said 0.5.
_PRIOR_COUNT, _PRIOR_K = 10, 0.5


class Estimate(NamedTuple):
    """A mean over draws and its standard error."""

    mean: float
    standard_error: float


class Spread(NamedTuple):
    """Quantiles of sigma over all random weights, and the fraction of them with |mu| / sigma below 0.1."""

    low: float
    median: float
    high: float
    low_snr: float


class DrawsAndMean(NamedTuple):
    """The NLL of the draws' average prediction and of the network at the mean, in nats per example.

    It is measured where batch normalisation may blur the draws: see :func:`may_blur`. ``standard_error`` is that of
    the difference.
    """

    draws: float
    mean: float
    standard_error: float

    @property
    def is_blurred(self) -> bool:
        """Whether the draws predict much worse than the mean."""
        excess = self.draws - self.mean
        return excess > _MUCH_WORSE and excess > _CLEARLY * self.standard_error

    def advice(self) -> list[str]:
        """What to do about it; nothing where nothing is to be done."""
        if not self.is_blurred:
            return []
        return [
            f"WARNING: the draws predict with an NLL of {self.draws:.3g}, the network at their mean with "
            f"{self.mean:.3g}. The cause is likely to be batch normalisation with the estimator 'shared': in training "
            "each draw was normalised by its own batch, in prediction all are by the same running statistics. Train "
            "with estimator='flipout', or where weights have no rule for it, make those behind the last such layer "
            "alone Bayesian."
        ]


def may_blur(model: "Bayesian") -> bool:
    """Whether ``model`` has batch normalisation, weights of which all examples of a step share a draw, and a mean.

    Such draws are trained with statistics of their own and predict with those of all: see ``default_estimator``.
    """
    about_mu = all(family.about_mu for _, family in model.families)
    return about_mu and bool(normalising(model.net)) and any(entry.estimator == "shared" for entry in model.plan)


def draws_and_mean(of_draws: Sequence[Tensor], of_mean: Sequence[Tensor]) -> DrawsAndMean:
    """From log P(y|x) of the examples, batch by batch, by the draws and by the mean."""
    draws, mean = (torch.cat([each.detach().double().cpu() for each in every]) for every in (of_draws, of_mean))
    error = float((draws - mean).std() / math.sqrt(len(draws))) if len(draws) > 1 else math.inf
    return DrawsAndMean(float(-draws.mean()), float(-mean.mean()), error)


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found. ``print(diagnosis)`` shows it with a line of advice each.

    Attributes:
        examples: How many there were.
        draws: Draws of the posterior.
        free_energy: Of all the data, in nats.
        trivial: That of posteriors which have learnt nothing, by name.
        spread: Of sigma.
        k_hat: The shape of the tail of the importance weights p(D, w) / q(w).
        has_own_sigma: Whether the sigma of each weight is a parameter of its own, as in ``Diagonal`` and ``LowRank``.
        draws_and_mean: How both predict, where batch normalisation may blur the draws.
    """

    examples: int
    draws: int
    free_energy: Estimate
    trivial: Mapping[str, Estimate]
    spread: Spread
    k_hat: float
    has_own_sigma: bool = True
    draws_and_mean: DrawsAndMean | None = None

    def __str__(self) -> str:
        said = say_spread(self.spread, has_own_sigma=self.has_own_sigma, is_learnt=not self.is_worse_than_trivial)
        blurred = [] if self.draws_and_mean is None else self.draws_and_mean.advice()
        return "\n".join([*self._free_energy(), *blurred, *said, *self._k_hat()])

    @property
    def best_trivial(self) -> str | None:
        """The trivial posterior with the lowest free energy."""
        return min(self.trivial, key=lambda name: self.trivial[name].mean, default=None)

    @property
    def is_worse_than_trivial(self) -> bool:
        """Whether a posterior that has learnt nothing has a clearly lower free energy."""
        excess, error = self._excess()
        return excess > _CLEARLY * error

    def _excess(self) -> Estimate:
        """The free energy less that of the best trivial posterior."""
        if self.best_trivial is None:
            return Estimate(-math.inf, 0.0)
        best = self.trivial[self.best_trivial]
        error = math.hypot(self.free_energy.standard_error, best.standard_error)
        return Estimate(self.free_energy.mean - best.mean, error)

    def _free_energy(self) -> Iterable[str]:
        mean, error = (value / self.examples for value in self.free_energy)
        yield (
            f"free energy: {mean:.4g} ± {error:.2g} nats per example, {self.free_energy.mean:.6g} in all "
            f"({self.examples:,} examples, {self.draws} draws, temperature 1)"
        )
        name = self.best_trivial
        if name is None:
            return
        mean, error = (value / self.examples for value in self.trivial[name])
        trivial = f"{mean:.4g} ± {error:.2g}"
        excess, error = (value / self.examples for value in self._excess())
        if self.is_worse_than_trivial:
            wider = "choose a wider initial sigma or a prior" if self.has_own_sigma else "choose a prior"
            yield (
                f"  WARNING: a posterior that has learnt nothing, {name}, has {trivial}. The weights cost more than "
                f"they explain: train longer, {wider} that fits the weights, or use a smaller network. Trained "
                "at a lower temperature a model may predict well all the same, but its uncertainty is not "
                "that of a posterior."
            )
        elif excess < -_CLEARLY * error:
            yield f"  the best posterior that has learnt nothing, {name}, has {trivial}."
        else:
            yield (
                f"  the best posterior that has learnt nothing, {name}, has {trivial}. Which is lower these draws "
                f"cannot tell: the difference is {excess:.2g} ± {error:.2g}. Give more draws."
            )

    def _k_hat(self) -> Iterable[str]:
        shown = f"{self.k_hat:.2f}" if self.k_hat < 100 else "above 100"
        yield f"k-hat of the importance weights (PSIS): {shown}"
        if self.k_hat < _GOOD_K:
            yield "  the posterior is close to the true one in all directions."
        elif self.k_hat < _BAD_K:
            yield "  the posterior is near the true one; importance sampling could correct the rest."
        else:
            yield (
                "  above 0.7: the joint posterior of all weights is far from the true one, as usual with many weights. "
                "Predictions need not suffer: judge them on held-out data with evaluate()."
            )


def diagnose(model: "Bayesian", data: Data, *, draws: int = 100, seed: int | None = None) -> Diagnosis:
    """Free energy, its comparison with trivial posteriors, the spread of sigma, and k-hat, in one pass over ``data``.

    Args:
        model: The model; it is not changed.
        data: The whole training set: a pair of tensors, a ``Dataset``, or an iterable of batches, with weights if it
            was trained with them. The network sees each batch once for every draw.
        draws: Draws of the posterior; at least 25, for the tail of the importance weights. Each trivial posterior has
            one draw for 25 of them, and no fewer than 3.
        seed: Of the draws; None for the model's own.

    Examples:
        >>> from bayesbackprop import Bayesian, Gaussian, Normal
        >>> x, y = torch.zeros(20, 30), torch.zeros(20, 1)  # of which there is nothing to learn
        >>> model = Bayesian(torch.nn.Linear(30, 1), Gaussian(1.0), Normal(1.0), sigma=1e-6, seed=0)
        >>> diagnose(model, (x, y), draws=25).is_worse_than_trivial
        True
    """
    return diagnosis_of(model, data, draws, seed, "diagnose")


def diagnosis_of(model: "Bayesian", data: Data, draws: int, seed: int | None, owner: str) -> Diagnosis:
    """What :func:`diagnose` gives; errors name ``owner``."""
    from bayesbackprop.model import Bayesian  # whose report calls this

    check_type(owner, Bayesian, "a Bayesian", model=model)
    draws = check_count(owner, least=_FEWEST, draws=draws)["draws"]
    if seed is not None:
        check_seed(owner, seed=seed)
    sets = {"": _own(model, seed), **_trivial(model, seed)}
    few = max(_TRIVIAL_DRAWS, draws // _FOR_EACH_TRIVIAL)
    counts = {name: few if name else draws for name in sets}
    minus_log_weights = {name: torch.zeros(count, dtype=torch.float64) for name, count in counts.items()}
    slots = Slots(model.net, list(model.posterior))
    device = next(model.parameters()).device
    examples, blurs = 0, may_blur(model)
    of_draws: list[Tensor] = []
    of_mean: list[Tensor] = []
    for number, (inputs, targets, weights_of_examples) in enumerate(weighted(data, "data", owner, device)):
        args, kwargs = arguments(inputs, owner)
        examples += len(tensors_of(targets)[0])
        with torch.no_grad(), evaluating(model.net):
            if blurs:
                at_mean = model.engine().pick(model.net(*args, **kwargs))
                of_mean.append(model.likelihood.log_prob(at_mean, targets))
            each: list[Tensor] = []
            for name, draw in sets.items():
                for index in range(counts[name]):
                    weights, complexity = draw(index)
                    output = model.engine().pick(call_with(slots, weights, args, kwargs))
                    log_prob = model.likelihood.log_prob(output, targets).double()
                    if blurs and not name:
                        each.append(log_prob)
                    if weights_of_examples is not None:
                        log_prob = log_prob * weights_of_examples
                    minus_log_weights[name][index] -= float(log_prob.sum())
                    if not number:  # each draw has its complexity once
                        minus_log_weights[name][index] += complexity
            if blurs:
                of_draws.append(torch.stack(each).logsumexp(0) - math.log(draws))
    own = minus_log_weights.pop("")
    estimates = {name: _estimate(values) for name, values in minus_log_weights.items()}
    has_own_sigma = all(isinstance(family, LowRank) for _, family in model.families)
    both = draws_and_mean(of_draws, of_mean) if blurs else None
    return Diagnosis(examples, draws, _estimate(own), estimates, spread(model), pareto_k(-own), has_own_sigma, both)


# The weights of a draw, in the order of the model's Bayesian parameters, and log q(w) - log P(w).
_Draws = Callable[[int], tuple[list[Tensor], float]]


def _own(model: "Bayesian", seed: int | None) -> _Draws:
    def draw(index: int) -> tuple[list[Tensor], float]:
        drawn = model.draw(0, index, seed)
        return list(drawn.weights.values()), float(drawn.complexity())

    return draw


def _trivial(model: "Bayesian", seed: int | None) -> dict[str, _Draws]:
    """Posteriors that have learnt nothing: the prior itself, and narrow Gaussians on its centre."""
    posterior = model.posterior
    priors: dict[str, Prior] = {entry.name: entry.prior for entry in model.plan if entry.prior is not None}
    centres: dict[str, Any] = dict(model.centre.named_buffers()) if model.has_centre else {}

    def generator(index: int) -> torch.Generator:
        return torch.Generator().manual_seed((model.seed if seed is None else seed) + index)

    def drawn(q: WeightPosterior, offset: Tensor, centre: Tensor | None) -> Tensor:
        return torch.where(q.random, offset if centre is None else offset + centre, q.mu)

    def from_prior(index: int) -> tuple[list[Tensor], float]:
        random = generator(index)
        each = [drawn(q, priors[name].sample(q.mu, random), centres.get(name)) for name, q in posterior.items()]
        return each, 0.0

    def narrow(width: float) -> _Draws:
        def draw(index: int) -> tuple[list[Tensor], float]:
            random, each, complexity = generator(index), [], 0.0
            for name, q in posterior.items():
                eps = torch.randn(q.mu.shape, generator=random, dtype=q.mu.dtype).to(q.mu.device)
                each.append(drawn(q, width * eps, centres.get(name)))
                log_q = -0.5 * eps.square() - math.log(width * math.sqrt(2 * math.pi))
                complexity += float(torch.where(q.random, log_q, 0.0).double().sum())
                complexity += float(prior_cost(q, priors[name], centres.get(name), each[-1]))
            return each, complexity

        return draw

    found = {f"N({'centre' if centres else 0}, {width:g}²)": narrow(width) for width in _WIDTHS}
    try:
        from_prior(0)
    except NotImplementedError:  # a prior of the user's own
        return found
    return {"the prior": from_prior, **found}


def _estimate(values: Tensor) -> Estimate:
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(len(values))))


# --- the spread of sigma ---------------------------------------------------------------------------------------------


def spread(model: "Bayesian") -> Spread:
    """The 5 %, 50 % and 95 % quantiles of sigma, and the fraction of weights with |mu| / sigma below 0.1."""
    moments, random = model.engine().moments(), {name: q.random for name, q in model.posterior.items()}
    mean, sigma = (
        torch.cat([getattr(each, part).detach()[random[name]].double() for name, each in moments.items()])
        for part in ("mean", "deviation")
    )
    snr = mean.abs() / sigma
    if not len(sigma):
        raise invalid("model", "spread", "one with random weights", Described("one whose weights are all constant"))
    ordered = sigma.sort().values  # torch.quantile takes no more than 2^24 numbers
    low, median, high = (float(ordered[round(level * (len(ordered) - 1))]) for level in (0.05, 0.5, 0.95))
    return Spread(low, median, high, float((snr < _LOW_SNR).double().mean()))


def say_spread(found: Spread, *, has_own_sigma: bool = True, is_learnt: bool = True) -> Iterable[str]:
    """The spread of sigma in words, and what to do about it.

    Where a sigma is not a parameter of its own, its spread does not tell what it was initialised with; where nothing
    has been learnt, it does not tell that there is something to learn.
    """
    yield (
        f"sigma: median {found.median:.3g}, 5-95 % {found.low:.3g}-{found.high:.3g}; "
        f"{found.low_snr:.0%} of the weights have |mu| / sigma below {_LOW_SNR:g}"
    )
    if found.high < _UNMOVED * found.low:
        if not has_own_sigma:
            return
        yield (
            "  nearly the same for all weights, as when it was initialised: the uncertainty is mostly the initial "
            "sigma. Train longer, or give rho a higher rate: model.param_groups(lr, rho_lr=10 * lr)."
        )
    elif found.low_snr > 0.5:
        yield "  most weights say nothing: prune() would remove them, and a narrower network might do as well."
    elif is_learnt:
        yield "  it differs between weights: the data have had their say."


# --- PSIS ------------------------------------------------------------------------------------------------------------


def pareto_k(log_weights: Tensor) -> float:
    """k-hat: the shape of a generalised Pareto distribution fitted to the largest importance weights.

    By Vehtari et al. (2024), "Pareto smoothed importance sampling": of S weights the largest M = min(S / 5, 3 sqrt(S))
    exceed the next one by amounts to which the distribution is fitted. The weights have about 1 / k finite moments:
    above 0.7 their mean cannot be relied on. It is inf where the largest weight is all there is in floating point.

    Examples:
        >>> pareto_k(torch.zeros(100))  # all weights equal: no tail
        -inf
    """
    if not isinstance(log_weights, Tensor) or log_weights.dim() != 1 or len(log_weights) < _FEWEST:
        got = tensor_shape(log_weights) if isinstance(log_weights, Tensor) else log_weights
        raise invalid("log_weights", "pareto_k", f"a tensor of at least {_FEWEST} numbers", got)
    if not bool(log_weights.isfinite().all()):
        raise invalid("log_weights", "pareto_k", "finite", Described("NaN or inf"))
    ordered = log_weights.detach().double().cpu().sort().values
    tail = math.ceil(min(0.2 * len(ordered), 3 * math.sqrt(len(ordered))))
    weights = (ordered - ordered[-1]).exp()
    exceedances = weights[-tail:] - weights[-tail - 1]
    if not exceedances[-1]:
        return -math.inf
    if not exceedances[_quarter(tail)]:
        return math.inf
    shape = _pareto_shape(exceedances)
    return (tail * shape + _PRIOR_COUNT * _PRIOR_K) / (tail + _PRIOR_COUNT)


def _quarter(n: int) -> int:
    """The place of the first quartile of n ordered numbers, from 0."""
    return max(0, math.floor(n / 4 + 0.5) - 1)


def _pareto_shape(x: Tensor) -> float:
    """The shape k of a generalised Pareto distribution of ordered exceedances x, by Zhang and Stephens (2009).

    For each b = -k / sigma the likelihood is largest at k(b) = mean(log(1 - b x)), and its logarithm is there
    n (log(-b / k) - k - 1). The estimate is k at the mean of b under a posterior on a grid, whose points are quantiles
    of a prior that the first quartile of x scales.
    """
    n = len(x)
    points = 30 + math.floor(math.sqrt(n))
    numbers = torch.arange(1, points + 1, dtype=torch.float64)
    b = 1 / x[-1] + (1 - (points / (numbers - 0.5)).sqrt()) / (3 * x[_quarter(n)])
    k = torch.log1p(-b[:, None] * x).mean(1)
    log_likelihood = n * ((-b / k).log() - k - 1)
    mean = (log_likelihood.softmax(0) * b).sum()
    return float(torch.log1p(-mean * x).mean())


# --- the agreement of seeds ------------------------------------------------------------------------------------------


class Distance(NamedTuple):
    """How far two predictions lie apart, as a mean over the examples.

    Of classes it is the total variation, sum_c |p_c - q_c| / 2, in [0, 1], and ``ratio`` is 1. Of numbers it is
    |mean - mean'| in units of the predictive standard deviation, and ``ratio`` the larger of the two standard
    deviations by the smaller, as a geometric mean.
    """

    distance: float
    ratio: float


@dataclass(frozen=True)
class Agreement:
    """What :func:`agreement` found. ``print(agreement)`` shows it with a line of advice.

    Attributes:
        models: How many there were.
        examples: Inputs that they predicted.
        draws: Networks that each prediction averages.
        of_classes: Whether they predict classes; else numbers.
        between: The distance between two models, as a mean over all pairs.
        within: What to expect between two predictions of one model with other draws, as a mean over the models: the
            Monte Carlo error, of which ``between`` would consist if all models were the same.
    """

    models: int
    examples: int
    draws: int
    of_classes: bool
    between: Distance
    within: Distance

    @property
    def agree(self) -> bool:
        """Whether the models do not clearly differ by more than their draws make of each."""
        (distance, ratio), (noise, ratio_noise) = self.between, self.within
        return distance <= _CLEARLY * noise and math.log(ratio) <= _CLEARLY * math.log(ratio_noise)

    def __str__(self) -> str:
        unit = "in total variation" if self.of_classes else "standard deviations"
        (between, ratio), (within, ratio_within) = self.between, self.within
        lines = [
            f"agreement of {self.models} models ({self.examples:,} examples, {self.draws} draws): they differ by "
            f"{between:.3g} {unit}, one by itself with other draws by {within:.3g}"
        ]
        if not self.of_classes:
            factors = f"a factor of {ratio:.3g}, with other draws {ratio_within:.3g}"
            lines.append(f"  their standard deviations differ by {factors}")
        if self.agree:
            lines.append("  as far as these draws can tell they are the same: one of them is enough.")
        elif between < (_LITTLE if self.of_classes else _LITTLE_OF_SD) and ratio < 1 + _LITTLE_OF_SD:
            lines.append("  more than their draws explain, but little: the seed hardly matters.")
        else:
            lines.append(
                "  WARNING: what is predicted depends on the seed. Train longer, with a rate that falls; if it stays "
                "so, the posterior has several modes, of which each model knows one: average their predictions."
            )
        return "\n".join(lines)


@torch.no_grad()
def agreement(
    models: "Sequence[Bayesian]", data: Tensor | Data, *, draws: int = 100, seed: int | None = None
) -> Agreement:
    """Whether models that were trained on the same data from several seeds predict the same.

    Args:
        models: At least two, with one target each; they are not changed.
        data: Inputs to predict, as a tensor or with targets, which are ignored; held-out ones say more.
        draws: Networks to average in each prediction, at least 2.
        seed: Of the draws; None for each model's own. Each model has draws of its own.

    Examples:
        >>> from bayesbackprop import Bayesian, Gaussian
        >>> models = [Bayesian(torch.nn.Linear(1, 1), Gaussian(0.1), seed=seed) for seed in range(2)]
        >>> agreement(models, torch.randn(50, 1)).agree  # of untrained networks with other weights
        False
    """
    from bayesbackprop.model import Bayesian  # which imports this module

    many: list[Bayesian] = list(check_list("agreement", models=models))
    if len(many) < 2 or not all(isinstance(model, Bayesian) for model in many):
        raise invalid("models", "agreement", "a list of at least two Bayesian", models)
    draws = check_count("agreement", least=2, draws=draws)["draws"]
    if seed is not None:
        check_seed("agreement", seed=seed)
    between, within = (torch.zeros(2, dtype=torch.float64) for _ in range(2))  # distance, logarithm of the ratio
    examples = elements = 0
    for inputs in unlabelled(data, "data", "agreement"):
        found: list[_Summary] = []
        for number, model in enumerate(many):
            given = on(inputs, next(model.parameters()).device)
            own = (model.seed if seed is None else seed) + number
            found.append(_summary(model.predict(inputs=given, draws=draws, seed=own % INT64)))
        if len({tuple(each.centre.shape) for each in found}) > 1:
            raise invalid("models", "agreement", "models of the same targets", Described("others"))
        between += torch.stack([_distance(*two) for two in combinations(found, 2)]).mean(0)
        within += torch.stack([each.noise for each in found]).mean(0)
        examples += len(tensors_of(inputs)[0])
        elements += len(found[0].centre)
    distances = [Distance(float(total[0]), math.exp(total[1])) for total in (between / elements, within / elements)]
    return Agreement(len(many), examples, draws, found[0].spread is None, *distances)


class _Summary(NamedTuple):
    """A prediction: probabilities ``[elements, classes]``, or means ``[elements, 1]`` and standard deviations.

    ``noise`` is what other draws make of it, summed over the elements: with s the spread over n draws of what is
    averaged, two averages differ by 2 s / sqrt(pi n) on average.
    """

    centre: Tensor
    spread: Tensor | None
    noise: Tensor


def _summary(prediction: Predictive) -> _Summary:
    components, n = prediction.components, prediction.draws
    if isinstance(prediction, ClassPredictive):
        probs = components.probs.double().cpu()
        if isinstance(components, distributions.Bernoulli):
            probs = torch.stack([1 - probs, probs], -1)
        by_draw = probs.reshape(n, -1, probs.shape[-1])
        noise = by_draw.std(0).sum() / math.sqrt(math.pi * n)
        return _Summary(by_draw.mean(0), None, torch.stack([noise, torch.zeros_like(noise)]))
    if not isinstance(prediction, ValuePredictive) or not bool(prediction.variance.isfinite().all()):
        got = Described("others, such as those of several targets")
        raise invalid("models", "agreement", "models that predict classes, or numbers with a finite variance", got)
    mean, variance = (each.double().cpu().reshape(n, -1) for each in (components.mean, components.variance))
    centre = mean.mean(0)
    parts = variance + (mean - centre).square()  # of which the predictive variance is the mean
    whole = parts.mean(0)
    noise = torch.stack([2 * (mean.std(0) / whole.sqrt()).sum(), (parts.std(0) / whole).sum()])
    return _Summary(centre[:, None], whole.sqrt(), noise / math.sqrt(math.pi * n))


def _distance(one: _Summary, other: _Summary) -> Tensor:
    """The distance and the logarithm of the ratio, as in :class:`Distance`, summed over the elements."""
    apart = (one.centre - other.centre).abs().sum(1)
    if one.spread is None or other.spread is None:
        return torch.stack([apart.sum() / 2, torch.zeros((), dtype=apart.dtype)])
    unit = ((one.spread.square() + other.spread.square()) / 2).sqrt()
    return torch.stack([(apart / unit).sum(), (one.spread / other.spread).log().abs().sum()])
