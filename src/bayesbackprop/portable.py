"""Networks of a posterior that leave Python: its mean, a draw by its index, a kept ensemble; as ONNX files too.

``torch.export.export`` takes what :func:`mean_network`, :class:`DrawnNetwork` and :class:`EnsembleNetwork` make, and
:func:`save_onnx` writes it to a file. The noise is a pure function of integers, so that draw 7 has the same weights
wherever it is computed.
"""

import copy
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from bayesbackprop import noise
from bayesbackprop._batches import arguments, check_arguments
from bayesbackprop._engine import lock, memo_of
from bayesbackprop._errors import Described, check_batch, check_flag, check_path, check_type, check_whole, invalid
from bayesbackprop._files import write_atomically
from bayesbackprop._meta import check_in_memory
from bayesbackprop.export import SparseNetwork
from bayesbackprop.model import Bayesian
from bayesbackprop.noise import Key
from bayesbackprop.prediction import Ensemble, predictive_of_rows

__all__ = ["DrawnNetwork", "EnsembleNetwork", "mean_network", "save_onnx"]

_KNOWN = "a Bayesian, an Ensemble, or a torch.nn.Module such as DrawnNetwork(model)"
# How far a result of onnxruntime may be from torch's, as a part of the largest: noise in 32 bits, and sums in another
# order. An operation that means something else is much further away.
_TOLERANCE = 1e-4
# What one ONNX file, a message of protobuf, can hold.
_LARGEST = 2**31


def mean_network(model: Bayesian) -> nn.Module:
    """A copy of the network at the posterior mean, in evaluation mode and without gradients.

    Of a model with ``output=`` it gives what that picks, as drawn networks and ensembles do; ``model.net`` gives all.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> program = torch.export.export(mean_network(Bayesian(nn.Linear(2, 1), Gaussian(0.1))), (torch.zeros(4, 2),))
    """
    check_type("mean_network", Bayesian, "a Bayesian", model=model)
    model.check_about_mu("mean_network")
    check_whole("model", "mean_network", model)
    check_in_memory("model", "mean_network", model)
    copied: nn.Module = _frozen(model.net)
    return copied if model.output is None else _Picked(copied, model.output)


