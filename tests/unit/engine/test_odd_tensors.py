"""Tensors and networks that a kernel could misread are refused, copied, or left to the equations."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bayesbackprop import Bayesian, FreeEnergy, Gaussian, Normal, plain_kernels
from bayesbackprop._engine import cpu

pytestmark = pytest.mark.identities

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(5, 1)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def gradients(model: Bayesian) -> list[torch.Tensor]:
    model.zero_grad()
    FreeEnergy(model, n=100)(X, Y).backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found if gradient is not None]


@pytest.mark.parametrize("place", [0, 1])
def test_a_parameter_that_no_layer_uses_has_the_gradient_of_its_complexity_alone(place: int) -> None:
    net = network()
    net[place].extra = nn.Parameter(torch.full((3,), 5.0))
    model = Bayesian(net, Gaussian(0.5), Normal(1.0), seed=0)
    fast = gradients(model)
    with plain_kernels():
        torch.testing.assert_close(fast, gradients(model))


def test_a_weight_that_is_a_buffer_leaves_its_bias_random() -> None:
    net = network()
    weight = net[2].weight.detach()
    del net[2].weight
    net[2].register_buffer("weight", weight)
    model = Bayesian(net, Gaussian(0.5), sigma={"2.bias": 3.0, "*": 1e-3}, seed=0)
    assert float(model.predict(X, draws=200).epistemic.min()) > 4


@pytest.mark.parametrize("estimator", [None, "shared", "local", "flipout"])
def test_the_default_device_of_torch_has_no_say(estimator: str | None) -> None:
    model = Bayesian(network(), Gaussian(0.5), seed=0)
    expected = model.predict(X, draws=3, estimator=estimator).mean
    with torch.device("meta"):
        found = model.predict(X, draws=3, estimator=estimator).mean
    assert torch.equal(found, expected)


class _Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch._neg_view(gradient)


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch._efficientzerotensor(gradient.shape)


@pytest.mark.parametrize(("node", "sign"), [(_Negated, -1.0), (_Zero, 0.0)])
def test_gradients_that_are_views_or_nothing_are_read_as_what_they_say(node: type, sign: float) -> None:
    model = Bayesian(nn.Linear(3, 1), Gaussian(0.5), seed=0)
    weight = model.draw(1).weights["weight"]
    node.apply(weight).sum().backward()
    torch.testing.assert_close(model.net.weight.grad, torch.full((1, 3), sign))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_tensor_without_memory_is_refused() -> None:
    model = Bayesian(network(), Gaussian(0.5), seed=0)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="memory of its own"):
        model.draw(1)(X)


def test_a_tensor_at_an_odd_address_is_left_to_the_equations() -> None:
    """Such as a view of the bytes of a file. In C it is not allowed to read it as numbers."""
    net = network()
    model = Bayesian(net, Gaussian(0.5), seed=0)
    expected = gradients(model)
    content = bytearray(1) + net[0].weight.detach().numpy().tobytes()
    net[0].weight.data = torch.frombuffer(content, dtype=torch.float32, offset=1).view(4, 3)
    assert cpu.table(model.engine().parameters) is None
    torch.testing.assert_close(gradients(model), expected)


def test_a_storage_that_is_held_is_not_used_again() -> None:
    model = Bayesian(nn.Linear(300, 300), Gaussian(0.5), seed=0)
    storage = model.draw(1).weights["weight"].untyped_storage()
    before = storage.clone()
    _ = model.draw(2).weights
    now, then = (torch.empty(0, dtype=torch.uint8).set_(each) for each in (storage, before))
    assert torch.equal(now, then)
    assert cpu._LARGE <= 300 * 300
