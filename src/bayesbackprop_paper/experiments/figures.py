"""Figures 2, 3 and 4: ours over the published curves.

Each is a table, a picture in PNG and SVG, and a line on how ours differs from the paper's, and why. Figures 2 and 3
have a curve for each method; those of methods that were not trained again stay as the table has them.
"""

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bayesbackprop._errors import Described, invalid
from bayesbackprop._files import kind_of, read_checkpoint, write_atomically
from bayesbackprop._networks import from_file
from bayesbackprop.model import Bayesian
from bayesbackprop.pruning import snr
from bayesbackprop_paper.experiments.mnist import MODEL, Config
from bayesbackprop_paper.experiments.recipe import BEST, read_metrics

Table = Mapping[str, Sequence[float] | NDArray[np.floating[Any]]]

# One colour and one name for each method, in every figure.
STYLE = {
    "bbb-mixture": ("#3f51b5", "Bayes by Backprop", "BBB"),
    "dropout": ("#e67e22", "dropout", "Dropout"),
    "sgd": ("#7f8c8d", "SGD", "SGD"),
}

OURS = STYLE["bbb-mixture"][0]

# Where the published densities were read off.
_WEIGHTS = np.arange(-0.4, 0.4 + 1e-9, 0.01)
_SNR = np.arange(-50, 20) / 10

# How the paper trained the networks that its figures show.
_EPOCHS, _UNITS = 600, 1200

_OPTIMISERS = {"adam": "Adam", "sgd": "SGD"}


def published(name: str) -> dict[str, NDArray[np.float64]]:
    """A published curve by column."""
    return _columns((files("bayesbackprop_paper.experiments") / "published" / f"fig_{name}.csv").read_text())


def read_csv(path: Path) -> dict[str, NDArray[np.float64]]:
    """What :func:`write_csv` wrote."""
    return _columns(path.read_text())


def _columns(text: str) -> dict[str, NDArray[np.float64]]:
    rows = list(csv.DictReader(io.StringIO(text)))
    return {column: np.array([float(row[column]) for row in rows]) for column in rows[0]}


def write_csv(path: Path, table: Table) -> None:
    """Write columns of equal length."""
    lines = [",".join(table), *(",".join(f"{value:.6g}" for value in row) for row in zip(*table.values(), strict=True))]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def fig2(folders: Mapping[Config, Path], results: Path, recipe: Config) -> str:
    """The test error as training progresses; ``recipe`` is that of Bayes by Backprop."""
    figure, axes = start("epoch", "test error %", _sizes(folders))
    said: list[str] = []
    columns = {name: column[np.isfinite(column)] for name, column in _known(results / "fig2.csv", "epoch").items()}
    for method, those in _by_method(folders).items():
        runs = np.array([_test_errors(folder) for folder in those])
        columns |= {method: runs.mean(0), f"{method} lowest": runs.min(0), f"{method} highest": runs.max(0)}
    for method in filter(columns.__contains__, STYLE):
        colour, label, theirs = STYLE[method]
        errors = columns[method]
        epochs = range(1, len(errors) + 1)
        axes.plot(epochs, errors, marker="." if len(errors) < 5 else "", color=colour, label=label)
        if f"{method} lowest" in columns:
            band = columns[f"{method} lowest"], columns[f"{method} highest"]
            axes.fill_between(epochs, *band, color=colour, alpha=0.15, lw=0)
        curve = published(f"error_{theirs}")
        printed, paper = curve["epoch"], curve["test_error_pct_mean"]
        axes.plot(printed, paper, color=colour, linestyle=":", label=f"{label}, paper")
        epoch = np.clip(len(errors), printed[0], printed[-1])
        said.append(
            f"{label} {errors[-1]:.2f} % at epoch {len(errors)}, the paper's "
            f"{np.interp(epoch, printed, paper):.2f} % at epoch {epoch:.0f} and {paper[-1]:.2f} % at {printed[-1]:.0f}"
        )
    longest = max(map(len, columns.values()))
    padded = {name: [*column, *[float("nan")] * (longest - len(column))] for name, column in columns.items()}
    write_csv(results / "fig2.csv", {"epoch": range(1, longest + 1), **padded})
    axes.set_xscale("log")
    axes.set_ylim(1.0, max(3.0, *(1.1 * errors[-1] for errors in columns.values())))
    schedule = recipe.schedule
    why = (
        "Ours have optimisers, rates and numbers of epochs of their own (Bayes by Backprop: "
        f"{_OPTIMISERS[schedule.optimiser]}, {schedule.epochs} epochs); the paper's had plain SGD and {_EPOCHS} epochs."
    )
    return finish(figure, axes, results / "fig2", f"Test error, {_sizes(folders)}: {'; '.join(said)}. {why}")


