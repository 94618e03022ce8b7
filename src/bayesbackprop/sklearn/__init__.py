"""scikit-learn estimators: a fully connected Bayesian network for pipelines, grid searches and cross-validation.

A prediction averages the same ``draws`` networks for every row. So what is said of a row depends neither on the rows
beside it nor on how often it is asked for.
"""

try:
    from sklearn.utils.validation import validate_data  # noqa: F401 (since 1.6)
except ImportError as error:
    needs = 'bayesbackprop.sklearn needs scikit-learn 1.6 or newer: pip install "bayesbackprop[sklearn]"'
    raise ImportError(needs) from error

from bayesbackprop.sklearn._classifier import BayesianMLPClassifier
from bayesbackprop.sklearn._regressor import BayesianMLPRegressor
from bayesbackprop.sklearn._scorers import log_density, negative_crps

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor", "log_density", "negative_crps"]
