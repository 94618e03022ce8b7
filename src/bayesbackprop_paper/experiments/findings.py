"""What was found, in the order of the paper: of each table and figure a sentence, small tables, and how it was made.

Everything is read from the files in ``results/``. The page of results and the report show the same findings.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from bayesbackprop_paper.experiments import bandit, figures, regression, table1, table2
from bayesbackprop_paper.experiments.mnist import Result
from bayesbackprop_paper.experiments.records import read_rows

# In place of a cell that was not run.
MISSING = "not run"

TITLES = {
    "table1": "Table 1: test error on MNIST",
    "fig2": "Figure 2: test error by epoch",
    "fig3": "Figure 3: density of the trained weights",
    "table2": "Table 2: pruning",
    "fig4": "Figure 4: signal-to-noise ratio of the weights",
    "fig5": "Figure 5: regression",
    "fig6": "Figure 6: regret of the mushroom bandit",
}

# How long the paper trained its networks.
_EPOCHS = 600

# In cells, whose numbers stay on one line on a phone.
_SPACE = "\N{NO-BREAK SPACE}"

# The rows of Table 1 that the paper is about.
_MIXTURE = "bbb-mixture"


class Grid(NamedTuple):
    """A small table. A cell may have two lines, so that a table fits a phone."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Finding(NamedTuple):
    """A table or figure of the paper beside ours.

    ``sentence`` says how ours differs, and why. ``notes``, ``runs`` and ``commands`` say how it was made, for those who
    want to know.
    """

    name: str
    sentence: str = ""
    tables: Sequence[Grid] = ()
    notes: Sequence[str] = ()
    runs: Sequence[Grid] = ()
    commands: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The heading."""
        return TITLES[self.name]


def findings(results: Path) -> list[Finding]:
    """What ``results`` holds; what has not been run is missing."""
    found = {**_table1(results), **_table2(results), **dict(_figures(results))}
    return [found[name] for name in TITLES if name in found]


# --- Table 1 ----------------------------------------------------------------------------------------------------------


def _table1(results: Path) -> dict[str, Finding]:
    rows, made = table1.read(results / "table1.csv"), _read(results / "table1.json")
    if not rows and not made:
        return {}
    sizes = table1.units_of(rows)
    columns = ["", *(f"2x{units}" for units in sizes)]
    errors, nlls, eces = (table1.summary(rows, name) for name in ("test_error", "test_nll", "test_ece"))
    seeds = {number for *_, number in errors.values()}
    lines = sorted({(method, temperature, epochs) for method, temperature, _, epochs in errors})

    def cells(method: str, temperature: float, epochs: int) -> Iterator[str]:
        for units in sizes:
            found = errors.get((method, temperature, units, epochs))
            paper = table1.published(method, units)
            ours = MISSING if found is None else _error(*found, counted=len(seeds) > 1)
            yield ours if paper is None else f"{ours}\npaper{_SPACE}{paper:.2f}"

    def scores(method: str, temperature: float, epochs: int) -> Iterator[str]:
        for units in sizes:
            key = (method, temperature, units, epochs)
            yield f"{nlls[key][0]:.4f}\n{eces[key][0]:.2f} %" if key in nlls else MISSING

    of_seeds = f"over {_count(*seeds)}" if len(seeds) == 1 else "over seeds (how many in brackets)"
    about = (
        f"Test error in %, mean and standard deviation {of_seeds}. The epoch was chosen on the validation set, and so "
        "was the way of predicting, but for the scale mixture from random weights, which predicts by draws."
    )
    of_scores = (
        "The same networks on the test set, means over seeds: negative log-likelihood in nats per image, and below it "
        "the expected calibration error (15 bins)."
    )
    tables = [Grid(about, columns, [[_line(*line), *cells(*line)] for line in lines])]
    scored = [line for line in lines if any((*line[:2], units, line[2]) in nlls for units in sizes)]
    if scored:
        tables.append(Grid(of_scores, columns, [[_line(*line), *scores(*line)] for line in scored]))
    runs = list(_runs(rows, made))
    return {"table1": Finding("table1", _against_the_paper(errors), tables, (), runs, _commands(made))}


def _line(method: str, temperature: float, epochs: int) -> str:
    return f"{table1.line_of(method, temperature)}\n{epochs} epochs"


def _error(error: float, spread: float, seeds: int, *, counted: bool) -> str:
    shown = f"{error:.2f}" if math.isnan(spread) else f"{error:.2f}{_SPACE}±{_SPACE}{spread:.2f}"
    return f"{shown}{_SPACE}({seeds})" if counted else shown


def _against_the_paper(errors: dict[tuple[str, float, int, int], tuple[float, float, int]]) -> str:
    """How the errors of the paper's own method differ from its own, and why."""
    differences: dict[str, list[float]] = {}
    epochs_of: set[int] = set()
    for (method, temperature, units, epochs), (error, _, _) in errors.items():
        paper = table1.published(method, units)
        if paper is not None and method.startswith(_MIXTURE):
            cost = "with the paper's cost" if temperature == 1 else f"at temperature {temperature:g}"
            begun = table1.NAMES[method].removeprefix(table1.NAMES[_MIXTURE])
            differences.setdefault(f"{cost}{begun} ({epochs} epochs)", []).append(error - paper)
            epochs_of.add(epochs)
    if not differences:
        return ""
    said = "; ".join(f"{_range(each)} {name}" for name, each in differences.items())
    trained = " to ".join(str(epochs) for epochs in sorted({min(epochs_of), max(epochs_of)}))
    return (
        f"The error of Bayes by Backprop with the scale mixture, less the paper's, in points: {said}. We trained for "
        f"{trained} epochs with optimisers and learning rates of our own, the paper for {_EPOCHS} with plain SGD."
    )


