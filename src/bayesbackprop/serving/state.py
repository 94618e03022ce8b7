"""The state of a service: from the log, and how far the learner is."""

import math
from collections.abc import Container, Sequence

from sqlalchemy.engine import RowMapping

from bayesbackprop.serving import requests
from bayesbackprop.serving.learning import Learner
from bayesbackprop.serving.log import Log
from bayesbackprop.serving.requests import Arm, Point, State

# Decisions that are recent, seconds over which rates are taken, and points of the curve of regret.
_RECENT, _SECONDS, _POINTS = 500, 10.0, 200


def state_of(log: Log, learner: Learner) -> State:
    """What a worker sees now."""
    agent, position = learner.agent, learner.position
    found = log.watch(_RECENT, _SECONDS, _POINTS)
    counts, recent, retired = found.counts, found.recent, log.arms().retired
    return State(
        agent=type(agent).__name__,
        features=agent.features,
        actions=len(found.arms),
        decisions=counts.decided,
        rewards=counts.rewarded,
        waiting=counts.waiting,
        lost=counts.lost,
        decisions_per_second=found.decisions_per_second,
        rewards_per_second=found.rewards_per_second,
        exploration_rate=counts.explored / counts.decided if counts.decided else None,
        recent_exploration_rate=sum(row["explored"] for row in recent) / len(recent) if recent else None,
        regret=counts.regret,
        history=[Point(decision=number, time=time, regret=regret) for number, time, regret in found.history],
        arms=[_arm(row, recent, retired) for row in found.arms],
        learner=learner_of(learner, counts.rewarded, position),
        time=found.time,
    )


def learner_of(learner: Learner, rewarded: int, position: int) -> requests.Learner:
    """How far the learner is in a log of so many rewards."""
    return requests.Learner(
        position=position,
        lag=max(0, rewarded - position),
        is_learner=learner.is_learner,
        snapshot=learner.snapshot,
        skipped=learner.skipped,
        trouble=learner.trouble,
    )


def _arm(row: RowMapping, recent: Sequence[RowMapping], retired: Container[int]) -> Arm:
    action, count = row["action"], row["rewarded"]
    mean = row["total"] / count if count else None
    deviation = math.sqrt(max(0.0, row["square"] / count - (row["total"] / count) ** 2)) if count else None
    # Where the action was not allowed, or not there yet, what the agent expected of it is of no interest.
    among = [
        each
        for each in recent
        if action < len(each["means"]) and (each["mask"] is None or any(each["mask"][action : action + 1]))
    ]
    believed = sum(each["means"][action] for each in among) / len(among) if among else None
    spread = math.sqrt(sum(each["spreads"][action] ** 2 for each in among) / len(among)) if among else None
    return Arm(
        action=action,
        retired=action in retired,
        chosen=row["chosen"],
        rewarded=count,
        reward=mean,
        deviation=deviation,
        mean=believed,
        spread=spread,
        recent=sum(each["action"] == action for each in recent) / len(recent) if recent else None,
    )
