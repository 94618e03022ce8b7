"""What both estimators share: the network, how it is trained and what it predicts."""
# ruff: noqa: N803 (X is scikit-learn's name)

import copy
import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from sklearn import exceptions
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from bayesbackprop import convergence, likelihoods
from bayesbackprop._errors import (
    Described,
    all_or_nothing,
    check_choice,
    check_count,
    check_not_negative,
    check_positive,
    check_type,
    invalid,
    is_list,
)
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim import Adam
from bayesbackprop.prediction import Predictive
from bayesbackprop.priors import Normal, Prior
from bayesbackprop.sklearn._files import FUNCTIONS, Kept, network
from bayesbackprop.training import Batches, Callback, Run, fit

# The examples of a minibatch, if there are as many: a larger one costs more, and is hardly less noisy than the draws.
_BATCH = 200

# The least of one in a stream, which has but one pass to learn from.
_PART = 32

# The share of the passes of ``fit`` over which the complexity rises to its full weight. At full weight at once it
# switches units off before they have learnt anything, and off they stay.
_WARMUP = 0.8

# The highest learning rate; with n examples it is at most 1 / sqrt(n), so that a step is about as long as the posterior
# is wide. At .03 a fit to 41,000 rows of which some lie far out (protein) diverges.
_RATE = 0.03

# The power of the number of passes over the same data by which the rate of ``partial_fit`` falls where noise is
# predicted for each row, and the steps of a pass where it has fewer. At a constant rate such a noise diverges: on
# diabetes the R2 after 100 passes is -400 (with the fall .55), that of one noise for all rows about .5.
_FALL, _FULL = 0.75, 10

# The temperature where the passes are given. So few leave the posterior too wide: on each of seven data sets, 120 at .6
# gave a lower NLL than at 1 (docs/sklearn.md).
_COLD = 0.6

# A change of the free energy, in nats per example, that is worth more passes.
_MUCH = 0.1

# The steps at full weight without which nobody can say whether the free energy still falls: those of 50 passes that are
# of one step each.
_TELLING = 10

# Networks to average in the predictions on held-out rows: enough to compare passes, and quick.
_VALIDATION_DRAWS = 10

# Rows to predict at a time: of their outputs there are ``draws`` times as many.
_ROWS = 2**12

# The root mean squares of features for which the default prior is made, with room: beyond it there is a warning.
_SMALLEST, _LARGEST = 0.1, 10.0


class ConvergenceWarning(convergence.ConvergenceWarning, exceptions.ConvergenceWarning):  # type: ignore[misc]
    """A run ended before it had converged: what both libraries call so, for either's filters."""


class _Convergence(convergence.Convergence):
    warning = ConvergenceWarning


