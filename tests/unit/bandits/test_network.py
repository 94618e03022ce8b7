"""The reward networks: replicas are networks of their own. The likelihood is of the action that was taken."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bandit_worlds import ACTIONS, FEATURES, layers_of
from bayesbackprop import Adam, Bayesian, Bernoulli, FreeEnergy, Gaussian, Poisson
from bayesbackprop.bandits.network import OfAction, Unknown, reward_network
from bayesbackprop.likelihoods import Likelihood, NegativeBinomial

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("hidden", [(), (6,), (6, 5)])
@torch.no_grad()
def test_replicas_are_networks_of_their_own(hidden: tuple[int, ...], replicas: int) -> None:
    sizes = [FEATURES, *hidden, ACTIONS]
    net = reward_network(sizes, replicas, seed=1)
    layers = layers_of(net)
    for layer in layers:
        layer.bias.normal_()
    inputs = torch.randn(7, replicas, FEATURES)
    expected = torch.empty(7, replicas, ACTIONS)
    for b in range(7):
        for r in range(replicas):
            value = inputs[b, r]
            for number, layer in enumerate(layers):
                weight, bias = (
                    layer.weight.reshape(replicas, *layer.weight.shape[-2:]),
                    layer.bias.reshape(replicas, -1),
                )
                value = weight[r] @ (value.relu() if number else value) + bias[r]
            expected[b, r] = value
    given = inputs if replicas > 1 else inputs[:, 0]
    assert torch.allclose(net(given).reshape(expected.shape), expected, atol=1e-5)
    again, other = (layers_of(reward_network(sizes, replicas, seed=seed)) for seed in (1, 2))
    assert torch.equal(layers[0].weight, again[0].weight)
    assert not torch.equal(layers[0].weight, other[0].weight)
    assert replicas == 1 or not torch.equal(layers[0].weight[0], layers[0].weight[1])


def test_the_first_of_one_and_of_many_begin_alike() -> None:
    alone, many = (layers_of(reward_network([3, 2], replicas, seed=4)) for replicas in (1, 2))
    assert torch.equal(alone[0].weight, many[0].weight[0])


REWARDS: dict[str, tuple[Likelihood, Any]] = {
    "fixed": (Gaussian(0.7), torch.randn),
    "learnt": (Gaussian("learnt", initial=0.6), torch.randn),
    "per input": (Gaussian("per-input", least=0.1), torch.randn),
    "yes or no": (Bernoulli(), lambda *size: torch.randint(2, size).float()),
    "counts": (Poisson(), lambda *size: torch.randint(5, size).float()),
    "counts that vary": (NegativeBinomial(0.5), lambda *size: torch.randint(5, size).float()),
}


@pytest.mark.parametrize("shape", [(6,), (6, 2)], ids=["one", "replicas"])
@pytest.mark.parametrize("actions", [1, 4])
@pytest.mark.parametrize("name", REWARDS)
def test_only_the_action_that_was_taken_costs(name: str, actions: int, shape: tuple[int, ...]) -> None:
    likelihood, draw = REWARDS[name]
    of_action = OfAction(likelihood, actions)
    numbers = 2 if name == "per input" else 1
    assert of_action.numbers == numbers
    output = torch.randn(*shape, numbers * actions, dtype=torch.float64, requires_grad=True)
    taken, rewards = torch.randint(actions, shape), draw(*shape).double()
    each = output.unflatten(-1, (numbers, actions)).movedim(-1, 0)
    own = torch.stack([torch.stack([each[taken[i], *i] for i in _places(shape)])]).reshape(*shape, numbers)
    targets = torch.stack([taken.double(), rewards], -1)
    assert torch.allclose(of_action.costs(output, targets), likelihood.costs(own, rewards[..., None]))
    assert torch.allclose(of_action.log_prob(output, targets), likelihood.log_prob(own, rewards[..., None]))
    cost = of_action.cost(output, targets)
    assert torch.allclose(cost, of_action.costs(output, targets).mean())
    (slope,) = torch.autograd.grad(cost, output)
    if of_action.has_slope:
        assert torch.allclose(of_action.slope(output.detach(), targets), slope)
    untouched = torch.ones(*shape, numbers, actions, dtype=torch.bool).scatter_(
        -1, taken[..., None, None].expand(*shape, numbers, 1), False
    )
    assert not slope.unflatten(-1, (numbers, actions))[untouched].any()


def _places(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in place) for place in torch.ones(shape).nonzero()]


@pytest.mark.parametrize("name", REWARDS)
def test_the_expected_reward_is_the_mean_of_the_distribution(name: str) -> None:
    likelihood, _ = REWARDS[name]
    of_action = OfAction(likelihood, 3)
    output = torch.randn(5, 3 * of_action.numbers)
    for action in range(3):
        own = output.unflatten(-1, (of_action.numbers, 3))[..., action]
        with torch.no_grad():
            mean = likelihood.distribution(own).mean
        assert torch.allclose(of_action.expected(own[..., 0]), mean.squeeze(-1))


def test_one_agent_has_a_network_that_the_engine_runs_quickly() -> None:
    assert type(reward_network([3, 4, 2], 1, seed=0)) is nn.Sequential


@pytest.mark.parametrize("replicas", [1, 3])
def test_what_is_unknown_is_yes_or_no_until_a_reward_is_neither(replicas: int) -> None:
    unknown = Unknown(replicas)
    shape = (5,) if replicas == 1 else (5, replicas)
    output = torch.randn(*shape, 2, dtype=torch.float64, requires_grad=True)
    first = output.detach()[..., 0].reshape(5, replicas)
    target = torch.randint(2, (*shape, 1)).double()
    normal = Gaussian("per-input", least=0.1)

    def check(is_number: list[bool]) -> None:
        each = output.reshape(5, replicas, 2), target.reshape(5, replicas, 1)
        parts = [
            normal.log_prob(each[0][:, r], each[1][:, r])
            if is_number[r]
            else Bernoulli().log_prob(each[0][:, r, :1], each[1][:, r])
            for r in range(replicas)
        ]
        assert torch.allclose(unknown.log_prob(output, target), sum(parts))  # type: ignore[arg-type]
        (slope,) = torch.autograd.grad(unknown.cost(output, target), output)
        assert torch.allclose(unknown.slope(output.detach(), target), slope)
        means = [first[:, r] if is_number[r] else first[:, r].sigmoid() for r in range(replicas)]
        assert torch.equal(unknown.expected(first[:, :, None].mT[0].mT), torch.stack(means)[:, :1])

    unknown.see(torch.tensor([0.0, 1.0, 0.0][:replicas]))
    check([False] * replicas)
    unknown.see(torch.tensor([1.0, 0.5, 1.0][:replicas]))
    check([False, True, False][:replicas])
    unknown.see(torch.tensor([-2.0, 1.0, 1.0][:replicas]))
    check([True, True, False][:replicas])


def unknown_of(seen: float) -> Unknown:
    unknown = Unknown(1)
    unknown.see(torch.tensor([seen]))
    return unknown


FORMS: dict[str, tuple[Likelihood, Any]] = {
    **{name: REWARDS[name] for name in ("fixed", "per input", "yes or no")},
    "unknown, a number": (unknown_of(0.5), torch.randn),
    "unknown, yes or no": (unknown_of(1.0), REWARDS["yes or no"][1]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("actions", [1, 4])
@pytest.mark.parametrize("name", FORMS)
def test_the_kernels_know_the_likelihood_of_an_action(name: str, actions: int, dtype: torch.dtype) -> None:
    likelihood, draw = FORMS[name]
    of_action = OfAction(likelihood, actions)
    assert of_action.form() is not None
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, of_action.numbers * actions)).to(dtype)
    objective = FreeEnergy(Bayesian(net, of_action, seed=0), n=40)
    twin = copy.deepcopy(objective)
    ours, theirs = Adam(objective.param_groups(0.01)), Adam(twin.param_groups(0.01))
    for _ in range(20):
        x, taken = torch.randn(6, 5, dtype=dtype), torch.randint(actions, (6,))
        targets = torch.stack([taken.to(dtype), draw(6).to(dtype)], -1)
        cost: Any = ours.minimise(objective, x, targets)
        theirs.zero_grad()
        expected = twin(x, targets)
        expected.backward()
        theirs.step()
        torch.testing.assert_close(cost.likelihood, expected.likelihood.detach())
    accuracy = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(list(objective.parameters()), list(twin.parameters()), **accuracy)
    if actions > 1:
        for wrong in (-1.0, float(actions)):
            with pytest.raises(RuntimeError, match="out of bounds"):
                ours.minimise(objective, x, torch.tensor([[wrong, 1.0]]).to(dtype).expand(6, 2))
