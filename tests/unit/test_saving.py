"""A model and its file: the round trip is exact, and what cannot be read is refused and changes nothing."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from bayesbackprop import (
    Bayesian,
    Bernoulli,
    Categorical,
    FreeEnergy,
    Gaussian,
    Laplace,
    Likelihood,
    LogDensity,
    LogLikelihood,
    Normal,
    Prior,
    load,
    save,
)
from saved_models import bits_of, everything, good_file, normalised

pytestmark = pytest.mark.identities


class Recurrent(nn.Module):
    """An embedding with a padding row, a recurrent core, a tied decoder, and a buffer that is nobody's business."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, padding_idx=0)
        self.core = nn.GRU(3, 3, batch_first=True)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.core(self.embedding(x))[0]).movedim(-1, 1)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


Model = tuple[Callable[[], nn.Module], Callable[[nn.Module], Bayesian], Callable[[], tuple[Tensor, Tensor]]]


def _numbers(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(6, 3), torch.randn(6, *shape))


MODELS: dict[str, Model] = {
    "everything": (
        normalised,
        everything,
        _numbers(2),
    ),
    "normalisation too": (
        normalised,
        lambda net: Bayesian(net, Gaussian(1 / 3), Normal(0.1), normalisation=True, seed=0),
        _numbers(2),
    ),
    "last layer": (
        normalised,
        lambda net: Bayesian(net, Gaussian("per-input"), select=lambda name, _: name.startswith("3."), seed=1),
        _numbers(1),
    ),
    "tied": (
        Recurrent,
        lambda net: Bayesian(net, Categorical(), seed=5),
        lambda: (torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[1, 2, 3], [4, 0, 1]])),
    ),
    "one number": (
        Scalar,
        lambda net: Bayesian(net, Bernoulli(), Laplace(2.0), seed=9),
        lambda: (torch.randn(4), torch.tensor([0.0, 1.0, 1.0, 0.0])),
    ),
}


def _trained(name: str, dtype: torch.dtype) -> tuple[Bayesian, Tensor]:
    make, wrap, data = MODELS[name]
    model = wrap(make()).to(dtype)
    x, y = (value.to(dtype) if value.is_floating_point() else value for value in data())
    free_energy, optimiser = FreeEnergy(model, n=50), torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        free_energy(x, y).backward()
        optimiser.step()
    return model, x


def _predicted(model: Bayesian, x: Tensor) -> Tensor:
    return model.predict(x, draws=3).mean


# --- the round trip --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_the_round_trip_is_exact(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = _trained(name, dtype)
    before = bits_of(model)
    save(model, tmp_path / "model.safetensors")
    assert bits_of(model) == before

    torch.manual_seed(123)
    net = MODELS[name][0]().to(dtype)
    generator = torch.get_rng_state()
    loaded = load(str(tmp_path / "model.safetensors"), net)
    assert loaded.net is net
    assert bits_of(loaded) == before
    assert loaded.seed == model.seed
    described = [[(e.name, e.prior, e.estimator) for e in each.plan] for each in (model, loaded)]
    assert described[0] == described[1]
    assert type(loaded.likelihood) is type(model.likelihood)
    assert getattr(loaded.likelihood, "noise", None) == getattr(model.likelihood, "noise", None)
    assert torch.equal(_predicted(loaded, x), _predicted(model, x))
    assert torch.equal(loaded.draw(7).complexity(), model.draw(7).complexity())
    assert torch.equal(torch.get_rng_state(), generator)  # reading a file moves no generator

    save(loaded, tmp_path / "again.safetensors")
    first, second = (tmp_path / f"{stem}.safetensors" for stem in ("model", "again"))
    assert first.read_bytes() == second.read_bytes()


def test_the_file_is_one_safetensors_file_with_each_tensor_once(tmp_path: Path) -> None:
    model, _ = _trained("tied", torch.float32)
    save(model, tmp_path / "model")
    tensors = safetensors.torch.load_file(tmp_path / "model")
    assert set(tensors) == {name for name, _ in model.named_parameters()}  # neither the tied name nor the scratch
    assert os.listdir(tmp_path) == ["model"]


