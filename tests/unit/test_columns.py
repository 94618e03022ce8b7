"""Columns: files of every kind are read, types are guessed, and the encoding is scikit-learn's own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pytest
from sklearn.compose import ColumnTransformer

from bayesbackprop._columns import Column, guess, learn, read_table

pytestmark = pytest.mark.identities

N = 60
PLAIN = "name,size\nAnn,1.5\nBo,2\n"


def messy() -> pd.DataFrame:
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "row": np.arange(N),
            "customer_id": random.permutation(N) + 500,
            "age": random.normal(40, 9, N),
            "score": [str(number) for number in random.integers(0, 9, N)],
            "town": random.choice(["Bonn", "Kiel", "Ulm"], N),
            "member": random.random(N) < 0.5,
            "since": pd.date_range("2020-01-01", periods=N),
            "born": pd.date_range("1970-05-17", periods=N).strftime("%d.%m.%Y"),
            "comment": [f"note {number}" for number in range(N)],
            "same": "x",
            "empty": None,
            "waited": pd.to_timedelta(random.integers(0, 99, N), "h"),
        }
    )
    frame.loc[::7, "age"], frame.loc[::9, "town"], frame.loc[3, "score"] = np.nan, None, "?"
    frame.loc[0, "town"] = "Rom"
    return frame


def learnt(frame: pd.DataFrame) -> list[Column]:
    return learn([guess(frame[name]) for name in frame], frame, "test")


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        PLAIN.encode(),
        PLAIN.encode("utf-8-sig"),
        PLAIN.encode("utf-16"),
        PLAIN.replace(",", ";").encode(),
        PLAIN.replace(",", "\t").encode(),
        PLAIN.replace(",", " | ").encode(),
        PLAIN.replace(",", ";").replace("1.5", "1,5").encode(),
        PLAIN.replace("\n", "\r\n").encode(),
        ("\n" + PLAIN + "\n").encode(),
        PLAIN.replace("Ann", '"Ann"').encode(),
    ],
)
def test_every_form_of_text_is_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(content)
    frame, notes = read_table(tmp_path / "table.csv", "test")
    assert not notes
    assert [name.strip() for name in frame] == ["name", "size"]
    assert frame["name"].str.strip().tolist() == ["Ann", "Bo"]
    assert pd.to_numeric(frame["size"]).tolist() == [1.5, 2.0]


def test_latin_1_is_read_and_said(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes("Ort\nKöln\n".encode("latin-1"))
    frame, notes = read_table(str(tmp_path / "table.csv"), "test")
    assert frame["Ort"].tolist() == ["Köln"]
    assert "not in UTF-8" in notes[0]


def test_frames_and_parquet_are_read_alike(tmp_path: Path) -> None:
    frame = messy()
    frame.drop(columns="waited").to_parquet(tmp_path / "table")  # whatever its name
    kinds = {name: guess(frame[name]).kind for name in frame if name != "waited"}
    for table in (tmp_path / "table", polars.from_pandas(frame.drop(columns="waited"))):
        found, _ = read_table(table, "test")
        assert {name: guess(found[name]).kind for name in found} == kinds


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "which is empty"),
        (b"\n \n", "which is empty"),
        (b"a,b\n", "without any"),
        (b"5.1,3.5,setosa\n4.9,3.0,setosa\n", "holds numbers and no names of columns"),
        (b"1,2\n3,4\n", "holds numbers and no names of columns"),
        (b"a,b,a\n1,2,3\n", r"\['a'\] twice"),
        (b"a,b\n1,2\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
        (b"a,b\n1,\0\n", "which is no text"),
        (b"PAR1 and no more", "csv, tsv or parquet file"),
    ],
)
def test_what_is_no_table_is_said(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(content)
    with pytest.raises(ValueError, match=f"The 'table' parameter of test must be .*{says}"):
        read_table(tmp_path / "table.csv", "test")


def test_years_can_be_names_of_columns(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("country,2019,2020\nPeru,1,2\n")
    assert list(read_table(tmp_path / "table.csv", "test")[0]) == ["country", "2019", "2020"]


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"The 'table' parameter of test must be a csv.*which is a folder"):
        read_table(tmp_path, "test")


def test_words_for_nothing_stay_words_and_are_missing_numbers_and_dates(tmp_path: Path) -> None:
    rows = ["5,2020-01-01,None", "NA,null,NA", "6,2020-01-02,", "null,None,null", "7,2020-01-05,None"]
    (tmp_path / "table.csv").write_text("\n".join(["n,day,garage", *rows, ""]))
    frame, _ = read_table(tmp_path / "table.csv", "test")
    assert frame.to_csv(index=False, lineterminator="\n") == (tmp_path / "table.csv").read_text()
    number, day, garage = (guess(frame[name]) for name in frame)
    assert (number.kind, number.note) == ("number", "taken as missing: NA, null")
    np.testing.assert_array_equal(number.read(frame["n"], "test"), [5, np.nan, 6, np.nan, 7])
    days = day.read(frame["day"], "test")
    np.testing.assert_array_equal(days - days[0], [0, np.nan, 1, np.nan, 4])
    assert (garage.kind, garage.note) == ("category", "values: 3; missing: 1")
    assert guess(pd.Series(["NA", "None", None] * 5, name="x")).kind == "category"


def test_decimal_commas_beside_missing_numbers(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a;b\n1,5;x\nNA;y\n")
    assert read_table(tmp_path / "table.csv", "test")[0]["a"].tolist() == ["1.5", "NA"]


@pytest.mark.parametrize("table", [None, 3, [1], {"a": [1]}, pd.DataFrame, np.ones((2, 2)), pd.Series([1])])
def test_what_is_no_frame_is_refused(table: Any) -> None:
    with pytest.raises(ValueError, match="The 'table' parameter of test must be a DataFrame"):
        read_table(table, "test")


# --- guessing --------------------------------------------------------------------------------------------------------


def test_types_are_guessed_and_said(tmp_path: Path) -> None:
    frame = messy()
    expected = {
        "row": ("dropped", "it counts the rows"),
        "customer_id": ("dropped", "an identifier"),
        "age": ("number", "missing: 9"),
        "score": ("number", "taken as missing: ?"),
        "town": ("category", "values: 4; missing: 6"),
        "member": ("category", "values: 2"),
        "since": ("date", "in days"),
        "born": ("date", "read as %d.%m.%Y"),
        "comment": ("dropped", "60 of 60 values differ"),
        "same": ("dropped", "always the same"),
        "empty": ("dropped", "no values"),
        "waited": ("number", "complete"),
    }
    frame.to_csv(tmp_path / "table.csv", index=False)
    as_text, _ = read_table(tmp_path / "table.csv", "test")
    for table, names in ((frame, list(expected)), (as_text, list(expected)[:-1])):
        for name in names:
            kind, note = expected[name]
            found = guess(table[name])
            assert (found.name, found.kind) == (name, kind)
            assert note in found.note


def test_a_declared_category_stays_one() -> None:
    values = pd.Series([f"n{number}" for number in range(N)], name="name")
    assert guess(values).kind == "dropped"
    assert guess(values.astype("category")).kind == "category"


def test_numbers_that_are_all_different_are_no_identifiers() -> None:
    assert guess(pd.Series(np.arange(2000, 2000 + N), name="year")).kind == "number"
    assert guess(pd.Series(np.linspace(0, 1, N), name="grid")).kind == "number"


def test_too_many_other_words_make_no_numbers() -> None:
    values = pd.Series(["3", "4", "many", "few"] * 10, name="n")
    assert guess(values).kind == "category"


def test_days_of_all_years_are_counted() -> None:
    """Nanoseconds in 64 bits reach from 1677 to 2262."""
    values = pd.Series(["1970-01-01", "9999-12-31", "0001-01-01", None] * 5, name="day")
    column = guess(values)
    assert column.kind == "date"
    expected = [0, 2932896, -719162]  # by datetime.date.toordinal
    assert column.read(values, "test")[:3].tolist() == expected
    assert np.isnan(column.read(values, "test")[3])
    assert column.read(pd.Series(np.array(values[:3], dtype="datetime64[s]")), "test").tolist() == expected


@pytest.mark.parametrize(
    ("words", "form", "numbers"),
    [
        (["2,172.0", "950.5"], "1,234.5", [2172, 950.5]),
        (["1,234,567", "3,456"], "1,234.5", [1234567, 3456]),
        (["1,200", "950", "-3,000"], "1,234.5", [1200, 950, -3000]),
        (["$272.06", "-$1,272.06", "$ 5"], "$1,234.5", [272.06, -1272.06, 5]),
        (["$1,200", "$3,950"], "$1,234.5", [1200, 3950]),
        (["£7", "£6"], "£1,234.5", [7, 6]),
        (["1.200,50", "950", "7,1"], "1.234,5", [1200.5, 950, 7.1]),
        (["5 €", "12,50 €"], "€1.234,5", [5, 12.5]),
        (["1,5", "0,500"], "1.234,5", [1.5, 0.5]),
    ],
)
def test_numbers_with_one_meaning_are_read_and_said(words: list[str], form: str, numbers: list[float]) -> None:
    values = pd.Series([*(words * 9), None, "NA"], name="price")
    column = guess(values)
    assert (column.kind, column.form) == ("number", form)
    assert column.note == f"written as {form}; missing: 1; taken as missing: NA"
    np.testing.assert_array_equal(column.read(values, "test"), [*(numbers * 9), np.nan, np.nan])
    np.testing.assert_array_equal(column.read(values[:1], "test"), numbers[:1])  # alone it may have two meanings
    plain = pd.Series(np.array(numbers, dtype=float), name="price")
    np.testing.assert_array_equal(column.read(plain, "test"), numbers)
    np.testing.assert_array_equal(guess(plain).read(pd.Series(words), "test"), numbers)


@pytest.mark.parametrize(
    ("words", "marks"),
    [
        ([f"{number},250" for number in range(1, N)], "','"),
        ([f"€{number}.250" for number in range(1, N)], "'€'"),
        ([f"${number}.5" for number in range(1, N)] + ["€3.5"], "'$' and '€'"),
        ([f"{number} %" for number in range(1, N)], "'%' and ' '"),
        (["1,250", *map(str, range(2000, 2000 + N)), *(f"3,{number}" for number in range(300, 399))], "','"),
    ],
)
def test_numbers_of_more_than_one_meaning_are_said(words: list[str], marks: str) -> None:
    column = guess(pd.Series(words, name="price"))
    assert column.kind == "dropped"
    remedy = "(write them as plain numbers, such as 1200.50)"
    assert column.note == f"numbers with {marks} {remedy}: {len(words)} of {len(words)} values differ"


def test_cells_that_are_no_numbers_are_missing_and_said() -> None:
    column = guess(pd.Series(np.arange(N) / 7, name="size"))
    notes: list[str] = []
    read = column.read(pd.Series(["1", "?", "1,200.5", "2", "x", "?", "", "3", "n/a", "oh", "4"]), "test", notes)
    np.testing.assert_array_equal(read, [1, np.nan, 1200.5, 2, *[np.nan] * 3, 3, np.nan, np.nan, 4])
    cells = "'?' in row 2, 'x' in row 5, '?' in row 6 and 1 more; rows count from 1 below the header"
    assert notes == [f"'size' holds numbers, as in training, but for {cells}. These cells count as missing."]


def test_words_among_dates_are_missing_but_other_forms_are_refused() -> None:
    column = guess(pd.Series([f"{day:02}/12/2024" for day in range(1, 29)], name="day"))
    notes: list[str] = []
    read = column.read(pd.Series(["02/12/2024", "?", "03/12/2024"]), "test", notes)
    assert read[2] - read[0] == 1
    assert np.isnan(read[1])
    assert "but for '?' in row 2" in notes[0]
    with pytest.raises(ValueError, match="Got '12/31/2024' in row 3 below the header instead"):
        column.read(pd.Series(["02/12/2024", "03/12/2024", "12/31/2024"]), "test")


# --- encoding --------------------------------------------------------------------------------------------------------


@pytest.mark.equivalence
def test_the_encoding_is_that_of_scikit_learn_bit_for_bit() -> None:
    """On the rows of training, and on others with unseen categories and further missing values."""
    frame = messy()
    used = [column for column in learnt(frame) if column.kind != "dropped"]
    other = frame.copy()
    other.loc[5:8, "town"], other.loc[1:4, ["age", "since"]] = "Oslo", None
    read, new = (
        pd.DataFrame({column.name: column.read(each[column.name], "test") for column in used})
        for each in (frame, other)
    )
    parts = [(column.name, column.transformer(), [column.name]) for column in used]
    fitted = ColumnTransformer(parts).fit(read)
    for rows in (read, new):
        ours = [column.encoded(rows[column.name]) for column in used]
        assert [part.shape[1] for part in ours] == [column.inputs for column in used]
        np.testing.assert_array_equal(np.concatenate(ours, axis=1), fitted.transform(rows))


def test_what_each_kind_becomes() -> None:
    columns = {column.name: column for column in learnt(messy())}
    age, town = columns["age"], columns["town"]
    values = age.encoded(np.array([np.nan, age.median]))
    assert values[0, 0] == values[1, 0]
    assert values[0, 1] > 0 > values[1, 1]
    assert town.rare == ("Rom",)
    words = pd.Series(["Rom", "Oslo", "Bonn", None], dtype=object)
    rare, unseen, common, missing = town.encoded(words)
    assert (rare == unseen).all()
    assert {tuple(row) for row in (rare, common, missing)} == {tuple(row) for row in np.eye(5)[[4, 1, 0]]}
    assert town.unseen(words) == ["Oslo"]
    days = columns["born"].read(pd.Series(["18.05.1970", None]), "test")
    assert days[0] == 137
    assert np.isnan(days[1])


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("age", ["forty", "3"], "numbers"),
        ("age", [True, False], "numbers"),
        ("age", [np.inf, 1.0], "numbers"),
        ("score", ["unknown"], "numbers"),
        ("since", ["soon"], "dates"),
        ("born", ["2020-01-01"], "dates"),
        ("town", [1, 2], "text"),
        ("member", [0, 1], "text"),
    ],
)
def test_a_type_that_has_changed_is_refused(name: str, values: list[Any], expected: str) -> None:
    (column,) = [column for column in learnt(messy()) if column.name == name]
    with pytest.raises(ValueError, match=f"one whose column '{name}' holds {expected}.*as in training"):
        column.read(pd.Series(values), "test")
    column.read(messy()[name], "test")
    column.read(pd.Series([None, None], dtype=object), "test")


def test_a_column_goes_through_json() -> None:
    for column in learnt(messy()):
        assert Column.from_json(json.loads(json.dumps(column.to_json()))) == column


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "code"},
        {"name": 3},
        {"values": [3]},
        {"mean": [1.0, 2.0, 3.0], "scale": [1.0, 1.0, 1.0]},
        {"mean": ["x"]},
        {"mean": [float("nan"), 0.0]},
        {"scale": [0.0, 1.0]},
        {"scale": [1.0]},
        {"median": None},
        {"values": ["x"]},
        {"surprise": 1},
    ],
)
def test_a_column_that_no_fit_leaves_is_refused(change: dict[str, Any]) -> None:
    (column,) = [column for column in learnt(messy()) if column.name == "age"]
    with pytest.raises((TypeError, ValueError)):
        Column.from_json(json.loads(json.dumps(column.to_json() | change)))
