"""Pickles and files of the estimators are exact, and files run no code."""

import copy
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.exceptions import NotFittedError

from bayesbackprop import Bayesian, Laplace, LogDensity, save
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from estimators import BOTH, QUICK, Estimator, examples, fitted, said, same
from rewriting import rewrite

X, Y = examples()

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
    model = fitted(kind, prior=LogDensity(_cauchy))  # a pickle holds what a file cannot
    other = copied(model)
    assert same(model, other)
    assert other.get_params() == model.get_params()
    assert isinstance(other.model_, Bayesian)
    before = said(other)
    model.partial_fit(*examples())
    assert all(np.array_equal(a, b) for a, b in zip(before, said(other), strict=True))
    unfitted = copied(kind(sigma=0.3))
    assert vars(unfitted) == vars(kind(sigma=0.3))


def _cauchy(w: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(w.square())


@pytest.mark.identities
@BOTH
def test_a_pickle_holds_the_librarys_format_and_nothing_of_torch(kind: type[Estimator]) -> None:
    model = fitted(kind).partial_fit(*examples())
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
        model = fitted(kind, **parameters)
        model.save(tmp_path / "model")
        again = kind.load(str(tmp_path / "model"))
        assert same(model, again)
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
        (lambda: fitted(BayesianMLPRegressor, prior=LogDensity(_cauchy)), "LogDensity"),
        (lambda: fitted(BayesianMLPRegressor, random_state=np.random.RandomState(0)), "RandomState"),
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
        fitted(BayesianMLPClassifier).partial_fit(*examples()).save(path)
        rewrite(path, change, text)

    return write


def _cut(path: Path) -> None:
    fitted(BayesianMLPClassifier).save(path)
    path.write_bytes(path.read_bytes()[:-1])


# Parameters that came later: a file without them means their defaults.
LATER = {"early_stopping", "validation_fraction", "n_iter_no_change", "warm_start", "class_weight"}
STATE = [
    *sorted(BayesianMLPClassifier().get_params().keys() - LATER),
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
    "a model alone": lambda path: save(fitted(BayesianMLPClassifier).model_, path),
    "the other estimator's": lambda path: fitted(BayesianMLPRegressor).save(path),
    "not JSON": _rewritten(lambda header, tensors: None, "{"),
    "a list": _rewritten(lambda header, tensors: None, "[1]"),
    "a future format": _rewritten(lambda header, tensors: header.update(format=4)),
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
    "a negative square": _changed(lambda _, tensors: tensors["adam.exp_avg_sq.net.0.bias"].fill_(-1)),
    "an absurd count": _changed(lambda data, _: data["state"].update(n_iter_=10**400)),
    "a count that is text": _changed(lambda data, _: data["state"].update(n_samples_seen_="4")),
    "a negative count": _changed(lambda data, _: data["state"].update(_steps=-1)),
    "a curve that is not finite": _changed(lambda data, _: data["state"].update(loss_curve_=[np.inf])),
    "a curve that is text": _changed(lambda data, _: data["state"].update(loss_curve_="x")),
    "draws that are text": _changed(lambda data, _: data["state"].update(draws="5")),
    "a negative sigma": _changed(lambda data, _: data["state"].update(sigma=-1)),
    "classes of a type of gigabytes": _changed(
        lambda data, _: data["state"]["classes_"].update(array="<U400000000", values=["a", "b"])),
    "classes of a long type": _changed(lambda data, _: data["state"]["classes_"].update(array="i4," * 10**6)),
    "classes of bytes": _changed(lambda data, _: data["state"]["classes_"].update(array="V8")),
    "classes that are the same": _changed(lambda data, _: data["state"]["classes_"].update(values=[1, 1])),
    "classes in a table": _changed(lambda data, _: data["state"]["classes_"].update(values=[[0], [1]])),
    "names of other features": _changed(lambda data, _: data["state"].update(
        feature_names_in_={"array": "|O", "values": ["a"]})),
}  # fmt: skip


@pytest.mark.identities
@BOTH
def test_a_file_or_a_pickle_without_what_came_later_has_the_defaults(kind: type[Estimator], tmp_path: Path) -> None:
    model = fitted(kind)
    model.save(tmp_path / "model")
    rewrite(tmp_path / "model", lambda header, _: [header["contents"]["state"].pop(name, None) for name in LATER])
    again = kind.load(tmp_path / "model")
    assert same(model, again)
    assert again.get_params() == model.get_params()
    state = {name: value for name, value in model.__getstate__().items() if name not in {*LATER, "_sha256"}}
    old = kind.__new__(kind)
    old.__setstate__(state)
    assert same(model, old)
    assert old.get_params() == model.get_params()


@pytest.mark.identities
@pytest.mark.parametrize("write", FILES.values(), ids=list(FILES))
def test_a_file_that_does_not_fit_is_refused(write: Callable[[Path], Any], tmp_path: Path) -> None:
    write(tmp_path / "model")
    form = r"^The 'path' parameter of BayesianMLPClassifier.load must be .+\. Got .+ instead\.$"
    with pytest.raises(ValueError, match=form):
        BayesianMLPClassifier.load(tmp_path / "model")


@pytest.mark.identities
@BOTH
def test_the_file_of_the_other_estimator_is_not_called_damaged(kind: type[Estimator], tmp_path: Path) -> None:
    fitted(kind).save(tmp_path / "model")
    other = BayesianMLPRegressor if kind is BayesianMLPClassifier else BayesianMLPClassifier
    said = rf"{other.__name__}\.load must be .* Got .*model, which {kind.__name__}\.load reads, .* instead\.$"
    with pytest.raises(ValueError, match=said) as refused:
        other.load(tmp_path / "model")
    assert "damaged" not in str(refused.value)


@pytest.mark.identities
@pytest.mark.parametrize(
    "change",
    [
        {"_mean": {"array": "<f8", "values": [np.nan]}},
        {"_scale": {"array": "<f8", "values": [0.0]}},
        {"_scale": {"array": "<f8", "values": [1.0, 1.0]}},
        {"_mean": {"array": "<f8", "values": []}},
        {"_mean": {"array": "<U1", "values": ["a"]}},
        {"_mean": 1.0},
        {"_one_dimension": 1},
    ],
)
def test_targets_that_do_not_fit_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    fitted(BayesianMLPRegressor).save(tmp_path / "model")
    rewrite(tmp_path / "model", lambda header, _: header["contents"]["state"].update(change))
    with pytest.raises(ValueError, match=r"^The 'path' parameter of BayesianMLPRegressor.load must be .+ is damaged"):
        BayesianMLPRegressor.load(tmp_path / "model")


@pytest.mark.identities
@BOTH
def test_what_is_not_finite_is_not_written(kind: type[Estimator], tmp_path: Path) -> None:
    model = fitted(kind)
    with torch.no_grad():
        next(model.model_.rho.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match=rf"'model\.rho\S+' parameter of {kind.__name__}\.save must be finite"):
        model.save(tmp_path / "model")
    with pytest.raises(ValueError, match=rf"'sigma' parameter of {kind.__name__} must be"):
        fitted(kind).set_params(sigma=-1).save(tmp_path / "model")  # it would not load
    assert os.listdir(tmp_path) == []


PICKLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a flipped bit": lambda state: state.update(model_=state["model_"][:-1] + bytes([state["model_"][-1] ^ 1])),
    "a model that is cut": lambda state: (state.pop("_sha256"), state.update(model_=state["model_"][:-1])),
    "a model that is text": lambda state: (state.pop("_sha256"), state.update(model_="x")),
    "another count": lambda state: state.update(n_iter_=7),
    "another parameter": lambda state: state.update(sigma=0.5),
    "another checksum": lambda state: state.update(_sha256=1),
    "no count": lambda state: (state.pop("_sha256"), state.pop("n_iter_")),
    "no classes or scale": lambda state: (
        state.pop("_sha256"), state.pop("classes_", None), state.pop("_scale", None)),
    "another name of the checksum": lambda state: state.update(_sha656=state.pop("_sha256")),
    "one attribute more": lambda state: state.update(more_=1),
    "no parameters": lambda state: (state.clear(), state.update(a=1)),
    "another generator": lambda state: state.update(random_state=np.random.RandomState(1)),
}  # fmt: skip


