"""``bbb bench``."""

import importlib.util
import json as jsons
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import rich.console
import rich.progress
import rich.table
import torch
import typer

from bayesbackprop._errors import invalid
from bayesbackprop._files import write_atomically
from bayesbackprop_paper.bench import bandits, cases, pictures
from bayesbackprop_paper.bench import decisions as decisions_case
from bayesbackprop_paper.bench import growth as growth_case
from bayesbackprop_paper.bench import networks as networks_case
from bayesbackprop_paper.bench import paths as paths_case
from bayesbackprop_paper.bench import size as size_case
from bayesbackprop_paper.bench.measuring import Config
from bayesbackprop_paper.bench.peers import PEERS
from bayesbackprop_paper.bench.report import Row, page, read_json, terminal, this_run, write_json

# Of tables that go to a file or a pipe.
_WIDTH = 120

_UNITS = [400, 1200, 2400]
_IMAGES = [1, 128, 1000]
_SERVED = ["linear", "thompson"]
_ENVIRONMENTS = list(bandits.ENVIRONMENTS_OF_PEERS)

app = typer.Typer(help="Measure speed against plain PyTorch and other libraries.", no_args_is_help=True)


def _place(path: Path | None) -> Path | None:
    """Find out now, not after minutes of measuring, that there is no place for the file."""
    if path is not None:
        if not path.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}; make it first.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written.")
    return path


def _present(name: str) -> str:
    """Refuse what is neither the CPU nor a GPU of this machine."""
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (index and not index.isdecimal())):
        raise typer.BadParameter(f"it must be cpu, cuda or cuda:N, not {name}.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"torch {torch.__version__} finds no device {name} here.")
    return name


Peers = Annotated[bool, typer.Option("--peers", help="Also the other libraries that are installed.")]
Json = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, callback=_place, help="Also write the rows to this file.")
]
Rounds = Annotated[int, typer.Option(min=2, help="How often each is timed.")]
Seed = Annotated[int, typer.Option(min=0, help="Of data, weights and order.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch.")]
Device = Annotated[str, typer.Option(callback=_present, help="Where to measure: cpu, cuda or cuda:N.")]
Optimiser = Annotated[bool, typer.Option(help="Whether a step includes that of torch.optim.SGD.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Tiny networks, to see that all of it works; no figures to quote.")
]


@app.command()
def step(
    peers: Peers = False,
    json: Json = None,
    rounds: Rounds = 40,
    seed: Seed = 0,
    threads: Threads = 2,
    units: Annotated[list[int], typer.Option(min=1, help="Units of a hidden layer; may be repeated.")] = _UNITS,
    optimiser: Optimiser = True,
    device: Device = "cpu",
) -> None:
    """A training step of 784-U-U-10, batch 128: time and peak memory.

    Example: `bbb bench step --units 1200 --peers`
    """
    chosen = " ".join(f"--units {number}" for number in units)
    with _measuring("step", peers, rounds, seed, threads, chosen, device, optimiser) as config:
        rows = cases.step(config, units)
    _show(rows, json)


@app.command()
def small(
    peers: Peers = False,
    json: Json = None,
    rounds: Rounds = 500,
    seed: Seed = 0,
    threads: Threads = 1,
    optimiser: Optimiser = True,
    device: Device = "cpu",
) -> None:
    """A training step of 119-100-100-1, batch 64: all is overhead.

    Example: `bbb bench small --json small.json`
    """
    with _measuring("small", peers, rounds, seed, threads, "", device, optimiser) as config:
        rows = cases.small(config)
    _show(rows, json)


@app.command()
def predict(
    peers: Peers = False,
    json: Json = None,
    rounds: Rounds = 10,
    seed: Seed = 0,
    threads: Threads = 2,
    units: Annotated[int, typer.Option(min=1, help="Units of a hidden layer.")] = 1200,
    images: Annotated[list[int], typer.Option(min=1, help="Images at a time; may be repeated.")] = _IMAGES,
    draws: Annotated[int, typer.Option(min=1, help="Networks to average.")] = 100,
    device: Device = "cpu",
) -> None:
    """A prediction with many draws of 784-U-U-10, against as many plain passes.

    Example: `bbb bench predict --images 1`
    """
    chosen = " ".join([f"--units {units} --draws {draws}", *(f"--images {number}" for number in images)])
    with _measuring("predict", peers, rounds, seed, threads, chosen, device) as config:
        rows = cases.predict(config, units, images, draws)
    _show(rows, json)


@app.command()
def paths(
    peers: Peers = False,
    json: Json = None,
    rounds: Rounds = 40,
    seed: Seed = 0,
    threads: Threads = 2,
    quick: Quick = False,
) -> None:
    """A step by every path: optimisers, priors, estimators, draws, compiled, two ranks, small and deep networks.

    Example: `bbb bench paths --peers --json paths.json`
    """
    with _measuring("paths", peers, rounds, seed, threads, "--quick" if quick else "") as config:
        rows = paths_case.paths(config, paths_case.QUICK if quick else paths_case.Sizes())
    _show(rows, json)


