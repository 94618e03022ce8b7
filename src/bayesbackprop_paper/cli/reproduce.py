"""``bbb train``, ``bbb search`` and ``bbb reproduce``."""

import math
import os
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

from bayesbackprop.callbacks import Callback, TensorBoard
from bayesbackprop.training import TerminatedError, distributed
from bayesbackprop_paper import data
from bayesbackprop_paper.cli.bandit import live
from bayesbackprop_paper.experiments import bandit, figures, mnist, page, regression, table1, table2
from bayesbackprop_paper.experiments import search as experiments_search
from bayesbackprop_paper.experiments.recipe import CHECKPOINT, Examples, progress
from bayesbackprop_paper.experiments.records import command, locked, remember, write_line

app = typer.Typer(help="The tables and figures of the paper, one command each.", no_args_is_help=True)

_Value = TypeVar("_Value")

Units = Annotated[
    list[int] | None, typer.Option(min=1, help="Of each hidden layer; may be repeated. [default: 400, 800, 1200]")
]
OneUnits = Annotated[int | None, typer.Option(min=1, help="Of each hidden layer. [default: 1200]")]
Seeds = Annotated[int | None, typer.Option(min=1, help="How many, counted from 0. [default: 3]")]
FiveSeeds = Annotated[int | None, typer.Option(min=1, help="How many, counted from 0. [default: 5]")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Minutes instead of hours: small, short, one seed, unless you say otherwise.")
]
Runs = Annotated[Path, typer.Option(file_okay=False, help="For checkpoints; a run that was stopped goes on there.")]
Results = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="For tables and pictures. [default: results; runs/quick with --quick]"),
]
Written = Annotated[Path, typer.Option(file_okay=False, help="Where the tables and pictures are.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch; all cores unless given.")]

_METHODS = list(table1.PUBLISHED)
_UNITS = list(table1.PUBLISHED["sgd"])

# What a search says beside the options of `bbb train`.
_FOUND = ("validation_error", "trials")

# Whose networks Table 2 and figure 4 are about.
_PRUNED = ["bbb-mixture"]

_RUNS = Path("runs")
_RESULTS = Path("results")


@dataclass(frozen=True)
class _Extent:
    """What of the recipes to run, and where."""

    units: Sequence[int]
    seeds: int
    epochs: int | None
    runs: Path
    results: Path

    def cells(self, methods: Sequence[str], temperatures: Sequence[float] = (1.0,)) -> list[mnist.Config]:
        return table1.cells(methods, self.units, range(self.seeds), temperatures, self.epochs)

    def run(self, configs: Sequence[mnist.Config], images: data.Images) -> list[mnist.Result]:
        rows = table1.reproduce(configs, images, self.runs, self.results, command(), progress)
        table1.draw(rows, self.results / "table1")
        return rows

    def trained(self, methods: Sequence[str], images: data.Images) -> dict[mnist.Config, Path]:
        """The folders of the networks of Table 1."""
        configs = self.cells(methods)
        self.run(configs, images)
        return {config: self.runs / table1.name_of(config) for config in configs}


def _extent(
    quick: bool,
    sizes: Sequence[int],
    units: Sequence[int] | int | None,
    seeds: int | None,
    epochs: int | None,
    runs: Path,
    results: Path | None,
) -> _Extent:
    """What was asked for; else all, or what is quick, which goes elsewhere, for it is no result."""
    own = runs / "quick"
    base = _Extent([100], 1, 3, own, own) if quick else _Extent(sizes, 3, None, runs, _RESULTS)
    chosen = [units] if isinstance(units, int) else units
    return _Extent(chosen or base.units, seeds or base.seeds, epochs or base.epochs, base.runs, results or base.results)


def _wrote(results: Path, name: str) -> None:
    """Say where a result is."""
    made = sorted(path.suffix[1:] for path in results.glob(f"{name}.*") if path.suffix != ".json")
    rich.console.Console(stderr=True).print(f"Wrote {results / name}: {', '.join(made)}.", soft_wrap=True)


