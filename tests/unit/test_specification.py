"""Which parameters are Bayesian, and with what: selection, patterns of names, and mistakes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace as TorchLaplace
from torch.distributions import Normal as TorchNormal
from torch.distributions import kl_divergence

from bayesbackprop import Bayesian, FreeEnergy, Gaussian, Laplace, Normal, Relative, ScaleMixture
from layers import each_estimator
from networks import net_with_norm

pytestmark = pytest.mark.identities


def _wrap(net: nn.Module, prior: Any = None, **options: Any) -> Bayesian:
    return Bayesian(net.double(), Gaussian(1.0), prior, seed=3, **options)


def _bayesian(model: Bayesian) -> set[str]:
    return {entry.name for entry in model.plan if entry.prior is not None}


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
    net = net_with_norm()
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
    net = net_with_norm()
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
        net_with_norm(),
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
    model = _wrap(net_with_norm(), {"*.bias": Laplace(0.5), "0.*": Normal(0.1), "*": Normal(2.0)}, sigma=0.5)
    torch_priors = {"0.weight": TorchNormal(0.0, 0.1), "3.weight": TorchNormal(0.0, 2.0)}
    draw, expected = model.draw(), torch.zeros(()).double()
    for name, q in model.posterior.items():
        prior, at = torch_priors.get(name, TorchLaplace(0.0, 0.5)), draw.weights[name]
        expected = expected + (TorchNormal(q.mu, q.sigma).log_prob(at) - prior.log_prob(at)).sum()
    torch.testing.assert_close(draw.complexity(), expected)


@pytest.mark.parametrize("rule", ["local", "flipout"])
def test_a_bias_follows_its_weight(rule: str) -> None:
    other = {"local": "flipout", "flipout": "local"}[rule]
    model = _wrap(net_with_norm(), sigma=0.5, estimator={"*.weight": rule, "0.bias": "shared", "3.bias": other})
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


# --- mistakes --------------------------------------------------------------------------------------------------------


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
    "empty prior": (r"'prior' .* covers '0\.weight' too \(add a pattern '\*'.*Got only \[\]", lambda: {"prior": {}}),
    "empty sigma": (r"'sigma' .* covers '0\.weight' too", lambda: {"sigma": {}}),
    "empty estimator": (r"'estimator' .* covers '0\.weight' too", lambda: {"estimator": {}}),
    "rule": (r"'estimator' .* one of .*Got 'global'", lambda: {"estimator": "global"}),
    "no prior": (r"'prior' .* a Prior for '0\.weight'.*Got 1\.0", lambda: {"prior": 1.0}),
    "negative sigma": (r"'sigma' .* \(0, inf\)\. Got -0\.1", lambda: {"sigma": -0.1}),
    "sigma is a variance of zero": (r"'sigma' .* positive and finite", lambda: {"sigma": lambda mu: 0 * mu}),
    "sigma of another shape": (r"'sigma' .* for each weight", lambda: {"sigma": lambda mu: mu.new_ones(1, 1, 1)}),
    "nothing": (r"at least one parameter", lambda: {"select": lambda name, module: False}),
    "centre": (r"'centre' .* a tensor for each of", lambda: {"centre": {}}),
    "centre with a hole": (
        r"'centre' .* a tensor for each of",
        lambda: {"centre": {k: v for k, v in net_with_norm().state_dict().items() if k != "0.bias"}},
    ),
    "centre with an unknown name": (
        r"'centre' .* a tensor for each of",
        lambda: {"centre": {**net_with_norm().state_dict(), "7.weight": torch.zeros(1)}},
    ),
    "centre of another shape": (
        r"'centre' .* of shape \[4, 3\] for '0\.weight'",
        lambda: {"centre": {**net_with_norm().state_dict(), "0.weight": torch.zeros(3, 4)}},
    ),
    "centre with NaN": (
        r"'centre' .* finite",
        lambda: {"centre": {**net_with_norm().state_dict(), "0.bias": torch.full((4,), torch.nan)}},
    ),
    "seed": (r"'seed' .* Got -1", lambda: {"seed": -1}),
}


@pytest.mark.parametrize(("message", "options"), REFUSED.values(), ids=list(REFUSED))
def test_a_mistake_is_refused_and_leaves_the_network_alone(message: str, options: Callable[[], Any]) -> None:
    net = net_with_norm().double()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        Bayesian(net, Gaussian(1.0), **options())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
