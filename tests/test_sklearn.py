"""The scikit-learn estimators: scikit-learn's own checks, learning, uncertainty, streams, files and pickles."""

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest

import joblib
import numpy as np
import pytest
import safetensors.torch
import torch
from scipy import sparse, stats
from sklearn.base import clone
from sklearn.datasets import make_friedman1, make_moons
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_classifiers_train, check_regressors_train, parametrize_with_checks

from bayesbackprop import Bayesian, Laplace, LogDensity, Normal, ScaleMixture, save
from bayesbackprop.prediction import ClassPredictive, ValuePredictive
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from rewriting import rewrite
from ztests import assert_p_value

SMALL: dict[str, Any] = {"hidden_layer_sizes": (10,), "max_iter": 30, "draws": 10}
QUICK: dict[str, Any] = {"hidden_layer_sizes": (4,), "max_iter": 2, "draws": 5, "random_state": 0}

Estimator = BayesianMLPClassifier | BayesianMLPRegressor
BOTH = pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])


def _data(n: int = 40, features: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and targets that serve both kinds."""
    x = np.random.RandomState(seed).randn(n, features)
    return x, (x[:, 0] > 0).astype(int)


def _fitted(kind: type[Estimator], **parameters: Any) -> Any:
    return kind(**{**QUICK, **parameters}).fit(*_data())


def _said(estimator: Any, x: Any = None) -> list[np.ndarray]:
    """All that an estimator predicts."""
    x = _data(seed=1)[0] if x is None else x
    if isinstance(estimator, BayesianMLPClassifier):
        return [estimator.predict(x), estimator.predict_proba(x)]
    return [*estimator.predict(x, return_std=True), estimator.predict(x, quantiles=[0.1, 0.9])]


def _same(one: Any, other: Any, x: Any = None) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(_said(one, x), _said(other, x), strict=True))


def _state(estimator: Any) -> dict[str, Any]:
    """All that a refusal must leave alone, as values."""
    return copy.deepcopy({**estimator.__getstate__(), "names": sorted(vars(estimator))})


def _unchanged(estimator: Any, before: dict[str, Any]) -> bool:
    now = _state(estimator)
    return now.keys() == before.keys() and all(np.array_equal(now[name], before[name]) for name in now)


# --- scikit-learn's own checks ---------------------------------------------------------------------------------------


@pytest.mark.identities
@parametrize_with_checks([BayesianMLPClassifier(**SMALL), BayesianMLPRegressor(**SMALL)])
def test_scikit_learn_checks(estimator: Any, check: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")  # or one check skips itself
    try:
        check(estimator)
    except SkipTest as skip:
        # The check has passed with objects that are no arrays, and goes on with pandas, which is no dependency of ours.
        if not str(skip).startswith("pandas is not installed"):
            pytest.fail(f"skipped without a reason of ours: {skip}")
        pytest.skip(str(skip))


@pytest.mark.learning
@pytest.mark.parametrize(
    ("check", "estimator"),
    [(check_classifiers_train, BayesianMLPClassifier()), (check_regressors_train, BayesianMLPRegressor())],
)
def test_the_defaults_score_as_the_checks_ask(check: Callable[[str, Any], None], estimator: Any) -> None:
    """All checks pass with the defaults, in a minute or two; these are the ones that depend on how much is learnt."""
    check(type(estimator).__name__, estimator)


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.learning
def test_the_classifier_learns_what_a_line_cannot() -> None:
    train, test, of_train, of_test = train_test_split(*make_moons(400, noise=0.2, random_state=0), random_state=0)
    names = np.array(["left", "right"])
    model = make_pipeline(StandardScaler(), BayesianMLPClassifier(max_iter=200, random_state=0)).fit(
        train, names[of_train]
    )
    assert model.score(test, names[of_test]) > LogisticRegression().fit(train, of_train).score(test, of_test) + 0.03
    assert model.predict_proba(test).sum(1) == pytest.approx(1)


@pytest.mark.learning
def test_the_regressor_learns_what_a_line_cannot() -> None:
    train, test, of_train, of_test = train_test_split(*make_friedman1(500, noise=1.0, random_state=0), random_state=0)
    model = make_pipeline(StandardScaler(), BayesianMLPRegressor((20,), max_iter=150, random_state=0)).fit(
        train, of_train
    )
    assert model.score(test, of_test) > LinearRegression().fit(train, of_train).score(test, of_test) + 0.05


@pytest.mark.learning
def test_it_is_less_sure_off_the_data_than_on_it() -> None:
    x = np.random.RandomState(0).uniform(-1, 1, (100, 1))
    model = BayesianMLPRegressor(max_iter=200, random_state=0).fit(x, np.sin(3 * x[:, 0]))
    _, std = model.predict([[0.0], [0.5], [-6.0], [6.0]], return_std=True)
    assert std[2:].min() > 3 * std[:2].max()
    x = x[np.abs(x[:, 0]) > 0.5]
    classifier = BayesianMLPClassifier(max_iter=200, random_state=0).fit(x, x[:, 0] > 0)
    left, gap, right = classifier.predictive([[-0.8], [0.0], [0.8]]).epistemic.tolist()
    assert gap > 2 * max(left, right)


@pytest.mark.statistical
@pytest.mark.parametrize("noise", ["learnt", 2.0])
def test_quantiles_hold_as_many_held_out_targets_as_they_say(noise: Any) -> None:
    """A small network with much data: the posterior is narrow, and what is left is the noise, which is known."""
    random = np.random.RandomState(0)
    x = random.randn(3000, 2)
    y = 100 + 5 * x @ [1.0, -2.0] + 2 * random.randn(3000)
    model = BayesianMLPRegressor((), noise=noise, max_iter=20, random_state=0).fit(x[:1000], y[:1000])
    for low, high in ((0.05, 0.95), (0.25, 0.75)):
        lower, upper = model.predict(x[1000:], quantiles=[low, high])
        inside = int(((lower <= y[1000:]) & (y[1000:] <= upper)).sum())
        # What 1000 examples leave open of the five numbers to learn moves the coverage by far less than its own error.
        assert_p_value(stats.binomtest(inside, 2000, high - low).pvalue, f"{high - low:.0%} interval, {inside} of 2000")


@pytest.mark.learning
def test_the_noise_is_learnt_where_it_is() -> None:
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (600, 1))
    y = np.where(x[:, 0] > 0, 1.0, 0.1) * random.randn(600)
    per_input = BayesianMLPRegressor((20,), noise="per-input", max_iter=100, random_state=0).fit(x, y)
    quiet, loud = per_input.predictive([[-0.8], [0.8]]).aleatoric.sqrt().tolist()
    assert quiet < 0.3 < 0.6 < loud


@pytest.mark.identities
def test_std_and_quantiles_are_those_of_the_predictive_distribution() -> None:
    model = _fitted(BayesianMLPRegressor)
    x, _ = _data(seed=1)
    p = model.predictive(x)
    assert isinstance(p, ValuePredictive)
    mean, std = model.predict(x, return_std=True)
    assert np.array_equal(mean, model.predict(x))
    assert mean == pytest.approx(p.mean.numpy())
    assert std**2 == pytest.approx((p.aleatoric + p.epistemic).numpy())
    assert model.predict(x, quantiles=(0.1, 0.5)) == pytest.approx(p.quantiles([0.1, 0.5]).numpy())
    assert isinstance(_fitted(BayesianMLPClassifier).predictive(x), ClassPredictive)
    with pytest.raises(ValueError, match=r"'quantiles' parameter of BayesianMLPRegressor\.predict must be None where"):
        model.predict(x, return_std=True, quantiles=[0.5])
    with pytest.raises(ValueError, match=r"quantiles must be a float in \[0, 1\]. Got 1.5"):
        model.predict(x, quantiles=[1.5])


@pytest.mark.identities
@pytest.mark.parametrize("scale", [1e-200, 1e-9, 1e9, 1e200])
def test_the_scale_of_the_targets_does_not_matter(scale: float) -> None:
    x, _ = _data()
    y = x[:, 0] + x[:, 1] ** 2
    plain = BayesianMLPRegressor(**QUICK).fit(x, y)
    scaled = BayesianMLPRegressor(**QUICK).fit(x, y * scale)
    for here, there in zip(_said(plain), _said(scaled), strict=True):
        assert there / scale == pytest.approx(here, rel=1e-9)
    known = BayesianMLPRegressor(**QUICK, noise=0.5 * scale).fit(x, y * scale)
    assert known.predictive(x).components.stddev.numpy() == pytest.approx(0.5 * scale, rel=1e-12)


@pytest.mark.learning
def test_several_targets_at_once() -> None:
    x, _ = _data(200)
    y = np.stack([x[:, 0], 1000 * x[:, 1] + 5, np.full(len(x), 7.0)], axis=1)
    for noise in ("learnt", "per-input"):
        model = BayesianMLPRegressor((), noise=noise, max_iter=60, random_state=0).fit(x, y)
        mean, std = model.predict(x, return_std=True)
        assert mean.shape == std.shape == y.shape
        assert model.predict(x, quantiles=[0.1, 0.5, 0.9]).shape == (3, *y.shape)
        assert np.abs(mean - y).mean(0) / [1, 1000, 1] == pytest.approx(0, abs=0.2)
    one = BayesianMLPRegressor(**QUICK).fit(x, y[:, :1])
    assert one.predict(x).shape == (200, 1)
    assert np.array_equal(one.predict(x)[:, 0], BayesianMLPRegressor(**QUICK).fit(x, y[:, 0]).predict(x))
    known = BayesianMLPRegressor(**QUICK, noise=0.5).fit(x, y)  # in the units of each target
    assert known.predictive(x).aleatoric.sqrt().numpy() == pytest.approx(0.5)


@pytest.mark.learning
def test_a_linear_model_has_the_posterior_that_theory_gives_it() -> None:
    """Mean field is exact here but for the correlations, of which orthogonal inputs have none."""
    x = np.array([-1.0, 1.0] * 50)[:, None]
    y = 3 * x[:, 0] + np.random.RandomState(0).randn(100)
    model = BayesianMLPRegressor(
        (), noise=1.0, prior=Normal(0.5), batch_size=100, max_iter=1500, learning_rate_init=0.05, random_state=0
    ).fit(x, y)
    noise = 1 / y.std()
    precision = 1 / 0.5**2 + len(x) / noise**2
    weight = model.model_.posterior["0.weight"]
    standard = (y - y.mean()) / y.std()
    assert weight.sigma.item() == pytest.approx(precision**-0.5, rel=0.1)
    assert weight.mu.item() == pytest.approx((x[:, 0] @ standard) / noise**2 / precision, abs=0.5 * precision**-0.5)


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.identities
def test_the_complexity_of_a_stream_is_shared_among_what_was_seen() -> None:
    x, y = _data()
    first = BayesianMLPRegressor(**QUICK, batch_size=40).partial_fit(x, y)

    def cost(start: Any, n_samples: int | None) -> float:
        return float(copy.deepcopy(start).partial_fit(x, y, n_samples=n_samples).loss_curve_[-1])

    for start, seen in ((BayesianMLPRegressor(**QUICK, batch_size=40), 40), (first, 80)):
        assert cost(start, None) == cost(start, seen)
        # The same draw at each size, so the cost is likelihood + complexity / n.
        complexity = (cost(start, 40) - cost(start, 80)) / (1 / 40 - 1 / 80)
        assert complexity > 0
        assert cost(start, 40) - cost(start, 10**6) == pytest.approx(complexity * (1 / 40 - 1e-6))
    assert (first.n_samples_seen_, first.n_iter_, len(first.loss_curve_)) == (40, 1, 1)
    assert first.partial_fit(x[:7], y[:7]).n_samples_seen_ == 47


@pytest.mark.learning
def test_who_goes_over_the_same_data_again_says_how_many_there_are() -> None:
    x = np.random.RandomState(0).randn(50, 1)
    y = x[:, 0] + np.random.RandomState(1).randn(50)
    known, counted = (BayesianMLPRegressor((), noise=1.0, random_state=0) for _ in range(2))
    for _ in range(200):
        known.partial_fit(x, y, n_samples=50)
        counted.partial_fit(x, y)
    exact = (1 + 50 * (x**2).mean() * y.var()) ** -0.5
    sure, surer = (model.model_.posterior["0.weight"].sigma.item() for model in (known, counted))
    assert sure == pytest.approx(exact, rel=0.3)
    assert surer < exact / 2


@pytest.mark.learning
def test_a_stream_is_learnt_from() -> None:
    model = BayesianMLPClassifier(random_state=0)
    for part in range(60):
        x, y = make_moons(50, noise=0.2, random_state=part)
        model.partial_fit(x, y, classes=[0, 1, 2] if part == 0 else None)  # one that never comes
    x, y = make_moons(500, noise=0.2, random_state=99)
    assert model.score(x, y) > 0.9
    assert list(model.classes_) == [0, 1, 2]
    assert model.predict_proba(x)[:, 2].max() < 0.1


@pytest.mark.equivalence
@BOTH
@pytest.mark.parametrize("how", ["pickle", "file", "deepcopy"])
def test_a_copy_goes_on_as_the_original(kind: type[Estimator], how: str, tmp_path: Path) -> None:
    x, y = _data()
    start = {"classes": [0, 1]} if kind is BayesianMLPClassifier else {}
    for model in (kind(**QUICK).partial_fit(x, y, **start), _fitted(kind)):
        model.save(tmp_path / "model")
        ways = {"pickle": lambda model: pickle.loads(pickle.dumps(model)), "deepcopy": copy.deepcopy}
        other = kind.load(tmp_path / "model") if how == "file" else ways[how](model)
        for part in (slice(0, 11), slice(11, 40)):
            model.partial_fit(x[part], y[part])
            other.partial_fit(x[part], y[part])
        assert _same(model, other)
        assert model.loss_curve_ == other.loss_curve_


# --- the habits of scikit-learn --------------------------------------------------------------------------------------


@pytest.mark.identities
@BOTH
def test_the_seed_is_the_run(kind: type[Estimator]) -> None:
    numpys, torchs = np.random.get_state()[1].copy(), torch.get_rng_state()
    one, other, third = (_fitted(kind, random_state=seed) for seed in (0, 0, 1))
    assert _same(one, other)
    assert _same(one, one)  # and asking changes nothing
    assert not _same(one, third)
    assert np.array_equal(np.random.get_state()[1], numpys)
    assert torch.equal(torch.get_rng_state(), torchs)
    assert _same(_fitted(kind, random_state=np.random.RandomState(5)), _fitted(kind, random_state=5))


@pytest.mark.identities
@BOTH
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_a_row_is_predicted_alike_in_any_company(kind: type[Estimator], dtype: Any) -> None:
    x, y = _data(5000)
    x = (3 * x).astype(dtype)
    model = kind(**QUICK).fit(x[:40], y[:40])
    precise = dtype is not np.float32
    for whole, alone in zip(_said(model, x), _said(model, x[4321:4322]), strict=True):
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
    model = _fitted(kind, prior=prior)
    assert model.get_params()["prior"] == prior
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    assert not hasattr(twin, "model_")
    with pytest.raises(NotFittedError):
        twin.predict(_data()[0])
    before = _said(model)
    model.set_params(draws=6, sigma=1.0, hidden_layer_sizes=(7, 7), activation="tanh", prior=Normal(1.0))
    assert model.predictive(_data()[0]).draws == 6  # at once; the others at the next fit
    assert _same(model.set_params(draws=5), pickle.loads(pickle.dumps(model)))
    assert all(np.array_equal(a, b) for a, b in zip(before, _said(model), strict=True))
    assert [layer.out_features for layer in model.fit(*_data()).model_.net[::2]][:2] == [7, 7]


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
    x, _ = _data()
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
    assert _same(model, again)
    assert again.classes_.dtype == model.classes_.dtype
    assert _same(model, BayesianMLPClassifier(**QUICK).fit(x.tolist(), y.tolist()))


@pytest.mark.identities
def test_odd_data() -> None:
    x, y = _data()
    one = BayesianMLPRegressor(**QUICK).fit([[1.0]], [5.0])
    assert np.isfinite(_said(one, [[2.0]])[0]).all()
    assert BayesianMLPClassifier(**QUICK).fit([[1.0]], ["a"]).predict([[3.0]]) == ["a"]
    constant = BayesianMLPRegressor(**QUICK).fit(x, np.full(len(x), 0.1))  # whose mean is not 0.1
    assert constant._scale == [1.0]
    for each in (np.asfortranarray(x), x[:, ::-1][:, ::-1], x.astype(">f8")):
        assert _same(BayesianMLPRegressor(**QUICK).fit(each, y), _fitted(BayesianMLPRegressor))
    for kind in (BayesianMLPClassifier, BayesianMLPRegressor):
        with pytest.raises(TypeError, match="dense data is required"):
            kind(**QUICK).fit(sparse.csr_array(x), y)


@pytest.mark.identities
def test_it_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model = _fitted(BayesianMLPClassifier, verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"Iteration {n}, cost = {cost:.6g} nats per example" for n, cost in enumerate(model.loss_curve_, 1)
    ]
    assert len(lines) == model.n_iter_ == 2


# --- what is refused -------------------------------------------------------------------------------------------------

PARAMETERS: list[dict[str, Any]] = [
    {"hidden_layer_sizes": (5, 0)},
    {"hidden_layer_sizes": 2.5},
    {"hidden_layer_sizes": "five"},
    {"activation": "sine"},
    {"activation": ["relu"]},
    {"prior": 1.0},
    {"sigma": 0.0},
    {"sigma": "small"},
    {"temperature": -1.0},
    {"batch_size": 0},
    {"batch_size": True},
    {"learning_rate_init": np.inf},
    {"max_iter": 0},
    {"max_iter": 1.0},
    {"draws": 0},
]


@pytest.mark.identities
@BOTH
@pytest.mark.parametrize("bad", PARAMETERS, ids=str)
def test_bad_parameters_are_refused_by_fit_and_change_nothing(kind: type[Estimator], bad: dict[str, Any]) -> None:
    model = _fitted(kind).set_params(**bad)
    before = _state(model)
    (name,) = bad
    for learn in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=rf"^The '{name}' parameter of {kind.__name__} must be .+ Got .+ instead"):
            learn(*_data())
        assert _unchanged(model, before)
    if name == "draws":
        with pytest.raises(ValueError, match=f"'draws' parameter of {kind.__name__}"):
            model.predict(_data()[0])


X, Y = _data()

CALLS: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda model: model.fit(np.where(X > 1, np.nan, X), Y),
    "too few targets": lambda model: model.fit(X, Y[:-1]),
    "no targets": lambda model: model.fit(X, None),
    "another width": lambda model: model.partial_fit(X[:, :2], Y),
    "a smaller data set than this part of it": lambda model: model.partial_fit(X, Y, n_samples=39),
    "a data set of no size": lambda model: model.partial_fit(X, Y, n_samples="all"),
    "another width to predict": lambda model: model.predict(X[:, :2]),
    "no rows": lambda model: model.predict(X[:0]),
}
ONLY: dict[type[Estimator], dict[str, Callable[[Any], Any]]] = {
    BayesianMLPClassifier: {
        "an unknown class": lambda model: model.partial_fit(X, Y + 1),
        "classes of another type": lambda model: model.partial_fit(X, np.full(len(X), "a")),
        "fractions in a stream": lambda model: model.partial_fit(X, Y + 0.5),
        "other classes": lambda model: model.partial_fit(X, Y, classes=[0, 1, 2]),
        "fractions": lambda model: model.fit(X, X[:, 0]),
    },
    BayesianMLPRegressor: {
        "numbers too large": lambda model: model.fit(1e300 * X, Y),
        "numbers too large in a stream": lambda model: model.partial_fit(1e300 * X, Y),
        "text": lambda model: model.fit(X, np.full(len(X), "a")),
        "infinite targets": lambda model: model.fit(X, np.full(len(X), np.inf)),
        "another shape of targets": lambda model: model.partial_fit(X, Y[:, None]),
        "no such noise": lambda model: model.set_params(noise="white").fit(X, Y),
        "no noise": lambda model: model.set_params(noise=0).fit(X, Y),
    },
}
REFUSED = [(kind, name, call) for kind, own in ONLY.items() for name, call in {**CALLS, **own}.items()]


@pytest.mark.identities
@pytest.mark.parametrize(("kind", "name", "call"), REFUSED, ids=lambda value: getattr(value, "__name__", value))
def test_bad_data_are_refused_and_change_nothing(kind: type[Estimator], name: str, call: Callable[[Any], Any]) -> None:
    model = _fitted(kind)
    before = _state(model)
    with pytest.raises(ValueError, match=r"\w"):
        call(model)
    if isinstance(model, BayesianMLPRegressor):
        model.set_params(noise="learnt")
    assert _unchanged(model, before)


@pytest.mark.identities
@BOTH
def test_a_training_that_is_interrupted_changes_nothing(kind: type[Estimator], monkeypatch: pytest.MonkeyPatch) -> None:
    start = {"classes": [0, 1]} if kind is BayesianMLPClassifier else {}
    model = kind(**QUICK, batch_size=10).partial_fit(X, Y, **start)
    before, step, left = _state(model), torch.optim.Adam.step, iter(range(3))

    def interrupted(self: Any, *args: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        step(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", interrupted)
    for learn in (model.partial_fit, model.fit):
        with pytest.raises(KeyboardInterrupt):
            learn(X, Y)
        assert _unchanged(model, before)
    new = kind(**QUICK)
    with pytest.raises(KeyboardInterrupt):
        new.fit(X, Y)
    assert vars(new) == vars(kind(**QUICK))


@pytest.mark.identities
@pytest.mark.parametrize("classes", [None, []], ids=str)
def test_the_first_part_of_a_stream_needs_all_classes(classes: Any) -> None:
    with pytest.raises(ValueError, match=r"'classes' parameter of BayesianMLPClassifier\.partial_fit must be given at"):
        BayesianMLPClassifier(**QUICK).partial_fit(X, Y, classes=classes)


# --- pickles and files -----------------------------------------------------------------------------------------------


def _joblib(model: Any) -> Any:
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    return joblib.load(file)


@pytest.mark.identities
@BOTH
@pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), _joblib, copy.copy, copy.deepcopy])
def test_copies_are_exact_and_stand_alone(kind: type[Estimator], copied: Callable[[Any], Any]) -> None:
    model = _fitted(kind, prior=LogDensity(_cauchy))  # a pickle holds what a file cannot
    other = copied(model)
    assert _same(model, other)
    assert other.get_params() == model.get_params()
    assert isinstance(other.model_, Bayesian)
    before = _said(other)
    model.partial_fit(*_data())
    assert all(np.array_equal(a, b) for a, b in zip(before, _said(other), strict=True))
    unfitted = copied(kind(sigma=0.3))
    assert vars(unfitted) == vars(kind(sigma=0.3))


def _cauchy(w: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(w.square())


@pytest.mark.identities
@BOTH
def test_a_pickle_holds_the_librarys_format_and_nothing_of_torch(kind: type[Estimator]) -> None:
    model = _fitted(kind).partial_fit(*_data())
    content = pickle.dumps(model)
    assert b"torch" not in content
    tensors = safetensors.torch.load(model.__getstate__()["model_"])
    assert torch.equal(tensors["model.net.0.weight"], model.model_.net[0].weight)


@pytest.mark.identities
@BOTH
def test_the_file_is_exact(kind: type[Estimator], tmp_path: Path) -> None:
    special: dict[str, Any] = {"prior": Laplace(1 / 3), "activation": "tanh", "hidden_layer_sizes": np.array([3, 2])}
    if kind is BayesianMLPRegressor:
        special["noise"] = np.float32(1 / 3)
    for parameters in ({}, special, {"hidden_layer_sizes": ()}, {"activation": "logistic", "max_iter": np.int64(1)}):
        model = _fitted(kind, **parameters)
        model.save(tmp_path / "model")
        again = kind.load(str(tmp_path / "model"))
        assert _same(model, again)
        for name, value in model.get_params().items():
            assert np.array_equal(again.get_params()[name], value)
        again.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "model").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["again", "model"]
    model.feature_names_in_ = np.array(["a", "b", "c"], dtype=object)
    model.save(tmp_path / "model")
    assert kind.load(tmp_path / "model").feature_names_in_.tolist() == ["a", "b", "c"]


@pytest.mark.identities
@pytest.mark.parametrize(
    ("fit", "named"),
    [
        (lambda: _fitted(BayesianMLPRegressor, prior=LogDensity(_cauchy)), "LogDensity"),
        (lambda: _fitted(BayesianMLPRegressor, random_state=np.random.RandomState(0)), "RandomState"),
        (lambda: BayesianMLPClassifier(**QUICK).fit(X, np.array(["2020", "2021"], "M8[Y]")[Y]), "date"),
    ],
    ids=["a prior", "a generator", "dates"],
)
def test_what_a_file_cannot_hold_is_refused_when_it_is_written(
    fit: Callable[[], Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"'estimator' parameter of \w+.save must be .*use pickle.* Got .*{named}"):
        fit().save(tmp_path / "model")
    assert os.listdir(tmp_path) == []
    with pytest.raises(NotFittedError):
        BayesianMLPRegressor().save(tmp_path / "model")


def _changed(
    change: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any],
) -> Callable[[Path], Any]:
    """A good file with other contents or tensors."""
    return _rewritten(lambda header, tensors: change(header["contents"], tensors))


def _rewritten(
    change: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], text: str | None = None
) -> Callable[[Path], Any]:
    """A good file with another header or other tensors."""

    def write(path: Path) -> None:
        _fitted(BayesianMLPClassifier).partial_fit(*_data()).save(path)
        rewrite(path, change, text)

    return write


def _cut(path: Path) -> None:
    _fitted(BayesianMLPClassifier).save(path)
    path.write_bytes(path.read_bytes()[:-1])


STATE = [
    *BayesianMLPClassifier().get_params(),
    "n_features_in_",
    "n_iter_",
    "n_samples_seen_",
    "loss_curve_",
    "classes_",
]
FILES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": _cut,
    "text": lambda path: path.write_text("This is no model.\n" * 20),
    "another program's": lambda path: safetensors.torch.save_file({"a": torch.zeros(1)}, path),
    "a model alone": lambda path: save(_fitted(BayesianMLPClassifier).model_, path),
    "the other estimator's": lambda path: _fitted(BayesianMLPRegressor).save(path),
    "not JSON": _rewritten(lambda header, tensors: None, "{"),
    "a list": _rewritten(lambda header, tensors: None, "[1]"),
    "a future format": _rewritten(lambda header, tensors: header.update(format=3)),
    "no format": _rewritten(lambda header, tensors: header.pop("format")),
    "no state": _changed(lambda data, tensors: data.pop("state")),
    "a state that is a list": _changed(lambda data, tensors: data.update(state=[1])),
    **{f"no {name}": _changed(lambda data, _, name=name: data["state"].pop(name)) for name in STATE},
    **{f"made without {name}": _changed(lambda data, _, name=name: data["state"]["_made"].pop(name))
       for name in ("activation", "likelihood", "priors")},
    "made with more": _changed(lambda data, _: data["state"]["_made"].update(more=1)),
    "an unknown function": _changed(lambda data, _: data["state"]["_made"].update(activation="os.system")),
    "an unknown likelihood": _changed(lambda data, _: data["state"]["_made"]["likelihood"].update(kind="os.system")),
    "a likelihood of one's own": _changed(lambda data, _: data["state"]["_made"]["likelihood"].update(kind="own")),
    "an unknown prior": _changed(lambda data, _: data["state"]["_made"]["priors"]["*"]["prior"].update(kind="X")),
    "fewer classes": _changed(lambda data, _: data["state"]["classes_"].update(values=[1])),
    "classes of no type": _changed(lambda data, _: data["state"]["classes_"].update(array="os.system")),
    "more features": _changed(lambda data, _: data["state"].update(n_features_in_=4)),
    "no weight": _changed(lambda _, tensors: tensors.pop("model.net.0.weight")),
    "no bias": _changed(lambda _, tensors: tensors.pop("model.net.0.bias")),
    "no rho": _changed(lambda _, tensors: tensors.pop("model.rho.0.bias")),
    "no seed": _changed(lambda _, tensors: tensors.pop("model._seed")),
    "one tensor too many": _changed(lambda _, tensors: tensors.update({"model.net.9.bias": torch.zeros(1)})),
    "a tensor of nobody's": _changed(lambda _, tensors: tensors.update({"more": torch.zeros(1)})),
    "NaN": _changed(lambda _, tensors: tensors["model.net.0.bias"].fill_(torch.nan)),
    "another shape": _changed(lambda _, tensors: tensors.update({"model.net.0.bias": torch.zeros(5).double()})),
    "another type": _changed(lambda _, tensors: tensors.update({"model.net.0.bias": torch.zeros(4).int()})),
    "half precision": _changed(lambda _, tensors: tensors.update({k: t.half() for k, t in tensors.items()})),
    "half of the moments": _changed(lambda _, tensors: tensors.pop("adam.exp_avg.net.0.bias")),
    "moments of another shape": _changed(lambda _, tensors: tensors["adam.exp_avg.net.0.bias"].resize_(1)),
}  # fmt: skip


@pytest.mark.identities
@pytest.mark.parametrize("write", FILES.values(), ids=list(FILES))
def test_a_file_that_does_not_fit_is_refused(write: Callable[[Path], Any], tmp_path: Path) -> None:
    write(tmp_path / "model")
    form = r"^The 'path' parameter of BayesianMLPClassifier.load must be .+\. Got .+ instead\.$"
    with pytest.raises(ValueError, match=form):
        BayesianMLPClassifier.load(tmp_path / "model")


@pytest.mark.identities
def test_the_good_file_of_these_tests_is_good(tmp_path: Path) -> None:
    _changed(lambda data, tensors: None)(tmp_path / "model")
    assert _same(BayesianMLPClassifier.load(tmp_path / "model"), _fitted(BayesianMLPClassifier).partial_fit(*_data()))
    with pytest.raises(FileNotFoundError):
        BayesianMLPClassifier.load(tmp_path / "nowhere")


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.identities
def test_loading_a_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker, path = tmp_path / "marker", tmp_path / "model"
    joblib.dump(Bomb(marker), path)
    with pytest.raises(ValueError, match=r"'path' parameter of BayesianMLPClassifier\.load must be"):
        BayesianMLPClassifier.load(path)
    assert not marker.exists()
    joblib.load(path)
    assert marker.exists()  # it would have gone off

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    _fitted(BayesianMLPClassifier).save(path)
    for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, never)
    BayesianMLPClassifier.load(path)


# --- an optional dependency ------------------------------------------------------------------------------------------


@pytest.mark.identities
def test_the_library_does_not_need_scikit_learn() -> None:
    program = """
import sys, bayesbackprop
assert "sklearn" not in sys.modules
sys.modules["sklearn"] = None  # as if it were not installed
try:
    import bayesbackprop.sklearn
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    needs = 'bayesbackprop.sklearn needs scikit-learn 1.6 or newer: pip install "bayesbackprop[sklearn]"'
    assert result.stdout == needs + "\n"
