"""``bbb truth``: how near the library comes to what is known, and to what others reach."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import rich.console
import typer

from bayesbackprop_paper.cli.reproduce import Threads, set_threads, tracked
from bayesbackprop_paper.experiments import compression, defaults, lora, networks, nuts, ood, truth, truth_page, uci
from bayesbackprop_paper.experiments.records import command

app = typer.Typer(help="How near the library comes to what is known.", no_args_is_help=True)

Seeds = Annotated[int, typer.Option(min=1, help="How many, counted from 0.")]
Methods = Annotated[list[str] | None, typer.Option("--method", help="Rows; may be repeated. [default: all]")]
Results = Annotated[Path, typer.Option(file_okay=False, help="For rows and tables; a stopped run goes on there.")]
OwnResults = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="As of the others. [default: results/truth; runs/quick with --quick]"),
]
Quick = Annotated[bool, typer.Option("--quick", help="Seconds, to see that all of it works; no figures to quote.")]
_RESULTS, _QUICK_RESULTS = Path("results/truth"), Path("runs/quick")


def chosen(given: Sequence[str] | None, known: Sequence[str], option: str) -> list[str]:
    """What was asked for, checked, or all."""
    for name in given or ():
        if name not in known:
            raise typer.BadParameter(f"'{name}' is none of {', '.join(known)}.", param_hint=option)
    return list(given or known)


def measured(
    name: str, runs: Sequence[truth.Run], measure: Callable[[truth.Run], truth.Figures], results: Path
) -> None:
    """Measure what is not in ``results/name.json`` yet, then write and print the table of all that is."""
    path = results / f"{name}.json"
    missing = [run for run in runs if run.name not in truth.entries(path)]
    found = truth.collect(path, tracked(missing, "measuring"), measure, command())
    rich.console.Console().print(truth.write_table(path, found), markup=False, highlight=False, soft_wrap=True)


@app.command("nuts")
def truth_nuts(
    methods: Methods = None,
    problems: Annotated[list[str] | None, typer.Option("--problem", help=f"Of {', '.join(nuts.PROBLEMS)}.")] = None,
    seeds: Seeds = 5,
    results: Results = _RESULTS,
    threads: Threads = 1,
) -> None:
    """Distances of predictive distributions from exact ones, by NUTS, on two small networks.

    Example: `bbb truth nuts --method conditional --seeds 1`
    """
    set_threads(threads)
    tasks = chosen(problems, list(nuts.PROBLEMS), "--problem")
    names = chosen(methods, list(nuts.METHODS), "--method")
    runs = [truth.Run(task, method, seed) for seed in range(seeds) for task in tasks for method in names]
    measured("nuts", runs, nuts.measure, results)


@app.command("defaults")
def truth_defaults(
    methods: Methods = None,
    tasks: Annotated[list[str] | None, typer.Option("--task", help="May be repeated. [default: all]")] = None,
    seeds: Seeds = 5,
    results: Results = _RESULTS,
    threads: Threads = 1,
) -> None:
    """A Bayesian network with all its defaults beside plain training for as many epochs, on eight tasks.

    Example: `bbb truth defaults --task wine --seeds 1`
    """
    set_threads(threads)
    names = chosen(tasks, list(defaults.TASKS), "--task")
    ways = chosen(methods, list(defaults.METHODS), "--method")
    runs = [truth.Run(task, way, seed) for seed in range(seeds) for task in names for way in ways]
    measured("defaults", runs, defaults.measure, results)
    typer.echo(defaults.verdicts(truth.entries(results / "defaults.json")))


@app.command("ood")
def truth_ood(
    methods: Methods = None,
    seeds: Seeds = 5,
    results: Results = _RESULTS,
    threads: Threads = 1,
) -> None:
    """Errors, calibration, and whether clothes are told from digits: MNIST 2x400 against Fashion-MNIST.

    Example: `bbb truth ood --method "MC dropout" --seeds 1`
    """
    set_threads(threads)
    names = chosen(methods, list(ood.METHODS), "--method")
    measured(
        "ood", [truth.Run(ood.TASK, method, seed) for seed in range(seeds) for method in names], ood.measure, results
    )


@app.command("lora")
def truth_lora(
    methods: Methods = None,
    seeds: Seeds = 5,
    results: Results = _RESULTS,
    threads: Threads = 1,
) -> None:
    """Answers of a small language model beside the true ones, after plain and Bayesian LoRA on few sentences.

    Example: `bbb truth lora --method Bayesian --seeds 1`
    """
    set_threads(threads)
    names = chosen(methods, list(lora.METHODS), "--method")
    runs = [truth.Run(lora.TASK, method, seed) for seed in range(seeds) for method in names]
    measured("lora", runs, lora.measure, results)


@app.command("uci")
def truth_uci(
    methods: Methods = None,
    tasks: Annotated[list[str] | None, typer.Option("--task", help=f"Of {', '.join(uci.SPLITS)}.")] = None,
    splits: Annotated[int, typer.Option(min=1, help="The most of each set, counted from 0.")] = 10,
    results: Results = _RESULTS,
    threads: Threads = 1,
) -> None:
    """NLL, RMSE and coverage on the regression sets of UCI: our estimator at its defaults, and others.

    Example: `bbb truth uci --task yacht --splits 1`
    """
    set_threads(threads)
    names = chosen(tasks, list(uci.SPLITS), "--task") if tasks else uci.available()
    ways = chosen(methods, list(uci.METHODS), "--method")
    numbered = [(number, task) for number in range(splits) for task in names if number < uci.SPLITS[task]]
    runs = [truth.Run(task, way, number) for number, task in numbered for way in ways]
    measured("uci", runs, uci.measure, results)
    typer.echo(uci.verdicts(truth.entries(results / "uci.json")))


@app.command("networks")
def truth_networks(
    methods: Methods = None,
    sets: Annotated[list[str] | None, typer.Option("--data", help=f"Of {', '.join(networks.DATA)}.")] = None,
    nets: Annotated[list[str] | None, typer.Option("--network", help=f"Of {', '.join(networks.NETWORKS)}.")] = None,
    seeds: Seeds = 3,
    epochs: Annotated[int | None, typer.Option(min=1, help="Of each network. [default: as its recipe says]")] = None,
    quick: Quick = False,
    results: OwnResults = None,
    threads: Threads = 1,
) -> None:
    """Error, NLL, ECE, outside data and time of LeNet-5 and ResNet-20, by every method, on MNIST and Fashion-MNIST.

    Example: `bbb truth networks --network LeNet-5 --data MNIST --method plain --seeds 1`
    """
    set_threads(threads)
    tasks: dict[str, networks.Task] = {}
    for network in chosen(nets, list(networks.NETWORKS), "--network"):
        extent = networks.QUICK if quick else networks.EXTENTS[network]
        for name in chosen(sets, list(networks.DATA), "--data"):
            task = networks.Task(name, network, extent._replace(epochs=epochs or extent.epochs))
            tasks[task.name] = task
    names = chosen(methods, list(networks.METHODS), "--method")
    runs = [truth.Run(task, method, seed) for seed in range(seeds) for task in tasks for method in names]
    folder = results or (_QUICK_RESULTS if quick else _RESULTS)
    measured("networks", runs, lambda run: networks.measure(tasks[run.task], run), folder)
    typer.echo(networks.verdicts(truth.entries(folder / "networks.json")))


@app.command("compression")
def truth_compression(
    methods: Methods = None,
    seeds: Seeds = 3,
    quick: Quick = False,
    results: OwnResults = None,
    threads: Threads = 1,
) -> None:
    """How many weights of LeNet-5 can go on MNIST: its error by how many times smaller it gets.

    Example: `bbb truth compression --seeds 1`
    """
    set_threads(threads)
    plan = compression.QUICK if quick else compression.Plan()
    names = chosen(methods, list(compression.METHODS), "--method")
    runs = [truth.Run(plan.task, method, seed) for seed in range(seeds) for method in names]
    folder = results or (_QUICK_RESULTS if quick else _RESULTS)
    measured("compression", runs, lambda run: compression.measure(plan, run), folder)
    typer.echo(compression.verdicts(truth.entries(folder / "compression.json")))


@app.command("picture")
def truth_picture(methods: Methods = None, results: Results = _RESULTS, threads: Threads = 1) -> None:
    """Fit the regression of `bbb truth nuts` once by each method, and draw it over the exact predictions.

    Example: `bbb truth picture --method diagonal`
    """
    set_threads(threads)
    names = chosen(methods, list(nuts.METHODS), "--method")
    truth_page.draw_nuts(results, tracked(names, "fitting"), command())


@app.command("page")
def truth_to_page(
    results: Results = _RESULTS,
    docs: Annotated[Path, typer.Option(file_okay=False, help="Where the page goes.")] = Path("docs"),
) -> None:
    """Write the page of truth from the files that the other commands wrote.

    Example: `bbb truth page`
    """
    rich.console.Console().print(str(truth_page.write(results, docs)))
