"""Figure 5: points with the noise that the paper says, curves by the seed, and bands measured as the table says."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bayesbackprop_paper.experiments import regression
from bayesbackprop_paper.experiments.figures import published
from bayesbackprop_paper.experiments.regression import GRID, LEVELS, Config, Curve, f, fit, noise_width, points, row
from report_runs import curves
from ztests import assert_mean, assert_p_value, assert_variance

pytestmark = pytest.mark.identities

TINY = Config(points=40, hidden=8, steps=5, batch_size=16, draws=20)


def printed(x: Any, e: Any) -> Any:
    """The paper's formula."""
    return x + 0.3 * np.sin(2 * math.pi * (x + e)) + 0.3 * np.sin(4 * math.pi * (x + e)) + e


# --- the data --------------------------------------------------------------------------------------------------------


def test_the_curve_is_the_formula_without_noise() -> None:
    x = np.linspace(-0.2, 1.2, 57)
    assert np.allclose(f(torch.tensor(x)).numpy(), printed(x, 0))


@pytest.mark.statistical
def test_points_of_the_figure_have_noise_around_the_curve() -> None:
    x, y = points("figure", 4000, torch.Generator().manual_seed(1))
    assert x.shape == y.shape == (4000, 1)
    residuals = (y - f(x))[:, 0]
    assert_mean(residuals, 0.0, "noise")
    assert_variance(residuals, 0.05**2, "noise")
    assert_p_value(stats.normaltest(residuals.numpy()).pvalue, "noise is Gaussian")
    assert_p_value(stats.kstest(2 * x[:, 0].numpy(), "uniform").pvalue, "x ~ U(0, .5)")
    assert_p_value(stats.spearmanr(x[:, 0].numpy(), residuals.abs().numpy()).pvalue, "the same noise at every x")


@pytest.mark.statistical
def test_points_of_the_formula_are_as_printed() -> None:
    x, y = (part[:, 0].double().numpy() for part in points("formula", 4000, torch.Generator().manual_seed(2)))
    random = np.random.default_rng(3)
    other_x, e = random.uniform(0, 0.5, 100_000), random.normal(0, 0.02, 100_000)
    other = printed(other_x, e)
    assert_p_value(stats.kstest(2 * x, "uniform").pvalue, "x ~ U(0, .5)")
    assert_p_value(stats.ks_2samp(y, other).pvalue, "y")
    assert_p_value(stats.ks_2samp(y - printed(x, 0), other - printed(other_x, 0)).pvalue, "noise")
    for low in (0.0, 0.1, 0.2, 0.3, 0.4):
        near, others_near = (x > low) & (x < low + 0.1), (other_x > low) & (other_x < low + 0.1)
        residuals = y[near] - printed(x[near], 0), other[others_near] - printed(other_x[others_near], 0)
        assert_p_value(stats.ks_2samp(*residuals).pvalue, f"noise near {low}")


def test_the_width_of_the_noise_by_monte_carlo() -> None:
    e = np.random.default_rng(4).normal(size=200_000)
    for x in (0.0, 0.11, 0.25, 0.4, 0.5):
        low, high = np.quantile(printed(x, 0.02 * e), [0.05, 0.95])
        assert noise_width("formula", x) == pytest.approx(high - low, rel=0.02)
        assert noise_width("figure", x) == pytest.approx(0.1 * stats.norm.isf(0.05), rel=0.02)


# --- fitting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", regression.VARIANTS)
@pytest.mark.parametrize("method", regression.METHODS)
def test_a_fit_is_by_the_seed(method: Any, variant: Any) -> None:
    config = replace(TINY, method=method, variant=variant)
    curve, again = fit(config), fit(config)
    assert np.array_equal(curve.quantiles, again.quantiles)
    assert (curve.coverage50, curve.coverage90) == (again.coverage50, again.coverage90)
    assert curve.quantiles.shape == (len(LEVELS), len(GRID))
    assert np.isfinite(curve.quantiles).all()
    assert (np.diff(curve.quantiles, axis=0) > 0).all()
    assert 0 <= curve.coverage50 <= curve.coverage90 <= 1
    for change in ({"seed": 1}, {"steps": 6}, {"learning_rate": 0.01}):
        assert not np.array_equal(curve.quantiles, fit(replace(config, **change)).quantiles), change


def test_only_bayes_by_backprop_has_a_prior() -> None:
    for change in ({"prior_sigma": 0.1}, {"sigma": 0.2}, {"draws": 21}):
        for method in regression.METHODS:
            config = replace(TINY, method=method)
            same = np.array_equal(fit(config).quantiles, fit(replace(config, **change)).quantiles)
            assert same == (method == "standard"), (method, change)


def test_the_learning_rate_falls_to_zero() -> None:
    rates: list[float] = []
    hook = register_optimizer_step_pre_hook(lambda optimiser, *_: rates.append(optimiser.param_groups[0]["lr"]))
    try:
        fit(replace(TINY, steps=8))
    finally:
        hook.remove()
    assert rates == pytest.approx([TINY.learning_rate * (1 + math.cos(math.pi * t / 8)) / 2 for t in range(8)])