def _range(values: Sequence[float]) -> str:
    shown = list(dict.fromkeys(_signed(value) for value in (min(values), max(values))))
    return " to ".join(shown)


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}".replace("-", "\N{MINUS SIGN}")  # zero is +0.00


def _runs(rows: Iterable[Result], made: dict[str, Any]) -> Iterator[Grid]:
    """The runs of each row: their versions and times, by seed."""
    seconds = {_name(row): row.seconds for row in rows}
    by_row: dict[str, list[list[str]]] = {}
    for name in sorted({*seconds, *made}):
        row, seed = name.rsplit("-seed", 1)
        entry = made.get(name, {})
        to_target = entry.get("seconds_to_target")
        minutes = ["" if time is None else f"{time / 60:.1f}" for time in (seconds.get(name), to_target)]
        by_row.setdefault(row, []).append([seed, entry.get("version", ""), *minutes])
    columns = ["run", "seeds", "version", "minutes", f"minutes to {table1.TARGET:g} %"]
    listed: list[list[str]] = []
    for row, runs in by_row.items():
        seeds, versions, *times = zip(*runs, strict=True)
        shown = [seeds, versions if len(set(versions)) > 1 else versions[:1], *times]
        listed.append([row, *(", ".join(filter(None, column)) for column in shown)])
    caption = (
        f"Minutes of training by seed, and those until the test error was {table1.TARGET:g} %, where it was recorded "
        "by epoch. The commands name the threads; some runs shared the machine with other programs."
    )
    yield Grid(caption, columns, listed)


def _name(row: Result) -> str:
    """The name of the run that gave a row, as :func:`table1.name_of` has it."""
    temperature = "" if row.temperature == 1 else f"-t{row.temperature:g}"
    return f"{row.method}-{row.units}{temperature}-{row.epochs}epochs-seed{row.seed}"


# --- Table 2 ----------------------------------------------------------------------------------------------------------


