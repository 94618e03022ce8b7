"""Regression curves (section 5.2 of the paper): figure 5, Bayes by Backprop beside a standard network."""

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesbackprop._errors import check_count, check_positive, invalid
from bayesbackprop._files import write_atomically
from bayesbackprop._networks import mlp
from bayesbackprop.likelihoods import Gaussian
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.priors import Normal
from bayesbackprop.training import fit as train
from bayesbackprop_paper.experiments.figures import finish, panels, published
from bayesbackprop_paper.experiments.recipe import Examples, PointEstimate, seeded
from bayesbackprop_paper.experiments.records import write_line, write_rows

Method = Literal["bbb", "standard"]
Variant = Literal["figure", "formula"]
# The points of each, as pictures and tables name them.
POINTS: dict[str, str] = {"figure": "points as in the paper's figure", "formula": "points by the paper's formula"}

METHODS: tuple[Method, ...] = get_args(Method)
VARIANTS: tuple[Variant, ...] = get_args(Variant)

# The name, the published panel and the colour.
STYLE = {
    "bbb": ("Bayes by Backprop", "bayes_by_backprop", "#3f51b5"),
    "standard": ("Standard network", "standard", "#7f8c8d"),
}

# The inputs of the published panels, and where there are data.
GRID = np.round(np.arange(-0.2, 1.2 + 1e-9, 0.05), 2)
_DATA = (0.0, 0.5)

# Networks whose curves are kept.
_DRAWN = 20

# 5-95 %, interquartile range and median.
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Config:
    """An experiment.

    Args:
        method: ``"bbb"`` or ``"standard"``, a plain network that predicts a mean and a noise, as in the paper.
        variant: ``"figure"``: points as those of the published figure look, f(x) + N(0, .05^2). ``"formula"``: the
            printed one, with noise N(0, .02^2) inside of f as well.
        points: For training; as many are held out.
        hidden: Units of each of the two hidden layers.
        steps: Of Adam, whose learning rate falls to 0.
        batch_size: Points of a minibatch.
        learning_rate: At the start.
        prior_sigma: Of the Gaussian prior.
        sigma: The initial standard deviation of the posterior.
        draws: Networks to average in a prediction.
        seed: Of everything random.
    """

    method: Method = "bbb"
    variant: Variant = "figure"
    points: int = 600
    hidden: int = 100
    steps: int = 6_000
    batch_size: int = 128
    learning_rate: float = 3e-3
    prior_sigma: float = 0.7
    sigma: float = 0.05
    draws: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise invalid("method", "Config", "'bbb' or 'standard'", self.method)
        if self.variant not in VARIANTS:
            raise invalid("variant", "Config", "'figure' or 'formula'", self.variant)
        sizes = {"points": self.points, "hidden": self.hidden, "steps": self.steps, "draws": self.draws}
        check_count("Config", **sizes, batch_size=self.batch_size)
        check_count("Config", least=0, seed=self.seed)
        rates = {"learning_rate": self.learning_rate, "prior_sigma": self.prior_sigma, "sigma": self.sigma}
        check_positive("Config", **rates)


@dataclass(frozen=True)
class Curve:
    """What a fitted network predicts: quantiles on the grid, and how often held-out points lie in its bands.

    ``drawn`` are the curves of some networks of the posterior; of a standard network the only one.
    """

    quantiles: NDArray[np.float64]
    drawn: NDArray[np.float64]
    coverage50: float
    coverage90: float

    def width(self, x: float) -> float:
        """Of the 5-95 % band."""
        place = int(np.abs(GRID - x).argmin())
        return float(self.quantiles[-1, place] - self.quantiles[0, place])


def f(x: Tensor) -> Tensor:
    """The curve, without noise."""
    return x + 0.3 * torch.sin(2 * math.pi * x) + 0.3 * torch.sin(4 * math.pi * x)


def points(variant: Variant, n: int, random: torch.Generator) -> Examples:
    """Noisy points of the curve, at x ~ U(0, .5)."""
    x = torch.empty(n, 1).uniform_(*_DATA, generator=random)
    noise = torch.randn(n, 1, generator=random)
    # As printed: y = x + .3 sin(2 pi (x + e)) + .3 sin(4 pi (x + e)) + e, which is f(x + e).
    return Examples(x, f(x) + 0.05 * noise if variant == "figure" else f(x + 0.02 * noise))


@functools.cache
def noise_width(variant: Variant, x: float) -> float:
    """The width of the true 5-95 % band of y at x."""
    noise = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).double()
    y = 0.05 * noise if variant == "figure" else f(x + 0.02 * noise)
    return float(y.quantile(0.95) - y.quantile(0.05))


