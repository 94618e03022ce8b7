"""One safetensors file for a model: mu, rho, buffers and metadata. Loading never runs code from the file."""

import os
from collections.abc import Callable, Mapping
from typing import Any, get_args

from torch import Tensor, nn

from bayesbackprop import families, likelihoods, priors
from bayesbackprop._engine import Estimator, lock
from bayesbackprop._engine.mlp import layers_of
from bayesbackprop._errors import Described, check_count, check_flag, check_whole, invalid, tensor_shape
from bayesbackprop._files import OpenFile, check_same, reading, writing
from bayesbackprop._meta import check_in_memory, is_meta, materialise
from bayesbackprop.families import AnyFamily, Diagonal
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.priors import Prior


def save(model: Bayesian, path: str | os.PathLike[str], *, frozen: bool = True) -> None:
    """Write ``model`` to ``path``, atomically. Parameters that are not finite are refused.

    If another thread runs ``fit``, the file holds the model between two of its steps. ``fit`` waits while the model is
    written, but not until it is on the disk. Nothing is copied in memory.

    Args:
        model: The model.
        path: Where to.
        frozen: Whether the file also holds the parameters that are not trained (``requires_grad=False``). Without them
            it is small if only adapters of a large network are Bayesian, and ``load`` needs a network that has them.
    """
    if not isinstance(model, Bayesian):
        raise invalid("model", "save", "a Bayesian", model)
    check_whole("model", "save", model)
    check_in_memory("model", "save", model)
    check_flag("save", frozen=frozen)
    names = _layer_names(model.net)
    contents: dict[str, Any] = {
        "seed": model.seed,
        "centred": model.has_centre,
        "likelihood": likelihoods.describe(model.likelihood),
        "layers": names,  # of a fully connected network, for those who read the file without it
        "parameters": {
            entry.name: {"prior": priors.describe(entry.prior), "estimator": entry.estimator}
            for entry in model.plan
            if entry.prior is not None
        },
        "families": [{"names": names, **families.describe(family)} for names, family in model.families],
        **({} if model.output is None else {"picks_output": True}),
    }
    left_out = {} if frozen else _frozen(model)
    if left_out:
        contents["left_out"] = {name: list(tensor.shape) for name, tensor in left_out.items()}
    with writing(path, "model", contents) as put, lock(model.net):
        tensors = {name: tensor for name, tensor in _tensors(model).items() if name not in left_out}
        check_same("save", tensors, tensors, dict(model.named_buffers()))
        put(tensors)


def load(
    path: str | os.PathLike[str],
    net: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | Mapping[str, Prior] | None = None,
    output: Callable[[Any], Any] | None = None,
) -> Bayesian:
    """The model in the file at ``path``, on ``net``, a module of the same architecture, which receives its means.

    Args:
        path: A file that :func:`save` wrote.
        net: The network. It is changed only after the whole file has been checked against it. One on the meta device
            gets its memory then, on torch's default device, so that its weights exist only once. What a file was
            written without, ``save(..., frozen=False)``, it must have.
        likelihood: Needed if the model had a likelihood of the user's own, which a file cannot hold.
        prior: Needed if the model had a prior of the user's own.
        output: Needed if the model was made with ``Bayesian(..., output=...)``.
    """
    if not isinstance(net, nn.Module):
        raise invalid("net", "load", "a torch.nn.Module", net)
    with reading(path, "model", "load") as file:
        return _model(path, file, net, likelihood, prior, output)