@pytest.mark.identities
@BOTH
@pytest.mark.parametrize("change", PICKLES.values(), ids=list(PICKLES))
def test_a_damaged_pickle_has_one_error(kind: type[Estimator], change: Callable[[dict[str, Any]], Any]) -> None:
    state = fitted(kind, random_state=np.random.RandomState(0)).__getstate__()
    change(state)
    again = kind()
    with pytest.raises(
        ValueError, match=rf"^The 'pickle' parameter of {kind.__name__} must be .* damaged \(.* instead\.$"
    ):
        again.__setstate__(state)
    assert vars(again) == vars(kind())
    for odd in (None, (), [1], 3, {"model_": b""}):
        with pytest.raises(ValueError, match=rf"^The 'pickle' parameter of {kind.__name__} must be"):
            kind().__setstate__(odd)  # type: ignore[arg-type]


@pytest.mark.identities
def test_a_pickle_without_a_checksum_still_loads() -> None:
    model = fitted(BayesianMLPClassifier)
    state = model.__getstate__()
    del state["_sha256"]
    again = BayesianMLPClassifier()
    again.__setstate__(state)
    assert same(model, again)


@pytest.mark.identities
def test_the_good_file_of_these_tests_is_good(tmp_path: Path) -> None:
    _changed(lambda data, tensors: None)(tmp_path / "model")
    assert same(BayesianMLPClassifier.load(tmp_path / "model"), fitted(BayesianMLPClassifier).partial_fit(*examples()))
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

    fitted(BayesianMLPClassifier).save(path)
    for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, never)
    BayesianMLPClassifier.load(path)