def fig3(folders: Mapping[Config, Path], results: Path, recipe: Config) -> str:
    """Densities of the trained weights: those of the plain networks, and a draw of Bayes by Backprop's."""
    figure, axes = start("weight", "density", _sizes(folders))
    said: list[str] = []
    columns = _known(results / "fig3.csv", "weight")
    for method, those in _by_method(folders).items():
        columns[method] = _density(np.concatenate([trained_weights(folder) for folder in those]), _WEIGHTS)
    for method in filter(columns.__contains__, STYLE):
        colour, label, theirs = STYLE[method]
        density = columns[method]
        axes.plot(_WEIGHTS, density, color=colour, label=label)
        curve = published(f"weight_density_{theirs}")
        axes.plot(curve["weight"], curve["density"], color=colour, linestyle=":", label=f"{label}, paper")
        ours, paper = spread(_WEIGHTS, density), spread(curve["weight"], curve["density"])
        said.append(f"{label} {ours:.3f}, {'wider' if ours > paper else 'narrower'} than the paper's {paper:.3f}")
    write_csv(results / "fig3.csv", {"weight": _WEIGHTS, **columns})
    axes.set_yscale("log")
    axes.set_ylim(1e-3, None)
    why = f"Ours start as He et al. proposed; a draw is no narrower than its noise, which {_noise(recipe)}"
    line = f"Standard deviation of the weights within ±{_WEIGHTS[-1]:g}, {_sizes(folders)}: {'; '.join(said)}. {why}"
    return finish(figure, axes, results / "fig3", line)


def fig4(folders: Mapping[Config, Path], results: Path, recipe: Config) -> str:
    """Density and distribution function of the signal-to-noise ratio |mu| / sigma, on a logarithmic scale."""
    ratios = torch.cat([snr(bayesian_in(folder)) for folder in folders.values()])
    logs = ratios.clamp(min=1e-12).log10().double().numpy()
    density, below = _density(logs, _SNR), np.array([(logs <= level).mean() for level in _SNR])
    write_csv(results / "fig4.csv", {"log10_snr": _SNR, "density": density, "cdf": below})
    figure, axes = start("log10(|mu| / sigma)", "density and CDF", _sizes(folders))
    axes.plot(_SNR, density, color=OURS, label="density")
    axes.plot(_SNR, below, color=OURS, linestyle="--", label="CDF")
    curve, cdf = published("snr_density"), published("snr_cdf")
    axes.plot(curve["log10_snr"], curve["density"], color="black", linestyle=":", label="density, paper")
    axes.plot(cdf["log10_snr"], cdf["cdf"], color="black", linestyle="-.", linewidth=0.8, label="CDF, paper")
    ours, paper = np.quantile(logs, [0.5, 0.75]), np.interp([0.5, 0.75], cdf["cdf"], cdf["log10_snr"])
    axes.axvline(ours[1], color="#c0392b", linewidth=1, label="75 % of ours")
    line = (
        f"Log10 of the signal-to-noise ratio, {_sizes(folders)}: median {ours[0]:.2f}, the paper's {paper[0]:.2f}; "
        f"three quarters of the weights below {ours[1]:.2f}, the paper's {paper[1]:.2f}; humps at "
        f"{_list(humps(_SNR, density))}, the paper's at {_list(humps(curve['log10_snr'], curve['density']))}. "
        f"The ratio is the lower the stronger the noise, which {_noise(recipe)}"
    )
    return finish(figure, axes, results / "fig4", line)


def _known(path: Path, first: str) -> dict[str, NDArray[np.float64]]:
    """The columns behind the first of a table that may be there."""
    return {name: column for name, column in (read_csv(path) if path.exists() else {}).items() if name != first}


def spread(grid: NDArray[np.float64], density: NDArray[np.float64]) -> float:
    """The standard deviation of a density at equal steps."""
    mean = np.average(grid, weights=density)
    return float(np.sqrt(np.average((grid - mean) ** 2, weights=density)))


