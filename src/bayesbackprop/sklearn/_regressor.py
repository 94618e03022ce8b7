"""The regressor."""
# ruff: noqa: N803 (X is scikit-learn's name)

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.linear_model import Ridge
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, distributions

from bayesbackprop._errors import Described, check_count, check_flag, check_positive, invalid
from bayesbackprop.likelihoods import Gaussian, Likelihood
from bayesbackprop.prediction import ValuePredictive
from bayesbackprop.sklearn._estimator import BayesianMLP
from bayesbackprop.training import Callback, Run

# The least noise that a fit begins with, in standard deviations of the targets, however well a line fits them.
_LEAST = 0.1

# A factor on the first weights of the outputs that say the noise: the same for all rows until there is a reason.
_QUIET = 0.1

# The least factor by which the noise falls in a pass.
_SMALL = 0.1

# The least share of a part of a stream in the noise: what came long ago was predicted by another network.
_SHARE = 0.1


@dataclass(eq=False, repr=False)
class BayesianMLPRegressor(MultiOutputMixin, RegressorMixin, BayesianMLP):  # type: ignore[misc]
    """A fully connected Bayesian network that predicts one number or several.

    Targets are standardised within, so that their scale does not matter; of a stream, by the first call. Inputs are
    not: scale them as for :class:`BayesianMLPClassifier`, which explains the other parameters.

    Args:
        noise: ``"per-input"`` for a standard deviation of the noise that the network predicts for each row;
            ``"learnt"`` for one that is the same for all rows, relative to the scale of each target; or a number in
            the units of the targets.
        **parameters: Those of :class:`BayesianMLPClassifier`.

    Attributes:
        model_: The :class:`~bayesbackprop.Bayesian` network, of standardised targets ``[n, targets]``. It takes tensors
            of its own type: float64, or float32 where it was fitted to that.
        target_mean_: The mean of each target. A mean that ``model_`` predicts is mean * ``target_scale_`` +
            ``target_mean_`` in units of the targets.
        target_scale_: The scale of each target. A standard deviation of ``model_`` is std * ``target_scale_`` in them.

    Examples:
        >>> X, y = [[-1.0], [-0.5], [0.5], [1.0]] * 5, [-100.0, -50.0, 50.0, 100.0] * 5
        >>> model = BayesianMLPRegressor(noise=10.0, max_iter=300, random_state=0).fit(X, y)
        >>> mean, std = model.predict([[0.0], [9.0]], return_std=True)
        >>> bool(std[1] > std[0])
        True
    """

    _learnt = (*BayesianMLP._learnt, "_mean", "_scale", "_one_dimension")
    _reading: ClassVar[Mapping[str, bool]] = {"multi_output": True, "y_numeric": True}

    noise: float | Literal["learnt", "per-input"] = field(default="per-input", kw_only=True)

    def partial_fit(self, X: Any, y: Any, n_samples: int | None = None, sample_weight: Any = None) -> Self:
        """Go on learning, as :meth:`BayesianMLPClassifier.partial_fit`.

        The targets of the first call set the scale of all: give it some tens of examples. With noise per input the
        learning rate falls in repeated passes over the same data, where ``n_samples_seen_`` is more than ``n_samples``.
        """
        return self._learn(X, y, sample_weight, n=n_samples)

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

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> NDArray[Any]:
        """Targets drawn from the predictive distribution, along a new last axis, as Gaussian processes give them.

        Each is of one drawn network, the same for all rows, and its noise.

        Args:
            X: The rows.
            n_samples: How many for each row.
            random_state: None, an int or a ``numpy.random.RandomState``.
        """
        count = check_count(f"{self._name}.sample_y", n_samples=n_samples)["n_samples"]
        self._check_random_state(f"{self._name}.sample_y", random_state)
        prediction = self.predictive(X)
        seed = int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
        drawn = prediction.sample(count, torch.Generator().manual_seed(seed))
        return np.moveaxis(drawn.numpy(), 0, -1)

    def predictive(self, X: Any) -> ValuePredictive:
        (prediction,) = self._predictions(X, rows=None)
        mean = torch.from_numpy(self._in_units(prediction.components.mean))
        deviation = torch.from_numpy(self._in_units(prediction.components.stddev, shift=0.0))
        return ValuePredictive(distributions.Normal(mean, deviation), prediction.draws)

    def as_tensor(self, y: Any) -> Tensor:
        check_is_fitted(self)
        values = check_array(y, ensure_2d=False, dtype=np.float64)
        self._encode(values)  # which refuses other shapes
        return torch.tensor(values)

    @property
    def target_mean_(self) -> NDArray[Any]:
        """The mean of each target: that of ``y`` is ``model_``'s * ``target_scale_`` + ``target_mean_``."""
        return self._mean

    @property
    def target_scale_(self) -> NDArray[Any]:
        """What one unit of ``model_`` is in units of each target: the standard deviation they were fitted to."""
        return self._scale

    def _in_units(self, values: Tensor, shift: float | None = None) -> NDArray[Any]:
        """In units and shape of the targets; their mean is added unless there is another shift."""
        result = values.double().numpy() * self._scale + (self._mean if shift is None else shift)
        return cast(NDArray[Any], result[..., 0] if self._one_dimension else result)

    def _learn_targets(self, y: NDArray[Any], weights: Tensor | None) -> None:
        self._one_dimension = y.ndim == 1
        y = y.reshape(len(y), -1).astype(np.float64)
        counts = None if weights is None else weights.double().numpy()
        self._mean = np.average(y, axis=0, weights=counts)
        away = np.abs(y - self._mean)
        largest = np.where(np.ptp(y, axis=0) > 0, away.max(0), 0.0)  # a constant is not always its own mean
        unit = np.where(largest > 0, largest, 1.0)  # squared in it, neither 1e200 nor 1e-200 leaves the range of floats
        scale = largest * np.sqrt(np.average(np.square(away / unit), axis=0, weights=counts))
        if not isinstance(self.noise, str):
            check_positive(self._name, noise=self.noise)
            scale = np.full_like(scale, scale.max())  # one noise for all targets, so one scale
        self._scale = np.where(scale > 0, scale, 1.0)

    def _likelihood(self) -> Likelihood:
        return Gaussian(self.noise if isinstance(self.noise, str) else float(self.noise) / float(self._scale[0]))

    def _start_noise(self, x: Any, y: Tensor, weights: Tensor | None) -> None:
        """Begin with what a line leaves: from 1 it would take long to come down, and the means learn little before."""
        if not isinstance(self.noise, str):
            return
        counts = np.ones(len(y)) if weights is None else weights.numpy()
        line = Ridge(1.0).fit(x, y.numpy(), counts)
        squares = np.square(y.numpy() - line.predict(x).reshape(y.shape))
        left = np.sqrt(np.average(squares, axis=0, weights=counts)).clip(_LEAST, 1.0)
        likelihood, last = cast(Gaussian, self.model_.likelihood), cast(Any, self.model_.net)[-1]
        with torch.no_grad():
            if likelihood.log_noise is not None:
                likelihood.log_noise.fill_(math.log(float(np.sqrt(np.square(left).mean()))))
            else:
                last.weight[len(left) :] *= _QUIET
                last.bias[len(left) :] = torch.from_numpy(np.log(np.expm1(left)))  # of which it is the softplus

    def _callbacks(self, seen: float) -> list[Callback]:
        return [_Noise(seen)] if self._made["likelihood"]["noise"] == "learnt" else []

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


class _Noise(Callback):
    """Sets a learnt noise after each pass to what minimises the free energy: the root mean square of the residuals.

    The likelihood cost of an example with D targets is sum r^2 / (2 s^2) + D (log s + log(2 pi) / 2), so it says the
    residuals r under the noise s.

    Args:
        seen: The share of this part of a stream in all that has been seen; 1 in ``fit``.
    """

    def __init__(self, seen: float) -> None:
        self._share = max(seen, _SHARE)

    def on_epoch(self, run: Run) -> None:
        model: Any = run.objective.model
        likelihood, targets = model.likelihood, model.net[-1].out_features
        log_noise = float(likelihood.log_noise)
        cost = run.history[-1]["likelihood"] / targets - log_noise - 0.5 * math.log(2 * math.pi)
        found = self._share * 2 * max(cost, 0.0) + 1 - self._share  # of the squares, in units of the noise so far
        with torch.no_grad():
            likelihood.log_noise.fill_(log_noise + 0.5 * math.log(max(found, _SMALL**2)))
