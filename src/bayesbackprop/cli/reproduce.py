"""``bbb train``, ``bbb search`` and ``bbb reproduce``."""

import json as jsons
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import rich.console
import rich.progress
import rich.table
import torch
import typer

from bayesbackprop import data
from bayesbackprop.cli.bandit import live
from bayesbackprop.experiments import bandit, figures, mnist, page, regression, table1, table2
from bayesbackprop.experiments import search as experiments_search
from bayesbackprop.experiments.records import write_line
from bayesbackprop.files import write_atomically
from bayesbackprop.progress import Progress
from bayesbackprop.train import Examples, distributed

app = typer.Typer(help="The tables and figures of the paper, one command each.", no_args_is_help=True)

_Value = TypeVar("_Value")

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


@dataclass(frozen=True)
class _Extent:
    """What of the recipes to run, and where; ``shown`` are the units of the networks in the figures."""

    units: Sequence[int]
    seeds: int
    epochs: int | None
    runs: Path
    results: Path
    shown: int = 1200

    def cells(self, methods: Sequence[str], temperatures: Sequence[float] = (1.0,)) -> list[mnist.Config]:
        return table1.cells(methods, self.units, range(self.seeds), temperatures, self.epochs)

    def run(self, configs: Sequence[mnist.Config], images: data.Images) -> list[mnist.Result]:
        return table1.reproduce(configs, images, self.runs, self.results, _command(), Progress, curves=self.shown)

    def trained(self, methods: Sequence[str], images: data.Images) -> dict[mnist.Config, Path]:
        """The folders of the networks of Table 1."""
        configs = self.cells(methods)
        self.run(configs, images)
        return {config: self.runs / table1.name_of(config) for config in configs}

    def trained_to_be_pruned(self, images: data.Images) -> dict[mnist.Config, Path]:
        """The folders of the networks of Table 2."""
        runs = self.runs / "table2"
        configs = [table1.sized(table2.RECIPE, self.units[0], seed, self.epochs) for seed in range(self.seeds)]
        for config in configs:
            table1.finished(config, images, runs, _command(), Progress, curve=False)
        return {config: runs / table1.name_of(config) for config in configs}


def _extent(quick: bool, units: Sequence[int], seeds: int, epochs: int | None, runs: Path, results: Path) -> _Extent:
    """What was asked for; what is quick has a folder of its own, for it is no result."""
    own = runs / "quick"
    return _Extent([100], 1, 3, own, own, shown=100) if quick else _Extent(units, seeds, epochs, runs, results)


