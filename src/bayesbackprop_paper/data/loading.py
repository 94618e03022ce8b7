"""The data sets as tensors, with the preprocessing of the paper where it states one."""

import io
import os
import re
import zipfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesbackprop._errors import invalid
from bayesbackprop_paper.data.fetching import fetch_files, read

_Folder = str | os.PathLike[str] | None
_VALIDATION = 10_000  # the paper's number; which of the 60,000 it does not say: the last ones here
_PIXEL_SCALE = 126  # the paper's preprocessing: pixels lie in [0, 255 / 126]


class Split(NamedTuple):
    """Images [N, 784] and labels [N] of type int64."""

    images: Tensor
    labels: Tensor


class Images(NamedTuple):
    """The three parts of an image data set."""

    train: Split
    validation: Split
    test: Split


class Mushrooms(NamedTuple):
    """Contexts [8124, 117], ones and zeros of type float32, and whether each mushroom is edible [8124], bool."""

    contexts: Tensor
    edible: Tensor


class Classification(NamedTuple):
    """Features [N, D] of type float32, labels [N] of type int64 in [0, classes)."""

    features: Tensor
    labels: Tensor
    classes: int


class Regression(NamedTuple):
    """Features [N, D] and targets [N], both float32, in the units of the data set."""

    features: Tensor
    targets: Tensor


def mnist(folder: _Folder = None, *, raw: bool = False) -> Images:
    """MNIST as in the paper: the last 10,000 training images are for validation, pixels are divided by 126.

    Args:
        folder: As for ``fetch``, which is called.
        raw: Give the pixels as they are, uint8 in [0, 255], instead of float32.

    Returns:
        50,000 training, 10,000 validation and 10,000 test images.
    """
    return _images("mnist", folder, raw)


def fashion_mnist(folder: _Folder = None, *, raw: bool = False) -> Images:
    """Fashion-MNIST, split and scaled like ``mnist``: data that is not digits. See ``fetch`` on how to get it."""
    return _images("fashion-mnist", folder, raw)


def mushroom(folder: _Folder = None) -> Mushrooms:
    """The mushrooms of the paper's bandit.

    Each of the 22 attributes is one of K over the values that occur, in the order of their letters. '?' is a value like
    any other, and veil-type, which has one value only, keeps its column of ones: 117 columns, 119 with an
    action as one of 2.
    """
    (path,) = fetch_files("mushroom", folder=folder)
    letters = np.frombuffer(read(path), np.uint8).reshape(8124, 46)[:, ::2]  # 23 letters with ',' or LF behind each
    contexts = np.hstack([_one_of(column) for column in letters.T[1:]])
    return Mushrooms(torch.from_numpy(contexts), torch.from_numpy(letters[:, 0] == ord("e")))


def adult(folder: _Folder = None, *, label: Literal["income", "occupation"] = "income") -> Classification:
    """The census data set Adult, its training part.

    The six numbers are standardised over all rows, the other attributes are one of K over the values that occur; '?' is
    a value like any other.

    Args:
        folder: As for ``fetch``, which is called.
        label: What to predict. ``"income"``: 0 up to $50,000, 1 above. ``"occupation"``: one of 14 in the order of the
            alphabet, of the rows where it is known; the income is then a feature.
    """
    columns = {"income": 14, "occupation": 6}
    if label not in columns:
        raise invalid("label", "data.adult", " or ".join(map(repr, columns)), label)
    (path,) = fetch_files("adult", folder=folder)
    table = np.array([row.split(", ") for row in read(path).decode().splitlines() if row])
    wanted = columns[label]
    table = table[table[:, wanted] != "?"]
    numbers = (0, 2, 4, 10, 11, 12)  # age, fnlwgt, education-num, capital-gain, capital-loss, hours-per-week
    others = [column for column in range(15) if column not in (*numbers, wanted)]
    standardised = _standardise(table[:, numbers].astype(np.float64))
    features = np.hstack([standardised, *(_one_of(table[:, column]) for column in others)])
    values, labels = np.unique(table[:, wanted], return_inverse=True)
    return Classification(torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64)), len(values))


def covertype(folder: _Folder = None) -> Classification:
    """The forest data set Covertype: the ten numbers are standardised over all rows, the 44 zeros and ones are kept.

    Labels are UCI's less one.
    """
    (path,) = fetch_files("covertype", folder=folder)
    table = np.loadtxt(path, dtype=np.int16, delimiter=",")
    features = np.hstack([_standardise(table[:, :10].astype(np.float64)), table[:, 10:54].astype(np.float32)])
    return Classification(torch.from_numpy(features), torch.from_numpy(table[:, 54].astype(np.int64) - 1), 7)


# How numpy reads each table, and which column is the target.
_TABLES: dict[str, tuple[dict[str, Any], int]] = {
    "boston": ({"delimiter": ","}, -1),
    "concrete": ({"sheet": 1}, -1),
    "energy": ({"sheet": 1, "columns": 9}, -1),  # the cooling load, a second target, is left out
    "power": ({"sheet": 5}, -1),  # five shuffles of the same rows; by custom the last
    "protein": ({"delimiter": ",", "skiprows": 1}, 0),
    "wine": ({"delimiter": ";", "skiprows": 1}, -1),
    "yacht": ({}, -1),
}


def regression(name: str, folder: _Folder = None) -> Regression:
    """One of the small regression tables: boston, concrete, energy, power, protein, wine or yacht.

    Nothing is scaled."""
    if name not in _TABLES:
        raise invalid("name", "data.regression", f"one of {', '.join(_TABLES)}", name)
    (path,) = fetch_files(name, folder=folder)
    options, target = _TABLES[name]
    rows = _sheet(path, **options) if "sheet" in options else np.loadtxt(path, **options)
    table = rows.astype(np.float32)
    return Regression(torch.from_numpy(np.delete(table, target, axis=1)), torch.from_numpy(table[:, target].copy()))


def _images(name: str, folder: _Folder, raw: bool) -> Images:
    train_images, train_labels, test_images, test_labels = map(read, fetch_files(name, folder=folder))
    train = Split(_pixels(train_images, raw), _labels(train_labels))
    first = len(train.labels) - _VALIDATION
    return Images(
        Split(train.images[:first], train.labels[:first]),
        Split(train.images[first:], train.labels[first:]),
        Split(_pixels(test_images, raw), _labels(test_labels)),
    )


def _pixels(content: bytes, raw: bool) -> Tensor:
    """An idx file of images: 16 bytes say what it is, which its hash has said already."""
    pixels = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=16).view(-1, 784)
    return pixels if raw else pixels.float().div_(_PIXEL_SCALE)


def _labels(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=8).long()


def _one_of(column: NDArray[Any]) -> NDArray[np.float32]:
    """[N] values as [N, K] zeros and ones, K the number of different values, in their order."""
    equal: NDArray[np.bool_] = column[:, None] == np.unique(column)
    return equal.astype(np.float32)


def _standardise(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    scaled: NDArray[np.float64] = (numbers - numbers.mean(0)) / numbers.std(0)
    return scaled.astype(np.float32)


def _sheet(path: Path, sheet: int, columns: int | None = None) -> NDArray[np.float64]:
    """The first ``columns`` of an Excel sheet without its header, all numbers: an xlsx file is a zip file of XML."""
    with zipfile.ZipFile(io.BytesIO(read(path))) as archive:
        text = archive.read(f"xl/worksheets/sheet{sheet}.xml").decode()
    rows = [re.findall(r"<v>([^<]*)</v>", row) for row in text.split("</row>")]
    return np.array([row[:columns] for row in rows[1:] if row], dtype=np.float64)
