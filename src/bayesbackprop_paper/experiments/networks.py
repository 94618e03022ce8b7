"""The fully connected networks of the experiments, and finding out which one is in a file."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from bayesbackprop import export as shipping
from bayesbackprop._errors import Described, check_count, invalid
from bayesbackprop._files import read_tensors
from bayesbackprop.export import SparseNetwork
from bayesbackprop.model import Bayesian
from bayesbackprop.saving import load

# The means in a file of a Bayesian network in nn.Sequential.
_MEAN = re.compile(r"net\.(\d+)\.(weight|bias)")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within it torch's generator starts at ``seed``, which decides initial weights; after it, it is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """A fully connected network with rectified linear units.

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
    layers = [layer for inputs, outputs in pairwise(sizes) for layer in (nn.Linear(inputs, outputs), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def from_file(path: str | os.PathLike[str]) -> Bayesian | SparseNetwork:
    """The network in a file: of ``save`` a Bayesian one, of ``save_sparse`` a plain one.

    A file of ``save`` must hold an :func:`mlp`. Its sizes stand in the file; that its functions are ReLU does not, and
    is assumed. For another network make it yourself and use ``load``.
    """
    metadata, tensors = read_tensors(path, "from_file")
    if shipping.KEY in metadata:
        return shipping.load_sparse(path)
    return load(path, mlp(_sizes(path, tensors)))


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
    if any(name.startswith("objective.") for name in tensors):
        got = Described(f"{path}, the state of a run in training")
        raise invalid("path", "from_file", "the model that a run leaves at its end, model.safetensors", got)
    if not means or means != expected:
        got = Described(f"{path}, with {', '.join(f'{name} {list(shape)}' for name, shape in means.items()) or 'none'}")
        constraint = "a checkpoint of a fully connected nn.Sequential of nn.Linear and nn.ReLU in turn"
        raise invalid("path", "from_file", constraint, got)
    return sizes
