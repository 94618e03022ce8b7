"""The classifier."""
# ruff: noqa: N803 (X is scikit-learn's name)

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor

from bayesbackprop._errors import check_list, invalid
from bayesbackprop.likelihoods import Categorical, Likelihood
from bayesbackprop.prediction import ClassPredictive
from bayesbackprop.sklearn._estimator import BayesianMLP


@dataclass(eq=False, repr=False)
class BayesianMLPClassifier(ClassifierMixin, BayesianMLP):  # type: ignore[misc]
    """A fully connected Bayesian network that names classes.

    Scale the inputs to a standard deviation of about 1, which is what prior and learning rate are made for:
    ``make_pipeline(StandardScaler(), BayesianMLPClassifier())``. Inputs of type float32 are learnt in float32, all
    others in float64.

    Args:
        hidden_layer_sizes: Units of each hidden layer; ``()`` for a linear model.
        activation: ``"relu"``, ``"tanh"`` or ``"logistic"``.
        prior: P(w); None for ``Normal(1.0)``.
        sigma: The standard deviation with which each weight starts.
        temperature: A factor on the complexity. 1 is Bayes; below 1 the posterior is "cold". None is 0.6 where
            ``max_iter`` is given, which was better on all data sets that were tried, and 1 where the fit converges and
            in streams. With several hundred passes choose 1.
        batch_size: Examples of a minibatch; ``"auto"`` for 200, or all where there are fewer; in a stream for a
            fiftieth of the part, but at least 32.
        learning_rate_init: Of Adam, at the start; in ``fit`` it falls linearly to 0. None is min(0.03, 1 / sqrt(n))
            for n examples.
        max_iter: Passes over the data in ``fit``. Over four fifths of them the complexity rises to its full weight; if
            the free energy still falls then, or they were too few to say, there is a ``ConvergenceWarning``. None
            goes on until it has stopped falling, which takes several times as long.
        early_stopping: Hold out rows and stop where they are not predicted better any more. The free energy needs no
            such rows: this is for comparisons, and for temperatures below 1.
        validation_fraction: The part of the rows that ``early_stopping`` holds out.
        n_iter_no_change: The passes without a better prediction after which ``early_stopping`` stops.
        warm_start: Let ``fit`` go on from what was learnt before, as from a fit on less data.
        draws: Networks to average in a prediction. It can be changed after ``fit``.
        random_state: None, an int or a ``numpy.random.RandomState``. An int makes every ``fit`` the same.
        verbose: Print how the cost falls: on a terminal in one line, elsewhere in some twenty.
        class_weight: What a row of each class counts, as ``sample_weight``: a mapping from classes to numbers, 1 where
            there is none; ``"balanced"`` for n / (classes * rows of the class); or None.

    Attributes:
        classes_: The classes, sorted.
        model_: The :class:`~bayesbackprop.Bayesian` network, of the numbers of ``classes_``. It takes tensors of its
            own type: float64, or float32 where it was fitted to that.
        loss_curve_: The free energy of each pass in nats per example.
        n_iter_: Passes so far.
        n_samples_seen_: Examples so far, each counted once in ``fit`` and each time in ``partial_fit``.
        validation_scores_: With ``early_stopping``, the mean log-probability of the held-out rows after each pass.
        best_validation_score_: The best of them, whose weights are kept.

    Examples:
        >>> X, y = [[-1.0], [-0.8], [0.9], [1.0]] * 5, ["no", "no", "yes", "yes"] * 5
        >>> BayesianMLPClassifier(max_iter=300, random_state=0).fit(X, y).predict([[-2.0], [2.0]])
        array(['no', 'yes'], dtype='<U3')
    """

    _learnt = (*BayesianMLP._learnt, "classes_")

    class_weight: Mapping[Any, float] | Literal["balanced"] | None = field(default=None, kw_only=True)

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, n_samples: int | None = None, sample_weight: Any = None
    ) -> Self:
        """Go on learning: one pass over some more examples of a stream, at a constant learning rate.

        Args:
            X: The rows.
            y: Their classes.
            classes: All classes there can be; needed at the first call.
            n_samples: The size of the whole data set, which sets the scale of the complexity. None, for all examples
                so far, is right where each comes once: the posterior is then that of what has been seen. Who goes over
                the same data again must say how many there are, or each pass counts as new evidence.
            sample_weight: As for :meth:`fit`.
        """
        known, owner = getattr(self, "classes_", None), f"{self._name}.partial_fit"
        if classes is not None:
            check_list(owner, classes=classes)
        if known is None and (classes is None or len(classes) == 0):
            raise invalid("classes", owner, "given at the first call, where some may have no example yet", classes)
        if known is not None and classes is not None and not np.array_equal(known, np.unique(classes)):
            raise invalid("classes", owner, f"left out or those of the first call, {known.tolist()}", classes)
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            raise invalid(
                "class_weight", owner, "None or a mapping: a stream does not say how often each comes", "balanced"
            )
        return self._learn(X, y, sample_weight, n=n_samples, like=classes)

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each row."""
        probabilities = self.predict_proba(X)  # which refuses an estimator that is not fitted
        return cast(NDArray[Any], self.classes_[probabilities.argmax(1)])

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """The probabilities of ``classes_``, averaged over the draws."""
        return torch.cat([prediction.mean for prediction in self._predictions(X)]).numpy()

    def predict_log_proba(self, X: Any) -> NDArray[Any]:
        """The logarithms of :meth:`predict_proba`, also where these are too small for a float."""
        logits = ((each.components.logits, each.draws) for each in self._predictions(X))
        each = [rows.unflatten(0, (draws, -1)).logsumexp(0) - math.log(draws) for rows, draws in logits]
        return torch.cat(each).numpy()

    def predictive(self, X: Any) -> ClassPredictive:
        (prediction,) = self._predictions(X, rows=None)
        return cast(ClassPredictive, prediction)

    def as_tensor(self, y: Any) -> Tensor:
        check_is_fitted(self)
        return self._encode(column_or_1d(y))

    def _learn_targets(self, y: NDArray[Any], weights: Tensor | None) -> None:  # noqa: ARG002
        check_classification_targets(y)
        self.classes_: NDArray[Any] = np.unique(y)

    def _likelihood(self) -> Likelihood:
        return Categorical()

    def _target_weights(self, y: NDArray[Any]) -> NDArray[Any] | None:
        if self.class_weight is None:
            return None
        check_classification_targets(y)
        classes, numbers = np.unique(y, return_inverse=True)
        weights = compute_class_weight(self.class_weight, classes=classes, y=y)
        return cast(NDArray[Any], weights[numbers])

    def _split(self, y: Tensor, seed: int) -> Any:
        numbers, state = np.arange(len(y)), seed % 2**32
        try:
            return train_test_split(numbers, test_size=self.validation_fraction, random_state=state, stratify=y.numpy())
        except ValueError:  # too few rows of a class
            return super()._split(y, seed)

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
