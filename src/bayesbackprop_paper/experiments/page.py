"""The page of results, written from the files in ``results/`` and from nothing else."""

import json
import math
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bayesbackprop._errors import Described, invalid
from bayesbackprop._files import write_atomically
from bayesbackprop_paper.experiments import bandit, figures, table1, table2

_MISSING = "not run"

# In the benchmarks: no other libraries.
_PLAIN = ("sgd", "dropout", "passes", "bayesbackprop kept")

# Around the summary in the README.
_BEGIN, _END = "<!-- results: written by bbb reproduce page -->", "<!-- end of results -->"

FIGURES = {
    "fig2": "Figure 2: the test error as training progresses; dotted: the paper's",
    "fig3": "Figure 3: densities of the trained weights; dotted: the paper's",
    "fig4": "Figure 4: the signal-to-noise ratio of the weights; dotted: the paper's",
    "fig5": "Figure 5: regression; dotted: the paper's median and band",
    "fig6": "Figure 6: cumulative regret on mushrooms; dotted: the paper's",
}


def write(results: Path, docs: Path) -> Path:
    """Write ``results.md`` in ``docs``, with the pictures beside it."""
    if not any(path.suffix in (".csv", ".json", ".png") for path in results.glob("*")):
        raise invalid("results", "bbb reproduce page", "a folder that `bbb reproduce` wrote results to", str(results))
    parts = ["# Results\n\nWritten by `bbb reproduce page` from the files in `results/`.\n"]
    for table in tables(results):
        parts += [table.markdown(), *_picture(results, docs, table.name, table.title)]
    for name, caption in FIGURES.items():
        if picture := _picture(results, docs, name, caption):
            parts += [f"## {caption}\n", *picture, *_line(results / f"{name}.json")]
    path = docs / "results.md"
    docs.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(parts).encode())
    return path


def _picture(results: Path, docs: Path, name: str, caption: str) -> list[str]:
    """Put a picture beside the page, and it into the page, if there is one."""
    if not (results / f"{name}.png").exists():
        return []
    (docs / "results").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(results / f"{name}.png", docs / "results" / f"{name}.png")
    return [f"![{caption}](results/{name}.png)\n"]


def write_summary(results: Path, readme: Path) -> None:
    """Write the summary of the results between the marks in ``readme``."""
    text = readme.read_text()
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise invalid(
            "readme", "bbb reproduce page", f"a file with the marks {_BEGIN} and {_END}", Described(str(readme))
        )
    before, after = text.split(_BEGIN)[0], text.split(_END)[1]
    write_atomically(readme, f"{before}{_BEGIN}\n{summary(results)}{_END}{after}".encode())


