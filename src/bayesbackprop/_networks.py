"""Fully connected networks: the one builder of them, and the network in a file."""

import os
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from bayesbackprop._engine.mlp import ACTIVATIONS
from bayesbackprop._errors import Described, check_count, invalid
from bayesbackprop._files import File, kind_of, reading
from bayesbackprop.export import SparseNetwork, load_sparse
from bayesbackprop.model import Bayesian
from bayesbackprop.saving import load


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


def from_file(path: str | os.PathLike[str], owner: str = "from_file") -> Bayesian | SparseNetwork:
    """The network in a file: of ``save`` a Bayesian one, of ``save_sparse`` a plain one.

    A file of ``save`` must hold an :func:`mlp` with one kind of activation, made without arguments. Files of format 1
    do not say which; it is taken to be ReLU. For another network make it yourself and use ``load``. Errors name
    ``owner``, what the user called.
    """
    kind = kind_of(path, owner)
    if kind == "sparse network":
        return load_sparse(path)
    if kind == "checkpoint":
        got = Described(f"{path}, the state of a run in training")
        raise invalid("path", owner, "the model that a run leaves at its end, model.safetensors", got)
    with reading(path, "model", owner) as file:  # whose shapes are all that is needed
        pass
    found = {name: tuple(tensor.shape) for name, tensor in file.tensors.items() if name.startswith("net.")}
    weights: list[tuple[int, ...]] = []
    while len(shape := found.get(f"net.{2 * len(weights)}.weight", ())) == 2:
        weights.append(shape)
    sizes = [inputs for _, inputs in weights[:1]] + [outputs for outputs, _ in weights]
    with torch.device("meta"):
        parameters = mlp(sizes).named_parameters() if sizes else ()
    if not found or found != {f"net.{name}": tuple(parameter.shape) for name, parameter in parameters}:
        got = Described(f"{path}, with {', '.join(f'{name} {list(shape)}' for name, shape in found.items()) or 'none'}")
        constraint = "a checkpoint of a fully connected nn.Sequential of nn.Linear and nn.ReLU in turn"
        raise invalid("path", owner, constraint, got)
    return load(path, mlp(sizes, _activation(path, file, owner)))


def _activation(path: str | os.PathLike[str], file: File, owner: str) -> type[nn.Module]:
    """The one activation of the network in a file."""
    if "layers" not in file.contents:
        return nn.ReLU
    known = {repr(kind()): kind for kind in ACTIVATIONS if kind is not nn.Dropout}
    with file.understanding():
        layers: list[str] | None = file.contents["layers"]
        between = {layer for layer in layers or [] if layer != "Linear"}
    if layers is None or len(between) > 1 or not between <= known.keys():
        got = Described(f"{path}, of a network of {layers or 'another kind'}")
        constraint = "a file of a fully connected network with one kind of activation (for others: bayesbackprop.load)"
        raise invalid("path", owner, constraint, got)
    return known[between.pop()] if between else nn.ReLU
