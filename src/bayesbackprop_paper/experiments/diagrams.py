"""Diagrams of evaluations."""

import io
import itertools
from collections.abc import Mapping
from pathlib import Path

from bayesbackprop import _page
from bayesbackprop._errors import invalid
from bayesbackprop._files import write_atomically
from bayesbackprop.evaluation import Calibration

SUFFIXES = (".png", ".svg")


def check_suffix(path: Path, owner: str) -> None:
    """Refuse a file that is neither PNG nor SVG by its suffix."""
    if path.suffix.lower() not in SUFFIXES:
        raise invalid("path", owner, f"a file with the suffix {' or '.join(SUFFIXES)}", str(path))


def reliability(calibrations: Mapping[str, Calibration], path: Path) -> None:
    """Draw accuracy against confidence, and how many examples have each confidence, into a PNG or SVG file.

    On the diagonal a prediction of p is true in the fraction p of cases; below it the network is too sure of itself.
    """
    check_suffix(path, "reliability")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError('Diagrams need matplotlib: pip install "bayesbackprop[paper]"') from error
    figure = Figure(figsize=(6, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    labels = {name: f"{name}, ECE {100 * calibration.ece:.2f} %" for name, calibration in calibrations.items()}
    _page.reliability(upper, {labels[name]: calibration for name, calibration in calibrations.items()})
    for calibration, colour in zip(calibrations.values(), itertools.cycle(_page.COLOURS), strict=False):
        bins = len(calibration.examples)
        edges = [number / bins for number in range(bins + 1)]
        shares = (calibration.examples / calibration.examples.sum()).tolist()
        lower.stairs(shares, edges, color=colour)
    upper.set(xlabel="")
    figure.legend(loc="outside upper center", fontsize="x-small")  # where it hides nothing
    lower.set(xlabel="confidence", ylabel="share of examples", yscale="log")
    with matplotlib.rc_context({"svg.hashsalt": "bayesbackprop"}):  # so that the same figure is the same file
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        image = io.BytesIO()
        figure.savefig(image, format=path.suffix[1:].lower(), dpi=150, metadata=metadata)
    write_atomically(path, image.getvalue())