def humps(grid: NDArray[np.float64], density: NDArray[np.float64]) -> list[float]:
    """Where a density has humps: no lower than 5 % of the highest, and 10 % above the ways to higher ones."""
    found: list[float] = []
    for index, height in enumerate(density):
        before, after = np.flatnonzero(density[:index] >= height), np.flatnonzero(density[index:] > height)
        left = density[before[-1] : index].min() if len(before) else 0.0
        right = density[index : index + after[0]].min() if len(after) else 0.0
        if height >= 0.05 * density.max() and max(left, right) <= 0.9 * height:
            found.append(float(grid[index]))
    return found


def trained_weights(folder: Path) -> NDArray[np.float64]:
    """All weights of the selected network of a run; of a Bayesian one a draw."""
    if kind_of(folder / MODEL, "trained_weights") == "model":
        weights = list(bayesian_in(folder).draw().weights.values())
    else:
        tensors, _ = read_checkpoint(folder / BEST)
        weights = [value for name, value in tensors.items() if ".net." in name]
    return torch.cat([weight.detach().flatten() for weight in weights]).double().numpy()


def bayesian_in(folder: Path) -> Bayesian:
    """The selected model of a run."""
    model = from_file(folder / MODEL)
    if not isinstance(model, Bayesian):
        got = Described(f"{folder / MODEL}, a plain network")
        raise invalid("run", "bayesian_in", "that of a Bayesian network", got)
    return model


def _density(values: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """The density at the middles of equal bins."""
    width = grid[1] - grid[0]
    counts, _ = np.histogram(values, np.append(grid - width / 2, grid[-1] + width / 2))
    return np.asarray(counts / (len(values) * width))


def _by_method(folders: Mapping[Config, Path]) -> dict[str, list[Path]]:
    """The folders of all seeds of each method."""
    found: dict[str, list[Path]] = {}
    for config, folder in folders.items():
        found.setdefault(config.method, []).append(folder)
    return found


def _test_errors(folder: Path) -> list[float]:
    records = read_metrics(folder)
    if any("test_error" not in record for record in records):
        raise ValueError(f"The run in {folder} has no test errors by epoch: remove it or choose other --runs.")
    return [record["test_error"] for record in records]


def _sizes(configs: Collection[Config]) -> str:
    (units,) = {config.units for config in configs}
    seeds = len({config.seed for config in configs})
    ours = f"2x{_UNITS}" if units == _UNITS else f"2x{units} (the paper's 2x{_UNITS})"
    return ours if seeds == 1 else f"{ours}, {seeds} seeds"


def _noise(config: Config) -> str:
    behind = "" if config.hidden_sigma is None else f" ({config.hidden_sigma / config.units**0.5:.2g} in hidden layers)"
    ours = f"starts at {config.sigma:g}{behind} in ours and has {config.schedule.epochs} epochs to change"
    return f"{ours}; in the paper's it had {_EPOCHS}, from a start of its own."


def _list(values: Iterable[float]) -> str:
    return " and ".join(f"{value:.1f}" for value in values)


def start(x: str, y: str, title: str = "") -> tuple[Any, Any]:
    """A figure and its axes, with these labels."""
    figure, ((axes,),) = panels(x, y, 1, 1)
    axes.set_title(title, fontsize="medium")
    return figure, axes


def panels(x: str, y: str, rows: int, columns: int) -> tuple[Any, Any]:
    """A figure and its axes, row by row, all with these labels."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    size = (7, 4.2) if rows == columns == 1 else (5 * columns, 3.6 * rows)
    figure, every = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes in every.flat:
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, every


def finish(
    figure: Any, shown: Any, path: Path, line: str = "", *, suffixes: Sequence[str] = ("png", "svg"), **legend: Any
) -> str:
    """Write a figure, with the legend of what is ``shown``, axes or all; gives ``line`` back."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    shown.legend(frameon=False, fontsize="small", **legend)
    for suffix in suffixes:
        image = io.BytesIO()
        # No dates, and names that are not random: the same numbers give the same file.
        with mpl.rc_context({"svg.hashsalt": "bayesbackprop"}):
            figure.savefig(image, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
        write_atomically(path.with_suffix(f".{suffix}"), image.getvalue())
    plt.close(figure)
    return line
