"""How fitted estimators are kept: files that never run code, and pickles with a checksum."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import safetensors
import safetensors.torch
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from bayesbackprop import likelihoods, priors
from bayesbackprop._errors import Described, all_or_nothing, check_finite, invalid
from bayesbackprop._files import MISUNDERSTANDINGS, check_counter, check_same, read, write
from bayesbackprop._networks import drawn_from, mlp
from bayesbackprop.model import Bayesian
from bayesbackprop.optim import Adam
from bayesbackprop.priors import Prior

FUNCTIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid}

_TYPES = (torch.float32, torch.float64)

# The name of a type of numpy, in characters, and the largest array beside the tensors of a file, in bytes.
_TYPE, _LARGEST = 20, 2**26

# Who writes such files. One of another estimator is not damaged, and whose it is says what to do with it.
_WRITERS = ("BayesianMLPClassifier", "BayesianMLPRegressor")

# The name of the checksum in a pickle.
_CHECKSUM = "_sha256"


class Kept(BaseEstimator):  # type: ignore[misc]
    """An estimator that can be saved, loaded and pickled once it is fitted."""

    # What a fitted estimator holds besides its model; and what it may hold.
    _learnt: ClassVar[Any] = ("n_features_in_", "n_iter_", "n_samples_seen_", "loss_curve_", "_steps", "_made")
    _may_hold: ClassVar[Any] = ("feature_names_in_", "validation_scores_", "best_validation_score_")
    # The parameters that estimators did not always have: a file or a pickle without them means the defaults.
    _added: ClassVar[Any] = (
        "n_iter_no_change",
        "early_stopping",
        "validation_fraction",
        "warm_start",
        "class_weight",
    )

    model_: Bayesian
    n_features_in_: int
    loss_curve_: list[float]
    _made: dict[str, Any]
    _optimiser: Adam | None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator with its parameters to one file, atomically."""
        check_is_fitted(self)
        self._check_parameters()
        tensors = self._tensors()
        check_same(f"{self._name}.save", tensors, tensors)
        state = {name: value for name, value in super().__getstate__().items() if name not in ("model_", "_optimiser")}
        try:
            plain = json.loads(json.dumps(state, default=_plain, sort_keys=True))
        except TypeError as error:
            constraint = "of numbers, text and the library's priors, which is all a file can hold; use pickle otherwise"
            raise invalid("estimator", f"{self._name}.save", constraint, Described(error)) from error
        write(path, "estimator", tensors, {"estimator": self._name, "state": plain})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The estimator in a file that :meth:`save` wrote. No code runs from the file."""
        file = read(path, "estimator", f"{cls.__name__}.load")
        writer = file.contents.get("estimator")
        if writer != cls.__name__ and writer in _WRITERS:
            got = Described(f"{os.fspath(path)}, which {writer}.load reads, since a {writer} wrote it,")
            raise invalid("path", f"{cls.__name__}.load", f"a file that holds a {cls.__name__}", got)
        with file.understanding():
            if writer != cls.__name__:
                raise ValueError(f"the file of a {writer!r:.80}")
            estimator, state = cls(), json.loads(json.dumps(file.contents["state"]), object_hook=_rich)
            if isinstance(state["hidden_layer_sizes"], list):
                state["hidden_layer_sizes"] = tuple(state["hidden_layer_sizes"])
            may_be_absent = {*cls._added, *cls._may_hold}
            names = {*estimator.get_params(deep=False), *cls._learnt} - may_be_absent | may_be_absent & state.keys()
            estimator.__dict__.update({name: state[name] for name in names})
            estimator._check_parameters()
            estimator._restore(file.tensors)
        return estimator

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "model_" in state:
            state["model_"] = safetensors.torch.save(self._tensors())
            del state["_optimiser"]
        return {**state, _CHECKSUM: self._checksum(state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            if not isinstance(state, dict) or not state.keys() >= {*self._get_param_names()} - {*self._added}:
                raise TypeError(f"a state without parameters: {state!r:.80}")
            state = dict(state)
            # Older pickles have no checksum. A name that is none of the estimator's may be what is left of one.
            sealed, names = _CHECKSUM in state, self._names()
            if not (state.pop(_CHECKSUM) == self._checksum(state) if sealed else state.keys() <= names):
                raise ValueError("its checksum is missing, or that of other contents")
            with all_or_nothing(self):
                super().__setstate__(state)
                if "model_" in state:
                    self._restore(safetensors.torch.load(state["model_"]))
        except (*MISUNDERSTANDINGS, safetensors.SafetensorError) as error:
            got = Described(f"one that is damaged ({type(error).__name__}: {str(error)[:200]})")
            raise invalid("pickle", self._name, "one of such an estimator", got) from error

    def _checksum(self, state: Mapping[str, Any]) -> str:
        """Of what a pickle holds, as far as JSON can say it; of other objects only their type."""
        known = [sorted(map(str, state)), {name: state[name] for name in sorted(self._names() & state.keys())}]
        return hashlib.sha256(json.dumps(known, default=_plainest, skipkeys=True).encode()).hexdigest()

    def _names(self) -> set[str]:
        """Of all that a pickle holds, unless users have added something."""
        return {*self._get_param_names(), *self._learnt, *self._may_hold, "model_"}

    def _tensors(self) -> dict[str, Tensor]:
        """The model and, in the midst of a stream, the moments of Adam."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model_.state_dict().items()}
        if self._optimiser is not None:
            for name, parameter in self.model_.named_parameters():
                moments = self._optimiser.state.get(parameter, {})
                tensors |= {f"adam.{key}.{name}": value for key, value in moments.items()}
        return tensors

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what :meth:`_tensors` gave."""
        self._check_learnt()
        first = tensors["model.net.0.weight"]
        sizes = [first.shape[1]]
        while (weight := tensors.get(f"model.net.{2 * len(sizes) - 2}.weight")) is not None:
            sizes.append(len(weight))
        if (sizes[0], sizes[-1]) != (self.n_features_in_, self._outputs) or first.dtype not in _TYPES:
            raise ValueError(f"layers of {sizes} units for {self.n_features_in_} features and {self._outputs} outputs")
        self.model_ = network(sizes, **self._made, dtype=first.dtype, seed=int(tensors["model._seed"]))
        self._optimiser = None
        if any(name.startswith("adam.") for name in tensors):
            self._optimiser = Adam(self.model_.parameters(), fused=True)
            for name, parameter in self.model_.named_parameters():
                if f"adam.step.{name}" in tensors or name != "likelihood.log_noise":
                    moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    self._optimiser.state[parameter] = {"step": torch.zeros(()), **moments}
        expected = self._tensors()
        check_same(self._name, tensors, expected)
        for name, tensor in tensors.items():
            if name.startswith(("adam.exp_avg_sq.", "adam.step.")) and bool((tensor < 0).any()):
                raise ValueError(f"{name} is negative")
            expected[name].copy_(tensor)

    def _check_learnt(self) -> None:
        """Refuse what no fit leaves."""
        for name in ("n_features_in_", "n_iter_", "n_samples_seen_", "_steps"):
            check_counter(name, getattr(self, name))
        curves = [
            self.loss_curve_,
            getattr(self, "validation_scores_", []),
            [getattr(self, "best_validation_score_", 0)],
        ]
        for curve in curves:
            check_finite("loss_curve_", self._name, torch.tensor(curve, dtype=torch.float64))
        names = getattr(self, "feature_names_in_", None)
        if names is not None and np.shape(names) != (self.n_features_in_,):
            raise ValueError(f"{np.shape(names)} names for {self.n_features_in_} features")

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _outputs(self) -> int:
        """How many the network has."""
        raise NotImplementedError

    def _check_parameters(self) -> None:
        raise NotImplementedError


def network(
    sizes: Sequence[int],
    activation: str,
    likelihood: dict[str, Any],
    priors: Mapping[str, Prior],
    dtype: torch.dtype,
    seed: int,
    sigma: float = 0.01,
) -> Bayesian:
    """A network that begins as ``nn.Linear`` does, but leaves torch's generator alone."""
    random = torch.Generator().manual_seed(seed)
    net = mlp(sizes, FUNCTIONS[activation], linear=drawn_from(random, dtype))
    made = likelihoods.from_description(likelihood)
    if made is None:
        raise ValueError("a likelihood that is not the library's")
    made.requires_grad_(False)  # a learnt noise is set after each pass, which is quicker and better than by gradients
    return Bayesian(net, made.to(dtype), priors, sigma=sigma, estimator="local", seed=seed)


def _plain(value: Any) -> Any:
    """What JSON is to hold for a value that it does not know: numpy's, or a prior of the library."""
    if isinstance(value, np.generic) and not isinstance(item := value.item(), np.generic):  # but for long doubles
        return item
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.str, "values": value.tolist()}
    if isinstance(value, Prior) and (described := priors.describe(value))["kind"] != "own":
        return {"prior": described}
    raise TypeError(f"{value!r}, a {type(value).__name__}")


def _plainest(value: Any) -> Any:
    """As :func:`_plain`, but of any value: for a checksum, which needs not be read back."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    try:
        return _plain(value)
    except TypeError:
        return type(value).__name__


def _rich(mapping: dict[str, Any]) -> Any:
    """The value that :func:`_plain` made a mapping of."""
    if mapping.keys() == {"array", "values"}:
        kind = np.dtype(str(mapping["array"])[:_TYPE])
        if kind.kind not in "biufUO" or kind.itemsize * np.size(mapping["values"]) > _LARGEST:
            raise ValueError(f"an array of type {kind}")
        return np.array(mapping["values"], dtype=kind)
    return priors.from_description(mapping["prior"]) if mapping.keys() == {"prior"} else mapping
