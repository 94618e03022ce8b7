"""Plain networks to ship: what pruning left of a fully connected network, small on disk and quick for one input.

:func:`sparse` turns the means of a pruned model into a plain network with the same outputs. What is dead
goes: a hidden unit without incoming weights is a constant, which the biases of the next layer take up, and one without
outgoing weights disappears. Then each layer is kept dense or sparse, whichever is quicker (docs/decisions/pruning.md).
"""

import copy
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from bayesbackprop._engine.mlp import ACTIVATIONS, layers_of, runs_only_forward
from bayesbackprop._errors import check_finite, invalid
from bayesbackprop._files import check_number, read, write
from bayesbackprop.model import Bayesian

__all__ = ["SparseLinear", "SparseNetwork", "load_sparse", "save_sparse", "sparse"]

# Measured (docs/decisions/pruning.md). A product with fewer weights is quicker dense whatever its zeros, ...
_SMALL = 2**15
# ... and so is one of which a larger share is not zero.
_DENSE_ABOVE = 0.15
# What torch multiplies sparse matrices in.
_TYPES = (torch.float32, torch.float64)

# The product with one vector, twice as quick, needs MKL.
_MATRIX_VECTOR = torch.backends.mkl.is_available()

# In a file each weight has a byte that says how many zeros precede it; this one says: as many, and no weight yet.
_ESCAPE = 255

# Zeros behind the last weight of a matrix, which files of formats 1 and 2 do not hold: as many as they may claim.
_UNWRITTEN = 2**22

_FUNCTIONS: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in (*ACTIVATIONS, nn.Flatten)}


class SparseLinear(nn.Module):
    """``nn.Linear`` for a weight that is mostly zeros: compressed sparse rows, without gradients of its own.

    Args:
        weight: The weight ``[out_features, in_features]``, with its zeros; or a sparse tensor of this shape.
        bias: The bias ``[out_features]``.

    Examples:
        >>> layer = SparseLinear(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([0.0, 1.0]))
        >>> layer(torch.tensor([[1.0, 3.0]]))
        tensor([[6., 1.]])
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            compressed = weight.detach().to_sparse_csr()
        # 32 bits are the indices of the library below, which torch would otherwise convert at each call.
        self.rows = nn.Buffer(compressed.crow_indices().int())
        self.columns = nn.Buffer(compressed.col_indices().int())
        self.values, self.bias = nn.Buffer(compressed.values()), nn.Buffer(bias.detach().clone())

    @property
    def weight(self) -> Tensor:
        """The weight as a tensor of layout ``torch.sparse_csr``."""
        # Put together at each use: torch can neither copy nor convert a module that keeps a sparse tensor.
        shape = (self.out_features, self.in_features)
        return torch.sparse_csr_tensor(self.rows, self.columns, self.values, shape, check_invariants=False)

    def forward(self, x: Tensor) -> Tensor:
        """weight @ x + bias over the last dimension."""
        products = torch.addmm(self.bias.unsqueeze(1), self.weight, x.reshape(-1, x.shape[-1]).t())
        return products.t().reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, nonzero={len(self.values)}"


class SparseNetwork(nn.Module):
    """What :func:`sparse` makes: ``layers``, an ``nn.Sequential``, which run without being called for a single input.

    Calling a module takes as long as thousands of multiplications, so that hooks on the layers are not seen then.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers, self._flattens = layers, isinstance(layers[0], nn.Flatten)
        # What is done with a vector, one after the other, and the tensors that it is done with: where each stood.
        self._steps: list[Callable[[Tensor], Tensor]] = []
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        if self._flattens:
            x = x.flatten(1)
        if not _MATRIX_VECTOR or x.numel() != x.shape[-1]:
            return cast(Tensor, self.layers(x))
        for slot, name, tensor in self._places:
            if slot[name] is not tensor:  # moved by ``to``
                self._steps = []
                break
        if not self._steps:
            self._prepare()
        h = x.reshape(-1)
        for step in self._steps:
            h = step(h)
        return h.view(*x.shape[:-1], -1)

    def dense(self) -> nn.Sequential:
        """A copy whose sparse layers are ``nn.Linear``, for what knows no sparse tensors, such as ONNX."""
        return nn.Sequential(*(_dense(copy.deepcopy(layer)) for layer in self.layers)).eval()

    def _prepare(self) -> None:
        self._steps, self._places = [], []
        mine = False  # whether the vector is nobody else's, to write to
        for layer in self.layers:
            if isinstance(layer, (SparseLinear, nn.Linear)):
                self._steps.append(partial(torch.addmv, layer.bias, layer.weight))
                tensors = layer._buffers or layer._parameters
                self._places += [(tensors, name, tensor) for name, tensor in tensors.items() if tensor is not None]
            elif not isinstance(layer, nn.Flatten):
                self._steps.append(torch.relu_ if mine and type(layer) is nn.ReLU else layer.forward)
            mine = isinstance(layer, (SparseLinear, nn.Linear))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": [], "_places": []}  # a copy finds its own


