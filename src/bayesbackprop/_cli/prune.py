"""``bbb prune``."""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import rich.box
import rich.console
import rich.filesize
import rich.table
import safetensors.torch
import torch
import typer
from torch.utils.benchmark import Timer

from bayesbackprop._errors import Described, invalid
from bayesbackprop._networks import from_file
from bayesbackprop.export import save_sparse, sparse
from bayesbackprop.model import Bayesian
from bayesbackprop.pruning import prune, threshold, weights_left
from bayesbackprop.saving import save


def command(
    checkpoint: Annotated[Path, typer.Argument(help="What `bbb.save` wrote, of a fully connected network.")],
    fraction: Annotated[float, typer.Option(min=0, max=1, help="Of the weights, to remove.")] = 0.95,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Where the pruned Bayesian network goes.", show_default=False)
    ] = None,
    sparse_file: Annotated[
        Path | None,
        typer.Option("--sparse", dir_okay=False, help="Where the plain sparse network goes.", show_default=False),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--time", min=0, help="Time the dense and the sparse network, this often each; 0: do not.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs that --time uses.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Remove the weights that say least; write what is left.

    Those with the lowest \\|mu\\| / sigma go. What is left is a Bayesian network, whose file is as large as before,
    and a plain sparse one, which is small. Without --out and --sparse both are written, beside the checkpoint.

    Example: `bbb prune model.safetensors --fraction .98 --time 500`
    """
    model = from_file(checkpoint, "bbb prune")
    if not isinstance(model, Bayesian):
        got = Described(f"{checkpoint}, a plain network, which has no sigma")
        raise invalid("checkpoint", "bbb prune", "a Bayesian network", got)
    if out is None and sparse_file is None:
        stem = f"{checkpoint.stem}-{100 * fraction:g}"
        out, sparse_file = (checkpoint.with_name(f"{stem}{end}{checkpoint.suffix}") for end in ("", "-sparse"))
    if rounds == 1:
        raise invalid("--time", "bbb prune", "0 or at least 2, to have a median", rounds)
    places = [None if path is None else path.resolve() for path in (out, sparse_file)]
    if checkpoint.resolve() in places:
        raise invalid("--out or --sparse", "bbb prune", "another file than the checkpoint", str(checkpoint))
    if places[0] == places[1]:
        raise invalid("--sparse", "bbb prune", "another file than --out", str(sparse_file))

    pruned = prune(model, fraction)
    plain = sparse(pruned)
    total, left = sum(q.numel for q in model.posterior.values()), weights_left(pruned)
    found: dict[str, Any] = {"weights": total, "weights_left": left, "threshold": threshold(model, fraction)}
    if out is not None:
        save(pruned, out)
        found |= {"bayesian_file": str(out), "bayesian_bytes": out.stat().st_size}
    if sparse_file is not None:
        save_sparse(plain, sparse_file)
        found |= {"sparse_file": str(sparse_file), "sparse_bytes": sparse_file.stat().st_size}
        found["dense_bytes"] = len(safetensors.torch.save(dict(model.net.state_dict())))
    if rounds:
        x = torch.rand(1, next(model.net.parameters()).shape[1], generator=torch.Generator().manual_seed(seed))
        count = threads or torch.get_num_threads()
        timers = [Timer("net(x)", globals={"net": net, "x": x}, num_threads=count) for net in (model.net, plain)]
        with torch.inference_mode():  # input by input and in turn, so that a busy machine slows both alike
            times = [[timer.timeit(1).mean for timer in timers] for _ in range(rounds)]
        dense, small = (1e6 * median(taken) for taken in zip(*times, strict=True))
        found |= {"dense_us": dense, "sparse_us": small}
    console = rich.console.Console(soft_wrap=True)
    if json:
        console.print_json(data=found)
    else:
        console.print(_table(found))


def _table(found: dict[str, Any]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False)
    table.add_row("weights", f"{found['weights_left']:,} of {found['weights']:,} left")
    table.add_row("removed up to |mu| / sigma", f"{found['threshold']:.4g}")
    size = {name: rich.filesize.decimal(value) for name, value in found.items() if name.endswith("_bytes")}
    if "bayesian_file" in found:
        table.add_row("Bayesian network", f"{found['bayesian_file']}, {size['bayesian_bytes']}")
    if "sparse_file" in found:
        table.add_row("plain network", f"{found['sparse_file']}, {size['sparse_bytes']}")
        ratio = found["dense_bytes"] / found["sparse_bytes"]
        table.add_row("of the dense one's file", f"1/{ratio:.1f} ({size['dense_bytes']})")
    if "dense_us" in found:
        table.add_row("one input, dense", f"{found['dense_us']:.0f} us")
        ratio = found["dense_us"] / found["sparse_us"]
        table.add_row("one input, sparse", f"{found['sparse_us']:.0f} us, 1/{ratio:.1f}")
    return table
