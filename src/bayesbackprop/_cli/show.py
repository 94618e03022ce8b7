"""``bbb show``."""

import math
import reprlib
from pathlib import Path
from typing import Annotated, Any

import rich.box
import rich.console
import rich.filesize
import typer
from rich.table import Column, Table
from rich.text import Text  # a str may hold markup, and names in a file may be anything
from torch import Tensor

from bayesbackprop._files import File, read
from bayesbackprop.families import is_about_mu
from bayesbackprop.posterior import WeightPosterior

# Of tables that go to a file or a pipe: wide enough for the longest row of a Bayesian network, whose prior has three
# numbers.
_WIDTH = 160

# How the contents of other files are shortened: nested lists and long ones are of interest to programs alone.
_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxdict = 2, 80, 80, 12


def command(
    file: Annotated[Path, typer.Argument(help="A model, checkpoint, sparse network, agent or estimator.")],
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what is in a file of this library.

    Of a Bayesian network: each parameter with its prior, family, estimator and how uncertain it is. Nothing in the
    file is run, and the network itself is not needed.

    Example: `bbb show model.safetensors`
    """
    found = read(file, None, "bbb show")
    size = file.stat().st_size
    with found.understanding():
        described, table = (_model if found.kind == "model" else _other)(found)
    console = rich.console.Console()
    if json:
        about = {"file": str(file), "bytes": size, "kind": found.kind, "version": found.version}
        console.print_json(data=about | described)
        return
    if not console.is_terminal:
        console.width = _WIDTH
    version = found.version or "(which version is not recorded)"
    title = f"{file}: {found.kind}, {rich.filesize.decimal(size)}, written by bayesbackprop {version}"
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    console.print(table)


def _model(file: File) -> tuple[dict[str, Any], Table]:
    """What to say of a Bayesian network: its Bayesian parameters in its own order, then everything else."""
    numbers, sigma, snr = (Column(title, justify="right") for title in ("numbers", "median sigma", "median snr"))
    columns = (Column("parameter", overflow="fold"), "shape", numbers, "prior", "family", "estimator", sigma, snr)
    table = Table(*columns, box=rich.box.SIMPLE, caption_justify="left")
    rows: list[dict[str, Any]] = []
    means = {name.removeprefix("net."): mu for name, mu in file.tensors.items() if name.startswith("net.")}
    bayesian: dict[str, dict[str, Any]] = file.contents["parameters"]
    stored: list[dict[str, Any]] = file.contents.get("families", [])
    families = [{name: value for name, value in group.items() if name != "units"} for group in stored]
    groups = [(group.pop("names"), group) for group in families]
    # Of which mu and rho say nothing.
    elsewhere = {name for names, family in groups if not is_about_mu(family) for name in names}
    family_of = {name: family for names, family in groups for name in names}
    for name in [*bayesian, *sorted(means.keys() - bayesian.keys())]:
        mu = means[name]
        rows.append({"name": name, "shape": list(mu.shape), "numbers": mu.numel()})
        cells = ["deterministic", "-", "-", "-", "-"]
        if name in bayesian:
            q = WeightPosterior(mu, file.tensors[f"rho.{name}"])
            prior, estimator = bayesian[name]["prior"], bayesian[name]["estimator"]
            medians = {"median_sigma": _median(q.sigma), "median_snr": _median(q.snr)}
            if name in elsewhere:
                medians = dict.fromkeys(medians)
            family = family_of.get(name, {"kind": "Diagonal"})
            rows[-1] |= {"prior": prior, "family": family, "estimator": estimator, **medians}
            cells = [_call(prior), _call(family), estimator]
            cells += ["-" if value is None else f"{value:.3g}" for value in medians.values()]
        shape = "x".join(map(str, mu.shape)) or "1"
        table.add_row(*map(Text, (name, shape, f"{mu.numel():,}", *cells)))
    random, total = (sum(means[name].numel() for name in names) for names in (bayesian, means))
    likelihood = file.contents["likelihood"]
    said = [f"{random:,} of {total:,} numbers are Bayesian weights"]
    said += [f"{_call(family)} of {len(names)} parameters together" for names, family in groups]
    table.caption = Text("; ".join([f"likelihood {_call(likelihood)}", *said]))
    described = {"likelihood": likelihood, "seed": file.contents["seed"], "parameters": rows}
    return described | {"families": stored}, table


def _other(file: File) -> tuple[dict[str, Any], Table]:
    """What to say of any other file: what its writer said, and how many numbers it holds."""
    numbers = sum(tensor.numel() for tensor in file.tensors.values())
    table = Table(box=rich.box.SIMPLE, show_header=False)
    table.add_row("tensors", f"{len(file.tensors)}, of {numbers:,} numbers")
    for name, value in file.contents.items():
        table.add_row(*map(Text, (name, value if isinstance(value, str) else _short.repr(value))))
    return {"tensors": len(file.tensors), "numbers": numbers, "contents": file.contents}, table


def _call(description: dict[str, Any]) -> str:
    """Such as ``Normal(sigma=1)``, for a prior, a family or a likelihood in a file."""
    if description["kind"] == "own":
        return str(description["name"])
    arguments = {name: _argument(value) for name, value in description.items() if name != "kind"}
    return f"{description['kind']}({', '.join(f'{name}={value}' for name, value in arguments.items())})"


def _argument(value: Any) -> str:
    """A number, a word, or likelihoods with or without names."""
    if isinstance(value, list):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, dict):
        if isinstance(value.get("kind"), str):
            return _call(value)
        return f"{{{', '.join(f'{name}: {_argument(each)}' for name, each in value.items())}}}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _median(values: Tensor) -> float | None:
    """None where there is none that JSON can hold: |mu| / sigma of constants is infinite."""
    median = float(values.double().median()) if values.numel() else math.nan
    return median if math.isfinite(median) else None
