"""``bbb evaluate``."""

import json as json_format
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import rich.box
import rich.console
import rich.table
import torch
import typer

from bayesbackprop._errors import Described, invalid
from bayesbackprop._files import write_atomically
from bayesbackprop._networks import from_file
from bayesbackprop.evaluation import Calibration, calibration, score
from bayesbackprop.export import SparseNetwork
from bayesbackprop.likelihoods import Categorical
from bayesbackprop.model import Bayesian
from bayesbackprop.prediction import Predictive, predictive
from bayesbackprop_paper import data
from bayesbackprop_paper.data import Split
from bayesbackprop_paper.experiments import diagrams

_LOADERS = {"mnist": data.mnist, "fashion-mnist": data.fashion_mnist}

# Of tables that go to a file or a pipe.
_WIDTH = 120


def command(
    checkpoints: Annotated[
        list[Path], typer.Argument(help="Files of `bbb.save` (fully connected networks) and of `bbb prune`.")
    ],
    data_set: Annotated[str, typer.Option("--data", help=f"What to predict: {', '.join(_LOADERS)}.")] = "mnist",
    split: Annotated[str, typer.Option(help=f"Which part of it: {', '.join(data.Images._fields)}.")] = "test",
    draws: Annotated[int, typer.Option(min=0, help="Networks to average; 0 for the means alone.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the rows to this file.", show_default=False)
    ] = None,
    diagram: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Also draw a reliability diagram, PNG or SVG.", show_default=False),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the data are.", show_default=False)] = None,
) -> None:
    """Error, NLL, Brier score and calibration of networks.

    Each by its means and by draws.

    Example: `bbb evaluate model.safetensors model-95.safetensors --draws 100 --diagram reliability.svg`
    """
    for name, value, known in (("--data", data_set, _LOADERS), ("--split", split, data.Images._fields)):
        if value not in known:
            raise invalid(name, "bbb evaluate", f"one of {', '.join(known)}", value)
    if json is not None and json.name.startswith("-"):
        raise invalid("--json", "bbb evaluate", "followed by the name of a file", str(json))
    if diagram is not None:
        diagrams.check_suffix(diagram, "bbb evaluate --diagram")
    networks = {path: from_file(path, "bbb evaluate") for path in checkpoints}
    examples: Split = getattr(_LOADERS[data_set](folder), split)
    # The files of runs have the same name: what is shown is the path below the folder that all have in common.
    common = os.path.commonpath([path.absolute().parent for path in checkpoints])
    names = {path: str(path.absolute().relative_to(common)) for path in checkpoints}
    rows: list[dict[str, Any]] = []
    calibrations: dict[str, Calibration] = {}
    console = rich.console.Console()
    for path, network in networks.items():
        with rich.console.Console(stderr=True).status(f"Evaluating {path.name}"):
            for by, prediction in _predictions(path, network, examples, draws, seed):
                found = calibrations[f"{names[path]} by {by}"] = calibration(prediction, examples.labels)
                error, *others = score(prediction, examples.labels)
                scores = dict(zip(("nll", "brier", "ece"), others, strict=True))
                rows.append(
                    {
                        "file": str(path),
                        "file_bytes": path.stat().st_size,
                        "by": by,
                        "data": data_set,
                        "split": split,
                        "examples": len(examples.labels),
                        "error_percent": 100 * error,
                        **scores,
                        "bins": [dict(zip(found._fields, entry, strict=True)) for entry in _bins(found)],
                    }
                )
    _show(console, rows, names)
    if json is not None:
        write_atomically(json, (json_format.dumps(rows, indent=1) + "\n").encode())
    if diagram is not None:
        diagrams.reliability(calibrations, diagram)


def _predictions(
    path: Path, network: Bayesian | SparseNetwork, examples: Split, draws: int, seed: int
) -> Iterator[tuple[str, Predictive]]:
    """How the network predicts, and what."""
    if not isinstance(network, Bayesian):
        with torch.inference_mode():
            yield "network", predictive(Categorical(), network(examples.images).unsqueeze(0), 1)
        return
    if not isinstance(network.likelihood, Categorical):
        got = Described(f"{path}, with the likelihood {network.likelihood}")
        raise invalid("checkpoint", "bbb evaluate", "a network that predicts classes", got)
    yield "mean", network.predict_mean(examples.images)
    if draws:
        yield f"{draws} draws", network.predict(examples.images, draws=draws, seed=seed)


def _bins(found: Calibration) -> Iterator[tuple[float | None, ...]]:
    """The bins one by one; what is not a number is None, which JSON has."""
    for examples, *others in zip(*(column.tolist() for column in found), strict=True):
        yield examples, *(value if examples else None for value in others)


def _show(console: rich.console.Console, rows: list[dict[str, Any]], names: dict[Path, str]) -> None:
    if not console.is_terminal:
        console.width = _WIDTH
    table = rich.table.Table(rich.table.Column("file", overflow="fold"), "by", box=rich.box.SIMPLE)
    for title in ("error %", "NLL", "Brier", "ECE %"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        numbers = f"{row['error_percent']:.2f}", f"{row['nll']:.4f}", f"{row['brier']:.4f}", f"{100 * row['ece']:.2f}"
        table.add_row(names[Path(row["file"])], row["by"], *numbers)
    console.print(table)