@app.command("table1")
def reproduce_table1(
    methods: Annotated[
        list[str], typer.Option("--method", help=f"Rows, of {', '.join(table1.RECIPES)}; may be repeated.")
    ] = _METHODS,
    units: Units = None,
    seeds: Seeds = None,
    epochs: Epochs = None,
    temperatures: Annotated[
        list[float], typer.Option("--temperature", min=0, help="Of the complexity; 1 is the paper's cost.")
    ] = [1.0],  # noqa: B006
    verify: Annotated[
        list[str], typer.Option(metavar="ROW", help="Train a row again, and say whether it is the same to the digit.")
    ] = [],  # noqa: B006
    quick: Quick = False,
    runs: Runs = _RUNS,
    results: Results = None,
    threads: Threads = None,
) -> None:
    """Test errors on MNIST. Hours; can be stopped and started again at any time.

    A row of results/table1.json is verified by its name. The package has no results: run it in a clone of the
    repository, or give the folder by `--results`.

    Example: `bbb reproduce table1 --method bbb-mixture --units 400 --seeds 1`

    Example: `bbb reproduce table1 --verify sgd-400-40epochs-seed0`
    """
    if verify:
        _verify(verify, runs, results or _RESULTS)
        return
    set_threads(threads)
    for method in methods:
        _check_method(method, list(table1.RECIPES))
    extent = _extent(quick, _UNITS, units, seeds, epochs, runs, results)
    rows = extent.run(extent.cells(methods, temperatures), data.mnist())
    _show(rows)
    rich.console.Console(highlight=False).print(table1.difference(rows), soft_wrap=True)
    _wrote(extent.results, "table1")


def _verify(names: Sequence[str], runs: Path, results: Path) -> None:
    """Train rows of Table 1 again; the exit code is 1 if one is not the same."""
    console, images, changed = rich.console.Console(soft_wrap=True, highlight=False), data.mnist(), False
    for name in names:
        verified = table1.verify(name, images, runs, results, command(), progress)
        differences = verified.differing()
        changed = changed or bool(differences)
        if not differences:
            console.print(f"{name}: the same, test error {verified.now.test_error:.2f} %")
            continue
        console.print(f"{name}: {_listed(differences)}")
        if verified.arithmetic:
            console.print(f"{name}: other arithmetic, which may be why: {_listed(verified.arithmetic)}")
    if changed:
        raise typer.Exit(1)