@dataclass
class _Stage:
    """A linear layer and the elementwise functions behind it."""

    weight: Tensor
    bias: Tensor
    functions: list[nn.Module]


def sparse(network: Bayesian | nn.Module) -> SparseNetwork:
    """A plain network with the outputs of the means of ``network`` in evaluation mode, without what is dead in it.

    Layers that are mostly zeros are :class:`SparseLinear`, the others ``nn.Linear``. Nothing in it can be trained.

    Args:
        network: A model, pruned or not, or a plain network: ``nn.Linear`` and elementwise functions one after the
            other, in ``nn.Sequential``, nested or not. It is not changed.

    Examples:
        >>> net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        >>> _ = nn.init.zeros_(net[0].weight[:4])
        >>> sparse(net).layers
        Sequential(
          (0): Linear(in_features=3, out_features=1, bias=True)
          (1): ReLU()
          (2): Linear(in_features=1, out_features=2, bias=True)
        )
    """
    if isinstance(network, Bayesian):
        network.check_about_mu("sparse")
        if network.output is not None:
            constraint = "one without output=, which is no part of the network: give its net, and apply output yourself"
            raise invalid("network", "sparse", constraint, network.output)
    net = network.net if isinstance(network, Bayesian) else network
    chain = layers_of(net) if isinstance(net, nn.Module) else None
    if chain is None or not runs_only_forward(chain) or not any(type(module) is nn.Linear for module in chain):
        constraint = "nn.Linear and elementwise functions, without hooks, one after the other in nn.Sequential"
        raise invalid("network", "sparse", constraint, net)
    first: list[nn.Module] = []  # what precedes the first linear layer
    stages: list[_Stage] = []
    with torch.no_grad():
        for module in chain:
            if isinstance(module, nn.Linear):
                for parameter in module.parameters():
                    check_finite("network", "sparse", parameter)
                bias = module.weight.new_zeros(module.out_features) if module.bias is None else module.bias
                stages.append(_Stage(module.weight.detach().clone(), bias.detach().clone(), []))
            elif not isinstance(module, (nn.Identity, nn.Dropout)):  # in evaluation both do nothing
                (stages[-1].functions if stages else first).append(type(module)(**_arguments(module)))
        for this, after in pairwise(stages):  # what units without incoming weights always say goes into the next biases
            dead = ~this.weight.bool().any(1)
            says = nn.Sequential(*this.functions)(this.bias[dead])
            after.bias.add_((after.weight[:, dead].double() @ says.double()).to(after.bias))
            after.weight[:, dead] = 0
        for this, after in reversed([*pairwise(stages)]):  # units without outgoing weights go, from the last layer back
            used = after.weight.bool().any(0)
            after.weight, this.weight, this.bias = after.weight[:, used], this.weight[used], this.bias[used]
        modules = [module for each in stages for module in (_linear(each.weight, each.bias), *each.functions)]
    return SparseNetwork(nn.Sequential(*first, *modules))


def save_sparse(net: SparseNetwork, path: str | os.PathLike[str]) -> None:
    """Write a network that :func:`sparse` made to one file at ``path``, atomically.

    Of a weight and its bias, one matrix, only what is not zero is written: its value and a byte.
    """
    if not isinstance(net, SparseNetwork):
        raise invalid("net", "save_sparse", "a network that sparse() made", net)
    layers: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for number, module in enumerate(net.layers):
        if isinstance(module, (SparseLinear, nn.Linear)):
            layers.append({"kind": "Linear", "inputs": module.in_features, "outputs": module.out_features})
            weight = module.weight.detach()
            weight = weight.to_dense() if weight.layout is torch.sparse_csr else weight
            bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach()
            matrix = torch.cat([weight, bias.unsqueeze(1)], 1).cpu()
            check_finite("net", "save_sparse", matrix)
            tensors |= {f"{number}.{name}": tensor for name, tensor in _encode(matrix).items()}
        else:
            layers.append({"kind": type(module).__name__, "arguments": _arguments(module)})
    write(path, "sparse network", tensors, {"layers": layers})


def load_sparse(path: str | os.PathLike[str]) -> SparseNetwork:
    """The network in a file that :func:`save_sparse` wrote. Nothing else is needed, and no code runs from the file."""
    file = read(path, "sparse network", "load_sparse")
    with file.understanding():
        slack = 0 if file.format >= 3 else _UNWRITTEN
        modules = [_module(number, layer, file.tensors, slack) for number, layer in enumerate(file.contents["layers"])]
        if file.tensors:
            raise ValueError(f"{sorted(file.tensors)} besides")
        linear = [module for module in modules if isinstance(module, (SparseLinear, nn.Linear))]
        fit = all(this.out_features == after.in_features for this, after in pairwise(linear))
        if not fit or len({layer.bias.dtype for layer in linear}) != 1:
            raise ValueError("layers that do not fit together")
    return SparseNetwork(nn.Sequential(*modules))


