"""``bbb predict``."""

import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bayesbackprop._errors import invalid
from bayesbackprop._files import write_atomically
from bayesbackprop.tables import TableModel

# What a table is written as, by the end of the file's name.
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


def command(
    model: Annotated[Path, typer.Argument(help="What `bbb fit` wrote.")],
    table: Annotated[Path, typer.Argument(help="A csv, tsv or parquet file with the columns of training.")],
    output: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="A csv, tsv or parquet file to write.", show_default="csv to the screen"),
    ] = None,
) -> None:
    """Add predictions and their uncertainty to a table.

    For numbers: mean, sd, the quantiles q05, q50 and q95, and epistemic, the part of sd that more data would remove.
    For classes: the predicted one, p_ and its name for each, entropy, and epistemic, its part that more data would
    remove. The same row gets the same prediction each time, to about seven digits.

    Example: `bbb predict houses.bbb new.csv --output predicted.csv`
    """
    if output is not None:
        if output.suffix not in (*_SEPARATORS, ".parquet"):
            raise invalid("--output", "bbb predict", "a file that ends in .csv, .tsv or .parquet", str(output))
        if output.resolve() in (model.resolve(), table.resolve()):
            raise invalid("--output", "bbb predict", "another file than the model and the table", str(output))
    predicted = TableModel.load(model).predict(table)
    if output is None:
        sys.stdout.write(_text(predicted, ",").decode())
        return
    separator = _SEPARATORS.get(output.suffix)
    write_atomically(output, _parquet(predicted) if separator is None else _text(predicted, separator))


def _text(frame: Any, separator: str) -> bytes:
    text: str = frame.to_csv(sep=separator, index=False)
    return text.encode()


def _parquet(frame: Any) -> bytes:
    content = io.BytesIO()
    frame.to_parquet(content, index=False)
    return content.getvalue()
