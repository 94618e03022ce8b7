"""What can be judged: networks, ensembles and scikit-learn estimators, each with the data that it takes."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn

from bayesbackprop._batches import OPTIONS, ROWS, arguments, labelled, unlabelled
from bayesbackprop._errors import Described, check_count, check_seed, invalid
from bayesbackprop.prediction import Ensemble, JointPredictive, Predictive


class Predictor(Protocol):
    """What can be judged: a :class:`Bayesian`, or anything else that predicts so."""

    def predict(self, *args: Any, draws: int, seed: int | None, **kwargs: Any) -> Predictive:
        """The predictive distribution for the inputs of the network."""


class Estimator(Protocol):
    """A fitted estimator of :mod:`bayesbackprop.sklearn`, which takes rows as scikit-learn does."""

    def predictive(self, X: Any) -> Predictive:  # noqa: N803
        """The predictive distribution of rows, in the units of the targets."""

    def as_tensor(self, y: Any) -> Tensor:
        """Targets as the predictive distribution takes them."""


def is_estimator(model: object) -> TypeGuard[Estimator]:
    """Whether a model takes rows as scikit-learn does; a pipeline has what its last step has."""
    return all(callable(getattr(_last(model), name, None)) for name in ("predictive", "as_tensor"))


def _last(model: Any) -> Any:
    """The last step of a pipeline; any other model itself."""
    steps = getattr(model, "steps", None)
    return steps[-1][1] if isinstance(steps, list) and steps else model


def examples_of(
    model: object,
    data: Any,
    parameter: str,
    owner: str,
    device: torch.device | None = None,
    head: str | int | None = None,
) -> Iterator[tuple[Any, Tensor]]:
    """The batches of ``data`` as ``model`` takes them: as :func:`labelled`, or of the ``(X, y)`` of an estimator."""
    if not is_estimator(model):
        yield from labelled(data, parameter, owner, device, head)
        return
    if not isinstance(data, tuple) or len(data) != 2:
        constraint = "a pair (X, y), as the score of the estimator takes it"
        raise invalid(parameter, owner, constraint, Described(f"a {type(data).__name__}"))
    targets = _last(model).as_tensor(data[1])
    rows = _length(data[0], parameter, owner)
    if rows != len(targets):
        raise invalid(parameter, owner, "a pair (X, y) of as many rows", Described(f"{rows} and {len(targets)}"))
    yield from zip(inputs_of(model, data[0], parameter, owner), targets.split(ROWS), strict=True)


def inputs_of(
    model: object, data: Any, parameter: str, owner: str, device: torch.device | None = None
) -> Iterator[Any]:
    """The inputs of the batches of ``data``: as :func:`unlabelled`, or some rows of an estimator's ``X`` at a time."""
    if not is_estimator(model):
        yield from unlabelled(data, parameter, owner, device)
        return
    x = data[0] if isinstance(data, tuple) and data else data
    rows: Any = getattr(x, "iloc", x)  # of a frame of pandas
    for start in range(0, _length(x, parameter, owner), ROWS):
        yield rows[start : start + ROWS]


def _length(x: Any, parameter: str, owner: str) -> int:
    """How many rows an ``X`` of scikit-learn has."""
    shape = getattr(x, "shape", None)  # a sparse matrix has no length
    length = shape[0] if shape else len(x) if hasattr(x, "__len__") else 0
    if not length:
        raise invalid(parameter, owner, "rows X as the estimator takes them, one at least", x)
    return int(length)


def predicting(
    model: Predictor | Ensemble | Estimator, draws: int, seed: int | None, owner: str, head: str | int | None = None
) -> tuple[Callable[[Any], Predictive], torch.device | None]:
    """What predicts the inputs of a batch by ``model``, and where it wants them; None where it does not say.

    Of a model with several targets, it predicts those of ``head``.
    """
    draws = check_count(owner, draws=draws)["draws"]
    if seed is not None:
        check_seed(owner, seed=seed)
    if not callable(getattr(model, "predict", None)) or isinstance(model, type):
        raise invalid("model", owner, "a Bayesian, or what else has a method predict", model)
    if is_estimator(model):
        last, pipeline = _last(model), cast(Any, model)
        if last is model or len(pipeline.steps) == 1:
            return last.predictive, None
        return lambda rows: last.predictive(pipeline[:-1].transform(rows)), None
    if hasattr(model, "get_params") and hasattr(model, "fit"):
        constraint = "a model that gives distributions (of scikit-learn: an estimator of bayesbackprop.sklearn, or a "
        raise invalid("model", owner, f"{constraint}Pipeline that ends with one)", model)
    predictor: Any = model
    options: dict[str, Any] = {} if isinstance(model, Ensemble) else {"draws": draws, "seed": seed}

    def predict(inputs: Any) -> Predictive:
        args, kwargs = arguments(inputs, owner)
        if kwargs.keys() & OPTIONS:  # names that the network's arguments share with those of predict
            prediction = predictor.predict(inputs=inputs, **options)
        else:
            prediction = predictor.predict(*args, **kwargs, **options)
        if not isinstance(prediction, Predictive):
            got = Described(f"one that gives a {type(prediction).__name__}")
            raise invalid("model", owner, "one whose predict gives a Predictive", got)
        return prediction[head] if isinstance(prediction, JointPredictive) and head is not None else prediction

    return predict, _device(model)


def _device(model: Any) -> torch.device | None:
    """Where a model wants its inputs; None where it does not say."""
    if isinstance(model, Ensemble):
        return next(iter(model.weights.values())).device
    if isinstance(model, nn.Module):
        return next((parameter.device for parameter in model.parameters()), None)
    return _device(model.model) if hasattr(model, "model") else None
