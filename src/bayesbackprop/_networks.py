"""Fully connected networks: the one builder of them, and the network in a file."""

import os
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from bayesbackprop._engine.mlp import ACTIVATIONS
from bayesbackprop._errors import Described, check_count, invalid
from bayesbackprop._files import File, kind_of, read
from bayesbackprop.export import SparseNetwork, load_sparse
from bayesbackprop.model import Bayesian
from bayesbackprop.saving import load

# The means in a file of a Bayesian network in nn.Sequential.
_MEAN = re.compile(r"net\.(\d+)\.(weight|bias)")


def mlp(
    sizes: Sequence[int],
    activation: Callable[[], nn.Module] = nn.ReLU,
    *,
    linear: Callable[[int, int], nn.Module] = nn.Linear,
    dropout: Sequence[float] | None = None,
) -> nn.Sequential:
    """A fully connected network: linear layers, with an activation between each two.

    Args:
        sizes: The widths, from the inputs to the outputs.
        activation: Makes the module between two layers.
        linear: Makes a layer from its numbers of inputs and outputs, and so decides the initial weights. It is called
            from the first layer to the last.
        dropout: The probability that an input of each layer is dropped in training; None for no dropout.

    Examples:
        >>> mlp([784, 400, 10])
        Sequential(
          (0): Linear(in_features=784, out_features=400, bias=True)
          (1): ReLU()
          (2): Linear(in_features=400, out_features=10, bias=True)
        )
    """
    if len(sizes) < 2:
        raise invalid("sizes", "mlp", "at least two ints", sizes)
    for size in sizes:
        check_count("mlp", sizes=size)
    if dropout is not None and len(dropout) != len(sizes) - 1:
        raise invalid("dropout", "mlp", f"{len(sizes) - 1} probabilities, one for each layer", dropout)
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        layers += [] if dropout is None else [nn.Dropout(dropout[number])]
        layers += [linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def drawn_from(generator: torch.Generator, dtype: torch.dtype | None = None) -> Callable[[int, int], nn.Linear]:
    """What makes linear layers with the initial distribution of ``nn.Linear``, but drawn from ``generator``.

    Torch's own generator is left alone.

    Examples:
        >>> one, same = (mlp([3, 2], linear=drawn_from(torch.Generator().manual_seed(0))) for _ in range(2))
        >>> torch.equal(one[0].weight, same[0].weight)
        True
    """

    def linear(inputs: int, outputs: int) -> nn.Linear:
        layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=dtype)
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, generator=generator)
        return layer

    return linear


def from_file(path: str | os.PathLike[str]) -> Bayesian | SparseNetwork:
    """The network in a file: of ``save`` a Bayesian one, of ``save_sparse`` a plain one.

    A file of ``save`` must hold an :func:`mlp` with one kind of activation, made without arguments. Files of format 1
    do not say which; it is taken to be ReLU. For another network make it yourself and use ``load``.
    """
    kind = kind_of(path, "from_file")
    if kind == "sparse network":
        return load_sparse(path)
    if kind == "checkpoint":
        got = Described(f"{path}, the state of a run in training")
        raise invalid("path", "from_file", "the model that a run leaves at its end, model.safetensors", got)
    file = read(path, "model", "from_file")
    return load(path, mlp(_sizes(path, file.tensors), _activation(path, file)))


def _activation(path: str | os.PathLike[str], file: File) -> type[nn.Module]:
    """The one activation of the network in a file."""
    if "layers" not in file.contents:
        return nn.ReLU
    known = {repr(kind()): kind for kind in ACTIVATIONS if kind is not nn.Dropout}
    with file.understanding():
        layers: list[str] | None = file.contents["layers"]
        between = [] if layers is None else [layer for layer in layers if layer != "Linear"]
    if layers is None or len(set(between)) > 1 or not set(between) <= known.keys():
        got = Described(f"{path}, of a network of {layers or 'another kind'}")
        constraint = "a file of a fully connected network with one kind of activation (for others: bayesbackprop.load)"
        raise invalid("path", "from_file", constraint, got)
    return known[between[0]] if between else nn.ReLU


def _sizes(path: str | os.PathLike[str], tensors: dict[str, Tensor]) -> list[int]:
    """784, 400, 10 for an mlp of these sizes."""
    means = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith("net.")}
    numbers = sorted({int(found[1]) for name in means if (found := _MEAN.fullmatch(name))})
    weights = [means.get(f"net.{number}.weight", ()) for number in numbers]
    sizes = [shape[-1] for shape in weights[:1] if shape] + [shape[0] for shape in weights if shape]
    expected = {
        f"net.{2 * number}.{name}": shape
        for number, (inputs, outputs) in enumerate(pairwise(sizes))
        for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,)))
    }
    if not means or means != expected:
        got = Described(f"{path}, with {', '.join(f'{name} {list(shape)}' for name, shape in means.items()) or 'none'}")
        constraint = "a checkpoint of a fully connected nn.Sequential of nn.Linear and nn.ReLU in turn"
        raise invalid("path", "from_file", constraint, got)
    return sizes
