"""What is refused is said, and changes nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bayesbackprop.optim import Adam
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from estimators import BOTH, QUICK, Estimator, examples, fitted, state_of, unchanged

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
    {"early_stopping": 1},
    {"validation_fraction": 0.0},
    {"validation_fraction": 1.0},
    {"n_iter_no_change": 0},
    {"warm_start": "yes"},
    {"max_iter": 1.0},
    {"draws": 0},
]


@pytest.mark.identities
@BOTH
@pytest.mark.parametrize("bad", PARAMETERS, ids=str)
def test_bad_parameters_are_refused_by_fit_and_change_nothing(kind: type[Estimator], bad: dict[str, Any]) -> None:
    model = fitted(kind).set_params(**bad)
    before = state_of(model)
    (name,) = bad
    for learn in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=rf"^The '{name}' parameter of {kind.__name__} must be .+ Got .+ instead"):
            learn(*examples())
        assert unchanged(model, before)
    if name == "draws":
        with pytest.raises(ValueError, match=f"'draws' parameter of {kind.__name__}"):
            model.predict(examples()[0])


X, Y = examples()

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
    model = fitted(kind)
    before = state_of(model)
    with pytest.raises(ValueError, match=r"\w"):
        call(model)
    if isinstance(model, BayesianMLPRegressor):
        model.set_params(noise=BayesianMLPRegressor().noise)
    assert unchanged(model, before)


@pytest.mark.identities
@BOTH
def test_a_training_that_is_interrupted_changes_nothing(kind: type[Estimator], monkeypatch: pytest.MonkeyPatch) -> None:
    start = {"classes": [0, 1]} if kind is BayesianMLPClassifier else {}
    model = kind(**QUICK, batch_size=10).partial_fit(X, Y, **start)
    before, step, left = state_of(model), Adam.step, iter(range(3))

    def interrupted(self: Any, *args: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        step(self, *args)

    monkeypatch.setattr(Adam, "step", interrupted)
    for learn in (model.partial_fit, model.fit):
        with pytest.raises(KeyboardInterrupt):
            learn(X, Y)
        assert unchanged(model, before)
    new = kind(**QUICK)
    with pytest.raises(KeyboardInterrupt):
        new.fit(X, Y)
    assert vars(new) == vars(kind(**QUICK))


@pytest.mark.identities
@pytest.mark.parametrize("classes", [None, []], ids=str)
def test_the_first_part_of_a_stream_needs_all_classes(classes: Any) -> None:
    with pytest.raises(ValueError, match=r"'classes' parameter of BayesianMLPClassifier\.partial_fit must be given at"):
        BayesianMLPClassifier(**QUICK).partial_fit(X, Y, classes=classes)
