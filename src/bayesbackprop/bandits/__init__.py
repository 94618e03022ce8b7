"""Contextual bandits: environments, agents that people can use, and runs of one in the other."""

from typing import NoReturn

from bayesbackprop.bandits.agents import Agent, Uniform
from bayesbackprop.bandits.decisions import Decision, Explanation
from bayesbackprop.bandits.environments import Environment, Table, classification
from bayesbackprop.bandits.linear import LinearThompson
from bayesbackprop.bandits.loading import load
from bayesbackprop.bandits.neural import EpsilonGreedy, ThompsonSampling
from bayesbackprop.bandits.simulation import simulate

__all__ = [
    "Agent",
    "Decision",
    "Environment",
    "EpsilonGreedy",
    "Explanation",
    "LinearThompson",
    "Table",
    "ThompsonSampling",
    "Uniform",
    "classification",
    "load",
    "simulate",
]

# Environments of the paper's reproduction.
_MOVED = ("Wheel", "adult", "covertype", "mushroom")


def __getattr__(name: str) -> NoReturn:
    where = f"; it is bayesbackprop_paper.environments.{name} now" if name in _MOVED else ""
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'{where}")