@app.command()
def networks(
    peers: Peers = False,
    json: Json = None,
    rounds: Rounds = 20,
    seed: Seed = 0,
    threads: Threads = 2,
    quick: Quick = False,
) -> None:
    """LeNet-5, ResNet-20, a transformer and an LSTM: a step by each estimator, and 20 draws for 32 inputs.

    Example: `bbb bench networks --peers`
    """
    with _measuring("networks", peers, rounds, seed, threads, "--quick" if quick else "") as config:
        rows = networks_case.networks(config, networks_case.QUICK if quick else networks_case.Sizes())
    _show(rows, json)


@app.command()
def size(
    json: Json = None,
    rounds: Rounds = 3,
    seed: Seed = 0,
    threads: Threads = 2,
    quick: Quick = False,
) -> None:
    """Fifty million weights: time and peak memory to make, train, save and load them, each in a fresh process.

    Example: `bbb bench size --rounds 5`
    """
    with _measuring("size", False, rounds, seed, threads, "--quick" if quick else "") as config:
        rows = size_case.size(config, size_case.QUICK if quick else size_case.Sizes())
    _show(rows, json)


@app.command()
def growth(
    json: Json = None,
    rounds: Rounds = 20,
    seed: Seed = 0,
    threads: Threads = 2,
    quick: Quick = False,
) -> None:
    """How the cost of a step grows with width and batch, and of a prediction with draws, beside the machine's limit.

    Example: `bbb bench growth --json growth.json`
    """
    with _measuring("growth", False, rounds, seed, threads, "--quick" if quick else "") as config:
        rows = growth_case.growth(config, growth_case.QUICK if quick else growth_case.Sizes())
    _show(rows, json)


@app.command()
def bandit(
    peers: Peers = False,
    json: Json = None,
    environments: Annotated[list[str], typer.Option("--environment", help="May be repeated.")] = _ENVIRONMENTS,
    steps: Annotated[int, typer.Option(min=1, help="Interactions of each agent.")] = 2000,
    updates: Annotated[int, typer.Option(min=1, help="Minibatches after each, for the neural agent.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each agent.")] = 3,
) -> None:
    """Agents in contextual bandits: what they lose, and how long they take, on one core.

    Example: `bbb bench bandit --environment mushroom --peers`
    """
    console = rich.console.Console(stderr=True)
    installed = [name for name in bandits.PEERS if peers and importlib.util.find_spec(name)]
    for name in bandits.PEERS if peers else ():
        if name not in installed:
            _say_missing(console, name)
    chosen = " ".join(f"--environment {name}" for name in environments)
    command = f"bbb bench bandit {chosen} --steps {steps} --updates {updates} --seeds {seeds}"
    run = this_run("bandit", command + (" --peers" if peers else ""), 1, seeds, 0, installed)
    with console.status("") as status:
        rows = bandits.compare(environments, installed, steps, updates, seeds, status.update)
    if json is not None:
        text = jsons.dumps({"run": asdict(run), "rows": [asdict(row) for row in rows]}, indent=1)
        write_atomically(json, text.encode())
    table = rich.table.Table("environment", "agent", "regret", "seconds a run", title=f"{steps} steps, {seeds} seeds")
    for row in rows:
        spread = "" if math.isnan(row.spread) else f" ± {row.spread:.0f}"
        table.add_row(row.environment, row.agent, f"{row.regret:.0f}{spread}", f"{row.seconds:.1f}")
    rich.console.Console().print(table)


@app.command()
def serve(
    json: Json = None,
    agents: Annotated[list[str], typer.Option("--agent", help="May be repeated.")] = _SERVED,
    features: Annotated[int, typer.Option(min=1, help="The width of a context.")] = 10,
    actions: Annotated[int, typer.Option(min=1, help="How many there are.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Processes that answer.")] = 1,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Connections that ask at the same time.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, max=120, help="Of each measurement.")] = 15,
    kills: Annotated[int, typer.Option(min=0, max=1000, help="Also kill a service so often.")] = 0,
    folder: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Where logs go.", show_default="that of temporary files"),
    ] = None,
    seed: Seed = 0,
) -> None:
    """`bbb serve` on this machine's loopback: requests a second and their times while it learns; and what kills lose.

    Clients ask for a decision and send its reward, one after the other, as fast as they can.

    Example: `bbb bench serve --kills 100`
    """
    from bayesbackprop_paper.bench import serving  # here and not above: it has an extra of its own

    command = f"bbb bench serve {' '.join(f'--agent {name}' for name in agents)} --features {features}"
    command += f" --actions {actions} --workers {workers} --clients {clients} --seconds {seconds:g} --kills {kills}"
    run = this_run("serve", f"{command} --seed {seed}", 1, 1, seed, [])
    console, loads, killed = rich.console.Console(stderr=True), [], None
    with console.status("") as status:
        for name in agents:
            status.update(f"load: {name}")
            with tempfile.TemporaryDirectory(dir=folder) as place:
                loads.append(serving.measure(Path(place), name, features, actions, workers, clients, seconds))
        if kills:
            status.update(f"{kills} kills")
            with tempfile.TemporaryDirectory(dir=folder) as place:
                killed = serving.survive(Path(place), kills, seed)
    if json is not None:
        found = {"run": asdict(run), "load": [asdict(each) for each in loads], "kills": killed and asdict(killed)}
        write_atomically(json, jsons.dumps(found, indent=1).encode())
    columns = (
        "agent",
        "requests/s",
        "decide p50, p99 [ms]",
        "reward p50, p99 [ms]",
        "learnt",
        "lag",
        "errors",
        "disk [ms]",
    )
    table = rich.table.Table(*columns, title=f"{clients} clients, {workers} workers, {seconds:g} s")
    for each in loads:
        times = f"{each.decide_p50}, {each.decide_p99}", f"{each.reward_p50}, {each.reward_p99}"
        counts = map(str, (each.learnt, each.lag, each.errors, each.sync))
        table.add_row(each.agent, str(each.requests_per_second), *times, *counts)
    shown = rich.console.Console(soft_wrap=True, highlight=False)
    shown.print(table)
    if killed is not None:
        shown.print(killed.sentence)
        if killed.problems:
            raise RuntimeError("; ".join(killed.problems[:5]))


