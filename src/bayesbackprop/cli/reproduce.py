"""``bbb train`` and ``bbb reproduce``."""

import math
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import torch
import typer

from bayesbackprop import data
from bayesbackprop.experiments import mnist, table1
from bayesbackprop.progress import Progress
from bayesbackprop.train import distributed

app = typer.Typer(help="The tables and figures of the paper, one command each.", no_args_is_help=True)

Units = Annotated[list[int], typer.Option(min=1, help="Of each hidden layer; may be repeated.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds, counted from 0.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")]
Quick = Annotated[bool, typer.Option("--quick", help="Minutes instead of hours: small, short, one seed.")]
Runs = Annotated[Path, typer.Option(file_okay=False, help="For checkpoints; a run that was stopped goes on there.")]
Results = Annotated[Path, typer.Option(file_okay=False, help="For tables and pictures.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch; all cores unless given.")]

_METHODS = list(table1.PUBLISHED)
_UNITS = [400, 800, 1200]


@app.command("table1")
def reproduce_table1(
    methods: Annotated[list[str], typer.Option("--method", help="Rows; may be repeated.")] = _METHODS,
    units: Units = _UNITS,
    seeds: Seeds = 3,
    epochs: Epochs = None,
    temperatures: Annotated[
        list[float], typer.Option("--temperature", min=0, help="Of the complexity; 1 is the paper's cost.")
    ] = [1.0],  # noqa: B006
    quick: Quick = False,
    runs: Runs = Path("runs"),
    results: Results = Path("results"),
    threads: Threads = None,
) -> None:
    """Test errors on MNIST. Hours; can be stopped and started again at any time.

    Example: `bbb reproduce table1 --method bbb-mixture --units 400 --seeds 1`
    """
    _set_threads(threads)
    for method in methods:
        if method not in mnist.METHODS:
            raise typer.BadParameter(f"'{method}' is none of {', '.join(mnist.METHODS)}.", param_hint="--method")
    if quick:
        units, seeds, epochs, results = [100], 1, 3, runs / "quick"
    configs = table1.cells(methods, units, range(seeds), temperatures, epochs)  # type: ignore[arg-type]
    rows = table1.reproduce(configs, data.mnist(), runs, results, _command(), Progress)
    _show(rows)


def train(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(mnist.METHODS)}.")] = "bbb-mixture",
    units: Annotated[int, typer.Option(min=1, help="Of each hidden layer.")] = 400,
    epochs: Epochs = None,
    learning_rate: Annotated[float | None, typer.Option(min=0, help="Instead of the recipe's.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Monte Carlo samples a step.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="Of the complexity; 1 is the paper's cost.")] = 1.0,
    averaging: Annotated[float | None, typer.Option(min=0, max=1, help="Of the parameters, over steps.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    folder: Annotated[Path, typer.Option(file_okay=False, help="For checkpoints and the model.")] = Path("runs/train"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    threads: Threads = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a network on MNIST; with torchrun on several processes.

    Example: `bbb train --units 400 --epochs 10 --folder runs/first`
    """
    _set_threads(threads)
    if method not in mnist.METHODS:
        raise typer.BadParameter(f"'{method}' is none of {', '.join(mnist.METHODS)}.", param_hint="--method")
    if (folder / "checkpoint.safetensors").exists() and not resume:
        raise typer.BadParameter(f"{folder} holds a run already: --resume goes on with it.", param_hint="--folder")
    (config,) = table1.cells([method], [units], [seed], [temperature], epochs)  # type: ignore[list-item]
    changes: dict[str, Any] = {"learning_rate": learning_rate, "averaging": averaging}
    schedule = replace(config.schedule, **{name: value for name, value in changes.items() if value is not None})
    config = replace(config, schedule=schedule, draws=draws)
    with distributed():
        leads = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        progress = Progress(table1.name_of(config), quiet=not leads, tensorboard=folder / "tensorboard")
        result = mnist.run(config, data.mnist(), folder, progress)
        if not leads:
            return
    if json:
        rich.console.Console().print_json(data=asdict(result))
    else:
        _show([result])


def _show(rows: list[mnist.Result]) -> None:
    table = rich.table.Table("method", "T", "units", "epochs", "seeds", "test error %", "paper", title="MNIST")
    for (method, temperature, units, epochs), (error, spread, seeds) in table1.summary(rows).items():
        published = table1.PUBLISHED.get(method, {}).get(units)
        shown = f"{error:.2f}" + ("" if math.isnan(spread) else f" ± {spread:.2f}")
        cells = (method, f"{temperature:g}", units, epochs, seeds, shown, "" if published is None else published)
        table.add_row(*map(str, cells))
    rich.console.Console().print(table)


def _command() -> str:
    return shlex.join(["bbb", *sys.argv[1:]])


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
