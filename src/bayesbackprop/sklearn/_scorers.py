"""Scores of the whole predictive distribution, for ``scoring=`` of grid searches and cross-validation."""
# ruff: noqa: N803 (X is scikit-learn's name)

from typing import Any

from bayesbackprop._predictors import examples_of, predicting
from bayesbackprop.evaluation import crps


def log_density(estimator: Any, X: Any, y: Any) -> float:
    """The mean log-probability of targets, or its density: higher is better, and an uncertainty that is wrong costs.

    Args:
        estimator: A fitted estimator of this package, or a pipeline that ends with one.
        X: The rows.
        y: Their targets. Several of one row add up.

    Examples:
        >>> from sklearn.model_selection import cross_val_score
        >>> from bayesbackprop.sklearn import BayesianMLPRegressor
        >>> X, y = [[-1.0], [-0.5], [0.5], [1.0]] * 5, [-1.0, -0.5, 0.5, 1.0] * 5
        >>> cross_val_score(BayesianMLPRegressor(noise=0.1, max_iter=1), X, y, cv=2, scoring=log_density).shape
        (2,)
    """
    predict, _ = predicting(estimator, 1, None, "log_density")
    blocks = examples_of(estimator, (X, y), "X", "log_density")
    sums = [(float(predict(rows).log_prob(targets).double().sum()), len(targets)) for rows, targets in blocks]
    return sum(value for value, _ in sums) / sum(count for _, count in sums)


def negative_crps(estimator: Any, X: Any, y: Any) -> float:
    """Minus the mean CRPS, in the units of the targets: as :func:`log_density`, but forgiving of single outliers.

    Args:
        estimator: A fitted regressor of this package, or a pipeline that ends with one.
        X: The rows.
        y: Their targets. Of several, it is the mean.
    """
    predict, _ = predicting(estimator, 1, None, "negative_crps")
    blocks = examples_of(estimator, (X, y), "X", "negative_crps")
    sums = [
        (float(values.double().sum()), values.numel())
        for values in (crps(predict(rows), targets) for rows, targets in blocks)
    ]
    return -sum(value for value, _ in sums) / sum(count for _, count in sums)
