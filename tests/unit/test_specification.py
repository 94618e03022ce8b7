"""Which parameters are Bayesian, with what, and tied weights: one random variable, counted once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace as TorchLaplace
from torch.distributions import Normal as TorchNormal
from torch.distributions import kl_divergence
from torch.func import functional_call

from bayesbackprop import Bayesian, FreeEnergy, Gaussian, Laplace, Normal, Relative, ScaleMixture

pytestmark = pytest.mark.identities

each_estimator = pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])


class Tied(nn.Module):
    """An embedding and a decoder that share their weight, under the name of whichever comes first."""

    def __init__(self, decoder_first: bool = False, tied: bool = True) -> None:
        super().__init__()
        modules = [("embedding", nn.Embedding(5, 3)), ("decoder", nn.Linear(3, 5))]
        for name, module in reversed(modules) if decoder_first else modules:
            self.add_module(name, module)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(x)
        return embedded, self.decoder(torch.eye(3, dtype=embedded.dtype))


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))


def _wrap(net: nn.Module, prior: Any = None, **options: Any) -> Bayesian:
    return Bayesian(net.double(), Gaussian(1.0), prior, seed=3, **options)


def _bayesian(model: Bayesian) -> set[str]:
    return {entry.name for entry in model.plan if entry.prior is not None}


# --- tied weights ----------------------------------------------------------------------------------------------------


@each_estimator
@pytest.mark.parametrize("decoder_first", [False, True])
def test_tied_weights_are_one_random_variable(estimator: str, decoder_first: bool) -> None:
    net = Tied(decoder_first)
    model = _wrap(net, Normal(1.0), sigma=0.5, estimator=estimator)
    name = "decoder.weight" if decoder_first else "embedding.weight"
    assert list(model.posterior) == [n for n, _ in net.named_parameters()]  # torch names it once, and so do we
    assert set(model.posterior) == {name, "decoder.bias"}
    assert sum(q.numel for q in model.posterior.values()) == 5 * 3 + 5

    draw, x = model.draw(), torch.arange(5)
    embedded, decoded = draw(x)
    w, b = draw.weights[name], draw.weights["decoder.bias"]
    assert torch.equal(embedded, w)
    torch.testing.assert_close(decoded, w.T + b)
    assert not torch.isclose(w, net.embedding.weight, atol=1e-3).all()

    # The complexity is that of one copy, sampled and closed.
    copy = _wrap(nn.Linear(3, 5), Normal(1.0), sigma=0.5)
    copy.net.load_state_dict({"weight": net.embedding.weight, "bias": net.decoder.bias})
    torch.testing.assert_close(model.complexity_closed(), copy.complexity_closed())
    each = {n: (TorchNormal(q.mu, q.sigma), draw.weights[n]) for n, q in model.posterior.items()}
    sampled = sum((q.log_prob(at) - TorchNormal(0.0, 1.0).log_prob(at)).sum() for q, at in each.values())
    torch.testing.assert_close(draw.complexity(), sampled)


def test_the_gradient_of_a_tied_weight_is_the_sum_over_its_uses() -> None:
    torch.manual_seed(1)
    tied, apart = Tied(), Tied(tied=False)
    apart.decoder.load_state_dict(tied.decoder.state_dict())
    apart.embedding.load_state_dict(tied.embedding.state_dict())
    model, x = _wrap(tied, sigma=0.5), torch.arange(5)
    apart.double()
    draw = model.draw()
    w = draw.weights["embedding.weight"].detach()

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[0].square().sum() + outputs[1].square().sum()

    loss(draw(x)).backward()
    copies = {"embedding.weight": w.clone().requires_grad_(), "decoder.weight": w.clone().requires_grad_()}
    bias = draw.weights["decoder.bias"].detach()
    loss(functional_call(apart, {**copies, "decoder.bias": bias}, (x,))).backward()
    gradients = [copy.grad for copy in copies.values()]
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    torch.testing.assert_close(tied.embedding.weight.grad, gradients[0] + gradients[1])


def test_a_tied_weight_answers_to_the_name_torch_gives_it() -> None:
    model = _wrap(Tied(), {"embedding.*": Normal(0.3), "*": Normal(2.0)}, sigma={"embedding.weight": 0.2, "*": 0.1})
    assert {entry.name: entry.prior for entry in model.plan} == {
        "embedding.weight": Normal(0.3),
        "decoder.bias": Normal(2.0),
    }
    torch.testing.assert_close(model.posterior["embedding.weight"].sigma, torch.full((5, 3), 0.2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"must be .*'embedding\.weight'.* Got 'decoder\.weight' instead"):
        _wrap(Tied(), sigma={"decoder.weight": 0.2, "*": 0.1})


# --- which parameters ------------------------------------------------------------------------------------------------

SELECTIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "default": ({}, {"0.weight", "0.bias", "3.weight", "3.bias"}),
    "last layer": ({"select": lambda name, module: name.startswith("3.")}, {"3.weight", "3.bias"}),
    "by module": (
        {"select": lambda name, module: isinstance(module, nn.Linear) and module.in_features == 3},
        {"0.weight", "0.bias"},
    ),
    "no biases": ({"select": lambda name, module: not name.endswith("bias")}, {"0.weight", "3.weight"}),
    "normalisation": (
        {"normalisation": True},
        {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"},
    ),
    "normalisation, selected": (
        {"normalisation": True, "select": lambda name, module: isinstance(module, nn.LayerNorm)},
        {"1.weight", "1.bias"},
    ),
}


@each_estimator
@pytest.mark.parametrize(("options", "expected"), SELECTIONS.values(), ids=list(SELECTIONS))
def test_only_what_is_selected_is_random(options: dict[str, Any], expected: set[str], estimator: str) -> None:
    net = _net()
    model = _wrap(net, Normal(1.0), sigma=0.5, estimator=estimator, **options)
    assert _bayesian(model) == set(model.posterior) == set(model.draw().weights) == expected
    assert {name.removeprefix("rho.") for name, _ in model.named_parameters() if name.startswith("rho.")} == expected
    assert all(entry.reason for entry in model.plan if entry.prior is None)
    closed = sum(
        kl_divergence(TorchNormal(q.mu, q.sigma), TorchNormal(0.0, 1.0)).sum() for q in model.posterior.values()
    )
    torch.testing.assert_close(model.complexity_closed(), closed)
    # What is left out still trains, by the likelihood alone.
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    FreeEnergy(model, n=5)(x, y).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    assert not torch.allclose(model.draw()(x), net(x), atol=1e-3)


@each_estimator
def test_frozen_parameters_stay_as_they_are(estimator: str) -> None:
    net = _net()
    net[0].requires_grad_(False)
    model = _wrap(net, sigma=0.5, estimator=estimator)
    assert _bayesian(model) == {"3.weight", "3.bias"}
    assert all("frozen" in entry.reason for entry in model.plan if entry.name.startswith("0."))
    FreeEnergy(model, n=5)(torch.randn(5, 3).double(), torch.randn(5, 2).double()).backward()
    assert net[0].weight.grad is None
    assert net[3].weight.grad is not None


class Custom(nn.Module):
    """Normalisation under the name that model libraries give it, and two layers that a rule could take for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm()
        self.normaliser = Normaliser(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.normaliser(x * self.norm.weight)


class LlamaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Normaliser(nn.Linear):
    pass


def test_normalisation_is_known_by_its_name() -> None:
    assert _bayesian(_wrap(Custom())) == {"normaliser.weight", "normaliser.bias"}
    every = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.RMSNorm]
    layers = [kind(4) for kind in every] + [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)]
    assert _bayesian(_wrap(nn.Sequential(*layers, nn.Linear(4, 4)))) == {"8.weight", "8.bias"}