def _model(
    path: str | os.PathLike[str],
    file: OpenFile,
    net: nn.Module,
    likelihood: Likelihood | None,
    prior: Prior | Mapping[str, Prior] | None,
    output: Callable[[Any], Any] | None,
) -> Bayesian:
    """What :func:`load` returns."""
    with file.understanding():
        seed, centred, parameters = (file.contents[name] for name in ("seed", "centred", "parameters"))
        check_count("Bayesian", least=0, seed=seed)  # which takes None for any seed
        if seed >= 2**63 or not isinstance(centred, bool) or not parameters:
            raise ValueError(f"seed {seed}, centred {centred!r}, {len(parameters)} Bayesian parameters")
        described = likelihoods.from_description(file.contents["likelihood"])
        known = {name: priors.from_description(entry["prior"]) for name, entry in parameters.items()}
        estimators: dict[str, Estimator] = {name: entry["estimator"] for name, entry in parameters.items()}
        if not set(estimators.values()) <= set(get_args(Estimator)):
            raise ValueError(f"estimators {sorted(set(estimators.values()))}")
        family: dict[str, AnyFamily] = dict.fromkeys(parameters, Diagonal())
        for group in file.contents.get("families", []):  # which older files have not
            family |= dict.fromkeys(group.pop("names"), families.from_description(group))
        if family.keys() != parameters.keys():
            raise ValueError(f"families of {sorted(family.keys() - parameters.keys())}")
        if likelihood is None and described is not None:
            likelihood = described
            for name, parameter in likelihood.named_parameters():
                if (stored := file.tensors.get(f"likelihood.{name}")) is not None:
                    parameter.data = parameter.data.to(stored.dtype)
    if likelihood is None:
        raise invalid("likelihood", "load", "given, since the file has one of your own, which it cannot hold", None)
    if output is None and file.contents.get("picks_output"):
        constraint = "given, as it was to Bayesian (such as lambda o: o.logits), since a file cannot hold it"
        raise invalid("output", "load", constraint, None)
    if prior is None:
        prior = {name: value for name, value in known.items() if value is not None}
        if own := sorted(known.keys() - prior.keys()):
            raise invalid("prior", "load", f"given, since the file has one of your own for {own}", None)
    if unknown := sorted(known.keys() - dict(net.named_parameters()).keys()):
        got = Described(f"{path} (the file also has {unknown}, which the network has not)")
        raise invalid("path", "load", "a file of the same network", got)
    with file.understanding():
        wrote, has = (_that_count(names) for names in (file.contents.get("layers"), _layer_names(net)))
    if wrote is not None and has is not None and wrote != has:
        raise invalid("net", "load", f"of the layers of the network in {path}, {wrote}", Described(has))
    model = Bayesian(
        net,
        likelihood,
        prior,
        estimator=estimators,
        family=family,
        select=lambda name, _: name in known,
        normalisation=True,
        centre="net" if centred else None,
        output=output,
        seed=seed,
    )
    targets = _tensors(model)
    with file.understanding():
        left_out = {name: tuple(map(int, shape)) for name, shape in file.contents.get("left_out", {}).items()}
    for name, shape in left_out.items():
        if name not in targets or targets[name].shape != shape or name in file.tensors:
            got = Described(f"{path}, which was written without '{name}' of shape {list(shape)}")
            raise invalid("path", "load", "a file of the same network", got)
        if targets.pop(name).is_meta:
            constraint = f"one that has what {path} was written without, such as '{name}'"
            raise invalid("net", "load", constraint, Described("one with it on the meta device"))
    missing, unknown = sorted(targets.keys() - file.tensors.keys()), sorted(file.tensors.keys() - targets.keys())
    if missing or unknown:
        more = [f"the file also has {unknown}, which the network has not"] if unknown else []
        less = [f"the file lacks {missing}, which the network has"] if missing else []
        got = Described(f"{path} ({', and '.join(more + less)})")
        raise invalid("path", "load", "a file of the same network", got)
    for name, target in targets.items():
        given = file.tensors[name]
        if given.shape != target.shape or given.dtype != target.dtype:
            constraint = f"a file whose '{name}' is {tensor_shape(target)}, as in the network"
            raise invalid("path", "load", constraint, Described(f"{tensor_shape(given)} in {path}"))
    if is_meta(net):
        left = sorted(name for name, buffer in net.named_buffers() if buffer.is_meta and f"net.{name}" not in targets)
        if left:
            constraint = f"one with values in the buffers that no file holds, {left} (made outside of torch.device)"
            raise invalid("net", "load", constraint, Described("one with all of them on the meta device"))
    with file.understanding():
        file.check_finite("load", dict(model.named_buffers()))
        if is_meta(model):
            materialise(model)
            model.seed = seed
            targets = {name: tensor for name, tensor in _tensors(model).items() if name not in left_out}
        file.copy_to(targets)
    return model


def _tensors(model: Bayesian) -> dict[str, Tensor]:
    """All that a file holds, each tensor once however many names it has, by its name in ``model``."""
    # Not by state_dict(), in which hooks may give other names and tensors (of modules that are sharded, say).
    left_out = {"_seed"}  # which is metadata
    for path, module in model.named_modules():
        left_out |= {f"{path}.{name}" if path else name for name in module._non_persistent_buffers_set}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


def _frozen(model: Bayesian) -> dict[str, Tensor]:
    """The parameters of the network that are neither trained nor Bayesian, by their names in ``model``."""
    own = {id(q.mu) for q in model.posterior.values()}
    named = model.net.named_parameters(prefix="net")
    return {name: tensor for name, tensor in named if not tensor.requires_grad and id(tensor) not in own}


def _layer_names(net: nn.Module) -> list[str] | None:
    """The layers of a fully connected network as text; None for any other."""
    layers = layers_of(net)
    return None if layers is None else ["Linear" if type(layer) is nn.Linear else repr(layer) for layer in layers]


def _that_count(names: list[str] | None) -> list[str] | None:
    """Without the layers that do nothing in evaluation."""
    idle = ("Identity(", "Dropout(", "Flatten(")
    if not isinstance(names, list | None):
        raise TypeError(f"layers {names!r:.80}")
    return None if names is None else [name for name in names if not name.startswith(idle)]
