"""The wrapper: sigma and centre as asked for, the network left to its user, mistakes explained."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal as TorchNormal
from torch.distributions import kl_divergence

from bayesbackprop import Bayesian, FreeEnergy, Gaussian, Normal, Relative
from layers import each_estimator
from networks import Tied, net_with_norm, regression_model

pytestmark = pytest.mark.identities


def _wrap(net: nn.Module, prior: Any = None, **options: Any) -> Bayesian:
    return Bayesian(net.double(), Gaussian(1.0), prior, seed=3, **options)


# --- sigma and centre ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [1e-8, 1e-3, 0.5, 3.0, 100.0])
def test_sigma_starts_where_it_was_asked_to(sigma: float) -> None:
    (q,) = _wrap(nn.Linear(3, 2, bias=False), sigma=sigma).posterior.values()
    torch.testing.assert_close(q.sigma, torch.full((2, 3), sigma, dtype=torch.float64), rtol=1e-9, atol=0)


def test_relative_sigma_follows_each_weight_and_has_a_floor() -> None:
    net = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-2.0, 0.0, 0.05]], dtype=torch.float64))
    (q,) = _wrap(net, sigma=Relative(0.1, floor=0.01)).posterior.values()
    torch.testing.assert_close(q.sigma, torch.tensor([[0.2, 0.01, 0.01]], dtype=torch.float64))
    torch.testing.assert_close(q.snr, torch.tensor([[10.0, 0.0, 5.0]], dtype=torch.float64))


def _checkpoint(net: nn.Module) -> dict[str, Tensor]:
    """The state_dict of another network: norms, buffers and the second names of tied weights are in it too."""
    return {name: value + 1 for name, value in net.state_dict().items()}


def _with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("make", [net_with_norm, _with_buffers, Tied], ids=["norm", "buffers", "tied"])
@pytest.mark.parametrize("choose", [None, _checkpoint], ids=["net", "checkpoint"])
def test_the_prior_is_centred_on_what_it_was_given(make: Callable[[], nn.Module], choose: Any) -> None:
    net = make().double()
    around = {name: value.clone() for name, value in (choose(net) if choose else net.state_dict()).items()}
    centre: Any = around if choose else "net"
    model = Bayesian(net, Gaussian(1.0), Normal(0.5), sigma=0.2, centre=centre, seed=3)
    with torch.no_grad():
        for parameter in net.parameters():  # training moves the net, not the centre
            parameter.add_(0.3)
    posterior = {name: TorchNormal(q.mu, q.sigma) for name, q in model.posterior.items()}
    prior = {name: TorchNormal(around[name], 0.5) for name in posterior}
    closed = sum(kl_divergence(posterior[name], prior[name]).sum() for name in posterior)
    torch.testing.assert_close(model.complexity_closed(), closed)
    draw = model.draw()
    sampled = sum((posterior[n].log_prob(at) - prior[n].log_prob(at)).sum() for n, at in draw.weights.items())
    torch.testing.assert_close(draw.complexity(), sampled)
    assert not any(name.startswith("centre") for name, _ in model.named_parameters())


# --- the network is the user's ---------------------------------------------------------------------------------------


@each_estimator
@pytest.mark.parametrize("make", [net_with_norm, Tied, lambda: nn.LSTM(3, 2)], ids=["layers", "tied", "lstm"])
def test_wrapping_leaves_the_network_what_it_was(make: Callable[[], nn.Module], estimator: str) -> None:
    net = make()
    x = torch.arange(5) if isinstance(net, Tied) else torch.randn(4, 3)
    kind, keys = type(net), list(net.state_dict())
    values = {name: value.clone() for name, value in net.state_dict().items()}
    identities = {name: id(parameter) for name, parameter in net.named_parameters(remove_duplicate=False)}
    before = net(x)
    y = torch.zeros_like(before[0] if isinstance(before, tuple) else before)
    likelihood = First() if isinstance(before, tuple) else Gaussian(1.0)
    model = Bayesian(net, likelihood, estimator=estimator, sigma=0.5)
    FreeEnergy(model, n=10)(x, y).backward()
    model.draw()(x)
    model.ensemble(2)
    assert model.net is net
    assert type(net) is kind
    assert list(net.state_dict()) == keys
    assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items())
    named = net.named_parameters(remove_duplicate=False)
    assert {name: id(parameter) for name, parameter in named} == identities
    torch.testing.assert_close(net(x), before, rtol=0, atol=0)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


class First(Gaussian):
    """Of a network that returns several things, the first is the mean."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def log_prob(self, output: tuple[Tensor, ...], target: Tensor) -> Tensor:
        return super().log_prob(output[0], target)


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Bayesian(regression_model(), Gaussian(0.1)), "'net' parameter of Bayesian"),
        (lambda: regression_model(select="0.*"), "'select' parameter of Bayesian"),
        (lambda: regression_model().draw(step=2**32), "'step' parameter of Bayesian.draw"),
        (lambda: regression_model().draw(step=-1), "'step' parameter of Bayesian.draw"),
        (lambda: regression_model().draw(index=1.5), "'index' parameter of Bayesian.draw"),
    ],
)
def test_mistakes_are_explained(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