def summary(results: Path) -> str:
    """The results in a few rows, each with the command that measured it."""
    rows = [*_speed(results), *_mnist(results), *_pruning(results), *_bandit(results)]
    lines = ["| what | ours | others | measured by |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _speed(results: Path) -> Iterator[list[str]]:
    """Of 2x1200 networks, the largest that all benchmarks have."""
    for name, says, key, shown in (
        ("step", "a training step of {network}, in plain SGD steps", "ratio_sgd", 1200),
        ("predict", "100 draws for one digit, in 100 plain passes ({network})", "ratio_passes", 1200),
    ):
        path = results / "bench" / f"{name}.json"
        every = json.loads(path.read_text()) if path.exists() else []
        rows = [row for row in every if row["units"] == shown and row.get("images") in (None, 1)]
        ratios = {row["name"]: row[key] for row in rows if row["name"] not in _PLAIN}
        if "bayesbackprop" in ratios:
            ours = ratios.pop("bayesbackprop")
            others = ", ".join(f"{other} {ratio:.1f}" for other, ratio in ratios.items())
            what = says.format(network=rows[0]["network"])
            yield [what, f"{ours:.2f}", others, f"`{rows[0]['command']}`"]


def _mnist(results: Path) -> Iterator[list[str]]:
    cells = table1.summary(table1.read(results / "table1.csv"))
    theirs = " / ".join(f"{error:.2f}" for error in table1.PUBLISHED["bbb-mixture"].values())
    for method, temperature, epochs in sorted({(key[0], key[1], key[3]) for key in cells}, reverse=True):
        found = {units: cells.get((method, temperature, units, epochs)) for units in (400, 800, 1200)}
        if method.startswith("bbb-mixture"):
            begun = ", from dropout's weights" if method.endswith("from-dropout") else ""
            cost = "the paper's cost" if temperature == 1 else f"complexity at temperature {temperature:g}"
            option = "" if temperature == 1 else f" --temperature {temperature:g}"
            (recipe,) = table1.cells([method], [400], [0], [temperature])
            option += "" if epochs == recipe.epochs else f" --epochs {epochs}"
            seeds = "/".join(str(cell[2]) if cell else "0" for cell in found.values())
            yield [
                f"MNIST test error, 2x400/800/1200, {cost}{begun}, {epochs} epochs ({seeds} seeds)",
                " / ".join(f"{cell[0]:.2f}" if cell else _MISSING for cell in found.values()) + " %",
                f"paper {theirs} %, 600 epochs",
                f"`bbb reproduce table1 --method {method}{option}`",
            ]


def _pruning(results: Path) -> Iterator[list[str]]:
    found = table2.largest(table2.read(results / "table2.csv"))
    if not found:
        return
    error, size, latency = (table2.means(found, column) for column in ("test_error", "file_bytes", "latency_us"))
    errors = " / ".join(f"{error[fraction]:.2f}" for fraction in (0.0, 0.95, 0.98))
    smaller, faster = size[0.0] / size[0.98], latency[0.0] / latency[0.98]
    theirs = " / ".join(f"{table2.PUBLISHED[fraction]:.2f}" for fraction in (0.0, 0.95, 0.98))
    seeds = len({row.seed for row in found})
    what = f"test error without 0 / 95 / 98 % of the weights of 2x{found[0].units} ({_count(seeds)})"
    ours = f"{errors} %; at 98 % the file is 1/{smaller:.0f} and a digit takes 1/{faster:.1f}"
    yield [what, ours, f"paper {theirs} %", ", ".join(f"`{each}`" for each in _commands(results / "table2.json"))]


def _bandit(results: Path) -> Iterator[list[str]]:
    path = results / "fig6.csv"
    if not path.exists():
        return
    points = bandit.read(path)
    curves, theirs = bandit.means(points), figures.published("bandit_regret")
    last = max(point.step for point in points)
    seeds = len({point.seed for point in points})
    ours = ", ".join(f"{label} {curves[agent][last]:.0f}" for agent, (_, label, _) in reversed(bandit.STYLE.items()))
    paper = ", ".join(
        f"{np.interp(last, theirs['step'], theirs[column]):.0f}" for _, _, column in reversed(bandit.STYLE.values())
    )
    about = json.loads((results / "fig6.json").read_text())
    yield [
        f"mushroom bandit, regret after {last:,} steps ({_count(seeds)})",
        ours,
        f"paper {paper}",
        f"`{about['command']}`",
    ]


class Table(NamedTuple):
    """A table of the paper beside ours, to be written as Markdown or HTML."""

    name: str
    title: str
    paragraphs: list[str]
    columns: list[str]
    rows: list[list[str]]
    commands: list[str]

    def markdown(self) -> str:
        """As a section of a page."""
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, *self.rows)]
        lines.insert(1, "|" + "---|" * len(self.columns))
        commands = "Commands:\n\n" + "\n".join(f"- `{command}`" for command in self.commands) + "\n"
        paragraphs = [f"{text}\n" for text in (f"## {self.title}", *self.paragraphs)]
        return "\n".join([*paragraphs, *lines, "", commands if self.commands else ""])


def tables(results: Path) -> list[Table]:
    """Tables 1 and 2, as far as they have been run."""
    return [*_table1(results), *_table2(results)]


