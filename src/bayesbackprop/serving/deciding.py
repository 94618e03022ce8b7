"""Decisions to be logged, from what the agent makes of requests."""

import uuid
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bayesbackprop._errors import Described, invalid
from bayesbackprop.bandits import Agent
from bayesbackprop.serving.access import RefusedError
from bayesbackprop.serving.arms import Arms
from bayesbackprop.serving.log import Entry
from bayesbackprop.serving.requests import DecisionRequest

# Points of the integral below, and how many standard deviations it reaches.
_POINTS, _REACH = 200, 6.0


def decide(agent: Agent, requests: Sequence[DecisionRequest], random: np.random.Generator, arms: Arms) -> list[Entry]:
    """A decision for each request, with no action that is retired by ``arms``; the agent stays as it is."""
    if not requests:
        return []
    masks = [_mask(agent, each, arms) for each in requests]
    features = [_features(agent, each, arms) for each in requests]
    explanations = agent.explain_many([each.context for each in requests], masks, features, random=random)
    means = torch.tensor([each.means for each in explanations], dtype=torch.float64)
    spreads = torch.tensor([each.spreads for each in explanations], dtype=torch.float64)
    best = expected_best(means, spreads, torch.tensor(masks)).tolist()
    entries = []
    for request, explanation, highest in zip(requests, explanations, best, strict=True):
        action = explanation.at(random.random())
        entries.append(
            Entry(
                id=uuid.uuid4().hex,
                request=request.request,
                context=request.context,
                mask=request.mask,
                features=request.features,
                action=action,
                propensity=explanation.probabilities[action],
                probabilities=[*explanation.probabilities],
                means=[*explanation.means],
                spreads=[*explanation.spreads],
                explored=explanation.explores(action),
                loss=max(0.0, highest - explanation.means[action]),
            )
        )
    return entries


def asked_again(before: Entry, request: DecisionRequest) -> Entry:
    """The decision of a request of the same name, with what is asked now: the log compares both."""
    return replace(before, context=request.context, mask=request.mask, features=request.features)


def _mask(agent: Agent, request: DecisionRequest, arms: Arms) -> list[bool]:
    """Which actions of the agent may be taken: it may lack some of the log, and a client may not know of all."""
    given = request.mask
    if given is not None and (not arms.first <= len(given) <= arms.actions or not any(given)):
        got = Described(f"{len(given)}, {sum(given)} of them true")
        raise invalid("mask", "/decide", f"a list of {arms.actions} booleans, at least one of them true", got)
    wanted = [True] * arms.actions if given is None else [*given, *[False] * (arms.actions - len(given))]
    left = [each and action not in arms.retired for action, each in enumerate(wanted)]
    if not any(left):
        raise invalid("mask", "/decide", "true for at least one action that is not retired", Described("none"))
    if not any(left[: agent.actions]):
        message = "The actions that the mask allows are new, and this worker has not learnt of them yet. Try again."
        raise RefusedError(503, "not_learnt_yet", message)
    return left[: agent.actions]


def _features(agent: Agent, request: DecisionRequest, arms: Arms) -> list[list[float]] | None:
    """Those of the actions of the agent, which may lack the newest of the log."""
    given = request.features
    return given if given is None or len(given) > arms.actions else given[: agent.actions]


def expected_best(means: Tensor, spreads: Tensor, allowed: Tensor) -> Tensor:
    """E max_a r_a of independent r_a ~ N(mean_a, spread_a^2) over the allowed actions, ``[n, actions]`` to ``[n]``.

    The regret that an agent expects of an action is this less the action's mean. With F = prod_a Phi((x - mean_a) /
    spread_a), which is 0 below some l and 1 above some h, it is h - integral of F from l to h.
    """
    s = spreads.clamp(min=1e-12 * (1 + float(means.abs().max())))
    low = (means - _REACH * s).masked_fill(~allowed, -torch.inf).amax(1)
    high = (means + _REACH * s).masked_fill(~allowed, -torch.inf).amax(1)
    steps = torch.linspace(0, 1, _POINTS, dtype=means.dtype)
    x = low[:, None] + (high - low)[:, None] * steps
    each = torch.special.ndtr((x[:, :, None] - means[:, None]) / s[:, None])
    below = each.masked_fill(~allowed[:, None], 1.0).prod(-1)
    return high - torch.trapezoid(below, x, dim=1)
