"""What a policy would have earned, from a log of what another one did.

A log holds the reward of the action that was taken, and of no other. A row counts for another policy pi as often as
that would have taken its action: with the weight w = pi(a|x) / p(a|x), where p is the probability with which it was
taken. With q(x, a) a model of rewards, the value of pi is estimated by the mean over the rows of

    ips     w r
    snips   w r / mean(w)
    dr      sum_a pi(a|x) q(x, a) + w (r - q(x, a))

``ips`` (inverse propensities) is unbiased if p > 0 wherever pi > 0. ``snips`` (self-normalised) has a bias of the order
of 1 / n, and does not depend on where the zero of rewards is. ``dr`` (doubly robust) is as unbiased as ``ips``, and
varies less the better the model is. Where the log could not take what pi takes, ``ips`` counts a reward of 0, ``snips``
the mean of the rest, and ``dr`` what the model says.

The policy must not have been learnt from the rows that judge it: learn from ``log[:half]`` and judge by ``log[half:]``.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesbackprop._errors import (
    Described,
    check_callable,
    check_choice,
    check_count,
    check_positive,
    check_type,
    invalid,
)
from bayesbackprop.bandits.agents import Agent
from bayesbackprop.bandits.log import ROUNDING, Log, check_covers, check_distributions, numbers, whole

Estimator = Literal["ips", "snips", "dr"]

# Learns from contexts, actions and rewards to say the expected reward of every action in other contexts.
Learner = Callable[[Tensor, Tensor, Tensor], Callable[[Tensor], Any]]

# The 97.5 % quantile of a normal distribution.
_QUANTILE = 1.959964

# When a result has a warning: more than this part of the policy's probability is on actions that the log could not
# take; the log counts as fewer decisions than this; one decision has more than this part of all weight; and the mean of
# the weights is so many standard errors from 1.
_OUTSIDE, _FEWEST, _LARGEST, _ERRORS = 0.01, 100, 0.02, 4.0

# Ridge penalties to choose from, each as strong as so many rows whose reward is 0; and what stands for a singular value
# of 0 where it divides.
_PENALTIES, _TINY = torch.logspace(-2, 6, 17, dtype=torch.float64), 1e-12


class Estimate(NamedTuple):
    """The value of a policy, a mean reward, or the difference of two such values.

    ``effective_size`` is how many decisions of the policy itself the ``decisions`` of the log are worth,
    (sum w)^2 / sum w^2. ``outside`` is the part of the policy's probability on actions that the log could not take, and
    ``clipped`` the part of the decisions whose weight was cut. ``warnings`` says in words why not to trust the
    estimate; it is empty if nothing speaks against it.
    """

    value: float
    standard_error: float
    decisions: int
    effective_size: float
    outside: float = 0.0
    clipped: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval, by the central limit theorem."""
        reach = _QUANTILE * self.standard_error
        return self.value - reach, self.value + reach

    def __str__(self) -> str:
        low, high = self.interval
        said = (
            f"{self.value:.4g} ± {self.standard_error:.2g} (95 %: {low:.4g} to {high:.4g}), from {self.decisions:,} "
            f"decisions that count as {self.effective_size:,.0f}"
        )
        return "\n".join([said, *(f"  {warning}" for warning in self.warnings)])


def evaluate(
    policy: Any,
    log: Log,
    estimator: Estimator = "dr",
    *,
    model: Learner | None = None,
    folds: int = 5,
    clip: float | None = None,
) -> Estimate:
    """The mean reward that ``policy`` would have had in the contexts of ``log``.

    Args:
        policy: Its probabilities in each row, ``[n, actions]``, or the actions that it takes, ints ``[n]``; a function
            of the contexts (and, where it takes a second argument, of the masks, if the log has any; and a third, of
            the features of the actions, if it has those: then the masks may be None) that returns one of these; or an
            agent, as it is now, which is asked with the masks and, if it takes them, the features. None for the policy
            that took the decisions in the log.
        log: Rows on which the policy has not been learnt.
        estimator: ``"ips"``, ``"snips"`` or ``"dr"``.
        model: Of rewards, for ``"dr"``: a function of contexts, actions and rewards that learns from them, and returns
            a function of other contexts to the expected reward of every action, ``[m, actions]``. Each of ``folds``
            parts of the log is predicted by what was learnt from the others. None for a linear model, whose shrinkage
            is found from the rows. A model ``q`` that is known already is ``lambda *_: q``.
        folds: How many parts.
        clip: The largest weight. It makes the estimate steadier, and biased.

    Examples:
        >>> log = Log([[0.0]] * 4, actions=[0, 0, 1, 1], rewards=[0, 1, 1, 1], propensities=[0.5] * 4)
        >>> evaluate([1, 1, 1, 1], log, "ips").value
        1.0
    """
    return _estimate(_judged("evaluate", policy, log, estimator, model, folds, clip))