@dataclass(eq=False, repr=False)  # only for __init__, whose signature is where scikit-learn finds the parameters
class BayesianMLP(Kept, ABC):
    """What both estimators share."""

    # How scikit-learn is to read the targets.
    _reading: ClassVar[Mapping[str, bool]] = {}

    hidden_layer_sizes: int | Sequence[int] = (50,)
    activation: Literal["relu", "tanh", "logistic"] = "relu"
    _: KW_ONLY
    prior: Prior | None = None
    sigma: float = 0.01
    temperature: float | None = None
    batch_size: int | Literal["auto"] = "auto"
    learning_rate_init: float | None = None
    max_iter: int | None = 100
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    warm_start: bool = False
    draws: int = 100
    random_state: Any = None
    verbose: bool = False

    # --- learning ----------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from the rows of ``X`` and their targets ``y``; what was learnt before is forgotten.

        Args:
            X: The rows, dense or sparse.
            y: Their targets.
            sample_weight: How often each row counts, 1 unless given: 2 is as if it were there twice, and 0 as if it
                were not there.
        """
        return self._learn(X, y, sample_weight, streams=False)

    def _start(self, features: int, dtype: torch.dtype, likelihood: Likelihood) -> None:
        """A network that has seen nothing."""
        prior = Normal(1.0) if self.prior is None else self.prior
        described = likelihoods.describe(likelihood)
        self._made: dict[str, Any] = {"activation": self.activation, "likelihood": described, "priors": {"*": prior}}
        sizes = [features, *self._sizes(), self._outputs]
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self.model_: Bayesian = network(sizes, **self._made, dtype=dtype, seed=seed, sigma=self.sigma)
        self._optimiser: Adam | None = None
        self.n_iter_ = self.n_samples_seen_ = self._steps = 0
        self.loss_curve_: list[float] = []

    def _learn(
        self, X: Any, y: Any, weights: Any, streams: bool = True, n: int | None = None, like: Any = None
    ) -> Self:
        """Learn; or go on, in one pass over a part of a stream of ``n`` examples.

        The first targets may not show all classes; ``like`` does. A failure leaves the estimator as it was.
        """
        first = not hasattr(self, "model_") or not (streams or self.warm_start)
        with all_or_nothing(self):
            self._check_parameters()
            dtype = [np.float64, np.float32] if first else self._dtype
            x, y = self._validated(X, y, reset=first, dtype=dtype, accept_sparse="csr", **self._reading)
            x, y, weights = self._weighted(x, y, weights)
            if first:
                _check_scale(self._name, x)
                self._learn_targets(y if like is None else np.asarray(like), weights if like is None else None)
                self._start(x.shape[1], torch.float32 if x.dtype == np.float32 else torch.float64, self._likelihood())
                self._start_noise(x, self._encode(y), weights)
            else:
                self.model_, self._optimiser = copy.deepcopy((self.model_, self._optimiser))
            seen = self.n_samples_seen_ if streams else 0
            n = seen + len(y) if n is None else n
            n = check_count(f"{self._name}.partial_fit", least=len(y), n_samples=n)["n_samples"]
            self._train(x, self._encode(y), weights, streams, n, gone_over=seen + len(y))
            self.n_samples_seen_ = seen + len(y)
        return self

    def _weighted(self, x: Any, y: NDArray[Any], given: Any) -> tuple[Any, NDArray[Any], Tensor | None]:
        """The rows that count, and how much; None where each counts once."""
        weights = None
        if given is not None:
            constraint = "a number, or one for each row; finite, not negative, and not 0 for all rows"
            try:
                weights = _check_sample_weight(given, x, dtype=x.dtype)
            except (OverflowError, TypeError, ValueError) as error:
                got = Described(f"what is not so ({error})")
                raise invalid("sample_weight", f"{self._name}.fit", constraint, got) from error
            if (weights < 0).any() or not (weights > 0).any() or not np.isfinite(weights).all():
                raise invalid("sample_weight", f"{self._name}.fit", constraint, given)
        of_targets = self._target_weights(y)
        if of_targets is not None:
            weights = of_targets.astype(x.dtype) if weights is None else weights * of_targets.astype(x.dtype)
        if weights is None:
            return x, y, None
        counts = weights > 0
        if not counts.any():
            raise invalid(
                "class_weight", self._name, "not 0 for all classes that there are", self.get_params()["class_weight"]
            )
        return x[counts], y[counts], torch.from_numpy(weights[counts])

    def _train(self, x: Any, y: Tensor, weights: Tensor | None, streams: bool, n: int, gone_over: int) -> None:
        seed, held_out = self.model_.seed, None
        if self.early_stopping and not streams:
            rows, others = self._split(y, seed)
            held_out = self._held_out(x[others], y[others], None if weights is None else weights[others])
            x, y, weights, n = x[rows], y[rows], None if weights is None else weights[rows], len(rows)
        auto = max(_PART, len(y) // 50) if streams else min(_BATCH, len(y))
        size = auto if isinstance(self.batch_size, str) else self.batch_size
        steps, before = math.ceil(len(y) / size), self._steps
        epochs = 1 if streams else self.max_iter
        falls = epochs is not None and not streams
        warmup = int(_WARMUP * epochs * steps) if epochs is not None and falls else 0
        settings: dict[str, Any] = {
            "temperature": self._temperature(falls),
            "complexity": self._complexity(),
            "warmup": warmup,
        }
        free_energy = FreeEnergy(self.model_, n, **settings, step=before)

        def order(epoch: int) -> Tensor:
            # A pure function of seed and step, as all noise here, so that a copy goes on as the original would.
            random = torch.Generator().manual_seed(seed + before + epoch * steps + 1)
            return torch.randperm(len(y), generator=random)

        optimiser = self._optimiser or Adam(
            [each for each in self.model_.parameters() if each.requires_grad], fused=True
        )
        for group in optimiser.param_groups:
            group["lr"] = self._rate(n, gone_over)
        scheduler = None
        if epochs is not None and falls:
            # Falling to 0, the learning rate averages the noise of the draws away. A stream has no end to fall to.
            last = epochs * steps
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / last)
        callbacks = self._callbacks(len(y) / n)
        if held_out is not None:
            callbacks.append(_Best(self.n_iter_no_change))
        if epochs is None:
            callbacks.insert(0, _Convergence())
        if self.verbose:
            callbacks.append(_Lines(self.n_iter_))
        history = fit(
            free_energy,
            _batches(x, y, weights, size, order),
            epochs=epochs,
            optimiser=optimiser,
            scheduler=scheduler,
            validation=held_out,
            callbacks=callbacks,
        )
        costs = [record["cost"] for record in history]
        judged = _unfinished(costs[warmup // steps :], len(history) * steps - warmup)
        if falls and held_out is None and judged:
            told = f"The free energy {judged} after {len(history)} passes: a larger max_iter would help."
            warnings.warn(told, ConvergenceWarning, stacklevel=4)
        self._optimiser = optimiser if streams else None  # moments of a rate that fell to 0 are of no use
        self._steps += len(history) * steps
        self.n_iter_ += len(history)
        self.loss_curve_ = self.loss_curve_ + costs
        if held_out is not None:
            self.validation_scores_ = [-record["validation_nll"] for record in history]
            self.best_validation_score_ = max(self.validation_scores_)

    def _temperature(self, falls: bool) -> float:
        """What was chosen, or what is best for as many passes as there are."""
        if self.temperature is not None:
            return float(self.temperature)
        return _COLD if falls else 1.0

    def _rate(self, n: int, gone_over: int) -> float:
        """The first learning rate of a call, by which so many of the ``n`` examples are gone over, each once or more.

        Of new examples it is the one that was given. In pass k over the same ones it is k^(-3/4) of it where noise is
        predicted for each row: its sum has no limit, that of its squares has one (Robbins and Monro, 1951).
        """
        rate = min(_RATE, n**-0.5) if self.learning_rate_init is None else float(self.learning_rate_init)
        if self._made["likelihood"].get("noise") != "per-input":
            return rate
        passes = max(1.0, min(gone_over / n, self._steps / _FULL))
        return rate * math.pow(passes, -_FALL)

    def _split(self, y: Tensor, seed: int) -> Any:
        """The numbers of the rows to learn from, and of those to hold out."""
        return train_test_split(np.arange(len(y)), test_size=self.validation_fraction, random_state=seed % 2**32)

    def _held_out(self, x: Any, y: Tensor, weights: Tensor | None) -> Callable[[], dict[str, float]]:
        """What measures how well some rows are predicted."""
        x = torch.from_numpy(_dense(x))
        counts = torch.ones(len(y)) if weights is None else weights

        def measure() -> dict[str, float]:
            log_prob = self.model_.predict(x, draws=_VALIDATION_DRAWS).log_prob(y)
            each = log_prob.reshape(len(y), -1).sum(1).double()
            return {"validation_nll": -float(each @ counts.double() / counts.double().sum())}

        return measure

    def _complexity(self) -> Literal["closed", "sampled"]:
        """Without the noise of a sample where the prior has a closed form."""
        return "closed" if isinstance(self._made["priors"]["*"], Normal) else "sampled"

    def _callbacks(self, seen: float) -> list[Callback]:  # noqa: ARG002
        """What else happens in training, on this share of all that has been seen."""
        return []

    def _validated(self, X: Any, *y: Any, **reading: Any) -> Any:
        try:
            return validate_data(self, X, *y, order="C", **reading)
        except OverflowError as error:
            raise invalid("X", self._name, "made of numbers that floats can hold", X) from error

    def _check_parameters(self) -> None:
        self._sizes()
        check_count(self._name, draws=self.draws, n_iter_no_change=self.n_iter_no_change)
        if self.max_iter is not None:
            check_count(self._name, max_iter=self.max_iter)
        if not isinstance(self.batch_size, str) or self.batch_size != "auto":
            check_count(self._name, batch_size=self.batch_size)
        check_positive(self._name, sigma=self.sigma)
        if self.learning_rate_init is not None:
            check_positive(self._name, learning_rate_init=self.learning_rate_init)
        if self.temperature is not None:
            check_not_negative(self._name, temperature=self.temperature)
        fraction = check_positive(self._name, validation_fraction=self.validation_fraction)["validation_fraction"]
        if fraction >= 1:
            raise invalid("validation_fraction", self._name, "a float in (0, 1)", fraction)
        for name in ("early_stopping", "warm_start"):
            check_type(self._name, bool | np.bool_, "True or False", **{name: getattr(self, name)})
        check_choice(self._name, list(FUNCTIONS), activation=self.activation)
        check_type(self._name, Prior | None, "None or a Prior, such as Normal(1.0)", prior=self.prior)
        if not isinstance(self.verbose, bool | np.bool_):
            check_count(self._name, least=0, verbose=self.verbose)
        self._check_random_state(self._name, self.random_state)

    @staticmethod
    def _check_random_state(owner: str, random: Any) -> None:
        if not isinstance(random, np.random.RandomState | None):
            check_count(owner, least=0, below=2**32, random_state=random)

    def _sizes(self) -> list[int]:
        """The units of each hidden layer."""
        given: Any = self.hidden_layer_sizes
        units = given if is_list(given) else [given]
        return [check_count(self._name, hidden_layer_sizes=each)["hidden_layer_sizes"] for each in units]

    @property
    def _dtype(self) -> np.dtype[Any]:
        return next(self.model_.parameters()).detach().numpy().dtype

    @abstractmethod
    def _learn_targets(self, y: NDArray[Any], weights: Tensor | None) -> None:
        """Find out what must be known of the targets before the first step."""

    @abstractmethod
    def _likelihood(self) -> Likelihood:
        """P(y|x,w) of the targets that were learnt."""

    @abstractmethod
    def _encode(self, y: NDArray[Any]) -> Tensor:
        """Targets as the likelihood takes them."""

    def _target_weights(self, y: NDArray[Any]) -> NDArray[Any] | None:  # noqa: ARG002
        """What each row counts by its target; None where it makes no difference."""
        return None

    def _start_noise(self, x: Any, y: Tensor, weights: Tensor | None) -> None:
        """Give the noise of the targets its first value."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # --- predicting --------------------------------------------------------------------------------------------------

    @abstractmethod
    def predictive(self, X: Any) -> Predictive:
        """The predictive distribution itself: ``aleatoric``, ``epistemic``, ``entropy``, ``log_prob`` and more."""

    @abstractmethod
    def as_tensor(self, y: Any) -> Tensor:
        """Targets as :meth:`predictive` takes them: ``model.predictive(X).log_prob(model.as_tensor(y))``."""

    def _predictions(self, X: Any, rows: int | None = _ROWS) -> Iterator[Any]:
        """The predictive distributions of so many rows at a time, or (None) of all at once."""
        check_is_fitted(self)
        check_count(self._name, draws=self.draws)
        x = self._validated(X, reset=False, dtype=self._dtype, accept_sparse="csr")
        rows = rows or x.shape[0]
        for first in range(0, x.shape[0], rows):
            block = torch.from_numpy(_dense(x[first : first + rows]))
            # Not the quickest way, which has draws of its own for each place in a batch.
            yield self.model_.predict(block, draws=self.draws, estimator="shared")


