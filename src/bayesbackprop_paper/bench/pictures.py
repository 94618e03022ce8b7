"""Pictures of what was measured: ratios as bars, curves with the least that the machine could take, and regrets."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bayesbackprop_paper.bench import regrets
from bayesbackprop_paper.bench.bandits import OURS
from bayesbackprop_paper.bench.report import Picture, Row, by_table, figure
from bayesbackprop_paper.experiments.figures import STYLE, finish, panels, start

# Of ours, other libraries and plain networks.
_COLOURS = {name: STYLE[key][0] for name, key in (("ours", "bbb-mixture"), ("others", "dropout"), ("plain", "sgd"))}
_LABELS = {"ours": "bayesbackprop", "others": "other libraries", "plain": "plain PyTorch"}

# Inches of a line of bars, and around all of them.
_LINE, _AROUND = 0.23, 1.3

_AXES = {"units": "units of each hidden layer", "batch": "examples of the batch", "draws": "draws"}


def draw(rows: Sequence[Row], folder: Path, name: str) -> list[Picture]:
    """Draw what the rows of a run show into ``folder``, in files whose names begin with ``name``."""
    folder.mkdir(parents=True, exist_ok=True)
    if rows[0].axis is None:
        return [_bars(rows, folder, name)]
    return [_curves(list(each), folder, f"{name}-{axis}") for axis, each in groupby(rows, lambda row: row.axis or "")]


def _bars(rows: Sequence[Row], folder: Path, name: str) -> Picture:
    """A bar from 1, which is plain, to the ratio of each row that has one."""
    lines: list[tuple[str, Row | None]] = []  # titles of tables, and rows
    for title, group in by_table(rows):
        shown = [row for row in group if _ratio(row) not in (None, 1.0)]
        lines += [(title, None), *((row.name, row) for row in shown)] if shown else []
    drawing, axes = start("ratio (1: as quick as what it is compared with)", "")
    drawing.set_size_inches(8, _LINE * len(lines) + _AROUND)
    labelled: set[str] = set()
    for place, (_, row) in enumerate(lines):
        ratio = None if row is None else _ratio(row)
        if row is not None and ratio is not None:
            kind = _kind(row)
            label = _LABELS[kind] if kind not in labelled else None
            labelled.add(kind)
            axes.barh(place, ratio - 1, left=1, color=_COLOURS[kind], label=label)
            side = 1 if ratio > 1 else -1
            place_of_text = {"xytext": (4 * side, 0), "textcoords": "offset points", "va": "center"}
            aligned = "left" if side > 0 else "right"
            axes.annotate(figure(ratio), (ratio, place), ha=aligned, fontsize="x-small", **place_of_text)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_ylim(-0.7, len(lines) - 0.3)
    _number(axes.xaxis)
    axes.set_yticks(range(len(lines)), [text for text, _ in lines], fontsize="x-small")
    for text, (_, row) in zip(axes.get_yticklabels(), lines, strict=True):
        text.set_fontweight("bold" if row is None else "normal")
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    finish(drawing, drawing, folder / name, suffixes=["png"], loc="outside upper right", ncols=len(labelled))
    return Picture("Each time divided by the one that the table names", f"{folder.name}/{name}.png")


def _ratio(row: Row) -> float | None:
    return next((ratio for ratio in (row.ratio, row.ratio_passes, row.ratio_sgd) if ratio is not None), None)


def _kind(row: Row) -> str:
    if row.name.startswith("bayesbackprop"):
        return "ours"
    return "plain" if row.name.startswith(("plain", "sgd", "dropout", "passes")) else "others"


def _number(axis: Any, digits: Sequence[float] = (1, 2, 5)) -> None:
    """Write the numbers of a logarithmic axis as they are: 0.5, 1, 20."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _curves(rows: Sequence[Row], folder: Path, name: str) -> Picture:
    """On the left times, with the machine's limits, on the right ratios to the plain network."""
    axis = str(rows[0].axis)
    drawing, ((left, right),) = panels(_AXES[axis], "milliseconds", 1, 2)
    by_name = {kind: [row for row in rows if _kind(row) == kind] for kind in ("plain", "ours")}
    places = [getattr(row, axis) for row in by_name["plain"]]
    limits: dict[str, list[float]] = {}
    for kind, each in by_name.items():
        colour, label = _COLOURS[kind], _LABELS[kind]
        times, limits[kind] = [row.milliseconds for row in each], [row.limit or 0 for row in each]
        lower, upper = zip(*(row.quartiles or (0, 0) for row in each), strict=True)
        left.plot(places, times, marker=".", color=colour, label=label)
        left.fill_between(places, lower, upper, color=colour, alpha=0.15, lw=0)
        wide = 3 if kind == "plain" else 1.5  # to be seen behind ours, which is often the same
        left.plot(places, limits[kind], color=colour, linestyle=":", lw=wide, label=f"{label}, this machine's limit")
    right.plot(places, [row.ratio for row in by_name["ours"]], marker=".", color=_COLOURS["ours"], label="measured")
    ratios = [ours / plain for ours, plain in zip(limits["ours"], limits["plain"], strict=True)]
    right.plot(places, ratios, color=_COLOURS["ours"], linestyle=":", label="of the limits")
    right.axhline(1, color=_COLOURS["plain"], linewidth=0.8)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(places, map(str, places), fontsize="small")
        axes.minorticks_off()
    left.set_yscale("log")
    _number(left.yaxis)
    if axis == "draws":  # which may take a fraction of as many passes
        right.set_yscale("log")
        _number(right.yaxis)
    else:
        right.set_ylim(0, None)
    right.set_ylabel("times plain PyTorch")
    right.legend(frameon=False, fontsize="small")
    finish(drawing, left, folder / name, suffixes=["png"])
    return Picture(f"{rows[0].table}: over {_AXES[axis]}", f"{folder.name}/{name}.png")


