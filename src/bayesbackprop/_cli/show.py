"""``bbb show``."""

import math
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.box
import rich.console
import rich.filesize
import rich.table
import typer
from rich.text import Text  # a str may hold markup, and names in a file may be anything
from torch import Tensor

from bayesbackprop._files import File, read
from bayesbackprop.posterior import WeightPosterior

# Of tables that go to a file or a pipe: wide enough for the longest row of a Bayesian network, whose prior has three
# numbers.
_WIDTH = 160

# Of the table of a Bayesian network, after the name and the shape.
_COLUMNS: dict[str, Literal["left", "right"]] = {
    "numbers": "right",
    "prior": "left",
    "estimator": "left",
    "median sigma": "right",
    "median snr": "right",
}

# How the contents of other files are shortened: nested lists and long ones are of interest to programs alone.
_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxdict = 2, 80, 80, 12


def command(
    file: Annotated[Path, typer.Argument(help="A model, checkpoint, sparse network, agent or estimator.")],
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what is in a file of this library.

    Of a Bayesian network: each parameter with its prior, its estimator and how uncertain it is. Nothing in the file is
    run, and the network itself is not needed.

    Example: `bbb show model.safetensors`
    """
    found = read(file, None, "bbb show")
    described: dict[str, Any] = {"file": str(file), "bytes": file.stat().st_size}
    described |= {"kind": found.kind, "version": found.version}
    with found.understanding():
        described |= _model(found) if found.kind == "model" else _other(found)
        table = _parameters(described) if found.kind == "model" else _contents(described)
    console = rich.console.Console()
    if json:
        console.print_json(data=described)
        return
    if not console.is_terminal:
        console.width = _WIDTH
    size, version = rich.filesize.decimal(described["bytes"]), found.version or "(which version is not recorded)"
    title = f"{file}: {found.kind}, {size}, written by bayesbackprop {version}"
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    console.print(table)


def _model(file: File) -> dict[str, Any]:
    """What to say of a Bayesian network: its Bayesian parameters in its own order, then everything else."""
    rows: list[dict[str, Any]] = []
    means = {name.removeprefix("net."): mu for name, mu in file.tensors.items() if name.startswith("net.")}
    bayesian: dict[str, dict[str, Any]] = file.contents["parameters"]
    for name in [*bayesian, *sorted(means.keys() - bayesian.keys())]:
        mu = means[name]
        row: dict[str, Any] = {"name": name, "shape": list(mu.shape), "numbers": mu.numel()}
        if name in bayesian:
            q = WeightPosterior(mu, file.tensors[f"rho.{name}"])
            row |= {"prior": bayesian[name]["prior"], "estimator": bayesian[name]["estimator"]}
            row |= {"median_sigma": _median(q.sigma), "median_snr": _median(q.snr)}
        rows.append(row)
    return {"likelihood": file.contents["likelihood"], "seed": file.contents["seed"], "parameters": rows}


def _other(file: File) -> dict[str, Any]:
    """What to say of any other file: what its writer said, and how many numbers it holds."""
    numbers = sum(tensor.numel() for tensor in file.tensors.values())
    return {"tensors": len(file.tensors), "numbers": numbers, "contents": file.contents}


def _parameters(described: dict[str, Any]) -> rich.table.Table:
    """The table of a Bayesian network."""
    name = rich.table.Column("parameter", overflow="fold")
    table = rich.table.Table(name, "shape", box=rich.box.SIMPLE, caption_justify="left")
    for title, justify in _COLUMNS.items():
        table.add_column(title, justify=justify)
    rows: list[dict[str, Any]] = described["parameters"]
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "1"
        known = (_call(row["prior"]), row["estimator"]) if "prior" in row else ("deterministic", "-")
        medians = [row.get("median_sigma"), row.get("median_snr")]
        spread = ["-" if value is None else f"{value:.3g}" for value in medians]
        table.add_row(*map(Text, (row["name"], shape, f"{row['numbers']:,}", *known, *spread)))
    random = sum(row["numbers"] for row in rows if "prior" in row)
    count = f"{random:,} of {sum(row['numbers'] for row in rows):,} numbers are Bayesian weights"
    table.caption = Text(f"likelihood {_call(described['likelihood'])}; {count}")
    return table


def _contents(described: dict[str, Any]) -> rich.table.Table:
    """The table of any other file."""
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False)
    table.add_row("tensors", f"{described['tensors']}, of {described['numbers']:,} numbers")
    for name, value in described["contents"].items():
        table.add_row(*map(Text, (name, value if isinstance(value, str) else _short.repr(value))))
    return table


def _call(description: dict[str, Any]) -> str:
    """Such as ``Normal(sigma=1)``, for a prior or a likelihood in a file."""
    if description["kind"] == "own":
        return str(description["name"])
    arguments = {name: value for name, value in description.items() if name != "kind"}
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in arguments.items()}
    return f"{description['kind']}({', '.join(f'{name}={value}' for name, value in shown.items())})"


def _median(values: Tensor) -> float | None:
    """None where there is none that JSON can hold: |mu| / sigma of constants is infinite."""
    median = float(values.double().median()) if values.numel() else math.nan
    return median if math.isfinite(median) else None