# --- rows ------------------------------------------------------------------------------------------------------------


def _dense(x: Any) -> NDArray[Any]:
    """Rows as torch takes them: dense, in order, and writable."""
    made = x.toarray() if scipy.sparse.issparse(x) else x
    return np.require(made, requirements=["C", "W"])


def _batches(x: Any, y: Tensor, weights: Tensor | None, size: int, order: Callable[[int], Tensor]) -> Any:
    """Minibatches of rows; those of a sparse matrix are made dense one by one."""
    if not scipy.sparse.issparse(x):
        return Batches(torch.from_numpy(_dense(x)), y, size, order=order, weights=weights)
    return _SparseBatches(x, Batches(torch.arange(len(y)), y, size, order=order, weights=weights))


class _SparseBatches:
    """The minibatches of a sparse matrix, by those of the numbers of its rows."""

    def __init__(self, x: Any, numbers: Batches) -> None:
        self._x, self._numbers, self.set_epoch = x, numbers, numbers.set_epoch

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for rows, *others in self._numbers:
            yield torch.from_numpy(_dense(self._x[rows.numpy()])), *others


def _check_scale(owner: str, x: Any) -> None:
    """Warn where the features are far from the size that prior and learning rate are made for."""
    with np.errstate(over="ignore"):
        squares = x.multiply(x) if scipy.sparse.issparse(x) else np.square(x, dtype=np.float64)
    sizes = np.sqrt(np.asarray(squares.mean(axis=0)).ravel())
    largest = float(sizes.max(initial=0.0))
    if largest == math.inf:
        raise invalid("X", owner, "made of numbers whose squares floats can hold", Described("larger ones"))
    if largest > _LARGEST or 0 < largest < _SMALLEST:
        told = (
            f"The root mean square of a feature is {largest:.3g}, but prior and learning rate are made for about 1. "
            "Scale the inputs first, with sklearn.preprocessing.StandardScaler, say."
        )
        warnings.warn(told, UserWarning, stacklevel=4)


