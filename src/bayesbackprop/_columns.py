"""Columns of tables: how a table is read, what each column is taken for, and how it becomes inputs of a network."""

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from bayesbackprop._errors import Described, invalid
from bayesbackprop._files import check_number

try:
    import pandas as pd
    from pandas.api.types import is_bool_dtype, is_complex_dtype, is_datetime64_any_dtype, is_numeric_dtype
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler
except ImportError as error:
    needs = 'bayesbackprop.tables needs pandas and scikit-learn: pip install "bayesbackprop[tables]"'
    raise ImportError(needs) from error

__all__ = ["Column", "Frame", "guess", "learn", "marks_in", "numbers_of", "pd", "read_table", "words_of"]

ColumnKind = Literal["number", "date", "category", "dropped"]
Values = Any  # a pandas.Series: pandas has no annotations
Frame = Any  # a pandas.DataFrame

# Text of more values than this is no category if more than half of its rows differ.
_CATEGORIES = 10
# A column is one of numbers if at most this share of its values are other words, and these are few.
_ODD, _ODD_WORDS = 0.1, 5
# Categories with fewer rows, and those beyond so many, share one input, to which unseen ones go as well.
_RARE, _COMMON = 3, 50
_MISSING = "(missing)"
# Words that stand for a missing number or date, however many there are. In a text column they are words.
_ABSENT = frozenset({"na", "n/a", "#n/a", "nan", "null", "none"})
# How dates are written; the first form that fits all values is taken.
_DATES = ("ISO8601", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")
# Space, and a whole number or one with a decimal comma.
_WITH_COMMA = r"\s*[-+]?\d+(,\d+)?\s*"
# What people write around and into numbers, which are no numbers with it.
_MARKS = "$€£¥%,' "
# How numbers with thousands separators are written, as an example and as what fits; and a sign of money beside them.
_POINT, _COMMA = "1,234.5", "1.234,5"
_WRITTEN = {
    _POINT: r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?",
    _COMMA: r"(?:[1-9]\d{0,2}(?:\.\d{3})+|\d+)(?:,\d+)?",
}
_MONEY = "$€£"


# --- reading ---------------------------------------------------------------------------------------------------------


def read_table(table: Any, owner: str) -> tuple[Frame, list[str]]:
    """A table as a ``pandas.DataFrame`` whose columns have names, and what there is to say of how it was read.

    It is a frame of pandas, polars or whatever else has ``to_pandas``, or the path of a parquet file or of text. The
    values of a text file stay text: what they are is guessed later, and a table that is written again is as it was.
    """
    notes: list[str] = []
    if isinstance(table, str | os.PathLike):
        frame, name = _from_file(Path(table), notes, owner), os.fspath(table)
    elif not isinstance(table, type) and callable(getattr(table, "to_pandas", None)):
        frame, name = table.to_pandas(), "a table"
    else:
        frame, name = table, "a table"
    if not isinstance(frame, pd.DataFrame):
        raise invalid("table", owner, "a DataFrame of pandas or polars, or the path of a csv or parquet file", table)
    if frame.empty:
        raise invalid("table", owner, "a table with a header and rows", Described(f"{name} without any"))
    frame = frame.set_axis([str(each).strip() for each in frame.columns], axis=1)
    if twice := sorted(set(frame.columns[frame.columns.duplicated()])):
        raise invalid("table", owner, "a table whose columns have different names", Described(f"{twice} twice"))
    return frame.reset_index(drop=True), notes


def _from_file(path: Path, notes: list[str], owner: str) -> Frame:
    if path.is_dir():
        raise invalid(
            "table", owner, "a csv, tsv or parquet file with a header", Described(f"{path}, which is a folder")
        )
    content = path.read_bytes()
    try:
        if content[:4] == b"PAR1":
            return pd.read_parquet(io.BytesIO(content))
        text = _decoded(content, notes)
        first = next((line for line in text.splitlines() if line.strip()), "")
        if not first or "\0" in text:
            raise ValueError("which is no text" if first else "which is empty")
        names = {separator: next(csv.reader([first], delimiter=separator)) for separator in ",;\t|"}
        separator = max(names, key=lambda each: len(names[each]))
        if _is_data(names[separator]):
            raise ValueError(f"whose first line, {first[:60]!r}, holds numbers and no names of columns")
        options: Any = {"header": None, "dtype": str, "keep_default_na": False, "na_values": [""]}
        frame = pd.read_csv(io.StringIO(text), sep=separator, skipinitialspace=True, **options)
    except (ValueError, OverflowError, OSError) as error:  # pandas' and pyarrow's own are such
        got = Described(f"{path}, {str(error).strip()}")
        raise invalid("table", owner, "a csv, tsv or parquet file with a header", got) from error
    header = [f"Unnamed: {number}" if pd.isna(name) else name for number, name in enumerate(frame.iloc[0])]
    frame = frame.iloc[1:].set_axis(header, axis=1)
    for number in range(frame.shape[1] if separator == ";" else 0):  # where numbers may have decimal commas
        values = frame.iloc[:, number]
        if values[values.notna() & ~_stands_for_none(values)].str.fullmatch(_WITH_COMMA).all():
            frame.isetitem(number, frame.iloc[:, number].str.replace(",", "."))
    return frame


def _decoded(content: bytes, notes: list[str]) -> str:
    try:
        return content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError:
        notes.append("The file is not in UTF-8. It was read as Windows-1252, of which latin-1 is a part.")
        return content.decode("cp1252", errors="replace")


def _is_data(names: Sequence[str]) -> bool:
    """Whether a first line is no header: years can be names, but not all names are numbers, and 0.5 is none."""
    numbers = pd.to_numeric(pd.Series(names, dtype=object), errors="coerce").dropna()
    return len(numbers) > 0 and (len(numbers) == len(names) or bool((numbers % 1 != 0).any()))


def is_number(values: Values) -> bool:
    """Whether they are numbers by their type."""
    return is_numeric_dtype(values) and not is_bool_dtype(values) and not is_complex_dtype(values)


def words_of(values: Values) -> Values:
    """Values as text without space around it; None for missing ones."""
    form = "{:.15g}" if is_number(values) else "{}"
    words = [None if pd.api.types.is_scalar(v) and pd.isna(v) else form.format(v).strip() or None for v in values]
    return pd.Series(words, dtype=object)


def _stands_for_none(words: Values) -> NDArray[Any]:
    """Which words stand for a missing number."""
    return np.array([isinstance(word, str) and word.strip().lower() in _ABSENT for word in words], dtype=bool)


def marks_in(words: Values) -> str:
    """What keeps words from being numbers: "numbers with '$' and ','"; "" where more than that is in the way."""
    found = [mark for mark in _MARKS if words.str.contains(mark, regex=False).any()]
    plain = pd.to_numeric(words.str.translate(str.maketrans("", "", _MARKS)), errors="coerce")
    if not found or plain.isna().any():
        return ""
    return f"numbers with {' and '.join(map(repr, found))} (write them as plain numbers, such as 1200.50)"


def form_of(words: Values) -> str:
    """How numbers with a sign of money or separators are written, such as "$1,234.5"; "" if plainly, or who knows how.

    All words with a digit must fit one form. 1,234 fits two: it counts thousands where the sign is $ or £, or where
    numbers up to 999 have no comma.
    """
    words = words[words.str.contains(r"\d", na=False)]
    signs = [sign for sign in _MONEY if words.str.contains(sign, regex=False).any()]
    has_comma = words.str.contains(",", regex=False)
    fits = [form for form in _WRITTEN if words.str.fullmatch(_pattern(form)).all()]
    if not fits or len(signs) > 1 or not (signs or has_comma.any()):
        return ""
    if len(fits) > 1:
        small, others = words.str.fullmatch(r"\D*\d{1,3}\D*"), words[~has_comma]
        is_telling = signs in (["$"], ["£"]) or (not has_comma.all() and bool(small[~has_comma].all()))
        if others.str.contains(".", regex=False).any() or (has_comma.any() and not is_telling):
            return ""
    return "".join(signs) + fits[0]


def _pattern(form: str) -> str:
    body = _WRITTEN[_COMMA if form.endswith(_COMMA) else _POINT]
    return rf"[-+]?\s*[{_MONEY}]?\s*[-+]?{body}\s*[{_MONEY}]?"


def _plain(words: Values, form: str) -> Values:
    """Words of this form as plain numbers; others as they are."""
    is_comma = form.endswith(_COMMA)
    plain = words.str.replace(rf"[{_MONEY}\s{'.' if is_comma else ','}]", "", regex=True).str.replace(",", ".")
    return words.where(~words.str.fullmatch(_pattern(form), na=False), plain)


def numbers_of(values: Values, form: str = "") -> NDArray[Any]:
    """Values, written in a ``form`` of :func:`form_of`, as numbers; NaN for whatever is none, and for infinities."""
    if pd.api.types.is_timedelta64_dtype(values):
        values = values / pd.Timedelta(days=1)
    if not is_number(values):
        words = words_of(values)
        values = pd.to_numeric(_plain(words, form) if form else words, errors="coerce")
    numbers: NDArray[Any] = values.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
    numbers[~np.isfinite(numbers)] = np.nan
    return numbers


def _days(values: Values, form: str) -> NDArray[Any]:
    """Dates as days since 1970; NaN for whatever is none."""
    values = values if is_datetime64_any_dtype(values) else words_of(values)
    dates = pd.to_datetime(values, format=form, errors="coerce", utc=True).dt.tz_localize(None).to_numpy()
    days: NDArray[Any] = (dates - np.datetime64("1970-01-01")) / np.timedelta64(1, "D")  # pandas' own would be in ns
    return days


# --- columns ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """What a column is, and what the transformers of scikit-learn have learnt of it.

    Attributes:
        name: Its name in the table.
        kind: ``"number"``, ``"date"``, which becomes a number of days, ``"category"`` or ``"dropped"``.
        note: What there is to say of it.
        absent: Of numbers: words that stand for a missing one.
        form: Of dates, and of numbers with a sign of money or separators: how they are written.
        median: Of numbers and dates: what replaces a missing one.
        mean: What is subtracted from the number and, if some are missing, from the indicator of these.
        scale: What both are divided by.
        values: Of categories: those with an input of their own.
        rare: Those that share the last input. Unseen ones go there too; without rare ones all inputs are 0 for them.
    """

    name: str
    kind: ColumnKind
    note: str = ""
    absent: tuple[str, ...] = ()
    form: str = ""
    median: float = 0.0
    mean: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    values: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()

    @property
    def inputs(self) -> int:
        """How many inputs of the network it makes."""
        return len(self.mean) + len(self.values) + bool(self.rare)

    def read(self, values: Values, owner: str, notes: list[str] | None = None) -> Any:
        """Values of such a column as the transformers take them, numbers or words; others are refused.

        Where fewer than half are no numbers, these are missing, as ``notes`` say. So are words without a digit among
        dates; those with one may be dates in another form, in which the rest may be misread.
        """
        words = words_of(values)
        if self.kind == "category":
            known = words.isin([*self.values, *self.rare])
            if is_number(values) and self.inputs and not known.any():
                self._refuse(words, "text", owner)
            return words
        told = words.notna() & ~words.isin(self.absent) & ~_stands_for_none(words)
        is_date = self.kind == "date"
        numbers = _days(values, self.form) if is_date else numbers_of(values, self.form or form_of(words[told]))
        odd, expected = words[np.isnan(numbers) & told], f"dates ({self.form})" if is_date else "numbers"
        if 2 * len(odd) >= told.sum() or (is_date and odd.str.contains(r"\d").any()):
            self._refuse(odd, expected, owner)
        elif len(odd) and notes is not None:
            cells = [f"{word!r:.60} in row {row + 1:,}" for row, word in odd.iloc[:3].items()]
            more = f" and {len(odd) - 3:,} more" if len(odd) > 3 else ""
            what = f"'{self.name}' holds {expected}, as in training, but for {', '.join(cells)}{more}"
            notes.append(f"{what}; rows count from 1 below the header. These cells count as missing.")
        return numbers

    def _refuse(self, words: Values, expected: str, owner: str) -> None:
        if len(words := words.dropna()):
            different = words.nunique()
            got = f"{words.iloc[0]!r} in row {words.index[0] + 1:,} below the header"
            got += f" and {different - 1:,} other{'s' if different > 2 else ''}" if different > 1 else ""
            looks = marks_in(words) if self.kind == "number" else ""
            got += f", which looks like {looks}" if looks else ""
            constraint = f"one whose column '{self.name}' holds {expected}, as in training"
            raise invalid("table", owner, constraint, Described(got))

    def transformer(self) -> Any:
        """What learns the rest of this description from values."""
        if self.kind == "category":
            rare = {"min_frequency": _RARE, "max_categories": _COMMON, "handle_unknown": "infrequent_if_exist"}
            fill = SimpleImputer(missing_values=None, strategy="constant", fill_value=_MISSING)
            return make_pipeline(fill, OneHotEncoder(**rare, sparse_output=False))
        fill = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
        return make_pipeline(fill, StandardScaler())

    def learnt(self, fill: Any, last: Any) -> Self:
        """The column with what the fitted transformers know."""
        if self.kind == "category":
            rare = last.infrequent_categories_[0]
            rare = () if rare is None else tuple(rare.tolist())
            return replace(self, values=tuple(v for v in last.categories_[0].tolist() if v not in rare), rare=rare)
        mean, scale = (tuple(each.tolist()) for each in (last.mean_, last.scale_))
        return replace(self, median=float(np.nan_to_num(fill.statistics_[0])), mean=mean, scale=scale)

    def encoded(self, read: Any) -> NDArray[Any]:
        """What :meth:`read` gave as inputs of the network: what the fitted transformers would make of it."""
        if self.kind == "category":
            last, nowhere = self.inputs - 1, self.inputs
            places = {value: place for place, value in enumerate(self.values)} | dict.fromkeys(self.rare, last)
            chosen = [places.get(word, last if self.rare else nowhere) for word in read.fillna(_MISSING)]
            return np.eye(self.inputs + 1)[chosen, :-1]
        missing = np.isnan(read)
        parts = [np.where(missing, self.median, read), missing.astype(np.float64)][: len(self.mean)]
        return (np.stack(parts, 1) - self.mean) / self.scale

    def unseen(self, read: Any) -> list[str]:
        """The categories that training had not."""
        return sorted(set(read.dropna()) - {*self.values, *self.rare}) if self.kind == "category" else []

    def to_json(self) -> dict[str, Any]:
        """As plain data for a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, described: Any) -> Self:
        """The column that :meth:`to_json` described. What no fit leaves is refused."""
        fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in described.items()}
        column = cls(**fields)
        texts = (column.name, column.note, column.form, *column.absent, *column.values, *column.rare)
        if not all(isinstance(text, str) for text in texts) or column.kind not in get_args(ColumnKind):
            raise ValueError(f"a column {described!r:.80}")
        for number in (column.median, *column.mean, *column.scale):
            check_number("a number of a column", number)
        sizes = {"number": (1, 2), "date": (1, 2)}.get(column.kind, (0,))
        has_inputs = column.inputs > 0 and not (column.mean and column.inputs > len(column.mean))
        if len(column.mean) not in sizes or len(column.scale) != len(column.mean) or min(column.scale, default=1) <= 0:
            raise ValueError(f"means and scales of the column {column.name!r:.80}")
        if has_inputs != (column.kind != "dropped"):
            raise ValueError(f"inputs of the column {column.name!r:.80}")
        return column


