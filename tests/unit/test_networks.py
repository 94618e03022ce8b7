"""The builder of fully connected networks. Its users have the initial weights that they had on their own."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import bayesbackprop as bbb
from bayesbackprop import Normal
from bayesbackprop._networks import drawn_from, from_file, mlp
from bayesbackprop.sklearn._files import network
from bayesbackprop_paper.bench.contenders import DROPOUT, SGD, fully_connected
from bayesbackprop_paper.experiments import mnist

pytestmark = pytest.mark.identities


def kinds(net: nn.Sequential) -> list[type[nn.Module]]:
    return [type(module) for module in net]


def assert_same(net: nn.Module, weights: list[torch.Tensor]) -> None:
    assert [parameter.dtype for parameter in net.parameters()] == [weight.dtype for weight in weights]
    assert all(torch.equal(own, weight) for own, weight in zip(net.parameters(), weights, strict=True))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, lambda: nn.LeakyReLU(0.2)])
def test_linear_layers_and_activations_take_turns(activation: Callable[[], nn.Module]) -> None:
    net = mlp([5, 4, 3], activation)
    assert kinds(net) == [nn.Linear, type(activation()), nn.Linear]
    assert [tuple(parameter.shape) for parameter in net.parameters()] == [(4, 5), (4,), (3, 4), (3,)]
    assert repr(net[1]) == repr(activation())


def test_it_begins_as_the_layers_do() -> None:
    torch.manual_seed(7)
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise([5, 4, 3])]
    torch.manual_seed(7)
    assert_same(mlp([5, 4, 3]), [parameter for layer in layers for parameter in layer.parameters()])


def test_dropout_stands_before_each_layer() -> None:
    net = mlp([5, 4, 3], dropout=[0.1, 0.2])
    assert kinds(net) == [nn.Dropout, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear]
    assert [module.p for module in net if isinstance(module, nn.Dropout)] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([5],), "'sizes' parameter of mlp must be at least two ints"),
        (([5, 0],), r"'sizes' parameter of mlp must be an int in \[1, inf\)"),
        (([5, 4, 3], nn.ReLU, [0.5]), "'dropout' parameter of mlp must be 2 probabilities, one for each layer"),
    ],
)
def test_mistakes_are_said(arguments: tuple[object, ...], message: str) -> None:
    sizes, activation, dropout = (*arguments, nn.ReLU, None)[:3] if len(arguments) == 1 else arguments
    with pytest.raises(ValueError, match=message):
        mlp(sizes, activation, dropout=dropout)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_layers_drawn_from_a_generator_have_the_bounds_of_linear(dtype: torch.dtype | None) -> None:
    before = torch.get_rng_state()
    net = mlp([400, 300, 2], linear=drawn_from(torch.Generator().manual_seed(1), dtype))
    assert torch.equal(torch.get_rng_state(), before)
    for layer in (net[0], net[2]):
        bound = layer.in_features**-0.5
        for parameter in layer.parameters():
            assert parameter.dtype == (dtype or torch.float32)
            assert float(parameter.detach().abs().max()) <= bound
        assert float(layer.weight.detach().abs().max()) > 0.99 * bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_estimators_begin_with_the_uniform_weights_of_their_seed(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(11)
    weights = []
    for inputs, outputs in pairwise([3, 5, 2]):
        for shape in ((outputs, inputs), (outputs,)):
            empty = torch.empty(shape, dtype=dtype)
            weights.append(nn.init.uniform_(empty, -(inputs**-0.5), inputs**-0.5, generator=random))
    model = network([3, 5, 2], "tanh", {"kind": "Categorical"}, {"*": Normal(1.0)}, dtype, seed=11)
    assert kinds(model.net) == [nn.Linear, nn.Tanh, nn.Linear]
    assert_same(model.net, weights)


@pytest.mark.parametrize("method", mnist.METHODS)
def test_the_networks_for_mnist_begin_as_he_et_al_say(method: mnist.Method) -> None:
    config = mnist.Config(method, units=6, seed=3, dropout=0.4)
    torch.manual_seed(3)
    weights = []
    for inputs, outputs in pairwise([784, 6, 6, 10]):
        layer = nn.Linear(inputs, outputs)  # draws numbers, too
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        weights += [layer.weight, torch.zeros(outputs)]
    net = mnist.network(config)
    assert_same(net, weights)
    drops = [module.p for module in net if isinstance(module, nn.Dropout)]
    assert drops == (3 * [0.4] if method == "dropout" else [])
    forgets = [isinstance(module, mnist.DropConnect) for module in net if isinstance(module, nn.Linear)]
    assert forgets == [False, method == "dropconnect", method == "dropconnect"]


def test_the_networks_of_the_benchmarks_begin_as_the_layers_do() -> None:
    torch.manual_seed(5)
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise([7, 5, 4, 3])]
    weights = [parameter for layer in layers for parameter in layer.parameters()]
    for contender, rates in ((SGD, []), (DROPOUT, [0.2, 0.5, 0.5])):
        torch.manual_seed(5)
        net = contender.build(fully_connected((7, 5, 4, 3))).module
        assert_same(net, weights)
        assert [module.p for module in net.modules() if isinstance(module, nn.Dropout)] == rates


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU, nn.ReLU])
def test_a_network_from_a_file_has_its_own_activation(activation: type[nn.Module], tmp_path: Path) -> None:
    model = bbb.Bayesian(mlp([3, 8, 2], activation), bbb.Categorical(), seed=0)
    bbb.save(model, tmp_path / "model")
    x = torch.randn(4, 3)
    found = from_file(tmp_path / "model")
    assert torch.equal(found.net(x), model.net(x))


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.3), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 2)),
    ],
    ids=["two kinds", "arguments", "not elementwise"],
)
def test_a_file_of_another_network_is_refused(net: nn.Module, tmp_path: Path) -> None:
    bbb.save(bbb.Bayesian(net, bbb.Categorical(), seed=0), tmp_path / "model")
    with pytest.raises(ValueError, match="with one kind of activation"):
        from_file(tmp_path / "model")
