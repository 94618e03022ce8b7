"""A model that is saved while another thread trains it."""

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from bayesbackprop import Batches, Bayesian, Gaussian, fit, save

pytestmark = pytest.mark.identities


def test_a_model_saved_while_another_thread_fits_it_is_that_of_a_step(tmp_path: Path) -> None:
    """All parameters are moved by the same amount at each step: a file in which they differ is of two steps."""

    class Together(torch.optim.Optimizer):
        def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
            super().__init__(parameters, {"lr": 1.0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(2**-10)
                time.sleep(1e-4)

    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    model = Bayesian(net, Gaussian(0.1), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-4.0)
    batches = Batches(torch.zeros(4, 2), torch.zeros(4, 2), batch_size=4)
    thread = threading.Thread(target=lambda: fit(model, batches, epochs=150, optimiser=Together(model.parameters())))
    thread.start()
    files = []
    while thread.is_alive():
        files.append(tmp_path / f"{len(files)}.safetensors")
        save(model, files[-1])
    thread.join()
    assert len(files) > 3
    for file in files:
        tensors = safetensors.torch.load_file(file)
        assert len({float(value) for tensor in tensors.values() for value in tensor.flatten()}) == 1
