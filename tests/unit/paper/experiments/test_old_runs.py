"""A run that version 0.2 left goes on (tests/files/format1/README.md)."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Normal
from bayesbackprop_paper.experiments.mnist import CHECKPOINT
from bayesbackprop_paper.experiments.recipe import Examples, Experiment, Schedule

FOLDER = Path(__file__).parents[3] / "files" / "format1"


@pytest.mark.identities
def test_a_run_of_version_0_2_goes_on(tmp_path: Path) -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())["training"]
    (tmp_path / CHECKPOINT).write_bytes((FOLDER / "training.safetensors").read_bytes())
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    objective = FreeEnergy(Bayesian(net, Categorical(), Normal(0.5)), n=20)
    schedule = Schedule(2, 8, "adam", learning_rate=0.05, decay="cosine", averaging=0.5, seed=3)
    examples = Examples(torch.zeros(20, 3), torch.zeros(20).long())
    history = Experiment(objective, net, schedule, tmp_path, {"task": "signs"}).train(
        examples, {"validation": examples}
    )
    assert history == expected["contents"]["state"]["records"]
    assert int(objective.step) == expected["contents"]["state"]["step"]