# --- patterns --------------------------------------------------------------------------------------------------------


def test_the_first_matching_pattern_counts() -> None:
    model = _wrap(
        _net(),
        {"3.bias": Laplace(0.5), "*.bias": Normal(2.0), "0.*": Normal(0.1), "*": ScaleMixture()},
        sigma={"0.*": 0.3, "*.weight": Relative(0.5, floor=1e-2), "*": lambda mu: torch.full_like(mu, 0.7)},
        estimator={"3.*": "flipout", "*": "local"},
    )
    plan = {entry.name: (entry.prior, entry.estimator) for entry in model.plan if entry.prior is not None}
    assert plan == {
        "0.weight": (Normal(0.1), "local"),
        "0.bias": (Normal(2.0), "local"),
        "3.weight": (ScaleMixture(), "flipout"),
        "3.bias": (Laplace(0.5), "flipout"),
    }
    sigma = {name: q.sigma for name, q in model.posterior.items()}
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(sigma[name], torch.full_like(sigma[name], 0.3))
    torch.testing.assert_close(sigma["3.weight"], (0.5 * model.net[3].weight.abs()).clamp(min=1e-2))
    torch.testing.assert_close(sigma["3.bias"], torch.full_like(sigma["3.bias"], 0.7))


def test_each_prior_counts_for_its_own_parameter() -> None:
    model = _wrap(_net(), {"*.bias": Laplace(0.5), "0.*": Normal(0.1), "*": Normal(2.0)}, sigma=0.5)
    torch_priors = {"0.weight": TorchNormal(0.0, 0.1), "3.weight": TorchNormal(0.0, 2.0)}
    draw, expected = model.draw(), torch.zeros(()).double()
    for name, q in model.posterior.items():
        prior, at = torch_priors.get(name, TorchLaplace(0.0, 0.5)), draw.weights[name]
        expected = expected + (TorchNormal(q.mu, q.sigma).log_prob(at) - prior.log_prob(at)).sum()
    torch.testing.assert_close(draw.complexity(), expected)


