"""Weights, sparse rows, early stopping, warm starts, samples and warnings."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.class_weight import compute_sample_weight

from bayesbackprop import Normal, callbacks
from bayesbackprop.callbacks import Convergence
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor, _estimator
from estimators import BOTH, QUICK, Estimator, examples, fitted, said, same
from ztests import assert_mean

# That more passes would help is right, and not what is asked here but in one test.
pytestmark = pytest.mark.filterwarnings("ignore:The free energy was still falling")

# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.identities
@BOTH
def test_rows_of_no_weight_are_as_if_they_were_not_there(kind: type[Estimator]) -> None:
    x, y = examples()
    weights = np.arange(len(x)) % 3 + 0.5
    more = np.r_[x, 100 * x[:7]], np.r_[y, 1 - y[:7]], np.r_[weights, np.zeros(7)]
    start = {"classes": [0, 1]} if kind is BayesianMLPClassifier else {}
    weighted = kind(**QUICK).fit(x, y, sample_weight=weights)
    assert same(weighted, kind(**QUICK).fit(more[0], more[1], sample_weight=more[2]))
    assert not same(weighted, fitted(kind))
    assert same(fitted(kind), kind(**QUICK).fit(x, y, sample_weight=np.ones(len(x))))
    stream, other = (kind(**QUICK).partial_fit(x, y, **start) for _ in range(2))
    stream.partial_fit(x, y, sample_weight=weights)
    assert same(stream, other.partial_fit(more[0], more[1], sample_weight=more[2]))
    assert stream.n_samples_seen_ == 80


@pytest.mark.learning
def test_a_weight_of_two_is_two_rows() -> None:
    """Of a linear model with known noise the posterior says how many rows there were."""
    x = np.array([-1.0, 1.0] * 20)[:, None]
    y = 3 * x[:, 0] + np.random.RandomState(0).randn(40)
    options: dict[str, Any] = {"noise": 1.0, "temperature": 1.0, "max_iter": 800, "prior": Normal(1.0)}
    model = BayesianMLPRegressor((), random_state=0, **options).fit(x, y, sample_weight=np.full(40, 2.0))
    twice = BayesianMLPRegressor((), random_state=0, **options).fit(np.r_[x, x], np.r_[y, y])
    exact = (1 + 80 * y.var()) ** -0.5
    for each in (model, twice):
        assert each.model_.posterior["0.weight"].sigma.item() == pytest.approx(exact, rel=0.1)
    assert model.predict(x) == pytest.approx(twice.predict(x), abs=0.2)


@pytest.mark.identities
@pytest.mark.parametrize("class_weight", ["balanced", {0: 1.0, 1: 5.0}, {1: 0.5}], ids=str)
def test_weights_of_classes_are_weights_of_their_rows(class_weight: Any) -> None:
    x, y = examples()
    y[:10] = 0
    weights = np.linspace(1, 2, len(x))
    by_class = BayesianMLPClassifier(**QUICK, class_weight=class_weight).fit(x, y, weights)
    by_row = weights * compute_sample_weight(class_weight, y)
    assert same(by_class, BayesianMLPClassifier(**QUICK).fit(x, y, by_row))
    assert not same(by_class, BayesianMLPClassifier(**QUICK).fit(x, y))
    with pytest.raises(ValueError, match="balanced"):
        BayesianMLPClassifier(class_weight="balanced").partial_fit(x, y, classes=[0, 1])


@pytest.mark.identities
@BOTH
@pytest.mark.parametrize("bad", [-1.0, 0.0, np.nan, [1.0, 2.0]], ids=str)
def test_bad_weights_are_refused(kind: type[Estimator], bad: Any) -> None:
    x, y = examples()
    weights = bad if isinstance(bad, list) else np.full(len(x), bad)
    with pytest.raises(ValueError, match=r"[Ss]ample.weight"):
        kind(**QUICK).fit(x, y, sample_weight=weights)


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.equivalence
@BOTH
@pytest.mark.parametrize("form", [sparse.csr_array, sparse.csc_matrix, sparse.coo_array])
def test_sparse_rows_are_dense_rows(kind: type[Estimator], form: Any) -> None:
    x, y = examples(60)
    x[x < 0.5] = 0
    for weights in (None, np.arange(60) % 2 + 1.0):
        dense = kind(**QUICK, batch_size=25).fit(x, y, weights)
        model = kind(**QUICK, batch_size=25).fit(form(x), y, weights)
        assert same(dense, model, x)
        assert all(np.array_equal(a, b) for a, b in zip(said(model, x), said(model, form(x)), strict=True))


# --- how long --------------------------------------------------------------------------------------------------------


@pytest.mark.learning
@BOTH
def test_early_stopping_keeps_the_best(kind: type[Estimator]) -> None:
    x = np.random.RandomState(0).randn(200, 5)
    y = (x[:, 0] + np.random.RandomState(1).randn(200) > 0).astype(int)
    options: dict[str, Any] = {"early_stopping": True, "n_iter_no_change": 3, "random_state": 0, "max_iter": 60}
    model = kind(**options, temperature=0.01, learning_rate_init=0.1).fit(x, y)
    scores = model.validation_scores_
    assert model.n_iter_ == len(scores) < 60
    assert len(scores) - 1 - int(np.argmax(scores)) == 3
    assert model.best_validation_score_ == max(scores)
    shorter = kind(**{**options, "n_iter_no_change": 60}, temperature=0.01, learning_rate_init=0.1).fit(x, y)
    assert len(shorter.validation_scores_) == 60
    assert shorter.validation_scores_[: len(scores)] == scores


@pytest.mark.learning
@BOTH
def test_a_warm_start_goes_on(kind: type[Estimator]) -> None:
    x, y = examples()
    cold, warm = (kind(**{**QUICK, "max_iter": 30}, warm_start=warm).fit(x, y) for warm in (False, True))
    assert same(cold, warm)
    before = warm.loss_curve_[-1]
    assert same(cold.fit(x, y), fitted(kind, max_iter=30))
    warm.fit(x, y)
    assert warm.n_iter_ == len(warm.loss_curve_) == 60
    assert warm.loss_curve_[30] < before + 1
    assert warm.n_samples_seen_ == len(x)
    assert not same(cold, warm)


@pytest.mark.learning
def test_without_a_number_of_passes_it_converges() -> None:
    x = np.random.RandomState(0).randn(100, 1)
    y = 2 * x[:, 0] + np.random.RandomState(1).randn(100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = BayesianMLPRegressor((), noise=1.0, max_iter=None, random_state=0).fit(x, y)
    exact = (1 + (x**2).sum() * y.var()) ** -0.5
    assert model.model_.posterior["0.weight"].sigma.item() == pytest.approx(exact, rel=0.1)


@pytest.mark.learning
def test_it_warns_where_the_free_energy_still_falls() -> None:
    x = np.array([-1.0, -0.5, 0.5, 1.0] * 5)[:, None]
    with pytest.warns(ConvergenceWarning, match="still falling after 100 passes"):
        BayesianMLPRegressor(random_state=0).fit(x, x[:, 0])


@pytest.mark.learning
def test_it_warns_of_runs_that_are_too_short_to_judge_and_not_by_default() -> None:
    x = np.random.RandomState(0).randn(200, 3)
    y = x @ [1.0, 2.0, 3.0] + 0.1 * np.random.RandomState(1).randn(200)
    for passes in (1, 3, 5, 10, 20):
        with pytest.warns(ConvergenceWarning, match=f"may still be falling after {passes} passes: a larger max_iter"):
            BayesianMLPRegressor(max_iter=passes, random_state=0).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BayesianMLPRegressor(random_state=0).fit(x, y)
        BayesianMLPClassifier(random_state=0).fit(x, y > 0)


@pytest.mark.identities
def test_either_library_knows_the_warning_of_a_run_without_a_number_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Convergence, "_has_stopped", lambda *_: False)
    made = _estimator._Convergence
    monkeypatch.setattr(_estimator, "_Convergence", lambda: made(first=40, most=40))
    x, y = examples()
    for known in (ConvergenceWarning, callbacks.ConvergenceWarning):
        with pytest.warns(known, match="it has not converged"):
            BayesianMLPRegressor(max_iter=None, random_state=0).fit(x, y)


@pytest.mark.identities
@BOTH
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_it_warns_of_inputs_that_are_not_scaled(kind: type[Estimator], factor: float) -> None:
    x, y = examples()
    for rows in (factor * x, sparse.csr_array(factor * x)):
        with pytest.warns(UserWarning, match="root mean square of a feature is .*StandardScaler"):
            kind(**QUICK).fit(rows, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "The free energy may still be falling")
        kind(**QUICK).fit(np.c_[x, np.zeros(len(x)), np.eye(len(x))], y)  # columns that are rarely not 0 are no reason


@pytest.mark.identities
def test_it_prints_some_lines_however_many_passes_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    model = fitted(BayesianMLPClassifier, verbose=True, max_iter=300)
    lines = capsys.readouterr().out.splitlines()
    assert 5 < len(lines) <= 20
    assert len(set(lines)) == len(lines)
    assert lines[0].startswith("Iteration 1, cost = ")
    assert lines[-1] == f"Iteration 300, cost = {model.loss_curve_[-1]:.6g} nats per example"


# --- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.identities
def test_logarithms_of_probabilities_do_not_underflow() -> None:
    x, _ = examples()
    model = fitted(BayesianMLPClassifier)
    assert model.predict_log_proba(x) == pytest.approx(np.log(model.predict_proba(x)))
    far = model.predict_log_proba(1e6 * x)
    assert np.isfinite(far).all()
    assert far.min() < -1000


@pytest.mark.statistical
def test_samples_are_of_the_predictive_distribution() -> None:
    x, _ = examples()
    y = np.stack([x[:, 0], 100 + 10 * x[:, 1]], axis=1)
    model = BayesianMLPRegressor(**{**QUICK, "max_iter": 20}).fit(x, y)
    count = 20_000
    drawn = model.sample_y(x[:2], count, random_state=1)
    assert drawn.shape == (2, 2, count)
    mean = model.predict(x[:2])
    for row in range(2):
        for target in range(2):
            own = drawn[row, target]
            assert_mean(torch.from_numpy(own), float(mean[row, target]), f"row {row}, target {target}")
    assert np.array_equal(model.sample_y(x, 3), model.sample_y(x, 3))
    assert not np.array_equal(model.sample_y(x, 3), model.sample_y(x, 3, random_state=1))
    assert fitted(BayesianMLPRegressor).sample_y(x).shape == (len(x), 1)


@pytest.mark.learning
@pytest.mark.parametrize("noise", ["learnt", "per-input"])
def test_the_noise_begins_with_the_residuals_of_a_line(noise: Any) -> None:
    random = np.random.RandomState(0)
    x = random.randn(300, 3)
    y = 5 * x[:, 0] + 0.5 * random.randn(300)
    model = BayesianMLPRegressor(noise=noise, max_iter=1, learning_rate_init=1e-9, random_state=0).fit(x, y)
    first = np.sqrt(model.predictive(x).aleatoric.numpy())
    if noise == "learnt":  # after the pass it is what the network leaves, which has learnt nothing
        assert first == pytest.approx(np.sqrt(np.mean((y - model.predict(x)) ** 2)), rel=0.1)
    else:
        assert first == pytest.approx(0.5, rel=0.3)


@pytest.mark.learning
def test_the_noise_of_a_stream_is_learnt() -> None:
    random = np.random.RandomState(0)
    model = BayesianMLPRegressor((20,), noise="learnt", random_state=0)
    for _ in range(100):
        x = random.uniform(-2, 2, (50, 1))
        model.partial_fit(x, np.sin(2 * x[:, 0]) + 0.1 * random.randn(50))
    assert np.sqrt(model.predictive([[0.0]]).aleatoric.item()) < 0.2
