"""What a kernel must know of a parameter."""

from typing import NamedTuple

from torch import Tensor

from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.priors import Prior


class Parameter(NamedTuple):
    """A Bayesian parameter: its posterior, its prior, what the prior is centred on, and the stream of its noise."""

    q: WeightPosterior
    prior: Prior
    centre: Tensor | None
    stream: int
