"""One self-contained page: what a network does not know, what is left of it when pruned, and the paper's figures.

Everything on it is read from files: of runs, and of ``results/``. Plotly draws it, from inside the page, so that it
needs no network. The words and the looks are in ``report.html``.
"""

import base64
import html
import io
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import torch
from numpy.typing import NDArray
from plotly.offline import get_plotlyjs

from bayesbackprop._errors import Described, invalid
from bayesbackprop._files import write_atomically
from bayesbackprop.export import sparse
from bayesbackprop.model import Bayesian
from bayesbackprop.prediction import ClassPredictive
from bayesbackprop.pruning import prune, snr, threshold, weights_left
from bayesbackprop_paper.data import Split
from bayesbackprop_paper.experiments import bandit, figures, regression, table1, table2
from bayesbackprop_paper.experiments.findings import Finding, Grid, findings
from bayesbackprop_paper.experiments.mnist import MODEL
from bayesbackprop_paper.experiments.recipe import Examples, error_percent

# What a folder of a run may hold.
CURVES = "curves.json"
REGRET = "regret.csv"

# What the slider can remove.
FRACTIONS = (*(tenth / 10 for tenth in range(10)), 0.95, 0.97, 0.98, 0.99, 0.995)

_INK, _OURS, _GREY = "#111111", "#3f51b5", "#9aa0a6"

# Of networks of one size each.
_COLOURS = ("#3f51b5", "#16a085", "#c0392b", "#8e44ad")

# The digits to show, the draws to find them by, and those to look at them with.
_DIGITS, _FEW, _MANY = 12, 20, 500

_SIDE = 28


class Section(NamedTuple):
    """A part of the page: its heading, its HTML, and the figures that belong to the elements of these names."""

    title: str
    body: str
    figures: Mapping[str, Any] = {}


def write(runs: Sequence[Path], results: Path, path: Path, test: Split) -> None:
    """Write the page on ``runs``, folders of trained networks, curves and bandits, and on the ``results`` folder.

    Networks are tried on ``test``.
    """
    sections = [section for number, run in enumerate(runs) for section in _of_run(run, test, f"run{number}")]
    sections += paper(results)
    menu = "".join(
        f'<a href="#s{number}">{_text(each.title.split(":")[0])}</a>' for number, each in enumerate(sections)
    )
    bodies = "".join(
        f'<section id="s{number}"><h2>{_text(each.title)}</h2>{each.body}</section>'
        for number, each in enumerate(sections)
    )
    drawn = {name: json.loads(figure.to_json()) for each in sections for name, figure in each.figures.items()}
    template = Template((files("bayesbackprop_paper.experiments") / "report.html").read_text())
    text = template.substitute(menu=menu, sections=bodies, figures=_json(drawn), plotly=get_plotlyjs())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


def _of_run(folder: Path, test: Split, name: str) -> list[Section]:
    sections: list[Section] = []
    if (folder / MODEL).exists():
        model = figures.bayesian_in(folder)
        sections += [unsure(model, test), pruning(model, test, name)]
    if curves := regression.read_curves(folder / CURVES):
        sections.append(Section("It is unsure where it has seen nothing", *curve_panels(curves, name)))
    if (folder / REGRET).exists():
        points = bandit.read(folder / REGRET)
        body = _paragraph(
            "An agent eats each mushroom or leaves it. An edible one gives 5, a poisonous one 5 or -35 at even odds. "
            "Regret is what the agent has lost against one that knows them all. Thompson sampling acts on one network "
            "drawn from the posterior: it explores while it is unsure, and then stops. Dotted: the paper's curves."
        )
        sections.append(
            Section("It explores by itself", _plots([f"{name}-regret"]) + body, {f"{name}-regret": regret(points)})
        )
    if not sections:
        wanted = f"a folder with {MODEL} (bbb train), {CURVES} or {REGRET} (bbb demo)"
        raise invalid("run", "bbb report", wanted, Described(f"{folder}, which has none of them"))
    return sections


# --- digits ----------------------------------------------------------------------------------------------------------


