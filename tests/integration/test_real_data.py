"""The real data sets. Whoever is offline skips these; whoever receives something else than expected fails."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bayesbackprop_paper import data
from bayesbackprop_paper.data import FetchError
from bayesbackprop_paper.environments import mushroom
from repository import ROOT

pytestmark = pytest.mark.identities


# Those that take seconds to read, once for all tests.
LARGE: dict[str, Callable[..., Any]] = {name: functools.cache(getattr(data, name)) for name in ("mnist", "covertype")}


def fetched(name: str) -> None:
    try:
        data.fetch(name)
    except FetchError as error:
        if not error.unreachable:
            raise
        pytest.skip(f"{name} cannot be fetched here: {error}")


def test_the_real_mnist() -> None:
    fetched("mnist")
    train, validation, test = LARGE["mnist"]()
    for part, size in ((train, 50_000), (validation, 10_000), (test, 10_000)):
        assert part.images.shape == (size, 784)
        assert part.labels.shape == (size,)
        assert (part.images.dtype, part.labels.dtype) == (torch.float32, torch.int64)
        assert part.images.min() == 0
        assert part.images.max() == torch.tensor(255.0) / 126
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    both = torch.cat([train.labels, validation.labels])
    assert both.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert LARGE["mnist"](raw=True).test.images.dtype == torch.uint8


def test_the_real_mushrooms() -> None:
    fetched("mushroom")
    contexts, edible = data.mushroom()
    assert contexts.shape == (8124, 117)
    assert contexts.dtype == torch.float32
    assert contexts.unique().tolist() == [0, 1]
    assert (contexts.sum(1) == 22).all()
    assert (contexts.sum(0) > 0).all()
    assert int(edible.sum()) == 4208
    # Odour (columns 22 to 30, in the order of the letters a c f l m n p s y): almond and anise are always edible,
    # creosote, foul, musty, pungent, spicy and fishy never. So the labels are not swapped.
    assert edible[contexts[:, [22, 25]].any(1)].all()
    assert not edible[contexts[:, [23, 24, 26, 28, 29, 30]].any(1)].any()


def test_the_real_adults() -> None:
    fetched("adult")
    features, labels, classes = data.adult()
    assert features.shape == (32_561, 108)
    assert (labels.bincount().tolist(), classes) == ([24_720, 7_841], 2)
    features, labels, classes = data.adult(label="occupation")
    assert (features.shape, classes, int(labels.max())) == ((30_718, 93), 14, 13)


def test_the_real_forests() -> None:
    fetched("covertype")
    features, labels, classes = LARGE["covertype"]()
    assert features.shape == (581_012, 54)
    assert labels.bincount().tolist() == [211_840, 283_301, 35_754, 2_747, 9_493, 17_367, 20_510]
    assert classes == 7
    torch.testing.assert_close(features[:, :10].double().mean(0), torch.zeros(10).double(), atol=1e-6, rtol=0)
    assert (features[:, 10:].sum(1) == 2).all()  # one area, one soil


@pytest.mark.parametrize(
    ("name", "rows", "columns", "mean"),
    [
        ("boston", 506, 13, 22.5328),
        ("concrete", 1030, 8, 35.8178),
        ("energy", 768, 8, 22.3072),
        ("power", 9568, 4, 454.365),
        ("protein", 45_730, 9, 7.7485),
        ("wine", 1599, 11, 5.6360),
        ("yacht", 308, 6, 10.4954),
    ],
)
def test_the_real_regression_tables(name: str, rows: int, columns: int, mean: float) -> None:
    fetched(name)
    features, targets = data.regression(name)
    assert features.shape == (rows, columns)
    assert targets.shape == (rows,)
    assert features.isfinite().all()
    assert float(targets.mean()) == pytest.approx(mean, abs=1e-3)


def test_the_examples_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, load in LARGE.items():
        monkeypatch.setattr(data, name, load)
    page = ROOT / "docs" / "data.md"
    for name in ("mnist", "mushroom", "adult", "covertype", "wine"):
        fetched(name)
    (example,) = re.findall(r"```py\n(.*?)```", page.read_text(), flags=re.DOTALL)
    exec(example, {})


def test_the_real_mushrooms_are_a_bandit() -> None:
    fetched("mushroom")
    environment = mushroom(3)
    assert (environment.features, environment.actions) == (117, 2)
    assert {environment.best for environment.t in range(50)} == {0, 5}
