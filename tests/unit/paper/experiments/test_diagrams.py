"""Reliability diagrams are the same file each time."""

from pathlib import Path

import pytest
import torch

from bayesbackprop.evaluation import calibration
from bayesbackprop_paper.experiments import diagrams

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_diagram_is_the_same_file_each_time(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    probs, labels = torch.rand(20, 3).softmax(1), torch.randint(3, (20,))
    drawn = [tmp_path / f"{number}{suffix}" for number in range(3)]
    for path, predicted in zip(drawn, (probs, probs, probs.roll(1, 1)), strict=True):
        diagrams.reliability({"ours": calibration(predicted, labels)}, path)
    assert drawn[0].read_bytes() == drawn[1].read_bytes() != drawn[2].read_bytes()
    assert drawn[0].read_bytes()[:4] == (b"\x89PNG" if suffix == ".png" else b"<?xm")
