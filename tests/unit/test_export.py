"""The sparse network says what the means say, and its file is small, whole and refused where it is neither."""

import copy
import io
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, Gaussian, export, load_sparse, prune, save, save_sparse, sparse
from bayesbackprop._networks import mlp
from bayesbackprop.export import SparseLinear, SparseNetwork
from rewriting import rewrite

pytestmark = pytest.mark.identities


def _thin(net: nn.Module, density: float) -> nn.Module:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(torch.rand_like(parameter) < density)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: mlp((200, 300, 250, 10)),
    "one layer": lambda: nn.Linear(200, 300),
    "without biases": lambda: nn.Sequential(nn.Linear(200, 300, bias=False), nn.Tanh(), nn.Linear(300, 4, bias=False)),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Dropout(0.5), nn.Linear(200, 300), nn.GELU(approximate="tanh")),
        nn.Identity(),
        nn.Sequential(nn.Sequential(nn.Linear(300, 300), nn.LeakyReLU(0.3), nn.Softplus(2.0)), nn.Linear(300, 7)),
    ),
    "images": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(200, 300), nn.Sigmoid(), nn.Dropout(), nn.Linear(300, 200), nn.ELU(0.7, inplace=True)
    ),
    "functions first": lambda: nn.Sequential(
        nn.ReLU(), nn.Linear(200, 300), nn.Linear(300, 200), nn.Hardtanh(-0.1, 0.2)
    ),
    "double": lambda: mlp((200, 300, 10)).double(),
}


@pytest.mark.parametrize("density", [0, 0.002, 0.01, 0.1, 1])
@pytest.mark.parametrize("make", NETS.values(), ids=list(NETS))
def test_the_sparse_network_says_what_the_means_say(
    make: Callable[[], nn.Module], density: float, tmp_path: Path
) -> None:
    net = _thin(make(), density).train()
    small = sparse(net)
    assert all(module.training for module in net.modules())
    save_sparse(small, tmp_path / "net")
    dtype = next(net.parameters()).dtype
    with torch.no_grad():
        for network in (small, load_sparse(tmp_path / "net"), copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
            for batch in (0, 1, 2, 33):
                x = torch.randn(batch, 200, dtype=dtype)
                expected = net.eval()(x.clone())
                assert torch.allclose(network(x.clone()), expected, rtol=1e-6, atol=1e-6)
                net.train()


def test_dense_and_sparse_layers_stand_where_each_pays() -> None:
    net = mlp((200, 300, 250, 10))
    assert [type(layer) for layer in sparse(net).layers[::2]] == [nn.Linear] * 3
    _thin(net, 0.1)
    assert [type(layer) for layer in sparse(net).layers[::2]] == [
        SparseLinear,
        SparseLinear,
        nn.Linear,
    ]  # which is small
    assert sparse(net).layers[0].weight.layout is torch.sparse_csr
    assert not any(tensor.requires_grad for tensor in sparse(net).parameters())


def test_shapes_of_inputs() -> None:
    net = _thin(mlp((200, 300, 300)), 0.05)
    small = sparse(net)
    for shape in ((200,), (1, 200), (4, 200), (2, 3, 200), (1, 1, 200)):
        x = torch.randn(shape)
        assert torch.allclose(small(x), net(x), atol=1e-6)
    for shape in ((1, 199), (2, 100), (1, 400), (200, 1)):
        with pytest.raises(RuntimeError):
            small(torch.randn(shape))


def test_gradients_reach_the_input() -> None:
    net = _thin(mlp((200, 300, 300)), 0.05)
    small = sparse(net)
    for batch in (1, 3):
        x = torch.randn(batch, 200)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        small(mine).square().sum().backward()
        net(theirs).square().sum().backward()
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)  # type: ignore[arg-type]


def test_it_moves_and_converts_like_a_module() -> None:
    small = sparse(_thin(mlp((200, 300, 300)), 0.05))
    x = torch.randn(1, 200)
    before = small(x)
    assert torch.allclose(small.double()(x.double()).float(), before, atol=1e-5)
    assert "nonzero=" in repr(small)


