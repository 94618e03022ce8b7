"""Tables: a model of each kind is fitted, judged, saved and loaded, and every mistake is answered."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pytest
from sklearn.exceptions import ConvergenceWarning

from bayesbackprop._files import read, write
from bayesbackprop.sklearn import BayesianMLPRegressor
from bayesbackprop.tables import Kind, TableModel, fit_table

N = 120
# Of each kind a column, and what a prediction adds.
TARGETS: dict[Kind, str] = {"regression": "price", "classification": "sold", "counts": "visits"}
OF_NUMBERS = ["mean", "sd", "q05", "q50", "q95", "epistemic"]
ADDED = {"regression": OF_NUMBERS, "counts": OF_NUMBERS}
ADDED["classification"] = ["predicted", "p_no", "p_yes", "entropy", "epistemic"]


@cache
def table() -> pd.DataFrame:
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "size": random.normal(80, 20, N).round(1),
            "town": random.choice(["Bonn", "Kiel", "Ulm"], N),
            "built": pd.date_range("1990-01-01", periods=N, freq="30D").strftime("%Y-%m-%d"),
            "comment": [f"note {number}" for number in range(N)],
        }
    )
    frame["price"] = 3 * frame["size"] + 40 * (frame["town"] == "Kiel") + random.normal(0, 5, N)
    frame["visits"] = random.poisson(np.exp(frame["size"] / 40))
    frame["sold"] = np.where(frame["price"] > 250, "yes", "no")
    frame.loc[::10, "size"] = np.nan
    return frame


def made(kind: Kind = "regression", frame: Any = None, **options: Any) -> TableModel:
    others = [name for of, name in TARGETS.items() if of != kind]
    chosen: Any = {"kind": kind, "drop": others, "epochs": 8, "draws": 10, **options}
    return fit_table(table() if frame is None else frame, TARGETS[kind], **chosen)


@cache
def model(kind: Kind = "regression") -> TableModel:
    return made(kind)


@pytest.mark.identities
@pytest.mark.parametrize("kind", TARGETS)
def test_predictions_are_added_and_a_file_gives_the_same_bit_for_bit(kind: Kind, tmp_path: Path) -> None:
    model(kind).save(tmp_path / "model.bbb")
    again = TableModel.load(tmp_path / "model.bbb")
    found = model(kind).predict(table())
    pd.testing.assert_frame_equal(again.predict(table()), found, check_exact=True)
    assert list(found) == [*table(), *ADDED[kind]]
    pd.testing.assert_frame_equal(found[list(table())], table())
    assert (again.columns, again.sentences, again.notes) == (
        model(kind).columns,
        model(kind).sentences,
        model(kind).notes,
    )
    assert repr(again).split("\n\n")[0] == repr(model(kind)).split("\n\n")[0]


@pytest.mark.identities
def test_numbers_agree_with_the_estimator() -> None:
    found, x = model().predict(table()), model()._inputs(table(), "test", [])
    prediction = model().estimator.predictive(x)
    np.testing.assert_array_equal(found["mean"], prediction.mean[:, 0])
    np.testing.assert_allclose(found["sd"] ** 2, (prediction.aleatoric + prediction.epistemic)[:, 0])
    np.testing.assert_allclose(found["epistemic"] ** 2, prediction.epistemic[:, 0])
    assert (found["q05"] < found["q50"]).all()
    assert (found["q50"] < found["q95"]).all()


@pytest.mark.identities
def test_classes_agree_with_their_probabilities() -> None:
    found = model("classification").predict(table())
    np.testing.assert_allclose(found["p_yes"] + found["p_no"], 1, rtol=4 * np.finfo(np.float32).eps)  # of the network
    assert (found["predicted"] == np.where(found["p_yes"] > found["p_no"], "yes", "no")).all()
    probs = found[["p_no", "p_yes"]].to_numpy()
    np.testing.assert_allclose(found["entropy"], -(probs * np.log(probs)).sum(1), atol=1e-6)
    assert (found["epistemic"] <= found["entropy"] + 1e-6).all()


@pytest.mark.identities
def test_counts_have_whole_quantiles() -> None:
    found = model("counts").predict(table())
    assert (found[["q05", "q50", "q95"]] % 1 == 0).all(axis=None)
    assert (found["q05"] >= 0).all()


@pytest.mark.equivalence
def test_a_row_does_not_depend_on_those_beside_it() -> None:
    whole = model().predict(table())
    pd.testing.assert_frame_equal(model().predict(table()[5:6]), whole[5:6], check_exact=False, rtol=1e-5)


@pytest.mark.equivalence
def test_every_source_of_a_table_gives_the_same_model(tmp_path: Path) -> None:
    table().to_csv(tmp_path / "table.csv", index=False)
    table().to_parquet(tmp_path / "table.parquet")
    expected = model().predict(table())[OF_NUMBERS]
    for source in (tmp_path / "table.csv", str(tmp_path / "table.parquet"), polars.from_pandas(table())):
        found = made(frame=source).predict(source)
        assert isinstance(found, polars.DataFrame) is isinstance(source, polars.DataFrame)
        found = found.to_pandas() if isinstance(found, polars.DataFrame) else found
        pd.testing.assert_frame_equal(found[OF_NUMBERS], expected, check_exact=True)


@pytest.mark.identities
def test_the_seed_decides_and_the_index_of_a_frame_stays() -> None:
    shifted = table().set_index(table().index + 1000)
    found = made().predict(shifted)
    assert found.index.equals(shifted.index)
    np.testing.assert_array_equal(found["mean"], model().predict(table())["mean"])
    assert (made(seed=1).predict(table())["mean"] != found["mean"].to_numpy()).any()


@pytest.mark.identities
def test_held_out_rows_are_not_trained_on() -> None:
    """Whatever they hold: the model is the same."""
    verdict = model().comparison
    assert verdict is not None
    held_out = verdict.verdicts["Bayesian network"].examples
    assert held_out == N // 5
    order = np.random.default_rng(0).permutation(N)
    changed = table().copy()
    changed.loc[order[-held_out:], ["price", "size"]] *= 3
    np.testing.assert_array_equal(made(frame=changed).predict(table())["mean"], model().predict(table())["mean"])


@pytest.mark.learning
def test_the_verdict_says_what_is_so() -> None:
    """A product of two columns is for the network alone; noise is for nobody."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.normal(size=(600, 2)), columns=["a", "b"])
    frame["product"] = frame["a"] * frame["b"] + random.normal(0, 0.1, 600)
    frame["noise"] = random.normal(size=600)
    assert "Worth it" in fit_table(frame, "product", drop=["noise"], epochs=60).sentences[0]
    assert "Not worth it" in fit_table(frame, "noise", drop=["product"], epochs=60).sentences[0]