def compare(
    policy: Any,
    log: Log,
    against: Any = None,
    estimator: Estimator = "dr",
    *,
    model: Learner | None = None,
    folds: int = 5,
    clip: float | None = None,
) -> Estimate:
    """How much more ``policy`` would have earned a decision than another, from the same rows.

    Both are judged by the same rows, so what is luck for both is no difference between them: the standard error is that
    of the mean of the differences, row by row.

    Args:
        policy: As for :func:`evaluate`, as are the arguments that are not named here.
        log: As there.
        against: The other policy; None for the one that took the decisions in the log.
        estimator: As there.
        model: As there.
        folds: As there.
        clip: As there.

    Examples:
        >>> log = Log([[0.0]] * 4, actions=[0, 0, 1, 1], rewards=[0, 1, 1, 1], propensities=[0.5] * 4)
        >>> compare([1, 1, 1, 1], log, [0, 0, 0, 0], "ips").value
        0.5
    """
    one = _judged("compare", policy, log, estimator, model, folds, clip)
    other = _judged("compare", against, log, estimator, model, folds, clip, name="against")
    if against is not None:  # of two policies a warning says of which it is
        one, other = _named(one, "policy"), _named(other, "against")
    return _estimate(one, other)


class _Judged(NamedTuple):
    """What each row says of the value of a policy, ``[n]``, whose mean is the estimate; and how far it counts."""

    rows: Tensor
    effective_size: float
    outside: float = 0.0
    clipped: float = 0.0
    warnings: tuple[str, ...] = ()


def _named(judged: _Judged, name: str) -> _Judged:
    """The same, with the name of the policy in front of its warnings."""
    return judged._replace(warnings=tuple(f"{name}: {warning}" for warning in judged.warnings))


def _estimate(one: _Judged, other: _Judged | None = None) -> Estimate:
    """That of a policy, or of the difference of two."""
    rows = one.rows if other is None else one.rows - other.rows
    both = [one] if other is None else [one, other]
    return Estimate(
        float(rows.mean()),
        float(rows.std() / math.sqrt(len(rows))),
        len(rows),
        min(each.effective_size for each in both),
        max(each.outside for each in both),
        max(each.clipped for each in both),
        tuple(dict.fromkeys(warning for each in both for warning in each.warnings)),
    )


def _judged(
    owner: str,
    policy: Any,
    log: Log,
    estimator: str,
    model: Learner | None,
    folds: int,
    clip: float | None,
    name: str = "policy",
) -> _Judged:
    check_type(owner, Log, "a Log", log=log)
    if len(log) < 2:
        raise invalid("log", owner, "of at least 2 decisions", Described(f"{len(log)}"))
    check_choice(owner, get_args(Estimator), estimator=estimator)
    folds = check_count(owner, least=2, folds=folds)["folds"]
    if model is not None:
        check_callable(owner, model=model)
    limit = math.inf if clip is None else check_positive(owner, clip=clip)["clip"]
    if policy is None:
        return _Judged(log.rewards, float(len(log)))
    pi = _probabilities(name, owner, policy, log)
    exact = pi.gather(1, log.actions[:, None])[:, 0] / log.propensities
    w = exact.clamp(max=limit)
    if not bool((w > 0).any()):
        got = Described("one that takes none of the logged actions: the log says nothing of it")
        raise invalid(name, owner, "a policy that may take what was taken", got)
    if estimator == "ips":
        rows = w * log.rewards
    elif estimator == "snips":
        # value + w (r - value) / mean(w): its mean is the ratio, and its variance that of the ratio to the first order.
        value = (w * log.rewards).sum() / w.sum()
        rows = value + w * (log.rewards - value) / w.mean()
    else:
        q = _cross_fitted(owner, model or partial(_linear, pi.shape[1]), log, pi.shape[1], folds)
        rows = (pi * q).sum(1) + w * (log.rewards - q.gather(1, log.actions[:, None])[:, 0])
    size = float(w.sum().square() / w.square().sum())
    outside, clipped = _outside(pi, log), float((exact > limit).double().mean())
    return _Judged(rows, size, outside, clipped, tuple(_warnings(exact, w, size, outside, clipped)))


def _probabilities(name: str, owner: str, policy: Any, log: Log) -> Tensor:
    """What a policy would do in each row, ``[n, actions]``."""
    given = policy
    if isinstance(policy, Agent):
        features = None if policy._numbers is None else log.requested
        given = [each.probabilities for each in policy.explain_many(log.contexts, log.masks, features)]
    elif callable(policy):
        given = _asked(name, owner, policy, log)
    n = len(log)
    found = numbers(name, owner, given, (n, None), (n,))
    if found.dim() == 1:
        taken = whole(name, owner, given, n)
        known = [rows.shape[1] for rows in (log.masks, log.probabilities) if rows is not None]
        actions = max([int(taken.max()) + 1, int(log.actions.max()) + 1, *known])
        found = F.one_hot(taken, actions).double()
    check_covers(name, owner, found, log.actions)
    check_distributions(name, owner, found, log.masks)
    return found