def fit(config: Config) -> Curve:
    """Train a network on its points, and look at its predictions; on one thread, the quickest for so small a one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _fit(config)
    finally:
        torch.set_num_threads(threads)


def _fit(config: Config) -> Curve:
    random = torch.Generator().manual_seed(config.seed)
    training, held_out = (points(config.variant, config.points, random) for _ in range(2))
    # Both learn mean and noise of y at each x: the paper's conditional Gaussian loss.
    with seeded(config.seed):
        net, likelihood = mlp([1, config.hidden, config.hidden, 2]), Gaussian("per-input")
    # Local: with weights shared by the minibatch the noise of the gradient keeps the band four times too wide.
    model = Bayesian(
        net, likelihood, Normal(config.prior_sigma), sigma=config.sigma, estimator="local", seed=config.seed
    )
    bayesian = config.method == "bbb"
    objective = (
        FreeEnergy(model, config.points, complexity="closed")
        if bayesian
        else PointEstimate(net, likelihood, config.points)
    )

    def minibatches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(config.steps):
            chosen = torch.randint(config.points, (min(config.batch_size, config.points),), generator=random)
            yield training.inputs[chosen], training.targets[chosen]

    optimiser = torch.optim.Adam(objective.parameters(), lr=config.learning_rate, fused=True)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, config.steps)
    train(objective, minibatches(), epochs=1, optimiser=optimiser, scheduler=rate)

    def quantiles(x: Tensor) -> Tensor:
        predicted = model.predict(x, draws=config.draws) if bayesian else model.predict_mean(x)
        return predicted.quantiles(LEVELS)[..., 0]

    low, quarter, _, three_quarters, high = quantiles(held_out.inputs)
    y, grid = held_out.targets[:, 0], torch.tensor(GRID, dtype=torch.float32)[:, None]
    some = model.ensemble(_DRAWN).predict(grid) if bayesian else model.predict_mean(grid)
    return Curve(
        quantiles(grid).double().numpy(),
        some.components.mean.reshape(-1, len(GRID)).double().numpy(),
        coverage50=float(((quarter <= y) & (y <= three_quarters)).float().mean()),
        coverage90=float(((low <= y) & (y <= high)).float().mean()),
    )


def write_curves(path: Path, curves: Mapping[Config, Curve]) -> None:
    """Write curves with what made them, for others to draw."""
    entries = [
        {"config": asdict(config), **{name: np.asarray(value).tolist() for name, value in asdict(curve).items()}}
        for config, curve in curves.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(entries) + "\n").encode())


def read_curves(path: Path) -> dict[Config, Curve]:
    """What :func:`write_curves` wrote; nothing if there is no file."""
    entries = json.loads(path.read_text()) if path.exists() else []
    return {
        Config(**entry["config"]): Curve(
            np.array(entry["quantiles"]), np.array(entry["drawn"]), entry["coverage50"], entry["coverage90"]
        )
        for entry in entries
    }


@dataclass(frozen=True)
class Row:
    """One network in numbers: widths of its 5-95 % band, as multiples of the published and of the true one.

    ``off`` is the smallest ratio to the published width where there are no data (x < -.1 and x > .7), ``on`` the
    ratio of the mean widths of band and noise where there are.
    """

    method: str
    variant: str
    seed: int
    off: float
    on: float
    coverage50: float
    coverage90: float


def row(config: Config, curve: Curve) -> Row:
    """Compare a curve with the published panel of Bayes by Backprop and with the noise of the data."""
    panel = published("regression_bayes_by_backprop")
    widths = panel["upper"] - panel["lower"]
    away = [x for x in GRID if x < -0.1 or x > 0.7]
    inside = [x for x in GRID if _DATA[0] <= x <= _DATA[1]]
    return Row(
        config.method,
        config.variant,
        config.seed,
        off=min(curve.width(x) / float(np.interp(x, panel["x"], widths)) for x in away),
        on=sum(curve.width(x) for x in inside) / sum(noise_width(config.variant, x) for x in inside),
        coverage50=curve.coverage50,
        coverage90=curve.coverage90,
    )


def fig5(curves: Mapping[Config, Curve], results: Path, command: str) -> str:
    """Both networks beside the published panels, of the first seed; the numbers of all seeds in ``fig5.csv``."""
    rows = [row(config, curve) for config, curve in curves.items()]
    write_rows(results / "fig5.csv", Row, rows)
    variants = sorted({config.variant for config in curves})
    first = min(config.seed for config in curves)
    shown = {config: curve for config, curve in curves.items() if config.seed == first}
    write_curves(results / "fig5-curves.json", shown)
    figure, every = panels("x", "y", len(variants), len(METHODS))
    for config, curve in shown.items():
        _panel(every[variants.index(config.variant)][METHODS.index(config.method)], config, curve)
    line = " ".join(_said(rows, method, variant) for variant in variants for method in METHODS)
    write_line(results / "fig5.json", line, command)
    return finish(figure, every[0][0], results / "fig5", line)


def _panel(axes: Any, config: Config, curve: Curve) -> None:
    name, file, colour = STYLE[config.method]
    low, quarter, median, three_quarters, high = curve.quantiles
    training = points(config.variant, config.points, torch.Generator().manual_seed(config.seed))
    axes.plot(training.inputs[:, 0], training.targets[:, 0], "x", color="black", markersize=2, alpha=0.3, label="data")
    axes.fill_between(GRID, low, high, color=colour, alpha=0.2, label="5-95 %")
    axes.fill_between(GRID, quarter, three_quarters, color=colour, alpha=0.4, label="25-75 %")
    axes.plot(GRID, median, color=colour, label="median")
    theirs = published(f"regression_{file}")
    axes.plot(theirs["x"], theirs["median"], color="black", linestyle=":", linewidth=1, label="paper")
    for edge in ("lower", "upper"):
        axes.plot(theirs["x"], theirs[edge], color="black", linestyle=":", linewidth=0.6)
    axes.set_title(f"{name}\n{POINTS[config.variant]}", fontsize="medium")
    axes.set_ylim(-1.2, 2.2)


def _said(rows: Sequence[Row], method: str, variant: str) -> str:
    those = [each for each in rows if (each.method, each.variant) == (method, variant)]
    off, on = min(each.off for each in those), max(each.on for each in those)
    covered = [f"{100 * mean(getattr(each, name) for each in those):.0f} %" for name in ("coverage50", "coverage90")]
    return (
        f"{STYLE[method][0]}, {variant}, {len(those)} seeds: off the data its 5-95 % band is at least {off:.2f} times "
        f"as wide as that of the paper's Bayes by Backprop, on the data on average at most {on:.2f} times as wide as "
        f"the noise; its 50 % and 90 % bands hold {' and '.join(covered)} of held-out points."
    )
