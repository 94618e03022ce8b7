"""The page of results, written from the files in ``results/`` and from nothing else."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import NamedTuple

from bayesbackprop.experiments import table1, table2
from bayesbackprop.files import write_atomically

_MISSING = "not run"

_NAMES = {
    "sgd": "SGD",
    "dropout": "SGD, dropout",
    "dropconnect": "SGD, DropConnect",
    "map-gaussian": "MAP, Gaussian prior",
    "map-laplace": "MAP, Laplace prior",
    "bbb-gaussian": "Bayes by Backprop, Gaussian",
    "bbb-mixture": "Bayes by Backprop, scale mixture",
}

FIGURES = {
    "fig2": "Figure 2: the test error as training progresses; dotted: the paper's",
    "fig3": "Figure 3: densities of the trained weights; dotted: the paper's",
    "fig4": "Figure 4: the signal-to-noise ratio of the weights; dotted: the paper's",
    "fig5": "Figure 5: regression; dotted: the paper's median and band",
    "fig6": "Figure 6: cumulative regret on mushrooms; dotted: the paper's",
}


def write(results: Path, docs: Path) -> Path:
    """Write ``results.md`` in ``docs``, with the pictures beside it."""
    parts = ["# Results\n\nWritten by `bbb reproduce page` from the files in `results/`.\n"]
    parts += [table.markdown() for table in tables(results)]
    pictures = docs / "results"
    for name, caption in FIGURES.items():
        if (results / f"{name}.png").exists():
            pictures.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(results / f"{name}.png", pictures / f"{name}.png")
            parts.append(f"## {caption}\n\n![{caption}](results/{name}.png)\n")
            parts += _line(results / f"{name}.json")
    path = docs / "results.md"
    write_atomically(path, "\n".join(parts).encode())
    return path


class Table(NamedTuple):
    """A table of the paper beside ours, to be written as Markdown or HTML."""

    title: str
    text: str
    columns: list[str]
    rows: list[list[str]]
    commands: list[str]

    def markdown(self) -> str:
        """As a section of a page."""
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, *self.rows)]
        lines.insert(1, "|" + "---|" * len(self.columns))
        commands = "Commands:\n\n" + "\n".join(f"- `{command}`" for command in self.commands) + "\n"
        return "\n".join([f"## {self.title}\n\n{self.text}\n", *lines, "", commands if self.commands else ""])


def tables(results: Path) -> list[Table]:
    """Tables 1 and 2, as far as they have been run."""
    return [*_table1(results), *_table2(results)]


def _table1(results: Path) -> list[Table]:
    cells = table1.summary(table1.read(results / "table1.csv"))
    rows: list[list[str]] = []
    for method, temperature, epochs in sorted(
        {(method, temperature, epochs) for method, temperature, _, epochs in cells}
    ):
        row = [_NAMES[method] + ("" if temperature == 1 else f", temperature {temperature:g}"), str(epochs)]
        for units in (400, 800, 1200):
            error, spread, seeds = cells.get((method, temperature, units, epochs), (math.nan, math.nan, 0))
            row += [_cell(error, spread, seeds), f"{table1.PUBLISHED.get(method, {}).get(units, '')}"]
        rows.append(row)
    text = (
        "Test error in %, mean and standard deviation over seeds (how many in brackets). Epoch and way of predicting "
        "were chosen on the validation set. A temperature below 1 weakens the complexity cost; without one it is the "
        "paper's."
    )
    columns = ["method", "epochs", "2x400", "paper", "2x800", "paper", "2x1200", "paper"]
    return [Table("Table 1: MNIST", text, columns, rows, _commands(results / "table1.json"))]


def _cell(error: float, spread: float, seeds: int) -> str:
    if not seeds:
        return _MISSING
    return f"{error:.2f} (1)" if math.isnan(spread) else f"{error:.2f} ± {spread:.2f} ({seeds})"


def _commands(path: Path) -> list[str]:
    return sorted({entry["command"] for entry in json.loads(path.read_text()).values()}) if path.exists() else []


def _line(path: Path) -> list[str]:
    if not path.exists():
        return []
    about = json.loads(path.read_text())
    return [f"{about['line']}\n\nCommand: `{about['command']}`\n"]


def _table2(results: Path) -> list[Table]:
    path = results / "table2.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    rows: list[list[str]] = []
    for row in found:
        fraction = float(row["fraction"])
        size, latency = row["file_bytes"], f"{float(row['latency_us']):.0f}"
        ours = [f"2x{row['units']}", f"{fraction:.0%}", row["seed"], row["weights_left"]]
        rows.append([*ours, f"{float(row['test_error']):.2f}", str(table2.PUBLISHED[fraction]), size, latency])
    text = (
        "The plain sparse network of the means that are left; its file, and its time for one image, measured in turn "
        "with the others of the same seed."
    )
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
    return [Table("Table 2: pruning", text, columns, rows, _commands(results / "table2.json"))]
