"""The page of results, written from the files in ``results/`` and from nothing else."""

import csv
import json
import math
import shutil
from pathlib import Path

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

_FIGURES = {
    "fig2": "Figure 2: the test error as training progresses; dotted: the paper's",
    "fig3": "Figure 3: densities of the trained weights; dotted: the paper's",
    "fig4": "Figure 4: the signal-to-noise ratio of the weights; dotted: the paper's",
    "fig5": "Figure 5: regression; dotted: the paper's median and band",
    "fig6": "Figure 6: cumulative regret on mushrooms; dotted: the paper's",
}


def write(results: Path, docs: Path) -> Path:
    """Write ``results.md`` in ``docs``, with the pictures beside it."""
    parts = ["# Results\n\nWritten by `bbb reproduce page` from the files in `results/`.\n", *_table1(results)]
    parts += _table2(results)
    pictures = docs / "results"
    for name, caption in _FIGURES.items():
        if (results / f"{name}.png").exists():
            pictures.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(results / f"{name}.png", pictures / f"{name}.png")
            parts.append(f"## {caption}\n\n![{caption}](results/{name}.png)\n")
            parts += _line(results / f"{name}.json")
    path = docs / "results.md"
    write_atomically(path, "\n".join(parts).encode())
    return path


def _table1(results: Path) -> list[str]:
    cells = table1.summary(table1.read(results / "table1.csv"))
    rows = sorted({(method, temperature, epochs) for method, temperature, _, epochs in cells})
    lines = [
        "| method | epochs | 2x400 | paper | 2x800 | paper | 2x1200 | paper |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, temperature, epochs in rows:
        name = _NAMES[method] + ("" if temperature == 1 else f", temperature {temperature:g}")
        shown = [name, str(epochs)]
        for units in (400, 800, 1200):
            error, spread, seeds = cells.get((method, temperature, units, epochs), (math.nan, math.nan, 0))
            shown.append(_cell(error, spread, seeds))
            shown.append(f"{table1.PUBLISHED.get(method, {}).get(units, '')}")
        lines.append("| " + " | ".join(shown) + " |")
    text = (
        "## Table 1: MNIST\n\nTest error in %, mean and standard deviation over seeds (how many in brackets). Epoch and"
        " way of predicting were chosen on the validation set. A temperature below 1 weakens the complexity cost;"
        " without one it is the paper's.\n\n" + "\n".join(lines) + "\n"
    )
    return [text, _commands(results / "table1.json")]


def _head(*columns: str) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]


def _cell(error: float, spread: float, seeds: int) -> str:
    if not seeds:
        return _MISSING
    return f"{error:.2f} (1)" if math.isnan(spread) else f"{error:.2f} ± {spread:.2f} ({seeds})"


def _commands(path: Path) -> str:
    if not path.exists():
        return ""
    commands = sorted({entry["command"] for entry in json.loads(path.read_text()).values()})
    return "Commands:\n\n" + "\n".join(f"- `{command}`" for command in commands) + "\n"


def _line(path: Path) -> list[str]:
    if not path.exists():
        return []
    about = json.loads(path.read_text())
    return [f"{about['line']}\n\nCommand: `{about['command']}`\n"]


def _table2(results: Path) -> list[str]:
    path = results / "table2.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    lines = [
        "| units | removed | seed | weights left | test error % | paper, 2x1200 | file, bytes | latency, µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        fraction = float(row["fraction"])
        cells = (
            f"2x{row['units']}",
            f"{fraction:.0%}",
            row["seed"],
            row["weights_left"],
            f"{float(row['test_error']):.2f}",
        )
        rest = (table2.PUBLISHED[fraction], row["file_bytes"], f"{float(row['latency_us']):.0f}")
        lines.append("| " + " | ".join(map(str, (*cells, *rest))) + " |")
    text = (
        "## Table 2: pruning\n\nThe plain sparse network of the means that are left; its file, and its time for one "
        "image, measured in turn with the others of the same seed.\n\n" + "\n".join(lines) + "\n"
    )
    return [text, _commands(results / "table2.json")]