def unsure(model: Bayesian, test: Split) -> Section:
    """The digits with the highest predictive entropy, split into noise and ignorance."""
    entropy = model.predict(test.images, draws=_FEW).entropy
    worst = entropy.argsort(descending=True)[:_DIGITS]
    predicted = model.predict(test.images[worst], draws=_MANY)
    assert isinstance(predicted, ClassPredictive)
    cards = "".join(
        _card(*each)
        for each in zip(
            test.images[worst].numpy(),
            test.labels[worst].tolist(),
            predicted.probs.tolist(),
            predicted.aleatoric.tolist(),
            predicted.epistemic.tolist(),
            strict=True,
        )
    )
    words = (
        f"The {len(worst)} of {len(test.labels):,} unseen digits that the network is least sure about. The bars are "
        f"its probabilities of 0 to 9, averaged over {_MANY} networks drawn from the posterior. The uncertainty, in "
        "nats, has two parts: <b class=noise>noise</b>, on which all drawn networks agree, as for an ambiguous digit; "
        "and <b class=ignorance>ignorance</b>, on which they disagree and which more data would remove."
    )
    return Section("The digits it is least sure about", f"<div class=cards>{cards}</div><p>{words}</p>")


def _card(pixels: NDArray[np.float32], label: int, probs: Sequence[float], noise: float, ignorance: float) -> str:
    said = int(np.argmax(probs))
    bars = "".join(
        f'<div class="bar{" true" if digit == label else ""}" title="{digit}: {p:.0%}">'
        f'<i style="height:{100 * p:.0f}%"></i><span>{digit}</span></div>'
        for digit, p in enumerate(probs)
    )
    share = 100 * noise / max(noise + ignorance, 1e-12)
    verdict = "right" if said == label else "wrong"
    return (
        f'<figure class=card><img alt="a digit, {label}" src="{_image(pixels)}"><div class=bars>{bars}</div>'
        f'<div class=split title="{share:.0f} % noise"><i class=noise style="width:{share:.0f}%"></i>'
        f"<i class=ignorance style='width:{100 - share:.0f}%'></i></div>"
        f"<figcaption>says {said}, is {label}: <b class={verdict}>{verdict}</b><br>"
        f"noise {noise:.2f}, ignorance {ignorance:.2f}</figcaption></figure>"
    )


def _image(pixels: NDArray[np.float32]) -> str:
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, pixels.reshape(_SIDE, _SIDE), cmap="gray_r", format="png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


# --- pruning ---------------------------------------------------------------------------------------------------------


def pruning(model: Bayesian, test: Split, name: str) -> Section:
    """A slider that removes weights, and what that does."""
    steps: list[dict[str, float]] = []
    for fraction in FRACTIONS:
        pruned = prune(model, fraction)
        plain = sparse(pruned)
        steps.append(
            {
                "fraction": fraction,
                "error": error_percent(plain, Examples(*test)),
                "bytes": table2.file_bytes(plain),
                "left": weights_left(pruned),
                "threshold": float(np.log10(max(threshold(model, fraction), 1e-12))),
            }
        )
    logs = snr(model).clamp(min=1e-5).log10()
    heights, edges = torch.histogram(logs.float().cpu(), bins=70)
    middles = (edges[1:] + edges[:-1]) / 2
    histogram = _figure("log10(|mu| / sigma)", "weights")
    histogram.add_bar(x=middles.numpy(), y=heights.numpy(), marker_color=_OURS, name="weights")
    histogram.update_layout(bargap=0.05, showlegend=False)
    curve = _figure("weights removed, %", "test error %")
    shown = [step for step in steps if step["error"] < 4 * steps[0]["error"] + 1]
    _line(curve, [100 * step["fraction"] for step in shown], [step["error"] for step in shown], "this network", _OURS)
    paper = table2.PUBLISHED
    _line(curve, [100 * f for f in paper], list(paper.values()), "the paper's 2x1200", _INK, dash="dot")
    curve.add_scatter(
        x=[0], y=[steps[0]["error"]], mode="markers", marker={"size": 13, "color": "#e67e22"}, name="here"
    )
    middle = next(index for index, step in enumerate(steps) if step["fraction"] == 0.95)
    words = _paragraph(
        "Move the slider to remove weights, those with the lowest |mu| / sigma first: a weight whose mean is small "
        "beside its standard deviation matters little. The size on disk is that of the sparse network that is left."
    )
    body = (
        f"<div class=prune data-steps='{_json(steps)}' data-histogram={name}-snr data-curve={name}-prune>"
        f"<label>removed <output class=fraction></output><input type=range min=0 max={len(steps) - 1} value={middle} "
        'aria-label="weights removed"></label>'
        "<div class=tiles><div><output class=error></output><span>test error</span></div>"
        "<div><output class=left></output><span>weights left</span></div>"
        f"<div><output class=bytes></output><span>on disk</span></div></div></div>"
        + _plots((f"{name}-snr", f"{name}-prune"))
        + words
    )
    return Section("Most weights can go", body, {f"{name}-snr": histogram, f"{name}-prune": curve})