def test_without_mkl_it_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _thin(mlp((200, 300, 300)), 0.05)
    monkeypatch.setattr(export, "_MATRIX_VECTOR", False)
    x = torch.randn(1, 200)
    assert torch.allclose(sparse(net)(x), net(x), atol=1e-6)


# Units: 0 is alive, 1 has nothing coming in, 2 nothing going out, 3 neither.
def _with_dead_units() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 2))
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight[[1, 3]] = 0
        for layer in (net[2], net[4]):
            layer.weight[:, [2, 3]] = 0
    return net


def _sizes(net: export.SparseNetwork) -> list[tuple[int, int]]:
    return [(layer.in_features, layer.out_features) for layer in net.layers if hasattr(layer, "in_features")]


def test_dead_units_go_and_constants_move_into_the_next_bias() -> None:
    net = _with_dead_units()
    small = sparse(net)
    assert _sizes(small) == [(3, 1), (1, 1), (1, 2)]
    x = torch.randn(9, 3)
    assert torch.allclose(small(x), net(x), atol=1e-6)
    expected = net[4].bias + net[4].weight[:, 1] * nn.functional.softplus(net[2].bias[1])
    assert torch.allclose(small.layers[4].bias, expected)


def test_death_spreads_in_both_directions() -> None:
    net = mlp((3, 4, 4, 2))
    with torch.no_grad():
        net[0].weight[0] = 0  # unit 0 is a constant, ...
        net[2].weight[0, 1:] = 0  # ... and so is unit 0 behind it, which sees nothing else
        net[4].weight[:, 1] = 0  # unit 1 is not used, ...
        net[2].weight[[0, 2, 3], 1] = 0  # ... nor is unit 1 before it, which nothing else sees
    small, x = sparse(net), torch.randn(9, 3)
    assert _sizes(small) == [(3, 2), (2, 2), (2, 2)]
    assert torch.allclose(small(x), net(x), atol=1e-6)


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_layer_that_dies_entirely_leaves_a_constant(layer: int, tmp_path: Path) -> None:
    net = mlp((3, 4, 4, 2))
    nn.init.zeros_(net[layer].weight)
    small, x = sparse(net), torch.randn(9, 3)
    save_sparse(small, tmp_path / "net")
    for network in (small, load_sparse(tmp_path / "net")):
        assert torch.allclose(network(x), net(x), atol=1e-6)
        assert torch.allclose(network(x[:1]), net(x[:1]), atol=1e-6)
        assert _sizes(network) == [(3, 0), (0, 0), (0, 2)]


def test_a_pruned_model_becomes_its_mean_network(tmp_path: Path) -> None:
    model = Bayesian(mlp((100, 400, 300, 10)), Categorical(), sigma=0.02)
    x = torch.rand(20, 100)
    for fraction in (0.5, 0.9, 0.98, 1.0):
        pruned = prune(model, fraction)
        small = sparse(pruned)
        assert torch.allclose(small(x), pruned.net(x), atol=1e-6)
        assert torch.allclose(small(x).softmax(1), pruned.predict_mean(x).mean, atol=1e-6)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
        nn.Sequential(nn.ReLU()),
        nn.GRU(2, 2),
        "a network",
    ],
    ids=["convolution", "norm", "no layer", "recurrent", "text"],
)
def test_networks_that_cannot_be_made_sparse_are_refused(net: Any) -> None:
    with pytest.raises(ValueError, match=r"'network' parameter of sparse must be nn.Linear and elementwise functions"):
        sparse(net)


def test_hooks_are_not_lost_silently() -> None:
    net = mlp((2, 2))
    net[0].register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(ValueError, match="without hooks"):
        sparse(net)


def test_what_picks_from_the_outputs_is_not_lost_silently() -> None:
    model, x = Bayesian(mlp((2, 3)), Categorical(), output=lambda outputs: outputs[:, 1:]), torch.ones(4, 2)
    with pytest.raises(ValueError, match="without output="):
        sparse(model)
    assert model.output is not None  # what the message says to do gives the prediction of the mean
    picked = model.output(sparse(model.net)(x))
    torch.testing.assert_close(picked.softmax(1), model.predict_mean(x).mean)


