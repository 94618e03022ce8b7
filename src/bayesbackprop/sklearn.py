"""scikit-learn estimators: a fully connected Bayesian network for pipelines, grid searches and cross-validation.

A prediction averages the same ``draws`` networks for every row. So what is said of a row depends neither on the rows
beside it nor on how often it is asked for.
"""
# ruff: noqa: N803 (X is scikit-learn's name)

import copy
import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, distributions, nn

from bayesbackprop import likelihoods, priors
from bayesbackprop._errors import (
    Described,
    all_or_nothing,
    check_choice,
    check_count,
    check_finite,
    check_flag,
    check_list,
    check_not_negative,
    check_positive,
    check_type,
    invalid,
    is_list,
)
from bayesbackprop._files import MISUNDERSTANDINGS, check_counter, check_same, read, write
from bayesbackprop._networks import drawn_from, mlp
from bayesbackprop.likelihoods import Categorical, Gaussian, Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.prediction import ClassPredictive, Predictive, ValuePredictive
from bayesbackprop.priors import Normal, Prior
from bayesbackprop.training import Batches, Callback, Run, fit

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    needs = 'bayesbackprop.sklearn needs scikit-learn 1.6 or newer: pip install "bayesbackprop[sklearn]"'
    raise ImportError(needs) from error

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor"]

_TYPES = (torch.float32, torch.float64)
_FUNCTIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid}

# The share of the steps of ``fit`` over which the complexity rises to its full weight. At full weight from the start it
# switches units off before they have learnt anything, and off they stay.
_WARMUP = 0.8

# The name of a type of numpy, in characters, and the largest array beside the tensors of a file, in bytes.
_TYPE, _LARGEST = 20, 2**26

# The name of the checksum in a pickle.
_CHECKSUM = "_sha256"

# Rows to predict at a time: of their outputs there are ``draws`` times as many.
_ROWS = 2**12


class _Lines(Callback):
    """Prints the cost of each pass, after ``passes`` before."""

    def __init__(self, passes: int) -> None:
        self._passes = passes

    def on_epoch(self, run: Run) -> None:
        cost = run.history[-1]["cost"]
        print(f"Iteration {self._passes + run.epoch}, cost = {cost:.6g} nats per example")


