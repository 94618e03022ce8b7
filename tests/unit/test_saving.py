"""A model and its file: the round trip is exact, and what cannot be read is refused and changes nothing."""

import os
import pickle
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
    ScaleMixture,
    load,
    save,
)
from rewriting import rewrite

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


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


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
        _normalised,
        lambda net: Bayesian(
            net,
            Gaussian("learnt", initial=0.3),
            {"3.bias": Laplace(0.1), "*.bias": Normal(1 / 3), "*": ScaleMixture(0.25, 0.7, 1e-3)},
            estimator={"0.*": "local", "3.weight": "flipout", "3.bias": "shared"},
            centre="net",
            seed=2**62 + 1,
        ),
        _numbers(2),
    ),
    "normalisation too": (
        _normalised,
        lambda net: Bayesian(net, Gaussian(1 / 3), Normal(0.1), normalisation=True, seed=0),
        _numbers(2),
    ),
    "last layer": (
        _normalised,
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


def _bits(module: nn.Module) -> dict[str, tuple[torch.dtype, bytes, bool]]:
    """All that a refusal must leave alone."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: (
            tensor.dtype,
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            tensor.requires_grad,
        )
        for name, tensor in tensors.items()
    } | {f"mode of {name}": module.training for name, module in module.named_modules()}


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
    before = _bits(model)
    save(model, tmp_path / "model.safetensors")
    assert _bits(model) == before

    torch.manual_seed(123)
    net = MODELS[name][0]().to(dtype)
    generator = torch.get_rng_state()
    loaded = load(str(tmp_path / "model.safetensors"), net)
    assert loaded.net is net
    assert _bits(loaded) == before
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
    assert _bits(load(tmp_path / "model", make())) == _bits(model)


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
    model = Bayesian(_normalised(), **{"likelihood": Gaussian(1.0), "seed": 3, argument: value})
    save(model, tmp_path / "model")
    net = _normalised()
    before = _bits(net)
    with pytest.raises(ValueError, match=f"The '{argument}' parameter of load must be given"):
        load(tmp_path / "model", net)
    assert _bits(net) == before
    loaded = load(tmp_path / "model", net, **{argument: value})
    assert [entry.prior for entry in loaded.plan] == [entry.prior for entry in model.plan]
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    assert torch.equal(_predicted(loaded, x), _predicted(model, x))
    assert torch.equal(FreeEnergy(loaded, n=9)(x, y).total, FreeEnergy(model, n=9)(x, y).total)


# --- files that are refused ------------------------------------------------------------------------------------------


def _good(path: Path) -> bytes:
    torch.manual_seed(5)
    save(MODELS["everything"][1](_normalised()), path)
    return path.read_bytes()


def _cut(where: Callable[[int, int], int]) -> Callable[[Path], None]:
    """Truncate a good file at a place that depends on the lengths of its header and of the whole."""

    def write(path: Path) -> None:
        whole = _good(path)
        path.write_bytes(whole[: where(8 + int.from_bytes(whole[:8], "little"), len(whole))])

    return write


def _changed(
    change: Callable[[dict[str, Any], dict[str, Tensor]], Any], text: str | None = None
) -> Callable[[Path], None]:
    """A good file with its header or its tensors changed, or with another text in place of the header."""

    def write(path: Path) -> None:
        _good(path)
        rewrite(path, change, text)

    return write


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return _changed(lambda header, _: change(header))


def _metadata(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return _changed(lambda header, _: change(header["contents"]))


def _tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    return _changed(lambda _, tensors: change(tensors))


def _other(model: Callable[[], Bayesian]) -> Callable[[Path], None]:
    """The file of another model."""
    return lambda path: save(model(), path)


def _sequence(*layers: nn.Module) -> Bayesian:
    return Bayesian(nn.Sequential(*layers), Gaussian("learnt"), Normal(1.0), centre="net")


FILES: dict[str, Callable[[Path], Any]] = {
    "empty": _cut(lambda header, whole: 0),
    "cut in the length": _cut(lambda header, whole: 5),
    "cut after the length": _cut(lambda header, whole: 8),
    "cut in the header": _cut(lambda header, whole: header // 2),
    "cut after the header": _cut(lambda header, whole: header),
    "cut in the tensors": _cut(lambda header, whole: (header + whole) // 2),
    "cut by a byte": _cut(lambda header, whole: whole - 1),
    "a byte too many": lambda path: path.write_bytes(_good(path) + b"\0"),
    "text": lambda path: path.write_text("To whom it may concern: this is no model.\n" * 20),
    "a state_dict": lambda path: torch.save(_normalised().state_dict(), path),
    "another program's": lambda path: safetensors.torch.save_file(_normalised().state_dict(), path),
    "another program's, with metadata": lambda path: safetensors.torch.save_file(
        _normalised().state_dict(), path, metadata={"format": "pt"}
    ),
    "not JSON": _changed(lambda header, tensors: None, "{'format': 1}"),
    "no mapping": _changed(lambda header, tensors: None, "[1]"),
    **{
        f"no {field}": _metadata(lambda metadata, field=field: metadata.pop(field))
        for field in ("seed", "centred", "likelihood", "parameters")
    },
    "no format": _header(lambda header: header.pop("format")),
    "format is text": _header(lambda header: header.update(format="1")),
    "a future format": _header(lambda header: header.update(format=4, version="9.0")),
    "seed is text": _metadata(lambda metadata: metadata.update(seed="7")),
    "parameters are empty": _metadata(lambda metadata: metadata.update(parameters={})),
    "seed is absurd": _metadata(lambda metadata: metadata.update(seed=10**400)),
    "NaN in a mean": _tensors(lambda tensors: tensors["net.0.weight"].view(-1)[0:1].fill_(torch.nan)),
    "infinity in rho": _tensors(lambda tensors: tensors["rho.0.weight"].view(-1)[0:1].fill_(torch.inf)),
    "NaN in a buffer": _tensors(lambda tensors: tensors["net.1.running_mean"].fill_(torch.nan)),
    "noise of whole numbers": _tensors(
        lambda tensors: tensors.update({k: v.int() for k, v in tensors.items() if k.startswith("likelihood.")})
    ),
    "seed is null": _metadata(lambda metadata: metadata.update(seed=None)),
    "centred is text": _metadata(lambda metadata: metadata.update(centred="no")),
    "parameters are a list": _metadata(lambda metadata: metadata.update(parameters=[1])),
    "likelihood is a list": _metadata(lambda metadata: metadata.update(likelihood=[1])),
    "likelihood without its noise": _metadata(lambda metadata: metadata["likelihood"].pop("noise")),
    "no prior": _metadata(lambda metadata: metadata["parameters"]["0.bias"].pop("prior")),
    "prior of no known kind": _metadata(lambda metadata: metadata["parameters"]["0.bias"]["prior"].update(kind="X")),
    "prior with an odd number": _metadata(lambda metadata: metadata["parameters"]["0.bias"]["prior"].update(nu=1)),
    "prior with a bad number": _metadata(lambda metadata: metadata["parameters"]["0.bias"]["prior"].update(sigma=-1)),
    "no estimator": _metadata(lambda metadata: metadata["parameters"]["0.bias"].pop("estimator")),
    "estimator of no known kind": _metadata(lambda m: m["parameters"]["0.bias"].update(estimator="global")),
    "parameters without one": _metadata(lambda metadata: metadata["parameters"].pop("0.bias")),
    "parameters with one too many": _metadata(
        lambda metadata: metadata["parameters"].update({"7.bias": metadata["parameters"]["0.bias"]})
    ),
    "tensors without one": _tensors(lambda tensors: tensors.pop("rho.0.bias")),
    "tensors with one too many": _tensors(lambda tensors: tensors.update({"net.7.bias": torch.zeros(1)})),
    "tensors without a buffer": _tensors(lambda tensors: tensors.pop("net.1.running_mean")),
    "one of another shape": _tensors(lambda tensors: tensors.update({"net.3.bias": torch.zeros(1)})),
    "one transposed": _tensors(lambda tensors: tensors.update({"rho.3.weight": torch.zeros(4, 2)})),
    "one of another type": _tensors(lambda tensors: tensors.update({"net.3.bias": torch.zeros(2).double()})),
    "the last of another type": _tensors(lambda tensors: tensors.update({"net.3.weight": torch.zeros(2, 4).half()})),
    "another depth": _other(lambda: _sequence(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())),
    "another width": _other(lambda: _sequence(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))),
    "without the norm": _other(lambda: _sequence(nn.Linear(3, 4), nn.Identity(), nn.Tanh(), nn.Linear(4, 2))),
    "of another precision": _other(lambda: MODELS["everything"][1](_normalised()).double()),
}


@pytest.mark.parametrize("name", ["net.0.weight", "rho.3.bias", "net.1.running_mean"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_written(name: str, bad: float, tmp_path: Path) -> None:
    model = MODELS["everything"][1](_normalised())
    _good(tmp_path / "model")
    before = (tmp_path / "model").read_bytes()
    model.state_dict()[name].view(-1)[0] = bad
    if name == "net.1.running_mean" and bad == torch.inf:  # a mask, say
        save(model, tmp_path / "model")
        assert load(tmp_path / "model", _normalised()).state_dict()[name][0] == bad
        return
    with pytest.raises(ValueError, match=rf"'{name}' parameter of save must be finite\. Got NaN or inf in 1 of \d+"):
        save(model, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == before


@pytest.mark.parametrize("write", FILES.values(), ids=list(FILES))
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(write: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "model"
    write(path)
    file = path.read_bytes()
    torch.manual_seed(99)
    net = _normalised()
    net[3].eval()
    before = _bits(net)
    with pytest.raises(ValueError, match=r"^The '\w+' parameter of \w.* must be .+\. Got .+ instead\.$"):
        load(path, net)
    assert _bits(net) == before
    assert path.read_bytes() == file
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    "name", [name for name in FILES if name.startswith(("no ", "seed", "centred", "prior", "estimator", "likelihood"))]
)
def test_metadata_that_cannot_be_understood_have_one_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    FILES[name](path)
    damaged = "which is damaged or has metadata that cannot be understood"
    expected = (
        rf"The 'path' parameter of load must be a file of bayesbackprop that holds a model\. Got .*, {damaged} \("
    )
    with pytest.raises(ValueError, match=expected):
        load(path, _normalised())


@pytest.mark.parametrize(
    ("net", "match"),
    [
        (lambda: _normalised().requires_grad_(False), "must be"),
        (lambda: _normalised().double(), "must be"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "must be"),
        (lambda: "a net", "must be a torch.nn.Module"),
    ],
    ids=["frozen", "of another precision", "smaller", "no network"],
)
def test_a_network_that_does_not_fit_is_refused(net: Callable[[], Any], match: str, tmp_path: Path) -> None:
    _good(tmp_path / "model")
    given = net()
    before = _bits(given) if isinstance(given, nn.Module) else None
    with pytest.raises(ValueError, match=match):
        load(tmp_path / "model", given)
    assert before is None or _bits(given) == before


def test_the_good_file_of_these_tests_is_good(tmp_path: Path) -> None:
    """What the refusals above are about is what was changed, not the file it was changed in."""
    for write in (_good, _changed(lambda header, tensors: None)):
        write(tmp_path / "model")
        assert load(tmp_path / "model", _normalised()).seed == 2**62 + 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: save(nn.Linear(3, 2), "nowhere"), "'model' parameter of save"),
        (lambda: load(3, nn.Linear(3, 2)), "'path' parameter of load"),
        (lambda: load("/", nn.Linear(3, 2)), "'path' parameter of load"),
    ],
)
def test_mistakes_are_explained(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    net = _normalised()
    before = _bits(net)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere", net)
    assert _bits(net) == before
    assert os.listdir(tmp_path) == []


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize(
    ("write", "explode"),
    [(pickle.dump, pickle.load), (torch.save, lambda file: torch.load(file, weights_only=False))],
    ids=["pickle", "torch.save"],
)
def test_a_pickle_is_refused_unread(
    write: Callable[[Bomb, Any], None], explode: Callable[[Any], Any], tmp_path: Path
) -> None:
    marker, path = tmp_path / "marker", tmp_path / "model"
    with path.open("wb") as file:
        write(Bomb(marker), file)
    with pytest.raises(ValueError, match="'path' parameter of load must be"):
        load(path, _normalised())
    assert not marker.exists()
    with path.open("rb") as file:
        explode(file)
    assert marker.exists()  # it would have gone off


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
    old = _good(path) if existing else b""
    model = Bayesian(_normalised(), Gaussian(1.0))
    with _full_disk(), pytest.raises((OSError, safetensors.SafetensorError)):
        save(model, path)
    assert os.listdir(tmp_path) == (["model"] if existing else [])
    assert not existing or path.read_bytes() == old
    save(model, path)  # and the next attempt is not hindered by it
    assert os.listdir(tmp_path) == ["model"]
    assert load(path, _normalised()).seed == model.seed


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_a_write_that_is_interrupted_at_the_end_leaves_the_old_file(
    failure: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise failure("interrupted")

    path = tmp_path / "model"
    old = _good(path)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(failure, match="interrupted"):
        save(Bayesian(_normalised(), Gaussian(1.0)), path)
    assert os.listdir(tmp_path) == ["model"]
    assert path.read_bytes() == old


def test_a_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save(Bayesian(_normalised(), Gaussian(1.0)), tmp_path / "nowhere" / "model")
    assert os.listdir(tmp_path) == []
