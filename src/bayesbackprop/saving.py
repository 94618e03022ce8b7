"""One safetensors file for a model: mu, rho, buffers and metadata. Loading never runs code from the file."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from bayesbackprop import likelihoods, priors
from bayesbackprop._errors import Described, invalid
from bayesbackprop._version import __version__
from bayesbackprop.bayesian import Bayesian
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.priors import Prior

# The layout of the file. Raised when an older library could not read it.
_FORMAT = 1
_KEY = "bayesbackprop"


def save(model: Bayesian, path: str | os.PathLike[str]) -> None:
    """Write ``model`` to ``path``, whole or not at all."""
    bayesian = {entry.name: entry for entry in model.plan if entry.prior is not None}
    metadata = {
        "format": _FORMAT,
        "version": __version__,
        "seed": model.seed,
        "centred": model.has_centre,
        "likelihood": model.likelihood.describe(),
        "parameters": {
            name: {"prior": priors.describe(entry.prior), "estimator": entry.estimator}
            for name, entry in bayesian.items()
            if entry.prior is not None
        },
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in _tensors(model).items()}
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        safetensors.torch.save_file(tensors, temporary, metadata={_KEY: json.dumps(metadata)})
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


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
    metadata, tensors = _read(path)
    described: dict[str, dict[str, Any]] = metadata["parameters"]
    likelihood = likelihood or likelihoods.from_description(metadata["likelihood"])
    if likelihood is None:
        raise invalid("likelihood", "load", f"given, since the file's is your own {metadata['likelihood']}", None)
    if prior is None:
        known = {name: priors.from_description(entry["prior"]) for name, entry in described.items()}
        own = sorted(name for name, value in known.items() if value is None)
        if own:
            raise invalid("prior", "load", f"given, since the file's is your own LogDensity for {own}", None)
        prior = {name: value for name, value in known.items() if value is not None}
    model = Bayesian(
        net,
        likelihood,
        prior,
        estimator={name: entry["estimator"] for name, entry in described.items()},
        select=lambda name, _: name in described,
        normalisation=True,
        centre="net" if metadata["centred"] else None,
        seed=metadata["seed"],
    )
    targets = _tensors(model)
    _check_same(path, tensors, targets)
    for name, target in targets.items():
        target.detach().copy_(tensors[name])
    return model


def _tensors(model: Bayesian) -> dict[str, Tensor]:
    """All that a file holds, each tensor once however many names it has, by its name in ``model``."""
    saved = set(model.state_dict())  # leaves out buffers that are not persistent
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name in saved}


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise invalid("path", "load", "a whole safetensors file", Described(f"{path} ({error})")) from error
    if text is None:
        got = Described(f"{path}, a safetensors file of another program")
        raise invalid("path", "load", "a file that bayesbackprop.save wrote", got)
    metadata: dict[str, Any] = json.loads(text)
    if metadata["format"] > _FORMAT:
        got = Described(f"format {metadata['format']}, written by bayesbackprop {metadata['version']}")
        raise invalid("path", "load", f"a file of format {_FORMAT} or older (update bayesbackprop)", got)
    return metadata, tensors


def _check_same(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(set(targets) - set(tensors)), sorted(set(tensors) - set(targets))
    if missing or unknown:
        got = Described(f"{path}, where {missing or 'none'} are missing and {unknown or 'none'} are not in the network")
        raise invalid("path", "load", "a file of the same network", got)
    for name, target in targets.items():
        shape = tensors[name].shape
        if shape != target.shape:
            got = Described(f"{list(shape)} in {path}")
            raise invalid("path", "load", f"a file whose '{name}' has shape {list(target.shape)}", got)
