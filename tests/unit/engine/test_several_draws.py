"""Several draws of a fully connected network in one node: the sums of what each of them gives, in the memory of one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Laplace, Normal, Prior, ScaleMixture, plain_kernels
from bayesbackprop._engine import cpu, reference
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop.noise import Key
from engine_parameters import CONSTANTS, DTYPES, KNOWN_PRIORS, UNKNOWN_PRIOR, parameters_of, rounding_of_constants
from mlps import assert_same, bayesian, gradients, net_of, twins
from step_memory import memory_of_a_step

pytestmark = pytest.mark.equivalence

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0, 1, 2, 3, 0, 1])


# --- the kernels ------------------------------------------------------------------------------------------------------


def compare(parameters: Parameters, count: int, dtype: torch.dtype) -> None:
    """The weights and the complexity of each draw, and the sum of their gradients, are those of the equations."""
    table = cpu.table(parameters)
    assert table is not None
    deltas = cpu.Deltas(parameters, table, 0.01)
    complexity, size = 0.0, 0.0
    sums: list[list[Tensor]] = [[torch.zeros_like(mu) for mu in parameters.mus] for _ in range(2)]
    generator = torch.Generator().manual_seed(count)
    for number in range(count):
        key = Key(seed=2**40 + 7, step=3, draw=2**32 - 2 + number)
        ws = deltas.draw(key)
        with torch.no_grad():
            expected, cost = reference.draw(parameters, key._replace(draw=key.draw % 2**32))
        accuracy = 1e-9 if dtype == torch.float64 else 2e-4
        torch.testing.assert_close(ws, expected, rtol=accuracy, atol=accuracy)
        complexity, size = complexity + float(cost), size + abs(float(cost))
        given = [torch.randn(len(w), generator=generator, dtype=torch.float64).to(dtype) for w in ws]
        with torch.no_grad():
            parts = reference.backward(parameters, ws, given, 0.01)
        for total, part in zip(sums, parts, strict=True):
            for each, term in zip(total, part, strict=True):
                each += term
        for place, gradient in zip(deltas.to_mu, given, strict=True):
            place.copy_(gradient) if number == 0 else place.add_(gradient)
    deltas.finish()
    n = count * parameters.numel
    of_constants = rounding_of_constants(n, parameters.each[0].prior, dtype)
    assert deltas.complexity == pytest.approx(complexity, rel=accuracy, abs=accuracy * size + of_constants)
    accuracy = 1e-9 if dtype == torch.float64 else 2e-5
    for found, total in zip((deltas.to_mu, deltas.to_rho), sums, strict=True):
        for ours, theirs in zip(found, total, strict=True):
            scale = 1 + float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=accuracy, atol=accuracy * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", [*KNOWN_PRIORS, ScaleMixture(), UNKNOWN_PRIOR], ids=repr)
def test_sampled(prior: Prior, centred: bool, constants: str, dtype: torch.dtype) -> None:
    for n, count in ((1, 2), (600, 3), (9000, 2)):
        chosen = CONSTANTS[constants]
        compare(parameters_of(n, prior, dtype, centred=centred, constants=chosen, streams=(20, 8)), count, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("constants", ["none", "every third", "all"])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", [Normal(0.7), Laplace(0.4)], ids=repr)
def test_in_closed_form(prior: Prior, centred: bool, constants: str, dtype: torch.dtype) -> None:
    for n, count in ((1, 2), (600, 3), (9000, 2)):
        parameters = parameters_of(n, prior, dtype, centred=centred, constants=CONSTANTS[constants]).in_closed_form()
        assert parameters is not None
        compare(parameters, count, dtype)


@pytest.mark.parametrize("spoil", [0, 1])
def test_a_nan_is_seen(spoil: int) -> None:
    parameters = parameters_of(40, ScaleMixture(), torch.float32)
    with torch.no_grad():
        parameters.each[0].q[spoil][3] = torch.nan
    table = cpu.table(parameters)
    assert table is not None
    deltas = cpu.Deltas(parameters, table, 1.0)
    for number in range(2):
        deltas.draw(Key(1, 2, number))
        deltas.to_mu[0].fill_(1.0)
    deltas.finish()
    for tensor in (*deltas.to_mu, *deltas.to_rho):
        assert tensor.isnan().nonzero().flatten().tolist() == [3]
    assert deltas.complexity != deltas.complexity


# --- the node ---------------------------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "the cost": lambda cost: cost,
    "a quarter of it": lambda cost: cost / 4,
    "scaled and shifted": lambda cost: 2.0**16 * cost + 3,
    "its square": lambda cost: cost.square(),
    "the likelihood": lambda cost: cost.likelihood,
    "the complexity": lambda cost: cost.complexity,
    "another weight": lambda cost: cost.likelihood - 0.5 * cost.complexity,
}
# How often each draw is run: again where the parts have not the weights that the objective gives them.
RUNS = {"the likelihood": 2, "the complexity": 2, "another weight": 2}


@pytest.mark.parametrize("complexity", ["sampled", "closed"])
@pytest.mark.parametrize("draws", [2, 5])
@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_is_made_of_the_cost(loss: str, draws: int, complexity: str, taken: list[int]) -> None:
    results = []
    for model, context in twins(net_of([3, 6, 4]).double(), Categorical()):
        with context:
            cost = FreeEnergy(model, n=40, draws=draws, complexity=complexity)(X, Y)  # type: ignore[arg-type]
            LOSSES[loss](cost).backward()
        unused = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        results.append([*(part.detach() for part in cost), *unused])
    assert_same(results[0], results[1:], torch.float64)
    assert taken == [6] * draws * RUNS.get(loss, 1)


@pytest.mark.parametrize("weights", ["uniform", "geometric"])
def test_weights_of_minibatches_and_a_warmup(weights: str, taken: list[int]) -> None:
    """The expected weight is that of the step, whether it is a number or a tensor."""
    results = []
    for model, context in twins(net_of([3, 6, 4]).double(), Categorical()):
        free_energy = FreeEnergy(model, 12, draws=2, minibatch_weights=weights, batch_size=6, warmup=3)  # type: ignore[arg-type]
        with context:
            for batch in (0, 1):
                free_energy(X, Y, None if weights == "uniform" else batch).backward()
        results.append(gradients(model))
    assert_same(results[0], results[1:], torch.float64)
    assert taken == [6] * 4


def test_a_second_pass_over_a_kept_graph(taken: list[int]) -> None:
    model = bayesian(net_of([3, 6, 4]).double(), Categorical())
    cost = FreeEnergy(model, n=40, draws=3)(X, Y)
    cost.backward(retain_graph=True)
    once = gradients(model)
    cost.backward()
    torch.testing.assert_close(gradients(model), once)
    assert taken == [6] * 6


def test_gradients_that_someone_keeps_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_LARGE", 0)
    model = bayesian(net_of([3, 6, 4]).double(), Categorical())
    free_energy = FreeEnergy(model, n=40, draws=2)
    kept: list[tuple[Tensor, Tensor]] = []
    waiting = free_energy(X, Y)
    for step in range(2, 6):
        free_energy(X, Y).backward()
        kept += [(gradient, gradient.clone()) for gradient in gradients(model)]
        with plain_kernels():
            expected = torch.autograd.grad(FreeEnergy(model, n=40, draws=2)(X, Y, step=step), [*model.parameters()])
        torch.testing.assert_close([now for now, _ in kept[-len(expected) :]], [*expected])
    assert all(torch.equal(*pair) for pair in kept)
    waiting.backward()
    with plain_kernels():
        expected = torch.autograd.grad(FreeEnergy(model, n=40, draws=2)(X, Y, step=1), [*model.parameters()])
    torch.testing.assert_close(gradients(model), [*expected])


def test_without_gradients_nothing_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bayesian(net_of([3, 6, 4]).double(), Categorical())
    expected = FreeEnergy(model, n=40, draws=3)(X, Y).item()
    frozen = copy.deepcopy(model).requires_grad_(False)

    def refuse(*_: object) -> None:
        raise AssertionError("nobody wants a gradient")

    monkeypatch.setattr(cpu, "Deltas", refuse)
    with torch.no_grad():
        assert FreeEnergy(model, n=40, draws=3)(X, Y).item() == pytest.approx(expected, rel=1e-12)
    assert FreeEnergy(frozen, n=40, draws=3)(X, Y).item() == pytest.approx(expected, rel=1e-12)


def test_an_input_with_a_gradient(taken: list[int]) -> None:
    results = []
    for model, context in twins(net_of([3, 6, 4]).double(), Categorical()):
        x = X.clone().requires_grad_()
        with context:
            FreeEnergy(model, n=40, draws=2)(x, Y).backward()
        assert x.grad is not None
        results.append([x.grad, *gradients(model)])
    assert_same(results[0], results[1:], torch.float64)
    assert taken == [6, 6]


@pytest.mark.identities
def test_what_cannot_go_back_is_refused() -> None:
    model = bayesian(net_of([3, 6, 4]).double(), Categorical())
    free_energy = FreeEnergy(model, n=40, draws=2)
    cost = free_energy(X, Y)
    with pytest.raises(RuntimeError, match="plain_kernels"):
        torch.autograd.grad(cost, [*model.parameters()], create_graph=True)
    cost = free_energy(X, Y)
    with torch.no_grad():
        model.net[0].weight.add_(1)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cost.backward()
    cost = free_energy(X, Y)
    model.float()
    with pytest.raises(RuntimeError, match="compute the cost again"):
        cost.backward()


def test_the_number_of_threads_changes_nothing() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            model = Bayesian(copy.deepcopy(net), Categorical(), seed=3)
            torch.set_num_threads(threads)
            table, parameters = cpu.table(model.engine().parameters), model.engine().parameters
            assert table is not None
            deltas = cpu.Deltas(parameters, table, 0.1)
            for number in range(3):
                deltas.draw(Key(1, 2, number))
                for place in deltas.to_mu:
                    place.fill_(0.5) if number == 0 else place.add_(0.25)
            deltas.finish()
            results.append([torch.tensor(deltas.complexity), *(t.clone() for t in (*deltas.to_mu, *deltas.to_rho))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.identities
def test_a_step_needs_the_weights_of_one_draw_besides_parameters_and_gradients() -> None:
    assert memory_of_a_step(lambda net: Bayesian(net, Categorical(), seed=0), draws=5) < 1.3
