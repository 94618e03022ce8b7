"""Files of models that cannot be read are refused, with what is wrong with them, and change nothing."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from bayesbackprop import (
    Bayesian,
    Categorical,
    Gaussian,
    Normal,
    load,
    save,
)
from rewriting import rewrite
from saved_models import bits_of, everything, good_file, normalised

pytestmark = pytest.mark.identities


def _cut(where: Callable[[int, int], int]) -> Callable[[Path], None]:
    """Truncate a good file at a place that depends on the lengths of its header and of the whole."""

    def write(path: Path) -> None:
        whole = good_file(path)
        path.write_bytes(whole[: where(8 + int.from_bytes(whole[:8], "little"), len(whole))])

    return write


def _changed(
    change: Callable[[dict[str, Any], dict[str, Tensor]], Any], text: str | None = None
) -> Callable[[Path], None]:
    """A good file with its header or its tensors changed, or with another text in place of the header."""

    def write(path: Path) -> None:
        good_file(path)
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
    "a byte too many": lambda path: path.write_bytes(good_file(path) + b"\0"),
    "text": lambda path: path.write_text("To whom it may concern: this is no model.\n" * 20),
    "a state_dict": lambda path: torch.save(normalised().state_dict(), path),
    "another program's": lambda path: safetensors.torch.save_file(normalised().state_dict(), path),
    "another program's, with metadata": lambda path: safetensors.torch.save_file(
        normalised().state_dict(), path, metadata={"format": "pt"}
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
    "of another precision": _other(lambda: everything(normalised()).double()),
}


@pytest.mark.parametrize("name", ["net.0.weight", "rho.3.bias", "net.1.running_mean"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_written(name: str, bad: float, tmp_path: Path) -> None:
    model = everything(normalised())
    good_file(tmp_path / "model")
    before = (tmp_path / "model").read_bytes()
    model.state_dict()[name].view(-1)[0] = bad
    if name == "net.1.running_mean" and bad == torch.inf:  # a mask, say
        save(model, tmp_path / "model")
        assert load(tmp_path / "model", normalised()).state_dict()[name][0] == bad
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
    net = normalised()
    net[3].eval()
    before = bits_of(net)
    with pytest.raises(ValueError, match=r"^The '\w+' parameter of \w.* must be .+\. Got .+ instead\.$"):
        load(path, net)
    assert bits_of(net) == before
    assert path.read_bytes() == file
    assert os.listdir(tmp_path) == ["model"]


def test_a_file_of_another_architecture_says_what_it_also_has(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(Bayesian(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), Categorical(), seed=0), path)
    also = r"Got .*model \(the file also has \['2\.bias', '2\.weight'\], which the network has not\) instead\.$"
    with pytest.raises(ValueError, match=also):
        load(path, nn.Sequential(nn.Linear(3, 4)))


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
        load(path, normalised())


@pytest.mark.parametrize(
    ("net", "match"),
    [
        (lambda: normalised().requires_grad_(False), "must be"),
        (lambda: normalised().double(), "must be"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "must be"),
        (lambda: "a net", "must be a torch.nn.Module"),
    ],
    ids=["frozen", "of another precision", "smaller", "no network"],
)
def test_a_network_that_does_not_fit_is_refused(net: Callable[[], Any], match: str, tmp_path: Path) -> None:
    good_file(tmp_path / "model")
    given = net()
    before = bits_of(given) if isinstance(given, nn.Module) else None
    with pytest.raises(ValueError, match=match):
        load(tmp_path / "model", given)
    assert before is None or bits_of(given) == before


def test_the_good_file_of_these_tests_isgood_file(tmp_path: Path) -> None:
    """What the refusals above are about is what was changed, not the file it was changed in."""
    for write in (good_file, _changed(lambda header, tensors: None)):
        write(tmp_path / "model")
        assert load(tmp_path / "model", normalised()).seed == 2**62 + 1


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
    net = normalised()
    before = bits_of(net)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere", net)
    assert bits_of(net) == before
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
        load(path, normalised())
    assert not marker.exists()
    with path.open("rb") as file:
        explode(file)
    assert marker.exists()  # it would have gone off
