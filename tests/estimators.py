"""The scikit-learn estimators, small and quickly fitted, and what tests ask of them."""

import copy
from typing import Any

import numpy as np
import pytest

from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

QUICK: dict[str, Any] = {"hidden_layer_sizes": (4,), "max_iter": 2, "draws": 5, "random_state": 0}

Estimator = BayesianMLPClassifier | BayesianMLPRegressor
BOTH = pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])


def examples(n: int = 40, features: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and targets that serve both kinds."""
    x = np.random.RandomState(seed).randn(n, features)
    return x, (x[:, 0] > 0).astype(int)


def fitted(kind: type[Estimator], **parameters: Any) -> Any:
    return kind(**{**QUICK, **parameters}).fit(*examples())


def said(estimator: Any, x: Any = None) -> list[np.ndarray]:
    """All that an estimator predicts."""
    x = examples(seed=1)[0] if x is None else x
    if isinstance(estimator, BayesianMLPClassifier):
        return [estimator.predict(x), estimator.predict_proba(x)]
    return [*estimator.predict(x, return_std=True), estimator.predict(x, quantiles=[0.1, 0.9])]


def same(one: Any, other: Any, x: Any = None) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(said(one, x), said(other, x), strict=True))


def state_of(estimator: Any) -> dict[str, Any]:
    """All that a refusal must leave alone, as values."""
    return copy.deepcopy({**estimator.__getstate__(), "names": sorted(vars(estimator))})


def unchanged(estimator: Any, before: dict[str, Any]) -> bool:
    now = state_of(estimator)
    return now.keys() == before.keys() and all(np.array_equal(now[name], before[name]) for name in now)
