"""``bbb prune``."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import rich.console
import rich.filesize
import safetensors.torch
import torch
import typer
from torch.utils.benchmark import Timer

from bayesbackprop._errors import Described, invalid
from bayesbackprop._networks import from_file
from bayesbackprop.export import save_sparse, sparse
from bayesbackprop.model import Bayesian
from bayesbackprop.portable import save_onnx
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
    onnx: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Where the plain network goes as ONNX.", show_default=False)
    ] = None,
    int8: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Where it goes as ONNX with weights of 8 bits.", show_default=False),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--time", min=0, help="Time the dense network and the others, this often each; 0: do not.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs that --time uses.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Remove the weights that say least; write what is left.

    Those with the lowest \\|mu\\| / sigma go. What is left is a Bayesian network, whose file is as large as before,
    and a plain sparse one, which is small. Unless told which files to write, both are written, beside the checkpoint.

    Example: `bbb prune model.safetensors --fraction .98 --time 500`
    """
    model = from_file(checkpoint, "bbb prune")
    if not isinstance(model, Bayesian):
        got = Described(f"{checkpoint}, a plain network, which has no sigma")
        raise invalid("checkpoint", "bbb prune", "a Bayesian network", got)
    if not any((out, sparse_file, onnx, int8)):
        stem = f"{checkpoint.stem}-{100 * fraction:g}"
        out, sparse_file = (checkpoint.with_name(f"{stem}{end}{checkpoint.suffix}") for end in ("", "-sparse"))
    if rounds == 1:
        raise invalid("--time", "bbb prune", "0 or at least 2, to have a median", rounds)
    places = {"--out": out, "--sparse": sparse_file, "--onnx": onnx, "--int8": int8}
    taken = {checkpoint.resolve(): "the checkpoint"}
    for option, path in places.items():
        if path is not None and path.resolve() in taken:
            raise invalid(option, "bbb prune", f"another file than {taken[path.resolve()]}", str(path))
        if path is not None:
            taken[path.resolve()] = option

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
    x = torch.rand(1, next(model.net.parameters()).shape[1], generator=torch.Generator().manual_seed(seed))
    count = threads or torch.get_num_threads()
    timed: dict[str, Any] = {"dense": model.net, "sparse": plain}
    for name, path in (("onnx", onnx), ("int8", int8)):
        if path is not None:
            found[f"{name}_difference"] = save_onnx(plain, path, x, int8=name == "int8")
            found |= {f"{name}_file": str(path), f"{name}_bytes": path.stat().st_size}
            timed[name] = _onnx_network(path, count)
    if rounds:
        timers = [Timer("net(x)", globals={"net": net, "x": x}, num_threads=count) for net in timed.values()]
        with torch.inference_mode():  # input by input and in turn, so that a busy machine slows all alike
            times = [[timer.timeit(1).mean for timer in timers] for _ in range(rounds)]
        for name, each in zip(timed, zip(*times, strict=True), strict=True):
            found[f"{name}_us"] = 1e6 * median(each)
    console = rich.console.Console(soft_wrap=True)
    if json:
        console.print_json(data=found)
    else:
        console.print(_text(found), highlight=False, markup=False)


def _text(found: dict[str, Any]) -> str:
    """What was found, in lines that are as long as the names of the files make them."""
    rows = [("weights", f"{found['weights_left']:,} of {found['weights']:,} left")]
    rows.append(("removed up to |mu| / sigma", f"{found['threshold']:.4g}"))
    size = {name: rich.filesize.decimal(value) for name, value in found.items() if name.endswith("_bytes")}
    if "bayesian_file" in found:
        rows.append(("Bayesian network", f"{found['bayesian_file']}, {size['bayesian_bytes']}"))
    if "sparse_file" in found:
        rows.append(("plain network", f"{found['sparse_file']}, {size['sparse_bytes']}"))
        ratio = found["dense_bytes"] / found["sparse_bytes"]
        rows.append(("of the dense one's file", f"1/{ratio:.1f} ({size['dense_bytes']})"))
    for name, shown in (("onnx", "ONNX"), ("int8", "ONNX, 8 bits")):
        if f"{name}_file" in found:
            off = f"off by {found[f'{name}_difference']:.2g} at most"
            rows.append((shown, f"{found[f'{name}_file']}, {size[f'{name}_bytes']}, {off}"))
    for name in ("dense", "sparse", "onnx", "int8"):
        if f"{name}_us" in found:
            ratio = f", 1/{found['dense_us'] / found[f'{name}_us']:.1f}" if name != "dense" else ""
            rows.append((f"one input, {name}", f"{found[f'{name}_us']:.0f} us{ratio}"))
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"{what:{width}}  {value}" for what, value in rows)


def _onnx_network(path: Path, threads: int) -> Callable[[torch.Tensor], Any]:
    """What onnxruntime makes of an input."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = threads
    session = InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"input": x.numpy()})
