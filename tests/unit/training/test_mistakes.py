"""What a run cannot do right is refused before it starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import bayesbackprop as bbb
from bayesbackprop._files import read_checkpoint, write_checkpoint
from bayesbackprop.callbacks import Checkpoint, EarlyStopping
from bayesbackprop.training import Batches, Run, fit

pytestmark = pytest.mark.identities

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :1]


def model() -> bbb.Bayesian:
    return bbb.Bayesian(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), bbb.Gaussian(0.5), seed=0)


def batches() -> Batches:
    return Batches(X, Y, batch_size=10)


def test_a_sampler_that_chooses_examples_needs_the_size_of_the_training_set() -> None:
    loader = DataLoader(TensorDataset(X, Y), 5, sampler=SubsetRandomSampler(range(20)))
    with pytest.raises(ValueError, match="'n' parameter of fit must be given where a sampler decides"):
        fit(model(), loader, epochs=1)
    assert len(fit(model(), loader, epochs=1, n=20)) == 1


def test_a_scheduler_needs_its_optimiser() -> None:
    own = torch.optim.SGD(model().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    with pytest.raises(ValueError, match="'optimiser' parameter of fit must be given where a scheduler is"):
        fit(model(), batches(), epochs=1, scheduler=scheduler)
    with pytest.raises(ValueError, match="'optimiser' parameter of fit must be one of the model's parameters"):
        fit(model(), batches(), epochs=1, optimiser=own)


@pytest.mark.parametrize("kind", ["closure", "plateau"])
def test_what_needs_more_than_a_step_is_refused(kind: str) -> None:
    trained = model()
    optimiser: Any = torch.optim.SGD(trained.parameters(), lr=0.1)
    scheduler: Any = None
    if kind == "closure":
        optimiser = torch.optim.LBFGS(trained.parameters())
    else:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser)
    with pytest.raises(ValueError, match="parameter of fit must be one"):
        fit(trained, batches(), epochs=1, optimiser=optimiser, scheduler=scheduler)


def test_minibatch_weights_are_told_which_batch_it_is() -> None:
    objective = bbb.FreeEnergy(model(), n=40, minibatch_weights="geometric", batch_size=10)
    twin = bbb.FreeEnergy(model(), n=40, minibatch_weights="geometric", batch_size=10)
    optimiser = bbb.Adam(twin.param_groups(), lr=1e-3)
    twin.load_state_dict(objective.state_dict())
    fit(objective, batches(), epochs=1, optimiser=bbb.Adam(objective.param_groups(), lr=1e-3))
    for number, (x, y) in enumerate(batches()):
        optimiser.minimise(twin, x, y, batch=number)
    for one, other in zip(objective.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("setting", [{"seed": 1}, {"accumulate": 2}])
def test_a_run_goes_on_with_its_own_settings(setting: dict[str, int], tmp_path: Path) -> None:
    fit(model(), batches(), epochs=1, callbacks=[Checkpoint(tmp_path / "run")])
    with pytest.raises(ValueError, match=rf"'{next(iter(setting))}' parameter of fit must be \d, as in the run"):
        fit(model(), batches(), epochs=2, callbacks=[Checkpoint(tmp_path / "run")], **setting)


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 4), (100_000,)])
def test_moments_of_another_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Fused Adam writes to them unchecked."""
    path = tmp_path / "run"
    fit(model(), batches(), epochs=1, callbacks=[Checkpoint(path)])
    tensors, metadata = read_checkpoint(path)
    write_checkpoint(path, {**tensors, "optimiser.0.exp_avg": torch.zeros(shape)}, metadata)
    with pytest.raises(ValueError, match=r"others for .*'exp_avg' of parameter 0"):
        fit(model(), batches(), epochs=2, callbacks=[Checkpoint(path)])


def test_what_was_read_does_not_change_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "run"
    fit(model(), batches(), epochs=1, callbacks=[Checkpoint(path)])
    tensors, _ = read_checkpoint(path)
    before = {name: tensor.clone() for name, tensor in load_file(path).items()}
    with path.open("r+b") as file:
        file.seek(-200, 2)
        file.write(b"x" * 200)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_a_value_that_is_no_number_is_never_the_best() -> None:
    run = Run(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))]), None, 10, 1, [])
    run.history[:] = [{"validation_nll": value} for value in (float("nan"), 3.0, 2.0, 1.0)]
    EarlyStopping(patience=3).on_epoch(run)
    assert run.goes_on