class _Picked(nn.Module):
    """A network of whose output a function picks a part."""

    def __init__(self, net: nn.Module, output: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net, self.output = net, output
        self.training = net.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output(self.net(*args, **kwargs))


class DrawnNetwork(nn.Module):
    """The network at one draw of its weights, which a further first argument chooses: ``drawn(index, x)``.

    The index is an int64 tensor without dimensions. The same index gives the weights of the same draw of
    ``model.ensemble()`` and of ``model.predict(..., estimator="shared")``. It is a copy in evaluation mode.

    Args:
        model: The Bayesian network.

    Examples:
        >>> from bayesbackprop import Gaussian
        >>> model, x = Bayesian(nn.Linear(2, 1), Gaussian(0.1), seed=0), torch.ones(4, 2)
        >>> drawn = DrawnNetwork(model)(torch.tensor(7), x)
        >>> torch.allclose(drawn, model.ensemble(8)(x)[7])
        True
    """

    def __init__(self, model: Bayesian) -> None:
        super().__init__()
        check_type("DrawnNetwork", Bayesian, "a Bayesian", model=model)
        self.model = _frozen(model)

    def forward(self, index: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """The output of the network at draw ``index``: what ``output=`` of the model picks, if it was given."""
        draw = self.model.draw(0, index)
        names = list(draw.engine.parameters.by_name)
        weights = (stacked[0] for stacked in draw.engine.draws(draw.key, 1, names))
        found = functional_call(draw.engine.net, dict(zip(names, weights, strict=True)), args, kwargs)
        return found if self.model.output is None else self.model.output(found)


class EnsembleNetwork(nn.Module):
    """A kept ensemble as one module, which gives ``{"mean": ..., "variance": ..., "epistemic": ...}``.

    They are those of ``ensemble.predict``: for classes the mean is their probabilities and the epistemic part the
    mutual information, for numbers it is the variance that the draws do not agree about.

    Args:
        ensemble: What ``model.ensemble(draws)`` made.

    Examples:
        >>> from bayesbackprop import Categorical
        >>> model, x = Bayesian(nn.Linear(2, 3), Categorical(), seed=0), torch.ones(4, 2)
        >>> {name: list(tensor.shape) for name, tensor in EnsembleNetwork(model.ensemble(8))(x).items()}
        {'mean': [4, 3], 'variance': [4, 3], 'epistemic': [4]}
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        check_type("EnsembleNetwork", Ensemble, "an Ensemble, such as model.ensemble(100)", ensemble=ensemble)
        self.net, self.likelihood, self.draws = _frozen(ensemble.net), _frozen(ensemble.likelihood), ensemble.draws
        self.output = ensemble.output
        self._names = {f"draws_of_{name.replace('.', '_')}_{n}": name for n, name in enumerate(ensemble.weights)}
        for own, name in self._names.items():
            self.register_buffer(own, ensemble.weights[name])

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The mean, the variance and the epistemic part of the predictive distribution."""
        stacked = {name: self.get_buffer(own) for own, name in self._names.items()}
        # One after the other: a graph that vmap makes of convolutions or attention is for one length of batch alone.
        each = [
            functional_call(self.net, {name: draws[number] for name, draws in stacked.items()}, args, kwargs)
            for number in range(self.draws)
        ]
        if self.output is not None:
            each = [self.output(found) for found in each]
        found = predictive_of_rows(self.likelihood, tree_map(lambda *parts: torch.cat(parts), *each), self.draws)
        return {"mean": found.mean, "variance": found.variance, "epistemic": found.epistemic}


def save_onnx(
    network: Bayesian | Ensemble | nn.Module, path: str | os.PathLike[str], inputs: Any, *, int8: bool = False
) -> float:
    """Write ``network`` to an ONNX file at ``path``, atomically, for batches of any length.

    Before it is written, onnxruntime runs it beside torch on ``inputs``: a file whose results differ is refused.

    Args:
        network: A model, of which it is the mean; an ensemble, whose outputs are ``mean``, ``variance`` and
            ``epistemic``; a ``DrawnNetwork``, which has the input ``index`` besides; what :func:`~bayesbackprop.sparse`
            made; or any other module, as it is in evaluation mode.
        path: Where to.
        inputs: A batch such as the network takes: a tensor, a tuple of positional or a mapping of keyword arguments.
        int8: Whether the weights of matrix products are rounded to 8 bits, and their inputs when it runs: a quarter of
            the size. The results then differ as much as that rounding makes them; look at what is returned.

    Returns:
        The largest difference between a number of onnxruntime's and torch's.
    """
    check_flag("save_onnx", int8=int8)
    place = check_path("save_onnx", path=path)
    check_type("save_onnx", Bayesian | Ensemble | nn.Module, _KNOWN, network=network)
    _check_installed()
    module = _module_of(network)
    if int8 and isinstance(module, DrawnNetwork):
        raise invalid("int8", "save_onnx", "False for a DrawnNetwork, whose weights are drawn when the file runs", True)
    args, kwargs = arguments(inputs, "save_onnx")
    check_arguments("save_onnx", args, kwargs)
    _check_inputs((args, kwargs))
    args, kwargs = tree_map(_at_least_two, (args, kwargs))
    names = _names_of(args, kwargs)
    if isinstance(module, DrawnNetwork):
        args, names = (torch.tensor(0), *args), ["index", *names]
    with torch.no_grad():
        wanted = module(*args, **kwargs)
        # A file has one name for each value: an output may not be called as an input is.
        outputs = [f"output_{name}" if name in names else name for name in _output_names(wanted)]
        content = _translated(module, args, kwargs, names, outputs)
    if int8:
        content = _quantised(content)
    given = {name: tensor.numpy() for name, tensor in zip(names, tree_leaves((args, kwargs)), strict=True)}
    differences = _differences(content, given, wanted)
    for name, (off, scale) in differences.items():
        if not (int8 or off <= _TOLERANCE * max(1.0, scale)):
            constraint = "one that onnxruntime computes as torch does"
            raise invalid("network", "save_onnx", constraint, Described(f"{off:.3g} between them in '{name}'"))
    write_atomically(place, content)
    return max(off for off, _ in differences.values())


def _frozen(module: Any) -> Any:
    """A copy in evaluation mode that nobody trains."""
    with lock(module.net if isinstance(module, Bayesian) else module):
        copied = copy.deepcopy(module, memo_of(module))
    return copied.eval().requires_grad_(False)


def _module_of(network: Bayesian | Ensemble | nn.Module) -> nn.Module:
    if isinstance(network, Bayesian):
        return mean_network(network)
    if isinstance(network, Ensemble):
        return EnsembleNetwork(network)
    return network.dense() if isinstance(network, SparseNetwork) else _frozen(network)


def _check_installed() -> None:
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ImportError(f'save_onnx needs {", ".join(missing)}: pip install "bayesbackprop[onnx]"')


def _check_inputs(inputs: Any) -> None:
    leaves = tree_leaves(inputs)
    fits = [isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.device.type == "cpu" for leaf in leaves]
    if not leaves or not all(fits):
        wrong = next((leaf for leaf, fit in zip(leaves, fits, strict=True) if not fit), inputs)
        raise invalid("inputs", "save_onnx", "tensors on the CPU with a row for each example", wrong)
    if len({len(leaf) for leaf in leaves}) > 1:
        found = Described(f"{[len(leaf) for leaf in leaves]} rows")
        raise invalid("inputs", "save_onnx", "tensors with a row for each example, as many in all", found)
    check_batch("inputs", "save_onnx", leaves)


def _at_least_two(tensor: Tensor) -> Tensor:
    """A batch of one is taken for a fixed length by torch.export."""
    return tensor if len(tensor) > 1 else tensor.repeat_interleave(2, 0)


def _names_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    many = len(tree_leaves(args))
    positional = ["input"] if many == 1 else [f"input_{number}" for number in range(many)]
    return positional + _paths(dict(kwargs))


def _output_names(outputs: Any) -> list[str]:
    return ["output"] if isinstance(outputs, Tensor) else _paths(outputs)


def _paths(values: Any) -> list[str]:
    """A name for each tensor in ``values``: what leads to it, as ``mean.price`` or ``output_0``."""
    names = [keystr(path).replace("']['", ".").strip("[]'.") for path, _ in tree_flatten_with_path(values)[0]]
    return [f"output_{name}" if name.isdecimal() else name for name in names]


def _translated(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str], outputs: list[str]
) -> bytes:
    """The content of an ONNX file."""
    tensors, structure = tree_flatten((args, kwargs))
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} if tensor.dim() else {} for tensor in tensors)
    with _refusing("one that torch.export takes, for any number of examples"):
        flat = _Flat(module, structure)
        program = torch.export.export(flat, tuple(tensors), dynamic_shapes={"tensors": shapes}, strict=False)
        table = torch.export.default_decompositions()
        table[torch.ops.bayesbackprop.normal.default] = _plain_normal
        program = program.run_decompositions(table)
    with _refusing("one whose operations ONNX has"):
        # torch would give a name without a look at whether another value of the graph has it, such as the "mean" of
        # a pooling layer, and nobody could tell which of the two is meant.
        final = {f"bayesbackprop.{number}": name for number, name in enumerate((*names, *outputs))}
        unique = list(final)
        translated = torch.onnx.export(
            program,
            dynamo=True,
            input_names=unique[: len(names)],
            output_names=unique[len(names) :],
            verbose=False,
            external_data=False,
        )
        assert translated is not None
        proto = translated.model_proto
        _rename(proto.graph, final)
    for node in (*proto.graph.node, *(node for function in proto.functions for node in function.node)):
        node.ClearField("metadata_props")  # where in which Python file it was computed
    if proto.ByteSize() >= _LARGEST:
        got = Described(f"one of {proto.ByteSize():,} bytes")
        raise invalid("network", "save_onnx", "below 2 GB, the largest ONNX file", got)
    return bytes(proto.SerializeToString())


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Rename values of an ONNX graph; another value that has one of the new names gets a name of its own."""
    known: list[str] = []
    _each_name(graph, known.append)
    new, taken = dict(names), {*known, *names.values()}
    for name in sorted({*known} & {*names.values()} - {*names}):
        new[name] = next(other for n in itertools.count(1) if (other := f"{name}_inner_{n}") not in taken)
    _each_name(graph, lambda name: new.get(name, name))


def _each_name(graph: Any, function: Callable[[str], str | None]) -> None:
    """Call a function with the name of each value wherever it stands in an ONNX graph; what it returns replaces it."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = function(value.name) or value.name
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [function(name) or name for name in names]
        for attribute in node.attribute:  # the branches of a condition use values from outside of them
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _each_name(inner, function)


