"""How verdicts are shown: tables of text, pictures by matplotlib, and a page that holds both.

Matplotlib is imported when the first picture is drawn: the library does not need it.
"""

import html
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bayesbackprop._errors import check_path
from bayesbackprop._files import write_atomically
from bayesbackprop.evaluation import Calibration

Curve = tuple[Sequence[float], Sequence[float]]

# One colour for each method, told apart by most who see colours differently (Okabe and Ito); ours is the first.
COLOURS = ("#0072b2", "#000000", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999")

# What marks a page as one of ours, which may be replaced.
_MARKER = "<meta name=generator content=bayesbackprop>"

_GRID: dict[str, Any] = {"alpha": 0.25, "linewidth": 0.6}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --faint: #6b7280; --line: #d9dce1; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --faint: #9aa0a6; --line: #3a3f46; --paper: #16181b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
ul { color: var(--faint); margin: .6rem 0 0; padding-left: 1.1rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; }
th { color: var(--faint); font-weight: 500; } .best { font-weight: 700; }
.picture { background: #fff; border-radius: 6px; } .picture svg { width: 100%; height: auto; }
"""


class Table(NamedTuple):
    """A table with a title, words on the left and numbers on the right.

    ``best`` holds the (row, column) of the cells to mark, ``words`` what follows the table.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()
    words: Sequence[str] = ()

    def text(self) -> str:
        """The table as lines; the first column on the left, numbers on the right."""
        marked = [
            [cell + ("*" if (r, c) in self.best else "") for c, cell in enumerate(row)]
            for r, row in enumerate(self.rows)
        ]
        rows = [list(self.columns), *marked] if self.columns else []
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.columns))]
        lines = [
            "  ".join(
                cell.ljust(width) if text else cell.rjust(width)
                for cell, width, text in zip(row, widths, self._left(), strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *(f"  {line}" for line in lines), *self.words])

    def html(self) -> str:
        """The table as part of a page."""
        titles = zip(self.columns, self._left(), strict=True)
        head = "".join(f'<th class="{"text" if text else ""}">{html.escape(title)}</th>' for title, text in titles)
        body = "".join(
            "<tr>" + "".join(self._cell(r, c, cell) for c, cell in enumerate(row)) + "</tr>"
            for r, row in enumerate(self.rows)
        )
        words = "".join(f"<li>{html.escape(line)}</li>" for line in self.words)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        held = f"<div class=scroll>{table}</div>" if self.columns else ""
        return f"<h2>{html.escape(self.title)}</h2>{held}{words and f'<ul>{words}</ul>'}"

    def _left(self) -> list[bool]:
        """Which columns stand on the left: the first, and those that hold words."""
        return [not column or all(_is_text(row[column]) for row in self.rows) for column in range(len(self.columns))]

    def _cell(self, row: int, column: int, cell: str) -> str:
        names = [name for name, has in (("best", (row, column) in self.best), ("text", _is_text(cell))) if has]
        return f'<td class="{" ".join(names)}">{html.escape(cell)}</td>'


def _is_text(cell: str) -> bool:
    return not any(letter.isdigit() for letter in cell[:3]) and cell not in ("", "-")


def figure(panels: Mapping[str, Callable[[Any], None]], *, named: bool) -> Any:
    """A figure with the ``panels`` by title, two in a row; with one legend for all if the curves have names."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError('Pictures need matplotlib: pip install "bayesbackprop[figures]"') from error
    rows = math.ceil(len(panels) / 2)
    made = Figure(figsize=(10, 4.2 * rows + (0.5 if named else 0)), layout="constrained")
    axes = made.subplots(rows, 2, squeeze=False).flatten()
    for (title, panel), place in zip(panels.items(), axes, strict=False):
        panel(place)
        place.set_title(title, loc="left", fontsize=10.5)
        place.spines[["top", "right"]].set_visible(False)
        place.set_axisbelow(True)
    for place in axes[len(panels) :]:
        place.remove()
    if named:
        made.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return made


def reliability(axes: Any, calibrations: Mapping[str, Calibration]) -> None:
    """Accuracy against confidence: on the diagonal a prediction of p is true in the fraction p of cases.

    The area of a dot is in proportion to the examples that it stands for.
    """
    _diagonal(axes)
    for (name, found), colour in zip(calibrations.items(), _colours(calibrations), strict=True):
        held = found.examples > 0
        points = found.confidence[held].tolist(), found.accuracy[held].tolist()
        shares = (found.examples[held] / found.examples.sum()).tolist()
        axes.plot(*points, label=name or None, color=colour, linewidth=1.2, alpha=0.7)
        axes.scatter(*points, [8 + 160 * share for share in shares], color=colour, alpha=0.7, linewidth=0)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.03), ylim=(-0.03, 1.03))
    axes.grid(**_GRID)


def coverage(axes: Any, found: Mapping[str, Curve]) -> None:
    """The fraction of targets in central intervals: on the diagonal those of level c hold the fraction c."""
    _diagonal(axes)
    curves(axes, found, "level of the interval", "fraction of targets in it", marker="o")
    axes.set(xlim=(0, 1), ylim=(0, 1))


def curves(axes: Any, found: Mapping[str, Curve], x: str, y: str, marker: str = "") -> None:
    """A line for each name."""
    for (name, points), colour in zip(found.items(), _colours(found), strict=True):
        axes.plot(*points, label=name or None, color=colour, marker=marker, markersize=4, linewidth=1.6)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(**_GRID)


def dots(axes: Any, found: Mapping[str, Mapping[str, float]], x: str, ends: tuple[float, float] | None = None) -> None:
    """A line for each key of the inner mappings, and on it a dot for each name; between ``ends`` at least."""
    groups = list(next(iter(found.values())))
    step = min(0.16, 0.8 / len(found))
    for number, ((name, values), colour) in enumerate(zip(found.items(), _colours(found), strict=True)):
        at = [place + (number - (len(found) - 1) / 2) * step for place in range(len(groups))]
        axes.plot([values[group] for group in groups], at, "o", label=name or None, color=colour, markersize=5.5)
    for place in range(1, len(groups), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="#000000", alpha=0.04, linewidth=0)
    axes.set_yticks(range(len(groups)), groups)
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel=x, ylim=(len(groups) - 0.5, -0.5))
    axes.grid(axis="x", **_GRID)
    if ends is not None:
        drawn = [value for each in found.values() for value in each.values()]
        axes.set_xlim(min(ends[0], *drawn), max(ends[1], *drawn))


def intervals(
    axes: Any, mean: Sequence[float], low: Sequence[float], high: Sequence[float], y: Sequence[float]
) -> None:
    """True numbers above predicted ones, on the interval of each: on the diagonal a prediction is right."""
    ends = min(*mean, *y), max(*mean, *y)
    _diagonal(axes, ends)
    axes.vlines(mean, low, high, color=COLOURS[0], alpha=0.18, linewidth=2.2, label="90 % interval")
    for is_in, name, colour in ((True, "in it", COLOURS[0]), (False, "outside", COLOURS[5])):
        rows = [row for row, value in enumerate(y) if (low[row] <= value <= high[row]) is is_in]
        points = [mean[row] for row in rows], [y[row] for row in rows]
        axes.plot(*points, "o", color=colour, markersize=3.5, label=f"{name} ({len(rows)})")
    axes.set(xlabel="predicted", ylabel="true")
    axes.legend(frameon=False, fontsize=9)
    axes.grid(**_GRID)


def _diagonal(axes: Any, ends: tuple[float, float] = (0, 1)) -> None:
    axes.plot(ends, ends, color="#9aa0a6", linewidth=1, linestyle=":")


def _colours(names: Mapping[str, Any]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(names))]


def save(
    path: str | os.PathLike[str], title: str, tables: Sequence[Table], drawn: Any, owner: str, lead: Sequence[str] = ()
) -> None:
    """Write one self-contained page: the tables, then the figure; with sentences to lead, they and the figure first."""
    check_path(owner, path=path)
    image = io.StringIO()
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "bayesbackprop"}):  # so that the same figure is the same file
        drawn.savefig(image, format="svg", metadata={"Date": None})
    picture = image.getvalue()[image.getvalue().index("<svg") :]
    picture = f"<div class=picture>{picture}</div>"
    sentences = "".join(f"<p>{html.escape(each)}</p>" for each in lead)
    body = "".join(table.html() for table in tables)
    body = f"{sentences}{picture}{body}" if lead else f"{body}<h2>Pictures</h2>{picture}"
    text = (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>{_MARKER}"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
    )
    write_atomically(Path(path), text.encode())


def is_ours(path: Path) -> bool:
    """Whether a file is a page that :func:`save` wrote."""
    with path.open("rb") as file:
        return _MARKER.encode() in file.read(1000)
