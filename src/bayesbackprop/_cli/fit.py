"""``bbb fit``."""

import os
from pathlib import Path
from typing import Annotated, Any, get_args

import rich.console
import typer

from bayesbackprop import _page
from bayesbackprop._errors import invalid
from bayesbackprop.tables import Kind, fit_table


def command(
    table: Annotated[Path, typer.Argument(help="A csv, tsv or parquet file; text needs a header.")],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    kind: Annotated[
        str | None, typer.Option(help=f"What the target is: {', '.join(get_args(Kind))}; guessed if not given.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A column to leave out; may be repeated.")] = None,
    held_out: Annotated[float, typer.Option(help="The share of rows to judge by, and not to train on.")] = 0.2,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the rows.", show_default="100, of counts 500")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Networks to average in a prediction.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of held-out rows, weights and draws.")] = 0,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Where the model goes.", show_default="TABLE.bbb")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Where the page goes.", show_default="TABLE.html")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fit a network to a table; say how good it is.

    It is judged by rows that are held out, beside a linear model. What each column is taken for is said. Numbers are
    scaled, categories get an input each, missing values are the median and a mark, or a category of their own. The
    model and a page about it are written beside the table, and nothing before all is done.

    Example: `bbb fit houses.csv --target price --drop address`
    """
    output, page = output or table.with_suffix(".bbb"), page or table.with_suffix(".html")
    places = {"--output": output, "--page": page}
    for name, path in places.items():
        if path.resolve() == table.resolve() or output.resolve() == page.resolve():
            raise invalid(name, "bbb fit", "another file than the table and the other result", str(path))
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):  # not after minutes of training
            raise invalid(name, "bbb fit", "in a folder that exists and that you may write to", str(path))
    if page.exists() and not _page.is_ours(page):
        constraint = "a new file, or a page that bbb wrote: choose another place by --page"
        raise invalid("--page", "bbb fit", constraint, str(page))
    options: Any = {"kind": kind, "held_out": held_out, "epochs": epochs, "draws": draws, "seed": seed}
    model = fit_table(table, target, drop=drop or [], progress=True, **options)
    model.save(output)
    model.save_html(page, f"Predicting '{target}' in {table.name}")
    console = rich.console.Console(soft_wrap=True, highlight=False, markup=False)
    if json:
        columns = [{"name": column.name, "kind": column.kind, "note": column.note} for column in model.columns]
        found = {"target": target, "kind": model.kind, "columns": columns, "notes": model.notes}
        verdict = {} if model.comparison is None else model.comparison.to_dict()
        written = {"model": str(output), "page": str(page)}
        console.print_json(data={**found, "sentences": model.sentences, **verdict, **written})
        return
    console.print(f"{model}\n\nThe model is in {output}: bbb predict {output} new.csv\nThe page is {page}")
