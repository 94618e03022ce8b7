"""``bbb demo`` and ``bbb report``."""

import webbrowser
from pathlib import Path
from typing import Annotated

import rich.console
import rich.filesize
import typer

from bayesbackprop_paper import data
from bayesbackprop_paper.cli.bandit import live
from bayesbackprop_paper.cli.reproduce import Threads, Written, set_threads, tracked
from bayesbackprop_paper.experiments import bandit
from bayesbackprop_paper.experiments.recipe import progress

_DEMO, _RESULTS, _REPORT = Path("demo"), Path("results"), Path("report.html")


def demo(
    folder: Annotated[Path, typer.Option(file_okay=False, help="For the page, and what it is made from.")] = Path(
        "demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    results: Written = _RESULTS,
    threads: Threads = None,
) -> None:
    """See it all work: a few minutes, and one page to look at.

    Stopped at any moment, it goes on where it was.

    Example: `bbb demo`
    """
    from bayesbackprop_paper.experiments import demo as parts  # brings plotly, which takes its time
    from bayesbackprop_paper.experiments import report

    set_threads(threads)
    says = rich.console.Console(soft_wrap=True, highlight=False)
    says.print("[bold]1/6  Data[/]  MNIST digits and the mushrooms of the UCI repository, fetched once.")
    images = data.mnist()
    data.mushroom()
    says.print(
        "[bold]2/6  A network that is unsure[/]  Two layers of 400 units; each weight learns a mean and a spread, on "
        "the paper's cost: fit the data, and say no more about the weights than they do."
    )
    result = parts.network(folder, images, seed, progress("digits"))
    says.print(f"     Test error {result.test_error:.2f} % after {result.epochs} epochs.")
    says.print("[bold]3/6  Without most of its weights[/]  Those whose mean is small beside their spread say little.")
    left = parts.pruned(folder, images)
    size = rich.filesize.decimal(left.file_bytes)
    says.print(f"     Without {left.removed:.0%} of them: test error {left.error:.2f} %, {size} on disk.")
    says.print(
        "[bold]4/6  A curve[/]  Points in 0 < x < 0.5 alone. Both networks fit them; only one knows that it has seen "
        "nothing elsewhere."
    )
    parts.curves(folder, seed, lambda configs: tracked(configs, "fitting"))
    says.print(
        "[bold]5/6  A bandit[/]  Eat the mushroom or not? Thompson sampling acts on a network drawn from its posterior"
        ", and so explores exactly while it is unsure; epsilon-greedy agents act at random now and then, for ever."
    )
    jobs = parts.jobs(seed)
    with live(jobs) as hears:
        points = bandit.run_all(jobs, folder / "bandit", len(jobs), hears)
    bandit.write(folder / "bandit" / report.REGRET, points)
    last = {agent: curve[max(curve)] for agent, curve in bandit.means(points).items()}
    regrets = ", ".join(f"{bandit.STYLE[agent][1]} {regret:.0f}" for agent, regret in last.items())
    says.print(f"     Regret: {regrets}.")
    says.print(
        "[bold]6/6  The page[/]  The least certain digits, a slider that prunes, and the paper's tables and figures."
    )
    path = parts.page(folder, results, images)
    says.print(f"[green]Done.[/] Open [bold]{path}[/] in a browser; it needs no network.")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `bbb train`, or those inside of a `bbb demo`'s.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the page goes.")] = _REPORT,
    results: Written = _RESULTS,
    data_set: Annotated[
        Path | None, typer.Option("--folder", help="Where the MNIST files are.", show_default=False)
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write one self-contained HTML page on trained networks.

    The tables and figures in `results` are on it too.

    Example: `bbb report runs/first --out report.html`
    """
    from bayesbackprop_paper.experiments import report as page

    with rich.console.Console(stderr=True).status("Looking at the networks"):
        page.write(runs, results, out, data.mnist(data_set).test)
    rich.console.Console(soft_wrap=True).print(str(out))
    if show:
        webbrowser.open(out.resolve().as_uri())