def _listed(pairs: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{what} was {before} and is {after}" for what, (before, after) in pairs.items())


def _figure(
    name: str, shown: Sequence[str], draw: Callable[[Mapping[mnist.Config, Path], Path, mnist.Config], str], shows: str
) -> None:
    """Make the command that reproduces a figure of networks of Table 1."""

    @app.command(name, help=f"{shows}.\n\nExample: `bbb reproduce {name} --seeds 1`")
    def reproduce_figure(
        methods: Annotated[
            list[str],
            typer.Option("--method", help="Whose networks to train; other curves stay as they are in the table."),
        ] = list(shown),  # noqa: B006
        units: OneUnits = None,
        seeds: Seeds = None,
        epochs: Epochs = None,
        quick: Quick = False,
        runs: Runs = _RUNS,
        results: Results = None,
        threads: Threads = None,
    ) -> None:
        set_threads(threads)
        for method in methods:
            _check_method(method, shown)
        extent = _extent(quick, [1200], units, seeds, epochs, runs, results)
        (recipe,) = table1.cells(_PRUNED, extent.units, [0], epochs=extent.epochs)
        line = draw(extent.trained(methods, data.mnist()), extent.results, recipe)
        write_line(extent.results / f"{name}.json", line, command(), methods)
        rich.console.Console().print(line)
        _wrote(extent.results, name)


_figure("fig2", list(figures.STYLE), figures.fig2, "The test error as training progresses")
_figure("fig3", list(figures.STYLE), figures.fig3, "Densities of the trained weights")
_figure(
    "fig4", _PRUNED, figures.fig4, "Density and CDF of the signal-to-noise ratio of the weights of table2's networks"
)


@app.command("table2")
def reproduce_table2(
    units: OneUnits = None,
    seeds: Seeds = None,
    epochs: Epochs = None,
    quick: Quick = False,
    runs: Runs = _RUNS,
    results: Results = None,
    threads: Threads = None,
) -> None:
    """Test error, file size and latency after pruning by signal-to-noise ratio.

    Example: `bbb reproduce table2 --seeds 1`
    """
    set_threads(threads)
    images = data.mnist()
    found: list[table2.Row] = []
    extent = _extent(quick, [1200], units, seeds, epochs, runs, results)
    folders = extent.trained(_PRUNED, images)
    for config, folder in folders.items():
        model = figures.bayesian_in(folder)
        found += table2.rows(model, config.units, config.seed, Examples(*images.test), list(table2.PUBLISHED))
    with locked(extent.results):
        path = extent.results / "table2.csv"
        table2.write(path, [*table2.read(path), *found])
        table2.draw(table2.largest(table2.read(path)), extent.results / "table2")
        recipe = mnist.describe(next(iter(folders)))
        remember(extent.results / "table2.json", f"{extent.units[0]} units", {"command": command(), **recipe})
    columns = ("removed", "seed", "weights", "test error %", "paper", "bytes", "µs an image")
    table = rich.table.Table(*columns, title=f"2x{extent.units[0]}; the paper's: 2x1200")
    for row in found:
        cells = (f"{row.fraction:.0%}", row.seed, row.weights_left, f"{row.test_error:.2f}", row.file_bytes)
        published = table2.PUBLISHED[row.fraction]
        table.add_row(*map(str, (*cells[:4], published, cells[4], f"{row.latency_us:.0f}")))
    console = rich.console.Console(highlight=False)
    console.print(table)
    console.print(table2.difference(found), soft_wrap=True)
    _wrote(extent.results, "table2")


@app.command("fig5")
def reproduce_fig5(
    seeds: FiveSeeds = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of training, instead of the recipe's.")] = None,
    variants: Annotated[
        list[str], typer.Option("--variant", help="The data: as the figure's look, or as the formula says.")
    ] = list(regression.VARIANTS),  # noqa: B006
    quick: Quick = False,
    runs: Runs = _RUNS,
    results: Results = None,
    threads: Threads = None,
) -> None:
    """Regression curves with their bands: Bayes by Backprop and a standard network.

    Example: `bbb reproduce fig5 --seeds 1`
    """
    set_threads(threads)
    results = results or (runs / "quick" if quick else _RESULTS)
    steps = steps or (500 if quick else None)
    changes: dict[str, Any] = {} if steps is None else {"steps": steps}
    configs = [
        regression.Config(method, variant, seed=seed, **changes)  # type: ignore[arg-type]
        for seed in range(seeds or (1 if quick else 5))
        for variant in variants
        for method in regression.METHODS
    ]
    curves = {config: regression.fit(config) for config in tracked(configs, "fitting")}
    rich.console.Console().print(regression.fig5(curves, results, command()))
    _wrote(results, "fig5")


@app.command("fig6")
def reproduce_fig6(
    seeds: FiveSeeds = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Interactions of each agent. [default: 50000]")] = None,
    updates: Annotated[int, typer.Option(min=1, help="Minibatches after each interaction; 64 in the paper.")] = 4,
    quick: Quick = False,
    runs: Runs = _RUNS,
    results: Results = None,
    cores: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
) -> None:
    """The regret of Thompson sampling and of epsilon-greedy agents on mushrooms. Hours; can be stopped at any time.

    Example: `bbb reproduce fig6 --steps 5000`
    """
    results = results or (runs / "quick" if quick else _RESULTS)
    numbers, steps = tuple(range(seeds or (2 if quick else 5))), steps or (500 if quick else 50_000)
    jobs = bandit.jobs_of("mushroom", bandit.GROUPS, numbers, steps, updates)
    with live(jobs) as says:
        points = bandit.run_all(jobs, runs / "bandit", cores, says)
    rich.console.Console().print(bandit.fig6(points, results, command()))
    _wrote(results, "fig6")


@app.command("page")
def reproduce_page(
    results: Written = _RESULTS,
    docs: Annotated[Path, typer.Option(file_okay=False, help="Where the page goes.")] = Path("docs"),
    readme: Annotated[
        Path | None, typer.Option(dir_okay=False, exists=True, help="Also write a summary between the marks in it.")
    ] = None,
) -> None:
    """Write the page of results from the files that the other commands wrote.

    Example: `bbb reproduce page`
    """
    written = page.write(results, docs)
    if readme is not None:
        page.write_summary(results, readme)
    rich.console.Console().print(str(written))


def train(
    method: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(mnist.METHODS)}. [default: {mnist.Config.method}]")
    ] = None,
    units: Annotated[int | None, typer.Option(min=1, help="Of each hidden layer. [default: 400]")] = None,
    epochs: Epochs = None,
    learning_rate: Annotated[float | None, typer.Option(help="Above 0, instead of the recipe's.")] = None,
    rho_rate: Annotated[float | None, typer.Option(help="The rate of rho, in those of mu.")] = None,
    draws: Annotated[int | None, typer.Option(min=1, help="Monte Carlo samples a step. [default: 1]")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Of the complexity. [default: 1, the paper's cost]")
    ] = None,
    pi: Annotated[float | None, typer.Option(min=0, max=1, help="Of the scale mixture.")] = None,
    sigma1: Annotated[float | None, typer.Option(help="Of the scale mixture, the slab.")] = None,
    sigma2: Annotated[float | None, typer.Option(help="Of the scale mixture, the spike.")] = None,
    prior_sigma: Annotated[float | None, typer.Option(help="Of the Gaussian prior, or the Laplace prior.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Of the posterior, at the start.")] = None,
    dropout: Annotated[
        float | None, typer.Option(min=0, max=1, help="How likely to forget a unit, inputs too.")
    ] = None,
    averaging: Annotated[
        float | None, typer.Option(min=0, help="Of the parameters, over steps: 0 for none, or a factor below 1.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything random. [default: 0]")] = None,
    folder: Annotated[Path, typer.Option(file_okay=False, help="For checkpoints and the model.")] = Path("runs/train"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in the folder, as it began, without repeating its options. The very same command "
            "goes on without it.",
        ),
    ] = False,
    threads: Threads = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a network on MNIST; under torchrun on several processes.

    Example: `bbb train --units 400 --epochs 10 --folder runs/first`
    """
    set_threads(threads)
    begun = (folder / CHECKPOINT).exists()
    if resume and not begun:
        raise typer.BadParameter(f"There is no run in {folder}: without --resume one starts.", param_hint="--resume")
    rates = {"learning_rate": learning_rate, "rho_rate": rho_rate}
    scales = {"pi": pi, "sigma1": sigma1, "sigma2": sigma2, "prior_sigma": prior_sigma, "sigma": sigma}
    tuned = _given({**rates, **scales, "dropout": dropout, "draws": draws, "temperature": temperature})
    config = mnist.began(folder) if resume else _recipe(method, temperature)
    config = replace(config, **_given({"method": method, "units": units, "seed": seed}))
    for name in tuned.keys() - config.matters:
        hint = f"--{name.replace('_', '-')}"
        raise typer.BadParameter(f"This has no meaning for {config.method}.", param_hint=hint)
    schedule = replace(config.schedule, **_given({"epochs": epochs, "averaging": averaging, "seed": seed, **rates}))
    config = config.changed(schedule=schedule, **{name: tuned[name] for name in tuned.keys() - rates})
    if begun and not resume:
        _check_same(config, folder)
    leads = int(os.environ.get("RANK", 0)) == 0  # torchrun's number of this process
    says = rich.console.Console(stderr=True, quiet=not leads, soft_wrap=True, highlight=False)
    result = mnist.finished(config, folder) if begun else None
    if result is not None:
        says.print(f"The run in {folder} is complete.")
    else:
        if begun:
            says.print(f"Going on with the run in {folder}.")
        shown = [progress(table1.name_of(config)), *_tensorboard(folder / "tensorboard")]
        try:
            with distributed():
                result = mnist.run(config, data.mnist(), folder, *shown)
        except (KeyboardInterrupt, TerminatedError):
            says.print(f"To go on: the same command again, or bbb train --folder {shlex.quote(str(folder))} --resume")
            raise
        if leads:
            mnist.write_result(config, folder, result, command())
        says.print(f"Wrote {folder / mnist.MODEL}.")
    if not leads:
        return
    if json:
        rich.console.Console().print_json(data=asdict(result))
    else:
        _show([result])


def _check_same(config: mnist.Config, folder: Path) -> None:
    """Refuse to go on with a run of other settings: the same command, which a scheduler repeats, has the same."""
    mine, theirs = mnist.flat(config), mnist.flat(mnist.began(folder))
    if changed := sorted(name for name in mine if mine[name] != theirs[name]):
        now, then = ({name: which[name] for name in changed} for which in (mine, theirs))
        what = f"{folder} holds a run already, with {then} instead of {now}"
        raise typer.BadParameter(f"{what}: --resume goes on with it.", param_hint="--folder")


def _tensorboard(folder: Path) -> list[Callback]:
    """What writes for TensorBoard, if it is installed."""
    try:
        return [TensorBoard(folder)]
    except ModuleNotFoundError:
        return []


def _recipe(method: str | None, temperature: float | None) -> mnist.Config:
    """What Table 1 has for a method."""
    chosen = mnist.Config.method if method is None else method
    _check_method(chosen)
    (config,) = table1.cells([chosen], [mnist.Config.units], [0], [1.0 if temperature is None else temperature])
    return config


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


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
    if storage is None:
        runs.mkdir(parents=True, exist_ok=True)
    try:
        best = experiments_search.search(
            config,
            data.mnist(),
            space=space,  # type: ignore[arg-type]
            trials=trials,
            storage=storage or f"sqlite:///{runs / 'search.db'}",
            name=f"{space}-{method}-{units}-{config.schedule.epochs}epochs",
            folder=runs / "search",
            progress=progress,
        )
    except (KeyboardInterrupt, TerminatedError):
        rich.console.Console(stderr=True).print("The same command goes on with this trial.")
        raise
    rich.console.Console().print_json(data=best)
    base = {"method": method, "units": units, "epochs": config.schedule.epochs, "seed": seed, "folder": runs / "best"}
    chosen = {**base, **{name: value for name, value in best.items() if name not in _FOUND}}
    again = " ".join(["bbb train", *(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())])
    rich.console.Console(stderr=True).print(f"To train it: {again}", soft_wrap=True, highlight=False)


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
    method_column = rich.table.Column("method", overflow="fold")
    table = rich.table.Table(method_column, "T", "units", "epochs", "seeds", "test error %", "paper", title="MNIST")
    for (method, temperature, units, epochs), (error, spread, seeds) in table1.summary(rows).items():
        published = table1.published(method, units)
        shown = f"{error:.2f}" + ("" if math.isnan(spread) else f" ± {spread:.2f}")
        cells = (method, f"{temperature:g}", units, epochs, seeds, shown, "" if published is None else published)
        table.add_row(*map(str, cells))
    rich.console.Console().print(table)


def set_threads(threads: int | None) -> None:
    """Threads of torch; as many as there are cores unless given."""
    if threads is not None:
        torch.set_num_threads(threads)
