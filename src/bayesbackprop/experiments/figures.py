"""Figures 2, 3 and 4: ours over the published curves. Each is a table and a picture, in PNG and SVG."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bayesbackprop.bayesian import Bayesian
from bayesbackprop.experiments.mnist import MODEL
from bayesbackprop.experiments.networks import from_file
from bayesbackprop.files import read_checkpoint, write_atomically
from bayesbackprop.pruning import snr
from bayesbackprop.train import BEST, METRICS

Table = Mapping[str, Sequence[float] | NDArray[np.floating[Any]]]

# One colour and one name for each method, in every figure.
STYLE = {
    "bbb-mixture": ("#3f51b5", "Bayes by Backprop", "BBB"),
    "dropout": ("#e67e22", "dropout", "Dropout"),
    "sgd": ("#7f8c8d", "SGD", "SGD"),
}

# Where the published densities were read off.
_WEIGHTS = np.arange(-0.4, 0.4 + 1e-9, 0.01)
_SNR = np.arange(-5.0, 2.0, 0.1)


def published(name: str) -> dict[str, NDArray[np.float64]]:
    """A published curve by column."""
    text = (files("bayesbackprop.experiments") / "published" / f"fig_{name}.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    return {column: np.array([float(row[column]) for row in rows]) for column in rows[0]}


def write_csv(path: Path, table: Table) -> None:
    """Write columns of equal length."""
    lines = [",".join(table), *(",".join(f"{value:.6g}" for value in row) for row in zip(*table.values(), strict=True))]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def fig2(folders: Mapping[str, Path], results: Path) -> str:
    """The test error as training progresses."""
    figure, axes = _figure("epoch", "test error %")
    said: list[str] = []
    columns: dict[str, list[float]] = {}
    for method, folder in folders.items():
        colour, label, theirs = STYLE[method]
        records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        errors = [record["test_error"] for record in records]
        columns[method] = errors
        axes.plot(range(1, len(errors) + 1), errors, color=colour, label=label)
        curve = published(f"error_{theirs}")
        axes.plot(curve["epoch"], curve["test_error_pct_mean"], color=colour, linestyle=":", label=f"{label}, paper")
        said.append(f"{label} {min(errors):.2f} % at best and {errors[-1]:.2f} % at the end of {len(errors)} epochs")
    longest = max(map(len, columns.values()))
    padded = {name: errors + [float("nan")] * (longest - len(errors)) for name, errors in columns.items()}
    write_csv(results / "fig2.csv", {"epoch": range(1, longest + 1), **padded})
    axes.set_xscale("log")
    axes.set_ylim(1.0, 3.0)
    return _finish(figure, axes, results / "fig2", "Test error (2x1200): " + "; ".join(said) + ".")


def fig3(folders: Mapping[str, Path], results: Path) -> str:
    """Densities of the trained weights: those of the plain networks, and a draw of Bayes by Backprop's."""
    figure, axes = _figure("weight", "density")
    columns: dict[str, NDArray[np.float64]] = {"weight": _WEIGHTS}
    for method, folder in folders.items():
        colour, label, theirs = STYLE[method]
        density = _density(trained_weights(folder), _WEIGHTS)
        columns[method] = density
        axes.plot(_WEIGHTS, density, color=colour, label=label)
        curve = published(f"weight_density_{theirs}")
        axes.plot(curve["weight"], curve["density"], color=colour, linestyle=":", label=f"{label}, paper")
    write_csv(results / "fig3.csv", columns)
    axes.set_yscale("log")
    axes.set_ylim(1e-3, None)
    spreads = ", ".join(f"{STYLE[m][1]} {trained_weights(f).std():.3f}" for m, f in folders.items())
    return _finish(figure, axes, results / "fig3", f"Weights (2x1200): standard deviations {spreads}.")


def fig4(folders: Mapping[str, Path], results: Path) -> str:
    """Density and distribution function of the signal-to-noise ratio |mu| / sigma, on a logarithmic scale."""
    logs = snr(bayesian_in(folders["bbb-mixture"])).clamp(min=1e-12).log10().double().numpy()
    density, below = _density(logs, _SNR), np.array([(logs <= level).mean() for level in _SNR])
    write_csv(results / "fig4.csv", {"log10_snr": _SNR, "density": density, "cdf": below})
    figure, axes = _figure("log10(|mu| / sigma)", "density and CDF")
    colour = STYLE["bbb-mixture"][0]
    axes.plot(_SNR, density, color=colour, label="density")
    axes.plot(_SNR, below, color=colour, linestyle="--", label="CDF")
    curve, cdf = published("snr_density"), published("snr_cdf")
    axes.plot(curve["log10_snr"], curve["density"], color="black", linestyle=":", label="density, paper")
    axes.plot(cdf["log10_snr"], cdf["cdf"], color="black", linestyle="-.", linewidth=0.8, label="CDF, paper")
    cut = float(np.quantile(logs, 0.75))
    axes.axvline(cut, color="#c0392b", linewidth=1, label="75 % of ours")
    return _finish(
        figure, axes, results / "fig4", f"SNR (2x1200): three quarters of the weights lie below 10^{cut:.2f}."
    )


def trained_weights(folder: Path) -> NDArray[np.float64]:
    """All weights of the selected network of a run; of a Bayesian one a draw."""
    if (folder / MODEL).exists():
        weights = list(bayesian_in(folder).draw().weights.values())
    else:
        weights = [value for name, value in read_checkpoint(folder / BEST)[0].items() if ".net." in name]
    return torch.cat([weight.detach().flatten() for weight in weights]).double().numpy()


def bayesian_in(folder: Path) -> Bayesian:
    """The selected model of a run."""
    model = from_file(folder / MODEL)
    assert isinstance(model, Bayesian)
    return model


def _density(values: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """The density at the middles of equal bins."""
    width = grid[1] - grid[0]
    counts, _ = np.histogram(values, np.append(grid - width / 2, grid[-1] + width / 2))
    return np.asarray(counts / (len(values) * width))


def _figure(x: str, y: str) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finish(figure: Any, axes: Any, path: Path, line: str) -> str:
    from matplotlib import pyplot as plt

    axes.legend(frameon=False, fontsize="small")
    for suffix in ("png", "svg"):
        image = io.BytesIO()
        # No dates: the same numbers give the same file.
        figure.savefig(image, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
        write_atomically(path.with_suffix(f".{suffix}"), image.getvalue())
    plt.close(figure)
    return line