@pytest.mark.learning
def test_a_standard_network_learns_curve_and_noise() -> None:
    config = Config("standard", points=400, hidden=50, steps=1000, batch_size=64, learning_rate=0.01)
    curve = fit(config)
    assert curve.coverage50 == pytest.approx(0.5, abs=0.1)
    assert curve.coverage90 == pytest.approx(0.9, abs=0.06)
    inside = (GRID > 0.04) & (GRID < 0.46)
    assert np.abs(curve.quantiles[2] - printed(GRID, 0))[inside].mean() < 0.04
    assert 0.7 < row(config, curve).on < 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": "dropout"}, "method"),
        ({"variant": "neither"}, "variant"),
        *(({name: 0}, name) for name in ("points", "hidden", "steps", "batch_size", "draws")),
        *(({name: 0.0}, name) for name in ("learning_rate", "prior_sigma", "sigma")),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"The '{named}' parameter of Config must be"):
        Config(**change)


# --- the table and the picture ---------------------------------------------------------------------------------------


def curve_of(widths: Any) -> Curve:
    """A curve whose 5-95 % band has these widths around 0."""
    half = np.asarray(widths) / 2
    return Curve(np.stack([-half, -half / 2, 0 * half, half / 2, half]), half[None], 0.4, 0.8)


def published_widths() -> Any:
    panel = published("regression_bayes_by_backprop")
    return np.interp(GRID, panel["x"], panel["upper"] - panel["lower"])


def test_the_width_of_a_band_is_that_of_the_nearest_input() -> None:
    curve = curve_of(np.arange(len(GRID)))
    for number, x in enumerate(GRID):
        assert curve.width(x) == number
    assert (curve.width(-5), curve.width(0.02), curve.width(5)) == (0, 4, len(GRID) - 1)


def test_a_row_has_the_narrowest_off_the_data_and_the_mean_on_it() -> None:
    config, theirs = Config("standard", "formula", seed=3), published_widths()
    away, inside = (GRID < -0.1) | (GRID > 0.7), (GRID >= 0) & (GRID <= 0.5)
    assert (away.sum(), inside.sum()) == (12, 11)
    truth = np.array([noise_width("formula", x) for x in GRID])
    widths = np.where(away, 3 * theirs, np.where(inside, 1.5 * truth, 0.0))
    made = row(config, curve_of(widths))
    assert (made.method, made.variant, made.seed) == ("standard", "formula", 3)
    assert (made.coverage50, made.coverage90) == (0.4, 0.8)
    assert (made.off, made.on) == (pytest.approx(3), pytest.approx(1.5))
    for x in (-0.2, -0.15, 0.75, 1.2):
        place = int(np.abs(GRID - x).argmin())
        changed = widths.copy()
        changed[place] = 0.5 * theirs[place]
        assert row(config, curve_of(changed)).off == pytest.approx(0.5)
    for x in (0.0, 0.25, 0.5):
        place = int(np.abs(GRID - x).argmin())
        changed = widths.copy()
        changed[place] = 4 * truth[place]
        made = row(config, curve_of(changed))
        mean = (1.5 * truth[inside].sum() + 2.5 * truth[place]) / truth[inside].sum()
        assert (made.off, made.on) == (pytest.approx(3), pytest.approx(mean))
    # Neither counts in between.
    for x in (-0.1, -0.05, 0.55, 0.7):
        changed = widths.copy()
        changed[int(np.abs(GRID - x).argmin())] = 1e-6
        assert row(config, curve_of(changed)).off == pytest.approx(3)
        changed[int(np.abs(GRID - x).argmin())] = 1e6
        assert row(config, curve_of(changed)).on == pytest.approx(1.5)


def test_figure_5_is_a_table_pictures_and_a_line(tmp_path: Path) -> None:
    curves = {
        Config(method, variant, seed=seed): curve_of(published_widths() * (1 + seed))
        for seed in (1, 0)
        for variant in regression.VARIANTS
        for method in regression.METHODS
    }
    line = regression.fig5(curves, tmp_path / "new", "bbb test")
    names = ["fig5-curves.json", "fig5.csv", "fig5.json", "fig5.png", "fig5.svg"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    about = json.loads((tmp_path / "new" / "fig5.json").read_text())
    assert (about["line"], about["command"]) == (line, "bbb test")
    found = list(csv.DictReader((tmp_path / "new" / "fig5.csv").read_text().splitlines()))
    assert len(found) == len(curves)
    for written, (config, curve) in zip(found, curves.items(), strict=True):
        expected = row(config, curve)
        assert [written[name] for name in ("method", "variant", "seed")] == [
            config.method,
            config.variant,
            str(config.seed),
        ]
        for name in ("off", "on", "coverage50", "coverage90"):
            assert float(written[name]) == pytest.approx(getattr(expected, name), rel=1e-3)
    for variant in regression.VARIANTS:
        # The narrowest and the widest of both seeds.
        widest = max(row(config, curve).on for config, curve in curves.items() if config.variant == variant)
        for name in ("Bayes by Backprop", "Standard network"):
            said = line[line.index(f"{name}, {variant}, 2 seeds: ") :].split(" of held-out points.")[0]
            assert "at least 1.00 times" in said
            assert f"at most {widest:.2f} times" in said
            assert said.endswith("hold 40 % and 80 %")


def test_curves_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "some" / "curves.json"
    regression.write_curves(path, curves())
    for (config, curve), (was, before) in zip(regression.read_curves(path).items(), curves().items(), strict=True):
        assert config == was
        np.testing.assert_array_equal(curve.quantiles, before.quantiles)
        np.testing.assert_array_equal(curve.drawn, before.drawn)
        assert (curve.coverage50, curve.coverage90) == (before.coverage50, before.coverage90)
