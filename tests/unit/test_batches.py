"""Data as users have them give the same examples."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bayesbackprop import Batches
from bayesbackprop._batches import ROWS, labelled, unlabelled, weighted

pytestmark = pytest.mark.equivalence

Y = torch.arange(2 * ROWS + 5)
X = Y[:, None] * torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        TensorDataset(X, Y),
        DataLoader(TensorDataset(X, Y), 100),
        [(X[:7], Y[:7]), [X[7:], Y[7:]]],
        Batches(X, Y, 100, order=lambda _: torch.arange(len(Y))),
    ],
    ids=["pair", "dataset", "loader", "batches in a list", "Batches"],
)
def test_all_forms_of_data_have_the_same_examples(data: Any) -> None:
    inputs, targets = zip(*labelled(data, "data", "f"), strict=True)
    assert torch.equal(torch.cat(inputs), X)
    assert torch.equal(torch.cat(targets), Y)
    assert torch.equal(torch.cat(list(unlabelled(data, "data", "f"))), X)


def test_inputs_alone_may_be_a_tensor() -> None:
    assert torch.equal(torch.cat(list(unlabelled(X, "outside", "f"))), X)
    assert max(map(len, unlabelled(X, "outside", "f"))) == ROWS
    assert torch.equal(torch.cat(list(unlabelled([X[:9], X[9:18]], "outside", "f"))), X[:18])  # two batches, no pair
    with pytest.raises(ValueError, match="The 'data' parameter of f"):
        list(labelled(X, "data", "f"))


def test_inputs_of_several_tensors_stay_together() -> None:
    (first, *_), targets = zip(*labelled(({"a": X, "b": Y}, Y), "data", "f"), strict=True)
    assert torch.equal(first["a"], X[:ROWS])
    assert torch.equal(first["b"], targets[0])


@pytest.mark.parametrize(
    "data", [(X, Y[:3]), (X[:0], Y[:0]), ((), Y), [], iter(()), 3, "data", {"x": X}, [(X,)], [X, Y]]
)
def test_what_is_no_data_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="The 'data' parameter of f"):
        list(labelled(data, "data", "f"))


def test_targets_of_heads_and_weights_stay_together() -> None:
    weights = torch.rand(len(Y))
    for targets in ({"a": Y, "b": X}, (Y, X)):
        parts = list(weighted((X, targets, weights), "data", "f"))
        assert [len(part[2]) for part in parts if part[2] is not None] == [len(part[0]) for part in parts]
        assert torch.equal(torch.cat([part[2] for part in parts if part[2] is not None]), weights)
        head: str | int = "a" if isinstance(targets, dict) else 0
        found = [y for _, y in labelled((X, targets), "data", "f", head=head)]
        assert torch.equal(torch.cat(found), Y)
        with pytest.raises(ValueError, match="The 'data' parameter of f"):
            list(labelled((X, targets), "data", "f"))
        with pytest.raises(ValueError, match="for the head 'c'"):
            list(labelled((X, targets), "data", "f", head="c"))
    with pytest.raises(ValueError, match="The 'weights' parameter of f"):
        list(weighted([(X, Y, weights[:3])], "data", "f"))