def _table2(results: Path) -> dict[str, Finding]:
    rows, made = table2.read(results / "table2.csv"), _read(results / "table2.json")
    if not rows:
        return {}
    tables = []
    for units in sorted({row.units for row in rows}, reverse=True):
        those = [row for row in rows if row.units == units]
        errors, sizes, times = (table2.means(those, name) for name in ("test_error", "file_bytes", "latency_us"))
        cells = [
            [
                _percent(removed),
                f"{errors[removed]:.2f}",
                f"{table2.PUBLISHED[removed]:.2f}",
                f"{sizes[removed] / 1e6:.2f} MB",
                f"{times[removed]:.0f} µs",
            ]
            for removed in errors
        ]
        caption = (
            f"2x{units}, means over {_count(len({row.seed for row in those}))}: the test error in % after removing the "
            "weights with the lowest |mu| / sigma, the size of the sparse network's file, and its time for one image. "
            "The network is that of the means; Table 1 averages draws."
        )
        tables.append(Grid(caption, ["removed", "error", "paper", "file", "time"], cells))
    each = [
        [
            f"2x{row.units}",
            _percent(row.fraction),
            str(row.seed),
            str(row.weights_left),
            f"{row.test_error:.2f}",
            str(row.file_bytes),
            f"{row.latency_us:.0f}",
        ]
        for row in rows
    ]
    columns = ["units", "removed", "seed", "weights left", "error %", "bytes", "µs"]
    runs = [Grid("Each seed. The times of one seed were measured in turn.", columns, each)]
    notes = [
        f"{name}: {entry['schedule']['epochs']} epochs at temperature {entry['temperature']:g}; prior with pi "
        f"{entry['pi']:g}, sigma1 {entry['sigma1']:.3g} and sigma2 {entry['sigma2']:.3g}; version "
        f"{entry.get('version', '?')}."
        for name, entry in made.items()
    ]
    sentence = _pruned(table2.largest(rows), list(made.values()))
    return {"table2": Finding("table2", sentence, tables, notes, runs, _commands(made))}


def _pruned(rows: Sequence[table2.Row], made: Sequence[dict[str, Any]]) -> str:
    errors, sizes, times = (table2.means(rows, name) for name in ("test_error", "file_bytes", "latency_us"))
    most, paper = max(errors), table2.PUBLISHED
    said = (
        f"Without {_percent(most)} of its weights our 2x{rows[0].units} network loses "
        f"{errors[most] - errors[0.0]:.2f} points, the paper's 2x1200 {paper[most] - paper[0.0]:.2f}; the file shrinks "
        f"to 1/{sizes[0.0] / sizes[most]:.0f}, the time for one image to 1/{times[0.0] / times[most]:.1f}. Unpruned, "
        f"ours is at {errors[0.0]:.2f} % and the paper's at {paper[0.0]:.2f} %"
    )
    recipes = {(entry["schedule"]["epochs"], entry["temperature"]) for entry in made}
    if len(recipes) != 1:
        return f"{said}."
    ((epochs, temperature),) = recipes
    cost = "" if temperature == 1 else f" at temperature {temperature:g}"
    return f"{said}; ours was trained for {epochs} epochs{cost}."


# --- figures ----------------------------------------------------------------------------------------------------------


def _figures(results: Path) -> Iterator[tuple[str, Finding]]:
    for name, tell in {"fig2": _fig2, "fig3": _fig3, "fig4": _fig4, "fig5": _fig5, "fig6": _fig6}.items():
        path, made = results / f"{name}.csv", _read(results / f"{name}.json")
        if made or path.exists() or (results / f"{name}.png").exists():
            sentence, tables = tell(path) if path.exists() else ("", [])
            notes = [made["line"]] if made else []
            notes += [f"Version {made['version']}."] if "version" in made else []
            yield name, Finding(name, sentence, tables, notes, (), _curves(made))


def _curves(made: Mapping[str, Any]) -> list[str]:
    """The commands of a figure, or of its curves."""
    return sorted({*made.get("commands", {}).values()} or {made["command"]}) if made else []


def _fig2(path: Path) -> tuple[str, list[Grid]]:
    ours = figures.read_csv(path)
    rows, said = [], ""
    for method, label, theirs in _methods(ours):
        errors = ours[method][~np.isnan(ours[method])]
        curve = figures.published(f"error_{theirs}")
        epochs, paper = curve["epoch"], curve["test_error_pct_mean"]
        last, beside = len(errors), float(np.interp(len(errors), epochs, paper))
        rows.append([f"{label}\n{last} epochs", f"{errors[-1]:.2f}", f"{beside:.2f}", f"{paper[-1]:.2f}"])
        if not said:
            said = (
                f"After {last} epochs {label} is at {errors[-1]:.2f} %; the paper's is at {beside:.2f} % then, and "
                f"at {paper[-1]:.2f} % after {epochs[-1]:.0f}. We use other optimisers and rates, and stop earlier."
            )
    caption = "Test error in % at our last epoch: ours, the paper's at that epoch, and the paper's last."
    return said, [Grid(caption, ["", "ours", "paper, there", "paper, last"], rows)]