@app.command()
def decisions(
    json: Json = None,
    calls: Annotated[int, typer.Option(min=4, help="Decisions of each thread.")] = 2000,
    updates: Annotated[int, typer.Option(min=1, help="Minibatches after each observation.")] = 4,
    deciding: Annotated[int, typer.Option(min=1, help="Threads that decide.")] = 2,
    pause: Annotated[float, typer.Option(min=0, help="Milliseconds between the decisions of a thread.")] = 5.0,
    seed: Seed = 0,
) -> None:
    """Decisions of 117-100-100 and two actions while a thread learns without end: how long one takes.

    Example: `bbb bench decisions --json decisions.json`
    """
    command = f"bbb bench decisions --calls {calls} --updates {updates} --deciding {deciding} --pause {pause:g}"
    run = this_run("decisions", f"{command} --seed {seed}", 1, calls, seed)
    rows = decisions_case.decisions(calls, updates, deciding, pause / 1000, seed)
    if json is not None:
        text = jsons.dumps({"run": asdict(run), "rows": [asdict(row) for row in rows]}, indent=1)
        write_atomically(json, text.encode())
    table = rich.table.Table("what", "calls", "median ms", "p99 ms", "worst ms", "a second")
    for row in rows:
        numbers = (f"{number:.2f}" for number in (row.median, row.p99, row.worst))
        table.add_row(row.what, str(row.calls), *numbers, f"{row.per_second:.0f}")
    _console().print(table)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="What --json wrote.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The Markdown page to write.")],
) -> None:
    """Write a page of the documentation from measured files, and its pictures into a folder of the same name.

    Example: `bbb bench report results/bench/step.json --out docs/benchmarks.md`
    """
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        raise invalid("files", "bbb bench report", "files of different names, which their pictures have", names)
    runs = dict(zip(names, map(read_json, files), strict=True))
    drawn = {name: pictures.draw(rows, out.with_suffix(""), name) for name, rows in runs.items()}
    write_atomically(out, page((rows, drawn[name]) for name, rows in runs.items()).encode())


@contextmanager
def _measuring(
    what: str,
    with_peers: bool,
    rounds: int,
    seed: int,
    threads: int,
    options: str,
    device: str = "cpu",
    optimiser: bool = True,
) -> Iterator[Config]:
    """What a measurement needs; on a terminal its progress is shown meanwhile."""
    if with_peers and device != "cpu":
        raise typer.BadParameter(f"--peers and --device {device} exclude each other: peers are measured on the CPU.")
    console = rich.console.Console(stderr=True)
    peers = [peer for peer in PEERS if peer.is_installed()] if with_peers else []
    for peer in PEERS if with_peers else ():
        if peer not in peers:
            _say_missing(console, peer.distribution)
    command = f"bbb bench {what} {options} --rounds {rounds} --seed {seed} --threads {threads}".replace("  ", " ")
    command += ("" if optimiser else " --no-optimiser") + (" --peers" if with_peers else "")
    command += "" if device == "cpu" else f" --device {device}"
    where = torch.device(device)
    run = this_run(what, command, threads, rounds, seed, [peer.distribution for peer in peers], where)
    # Without its own thread, which would run while something is timed.
    with rich.progress.Progress(console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        contenders = [contender for peer in peers for contender in peer.contenders]

        def track(rounds: Iterable[int], title: str) -> Iterable[int]:
            return progress.track(rounds, description=title)

        yield Config(run, contenders, optimiser, track, where)


def _say_missing(console: rich.console.Console, distribution: str) -> None:
    how = 'pip install "bayesbackprop[peers]" (in a clone: ".[peers]")'
    text = f"{distribution} is not installed and left out; to get it: {how}"
    console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _console() -> rich.console.Console:
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def _show(rows: list[Row], json: Path | None) -> None:
    _console().print(terminal(rows))
    if json is not None:
        write_json(rows, json)
