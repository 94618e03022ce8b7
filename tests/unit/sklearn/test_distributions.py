"""Fitted estimators are judged as what they predict: distributions in the units of the targets."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bayesbackprop import calibrate_temperature, conformal_intervals, evaluate
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor, log_density, negative_crps
from bayesbackprop.verdict import ClassScores, ValueScores
from estimators import QUICK, examples, fitted

X, LABELS = examples(60)
Y = 1000 + 300 * X[:, 0]


def regressor(y: Any = Y, **parameters: Any) -> BayesianMLPRegressor:
    return BayesianMLPRegressor(**{**QUICK, **parameters}).fit(X, y)


@pytest.mark.identities
def test_scores_are_in_the_units_of_the_targets() -> None:
    model = regressor()
    verdict = evaluate(model, (X, Y), outside=100 * X, shifts={"twice": lambda rows: 2 * rows})
    assert isinstance(verdict.scores, ValueScores)
    assert verdict.draws == QUICK["draws"]
    assert verdict.scores.rmse == pytest.approx(np.sqrt(np.square(model.predict(X) - Y).mean()))
    density = float(model.predictive(X).log_prob(model.as_tensor(Y)).mean())
    assert -verdict.scores.nll == pytest.approx(density) == pytest.approx(log_density(model, X, Y))
    assert -verdict.scores.crps == pytest.approx(negative_crps(model, X, Y))
    assert verdict.outside["outside"]["variance"].auroc > 0.9
    assert verdict.shifts["twice"] == evaluate(model, (2 * X, Y)).scores


@pytest.mark.identities
def test_several_targets_and_several_blocks() -> None:
    y = np.stack([Y, -Y], 1)
    model, many = regressor(y), np.tile(X, (20, 1))
    assert evaluate(model, (X, y)).scores == pytest.approx(evaluate(model, (many, np.tile(y, (20, 1)))).scores)
    assert log_density(model, X, y) == pytest.approx(-evaluate(model, (X, y)).scores.nll)


@pytest.mark.identities
def test_classes_have_their_names() -> None:
    names = np.array(["no", "yes"])[LABELS]
    model = BayesianMLPClassifier(**QUICK).fit(X, names)
    verdict = evaluate(model, (X, names))
    assert isinstance(verdict.scores, ClassScores)
    assert verdict.scores.accuracy == pytest.approx(model.score(X, names))


@pytest.mark.identities
def test_a_pipeline_takes_what_its_first_step_takes() -> None:
    frame = pd.DataFrame(10 + 5 * X, columns=list("abc"))
    model = make_pipeline(StandardScaler(), BayesianMLPRegressor(**QUICK)).fit(frame, Y)
    inner = evaluate(model[-1], (model[:-1].transform(frame), Y))
    assert evaluate(model, (frame, pd.Series(Y))).scores == pytest.approx(inner.scores)
    alone = make_pipeline(BayesianMLPRegressor(**QUICK)).fit(X, Y)
    assert evaluate(alone, (X, Y)).scores == pytest.approx(evaluate(alone[-1], (X, Y)).scores)


@pytest.mark.identities
def test_conformal_intervals_are_in_the_units_of_the_targets() -> None:
    low, high = conformal_intervals(regressor(), (X, Y), level=0.8).intervals(X)
    inside = (low.numpy() <= Y) & (high.numpy() >= Y)
    assert 0.8 <= inside.mean() <= 0.8 + 1 / 60 + 1e-9


@pytest.mark.identities
def test_the_network_within_is_of_standardised_targets() -> None:
    model = regressor()
    prediction = model.model_.predict(torch.tensor(X), draws=QUICK["draws"], estimator="shared")
    mean, std = model.predict(X, return_std=True)
    scaled = prediction.mean.numpy() * model.target_scale_ + model.target_mean_
    np.testing.assert_allclose(scaled[:, 0], mean)
    np.testing.assert_allclose(prediction.stddev.numpy()[:, 0] * model.target_scale_, std)
    np.testing.assert_allclose([model.target_mean_, model.target_scale_], [[Y.mean()], [Y.std()]])
    assert not hasattr(BayesianMLPRegressor(), "target_mean_")


@pytest.mark.identities
@pytest.mark.parametrize("scoring", [log_density, negative_crps])
def test_a_search_can_score_the_uncertainty(scoring: Any) -> None:
    """Of two noises, the one that the targets have."""
    y = 1000 + 300 * X[:, 0] + 50 * np.random.RandomState(0).randn(60)
    model = make_pipeline(StandardScaler(), BayesianMLPRegressor((), draws=10, max_iter=150, random_state=0))
    search = GridSearchCV(model, {"bayesianmlpregressor__noise": [50.0, 2000.0]}, scoring=scoring, cv=2).fit(X, y)
    assert search.best_params_ == {"bayesianmlpregressor__noise": 50.0}


@pytest.mark.identities
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: evaluate(LinearRegression().fit(X, Y), (X, Y)), "'model' .* an estimator of bayesbackprop.sklearn"),
        (lambda: evaluate(regressor(), X), r"'data' .* a pair \(X, y\)"),
        (lambda: evaluate(regressor(), (X, Y[:-1])), r"'data' .* Got 60 and 59"),
        (lambda: evaluate(regressor(), (X, np.stack([Y, Y], 1))), r"'y' .* of shape \[n\]"),
        (lambda: conformal_intervals(fitted(BayesianMLPClassifier), (X, LABELS)), "'model' .* that predicts numbers"),
        (lambda: calibrate_temperature(fitted(BayesianMLPClassifier), (X, LABELS)), "CalibratedClassifierCV"),
    ],
)
def test_what_cannot_be_judged_is_refused(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
