"""Pictures of a network: the band of a function, the map of classes, and the histogram of its weights."""

import math

import torch

from bayesbackprop.model import Bayesian
from bayesbackprop.playground.requests import END, Band, Histogram, Map
from bayesbackprop.prediction import predictive

# Networks to average, and to show.
_DRAWS, _SHOWN = 80, 8
# Points of a function, and of each side of a map.
_POINTS, _SIDE = 121, 41
_LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)
# The bars of the histogram of log10 |mean| / standard deviation.
_FROM, _TO, _BARS = -3.0, 2.0, 40


def band(model: Bayesian) -> Band:
    """The predictive distribution of a function of one number."""
    x = torch.linspace(-END, END, _POINTS)
    outputs = model.outputs(x[:, None], draws=_DRAWS, estimator="shared")  # whole functions
    predicted = predictive(model.likelihood, outputs, _DRAWS)
    return Band(
        x=_short(x),
        quantiles=[_short(each) for each in predicted.quantiles(_LEVELS)],
        epistemic=_short(predicted.epistemic.sqrt()),
        aleatoric=_short(predicted.aleatoric.sqrt()),
        functions=[_short(each) for each in outputs[:_SHOWN]],
    )


def class_map(model: Bayesian) -> Map:
    """The predictive distribution of classes on the plane."""
    line = torch.linspace(-END, END, _SIDE)
    places = torch.cartesian_prod(line, line).flip(1)  # x runs faster
    outputs = model.outputs(places, draws=_DRAWS, estimator="shared")
    predicted = predictive(model.likelihood, outputs, _DRAWS)
    first, second = outputs[:_SHOWN].topk(2).values.unbind(-1)
    return Map(
        size=_SIDE,
        probabilities=(255 * predicted.mean).round().int().t().tolist(),
        epistemic=(255 * predicted.epistemic / math.log(2)).clamp(max=255).round().int().tolist(),
        classes=outputs[:_SHOWN].argmax(-1).tolist(),
        leads=(16 * (first - second)).clamp(max=255).round().int().tolist(),
    )


def snr_histogram(model: Bayesian) -> Histogram:
    """The signal-to-noise ratios of all weights, of any family."""
    moments = model.engine().moments().values()
    ratios = torch.cat([(each.mean.abs() / each.deviation).detach().flatten() for each in moments])
    logs = ratios.log10().nan_to_num(_FROM).clamp(_FROM, _TO)
    counts = torch.histc(logs, _BARS, _FROM, _TO)
    edges = torch.linspace(_FROM, _TO, _BARS + 1)
    return Histogram(edges=_short(edges), counts=counts.int().tolist())


def _short(values: torch.Tensor) -> list[float]:
    """Numbers as a picture needs them."""
    return [round(value, 4) for value in values.flatten().tolist()]