class _Flat(nn.Module):
    """A module that takes its tensors one after the other: torch.export confuses those of ``**kwargs``."""

    def __init__(self, module: nn.Module, structure: TreeSpec) -> None:
        super().__init__()
        self.module, self.structure = module, structure

    def forward(self, *tensors: Tensor) -> Any:
        args, kwargs = tree_unflatten(list(tensors), self.structure)
        return self.module(*args, **kwargs)


def _plain_normal(
    step: Tensor, draw: Tensor, seed: int, stream: int, shape: Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The operator ``bayesbackprop::normal`` in operations that ONNX has."""
    return noise.normal(tuple(shape), Key(seed, step, draw), stream, dtype, device)


@contextmanager
def _refusing(constraint: str) -> Iterator[None]:
    """Within it, whatever goes wrong is the network's fault; torch's exporters raise errors of many kinds."""
    try:
        with _silent("torch.onnx"):  # it says of each operation of torchvision that this is not installed
            yield
    except Exception as error:
        reason = _innermost(error)
        raise invalid("network", "save_onnx", constraint, Described(f"an error of torch ({reason})")) from error


@contextmanager
def _silent(name: str | None) -> Iterator[None]:
    """Within it a logger, None for that of all, only says what went wrong; exporters also warn of themselves."""
    logger, handler = logging.getLogger(name), logging.NullHandler()
    level = logger.level
    logger.setLevel(logging.ERROR)
    logger.addHandler(handler)  # without any, logging.warning would give the program one for good
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _innermost(error: BaseException) -> str:
    """What went wrong first, in one line."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _quantised(content: bytes) -> bytes:
    """An ONNX file with weights of 8 bits."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load_model_from_string(content).graph
    empty = {each.name for each in graph.initializer if 0 in each.dims}  # onnxruntime's product of 8 bits reads past it
    # A Gemm has become a MatMul of another name when onnxruntime looks at what to leave out.
    spared = [name for node in graph.node if empty & {*node.input} for name in (node.name, f"{node.name}_MatMul")]
    with TemporaryDirectory() as folder, _silent(None):
        whole, small = Path(folder) / "whole.onnx", Path(folder) / "small.onnx"
        whole.write_bytes(content)
        quantize_dynamic(whole, small, weight_type=QuantType.QInt8, nodes_to_exclude=spared)
        return small.read_bytes()


def _differences(content: bytes, given: Mapping[str, Any], wanted: Any) -> dict[str, tuple[float, float]]:
    """Of each output its largest difference from what is ``wanted``, and the largest number there."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.log_severity_level = 3  # errors alone
    session = InferenceSession(content, options, providers=["CPUExecutionProvider"])
    known = {each.name for each in session.get_inputs()}  # an input that changes nothing is not in the file
    got = session.run(None, {name: array for name, array in given.items() if name in known})
    each = zip(_output_names(wanted), got, tree_leaves(wanted), strict=True)
    return {name: _difference(torch.from_numpy(array), tensor) for name, array, tensor in each}


def _difference(got: Tensor, wanted: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, and the largest number of the second; infinities and NaN may be equal."""
    if got.shape != wanted.shape:
        return float("inf"), 0.0
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    off = torch.where(same, 0.0, (got.double() - wanted.double()).abs())
    finite = wanted[wanted.isfinite()]
    return (float(off.max()), float(finite.abs().max()) if finite.numel() else 0.0) if off.numel() else (0.0, 0.0)
