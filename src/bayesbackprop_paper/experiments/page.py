"""The page of results, written from the files in ``results/`` and from nothing else."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import numpy as np

from bayesbackprop._errors import Described, invalid
from bayesbackprop._files import write_atomically
from bayesbackprop_paper.experiments import bandit, figures, table1, table2
from bayesbackprop_paper.experiments.findings import MISSING, Finding, Grid, findings

# In the benchmarks: no other libraries.
_PLAIN = ("sgd", "dropout", "passes", "bayesbackprop kept")

# Around the summary in the README.
_BEGIN, _END = "<!-- results: written by bbb reproduce page -->", "<!-- end of results -->"

_INTRODUCTION = """# Results

Each table and figure of [the paper](https://arxiv.org/abs/1505.05424) beside ours. In the pictures solid lines are
ours, dotted lines the paper's. `bbb reproduce page` writes this page from the files in `results/`; how to repeat the
runs is in [the experiments](experiments.md).
"""


def write(results: Path, docs: Path) -> Path:
    """Write ``results.md`` in ``docs``, with the pictures beside it."""
    if not any(path.suffix in (".csv", ".json", ".png") for path in results.glob("*")):
        raise invalid("results", "bbb reproduce page", "a folder that `bbb reproduce` wrote results to", str(results))
    parts = [_INTRODUCTION]
    for finding in findings(results):
        parts += [f"## {finding.title}\n", *_picture(results, docs, finding), *_section(finding)]
    path = docs / "results.md"
    docs.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(parts).encode())
    return path


def _picture(results: Path, docs: Path, finding: Finding) -> list[str]:
    """Put a picture beside the page, and into it, if there is one. It leads to itself, to be seen large on a phone."""
    name = f"{finding.name}.png"
    if not (results / name).exists():
        return []
    (docs / "results").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(results / name, docs / "results" / name)
    return [f"[![{finding.title}](results/{name})](results/{name})\n"]


def _section(finding: Finding) -> Iterator[str]:
    """What follows the picture. A fold, which GitHub shows too, has how it was made."""
    if finding.sentence:
        yield f"{finding.sentence}\n"
    yield from map(_grid, finding.tables)
    if finding.commands:
        yield '<details markdown="1">\n<summary>How it was made</summary>\n'
        yield from (f"{note}\n" for note in finding.notes)
        yield from map(_grid, finding.runs)
        yield "\n".join(f"- `{command}`" for command in finding.commands) + "\n"
        yield "</details>\n"


def _grid(grid: Grid) -> str:
    lines = [
        "| " + " | ".join(cell.replace("\n", "<br>") for cell in cells) + " |" for cells in (grid.columns, *grid.rows)
    ]
    lines.insert(1, "|" + "---|" * len(grid.columns))
    return "\n".join([f"{grid.caption}\n", *lines, ""])


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
                " / ".join(f"{cell[0]:.2f}" if cell else MISSING for cell in found.values()) + " %",
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
    ends, theirs = bandit.ends(points), figures.published("bandit_regret")
    last = max(point.step for point in points)
    seeds = len({point.seed for point in points})
    ours = ", ".join(
        f"{bandit.OURS if agent == 'bbb' else label} {mean(ends[agent]):.0f} "
        f"({min(ends[agent]):.0f} to {max(ends[agent]):.0f})"
        for agent, (_, label, _) in reversed(bandit.STYLE.items())
    )
    paper = ", ".join(
        f"{np.interp(last, theirs['step'], theirs[column]):.0f}" for _, _, column in reversed(bandit.STYLE.values())
    )
    about = json.loads((results / "fig6.json").read_text())
    yield [
        f"mushroom bandit, regret after {last:,} steps ({_count(seeds)}, lowest to highest)",
        ours,
        f"paper {paper}",
        f"`{about['command']}`",
    ]


def _count(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def _commands(path: Path) -> list[str]:
    return sorted({entry["command"] for entry in json.loads(path.read_text()).values()}) if path.exists() else []
