"""One safetensors file for a model: mu, rho, buffers and metadata. Loading never runs code from the file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor, nn

from bayesbackprop import likelihoods, priors
from bayesbackprop._engine import Estimator
from bayesbackprop._engine.mlp import layers_of
from bayesbackprop._errors import Described, check_count, invalid, tensor_shape
from bayesbackprop._files import read, write
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.priors import Prior


@dataclass(frozen=True)
class _Metadata:
    """What a file says besides its tensors."""

    seed: int
    centred: bool
    likelihood: Likelihood | None
    priors: dict[str, Prior | None]
    estimators: dict[str, Estimator]

    @staticmethod
    def parse(contents: Mapping[str, Any]) -> "_Metadata":
        seed, centred = contents["seed"], contents["centred"]
        parameters: dict[str, dict[str, Any]] = contents["parameters"]
        check_count("Bayesian", least=0, seed=seed)  # which takes None for any seed
        if not isinstance(centred, bool):
            raise TypeError(f"centred {centred!r}")
        for name, entry in parameters.items():
            if entry["estimator"] not in get_args(Estimator):
                raise ValueError(f"estimator {entry['estimator']!r} of {name}")
        return _Metadata(
            seed=seed,
            centred=centred,
            likelihood=likelihoods.from_description(contents["likelihood"]),
            priors={name: priors.from_description(entry["prior"]) for name, entry in parameters.items()},
            estimators={name: entry["estimator"] for name, entry in parameters.items()},
        )


def save(model: Bayesian, path: str | os.PathLike[str]) -> None:
    """Write ``model`` to ``path``, atomically."""
    if not isinstance(model, Bayesian):
        raise invalid("model", "save", "a Bayesian", model)
    bayesian = {entry.name: entry for entry in model.plan if entry.prior is not None}
    contents = {
        "seed": model.seed,
        "centred": model.has_centre,
        "likelihood": likelihoods.describe(model.likelihood),
        "layers": _layers(model.net),
        "parameters": {
            name: {"prior": priors.describe(entry.prior), "estimator": entry.estimator}
            for name, entry in bayesian.items()
            if entry.prior is not None
        },
    }
    write(path, "model", _tensors(model), contents)


def _layers(net: nn.Module) -> list[str] | None:
    """The layers of a fully connected network, for those who read the file without it; None for any other."""
    layers = layers_of(net)
    return None if layers is None else ["Linear" if type(layer) is nn.Linear else repr(layer) for layer in layers]


def load(
    path: str | os.PathLike[str],
    net: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | Mapping[str, Prior] | None = None,
) -> Bayesian:
    """The model in the file at ``path``, on ``net``, a module of the same architecture, which receives its means.

    Args:
        path: A file that :func:`save` wrote.
        net: The network. It is changed only after the whole file has been checked against it.
        likelihood: Needed where the model had a likelihood of the user's own, which a file cannot hold.
        prior: Needed where the model had a prior of the user's own.
    """
    if not isinstance(net, nn.Module):
        raise invalid("net", "load", "a torch.nn.Module", net)
    file = read(path, "model", "load")
    tensors = file.tensors
    with file.understanding():
        metadata = _Metadata.parse(file.contents)
    likelihood = likelihood or metadata.likelihood
    if likelihood is None:
        raise invalid("likelihood", "load", "given, since the file has one of your own, which it cannot hold", None)
    for name, parameter in likelihood.named_parameters():
        if likelihood is metadata.likelihood and f"likelihood.{name}" in tensors:
            parameter.data = parameter.data.to(tensors[f"likelihood.{name}"].dtype)
    if prior is None:
        own = sorted(name for name, value in metadata.priors.items() if value is None)
        if own:
            raise invalid("prior", "load", f"given, since the file has one of your own for {own}", None)
        prior = {name: value for name, value in metadata.priors.items() if value is not None}
    _check_names(path, list(metadata.priors), net)
    model = Bayesian(
        net,
        likelihood,
        prior,
        estimator=metadata.estimators,
        select=lambda name, _: name in metadata.priors,
        normalisation=True,
        centre="net" if metadata.centred else None,
        seed=metadata.seed,
    )
    targets = _tensors(model)
    _check_same(path, tensors, targets)
    for name, target in targets.items():
        target.detach().copy_(tensors[name])
    return model


def _tensors(model: Bayesian) -> dict[str, Tensor]:
    """All that a file holds, each tensor once however many names it has, by its name in ``model``."""
    saved = set(model.state_dict()) - {"_seed"}  # leaves out buffers that are not persistent; the seed is metadata
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name in saved}


def _check_names(path: str | os.PathLike[str], names: list[str], net: nn.Module) -> None:
    unknown = sorted(set(names) - {name for name, _ in net.named_parameters()})
    if unknown:
        raise invalid("path", "load", "a file of the same network", Described(f"{path}, with {unknown} besides"))


def _check_same(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(set(targets) - set(tensors)), sorted(set(tensors) - set(targets))
    if missing or unknown:
        got = Described(f"{path}, where {missing or 'none'} are missing and {unknown or 'none'} are not in the network")
        raise invalid("path", "load", "a file of the same network", got)
    for name, target in targets.items():
        given = tensors[name]
        if given.shape != target.shape or given.dtype != target.dtype:
            constraint = f"a file whose '{name}' is {tensor_shape(target)}, as in the network"
            raise invalid("path", "load", constraint, Described(f"{tensor_shape(given)} in {path}"))
