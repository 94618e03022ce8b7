"""A network is found in its file; a file of another architecture, or the state of a run, is refused."""

from pathlib import Path

import pytest
from torch import nn

import digits
from bayesbackprop import Bayesian, Categorical, save
from bayesbackprop._networks import from_file
from bayesbackprop_paper.experiments import mnist
from bayesbackprop_paper.experiments.recipe import BEST, CHECKPOINT, Examples
from model_files import model_files

pytestmark = pytest.mark.identities


def test_a_network_is_found_in_its_file(tmp_path: Path) -> None:
    for name, path in model_files(tmp_path).items():
        network = from_file(path)
        assert isinstance(network, Bayesian) == (name != "sparse")
    assert [tuple(q.mu.shape) for q in from_file(tmp_path / "dense.safetensors").posterior.values()] == [  # type: ignore[union-attr]
        (6, 784),
        (6,),
        (10, 6),
        (10,),
    ]


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        nn.Sequential(nn.Dropout(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2)),
        nn.Linear(3, 4),
        nn.GRU(3, 4),
    ],
    ids=lambda net: "-".join(type(module).__name__ for module in net.modules()),
)
def test_a_file_of_another_architecture_is_refused(net: nn.Module, tmp_path: Path) -> None:
    save(Bayesian(net, Categorical()), tmp_path / "model")
    with pytest.raises(ValueError, match=r"a checkpoint of a fully connected nn\.Sequential"):
        from_file(tmp_path / "model")


@pytest.mark.parametrize("name", [CHECKPOINT, BEST])
def test_the_state_of_a_run_is_not_its_model(name: str, tmp_path: Path) -> None:
    run = mnist.prepare(digits.RECIPES["bbb-mixture"], digits.N, tmp_path)
    training, validation, _ = (Examples(*split) for split in digits.images())
    run.train(training, {"validation": validation})
    with pytest.raises(ValueError, match=r"must be the model that a run leaves at its end, model\.safetensors"):
        from_file(tmp_path / name)
