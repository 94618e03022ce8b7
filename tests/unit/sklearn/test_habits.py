"""The estimators keep to the habits of scikit-learn."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_moons
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bayesbackprop import Laplace, Normal, ScaleMixture
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from estimators import BOTH, QUICK, Estimator, examples, fitted, said, same

# --- the habits of scikit-learn --------------------------------------------------------------------------------------


@pytest.mark.identities
@BOTH
def test_the_seed_is_the_run(kind: type[Estimator]) -> None:
    numpys, torchs = np.random.get_state()[1].copy(), torch.get_rng_state()
    one, other, third = (fitted(kind, random_state=seed) for seed in (0, 0, 1))
    assert same(one, other)
    assert same(one, one)  # and asking changes nothing
    assert not same(one, third)
    assert np.array_equal(np.random.get_state()[1], numpys)
    assert torch.equal(torch.get_rng_state(), torchs)
    assert same(fitted(kind, random_state=np.random.RandomState(5)), fitted(kind, random_state=5))


@pytest.mark.identities
@BOTH
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_a_row_is_predicted_alike_in_any_company(kind: type[Estimator], dtype: Any) -> None:
    x, y = examples(5000)
    x = (3 * x).astype(dtype)
    model = kind(**QUICK).fit(x[:40], y[:40])
    precise = dtype is not np.float32
    for whole, alone in zip(said(model, x), said(model, x[4321:4322]), strict=True):
        row = whole[:, 4321:4322] if len(whole) == 2 else whole[4321:4322]
        assert alone == pytest.approx(row, rel=1e-12 if precise else 1e-4)
    assert model.model_.net[0].weight.dtype is (torch.float64 if precise else torch.float32)


@pytest.mark.learning
def test_pipelines_grids_and_cross_validation() -> None:
    x, y = make_moons(60, noise=0.2, random_state=0)
    grid = {
        "bayesianmlpclassifier__prior": [Normal(0.5), Laplace(0.5)],
        "bayesianmlpclassifier__hidden_layer_sizes": [(), [3], 4],
        "bayesianmlpclassifier__draws": np.array([2, 5]),  # numpy's integers
    }
    pipeline = make_pipeline(StandardScaler(), BayesianMLPClassifier(**QUICK))
    search = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss", error_score="raise").fit(x, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.predict(x).shape == y.shape
    assert cross_val_score(BayesianMLPRegressor(**QUICK), x, y, cv=3).shape == (3,)
    mean, std = make_pipeline(StandardScaler(), BayesianMLPRegressor(**QUICK)).fit(x, y).predict(x, return_std=True)
    assert mean.shape == std.shape == y.shape


@pytest.mark.identities
@BOTH
def test_parameters_are_got_set_and_cloned(kind: type[Estimator]) -> None:
    prior = ScaleMixture(0.25, 1.0, 0.01)
    model = fitted(kind, prior=prior)
    assert model.get_params()["prior"] == prior
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    assert not hasattr(twin, "model_")
    with pytest.raises(NotFittedError):
        twin.predict(examples()[0])
    before = said(model)
    model.set_params(draws=6, sigma=1.0, hidden_layer_sizes=(7, 7), activation="tanh", prior=Normal(1.0))
    assert model.predictive(examples()[0]).draws == 6  # at once; the others at the next fit
    assert same(model.set_params(draws=5), pickle.loads(pickle.dumps(model)))
    assert all(np.array_equal(a, b) for a, b in zip(before, said(model), strict=True))
    assert [layer.out_features for layer in model.fit(*examples()).model_.net[::2]][:2] == [7, 7]


@pytest.mark.identities
@pytest.mark.parametrize(
    "labels",
    [
        ["b", "a"],
        [True, False],
        [3, -1],
        [0.5, 2.5],
        np.array(["long name", "x"], dtype=object),
        ["a", "b", "c"],
        ["a"],
    ],
    ids=str,
)
def test_classes_of_any_type(labels: Any, tmp_path: Path) -> None:
    x, _ = examples()
    y = np.asarray(labels)[np.arange(len(x)) % len(labels)]
    if y.dtype == float:
        with pytest.raises(ValueError, match="Unknown label type"):  # scikit-learn takes fractions for numbers
            BayesianMLPClassifier(**QUICK).fit(x, y)
        return
    model = BayesianMLPClassifier(**QUICK).fit(x, y)
    assert model.classes_.tolist() == sorted(set(labels))
    assert set(model.predict(x)) <= set(labels)
    assert model.predict(x).dtype == model.classes_.dtype
    assert model.predict_proba(x).shape == (len(x), len(labels))
    model.save(tmp_path / "model")
    again = BayesianMLPClassifier.load(tmp_path / "model")
    assert same(model, again)
    assert again.classes_.dtype == model.classes_.dtype
    assert same(model, BayesianMLPClassifier(**QUICK).fit(x.tolist(), y.tolist()))


@pytest.mark.identities
def test_odd_data() -> None:
    x, y = examples()
    one = BayesianMLPRegressor(**QUICK).fit([[1.0]], [5.0])
    assert np.isfinite(said(one, [[2.0]])[0]).all()
    assert BayesianMLPClassifier(**QUICK).fit([[1.0]], ["a"]).predict([[3.0]]) == ["a"]
    constant = BayesianMLPRegressor(**QUICK).fit(x, np.full(len(x), 0.1))  # whose mean is not 0.1
    assert constant._scale == [1.0]
    for each in (np.asfortranarray(x), x[:, ::-1][:, ::-1], x.astype(">f8")):
        assert same(BayesianMLPRegressor(**QUICK).fit(each, y), fitted(BayesianMLPRegressor))