def test_a_saved_file_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    model, _ = _trained("one number", torch.float32)
    save(model, tmp_path / "model")
    (tmp_path / "usual").write_text("")
    assert oct((tmp_path / "model").stat().st_mode) == oct((tmp_path / "usual").stat().st_mode)


def test_names_with_the_letters_of_a_pattern(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"user[id]": nn.Linear(2, 2), "user*": nn.Linear(2, 2), "users": nn.Linear(2, 2)})

    model = Bayesian(make(), Gaussian(1.0), sigma=0.3, seed=1)
    save(model, tmp_path / "model")
    assert bits_of(load(tmp_path / "model", make())) == bits_of(model)


# --- what a file cannot hold -----------------------------------------------------------------------------------------


def _cauchy(w: Tensor) -> Tensor:
    return -torch.log1p(w.square())


class Cauchy(Prior):
    def log_density(self, w: Tensor) -> Tensor:
        return _cauchy(w)


class Wider(Gaussian):
    """A likelihood made from one of the library's: a file must not take it for that one."""

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return super().log_prob(output, target) / 2


class Own(Likelihood):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return -(output - target).square().sum(-1)

    def distribution(self, output: Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Normal(output, 1.0)


def _function(output: Tensor, target: Tensor) -> Tensor:
    return -(output - target).square().sum(-1)


def _gaussian(output: Tensor) -> torch.distributions.Distribution:
    return torch.distributions.Normal(output, 2.0)


OWN: dict[str, tuple[str, Any]] = {
    "LogDensity": ("prior", LogDensity(_cauchy, name="Cauchy")),
    "LogDensity for some": ("prior", {"*.bias": LogDensity(_cauchy), "*": Normal(0.5)}),
    "Prior": ("prior", Cauchy()),
    "LogLikelihood": ("likelihood", LogLikelihood(_function, _gaussian, name="quadratic")),
    "Likelihood": ("likelihood", Own()),
    "made from the library's": ("likelihood", Wider(0.5)),
}


@pytest.mark.parametrize(("argument", "value"), OWN.values(), ids=list(OWN))
def test_what_is_the_users_own_has_to_be_given_again(argument: str, value: Any, tmp_path: Path) -> None:
    model = Bayesian(normalised(), **{"likelihood": Gaussian(1.0), "seed": 3, argument: value})
    save(model, tmp_path / "model")
    net = normalised()
    before = bits_of(net)
    with pytest.raises(ValueError, match=f"The '{argument}' parameter of load must be given"):
        load(tmp_path / "model", net)
    assert bits_of(net) == before
    loaded = load(tmp_path / "model", net, **{argument: value})
    assert [entry.prior for entry in loaded.plan] == [entry.prior for entry in model.plan]
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    assert torch.equal(_predicted(loaded, x), _predicted(model, x))
    assert torch.equal(FreeEnergy(loaded, n=9)(x, y).total, FreeEnergy(model, n=9)(x, y).total)


# --- writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def _full_disk() -> Iterator[None]:
    """No file can grow beyond some bytes: the write fails half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("existing", [False, True], ids=["new", "over an old one"])
def test_a_write_that_fails_half_way_leaves_the_old_file(existing: bool, tmp_path: Path) -> None:
    path = tmp_path / "model"
    old = good_file(path) if existing else b""
    model = Bayesian(normalised(), Gaussian(1.0))
    with _full_disk(), pytest.raises((OSError, safetensors.SafetensorError)):
        save(model, path)
    assert os.listdir(tmp_path) == (["model"] if existing else [])
    assert not existing or path.read_bytes() == old
    save(model, path)  # and the next attempt is not hindered by it
    assert os.listdir(tmp_path) == ["model"]
    assert load(path, normalised()).seed == model.seed


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_a_write_that_is_interrupted_at_the_end_leaves_the_old_file(
    failure: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise failure("interrupted")

    path = tmp_path / "model"
    old = good_file(path)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(failure, match="interrupted"):
        save(Bayesian(normalised(), Gaussian(1.0)), path)
    assert os.listdir(tmp_path) == ["model"]
    assert path.read_bytes() == old


def test_a_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save(Bayesian(normalised(), Gaussian(1.0)), tmp_path / "nowhere" / "model")
    assert os.listdir(tmp_path) == []
