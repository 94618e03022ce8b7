"""``bbb train``, ``bbb search`` and ``bbb reproduce``."""

import json as jsons
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import torch
import typer

from bayesbackprop import data
from bayesbackprop._version import __version__
from bayesbackprop.experiments import figures, mnist, page, table1, table2
from bayesbackprop.experiments import search as experiments_search
from bayesbackprop.files import write_atomically
from bayesbackprop.progress import Progress
from bayesbackprop.train import Examples, distributed

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
_RUNS = Path("runs")
_RESULTS = Path("results")


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
    runs: Runs = _RUNS,
    results: Results = _RESULTS,
    threads: Threads = None,
) -> None:
    """Test errors on MNIST. Hours; can be stopped and started again at any time.

    Example: `bbb reproduce table1 --method bbb-mixture --units 400 --seeds 1`
    """
    _set_threads(threads)
    for method in methods:
        _check_method(method)
    if quick:
        units, seeds, epochs, results = [100], 1, 3, runs / "quick"
    configs = table1.cells(methods, units, range(seeds), temperatures, epochs)  # type: ignore[arg-type]
    rows = table1.reproduce(configs, data.mnist(), runs, results, _command(), Progress)
    _show(rows)


def _figure(name: str, methods: Sequence[str], draw: Callable[[Mapping[str, Path], Path], str], shows: str) -> None:
    """Make the command that reproduces a figure."""

    @app.command(name, help=f"{shows} (2x1200).\n\nExample: `bbb reproduce {name}`")
    def reproduce_figure(
        epochs: Epochs = None, runs: Runs = _RUNS, results: Results = _RESULTS, threads: Threads = None
    ) -> None:
        line = draw(_folders(methods, epochs, runs, results, threads), results)
        rich.console.Console().print(line)


_figure("fig2", list(figures.STYLE), figures.fig2, "The test error as training progresses")
_figure("fig3", list(figures.STYLE), figures.fig3, "Densities of the trained weights")
_figure("fig4", ["bbb-mixture"], figures.fig4, "Density and CDF of the signal-to-noise ratio of the weights")


@app.command("table2")
def reproduce_table2(
    units: Annotated[int, typer.Option(min=1, help="Of each hidden layer.")] = 1200,
    seeds: Seeds = 3,
    epochs: Epochs = None,
    runs: Runs = _RUNS,
    results: Results = _RESULTS,
    threads: Threads = None,
) -> None:
    """Test error, file size and latency after pruning by signal-to-noise ratio.

    Example: `bbb reproduce table2 --seeds 1`
    """
    _set_threads(threads)
    images = data.mnist()
    found: list[table2.Row] = []
    for config in table1.cells(["bbb-mixture"], [units], range(seeds), epochs=epochs):
        table1.reproduce([config], images, runs, results, _command(), Progress)
        model = figures.bayesian_in(runs / table1.name_of(config))
        found += table2.rows(model, units, config.seed, Examples(*images.test), list(table2.PUBLISHED))
    table2.write(results / "table2.csv", found)
    about = {f"{units} units": {"command": _command(), "version": __version__}}
    write_atomically(results / "table2.json", jsons.dumps(about, indent=1).encode())
    table = rich.table.Table("removed", "seed", "weights", "test error %", "paper", "bytes", "µs an image")
    for row in found:
        cells = (f"{row.fraction:.0%}", row.seed, row.weights_left, f"{row.test_error:.2f}", row.file_bytes)
        published = table2.PUBLISHED[row.fraction]
        table.add_row(*map(str, (*cells[:4], published, cells[4], f"{row.latency_us:.0f}")))
    rich.console.Console().print(table)


@app.command("page")
def reproduce_page(
    results: Results = _RESULTS,
    docs: Annotated[Path, typer.Option(file_okay=False, help="Where the page goes.")] = Path("docs"),
) -> None:
    """Write the page of results from the files that the other commands wrote.

    Example: `bbb reproduce page`
    """
    rich.console.Console().print(str(page.write(results, docs)))


def _folders(
    methods: Sequence[str], epochs: int | None, runs: Path, results: Path, threads: int | None
) -> dict[str, Path]:
    """The runs of 2x1200 networks that a figure shows, the first seed of each, trained first where they are not."""
    _set_threads(threads)
    configs = table1.cells(methods, [1200], [0], epochs=epochs)  # type: ignore[arg-type]
    table1.reproduce(configs, data.mnist(), runs, results, _command(), Progress)
    return {config.method: runs / table1.name_of(config) for config in configs}


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
    _check_method(method)
    if (folder / "checkpoint.safetensors").exists() and not resume:
        raise typer.BadParameter(f"{folder} holds a run already: --resume goes on with it.", param_hint="--folder")
    (config,) = table1.cells([method], [units], [seed], [temperature], epochs)  # type: ignore[list-item]
    changes: dict[str, Any] = {"learning_rate": learning_rate, "averaging": averaging}
    schedule = replace(config.schedule, **{name: value for name, value in changes.items() if value is not None})
    config = replace(config, schedule=schedule, draws=draws)
    with distributed():
        leads = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        board = folder / "tensorboard" if leads else None
        progress = Progress(table1.name_of(config), quiet=not leads, tensorboard=board)
        result = mnist.run(config, data.mnist(), folder, progress)
        if not leads:
            return
    if json:
        rich.console.Console().print_json(data=asdict(result))
    else:
        _show([result])


def search(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(mnist.METHODS)}.")] = "bbb-mixture",
    units: Annotated[int, typer.Option(min=1, help="Of each hidden layer.")] = 400,
    epochs: Epochs = None,
    trials: Annotated[int, typer.Option(min=1, help="How many more to try.")] = 20,
    space: Annotated[str, typer.Option(help="'paper', its grid; or 'ours'.")] = "ours",
    storage: Annotated[str | None, typer.Option(help="Any of Optuna's; a file of SQLite's unless given.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random in a trial.")] = 0,
    runs: Runs = _RUNS,
    threads: Threads = None,
) -> None:
    """Choose hyperparameters on the validation set. Can be stopped and started again, on many machines at once.

    Example: `bbb search --method sgd --units 400 --epochs 10 --trials 12`
    """
    _set_threads(threads)
    _check_method(method)
    if space not in ("paper", "ours"):
        raise typer.BadParameter(f"'{space}' is neither 'paper' nor 'ours'.", param_hint="--space")
    (config,) = table1.cells([method], [units], [seed], epochs=epochs)  # type: ignore[list-item]
    runs.mkdir(parents=True, exist_ok=True)
    best = experiments_search.search(
        config,
        data.mnist(),
        space=space,  # type: ignore[arg-type]
        trials=trials,
        storage=storage or f"sqlite:///{runs / 'search.db'}",
        name=f"{space}-{method}-{units}-{config.schedule.epochs}epochs",
        folder=runs / "search",
        progress=Progress,
    )
    rich.console.Console().print_json(data=best)


def _check_method(method: str) -> None:
    if method not in mnist.METHODS:
        raise typer.BadParameter(f"'{method}' is none of {', '.join(mnist.METHODS)}.", param_hint="--method")


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