@app.command("table1")
def reproduce_table1(
    methods: Annotated[
        list[str], typer.Option("--method", help=f"Rows, of {', '.join(table1.RECIPES)}; may be repeated.")
    ] = _METHODS,
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
    set_threads(threads)
    for method in methods:
        _check_method(method, list(table1.RECIPES))
    extent = _extent(quick, units, seeds, epochs, runs, results)
    _show(extent.run(extent.cells(methods, temperatures), data.mnist()))


def _figure(
    name: str,
    trained: Callable[[_Extent, data.Images], dict[mnist.Config, Path]],
    draw: Callable[[Mapping[mnist.Config, Path], Path], str],
    shows: str,
) -> None:
    """Make the command that reproduces a figure, of the first seed of 2x1200 networks."""

    @app.command(name, help=f"{shows} (2x1200).\n\nExample: `bbb reproduce {name}`")
    def reproduce_figure(
        epochs: Epochs = None,
        quick: Quick = False,
        runs: Runs = _RUNS,
        results: Results = _RESULTS,
        threads: Threads = None,
    ) -> None:
        set_threads(threads)
        extent = _extent(quick, [1200], 1, epochs, runs, results)
        line = draw(trained(extent, data.mnist()), extent.results)
        write_line(extent.results / f"{name}.json", line, _command())
        rich.console.Console().print(line)


def _shown(extent: _Extent, images: data.Images) -> dict[mnist.Config, Path]:
    return extent.trained(list(figures.STYLE), images)


_figure("fig2", _shown, figures.fig2, "The test error as training progresses")
_figure("fig3", _shown, figures.fig3, "Densities of the trained weights")
_figure(
    "fig4",
    _Extent.trained_to_be_pruned,
    figures.fig4,
    "Density and CDF of the signal-to-noise ratio of the weights of the network of table2",
)


@app.command("table2")
def reproduce_table2(
    units: Annotated[int, typer.Option(min=1, help="Of each hidden layer.")] = 1200,
    seeds: Seeds = 3,
    epochs: Epochs = None,
    quick: Quick = False,
    runs: Runs = _RUNS,
    results: Results = _RESULTS,
    threads: Threads = None,
) -> None:
    """Test error, file size and latency after pruning by signal-to-noise ratio.

    Example: `bbb reproduce table2 --seeds 1`
    """
    set_threads(threads)
    images = data.mnist()
    found: list[table2.Row] = []
    extent = _extent(quick, [units], seeds, epochs, runs, results)
    for config, folder in extent.trained_to_be_pruned(images).items():
        model = figures.bayesian_in(folder)
        found += table2.rows(model, config.units, config.seed, Examples(*images.test), list(table2.PUBLISHED))
    table2.write(extent.results / "table2.csv", found)
    recipe = mnist.describe(table1.sized(table2.RECIPE, extent.units[0], 0, extent.epochs))
    about = {f"{extent.units[0]} units": {"command": _command(), **recipe}}
    write_atomically(extent.results / "table2.json", jsons.dumps(about, indent=1).encode())
    columns = ("removed", "seed", "weights", "test error %", "paper", "bytes", "µs an image")
    table = rich.table.Table(*columns, title=f"2x{extent.units[0]}; the paper's: 2x1200")
    for row in found:
        cells = (f"{row.fraction:.0%}", row.seed, row.weights_left, f"{row.test_error:.2f}", row.file_bytes)
        published = table2.PUBLISHED[row.fraction]
        table.add_row(*map(str, (*cells[:4], published, cells[4], f"{row.latency_us:.0f}")))
    rich.console.Console().print(table)


@app.command("fig5")
def reproduce_fig5(
    seeds: Seeds = 5,
    steps: Annotated[int | None, typer.Option(min=1, help="Of training, instead of the recipe's.")] = None,
    variants: Annotated[
        list[str], typer.Option("--variant", help="The data: as the figure's look, or as the formula says.")
    ] = list(regression.VARIANTS),  # noqa: B006
    quick: Quick = False,
    runs: Runs = _RUNS,
    results: Results = _RESULTS,
    threads: Threads = None,
) -> None:
    """Regression curves with their bands: Bayes by Backprop and a standard network.

    Example: `bbb reproduce fig5 --seeds 1`
    """
    set_threads(threads)
    if quick:
        seeds, steps, results = 1, 500, runs / "quick"
    changes: dict[str, Any] = {} if steps is None else {"steps": steps}
    configs = [
        regression.Config(method, variant, seed=seed, **changes)  # type: ignore[arg-type]
        for seed in range(seeds)
        for variant in variants
        for method in regression.METHODS
    ]
    curves = {config: regression.fit(config) for config in tracked(configs, "fitting")}
    rich.console.Console().print(regression.fig5(curves, results, _command()))


@app.command("fig6")
def reproduce_fig6(
    seeds: Seeds = 5,
    steps: Annotated[int, typer.Option(min=1, help="Interactions of each agent.")] = 50_000,
    updates: Annotated[int, typer.Option(min=1, help="Minibatches after each interaction; 64 in the paper.")] = 4,
    quick: Quick = False,
    runs: Runs = _RUNS,
    results: Results = _RESULTS,
    cores: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
) -> None:
    """The regret of Thompson sampling and of epsilon-greedy agents on mushrooms. Hours; can be stopped at any time.

    Example: `bbb reproduce fig6 --steps 5000`
    """
    if quick:
        seeds, steps, updates, results = 2, 500, 4, runs / "quick"
    jobs = [bandit.Job("mushroom", group, tuple(range(seeds)), steps, updates) for group in bandit.GROUPS]
    with live(jobs) as says:
        points = bandit.run_all(jobs, runs / "bandit", cores, says)
    rich.console.Console().print(bandit.fig6(points, results, _command()))


@app.command("page")
def reproduce_page(
    results: Results = _RESULTS,
    docs: Annotated[Path, typer.Option(file_okay=False, help="Where the page goes.")] = Path("docs"),
    readme: Annotated[
        Path | None, typer.Option(dir_okay=False, exists=True, help="Also write a summary between the marks in it.")
    ] = None,
) -> None:
    """Write the page of results from the files that the other commands wrote.

    Example: `bbb reproduce page`
    """
    if readme is not None:
        page.write_summary(results, readme)
    rich.console.Console().print(str(page.write(results, docs)))


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
    """Train a network on MNIST; under torchrun on several processes.

    Example: `bbb train --units 400 --epochs 10 --folder runs/first`
    """
    set_threads(threads)
    _check_method(method)
    if (folder / "checkpoint.safetensors").exists() and not resume:
        raise typer.BadParameter(f"{folder} holds a run already: --resume goes on with it.", param_hint="--folder")
    (config,) = table1.cells([method], [units], [seed], [temperature], epochs)
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
    """Choose hyperparameters on the validation set.

    Can be stopped and started again, on many machines at once.

    Example: `bbb search --method sgd --units 400 --epochs 10 --trials 12`
    """
    set_threads(threads)
    _check_method(method)
    if space not in ("paper", "ours"):
        raise typer.BadParameter(f"'{space}' is neither 'paper' nor 'ours'.", param_hint="--space")
    (config,) = table1.cells([method], [units], [seed], epochs=epochs)
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


def tracked(values: Sequence[_Value], what: str) -> Iterator[_Value]:
    """The values one after the other, with a bar on a terminal and a line for each elsewhere."""
    console = rich.console.Console(stderr=True)
    if console.is_terminal:
        yield from rich.progress.track(values, what, console=console)
        return
    for number, value in enumerate(values, start=1):
        print(f"{what} {number}/{len(values)}", file=sys.stderr, flush=True)
        yield value


def _check_method(method: str, methods: Sequence[str] = mnist.METHODS) -> None:
    if method not in methods:
        raise typer.BadParameter(f"'{method}' is none of {', '.join(methods)}.", param_hint="--method")


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


def set_threads(threads: int | None) -> None:
    """Threads of torch; as many as there are cores unless given."""
    if threads is not None:
        torch.set_num_threads(threads)