# --- what happens in training ----------------------------------------------------------------------------------------


def _unfinished(costs: Sequence[float], steps: int) -> str:
    """What keeps the costs of some passes, of so many steps in all, from being the last word; "" where nothing does.

    The second half is lower than the first, by more than chance and than anyone would mind; or there are too few.
    """
    half = len(costs) // 2
    if half < 2 or steps < _TELLING:
        return "may still be falling"
    before, last = np.array(costs[:half]), np.array(costs[half:])
    error = math.sqrt(before.var(ddof=1) / len(before) + last.var(ddof=1) / len(last))
    return "was still falling" if before.mean() - last.mean() > max(2 * error, _MUCH) else ""


class _Best(Callback):
    """Ends a run after ``patience`` passes that predict the held-out rows no better, and returns to the best pass."""

    def __init__(self, patience: int) -> None:
        self._patience, self._best, self._pass = patience, math.inf, 0
        self._state: dict[str, Any] = {}

    def on_epoch(self, run: Run) -> None:
        value = run.history[-1]["validation_nll"]
        if value < self._best:
            self._best, self._pass = value, run.epoch
            self._state = copy.deepcopy(run.objective.state_dict())
        elif run.epoch - self._pass >= self._patience:
            run.stop()

    def on_end(self, run: Run) -> None:
        if run.complete and self._state:
            run.objective.load_state_dict(self._state)


class _Lines(Callback):
    """Prints the cost, after ``passes`` before: on a terminal in one line, elsewhere in some twenty."""

    def __init__(self, passes: int) -> None:
        self._passes, self._next, self._last = passes, 1, 0
        self._rewrites = sys.stdout.isatty()

    def on_epoch(self, run: Run) -> None:
        if self._rewrites or run.epoch >= self._next:
            self._next = math.ceil(1.4 * run.epoch)
            self._print(run, end="" if self._rewrites else "\n")

    def on_end(self, run: Run) -> None:
        if self._rewrites:
            print()
        elif run.epoch != self._last:
            self._print(run)

    def _print(self, run: Run, end: str = "\n") -> None:
        self._last, start = run.epoch, "\r" if self._rewrites else ""
        print(
            f"{start}Iteration {self._passes + run.epoch}, cost = {run.history[-1]['cost']:.6g} nats per example",
            end=end,
        )
