"""Contextual bandits: environments, agents that people can use, and runs of one in the other."""

from bayesbackprop.bandits.agents import Agent, EpsilonGreedy, LinearThompson, ThompsonSampling, Uniform, load
from bayesbackprop.bandits.environments import Environment, Table, Wheel, adult, classification, covertype, mushroom
from bayesbackprop.bandits.simulation import simulate

__all__ = [
    "Agent",
    "Environment",
    "EpsilonGreedy",
    "LinearThompson",
    "Table",
    "ThompsonSampling",
    "Uniform",
    "Wheel",
    "adult",
    "classification",
    "covertype",
    "load",
    "mushroom",
    "simulate",
]
