"""Networks on the meta device: they are wrapped without memory, and get it where their values are loaded."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bayesbackprop as bbb
from bayesbackprop.pruning import snr

pytestmark = pytest.mark.identities

IDS = torch.tensor([[1, 4, 2], [3, 0, 0]])


class Recurrent(nn.Module):
    """A language model with a tied weight, a padding row, and a second list of weights in its recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, padding_idx=0)
        self.layer, self.norm = nn.GRU(3, 3, batch_first=True), nn.BatchNorm1d(3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.layer(self.embedding(ids))
        output: Tensor = self.decoder(self.norm(hidden.movedim(-1, 1)).movedim(1, -1))
        return output.movedim(-1, 1)


def on_meta() -> Recurrent:
    with torch.device("meta"):
        return Recurrent()


def wrapped(net: nn.Module, **options: object) -> bbb.Bayesian:
    return bbb.Bayesian(net, bbb.Categorical(), seed=3, **options)  # type: ignore[arg-type]


@pytest.mark.supports("Large networks", "torch.device meta, then load", "weights exist once")
@pytest.mark.parametrize("centre", [None, "net"])
def test_a_file_is_loaded_into_a_network_without_memory(centre: str | None, tmp_path: Path) -> None:
    model = wrapped(Recurrent(), centre=centre, sigma=0.2)
    bbb.save(model, tmp_path / "model")
    net = on_meta()
    loaded = bbb.load(tmp_path / "model", net)
    assert loaded.net is net
    assert net.decoder.weight is net.embedding.weight
    assert loaded.seed == 3
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert torch.equal(loaded.predict(IDS, draws=3).probs, model.predict(IDS, draws=3).probs)
    bbb.FreeEnergy(loaded, n=10)(IDS, IDS).backward()


@pytest.mark.supports("Large networks", "torch.device meta, then to_empty", "rho is that of sigma")
def test_memory_and_then_the_means() -> None:
    trained = wrapped(Recurrent(), sigma=0.05)
    with torch.device("meta"):  # where the model itself may be made
        model = wrapped(Recurrent(), sigma=0.05)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.to_empty(device="cpu") is model
    model.net.load_state_dict(trained.net.state_dict())
    assert model.net.decoder.weight is model.net.embedding.weight
    expected = trained.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.predict(IDS, draws=3).probs, trained.predict(IDS, draws=3).probs)


def test_until_then_it_is_refused() -> None:
    model = wrapped(on_meta())
    for call in (lambda: model.predict(IDS), lambda: bbb.FreeEnergy(model, n=3), lambda: model.draw().weights):
        with pytest.raises(ValueError, match=r"in memory: to_empty\(device=...\) first"):
            call()


def test_what_needs_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="The 'sigma' parameter of Bayesian must be a number where"):
        wrapped(on_meta(), sigma=bbb.Relative(0.1))
    with pytest.raises(ValueError, match="The 'family' parameter of Bayesian"):
        wrapped(on_meta(), family=bbb.LowRank(2))
    with pytest.raises(ValueError, match="The 'centre' parameter of Bayesian"):
        wrapped(on_meta(), centre="net").to_empty(device="cpu")
    net = Recurrent()
    net.register_buffer("positions", torch.arange(3), persistent=False)
    bbb.save(wrapped(net), tmp_path / "model")
    bare = on_meta()
    bare.register_buffer("positions", torch.arange(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"values in the buffers that no file holds, \['positions'\]"):
        bbb.load(tmp_path / "model", bare)
    assert all(parameter.is_meta for parameter in bare.parameters())


def test_a_model_with_values_is_emptied_as_ever() -> None:
    model = wrapped(Recurrent())
    assert model.to_empty(device="meta") is model
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("use", ["save", "prune", "snr", "mean_network", "predict"])
def test_without_memory_there_is_nothing_to_use(use: str, tmp_path: Path) -> None:
    model = wrapped(on_meta(), sigma=0.2)
    calls = {
        "save": lambda: bbb.save(model, tmp_path / "model"),
        "prune": lambda: bbb.prune(model, 0.5),
        "snr": lambda: snr(model),
        "mean_network": lambda: bbb.mean_network(model),
        "predict": lambda: model.predict(IDS, draws=2),
    }
    with pytest.raises(ValueError, match=r"in memory: to_empty\(device=...\) first"):
        calls[use]()
    assert not list(tmp_path.iterdir())


def test_a_likelihood_without_values_is_refused() -> None:
    """Its learnt numbers would be whatever was in the memory that it gets."""
    with torch.device("meta"), pytest.raises(ValueError, match="'likelihood' parameter of Bayesian must be in memory"):
        bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian("learnt"))


def test_memory_from_outside_is_refused() -> None:
    """It would leave rho as whatever was there."""
    with torch.device("meta"):
        net = nn.Linear(3, 1)
    model = bbb.Bayesian(net, bbb.Gaussian("learnt"), sigma=0.05)
    whole = nn.ModuleDict({"model": model})
    with pytest.raises(RuntimeError, match="Call to_empty"):
        whole.to_empty(device="cpu")
    whole.double()  # a type is no memory
    model.to_empty(device="cpu")
    torch.testing.assert_close(model.posterior["weight"].sigma, torch.full((1, 3), 0.05, dtype=torch.float64))
    whole.to_empty(device="cpu")  # as torch does it, for a model that had its values
