"""Parsing gives the tensors that the experiments of the paper need."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bayesbackprop_paper import data
from bayesbackprop_paper.data import DATA_SETS
from wheel_index import sha256

pytestmark = pytest.mark.identities


def synthetic(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *contents: bytes) -> None:
    """Let the files of a data set be these."""
    files = DATA_SETS[name].files
    assert len(files) == len(contents)
    for file, content in zip(files, contents, strict=True):
        (folder / file.name).write_bytes(content)
    changed = tuple(replace(file, sha256=sha256(text)) for file, text in zip(files, contents, strict=True))
    monkeypatch.setitem(DATA_SETS, name, replace(DATA_SETS[name], files=changed))


def test_images_are_split_and_scaled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pixels = torch.randint(256, (10_003, 784), dtype=torch.uint8)
    labels = torch.randint(10, (10_003,), dtype=torch.uint8)
    images, classes = bytes(16) + pixels.numpy().tobytes(), bytes(8) + labels.numpy().tobytes()
    synthetic(monkeypatch, tmp_path, "fashion-mnist", images, classes, images[: 16 + 5 * 784], classes[: 8 + 5])
    train, validation, test = data.fashion_mnist(tmp_path)
    assert [len(part.images) for part in (train, validation, test)] == [3, 10_000, 5]
    assert torch.equal(torch.cat([train.images, validation.images]), pixels.float() / 126)
    assert torch.equal(torch.cat([train.labels, validation.labels]), labels.long())
    assert torch.equal(test.images, pixels[:5].float() / 126)
    assert torch.equal(data.fashion_mnist(tmp_path, raw=True).validation.images, pixels[3:])


def test_adult_is_standardised_and_one_of_k(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        "39, Private, 10, HS-grad, 9, Divorced, Sales, Wife, White, Male, 1, 1, 40, Cuba, <=50K",
        "41, ?, 30, HS-grad, 13, Divorced, ?, Wife, White, Female, 3, 5, 60, Cuba, >50K",
        "43, Private, 50, HS-grad, 17, Divorced, Craft-repair, Wife, White, Male, 5, 9, 80, Cuba, <=50K",
    ]
    synthetic(monkeypatch, tmp_path, "adult", ("\n".join(rows) + "\n\n").encode())
    features, labels, classes = data.adult(tmp_path)
    assert (labels.tolist(), classes) == ([0, 1, 0], 2)
    z = 1.5**0.5
    torch.testing.assert_close(features[:, :6], torch.tensor([[-z], [0.0], [z]]).expand(3, 6))
    one_of = [
        #  ?, Private | HS-grad | Divorced | ?, Craft, Sales | Wife | White | Female, Male | Cuba
        [0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1],
        [1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1],
        [0, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1],
    ]
    assert features[:, 6:].tolist() == one_of
    features, labels, classes = data.adult(tmp_path, label="occupation")
    assert (labels.tolist(), classes, len(features)) == ([1, 0], 2, 2)
