"""Weights of examples: a weight multiplies what an example costs, whatever the likelihood and the network."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bayesbackprop import Batches, Bayesian, Categorical, FreeEnergy, Gaussian, fit
from costs import data, model_of, wraps
from engine_parameters import DTYPES
from mlps import LIKELIHOODS, assert_same, bayesian, by_backward, net_of, twins

pytestmark = pytest.mark.identities


def weights_of(n: int = 6) -> Tensor:
    return torch.tensor([2.0, 0.0, 0.5, 1.0, 3.0, 1.0, 0.25] * 9)[:n].double()


# --- the cost --------------------------------------------------------------------------------------------------------


@pytest.mark.equivalence
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_cost_is_the_weighted_mean(likelihood: str, dtype: torch.dtype) -> None:
    """mean_b v_b * -log P(y_b|x_b,w), in every way to run a network, and its gradients."""
    make, targets = LIKELIHOODS[likelihood]
    x, y, weights = torch.randn(6, 3, dtype=dtype), targets(6, dtype), weights_of()
    results = []
    for model, context in twins(net_of([3, 5, 4]).to(dtype), make().to(dtype)):
        with context:
            cost = FreeEnergy(model, n=40, draws=2)(x, y, weights=weights)
            plain = [-model.likelihood.log_prob(model.draw(1, k)(x), y) for k in range(2)]
        expected = (torch.stack(plain).mean(0) * weights.to(dtype)).mean()
        torch.testing.assert_close(cost.likelihood, expected)
        assert cost.likelihood.dtype == dtype
        assert float(cost.complexity_weight) == pytest.approx(1 / 40)
        results.append([cost.detach(), *by_backward(cost, model)])
    assert_same(results[0], results[1:], dtype)


@pytest.mark.equivalence
@wraps
def test_a_whole_weight_is_an_example_that_often(wrap: Any) -> None:
    """F(D) = KL + sum_b v_b * -log P(y_b): the same as of the data with repetitions, in value and in gradient."""
    x, y = data()
    often = torch.tensor([2, 0, 1, 1, 3, 1])
    model = model_of(wrap)
    weighted = FreeEnergy(model, n=6)(x, y, weights=often.double())
    (6 * weighted).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    repeated = FreeEnergy(model, n=8)(x.repeat_interleave(often, 0), y.repeat_interleave(often))
    (8 * repeated).backward()
    torch.testing.assert_close(6 * weighted.detach(), 8 * repeated.detach())
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


@wraps
def test_weights_of_1_change_nothing(wrap: Any) -> None:
    x, y = data()
    model = model_of(wrap)
    plain, weighted = FreeEnergy(model, n=9)(x, y), FreeEnergy(model, n=9)(x, y, weights=torch.ones(6))
    torch.testing.assert_close(plain.detach(), weighted.detach())
    assert FreeEnergy(model, n=9)(x, y, weights=torch.zeros(6)).likelihood == 0


def test_an_epoch_adds_up_to_the_weighted_free_energy() -> None:
    """Whatever the batches: each has the same share 1/N of the complexity, weighted or not."""
    x, y = data(7)
    weights, model = weights_of(7), model_of()
    for size in range(1, 8):
        free_energy = FreeEnergy(model, n=7, complexity="closed")
        total, expected = torch.zeros(()).double(), model.complexity_closed()
        for step, rows in enumerate(torch.arange(7).split(size), start=1):
            total += len(rows) * free_energy(x[rows], y[rows], weights=weights[rows]).detach()
            log_prob = model.likelihood.log_prob(model.draw(step, closed=True)(x[rows]), y[rows])
            expected = expected - (weights[rows] * log_prob).sum()
        torch.testing.assert_close(total, expected.detach())


def test_a_small_network_keeps_its_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slope of each row is multiplied, and autograd sees no operation of the likelihood."""
    x, y = data()
    called: list[Tensor] = []
    own = Categorical.slope
    monkeypatch.setattr(Categorical, "slope", lambda *args: called.append(args[1]) or own(*args))
    FreeEnergy(model_of(), n=9)(x, y, weights=weights_of()).backward()
    assert len(called) == 1


@wraps
def test_weights_may_be_learnt(wrap: Any) -> None:
    """The gradient by a weight is what its example costs."""
    x, y = data()
    model = model_of(wrap)
    weights = weights_of().requires_grad_()
    FreeEnergy(model, n=9)(x, y, weights=weights).backward()
    torch.testing.assert_close(weights.grad, model.likelihood.costs(model.draw(1)(x), y).detach() / 6)


def test_what_options_of_the_likelihood_cost_is_weighted_too() -> None:
    x, y = data()
    for likelihood in (Categorical(weight=[1.0, 2.0, 3.0, 4.0], label_smoothing=0.1), Gaussian("per-input", beta=0.5)):
        target = y if isinstance(likelihood, Categorical) else torch.randn(6, 2).double()
        model = model_of(likelihood=likelihood)
        cost = FreeEnergy(model, n=9)(x, target, weights=weights_of())
        costs = likelihood.costs(model.draw(1)(x), target)
        torch.testing.assert_close(cost.likelihood, (weights_of() * costs).mean())


# --- fit -------------------------------------------------------------------------------------------------------------