def _linear(weight: Tensor, bias: Tensor) -> nn.Module:
    """The quicker of the two kinds of layer; ``weight`` may be sparse."""
    nonzero = weight._nnz() if weight.is_sparse else int(weight.count_nonzero())
    small = weight.numel() < _SMALL or nonzero > _DENSE_ABOVE * weight.numel()
    if not small and weight.dtype in _TYPES:
        return SparseLinear(weight, bias)
    return _dense_linear(weight.to_dense(), bias)


def _dense(layer: nn.Module) -> nn.Module:
    """``layer``, or ``nn.Linear`` of the same numbers if it is sparse."""
    return _dense_linear(layer.weight.to_dense(), layer.bias) if isinstance(layer, SparseLinear) else layer


def _dense_linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")  # of a layer that died
        layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = (nn.Parameter(tensor, requires_grad=False) for tensor in (weight.contiguous(), bias))
    return layer


def _arguments(function: nn.Module) -> dict[str, Any]:
    """What an elementwise function of torch was made with."""
    return {name: getattr(function, name) for name in getattr(function, "__constants__", ())}


def _encode(matrix: Tensor) -> dict[str, Tensor]:
    """``values`` without zeros and the ``gaps`` before them, or all of a ``dense`` matrix, whichever is shorter."""
    flat = matrix.flatten()
    places = flat.nonzero().flatten()
    if len(places) * (1 + flat.element_size()) >= flat.nbytes:
        return {"dense": flat}
    zeros = places.diff(prepend=places.new_tensor([-1])) - 1
    ends = (zeros // _ESCAPE + 1).cumsum(0)
    written, last = (int(ends[-1]), int(places[-1])) if len(ends) else (0, -1)
    # Zeros behind the last weight are written too, but for a rest: so the size of a matrix is that of its bytes.
    gaps = torch.full((written + (len(flat) - 1 - last) // _ESCAPE,), _ESCAPE, dtype=torch.uint8)
    gaps[ends - 1] = (zeros % _ESCAPE).to(torch.uint8)
    return {"gaps": gaps, "values": flat[places]}


def _decode(tensors: Mapping[str, Tensor], outputs: int, columns: int, slack: int) -> Tensor:
    """The matrix that :func:`_encode` encoded, sparse where it was.

    A file may claim any size. It is believed as far as the bytes reach, and ``slack`` beyond.
    """
    numel = outputs * columns
    if tensors.keys() == {"dense"}:
        if tensors["dense"].shape != (numel,):
            raise ValueError(f"{list(tensors['dense'].shape)} numbers for {numel}")
        return tensors["dense"].view(outputs, columns)
    if tensors.keys() != {"gaps", "values"}:
        raise ValueError(f"{sorted(tensors)} of a layer")
    gaps, values = tensors["gaps"], tensors["values"]
    if gaps.dtype is not torch.uint8 or gaps.dim() != 1:
        raise ValueError("gaps that are not bytes")
    ends = gaps != _ESCAPE
    reached = (gaps.long() + ends).cumsum(0)
    places, end = reached[ends] - 1, int(reached[-1]) if len(reached) else 0
    if values.shape != places.shape or not end <= numel <= end + max(slack, _ESCAPE - 1) or not bool(values.all()):
        raise ValueError(f"gaps and values that do not fit {numel} numbers")
    indices = torch.stack([places // max(1, columns), places % max(1, columns)])
    return torch.sparse_coo_tensor(indices, values, (outputs, columns), is_coalesced=True, check_invariants=True)


def _module(number: int, layer: Mapping[str, Any], tensors: dict[str, Tensor], slack: int) -> nn.Module:
    """The layer of this description; what it uses of ``tensors`` is taken out of them."""
    if layer["kind"] != "Linear":
        kind, arguments = _FUNCTIONS[layer["kind"]], layer["arguments"]
        module = kind(**arguments)
        kinds = {name: type(value) for name, value in _arguments(kind()).items()}
        for name, value in arguments.items():
            if type(value) is not kinds[name] and not (kinds[name] is float and type(value) is int):
                raise TypeError(f"a {layer['kind']} with {name} {value!r}")
            if type(value) in (int, float):
                check_number(f"a {layer['kind']} with {name}", value, below=1e30)  # as a float of single precision is
        if _arguments(module) != arguments:
            raise ValueError(f"a {layer['kind']} with {arguments}")
        return module
    inputs, outputs = layer["inputs"], layer["outputs"]
    if type(inputs) is not int or type(outputs) is not int or min(inputs, outputs) < 0:
        raise ValueError(f"a layer from {inputs} to {outputs} units")
    names = [name for name in ("dense", "gaps", "values") if f"{number}.{name}" in tensors]
    matrix = _decode({name: tensors.pop(f"{number}.{name}") for name in names}, outputs, inputs + 1, slack)
    if not matrix.is_floating_point():
        raise ValueError(f"numbers of type {matrix.dtype} for {inputs} to {outputs} units")
    check_finite("values", "load_sparse", matrix.values() if matrix.is_sparse else matrix)
    weight, bias = matrix.narrow_copy(1, 0, inputs), matrix.narrow_copy(1, inputs, 1)
    return _linear(weight.coalesce() if weight.is_sparse else weight, bias.to_dense().flatten())