def _fig3(path: Path) -> tuple[str, list[Grid]]:
    ours = figures.read_csv(path)
    widths: dict[str, tuple[float, float]] = {}
    for method, label, theirs in _methods(ours):
        paper = figures.published(f"weight_density_{theirs}")
        width = figures.spread(ours["weight"], ours[method])
        widths[label] = width, figures.spread(paper["weight"], paper["density"])
    said = "; ".join(
        f"{label} {'wider' if ours > paper else 'narrower'} ({ours:.3f}, paper {paper:.3f})"
        for label, (ours, paper) in widths.items()
    )
    why = (
        "Our initial weights differ. In Bayes by Backprop a drawn weight spreads at least as far as its noise, whose "
        "initial width differs too and which had fewer epochs to change."
    )
    return f"Standard deviation of the weights within ±{ours['weight'][-1]:g}: {said}. {why}", []


def _fig4(path: Path) -> tuple[str, list[Grid]]:
    ours, paper = figures.read_csv(path), figures.published("snr_cdf")
    half, most = zip(
        *(np.interp([0.5, 0.75], each["cdf"], each["log10_snr"]).tolist() for each in (ours, paper)), strict=True
    )
    said = (
        f"Half of our weights have a log10 ratio below {_tenth(half[0])}, half of the paper's below {_tenth(half[1])}; "
        f"three quarters are below {_tenth(most[0])} and {_tenth(most[1])}. The ratio falls as the noise grows; ours "
        "started from another width and had fewer epochs to grow."
    )
    return said, []


def _fig5(path: Path) -> tuple[str, list[Grid]]:
    rows = read_rows(path, regression.Row)
    groups: dict[tuple[str, str], list[regression.Row]] = {}
    for row in rows:
        groups.setdefault((row.variant, row.method), []).append(row)
    cells = [
        [f"{regression.STYLE[method][0]}\n{regression.POINTS[variant]}"]
        + [f"{min(row.off for row in those):.2f}", f"{max(row.on for row in those):.2f}"]
        + [f"{100 * mean(getattr(row, name) for row in those):.0f} %" for name in ("coverage50", "coverage90")]
        for (variant, method), those in sorted(groups.items())
    ]
    off = {
        method: min((row.off for row in rows if row.method == method), default=math.nan)
        for method in regression.METHODS
    }
    said = (
        f"Away from the data our 5-95 % band is at least {off['bbb']:.2f} times as wide as the paper's, a standard "
        f"network's {off['standard']:.2f} times; the paper does not say which prior it used here."
    )
    caption = (
        f"The width of the 5-95 % band, worst of {_count(len({row.seed for row in rows}))}: off the data relative to "
        "the paper's band at its narrowest, on the data relative to the noise on average; then the share of held-out "
        "points inside the 50 % and the 90 % band, on average."
    )
    return said, [Grid(caption, ["", "off", "on", "in 50 %", "in 90 %"], cells)]


def _fig6(path: Path) -> tuple[str, list[Grid]]:
    points = bandit.read(path)
    ends, theirs = bandit.ends(points), figures.published("bandit_regret")
    last = max(point.step for point in points)
    rows = [
        [
            label,
            f"{mean(ends[agent]):.0f}",
            f"{min(ends[agent]):.0f} to {max(ends[agent]):.0f}",
            f"{np.interp(last, theirs['step'], theirs[column]):.0f}",
        ]
        for agent, (_, label, column) in reversed(bandit.STYLE.items())
        if agent in ends
    ]
    label, ours, _, paper = rows[0]
    said = f"After {last:,} mushrooms {label} has a regret of {ours}, the paper's of {paper}. {bandit.DIFFERENCES}"
    seeds = _count(len({point.seed for point in points}))
    caption = f"Cumulative regret after {last:,} steps: the mean over {seeds}, the lowest to the highest, the paper's."
    return said, [Grid(caption, ["", "ours", "by seed", "paper"], rows)]


def _methods(columns: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Those of a figure that are there: as a column, in words, and in the published files."""
    for method, (_, label, theirs) in figures.STYLE.items():
        if method in columns:
            yield method, label, theirs


# --- small things -----------------------------------------------------------------------------------------------------


def _tenth(value: float) -> str:
    return f"{value:.1f}".replace("-", "\N{MINUS SIGN}")


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _count(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _commands(made: dict[str, Any]) -> list[str]:
    return sorted({entry["command"] for entry in made.values()})