def test_fit_takes_triples() -> None:
    """From Batches, a DataLoader or a list: the same run."""
    x, y = data(12)
    weights = weights_of(12)
    runs = []
    for batches in (
        Batches(x, y, 12, weights=weights, order=lambda _: torch.arange(12)),
        DataLoader(TensorDataset(x, y, weights), batch_size=12),
        [(x, y, weights)],
    ):
        model = model_of()
        history = fit(model, batches, epochs=2, n=12)
        runs.append([torch.tensor(history[-1]["cost"]), *model.parameters()])
    for other in runs[1:]:
        torch.testing.assert_close(runs[0], other)
    plain = model_of()
    fit(plain, [(x, y)], epochs=2, n=12)
    assert not torch.allclose(next(plain.parameters()), runs[0][1])


def test_accumulation_is_one_large_batch() -> None:
    x, y = data(7)
    weights, found = weights_of(7), []
    for size, accumulate in ((7, 1), (3, 3)):
        model = model_of()
        objective = FreeEnergy(model, n=7, complexity="closed")
        objective.model.draw = lambda *args, model=model, **kwargs: Bayesian.draw(model, 1, 0, closed=True)  # type: ignore[method-assign]
        batches = Batches(x, y, size, weights=weights, order=lambda _: torch.arange(7))
        fit(objective, batches, epochs=1, accumulate=accumulate, optimiser=torch.optim.SGD(model.parameters(), lr=0.1))
        found.append(list(model.parameters()))
    torch.testing.assert_close(found[0], found[1])


def test_batches_give_each_example_its_weight() -> None:
    x = torch.arange(10.0)[:, None]
    for inputs, targets, weights in Batches(x, x + 1, 3, weights=torch.arange(10.0)):
        assert torch.equal(inputs[:, 0], weights)
        assert torch.equal(targets[:, 0], weights + 1)


@pytest.mark.parametrize("elements", [1, 2])
def test_validation_is_a_weighted_mean(elements: int) -> None:
    net = nn.Linear(3, elements).double()
    model = Bayesian(net, Gaussian(0.5), seed=0)
    x, y = torch.randn(6, 3).double(), torch.randn(6, elements).double()
    (record,) = fit(
        model, [(x, y)], epochs=1, n=6, validation=[(x[:4], y[:4], weights_of(4)), (x[4:], y[4:], weights_of()[4:])]
    )
    log_probs = [model.predict(x[rows], draws=10).log_prob(y[rows]).sum(1) for rows in (slice(0, 4), slice(4, 6))]
    total = -float((weights_of() * torch.cat(log_probs)).sum())
    assert record["validation_nll"] == pytest.approx(total / float(weights_of().sum()))


def test_an_objective_of_the_users_own_gets_them_by_name() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)

        def forward(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
            return (weights * (self.net(inputs) - targets).square().sum(1)).mean()

    batch = (torch.ones(4, 3), torch.ones(4, 1), torch.ones(4))
    (record,) = fit(Squares(), [batch], epochs=1, validation=[batch])
    assert record["validation_cost"] > 0


# --- errors ----------------------------------------------------------------------------------------------------------

SHAPE = "a float tensor of shape [6], one number for each example. Got"


@wraps
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(5), SHAPE),
        (torch.ones(1), SHAPE),
        (torch.ones(6, 1), SHAPE),
        (torch.tensor(1.0), SHAPE),
        (torch.ones(6).long(), SHAPE),
        (torch.ones(6).bool(), SHAPE),
        ([1.0] * 6, SHAPE),
        (1.0, SHAPE),
        (torch.ones(6).to_sparse(), SHAPE),
        (torch.ones(6) * torch.nan, "finite. Got NaN or inf in 6 of 6 numbers"),
        (torch.ones(6) * torch.inf, "finite. Got NaN or inf in 6 of 6 numbers"),
        (-torch.ones(6), "at least 0. Got -1 among them instead."),
    ],
    ids=str,
)
def test_bad_weights_are_refused_and_change_nothing(weights: Any, message: str, wrap: Any) -> None:
    x, y = data()
    free_energy = FreeEnergy(model_of(wrap), n=9)
    with pytest.raises(ValueError, match=re.escape(f"The 'weights' parameter of FreeEnergy must be {message}")):
        free_energy(x, y, weights=weights)
    assert free_energy.step == 0
    with pytest.raises(ValueError, match=r"The 'weights' parameter of Batches must be"):
        Batches(x, y, 3, weights=weights)
    with pytest.raises(ValueError, match=r"The 'weights' parameter of fit must be"):
        fit(free_energy, [(x, y)], epochs=1, validation=[(x, y, weights)])


def test_four_are_too_many() -> None:
    x, y = data()
    with pytest.raises(ValueError, match=r"pairs \(inputs, targets\), or of \(inputs, targets, weights\). Got a tuple"):
        fit(model_of(), [(x, y, weights_of(), weights_of())], epochs=1, n=6)


def test_mixed_precision_stays_that_of_the_network() -> None:
    model = bayesian(net_of([3, 4]), Gaussian(0.3))
    cost = FreeEnergy(model, n=9)(torch.randn(6, 3), torch.randn(6, 4), weights=weights_of())
    assert cost.dtype == torch.float32
    cost.backward()