# --- curves and bandits ----------------------------------------------------------------------------------------------


def curve_panels(curves: Mapping[regression.Config, regression.Curve], name: str) -> tuple[str, dict[str, Any]]:
    """The regression curve of each network, with its drawn functions and bands."""
    found: dict[str, Any] = {}
    for number, (config, curve) in enumerate(curves.items()):
        found[f"{name}-curve{number}"] = _curve(config, curve)
    words = _paragraph(
        "600 noisy points, all with 0 < x < 0.5. Each network expects half of new points inside its dark band and 90 % "
        "inside the light one. Thin lines are single networks drawn from the posterior. Dotted: the paper's band."
    )
    return _plots(found) + words, found


def _curve(config: regression.Config, curve: regression.Curve) -> Any:
    title, published, colour = regression.STYLE[config.method]
    points = "as in the figure" if config.variant == "figure" else "by the formula"
    figure = _figure("x", "y", f"{title}, points {points}")
    grid = regression.GRID
    low, quarter, median, three_quarters, high = curve.quantiles
    for lower, upper, opacity, name in ((low, high, 0.15, "5-95 %"), (quarter, three_quarters, 0.35, "25-75 %")):
        x, y = np.concatenate([grid, grid[::-1]]), np.concatenate([upper, lower[::-1]])
        figure.add_scatter(x=x, y=y, fill="toself", mode="none", name=name, fillcolor=_faint(colour, opacity))
    training = regression.points(config.variant, config.points, torch.Generator().manual_seed(config.seed))
    x, y = (column[:, 0].numpy() for column in training)
    figure.add_scatter(x=x, y=y, mode="markers", marker={"size": 3, "color": _GREY}, name="data")
    for number, drawn in enumerate(curve.drawn if len(curve.drawn) > 1 else []):
        line = {"width": 0.7, "color": _faint(colour, 0.6)}
        figure.add_scatter(
            x=grid, y=drawn, mode="lines", line=line, name="drawn networks", legendgroup="drawn", showlegend=not number
        )
    _line(figure, grid, median, "median", colour)
    theirs = figures.published(f"regression_{published}")
    for number, edge in enumerate(("lower", "upper")):
        _line(figure, theirs["x"], theirs[edge], "the paper's", _INK, dash="dot", width=1, showlegend=not number)
    figure.update_yaxes(range=[-1.2, 2.2])
    return figure


def regret(points: Iterable[bandit.Point]) -> Any:
    """Cumulative regrets, over the paper's as far as ours go."""
    figure = _figure("step", "cumulative regret")
    curves, theirs = bandit.means(points), figures.published("bandit_regret")
    last = max(step for steps in curves.values() for step in steps)
    within = theirs["step"] <= last
    for agent, (colour, label, column) in bandit.STYLE.items():
        if agent in curves:
            steps, values = zip(*sorted(curves[agent].items()), strict=True)
            _line(figure, steps, values, label, colour)
            _line(figure, theirs["step"][within], theirs[column][within], f"{label}, paper", colour, dash="dot")
    return figure


# --- the paper -------------------------------------------------------------------------------------------------------


def paper(results: Path) -> list[Section]:
    """Each table and figure that ``results`` holds; what has not been run is missing."""
    sections: list[Section] = []
    for finding in findings(results):
        if (results / f"{finding.name}.csv").exists():
            drawn = _paper_figures(finding.name, results)
            sections.append(Section(finding.title, _plots(drawn) + _words(finding), drawn))
    return sections


def _words(finding: Finding) -> str:
    """What follows the picture, and a fold on how it was made."""
    notes = "".join(map(_paragraph, finding.notes)) + "".join(map(_table, finding.runs))
    commands = "".join(map(_command, finding.commands))
    fold = f"<details><summary>How it was made</summary>{notes}{commands}</details>" if commands else ""
    return _paragraph(finding.sentence) + "".join(map(_table, finding.tables)) + fold