@pytest.mark.parametrize("rule", ["local", "flipout"])
def test_a_bias_follows_its_weight(rule: str) -> None:
    other = {"local": "flipout", "flipout": "local"}[rule]
    model = _wrap(_net(), sigma=0.5, estimator={"*.weight": rule, "0.bias": "shared", "3.bias": other})
    plan = {entry.name: entry for entry in model.plan}
    assert {plan[name].estimator for name in ("0.weight", "3.weight")} == {rule}
    assert {plan[name].estimator for name in ("0.bias", "3.bias")} == {"shared"}
    assert not plan["0.bias"].reason
    assert plan["3.bias"].reason == f"no {other}: a bias follows its weight, which has {rule}"
    # At a zero input a layer is its bias, which all examples share though the weight has a rule of its own.
    layer = _wrap(nn.Linear(3, 4), sigma=0.5, estimator={"weight": rule, "bias": "shared"})
    output = layer.draw()(torch.zeros(2, 3).double())
    torch.testing.assert_close(output, layer.draw().weights["bias"].expand(2, -1))


class Odd(nn.Module):
    """Names with the letters that patterns give a meaning to."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"user[id]": nn.Linear(2, 2), "useri": nn.Linear(2, 2), "a*": nn.Linear(2, 2)})

    def forward(self, x: Tensor) -> Tensor:
        return sum(head(x) for head in self.heads.values())


def test_a_name_with_the_letters_of_a_pattern_means_itself() -> None:
    names = [name for name, _ in Odd().named_parameters()]
    priors = {name: Normal(1.0 + at) for at, name in enumerate(names)}
    model = _wrap(Odd(), priors)
    assert {entry.name: entry.prior for entry in model.plan} == priors


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "prior": (
        r"'prior' parameter of Bayesian must be .*Got '7\.\*'",
        lambda: {"prior": {"7.*": Normal(), "*": Normal()}},
    ),
    "sigma": (r"'sigma' parameter of Bayesian must be .*Got 'weight'", lambda: {"sigma": {"weight": 0.1, "*": 0.2}}),
    "estimator": (
        r"'estimator' parameter of Bayesian must be .*Got '1\.\*'",  # the norm's weights are no random variables
        lambda: {"estimator": {"1.*": "shared", "*": "shared"}},
    ),
    "hole": (r"'prior' .* covers '0\.bias' too", lambda: {"prior": {"*.weight": Normal()}}),
    "rule": (r"'estimator' .* one of .*Got 'global'", lambda: {"estimator": "global"}),
    "no prior": (r"'prior' .* a Prior for '0\.weight'.*Got 1\.0", lambda: {"prior": 1.0}),
    "negative sigma": (r"'sigma' .* \(0, inf\)\. Got -0\.1", lambda: {"sigma": -0.1}),
    "sigma is a variance of zero": (r"'sigma' .* positive and finite", lambda: {"sigma": lambda mu: 0 * mu}),
    "sigma of another shape": (r"'sigma' .* for each weight", lambda: {"sigma": lambda mu: mu.new_ones(1, 1, 1)}),
    "nothing": (r"at least one parameter", lambda: {"select": lambda name, module: False}),
    "centre": (r"'centre' .* a tensor for each of", lambda: {"centre": {}}),
    "centre with a hole": (
        r"'centre' .* a tensor for each of",
        lambda: {"centre": {k: v for k, v in _net().state_dict().items() if k != "0.bias"}},
    ),
    "centre with an unknown name": (
        r"'centre' .* a tensor for each of",
        lambda: {"centre": {**_net().state_dict(), "7.weight": torch.zeros(1)}},
    ),
    "centre of another shape": (
        r"'centre' .* of shape \[4, 3\] for '0\.weight'",
        lambda: {"centre": {**_net().state_dict(), "0.weight": torch.zeros(3, 4)}},
    ),
    "centre with NaN": (
        r"'centre' .* finite",
        lambda: {"centre": {**_net().state_dict(), "0.bias": torch.full((4,), torch.nan)}},
    ),
    "seed": (r"'seed' .* Got -1", lambda: {"seed": -1}),
}


@pytest.mark.parametrize(("message", "options"), REFUSED.values(), ids=list(REFUSED))
def test_a_mistake_is_refused_and_leaves_the_network_alone(message: str, options: Callable[[], Any]) -> None:
    net = _net().double()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        Bayesian(net, Gaussian(1.0), **options())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


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


@pytest.mark.parametrize("make", [_net, _with_buffers, Tied], ids=["norm", "buffers", "tied"])
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
@pytest.mark.parametrize("make", [_net, Tied, lambda: nn.LSTM(3, 2)], ids=["layers", "tied", "lstm"])
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