# --- its file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [[], [0], [255], [254], [256], [0, 255, 256], [511], [1023], [0, 1, 2, 900, 1023]])
def test_zeros_of_any_number_are_written(places: list[int]) -> None:
    matrix = torch.zeros(32, 32)
    matrix.view(-1)[places] = torch.arange(1.0, len(places) + 1)
    encoded = export._encode(matrix)
    assert torch.equal(export._decode(encoded, 32, 32, 0).to_dense(), matrix)
    zeros, last = 0, -1
    for place in [*places, 1024]:
        zeros, last = zeros + (place - last - 1) // 255, place
    assert len(encoded["gaps"]) == len(places) + zeros  # a byte for each weight, and one for each 255 zeros in a row


@pytest.mark.parametrize("density", [0.001, 0.02, 0.3, 0.79, 0.81, 1])
def test_any_matrix_is_read_as_it_was_written(density: float) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        matrix = (torch.randn(50, 60) * (torch.rand(50, 60) < density)).to(dtype)
        encoded = export._encode(matrix)
        assert torch.equal(export._decode(encoded, 50, 60, 0).to_dense(), matrix)
        assert sum(tensor.nbytes for tensor in encoded.values()) <= matrix.nbytes


@pytest.mark.supports("Files and formats", "sparse files", "a pruned network in a fifteenth")
def test_ninety_eight_percent_pruned_is_fifteen_times_smaller(tmp_path: Path) -> None:
    model = Bayesian(mlp((784, 1200, 1200, 10)), Categorical())
    safetensors.torch.save_file(model.net.state_dict(), tmp_path / "dense")
    save_sparse(sparse(prune(model, 0.98)), tmp_path / "sparse")
    assert os.path.getsize(tmp_path / "dense") > 15 * os.path.getsize(tmp_path / "sparse")


def _good(path: Path) -> None:
    save_sparse(sparse(_thin(mlp((200, 300, 300)), 0.05)), path)