def _paper_figures(name: str, results: Path) -> dict[str, Any]:
    if name == "table1":
        return {name: _errors(results / "table1.csv")}
    if name == "table2":
        found = table2.means(table2.largest(table2.read(results / "table2.csv")), "test_error")
        figure = _figure("weights removed, %", "test error %")
        removed = [100 * fraction for fraction in found]
        _line(figure, removed, list(found.values()), "ours", _OURS)
        _line(figure, removed, [table2.PUBLISHED[each] for each in found], "the paper's", _INK, dash="dot")
        return {name: figure}
    if name == "fig5":
        curves = regression.read_curves(results / "fig5-curves.json")
        return {f"fig5-{number}": _curve(*each) for number, each in enumerate(curves.items())}
    if name == "fig6":
        figure = regret(bandit.read(results / "fig6.csv"))
        figure.update_xaxes(type="log")
        figure.update_yaxes(type="log")
        return {name: figure}
    table = figures.read_csv(results / f"{name}.csv")
    if name == "fig4":
        figure = _figure("log10(|mu| / sigma)", "density and CDF")
        for column, dash in (("density", "solid"), ("cdf", "dash")):
            _line(figure, table["log10_snr"], table[column], column, _OURS, dash=dash)
            theirs = figures.published(f"snr_{column}")
            _line(figure, theirs["log10_snr"], theirs[column], f"{column}, paper", _INK, dash="dot")
        return {name: figure}
    first, x, y, kind = {
        "fig2": ("epoch", "epoch", "test_error_pct_mean", "error"),
        "fig3": ("weight", "weight", "density", "weight_density"),
    }[name]
    figure = _figure(first, "test error %" if name == "fig2" else "density")
    for method, (colour, label, column) in figures.STYLE.items():
        if method in table:
            _line(figure, table[first], table[method], label, colour)
            theirs = figures.published(f"{kind}_{column}")
            _line(figure, theirs[x], theirs[y], f"{label}, paper", colour, dash="dot")
    if name == "fig2":
        figure.update_xaxes(type="log")
        figure.update_yaxes(range=[1, 3])
    else:
        figure.update_yaxes(type="log", range=[-3, 2])
    return {name: figure}


def _errors(path: Path) -> Any:
    """The errors of Table 1: a line for each method, ours filled and the paper's open."""
    cells = table1.summary(table1.read(path))
    figure = _figure("test error %", "")
    for units, colour in zip(sorted({units for _, _, units, _ in cells}), itertools.cycle(_COLOURS), strict=False):
        ours: dict[str, float] = {}
        papers: dict[str, float] = {}
        for (method, temperature, width, epochs), (error, _, _) in cells.items():
            if width == units:
                name = f"{table1.line_of(method, temperature).replace(', ', '<br>')}<br>{epochs} epochs"
                ours[name] = error
                if (paper := table1.published(method, units)) is not None:
                    papers[name] = paper
        for label, found, symbol in ((f"2x{units}", ours, "circle"), (f"2x{units}, paper", papers, "diamond-open")):
            marker = {"color": colour, "symbol": symbol, "size": 10}
            figure.add_scatter(x=list(found.values()), y=list(found), mode="markers", name=label, marker=marker)
    figure.update_yaxes(type="category", tickfont={"size": 10})
    figure.update_layout(height=140 + 70 * len({(method, t, epochs) for method, t, _, epochs in cells}))
    return figure


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{_cell(column)}" for column in grid.columns)
    rows = "".join("<tr>" + "".join(f"<td>{_cell(cell)}" for cell in row) for row in grid.rows)
    return f"{_paragraph(grid.caption)}<div class=scroll><table><thead><tr>{head}<tbody>{rows}</table></div>"


def _cell(words: str) -> str:
    return _text(words).replace("\n", "<br>")


# --- small things ----------------------------------------------------------------------------------------------------


def _figure(x: str, y: str, title: str = "") -> Any:
    figure = go.Figure()
    figure.update_layout(
        template="none",
        title={"text": title, "font": {"size": 15}},
        margin={"l": 56, "r": 12, "t": 40 if title else 12, "b": 44},
        # At the bottom of the whole, so that it never lies on the axis, however low the plot is.
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        xaxis_title=x,
        yaxis_title=y,
    )
    return figure


def _line(
    figure: Any, x: Any, y: Any, name: str, colour: str, dash: str = "solid", width: float = 2, **more: Any
) -> None:
    line = {"color": colour, "dash": dash, "width": width}
    figure.add_scatter(x=np.asarray(x), y=np.asarray(y), mode="lines", name=name, line=line, **more)


def _faint(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _plots(names: Iterable[str]) -> str:
    return f"<div class=pair>{''.join(f'<div class=plot id={name}></div>' for name in names)}</div>"


def _command(words: str) -> str:
    return f"<p class=command><code>{_text(words)}</code></p>"


def _text(words: str) -> str:
    return html.escape(words)


def _paragraph(words: str) -> str:
    return f"<p>{_text(words)}</p>"


def _json(value: Any) -> str:
    """For inside of a page: no tag can end in it, nor an attribute."""
    return json.dumps(value).replace("<", "\\u003c").replace("'", "\\u0027")
