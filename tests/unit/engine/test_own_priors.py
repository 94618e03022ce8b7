"""Priors that only Python knows, in pieces: the same costs, slopes and training as in one, in little memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Gaussian, LogDensity, Normal, Prior
from bayesbackprop._engine import ops, own_priors
from bayesbackprop._engine.parameters import Parameter, Parameters
from bayesbackprop.complexity import prior_cost
from bayesbackprop.noise import Key
from engine_parameters import CONSTANTS, parameters_of
from mlps import assert_same, bayesian, by_backward, compare_with_plain, net_of, twins
from opaque import Opaque
from step_memory import memory_of_a_step

pytestmark = pytest.mark.equivalence

KEY = Key(seed=7, step=3, draw=1)
PIECE = 64
CAUCHY = LogDensity(lambda w: -torch.log1p((w / 0.3).square()) - math.log(0.3 * math.pi), name="Cauchy")
LOGISTIC = LogDensity(lambda w: -w - 2 * nn.functional.softplus(-w), name="logistic")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_priors, "PIECE", PIECE)


def several(sizes: list[int], priors: list[Prior], **options: Any) -> Parameters:
    """A parameter of each size, the priors in turn."""
    each: dict[str, Parameter] = {}
    for number, n in enumerate(sizes):
        (made,) = parameters_of(n, priors[number % len(priors)], torch.float64, streams=(number,), **options).each
        each[str(number)] = made
    return Parameters(each)


SIZES = [[1], [PIECE - 1], [PIECE], [PIECE + 1], [3 * PIECE + 5], [5, 3 * PIECE - 5, 1, 200, 7]]


@pytest.mark.parametrize("constants", ["none", "every third", "all"])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("priors", [[CAUCHY], [CAUCHY, Normal(0.3), LOGISTIC]], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_costs_and_slopes_are_those_of_whole_parameters(
    sizes: list[int], priors: list[Prior], centred: bool, constants: str
) -> None:
    parameters = several(sizes, priors, centred=centred, constants=CONSTANTS[constants])
    ws = [w.detach().requires_grad_() for w in ops.draw(parameters, KEY)[0]]
    own = parameters.own_priors
    assert own == [number for number in range(len(sizes)) if number % len(priors) != 1]
    each = (parameters.each[number] for number in own)
    whole = [prior_cost(p.q, p.prior, p.centre, ws[number]) for p, number in zip(each, own, strict=True)]
    expected = torch.stack(whole).sum()
    assert own_priors.costs(parameters, ws) == pytest.approx(float(expected.detach()), rel=1e-12, abs=1e-12)
    of_ws = torch.autograd.grad(expected, [ws[number] for number in own])
    found, places = own_priors.put_slopes(parameters, ws)
    assert [number for number, slope in enumerate(found) if slope is not None] == own
    for number, slope in zip(own, of_ws, strict=True):
        assert found[number] is places[number]
        random = parameters.each[number].q.random
        torch.testing.assert_close(places[number][random], slope[random], rtol=1e-12, atol=1e-12)


def test_pieces_have_their_size_and_every_weight_once() -> None:
    parameters = several([5, 3 * PIECE - 5, 1, 200, 7], [CAUCHY, LOGISTIC])
    seen = [torch.zeros(mu.numel(), dtype=torch.int64) for mu in parameters.mus]
    lengths: dict[str, list[int]] = {"Cauchy": [], "logistic": []}
    for prior, parts in own_priors._pieces(parameters):
        lengths[prior.name].append(sum(part.stop - part.start for _, part in parts))
        for number, part in parts:
            assert parameters.each[number].prior is prior
            seen[number][part] += 1
    assert lengths == {"Cauchy": [13], "logistic": [*[PIECE] * 6, 3]}
    assert all(bool((times == 1).all()) for times in seen)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("priors", [[CAUCHY], [CAUCHY, Normal(0.3), LOGISTIC]], ids=str)
def test_draws_and_their_gradients_are_those_of_the_equations(priors: list[Prior], centred: bool) -> None:
    parameters = several([5, 200, 3 * PIECE], priors, centred=centred, constants=CONSTANTS["every third"])
    results = []
    for draw in (ops.draw, ops.reference.draw):
        ws, cost = draw(parameters, KEY)
        loss = sum(w.square().sum() for w in ws) + 0.1 * cost
        results.append([*ws, cost, *torch.autograd.grad(loss, parameters.mus + parameters.rhos)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("estimator", ["shared", "flipout", "local"])
def test_networks_train_as_with_any_prior(estimator: Any, draws: int, taken: list[int]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 9).double(), torch.randint(4, (6,))
    results = []
    for model, context in twins(net_of([9, 20, 4]).double(), Categorical(), prior=CAUCHY, estimator=estimator):
        with context:
            cost = FreeEnergy(model, n=40, draws=draws)(x, y)
            results.append([*(part.detach() for part in cost), *by_backward(cost, model)])
    assert taken == [6] * draws
    assert_same(results[0], results[1:], torch.float64)


@pytest.mark.parametrize("wrap", [lambda net: net, Opaque], ids=["fully connected", "any module"])
def test_a_second_pass_over_a_kept_graph(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = bayesian(wrap(net_of([9, 20, 4]).double()), Categorical(), prior=CAUCHY)
    cost = FreeEnergy(model, n=40)(torch.randn(6, 9).double(), torch.randint(4, (6,)))
    cost.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    torch.testing.assert_close(by_backward(cost, model), once, rtol=0, atol=0)


@pytest.mark.identities
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("wrap", [lambda net: net, Opaque], ids=["fully connected", "any module"])
def test_second_derivatives_are_refused(wrap: Callable[[nn.Module], nn.Module], draws: int) -> None:
    model = bayesian(wrap(net_of([9, 20, 4]).double()), Categorical(), prior=CAUCHY)
    cost = FreeEnergy(model, n=40, draws=draws)(torch.randn(6, 9).double(), torch.randint(4, (6,)))
    with pytest.raises(RuntimeError, match="plain_kernels"):
        torch.autograd.grad(cost, [*model.parameters()], create_graph=True)


# --- densities that are more than one of each weight ------------------------------------------------------------------

SCALES = torch.linspace(0.5, 2.0, 9 * 20).double().view(20, 9)
MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "the mean": lambda w: -(w - w.mean()).square(),
    "rows": lambda w: -w.square() / (1 + w.square().mean(-1, keepdim=True)),
    "the shape": lambda w: -w.square() * w.shape[-1],
    "the number": lambda w: -w.square() * w.numel(),
    "neighbours": lambda w: -(w - w.roll(1)).square(),
    "the number of dimensions": lambda w: -(w * (3.0 if w.dim() == 2 else 1.0)).square(),
    "many or few": lambda w: -(w * (3.0 if w.numel() > 2 * PIECE else 1.0)).square(),
    "a little, all": lambda w: -w.square() - 1e-9 * w.sum().square(),
    "the largest, if it is large": lambda w: -w.square() - (w.abs().max() - 1.6).relu(),
    "one, if it is large": lambda w: -w.square() * (2.0 if bool(w.abs().max() > 0.01) else 1.0),
    "a scale for each": lambda w: -(w / SCALES).square() if w.dim() == 2 else -w.square(),
}


@pytest.mark.parametrize("wrap", [lambda net: net, Opaque], ids=["fully connected", "any module"])
@pytest.mark.parametrize("name", MIXING)
def test_densities_that_mix_weights_see_whole_parameters(
    name: str, wrap: Callable[[nn.Module], nn.Module], taken: list[int]
) -> None:
    x, y = torch.randn(5, 9).double(), torch.randn(5, 20).double()
    net = nn.Sequential(nn.Linear(9, 20)).double()

    def make() -> Bayesian:
        return bayesian(wrap(net), Gaussian(0.3), prior=LogDensity(MIXING[name]))

    compare_with_plain(make, x, y)
    assert not taken


def test_what_a_distribution_checks_of_its_argument_is_no_part_of_its_density(taken: list[int]) -> None:
    prior = LogDensity(torch.distributions.StudentT(3.0, 0.0, 0.2, validate_args=True).log_prob)
    net = nn.Sequential(nn.Linear(9, 20)).double()
    compare_with_plain(
        lambda: bayesian(net, Gaussian(0.3), prior=prior), torch.randn(5, 9).double(), torch.randn(5, 20).double()
    )
    assert taken


def test_a_scale_that_only_some_shapes_have_is_trained() -> None:
    log_scale = nn.Parameter(torch.tensor(-1.0))
    prior = LogDensity(lambda w: -(w * log_scale.exp()).square() if w.dim() == 2 else -w.square())
    model = bayesian(nn.Sequential(nn.Linear(9, 20)), Gaussian(0.3), prior=prior)
    FreeEnergy(model, n=40)(torch.randn(5, 9), torch.randn(5, 20)).backward()
    assert log_scale.grad is not None


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("wrap", [lambda net: net, Opaque], ids=["fully connected", "any module"])
def test_a_density_can_be_trained_whenever_one_likes(wrap: Callable[[nn.Module], nn.Module], draws: int) -> None:
    log_scale = torch.tensor(-1.0, dtype=torch.float64)
    prior = LogDensity(lambda w: -torch.log1p((w / log_scale.exp()).square()) - log_scale)
    x, y = torch.randn(5, 9).double(), torch.randint(4, (5,))
    fixed = FreeEnergy(bayesian(wrap(net_of([9, 20, 4]).double()), Categorical(), prior=prior), n=40, draws=draws)
    before = fixed(x, y, step=1)
    before.backward()
    log_scale.requires_grad_()
    after = fixed(x, y, step=1)
    after.backward()
    torch.testing.assert_close(after.detach(), before.detach(), rtol=1e-12, atol=0)
    # By the difference of costs a little to the left and to the right.
    costs = []
    for change in (1e-5, -1e-5):
        with torch.no_grad():
            log_scale.add_(change)
            costs.append(fixed(x, y, step=1).item())
            log_scale.sub_(change)
    assert log_scale.grad is not None
    assert log_scale.grad.item() == pytest.approx((costs[0] - costs[1]) / 2e-5, rel=1e-6)
    assert abs(log_scale.grad.item()) > 0.01


@pytest.mark.identities
@pytest.mark.parametrize("function", [torch.sum, lambda w: w.flatten()[:1], lambda w: 1.0])
def test_a_density_of_another_shape_is_refused(function: Callable[[Tensor], Any]) -> None:
    free_energy = FreeEnergy(Bayesian(net_of([9, 20, 4]), Categorical(), LogDensity(function, name="mine")), n=40)
    with pytest.raises(ValueError, match=r"parameter of LogDensity\(mine\) must be .* shape \[20, 9\]"):
        free_energy(torch.randn(5, 9), torch.randint(4, (5,)))


def test_a_flat_density_has_no_slope() -> None:
    x, y = torch.randn(5, 9).double(), torch.randn(5, 4).double()
    net = net_of([9, 20, 4]).double()
    compare_with_plain(lambda: bayesian(net, Gaussian(0.3), prior=LogDensity(torch.zeros_like)), x, y)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.identities
@pytest.mark.parametrize(
    ("wrap", "draws"),
    [(lambda net: net, 1), (lambda net: net, 5), (Opaque, 1)],  # of any module autograd keeps the weights of all draws
    ids=["fully connected", "fully connected, five draws", "any module"],
)
def test_a_step_needs_no_more_memory_than_with_other_priors(
    wrap: Callable[[nn.Module], nn.Module], draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_priors, "PIECE", 2**11)
    assert memory_of_a_step(lambda net: Bayesian(wrap(net), Categorical(), CAUCHY, seed=0), draws=draws) < 1.3
