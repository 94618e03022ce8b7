"""The bandit of any classification."""

from typing import Any

import pytest
import torch

from bayesbackprop.bandits import classification

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_naming_the_class_pays_one(dtype: torch.dtype) -> None:
    labels = torch.tensor([1, 0, 2, 2], dtype=dtype)
    environment = classification(torch.eye(4), labels, classes=4, seed=3)
    assert (environment.features, environment.actions) == (4, 4)
    for _ in range(20):
        label = int(labels[int(environment.context.argmax())])
        assert environment.expected.tolist() == [float(action == label) for action in range(4)]
        assert environment.step(label) == 1


def test_the_seed_decides_the_order() -> None:
    makes = [classification(torch.eye(4), torch.arange(4), 4, seed) for seed in (1, 1, 2)]
    orders = [[int(each.context.argmax()) for each.t in range(30)] for each in makes]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (torch.tensor([0, 1, 2, 3]), 3, r"'labels' .* must be ints in \[0, 3\)\. Got 0 to 3 instead"),
        (torch.tensor([0, 1, 2, -1]), 3, r"'labels' .* must be ints in \[0, 3\)\. Got -1 to 2 instead"),
        (torch.zeros(4), 3, r"'labels' .* must be a tensor \[N\] of ints"),
        (torch.zeros(4, 1, dtype=torch.int64), 3, r"'labels' .* must be a tensor \[N\] of ints"),
        ([0, 1, 2, 0], 3, r"'labels' .* must be a tensor \[N\] of ints"),
        (torch.tensor([0, 1, 2]), 3, "'rewards' parameter of Table"),
        (torch.tensor([0, 0, 0, 0]), 0, "'classes' parameter of classification"),
    ],
)
def test_mistakes_are_said(labels: Any, classes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classification(torch.eye(4), labels, classes)
