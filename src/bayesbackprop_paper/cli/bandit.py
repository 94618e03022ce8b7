"""``bbb bandit``."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import rich.console
import rich.progress
import rich.table
import typer

from bayesbackprop_paper.experiments.bandit import AGENTS, ENVIRONMENTS, Job, jobs_of, means, run_all

app = typer.Typer(help="Contextual bandits: agents that explore by themselves.", no_args_is_help=True)

# Between lines where there is no terminal.
_SECONDS = 30.0


@app.callback()
def _group() -> None:
    pass


@app.command()
def run(
    environment: Annotated[str, typer.Argument(help=f"One of {', '.join(ENVIRONMENTS)}.")],
    agents: Annotated[list[str], typer.Option("--agent", help=f"Of {', '.join(AGENTS)}; may be repeated.")] = ["bbb"],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Interactions of each agent.")] = 2000,
    updates: Annotated[int, typer.Option(min=1, help="Minibatches after each interaction.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs of each agent.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the first run.")] = 0,
    runs: Annotated[
        Path, typer.Option(file_okay=False, help="For checkpoints; a run that was stopped goes on.")
    ] = Path("runs"),
    cores: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print the regrets as JSON.")] = False,
) -> None:
    """Let agents act in an environment; prints what they lost against the oracle.

    Example: `bbb bandit run mushroom --agent bbb --agent greedy --steps 1000`
    """
    numbers = tuple(range(seed, seed + seeds))
    jobs = jobs_of(environment, [(agent,) for agent in agents], numbers, steps, updates)
    with live(jobs) as says:
        points = run_all(jobs, runs / "bandit", cores, says)
    console = rich.console.Console()
    if json:
        console.print_json(data=means(points))
        return
    table = rich.table.Table("agent", "seeds", "regret", title=f"{environment}, {steps} steps")
    for agent in agents:
        last = [point.regret for point in points if point.agent == agent and point.step == steps]
        spread = f" ± {stdev(last):.0f}" if len(last) > 1 else ""
        table.add_row(agent, str(len(last)), f"{mean(last):.0f}{spread}")
    console.print(table)


@contextmanager
def live(jobs: Sequence[Job]) -> Iterator[Callable[[str, int, float], None]]:
    """What to tell the step and the regret of a job by name: a bar for each on a terminal, else a line now and then."""
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        told: dict[str, float] = {}
        for job in jobs:
            print(f"{job.name}: {job.steps} steps", file=sys.stderr, flush=True)

        def line(name: str, step: int, regret: float) -> None:
            if time.monotonic() - told.get(name, 0.0) > _SECONDS:
                told[name] = time.monotonic()
                print(f"{name}: step {step}, mean regret {regret:.0f}", file=sys.stderr, flush=True)

        yield line
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}  regret {task.fields[regret]:.0f}"),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as progress:
        tasks = {job.name: progress.add_task(job.name, total=job.steps, regret=0.0) for job in jobs}
        yield lambda name, step, regret: progress.update(tasks[name], completed=step, regret=regret)
