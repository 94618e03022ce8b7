"""Prediction with fully connected networks in the quickest way, and which networks and inputs are predicted so."""

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, Gaussian, ScaleMixture, plain_kernels
from bayesbackprop._engine.mlp import _ROWS, ACTIVATIONS, FullyConnected
from predictions import drawn, nested_net, spread_out

pytestmark = pytest.mark.identities

FEW, MANY = 3, _ROWS  # examples: all layers draw outputs, or only the first does


def is_fully_connected(model: Bayesian) -> bool:
    return isinstance(model.engine().executors[0], FullyConnected)


@pytest.mark.parametrize("examples", [FEW, MANY])
def test_the_same_draws_in_parts_with_more_of_them_and_on_the_plain_equations(examples: int) -> None:
    model = spread_out(nested_net())
    x = torch.randn(examples, 4)
    whole = drawn(model, x, 7, None)
    assert torch.equal(whole, drawn(model, x, 9, None)[:7])
    one_at_a_time = model.predict(x, draws=7, memory=1)
    torch.testing.assert_close(one_at_a_time.components.mean.reshape(whole.shape), whole)
    assert len(whole[:, 0, 0].unique()) == 7
    with plain_kernels():
        torch.testing.assert_close(drawn(model, x, 7, None), whole, rtol=1e-4, atol=1e-4)


def test_training_mode_comes_back_and_constant_weights_have_no_noise() -> None:
    net = nested_net()
    model = spread_out(net)
    net.train()
    with torch.no_grad():
        for rho in model.rho.parameters():
            rho.fill_(-1e30)
    predicted = model.predict(torch.ones(FEW, 4), draws=5)
    assert net.training
    assert all(module.training for module in net.modules())
    net.eval()
    torch.testing.assert_close(predicted.mean, net(torch.ones(FEW, 4)).detach())
    assert (predicted.epistemic < 1e-12).all()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


shared_layer = nn.Linear(4, 4)
OTHERS = {
    "a layer of one's own": nn.Sequential(nn.Linear(4, 4), Mixing(), nn.Linear(4, 2)),
    "a subclass": nn.Sequential(nn.Linear(4, 4), Doubled(4, 2)),
    "used twice": nn.Sequential(shared_layer, nn.ReLU(), shared_layer),
    "batch normalisation": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
    "a softmax over the batch": nn.Sequential(nn.Linear(4, 4), nn.Softmax(0), nn.Linear(4, 2)),
    "flattened in between": nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(4, 2)),
    "the batch flattened": nn.Sequential(nn.Flatten(0), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("net", OTHERS.values(), ids=list(OTHERS))
def test_other_networks_are_drawn_whole(net: nn.Module) -> None:
    model = Bayesian(net, Gaussian(0.1), seed=0)
    assert not is_fully_connected(model)
    if not isinstance(net[0], nn.Flatten):
        x = torch.randn(FEW, 4)
        assert torch.equal(drawn(model, x, 3, None), drawn(model, x, 3, "shared"))


@pytest.mark.parametrize("partly", ["weight", "bias"])
def test_a_layer_that_is_random_in_part_is_drawn_whole(partly: str) -> None:
    model = spread_out(nn.Sequential(nn.Linear(4, 2)), select=lambda name, _: name.endswith(partly))
    assert not is_fully_connected(model)


def test_hooks_and_replaced_forwards_are_called() -> None:
    model, x, calls = spread_out(nested_net()), torch.randn(FEW, 4), []
    handle = model.net[1].register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(drawn(model, x, 3, None), drawn(model, x, 3, "shared"))
    assert calls
    handle.remove()
    assert not torch.equal(drawn(model, x, 3, None), drawn(model, x, 3, "shared"))
    model.net[2].forward = torch.tanh
    assert torch.equal(drawn(model, x, 3, None), drawn(model, x, 3, "shared"))


@pytest.mark.parametrize("shape", [(4,), (FEW, 2, 4)])
def test_other_shapes_of_input_are_drawn_whole(shape: tuple[int, ...]) -> None:
    model = spread_out(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))
    x = torch.randn(shape)
    quick, slow = (model.predict(x, draws=3, estimator=estimator).mean for estimator in (None, "shared"))
    assert torch.equal(quick, slow)


def test_bad_input_has_torchs_own_error() -> None:
    model = Bayesian(nested_net(), Categorical(), ScaleMixture(), seed=0)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.predict(torch.randn(FEW, 5))
    with pytest.raises(RuntimeError, match="dtype"):
        model.predict(torch.randn(FEW, 4).double())


def test_a_layer_added_later_is_noticed() -> None:
    model, x = spread_out(nested_net()), torch.randn(FEW, 4)
    before = drawn(model, x, 3, None)
    model.net.append(nn.Tanh())
    torch.testing.assert_close(drawn(model, x, 3, None), before.tanh())


def test_all_random_weights_must_be_in_the_layers() -> None:
    net = nested_net()
    assert is_fully_connected(spread_out(net))
    net.register_parameter("elsewhere", nn.Parameter(torch.ones(1)))
    assert not is_fully_connected(spread_out(net))


@pytest.mark.parametrize("rows", [1, 2, 7, _ROWS - 1])
def test_a_row_is_predicted_as_in_a_batch(rows: int) -> None:
    """Below ``_ROWS`` examples a row's draws are its own matter, whatever stands beside it."""
    model = spread_out(nested_net())
    x = torch.randn(rows, 4)
    together = drawn(model, x, 20, None)
    for row in range(min(rows, 5)):
        alone = drawn(model, x[row : row + 1], 20, None)
        torch.testing.assert_close(alone[:, 0], together[:, row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("examples", [FEW, MANY])
@pytest.mark.parametrize("kind", ACTIVATIONS, ids=lambda kind: kind.__name__)
def test_functions(kind: type[nn.Module], examples: int) -> None:
    """At the means, where nothing is random, a prediction is the network."""
    net = nn.Sequential(nn.Linear(4, 6), kind(), nn.Linear(6, 2), kind()).double()
    model = spread_out(net)
    assert is_fully_connected(model)
    with torch.no_grad():
        for rho in model.rho.parameters():
            rho.fill_(-30.0)
    x = torch.randn(examples, 4).double()
    predicted = drawn(model, x, 2, None)
    net.eval()
    torch.testing.assert_close(predicted, net(x).expand(2, -1, -1), rtol=1e-10, atol=1e-10)