def guess(values: Values) -> Column:
    """What a column of a table is taken for."""
    words, name = words_of(values), str(values.name)
    present = words.dropna()
    count, distinct = len(present), present.nunique()
    missing = [f"missing: {len(words) - count:,}"] if count < len(words) else []
    if not count or (distinct == 1 and not missing):
        return Column(name, "dropped", "always the same" if count else "no values")
    told = words.notna() & ~_stands_for_none(words)
    form, is_date = "" if is_number(values) else form_of(words[told]), is_datetime64_any_dtype(values)
    numbers = numbers_of(values, form)
    odd, others = words[np.isnan(numbers) & words.notna()], words[np.isnan(numbers) & told]
    few = len(others) <= _ODD * told.sum() and others.nunique() <= _ODD_WORDS
    if few and told.any() and not is_date and not is_bool_dtype(values):
        if count == len(words) == distinct > _CATEGORIES and not odd.any() and bool((numbers % 1 == 0).all()):
            if numbers.min() in (0, 1) and numbers.max() - numbers.min() == count - 1:
                return Column(name, "dropped", "it counts the rows")
            if name.lower().endswith("id"):
                return Column(name, "dropped", "an identifier: a whole number in each row, all different")
        absent = tuple(sorted(odd.unique()))
        notes = [f"written as {form}"] if form else []
        notes += [*missing, *([f"taken as missing: {', '.join(absent)}"] if absent else [])]
        return Column(name, "number", "; ".join(notes) or "complete", absent=absent, form=form)
    for form in _DATES if told.any() else ():
        if not np.isnan(_days(values, form)[told]).any():
            notes = ["in days", *([] if form == _DATES[0] else [f"read as {form}"]), *missing]
            return Column(name, "date", "; ".join(notes), form=form)
    if distinct > max(_CATEGORIES, count / 2) and not isinstance(values.dtype, pd.CategoricalDtype):
        what = marks_in(present) or "text or an identifier"
        return Column(name, "dropped", f"{what}: {distinct:,} of {count:,} values differ")
    return Column(name, "category", "; ".join([f"values: {distinct:,}", *missing]))


def learn(columns: Sequence[Column], frame: Frame, owner: str) -> list[Column]:
    """The columns with what scikit-learn's transformers have learnt from a table."""
    used = [column for column in columns if column.kind != "dropped"]
    read = pd.DataFrame({column.name: column.read(frame[column.name], owner) for column in used})
    transformer = ColumnTransformer([(f"{n}", column.transformer(), [column.name]) for n, column in enumerate(used)])
    transformer.fit(read)
    fitted = {column.name: transformer.named_transformers_[f"{n}"] for n, column in enumerate(used)}
    return [column.learnt(*fitted[column.name]) if column.name in fitted else column for column in columns]