def _changed(change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        _good(path)
        rewrite(path, lambda header, tensors: change(header["contents"], tensors))

    return write


def _cut(path: Path) -> None:
    _good(path)
    path.write_bytes(path.read_bytes()[:-1])


FILES: dict[str, Callable[[Path], Any]] = {
    "cut": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: torch.save(mlp((2, 2)).state_dict(), path),
    "a Bayesian checkpoint": lambda path: save(Bayesian(mlp((5, 7, 3)), Gaussian(0.5)), path),
    "another program's": lambda path: safetensors.torch.save_file(mlp((2, 2)).state_dict(), path),
    "a future format": lambda path: (_good(path), rewrite(path, lambda header, _: header.update(format=4))),
    "no layers": _changed(lambda meta, tensors: (meta.update(layers=[]), tensors.clear())),
    "layers are text": _changed(lambda meta, _: meta.update(layers="Linear")),
    "a layer of no known kind": _changed(lambda meta, _: meta["layers"][1].update(kind="Bomb")),
    "a function with odd arguments": _changed(lambda meta, _: meta["layers"][1].update(arguments={"slope": 1})),
    "a function without its arguments": _changed(lambda meta, _: meta["layers"][1].update(arguments={})),
    "too few outputs": _changed(lambda meta, _: meta["layers"][0].update(outputs=5)),
    "outputs that do not fit the next layer": _changed(lambda meta, _: meta["layers"][0].update(outputs=1000)),
    "negative inputs": _changed(lambda meta, _: meta["layers"][0].update(inputs=-1)),
    "inputs are text": _changed(lambda meta, _: meta["layers"][0].update(inputs="200")),
    "inputs that no memory holds": _changed(lambda meta, _: meta["layers"][0].update(inputs=2**60)),
    "a tensor is missing": _changed(lambda _, tensors: tensors.pop("0.gaps")),
    "a tensor too many": _changed(lambda _, tensors: tensors.update(more=torch.zeros(1))),
    "a value is missing": _changed(lambda _, tensors: tensors.update({"0.values": tensors["0.values"][:-1]})),
    "gaps beyond the end": _changed(lambda _, tensors: tensors["0.gaps"].fill_(254)),
    "gaps of another type": _changed(lambda _, tensors: tensors.update({"0.gaps": tensors["0.gaps"].int()})),
    "values of another type": _changed(lambda _, tensors: tensors.update({"0.values": tensors["0.values"].int()})),
    "values of another precision": _changed(
        lambda _, tensors: tensors.update({"0.values": tensors["0.values"].double()})
    ),
    "values that are zero": _changed(lambda _, tensors: tensors["0.values"][3:4].zero_()),
    "NaN": _changed(lambda _, tensors: tensors["0.values"][3:4].fill_(torch.nan)),
    "infinity": _changed(lambda _, tensors: tensors["0.values"][3:4].fill_(torch.inf)),
    "a matrix that is written twice": _changed(lambda _, tensors: tensors.update({"0.dense": torch.zeros(1)})),
    "gaps of two dimensions": _changed(lambda _, tensors: tensors.update({"0.gaps": tensors["0.gaps"][None]})),
} | {
    f"an argument that is {what}": _changed(
        lambda meta, _, alpha=alpha: meta["layers"].__setitem__(
            1, {"kind": "ELU", "arguments": {"alpha": alpha, "inplace": False}}
        )
    )
    for what, alpha in {"text": "1", "absurd": 1e308, "infinite": torch.inf, "no float": 2**64}.items()
}


@pytest.mark.parametrize("write", FILES.values(), ids=list(FILES))
def test_a_file_that_is_damaged_or_another_is_refused(write: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "net"
    write(path)
    with pytest.raises(ValueError, match=r"^The 'path' parameter of load_sparse must be .+\. Got .+ instead\.$"):
        load_sparse(path)


def test_the_good_file_of_these_tests_is_good(tmp_path: Path) -> None:
    for write in (_good, _changed(lambda meta, tensors: None)):
        write(tmp_path / "net")
        assert _sizes(load_sparse(tmp_path / "net"))[-1][1] == 300
    with pytest.raises(FileNotFoundError):
        load_sparse(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="a network that sparse"):
        save_sparse(mlp((2, 2)), tmp_path / "net")  # type: ignore[arg-type]


def test_no_file_claims_more_zeros_than_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred bytes were 4.3 GB in memory."""
    path = tmp_path / "net"

    def claim(units: int, format: int) -> None:
        save_sparse(sparse(mlp((3, 2))), path)
        layers = [{"kind": "Linear", "inputs": units, "outputs": units}]
        tensors = {"0.gaps": torch.zeros(3, dtype=torch.uint8), "0.values": torch.ones(3)}

        def change(header: dict[str, Any], found: dict[str, Tensor]) -> None:
            header.update(format=format)
            header["contents"].update(layers=layers)
            found.clear()
            found.update(tensors)

        rewrite(path, change)

    for format, most in ((3, 16), (2, 2048)):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "sparse_coo_tensor", None)  # nothing is allocated
            for units in (most, 2**15, 2**40):
                claim(units, format)
                with pytest.raises(ValueError, match=r"'path' parameter of load_sparse .* do not fit"):
                    load_sparse(path)
        claim(most - 1, format)
        assert _sizes(load_sparse(path)) == [(most - 1, most - 1)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_neither_made_nor_written(bad: float, tmp_path: Path) -> None:
    for name in ("weight", "bias"):
        net = mlp((5, 7, 3))
        model = Bayesian(net, Gaussian(0.5))
        with torch.no_grad():
            getattr(net[2], name).view(-1)[1] = bad
        for network in (net, model):
            with pytest.raises(ValueError, match=r"'network' parameter of sparse must be finite. Got NaN or inf"):
                sparse(network)
        with pytest.raises(ValueError, match=r"'net' parameter of save_sparse must be finite"):
            save_sparse(SparseNetwork(net), tmp_path / "net")
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "net"
    _good(path)
    old = path.read_bytes()
    small = sparse(_thin(mlp((200, 300, 300)), 0.1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            save_sparse(small, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["net"]


def test_a_state_dict_goes_through_torch_save() -> None:
    small, file = sparse(_thin(mlp((200, 300, 300)), 0.05)), io.BytesIO()
    x = torch.randn(3, 200)
    before = small(x)
    torch.save(small.state_dict(), file)
    file.seek(0)
    for tensor in small.state_dict().values():
        if tensor.is_floating_point():
            tensor.mul_(2)
    assert not torch.equal(small(x), before)
    small.load_state_dict(torch.load(file))
    assert torch.equal(small(x), before)
