"""The engine: the only place that knows how a draw of the weights is made, run and differentiated.

README.md, beside this file, is the page for the engineer who opens it.
"""

from bayesbackprop._engine.attributes import OF_ALL_MODULES, memo_of
from bayesbackprop._engine.cpu import Taker, plain_kernels
from bayesbackprop._engine.executors import Draw, Engine, costs
from bayesbackprop._engine.joint import kind_of
from bayesbackprop._engine.ops import draws
from bayesbackprop._engine.rules import ESTIMATORS, Estimator
from bayesbackprop._engine.sharding import divided, gathered, is_called, is_divided, unsharded
from bayesbackprop._engine.statistics import normalising, unmoved
from bayesbackprop._engine.substitution import Slots, call_with, evaluating, lock, over_draws, substituting

__all__ = [
    "ESTIMATORS",
    "OF_ALL_MODULES",
    "Draw",
    "Engine",
    "Estimator",
    "Slots",
    "Taker",
    "call_with",
    "costs",
    "divided",
    "draws",
    "evaluating",
    "gathered",
    "is_called",
    "is_divided",
    "kind_of",
    "lock",
    "memo_of",
    "normalising",
    "over_draws",
    "plain_kernels",
    "substituting",
    "unmoved",
    "unsharded",
]