def dots(comparison: regrets.Comparison, folder: Path, name: str) -> Picture:
    """A panel for each environment: a dot for each seed and a line at the mean, by agent."""
    folder.mkdir(parents=True, exist_ok=True)
    environments = list(comparison.by_environment())
    agents = list(dict.fromkeys(row.agent for row in comparison.rows))
    drawing, every = panels("", "", -(-len(environments) // 2), 2)
    drawing.set_size_inches(10, (_LINE * len(agents) + 0.6) * len(every) + _AROUND)
    for number, axes in enumerate(every.flat):
        axes.set_visible(number < len(environments))
    for (environment, rows), axes in zip(environments, every.flat, strict=False):
        best = regrets.best_of(rows)
        if best is not None and best.mean > 0:
            axes.axvspan(best.mean, regrets.NEAR * best.mean, color="black", alpha=0.12, lw=0)
        for row in rows:
            place, colour = agents.index(row.agent), _COLOURS["ours" if row.agent in OURS else "others"]
            filled = colour if row.is_whole else "none"
            axes.scatter(
                row.regrets, [place] * len(row.regrets), s=14, alpha=0.55, edgecolors=colour, facecolors=filled
            )
            axes.plot([row.mean] * 2, [place - 0.38, place + 0.38], color=colour, linewidth=2)
        if min(regret for row in rows for regret in row.regrets) > 0:
            axes.set_xscale("log")
            _number(axes.xaxis, (1, 1.5, 2, 3, 4, 5, 6, 8))
        axes.set_title(environment, fontsize="medium", loc="left")
        axes.set_yticks(range(len(agents)), agents, fontsize="x-small")
        axes.set_ylim(len(agents) - 0.4, -0.6)
        axes.tick_params(axis="x", labelsize="x-small")
        axes.tick_params(axis="y", length=0)
        axes.set_axisbelow(True)
    for kind in ("ours", "others"):
        every.flat[0].scatter([], [], s=14, color=_COLOURS[kind], label=_LABELS[kind])
    drawing.supxlabel(f"regret after {comparison.rows[0].steps:,} steps", fontsize="medium")
    finish(drawing, drawing, folder / name, suffixes=["png"], loc="outside upper right", ncols=2)
    near = f"up to {regrets.NEAR - 1:.0%} more than the best"
    caption = f"Regret by agent: a dot for each seed, hollow if not all runs ended; lines: means; grey: {near}"
    return Picture(caption, f"{folder.name}/{name}.png")
