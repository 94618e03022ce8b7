"""The estimators learn: scikit-learn's own checks, uncertainty, streams."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import load_diabetes, make_blobs, make_friedman1, make_moons, make_regression
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale
from sklearn.utils import shuffle
from sklearn.utils.estimator_checks import parametrize_with_checks

from bayesbackprop import Normal
from bayesbackprop.prediction import ClassPredictive, ValuePredictive
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from estimators import BOTH, QUICK, Estimator, examples, fitted, said, same
from ztests import assert_p_value

# That more passes would help is right, and not what is asked here.
pytestmark = pytest.mark.filterwarnings("ignore:The free energy was still falling")

SMALL: dict[str, Any] = {"hidden_layer_sizes": (10,), "batch_size": 32, "max_iter": 15, "draws": 10}

# --- scikit-learn's own checks ---------------------------------------------------------------------------------------


# Whether a row counts twice or is there twice, the posterior is the same; but in training each row has its own noise.
NOT_BIT_FOR_BIT = "A row of weight 2 and two rows are learnt from with other noise."
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": NOT_BIT_FOR_BIT,
    "check_sample_weight_equivalence_on_sparse_data": NOT_BIT_FOR_BIT,
}


@pytest.mark.identities
@pytest.mark.filterwarnings("ignore:The root mean square of a feature")
@parametrize_with_checks(
    [BayesianMLPClassifier(**SMALL), BayesianMLPRegressor(**SMALL)], expected_failed_checks=lambda _: EXPECTED
)
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
@pytest.mark.parametrize("classes", [2, 3])
def test_the_default_classifier_scores_as_the_checks_ask(classes: int) -> None:
    """As all checks pass with the defaults; this is what depends on how much is learnt, on the data of the check.

    It is fitted to a fifth of them, which is quicker and harder.
    """
    x, y = shuffle(*make_blobs(300, random_state=0), random_state=7)
    x = StandardScaler().fit_transform(x)
    x, y = x[y < classes], y[y < classes]
    assert BayesianMLPClassifier(random_state=0).fit(x[:64], y[:64]).score(x, y) > 0.83


@pytest.mark.learning
def test_the_default_regressor_scores_as_the_checks_ask() -> None:
    x, y = make_regression(200, 10, n_informative=1, bias=5.0, noise=20, random_state=42)
    x, y = StandardScaler().fit_transform(x), scale(y)
    assert BayesianMLPRegressor(random_state=0).fit(x[:64], y[:64]).score(x, y) > 0.5


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
    model = fitted(BayesianMLPRegressor)
    x, _ = examples(seed=1)
    p = model.predictive(x)
    assert isinstance(p, ValuePredictive)
    mean, std = model.predict(x, return_std=True)
    assert np.array_equal(mean, model.predict(x))
    assert mean == pytest.approx(p.mean.numpy())
    assert std**2 == pytest.approx((p.aleatoric + p.epistemic).numpy())
    assert model.predict(x, quantiles=(0.1, 0.5)) == pytest.approx(p.quantiles([0.1, 0.5]).numpy())
    assert isinstance(fitted(BayesianMLPClassifier).predictive(x), ClassPredictive)
    with pytest.raises(ValueError, match=r"'quantiles' parameter of BayesianMLPRegressor\.predict must be None where"):
        model.predict(x, return_std=True, quantiles=[0.5])
    with pytest.raises(ValueError, match=r"quantiles must be a float in \[0, 1\]. Got 1.5"):
        model.predict(x, quantiles=[1.5])


@pytest.mark.identities
@pytest.mark.parametrize("scale", [1e-200, 1e-9, 1e9, 1e200])
def test_the_scale_of_the_targets_does_not_matter(scale: float) -> None:
    x, _ = examples()
    y = x[:, 0] + x[:, 1] ** 2
    plain = BayesianMLPRegressor(**QUICK).fit(x, y)
    scaled = BayesianMLPRegressor(**QUICK).fit(x, y * scale)
    for here, there in zip(said(plain), said(scaled), strict=True):
        assert there / scale == pytest.approx(here, rel=1e-9)
    known = BayesianMLPRegressor(**QUICK, noise=0.5 * scale).fit(x, y * scale)
    assert known.predictive(x).components.stddev.numpy() == pytest.approx(0.5 * scale, rel=1e-12)


@pytest.mark.learning
def test_several_targets_at_once() -> None:
    x, _ = examples(200)
    y = np.stack([x[:, 0], 1000 * x[:, 1] + 5, np.full(len(x), 7.0)], axis=1)
    for noise in ("learnt", "per-input"):
        model = BayesianMLPRegressor((), noise=noise, batch_size=32, max_iter=60, random_state=0).fit(x, y)
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
        (), noise=1.0, prior=Normal(0.5), temperature=1.0, max_iter=1500, learning_rate_init=0.05, random_state=0
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
    x, y = examples()
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
def test_repeated_passes_end_where_fit_does() -> None:
    """At a constant learning rate the noise per input diverges: after 30 passes the R2 is -117."""
    x, y = load_diabetes(return_X_y=True)
    x, first, rest = scale(x), slice(342), slice(342, None)
    passes = BayesianMLPRegressor(draws=30, random_state=0)
    for _ in range(30):
        passes.partial_fit(x[first], y[first], n_samples=342)
    whole = BayesianMLPRegressor(draws=30, random_state=0).fit(x[first], y[first])
    assert passes.score(x[rest], y[rest]) > whole.score(x[rest], y[rest]) - 0.05
    widths = [model.predict(x[rest], return_std=True)[1].max() for model in (passes, whole)]
    assert widths[0] < 1.2 * widths[1]


@pytest.mark.identities
@pytest.mark.parametrize("noise", ["per-input", "learnt", 0.5])
def test_only_noise_per_input_is_learnt_more_slowly_and_only_in_repeated_passes(noise: Any) -> None:
    (x, y), rates = examples(30), []
    stream, known = (BayesianMLPRegressor(**QUICK, noise=noise, batch_size=2, learning_rate_init=0.01) for _ in "ab")
    for part in range(4):  # three parts of a set are one pass, the fourth begins the second
        rows = slice(10 * (part % 3), 10 * (part % 3) + 10)
        stream.partial_fit(x[rows], y[rows])
        known.partial_fit(x[rows], y[rows], n_samples=30)
        rates.append([each._optimiser.param_groups[0]["lr"] for each in (stream, known)])
    slower = 0.01 * (4 / 3) ** -0.75 if noise == "per-input" else 0.01
    assert rates == [[0.01, 0.01]] * 3 + [[0.01, pytest.approx(slower)]]


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
    x, y = examples()
    start = {"classes": [0, 1]} if kind is BayesianMLPClassifier else {}
    for model in (kind(**QUICK).partial_fit(x, y, **start), fitted(kind)):
        model.save(tmp_path / "model")
        ways = {"pickle": lambda model: pickle.loads(pickle.dumps(model)), "deepcopy": copy.deepcopy}
        other = kind.load(tmp_path / "model") if how == "file" else ways[how](model)
        for part in (slice(0, 11), slice(11, 40)):
            model.partial_fit(x[part], y[part])
            other.partial_fit(x[part], y[part])
        assert same(model, other)
        assert model.loss_curve_ == other.loss_curve_