@pytest.mark.identities
def test_the_page_holds_the_verdict_then_the_picture_then_the_tables(tmp_path: Path) -> None:
    for kind in TARGETS:
        model(kind).save_html(tmp_path / "page.html", "A <page>")
        text = (tmp_path / "page.html").read_text()
        assert "A &lt;page&gt;" in text
        places = [text.index(part) for part in ("<p>", "<svg", "<table>", "comment")]
        assert places == sorted(places)
        assert not re.findall(r"(?:src|href)=[\"']?http", text)
    assert "Kiel" not in repr(model())
    assert "<table>" in model()._repr_html_()


@pytest.mark.identities
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 1], "classification"),
        ([1.0, 2.0, 3.0], "classification"),
        (["1", "2", "3"], "classification"),
        ([True, False], "classification"),
        (["a", "b"], "classification"),
        (list(range(30)), "regression"),
        ([0.5, 1.0], "regression"),
        (["0.5", "1.0"], "regression"),
    ],
)
def test_the_kind_is_guessed_and_said(values: list[Any], kind: str) -> None:
    frame = pd.DataFrame({"x": np.linspace(0, 1, 60), "y": values * (60 // len(values))})
    found = fit_table(frame, "y", epochs=1, draws=2)
    assert found.kind == kind
    assert f"'y' is taken for {kind}" in repr(found)
    assert "taken for" not in " ".join(fit_table(frame, "y", kind=found.kind, epochs=1, draws=2).notes)


@pytest.mark.identities
def test_rows_without_a_target_are_left_out_and_said() -> None:
    frame = table().copy()
    frame["price"] = frame["price"].astype(str)
    frame.loc[3, "price"], frame.loc[4, "price"] = "?", None
    assert "2 rows without 'price' are left out." in made(frame=frame).notes


@pytest.mark.identities
def test_words_for_nothing_are_no_class_of_numbers() -> None:
    found = fit_table(with_target(["0", "1", "NA", "1"] * 5), "y", epochs=1, draws=2)
    assert found.kind == "classification"
    assert found.estimator.classes_.tolist() == ["0", "1"]
    assert "5 rows without 'y' are left out." in found.notes


@pytest.mark.identities
def test_a_warning_speaks_of_epochs() -> None:
    with pytest.warns(ConvergenceWarning, match="after 1 passes: more epochs would help") as said:
        fit_table(with_target(np.arange(20) / 2), "y", epochs=1, draws=2)
    assert said[0].filename == __file__


@pytest.mark.equivalence
def test_money_is_read_and_said() -> None:
    plain = pd.DataFrame({"x": np.linspace(900, 1100, 20), "y": np.arange(990, 1010) + 0.5})
    money = pd.DataFrame({name: [f"${value:,}" for value in plain[name]] for name in plain})
    found = fit_table(money, "y", epochs=1, draws=2)
    assert "'y' is written as $1,234.5; predictions are plain numbers." in found.notes
    expected = fit_table(plain, "y", epochs=1, draws=2).predict(plain)[OF_NUMBERS]
    for rows in (plain, money):
        pd.testing.assert_frame_equal(found.predict(rows)[OF_NUMBERS], expected, check_exact=True)


def with_target(values: Any, n: int = 20) -> pd.DataFrame:
    return pd.DataFrame({"x": np.linspace(0, 1, n), "y": values})


@pytest.mark.identities
@pytest.mark.parametrize(
    ("frame", "options", "says"),
    [
        (with_target(1.0), {"target": "z"}, r"one of the columns \['x', 'y'\]. Got 'z'"),
        (with_target(1.0), {"drop": ["z"]}, r"one of the columns \['x', 'y'\]. Got 'z'"),
        (with_target(1.0), {"drop": ["y"]}, "other columns than the target"),
        (with_target(1.0), {}, "at least two different values"),
        (with_target("a"), {}, "at least two different values"),
        (with_target(None), {}, "where all are missing"),
        (with_target([1.0], n=1), {}, "at least two different values"),
        (with_target([1.0, 2.5, 3.0], n=3), {}, "at least 10 rows that have a target. Got 3"),
        (with_target(pd.date_range("2020", periods=20)), {}, "which holds dates"),
        (with_target([f"n{i}" for i in range(20)]), {}, "at most 100 classes"),
        (with_target(np.arange(20) / 2), {"kind": "counts"}, "a column of counts. Got 'y' with 0.5"),
        (with_target(np.arange(20) - 1), {"kind": "counts"}, "a column of counts. Got 'y' with -1.0"),
        (with_target(["a", "b"] * 10), {"kind": "regression"}, "a column of numbers. Got 'y' with 'a'"),
        (
            with_target([f"{n},250" for n in range(1, 21)]),
            {},
            r"which look like numbers with ',' \(write them as plain numbers, such as 1200.50\)",
        ),
        (
            with_target([f"{n} %" for n in range(20)]),
            {"kind": "regression"},
            "'0 %', which looks like numbers with",
        ),
        (with_target(np.arange(20) / 2), {"kind": "clustering"}, "Got 'clustering'"),
        (with_target(np.arange(20) / 2), {"held_out": 0}, "leaves rows"),
        (with_target(np.arange(20) / 2), {"held_out": 1.0}, "leaves rows"),
        (with_target(np.arange(20) / 2), {"drop": ["x"]}, "'x': as asked"),
        (pd.DataFrame({"y": np.arange(20) / 2}), {}, "no other column"),
    ],
)
def test_what_cannot_be_fitted_is_said(frame: pd.DataFrame, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"The '.*' parameter of fit_table must be .*{says}"):
        fit_table(frame, **{"target": "y", "epochs": 1, **options})


@pytest.mark.identities
def test_a_class_of_one_row_is_trained_on() -> None:
    frame = with_target(["a", "b"] * 9 + ["c", "a"])
    for seed in range(5):
        assert fit_table(frame, "y", epochs=1, seed=seed).estimator.classes_.tolist() == ["a", "b", "c"]


@pytest.mark.identities
def test_what_is_not_as_in_training_is_said() -> None:
    with pytest.warns(UserWarning, match=r"training had not are ignored: \['new'\]"):
        model().predict(table().assign(new=1))
    with pytest.warns(UserWarning, match="not seen 'Oslo' in 'town'"):
        model().predict(table().assign(town="Oslo"))
    with pytest.raises(ValueError, match=r"with the columns .*Got one without \['size', 'town'\]"):
        model().predict(table().drop(columns=["size", "town"]))
    with pytest.raises(ValueError, match=r"column 'size' holds numbers, as in training. Got 'large'"):
        model().predict(table().assign(size="large"))
    sizes = table()["size"].astype(object)
    sizes[7] = "?"
    with pytest.warns(UserWarning, match="'size' holds numbers, as in training, but for '[?]' in row 8"):
        found = model().predict(table().assign(size=sizes))
    assert (
        found["mean"][7] == model().predict(table().assign(size=table()["size"].where(table().index != 7)))["mean"][7]
    )
    model().predict(table()[["size", "town", "built"]])  # the target and what was dropped may be missing


@pytest.mark.identities
def test_added_columns_never_replace_others() -> None:
    with pytest.warns(UserWarning, match="ignored"):
        found = model().predict(table().assign(mean=7))
    assert (found["mean"] == 7).all()
    assert list(found)[-6:] == [f"predicted_{name}" for name in OF_NUMBERS]


@pytest.mark.identities
def test_files_that_hold_no_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    model().save(path)
    file = read(path, None, "test")
    assert BayesianMLPRegressor.load(path).n_features_in_ == sum(column.inputs for column in model().columns)
    described: dict[str, Any] = file.contents["table"]
    for change in (
        {"kind": "classification"},
        {"kind": "code"},
        {"kind": "counts"},
        {"target": 3},
        {"draws": 0},
        {"draws": "3"},
        {"columns": []},
        {"columns": [*described["columns"][:-1], {"name": "x"}]},
        {"notes": 3},
    ):
        write(path, file.kind, file.tensors, {**file.contents, "table": {**described, **change}})
        with pytest.raises(ValueError, match=r"parameter of .*load must be"):
            TableModel.load(path)
    model().estimator.save(path)
    with pytest.raises(ValueError, match=r"a file that `bbb fit` or TableModel.save wrote. Got .*which has no table"):
        TableModel.load(path)


@pytest.mark.identities
def test_a_loaded_model_has_no_page(tmp_path: Path) -> None:
    model().save(tmp_path / "model")
    with pytest.raises(ValueError, match="one that was just fitted"):
        TableModel.load(tmp_path / "model").save_html(tmp_path / "page.html")