@dataclass(eq=False, repr=False)  # only for __init__, whose signature is where scikit-learn finds the parameters
class _BayesianMLP(BaseEstimator, ABC):  # type: ignore[misc]
    """What both estimators share: the network, its training and its file."""

    # What a fitted estimator holds besides its model, and how scikit-learn is to read the targets.
    _learnt: ClassVar[Any] = ("n_features_in_", "n_iter_", "n_samples_seen_", "loss_curve_", "_steps", "_made")
    _reading: ClassVar[Mapping[str, bool]] = {}

    hidden_layer_sizes: int | Sequence[int] = (50,)
    activation: Literal["relu", "tanh", "logistic"] = "relu"
    _: KW_ONLY
    prior: Prior | None = None
    sigma: float = 0.01
    temperature: float = 1.0
    batch_size: int | Literal["auto"] = "auto"
    learning_rate_init: float = 0.01
    max_iter: int = 500
    draws: int = 100
    random_state: Any = None
    verbose: bool = False

    # --- learning ----------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from the rows of ``X`` and their targets ``y``; what was learnt before is forgotten."""
        return self._learn(X, y, epochs=self.max_iter)

    def _start(self, x: Tensor, likelihood: Likelihood) -> None:
        """A network that has seen nothing."""
        prior = Normal(1.0) if self.prior is None else self.prior
        described = likelihoods.describe(likelihood)
        self._made: dict[str, Any] = {"activation": self.activation, "likelihood": described, "priors": {"*": prior}}
        sizes = [x.shape[1], *self._sizes(), self._outputs]
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self.model_: Bayesian = _network(sizes, **self._made, dtype=x.dtype, seed=seed, sigma=self.sigma)
        self._optimiser: torch.optim.Adam | None = None
        self.n_iter_ = self.n_samples_seen_ = self._steps = 0
        self.loss_curve_: list[float] = []

    def _learn(self, X: Any, y: Any, epochs: int | None = None, n: int | None = None, like: Any = None) -> Self:
        """Learn anew in so many passes; or (None) go on, in one pass over a part of a stream of ``n`` examples.

        The first targets may not show all classes; ``like`` does. A failure leaves the estimator as it was.
        """
        first = epochs is not None or not hasattr(self, "model_")
        with all_or_nothing(self):
            self._check_parameters()
            dtype = [np.float64, np.float32] if first else self._dtype
            rows, y = self._validated(X, y, reset=first, dtype=dtype, **self._reading)
            x = torch.tensor(rows)
            if first:
                self._start(x, self._learn_targets(y if like is None else np.asarray(like)))
            else:
                self.model_, self._optimiser = copy.deepcopy((self.model_, self._optimiser))
            n = self.n_samples_seen_ + len(x) if n is None else n
            n = check_count(f"{self._name}.partial_fit", least=len(x), n_samples=n)["n_samples"]
            self._train(x, self._encode(y), epochs, n)
        return self

    def _train(self, x: Tensor, y: Tensor, epochs: int | None, n: int) -> None:
        size = max(32, len(x) // 50) if isinstance(self.batch_size, str) else self.batch_size
        steps, before, seed = math.ceil(len(x) / size), self._steps, self.model_.seed
        warmup = 0 if epochs is None else int(_WARMUP * epochs * steps)
        free_energy = FreeEnergy(self.model_, n, temperature=self.temperature, warmup=warmup, step=before)

        def order(epoch: int) -> Tensor:
            # A pure function of seed and step, as all noise here, so that a copy goes on as the original would.
            random = torch.Generator().manual_seed(seed + before + epoch * steps + 1)
            return torch.randperm(len(x), generator=random)

        optimiser = self._optimiser or torch.optim.Adam(self.model_.parameters(), fused=True)
        for group in optimiser.param_groups:
            group["lr"] = float(self.learning_rate_init)
        scheduler = None
        if epochs is not None:
            # Falling to 0, the learning rate averages the noise of the draws away. A stream has no end to fall to.
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step // steps / epochs)
        batches = Batches(x, y, size, order=order)
        lines = [_Lines(self.n_iter_)] if self.verbose else []
        history = fit(
            free_energy, batches, epochs=epochs or 1, optimiser=optimiser, scheduler=scheduler, callbacks=lines
        )
        self._optimiser = optimiser if epochs is None else None  # moments of a rate that fell to 0 are of no use
        self._steps += len(history) * steps
        self.n_iter_ += len(history)
        self.n_samples_seen_ += len(x)
        self.loss_curve_ += [record["cost"] for record in history]  # in place, so last: nothing can go wrong any more

    def _validated(self, X: Any, *y: Any, **reading: Any) -> Any:
        try:
            return validate_data(self, X, *y, order="C", **reading)
        except OverflowError as error:
            raise invalid("X", self._name, "made of numbers that floats can hold", X) from error

    def _check_parameters(self) -> None:
        self._sizes()
        check_count(self._name, max_iter=self.max_iter, draws=self.draws)
        if not isinstance(self.batch_size, str) or self.batch_size != "auto":
            check_count(self._name, batch_size=self.batch_size)
        check_positive(self._name, sigma=self.sigma, learning_rate_init=self.learning_rate_init)
        check_not_negative(self._name, temperature=self.temperature)
        check_choice(self._name, list(_FUNCTIONS), activation=self.activation)
        check_type(self._name, Prior | None, "None or a Prior, such as Normal(1.0)", prior=self.prior)
        if not isinstance(self.verbose, bool | np.bool_):
            check_count(self._name, least=0, verbose=self.verbose)
        random = self.random_state
        if not isinstance(random, np.random.RandomState | None):
            check_count(self._name, least=0, below=2**32, random_state=random)

    def _sizes(self) -> list[int]:
        """The units of each hidden layer."""
        given: Any = self.hidden_layer_sizes
        units = given if is_list(given) else [given]
        return [check_count(self._name, hidden_layer_sizes=each)["hidden_layer_sizes"] for each in units]

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _dtype(self) -> np.dtype[Any]:
        return next(self.model_.parameters()).detach().numpy().dtype

    @abstractmethod
    def _learn_targets(self, y: NDArray[Any]) -> Likelihood:
        """Find out what must be known of the targets before the first step, and so P(y|x,w)."""

    @abstractmethod
    def _encode(self, y: NDArray[Any]) -> Tensor:
        """Targets as the likelihood takes them."""

    @property
    @abstractmethod
    def _outputs(self) -> int:
        """How many the network has."""

    # --- predicting --------------------------------------------------------------------------------------------------

    @abstractmethod
    def predictive(self, X: Any) -> Predictive:
        """The predictive distribution itself: ``aleatoric``, ``epistemic``, ``entropy``, ``log_prob`` and more."""

    def _predictions(self, X: Any, rows: int | None = _ROWS) -> Iterator[Any]:
        """The predictive distributions of so many rows at a time, or (None) of all at once."""
        check_is_fitted(self)
        check_count(self._name, draws=self.draws)
        x = torch.tensor(self._validated(X, reset=False, dtype=self._dtype))
        for block in x.split(rows or len(x)):
            # Not the quickest way, which has draws of its own for each place in a batch.
            yield self.model_.predict(block, draws=self.draws, estimator="shared")

    # --- files and pickles -------------------------------------------------------------------------------------------

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
        with file.understanding():
            if file.contents["estimator"] != cls.__name__:
                raise ValueError(f"the file of a {file.contents['estimator']}")
            estimator, state = cls(), json.loads(json.dumps(file.contents["state"]), object_hook=_rich)
            if isinstance(state["hidden_layer_sizes"], list):
                state["hidden_layer_sizes"] = tuple(state["hidden_layer_sizes"])
            names = {*estimator.get_params(deep=False), *cls._learnt, *({"feature_names_in_"} & state.keys())}
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
            if not isinstance(state, dict) or not state.keys() >= set(self._get_param_names()):
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
        return {*self._get_param_names(), *self._learnt, "feature_names_in_", "model_"}

    def _tensors(self) -> dict[str, Tensor]:
        """The model and, in the midst of a stream, the moments of Adam."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model_.state_dict().items()}
        if self._optimiser is not None:
            for name, parameter in self.model_.named_parameters():
                tensors |= {f"adam.{key}.{name}": value for key, value in self._optimiser.state[parameter].items()}
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
        self.model_ = _network(sizes, **self._made, dtype=first.dtype, seed=int(tensors["model._seed"]))
        self._optimiser = None
        if any(name.startswith("adam.") for name in tensors):
            self._optimiser = torch.optim.Adam(self.model_.parameters(), fused=True)
            for parameter in self.model_.parameters():
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
        check_finite("loss_curve_", self._name, torch.tensor(self.loss_curve_, dtype=torch.float64))
        names = getattr(self, "feature_names_in_", None)
        if names is not None and np.shape(names) != (self.n_features_in_,):
            raise ValueError(f"{np.shape(names)} names for {self.n_features_in_} features")


@dataclass(eq=False, repr=False)
class BayesianMLPClassifier(ClassifierMixin, _BayesianMLP):  # type: ignore[misc]
    """A fully connected Bayesian network that names classes.

    Scale the inputs to a standard deviation of about 1, which is what prior and learning rate are made for:
    ``make_pipeline(StandardScaler(), BayesianMLPClassifier())``. Inputs of type float32 are learnt in float32, all
    others in float64.

    Args:
        hidden_layer_sizes: Units of each hidden layer; ``()`` for a linear model.
        activation: ``"relu"``, ``"tanh"`` or ``"logistic"``.
        prior: P(w); None for ``Normal(1.0)``.
        sigma: The standard deviation with which each weight starts.
        temperature: A factor on the complexity. 1 is Bayes; below 1 the posterior is "cold".
        batch_size: Examples of a minibatch; ``"auto"`` for a fiftieth of them all, but at least 32.
        learning_rate_init: Of Adam, at the start; in ``fit`` it falls linearly to 0.
        max_iter: Passes over the data in ``fit``. Over four fifths of them the complexity rises to its full weight.
        draws: Networks to average in a prediction. It can be changed after ``fit``.
        random_state: None, an int or a ``numpy.random.RandomState``. An int makes every ``fit`` the same.
        verbose: Print the cost of each pass.

    Attributes:
        classes_: The classes, sorted.
        model_: The :class:`~bayesbackprop.Bayesian` network.
        loss_curve_: The cost of each pass in nats per example; with the complexity at full weight, the free energy.
        n_iter_: Passes so far.
        n_samples_seen_: Examples so far, each counted once in ``fit`` and each time in ``partial_fit``.

    Examples:
        >>> X, y = [[-1.0], [-0.8], [0.9], [1.0]] * 5, ["no", "no", "yes", "yes"] * 5
        >>> BayesianMLPClassifier(random_state=0).fit(X, y).predict([[-2.0], [2.0]])
        array(['no', 'yes'], dtype='<U3')
    """

    _learnt = (*_BayesianMLP._learnt, "classes_")

    def partial_fit(self, X: Any, y: Any, classes: Any = None, n_samples: int | None = None) -> Self:
        """Go on learning: one pass over some more examples of a stream, at a constant learning rate.

        Args:
            X: The rows.
            y: Their classes.
            classes: All classes there can be; needed at the first call.
            n_samples: The size of the whole data set, which sets the scale of the complexity. None, for all examples
                so far, is right where each comes once: the posterior is then that of what has been seen. Who goes over
                the same data again must say how many there are, or each pass counts as new evidence.
        """
        known, owner = getattr(self, "classes_", None), f"{self._name}.partial_fit"
        if classes is not None:
            check_list(owner, classes=classes)
        if known is None and (classes is None or len(classes) == 0):
            raise invalid("classes", owner, "given at the first call, where some may have no example yet", classes)
        if known is not None and classes is not None and not np.array_equal(known, np.unique(classes)):
            raise invalid("classes", owner, f"left out or those of the first call, {known.tolist()}", classes)
        return self._learn(X, y, n=n_samples, like=classes)

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each row."""
        probabilities = self.predict_proba(X)  # which refuses an estimator that is not fitted
        return cast(NDArray[Any], self.classes_[probabilities.argmax(1)])

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """The probabilities of ``classes_``, averaged over the draws."""
        return torch.cat([prediction.mean for prediction in self._predictions(X)]).numpy()

    def predictive(self, X: Any) -> ClassPredictive:
        (prediction,) = self._predictions(X, rows=None)
        return cast(ClassPredictive, prediction)

    def _learn_targets(self, y: NDArray[Any]) -> Likelihood:
        check_classification_targets(y)
        self.classes_: NDArray[Any] = np.unique(y)
        return Categorical()

    def _check_learnt(self) -> None:
        super()._check_learnt()
        if self.classes_.ndim != 1 or len(np.unique(self.classes_)) != len(self.classes_):
            raise ValueError(f"classes {self.classes_!r:.200}")

    def _encode(self, y: NDArray[Any]) -> Tensor:
        if not (known := np.isin(y, self.classes_)).all():
            raise invalid("y", self._name, f"of the classes {self.classes_.tolist()}", y[~known].tolist())
        return torch.from_numpy(np.searchsorted(self.classes_, y))

    @property
    def _outputs(self) -> int:
        return len(self.classes_)


@dataclass(eq=False, repr=False)
class BayesianMLPRegressor(MultiOutputMixin, RegressorMixin, _BayesianMLP):  # type: ignore[misc]
    """A fully connected Bayesian network that predicts one number or several.

    Targets are standardised within, so that their scale does not matter; of a stream, by the first call. Inputs are
    not: scale them as for :class:`BayesianMLPClassifier`, which explains the other parameters.

    Args:
        noise: The standard deviation of the noise of the targets, in their units; ``"learnt"`` for one that is learnt,
            relative to the scale of each target; ``"per-input"`` for one that the network predicts for each row.
        **parameters: Those of :class:`BayesianMLPClassifier`.

    Attributes:
        model_: The :class:`~bayesbackprop.Bayesian` network, of standardised targets.

    Examples:
        >>> X, y = [[-1.0], [-0.5], [0.5], [1.0]] * 5, [-100.0, -50.0, 50.0, 100.0] * 5
        >>> model = BayesianMLPRegressor(random_state=0).fit(X, y)
        >>> mean, std = model.predict([[0.0], [9.0]], return_std=True)
        >>> bool(std[1] > std[0])
        True
    """

    _learnt = (*_BayesianMLP._learnt, "_mean", "_scale", "_one_dimension")
    _reading: ClassVar[Mapping[str, bool]] = {"multi_output": True, "y_numeric": True}

    noise: float | Literal["learnt", "per-input"] = field(default="learnt", kw_only=True)

    def partial_fit(self, X: Any, y: Any, n_samples: int | None = None) -> Self:
        """Go on learning, as :meth:`BayesianMLPClassifier.partial_fit`.

        The targets of the first call set the scale of all: give it some tens of examples.
        """
        return self._learn(X, y, n=n_samples)

    def predict(self, X: Any, return_std: bool = False, quantiles: Sequence[float] | None = None) -> Any:
        """The mean of each row's predictive distribution, in the shape of the targets.

        Args:
            X: The rows.
            return_std: Return (mean, standard deviation) instead: of the targets, so of noise and weights together.
            quantiles: Return the quantiles of the targets at these levels instead, stacked along a new first axis.
        """
        check_flag(f"{self._name}.predict", return_std=return_std)
        if return_std and quantiles is not None:
            raise invalid("quantiles", f"{self._name}.predict", "None where return_std is set", quantiles)
        blocks = self._predictions(X)
        if quantiles is not None:
            levels: Any = [quantiles] if isinstance(quantiles, Real) else np.asarray(quantiles).tolist()
            return self._in_units(torch.cat([block.quantiles(levels) for block in blocks], dim=1))
        if not return_std:
            return self._in_units(torch.cat([block.mean for block in blocks]))
        means, deviations = zip(*((block.mean, block.stddev) for block in blocks), strict=True)
        return self._in_units(torch.cat(means)), self._in_units(torch.cat(deviations), shift=0.0)

    def predictive(self, X: Any) -> ValuePredictive:
        (prediction,) = self._predictions(X, rows=None)
        mean = torch.from_numpy(self._in_units(prediction.components.mean))
        deviation = torch.from_numpy(self._in_units(prediction.components.stddev, shift=0.0))
        return ValuePredictive(distributions.Normal(mean, deviation), prediction.draws)

    def _in_units(self, values: Tensor, shift: float | None = None) -> NDArray[Any]:
        """In units and shape of the targets; their mean is added unless there is another shift."""
        result = values.double().numpy() * self._scale + (self._mean if shift is None else shift)
        return cast(NDArray[Any], result[..., 0] if self._one_dimension else result)

    def _learn_targets(self, y: NDArray[Any]) -> Likelihood:
        self._one_dimension = y.ndim == 1
        y = y.reshape(len(y), -1).astype(np.float64)
        self._mean = y.mean(0)
        away = np.abs(y - self._mean)
        largest = np.where(np.ptp(y, axis=0) > 0, away.max(0), 0.0)  # a constant is not always its own mean
        unit = np.where(largest > 0, largest, 1.0)  # squared in it, neither 1e200 nor 1e-200 leaves the range of floats
        scale = largest * np.sqrt(np.square(away / unit).mean(0))
        if not isinstance(self.noise, str):
            noise = check_positive(self._name, noise=self.noise)["noise"]
            scale = np.full_like(scale, scale.max())  # one noise for all targets, so one scale
        self._scale = np.where(scale > 0, scale, 1.0)
        return Gaussian(self.noise if isinstance(self.noise, str) else noise / float(self._scale[0]))

    def _check_learnt(self) -> None:
        super()._check_learnt()
        shapes = {self._mean.shape, self._scale.shape, (len(self._scale),)}
        finite = np.isfinite([self._mean, self._scale]).all() and (self._scale > 0).all()
        if len(shapes) > 1 or not finite or type(self._one_dimension) is not bool:
            raise ValueError(f"targets of mean {self._mean!r:.80} and scale {self._scale!r:.80}")
        if self._one_dimension and len(self._scale) != 1:
            raise ValueError(f"{len(self._scale)} targets of one dimension")

    def _encode(self, y: NDArray[Any]) -> Tensor:
        if (y.ndim == 1) is not self._one_dimension or y.reshape(len(y), -1).shape[1] != len(self._scale):
            expected = "[n]" if self._one_dimension else f"[n, {len(self._scale)}]"
            raise invalid("y", self._name, f"of shape {expected}, as at first", Described(f"shape {list(y.shape)}"))
        standard = (y.reshape(len(y), -1) - self._mean) / self._scale
        return torch.tensor(standard.astype(self._dtype))

    @property
    def _outputs(self) -> int:
        return len(self._scale) * (2 if self._made["likelihood"]["noise"] == "per-input" else 1)


def _network(
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
    net = mlp(sizes, _FUNCTIONS[activation], linear=drawn_from(random, dtype))
    made = likelihoods.from_description(likelihood)
    if made is None:
        raise ValueError("a likelihood that is not the library's")
    return Bayesian(net, made.to(dtype), priors, sigma=sigma, seed=seed)


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
