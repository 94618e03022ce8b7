"""Prediction with fully connected networks in the quickest way: each example has what drawn networks give it."""

import pytest
import torch
from bayesbackprop.rowwise import _ROWS, chain_of
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, Gaussian, ScaleMixture
from bayesbackprop import _engine as kernels
from ztests import assert_mean, assert_z

FEW, MANY = 3, _ROWS  # examples: all layers draw outputs, or only the first does


def deep(bias: bool = True) -> nn.Sequential:
    """Nested, with a layer that is not random before and after, and Dropout, which does nothing in evaluation."""
    inner = nn.Sequential(nn.Linear(6, 5, bias), nn.Tanh(), nn.Dropout(0.5))
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6, bias), nn.ReLU(), inner, nn.Linear(5, 2, bias))


def wrap(net: nn.Module, **options: object) -> Bayesian:
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.6)
    return Bayesian(net, Gaussian(0.1), sigma=0.3, seed=3, **options)


def drawn(model: Bayesian, x: Tensor, draws: int, estimator: str | None) -> Tensor:
    predicted = model.predict(x, draws=draws, estimator=estimator)
    return predicted.components.mean.reshape(draws, len(x), -1)


@pytest.mark.statistical
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("examples", [FEW, MANY])
@pytest.mark.parametrize("select", [None, lambda name, _: not name.startswith("3.")])
def test_each_example_has_the_distribution_of_drawn_networks(bias, examples, select):
    """Mean, variance, and the covariance of the two outputs, which share what comes before them."""
    model = wrap(deep(bias), select=select)
    assert model.layout().chain is not None
    x = torch.randn(FEW, 2, 2).repeat(-(-examples // FEW), 1, 1)[:examples]
    draws = 8000
    quick, slow = (drawn(model, x, draws, estimator)[:, :FEW] for estimator in (None, "shared"))
    error = ((quick.var(0) + slow.var(0)) / draws).sqrt()
    assert_z(((quick.mean(0) - slow.mean(0)) / error).flatten(), "mean")
    centred = [each - each.mean(0) for each in (quick, slow)]
    for name, (a, b) in {
        "variance": [c.square() for c in centred],
        "covariance": [c[..., 0] * c[..., 1] for c in centred],
        "skewness": [c**3 for c in centred],
    }.items():
        error = ((a.var(0) + b.var(0)) / draws).sqrt()
        assert_z(((a.mean(0) - b.mean(0)) / error).flatten(), name)


@pytest.mark.statistical
def test_one_layer_is_the_exact_gaussian():
    model = Bayesian(nn.Sequential(nn.Linear(3, 2)).double(), Gaussian(0.1), sigma=0.3, seed=1)
    x = torch.randn(FEW, 3).double()
    outputs = drawn(model, x, 20_000, None)
    q = model.posterior
    mean = x @ q["0.weight"].mu.T + q["0.bias"].mu
    variance = x.square() @ q["0.weight"].sigma.square().T + q["0.bias"].sigma.square()
    assert_mean(outputs - mean.detach(), 0.0, "mean")
    assert_mean((outputs - mean.detach()).square() / variance.detach(), 1.0, "variance")


@pytest.mark.identities
@pytest.mark.parametrize("examples", [FEW, MANY])
def test_the_same_draws_in_parts_with_more_of_them_and_on_the_plain_equations(examples):
    model = wrap(deep())
    x = torch.randn(examples, 4)
    whole = drawn(model, x, 7, None)
    assert torch.equal(whole, drawn(model, x, 9, None)[:7])
    one_at_a_time = model.predict(x, draws=7, memory=1)
    torch.testing.assert_close(one_at_a_time.components.mean.reshape(whole.shape), whole)
    assert len(whole[:, 0, 0].unique()) == 7
    with kernels.plain():
        torch.testing.assert_close(drawn(model, x, 7, None), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.identities
def test_training_mode_comes_back_and_constant_weights_have_no_noise():
    net = deep()
    model = wrap(net)
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


@pytest.mark.identities
@pytest.mark.parametrize("net", OTHERS.values(), ids=list(OTHERS))
def test_other_networks_are_drawn_whole(net):
    model = Bayesian(net, Gaussian(0.1), seed=0)
    assert model.layout().chain is None
    if not isinstance(net[0], nn.Flatten):
        x = torch.randn(FEW, 4)
        assert torch.equal(drawn(model, x, 3, None), drawn(model, x, 3, "shared"))


@pytest.mark.identities
@pytest.mark.parametrize("partly", ["weight", "bias"])
def test_a_layer_that_is_random_in_part_is_drawn_whole(partly):
    model = wrap(nn.Sequential(nn.Linear(4, 2)), select=lambda name, _: name.endswith(partly))
    assert model.layout().chain is None


@pytest.mark.identities
def test_hooks_and_replaced_forwards_are_called():
    model, x, calls = wrap(deep()), torch.randn(FEW, 4), []
    handle = model.net[1].register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(drawn(model, x, 3, None), drawn(model, x, 3, "shared"))
    assert calls
    handle.remove()
    assert not torch.equal(drawn(model, x, 3, None), drawn(model, x, 3, "shared"))
    model.net[2].forward = torch.tanh
    assert torch.equal(drawn(model, x, 3, None), drawn(model, x, 3, "shared"))


@pytest.mark.identities
@pytest.mark.parametrize("shape", [(4,), (FEW, 2, 4)])
def test_other_shapes_of_input_are_drawn_whole(shape):
    model = wrap(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))
    x = torch.randn(shape)
    quick, slow = (model.predict(x, draws=3, estimator=estimator).mean for estimator in (None, "shared"))
    assert torch.equal(quick, slow)


@pytest.mark.identities
def test_bad_input_has_torchs_own_error():
    model = Bayesian(deep(), Categorical(), ScaleMixture(), seed=0)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.predict(torch.randn(FEW, 5))
    with pytest.raises(RuntimeError, match="dtype"):
        model.predict(torch.randn(FEW, 4).double())


def test_a_layer_added_later_is_noticed():
    model, x = wrap(deep()), torch.randn(FEW, 4)
    before = drawn(model, x, 3, None)
    model.net.append(nn.Tanh())
    torch.testing.assert_close(drawn(model, x, 3, None), before.tanh())


def test_a_chain_needs_all_random_weights():
    net = deep()
    assert chain_of(net, [*net.parameters()]) is not None
    assert chain_of(net, [*net.parameters(), nn.Parameter(torch.ones(1))]) is None