def _asked(name: str, owner: str, policy: Callable[..., Any], log: Log) -> Any:
    """What a function of contexts answers; it gets as much of masks and features as it takes."""
    given: list[Any] = [log.contexts, log.masks, log.features]
    while given[-1] is None:
        given.pop()
    try:
        signature = inspect.signature(policy.forward if isinstance(policy, nn.Module) else policy)
    except (TypeError, ValueError):  # some that are written in C have none
        return policy(*given)
    for count in range(len(given), 0, -1):
        try:
            signature.bind(*given[:count])
        except TypeError:
            continue
        return policy(*given[:count])
    which = ("contexts", "contexts and masks", "contexts, masks and features")[len(given) - 1]
    raise invalid(name, owner, f"a function of the {which} of the log", Described(f"one of {signature}"))


def _outside(pi: Tensor, log: Log) -> float:
    """The part of a policy's probability on actions that could not have been taken, or, if unknown, never were."""
    if log.probabilities is None:
        never = torch.ones(pi.shape[1], dtype=torch.bool)
        never[log.actions] = False
        return float(pi[:, never].sum(1).mean())
    probable = torch.zeros_like(pi)
    known = min(pi.shape[1], log.probabilities.shape[1])
    probable[:, :known] = log.probabilities[:, :known]
    return float(pi[probable == 0].sum() / len(pi))


def _warnings(exact: Tensor, w: Tensor, size: float, outside: float, clipped: float) -> list[str]:
    said = []
    if outside > _OUTSIDE:
        said.append(
            f"{outside:.0%} of the policy's probability is on actions that the log could not take: of these it says "
            "nothing."
        )
    mean, error = float(exact.mean()), float(exact.std() / math.sqrt(len(exact)))
    if abs(mean + outside - 1) > _ERRORS * error + ROUNDING:
        said.append(
            f"The weights have a mean of {mean:.3g} ± {error:.2g}, which should be {1 - outside:.3g}: either the log "
            "hardly ever takes what the policy takes in some contexts, or its propensities are not true."
        )
    if size < _FEWEST:
        said.append(
            f"The log counts as {size:.0f} decisions of this policy: the interval may well be too narrow. Collect "
            "more, or judge a policy that is more like the one that was logged."
        )
    if (largest := float(w.max() / w.sum())) > _LARGEST:
        said.append(f"A single decision has {largest:.0%} of all weight.")
    if clipped:
        said.append(f"{clipped:.1%} of the weights were clipped: the estimate is biased towards what was logged.")
    return said


# --- models of rewards -----------------------------------------------------------------------------------------------


def _cross_fitted(owner: str, model: Learner, log: Log, actions: int, folds: int) -> Tensor:
    """The expected reward of every action in each row, ``[n, actions]``, learnt from the rows of other folds."""
    n = len(log)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    expected = torch.empty(n, actions, dtype=torch.float64)
    for part in order.chunk(min(folds, n)):
        others = torch.ones(n, dtype=torch.bool)
        others[part] = False
        learnt = model(log.contexts[others], log.actions[others], log.rewards[others])
        check_callable(owner, model=learnt)
        expected[part] = numbers("model", owner, learnt(log.contexts[part]), (len(part), actions))
    if not bool(expected.isfinite().all()):
        raise invalid("model", owner, "one that predicts finite rewards", Described("NaN or inf"))
    return expected


def _linear(actions: int, contexts: Tensor, taken: Tensor, rewards: Tensor) -> Callable[[Tensor], Tensor]:
    """A linear model of all rewards, and one for each action of what that leaves: an untried one is as the others."""
    centre, spread = contexts.mean(0), contexts.std(0, correction=0)

    def columns(contexts: Tensor) -> Tensor:
        return F.pad(((contexts - centre) / spread.where(spread > 0, 1.0)).double(), (0, 1), value=1.0)

    x, mean = columns(contexts), rewards.mean()
    of_all = _ridge(x, rewards - mean)
    left = rewards - mean - x @ of_all
    own = [_ridge(x[rows], left[rows]) for rows in (taken == action for action in range(actions))]
    weights = torch.stack(own, 1) + of_all[:, None]
    return lambda contexts: columns(contexts) @ weights + mean


def _ridge(x: Tensor, y: Tensor) -> Tensor:
    """The weights of a ridge regression whose penalty predicts each row best from all others, in closed form."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    kept = s.square() / (s.square() + _PENALTIES[:, None])  # of each direction, by penalty
    along = u.T @ y
    fitted, leverage = (kept * along) @ u.T, kept @ u.square().T
    errors = ((y - fitted) / (1 - leverage)).square().sum(1)
    # The largest of those as good as the best: a single row says nothing of it.
    best = int((errors <= errors.min() * (1 + 1e-6)).nonzero().max()) if len(y) else 0
    weights: Tensor = v.T @ (kept[best] / s.clamp(min=_TINY) * along)
    return weights
