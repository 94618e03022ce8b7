"""The page of truth: what the commands of ``bbb truth`` found, written from their files and from nothing else."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bayesbackprop._errors import invalid
from bayesbackprop._files import write_atomically
from bayesbackprop._version import __version__
from bayesbackprop_paper.experiments import compression, defaults, figures, networks, nuts, uci
from bayesbackprop_paper.experiments.recipe import seeded
from bayesbackprop_paper.experiments.records import locked
from bayesbackprop_paper.experiments.truth import entries

# Figures of which more is better, by how their names begin; of all others less is.
_HIGHER = ("accuracy", "AUROC", "log-likelihood")
# Figures that should equal a number, so that neither the highest nor the lowest is the best.
_LEVEL = ("coverage", "in ", "acceptance", "R-hat", "confidence - accuracy")

_HEAD = """# Truth

This page compares the library with known answers and with other methods. `bbb truth page` writes it from the files in
`results/truth/`. The commands under each table wrote these files; one that was stopped before its end has left fewer
runs than it would make, and the column `runs` says how many there are. Each figure is a mean over runs, one for each
seed or split, with its standard deviation. The best mean of a row is in bold. Ignore a difference that is small beside
the deviations. `results/truth/` also has the ranges and the run times.
"""


class Section(NamedTuple):
    """A title, what was compared, and what else the rows say."""

    title: str
    about: str = ""
    says: Callable[[Mapping[str, Any]], str] = lambda _: ""


SECTIONS: Mapping[str, Section] = {
    "nuts": Section(
        "The exact posterior",
        "NUTS gives the exact predictive distribution of two small networks: a regression with a gap in its data, and "
        "a classifier of points in two classes. Each figure is a mean absolute difference from that distribution, so 0 "
        "is exact. For the regression it is the difference of the predicted mean, or of the standard deviation, on the "
        "data, in the gap and outside. For the classes it is the difference of the probability of a class (TV), near "
        "the data and far from them. F is the free energy in nats. The page on [families](decisions/families.md) "
        "describes the methods. It also says why the R-hat of refine is so high: it is that of single chains. IVON did "
        "not converge on the regression with any of the settings tried.",
    ),
    "defaults": Section(
        "All defaults beside plain training",
        "`fit(Bayesian(net, likelihood), batches, epochs=k)` beside the same network without uncertainty. The plain "
        "network is trained for the same number of epochs, by Adam at its usual rate, or with the rate and decay "
        "that `fit` chooses. All figures are on held-out data. Accuracy is in %, RMSE in standard deviations of the "
        "target, NLL in nats.",
        defaults.verdicts,
    ),
    "uci": Section(
        "Tables of numbers, beside other methods",
        "Regressions from the UCI repository. A random tenth of the rows is held out for the test. The scikit-learn "
        "estimator with all its defaults stands beside other methods. All methods have the same network, with one "
        "hidden layer. NLL and RMSE are in the units of the target. *In 50 %* and *in 90 %* are the fractions of "
        "targets inside the central intervals.",
        uci.verdicts,
    ),
    "ood": Section(
        "Inputs unlike the training data",
        "A network learns digits and is then shown clothes. AUROC is the probability that an article of clothing is "
        "more uncertain than a digit. FPR95 is the fraction of clothes that pass a threshold that 95 % of the digits "
        "pass. Each method is trained as its recipe says, so ours and the networks with dropout were trained longer "
        "than the members of the ensemble. [Digits against clothes](decisions/ood.md) explains what these figures "
        "leave out.",
    ),
    "networks": Section(
        "Convolutional networks",
        "LeNet-5 and ResNet-20 from random weights. Every method trains for the same number of epochs; the ensemble "
        "has five times the training. AUROC is the probability that an image of the other data set has a higher "
        "predictive entropy than an image of the network's own test set. Other programs ran beside the training: "
        "its seconds only show the order of magnitude. "
        "[Convolutional networks](decisions/networks.md) says how the recipes were chosen.",
        networks.verdicts,
    ),
    "compression": Section(
        "How small LeNet-5 gets",
        "Caffe's LeNet-5 on MNIST has 431,080 weights. 100x means that a hundredth of them are left: those with the "
        "highest signal-to-noise ratio. The others are 0. The error is that of the network at the posterior mean. "
        "*Pruned* takes the trained network as it is. *Pruned and trained on* prunes level by level and trains what is "
        "left at each level.",
        compression.verdicts,
    ),
    "lora": Section(
        "Fine-tuning on few sentences",
        "A small language model learns from 240 sentences what 32 animals eat in winter. The text is artificial, so "
        "the true probability of each answer is known. Every figure is an expectation over all questions: no labels "
        "were drawn. KL is the divergence from the true answers. AUROC is the probability that a question about an "
        "animal that no sentence mentions has a higher entropy than a question about one of the others. "
        "[Bayesian LoRA](decisions/lora.md) says what else was tried, and a [notebook](notebooks/lora.md) shows it in "
        "use.",
    ),
    "calibration": Section(
        "Calibration",
        "Predictions on held-out data. A model is calibrated if, of all predictions with probability p, the fraction p "
        "is true.",
    ),
}


def write(results: Path, docs: Path) -> Path:
    """Write ``truth.md`` in ``docs``, with the pictures beside it."""
    sections = [part for name in _names(results) for part in _section(results, docs, name)]
    if not sections:
        raise invalid("results", "bbb truth page", "a folder that `bbb truth` wrote to", str(results))
    docs.mkdir(parents=True, exist_ok=True)
    path = docs / "truth.md"
    write_atomically(path, "\n".join([_HEAD, *sections]).encode())
    return path


def _names(results: Path) -> list[str]:
    """Of the files of the results: those that are known in their order, then the others."""
    found = {path.stem for suffix in ("json", "png") for path in results.glob(f"*.{suffix}")}
    return [*(name for name in SECTIONS if name in found), *sorted(found - SECTIONS.keys())]


def _section(results: Path, docs: Path, name: str) -> Iterator[str]:
    """A heading, what it is about, its picture and its table, each as far as there is one."""
    section, found = SECTIONS.get(name, Section(name)), entries(results / f"{name}.json")
    yield f"## {section.title}\n"
    if section.about:
        yield f"{section.about}\n"
    picture = results / f"{name}.png"
    if picture.exists():
        (docs / "truth").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, docs / "truth" / picture.name)
        drawn = read_curves(results, name)
        yield f"![{section.title}](truth/{picture.name})\n"
        yield f"{drawn['line']}\n\nCommand: `{drawn['command']}`\n"
    if found:
        rows = _rows(found)
        for sentence in (*section.says(found).splitlines(), _best(rows)):
            if "0 of 0 " not in sentence:  # nothing was compared yet
                yield f"{sentence}\n"
        yield _table(found, rows)
        commands = sorted({entry["command"] for entry in found.values()})
        yield "\n".join(["Commands:\n", *(f"- `{command}`" for command in commands), ""])


class _Row(NamedTuple):
    """One figure of one task: its values over seeds by method."""

    task: str
    figure: str
    values: Mapping[str, list[float]]

    @property
    def best(self) -> list[str]:
        """The methods with the best mean; of one method alone, or of what should equal a number, none."""
        if len(self.values) < 2 or self.figure.startswith(_LEVEL):
            return []
        choose = max if self.figure.startswith(_HIGHER) else min
        means = {method: fmean(values) for method, values in self.values.items()}
        return [method for method, mean in means.items() if mean == choose(means.values())]


def _rows(found: Mapping[str, Any]) -> list[_Row]:
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for entry in found.values():
        for figure, value in entry["figures"].items():
            values.setdefault((entry["task"], figure), {}).setdefault(entry["method"], []).append(value)
    tasks = dict.fromkeys(task for task, _ in values)
    return [_Row(task, figure, each) for of in tasks for (task, figure), each in values.items() if task == of]


def _table(found: Mapping[str, Any], rows: list[_Row]) -> str:
    """A line for each figure of each task, a column for each method."""
    methods = list(dict.fromkeys(entry["method"] for entry in found.values()))
    lines = [["task", "figure", "runs", *methods]]
    for row in rows:
        counts = sorted({len(values) for values in row.values.values()})
        runs = " to ".join(dict.fromkeys(str(count) for count in (counts[0], counts[-1])))
        cells = [_cell(row.values.get(method, []), method in row.best) for method in methods]
        lines.append([row.task, row.figure, runs, *cells])
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body, ""])


def _cell(values: list[float], best: bool) -> str:
    if not values:
        return ""
    mean = f"{fmean(values):.3g}" if abs(fmean(values)) < 10 else f"{fmean(values):.2f}"
    return (f"**{mean}**" if best else mean) + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def _best(rows: list[_Row]) -> str:
    """How often each method has the best mean."""
    judged = [row for row in rows if row.best]
    wins = Counter(method for row in judged for method in row.best)
    if not judged:
        return ""
    return (
        f"Best mean: {', '.join(f'{method} in {count}' for method, count in wins.most_common())} of {len(judged)} rows."
    )


# --- pictures ---------------------------------------------------------------------------------------------------------


_BANDS = (
    "The regression: the mean and two standard deviations on either side, ours in colour over the exact ones in grey, "
    "of one seed. Points are the data."
)


def read_curves(results: Path, name: str) -> dict[str, Any]:
    """What a picture shows, and the command that drew it; nothing if there is none."""
    path = results / "curves" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def draw_nuts(results: Path, methods: Iterable[str], command: str) -> None:
    """Fit the regression by ``methods`` that the file of the curves does not have, and draw all that it has.

    The exact band is that of NUTS. All fits have seed 0.
    """
    problem = nuts.regression()
    about = {"line": _BANDS, "command": command, "version": __version__}
    for method in methods:
        if method in read_curves(results, "nuts").get("methods", {}):
            continue
        with seeded(0):
            columns = nuts.METHODS[method](problem, 0).predicted
        curve = {name: [round(float(value), 4) for value in columns[name]] for name in ("mean", "sd")}
        with locked(results):
            curves = {**read_curves(results, "nuts").get("methods", {}), method: curve}
            (results / "curves").mkdir(exist_ok=True)
            write_atomically(results / "curves" / "nuts.json", json.dumps({**about, "methods": curves}).encode())
    _draw_bands(problem, read_curves(results, "nuts")["methods"], results / "nuts")


def _draw_bands(problem: nuts.Problem, curves: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    columns = min(len(curves), 2)
    figure, every = figures.panels("x", "y", -(-len(curves) // columns), columns)
    x, exact = problem.grid[:, 0].numpy(), {name: values.numpy() for name, values in problem.exact.items()}
    for axes, (method, ours) in zip(every.flat, curves.items(), strict=False):
        mean, sd = (np.array(ours[name]) for name in ("mean", "sd"))
        axes.fill_between(x, *_band(exact["mean"], exact["sd"]), color="#9aa0a6", alpha=0.45, lw=0, label="NUTS")
        axes.fill_between(x, *_band(mean, sd), color=figures.OURS, alpha=0.3, lw=0, label="ours")
        axes.plot(x, exact["mean"], color="#5f6368", linewidth=1, linestyle="--")
        axes.plot(x, mean, color=figures.OURS, linewidth=1.6)
        axes.plot(problem.inputs[:, 0], problem.targets[:, 0], "k.", markersize=3)
        axes.set_title(method, loc="left", fontsize=10.5)
        axes.set_ylim(-3.2, 3.2)
    for axes in every.flat[len(curves) :]:
        axes.remove()
    figures.finish(figure, every.flat[0], path, suffixes=("png",), loc="upper right")


def _band(mean: NDArray[Any], sd: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    return mean - 2 * sd, mean + 2 * sd