def _table1(results: Path) -> list[Table]:
    found = table1.read(results / "table1.csv")
    sizes = table1.units_of(found)
    columns = {name: table1.summary(found, name) for name in ("test_error", "test_nll", "test_ece")}
    lines = sorted({(method, temperature, epochs) for method, temperature, _, epochs in columns["test_error"]})
    errors: list[list[str]] = []
    scores: list[list[str]] = []
    for method, temperature, epochs in lines:
        cells = {
            name: [each.get((method, temperature, units, epochs)) for units in sizes] for name, each in columns.items()
        }
        papers = [str(table1.published(method, units) or "") for units in sizes]
        named = [table1.line_of(method, temperature), str(epochs)]
        errors.append([*named, *chain(*zip(map(_cell, cells["test_error"]), papers, strict=True))])
        nlls = [_score(cell, 4) for cell in cells["test_nll"]]
        eces = [_score(cell, 2) for cell in cells["test_ece"]]
        scores.append([named[0], *chain(*zip(nlls, eces, strict=True))])
    about = (
        "Test error in %, mean and standard deviation over seeds (how many in brackets). Epoch and way of predicting "
        "were chosen on the validation set. A temperature below 1 weakens the complexity cost; without one it is the "
        "paper's."
    )
    calibrated = (
        "The same networks on the test set, means over seeds: the negative log-likelihood in nats per image, and the "
        "expected calibration error in % (15 bins)."
    )
    made = results / "table1.json"
    text = [about, table1.difference(found), *_times(made), *_versions(made)]
    heads = ["method", "epochs", *chain(*([f"2x{units}", "paper"] for units in sizes))]
    score_heads = ["method", *chain(*([f"2x{units}: NLL", "ECE"] for units in sizes))]
    tables = [Table("table1", "Table 1: MNIST", text, heads, errors, _commands(made))]
    if columns["test_nll"]:
        title = "Table 1: likelihood and calibration"
        tables.append(Table("table1-scores", title, [calibrated], score_heads, scores, []))
    return tables


def _count(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def _cell(cell: tuple[float, float, int] | None) -> str:
    if cell is None:
        return _MISSING
    error, spread, seeds = cell
    return f"{error:.2f} (1)" if math.isnan(spread) else f"{error:.2f} ± {spread:.2f} ({seeds})"


def _score(cell: tuple[float, float, int] | None, digits: int) -> str:
    return _MISSING if cell is None else f"{cell[0]:.{digits}f}"


def _commands(path: Path) -> list[str]:
    return sorted({entry["command"] for entry in json.loads(path.read_text()).values()}) if path.exists() else []


def _times(path: Path) -> Iterator[str]:
    """How long the runs that reached the target took, where test errors were recorded by epoch."""
    minutes: dict[str, list[str]] = {}
    for name, made in sorted(json.loads(path.read_text()).items()) if path.exists() else ():
        if (seconds := made.get("seconds_to_target")) is not None:
            minutes.setdefault(name.rsplit("-seed", 1)[0], []).append(f"{seconds / 60:.1f}")
    if minutes:
        listed = "; ".join(f"`{name}` {', '.join(each)}" for name, each in minutes.items())
        how = "with the threads that the commands name, some beside other programs"
        yield f"Minutes of training until the test error was {table1.TARGET:g} %, by seed, {how}: {listed}."


def _versions(path: Path) -> Iterator[str]:
    """Which runs other versions than the last made."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for name, made in sorted(json.loads(path.read_text()).items()) if path.exists() else ():
        row, seed = name.rsplit("-seed", 1)
        seeds.setdefault((made.get("version", ""), row), []).append(seed)
    last = max((version for version, _ in seeds), default="")
    older = [f"`{row}` {version}, seeds {', '.join(each)}" for (version, row), each in seeds.items() if version != last]
    if older:
        yield f"Runs of versions before {last}: {'; '.join(older)}."


def _trained(path: Path) -> Iterator[str]:
    """How the networks that were pruned had been trained."""
    for name, made in json.loads(path.read_text()).items():
        yield (
            f"Of {name}: trained for {made['schedule']['epochs']} epochs at temperature {made['temperature']:g}, prior "
            f"pi {made['pi']:g}, sigma1 {made['sigma1']:.3g}, sigma2 {made['sigma2']:.3g}."
        )


def _line(path: Path) -> list[str]:
    if not path.exists():
        return []
    about = json.loads(path.read_text())
    return [f"{about['line']}\n\nCommand: `{about['command']}`\n"]


def _table2(results: Path) -> list[Table]:
    found = table2.read(results / "table2.csv")
    if not found:
        return []
    rows: list[list[str]] = []
    for row in found:
        ours = [f"2x{row.units}", f"{row.fraction:.0%}", str(row.seed), str(row.weights_left), f"{row.test_error:.2f}"]
        rows.append([*ours, str(table2.PUBLISHED[row.fraction]), str(row.file_bytes), f"{row.latency_us:.0f}"])
    about = (
        "The plain sparse network of the means that are left; its file, and its time for one image, measured in turn "
        "with the others of the same seed."
    )
    text = [about, *_trained(results / "table2.json"), table2.difference(table2.largest(found))]
    columns = [
        "units",
        "removed",
        "seed",
        "weights left",
        "test error %",
        "paper, 2x1200",
        "file, bytes",
        "latency, µs",
    ]
    return [Table("table2", "Table 2: pruning", text, columns, rows, _commands(results / "table2.json"))]
