"""A cost is a loss like any other of torch, and its parts are there by name."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, Cost, FreeEnergy, Gaussian, plain_kernels
from costs import data, gradients, model_of, wraps

pytestmark = pytest.mark.equivalence


def cost_of(model: Bayesian, step: int = 1, **options: Any) -> Cost:
    return FreeEnergy(model, n=40, **options)(*data(), step=step)


def plain_gradients(model: Bayesian, step: int = 1) -> list[Tensor]:
    with plain_kernels():
        return [*torch.autograd.grad(cost_of(model, step), [*model.parameters()])]


# --- its parts --------------------------------------------------------------------------------------------------------


def values(cost: Cost) -> list[float]:
    return [part.item() for part in cost]


WHEN = ["before backward", "after backward", "after the step"]


@wraps
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("when", WHEN)
def test_the_parts_are_those_of_the_step(when: str, learnt: bool, draws: int, wrap: Any) -> None:
    model = model_of(wrap, likelihood=Gaussian("learnt").double() if learnt else Categorical(), centre="net")
    x, y = data()
    y = torch.randn(6, 4).double() if learnt else y
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    free_energy = FreeEnergy(model, n=40, draws=draws, temperature=0.5)
    for step in range(1, 4):
        drawn = [model.draw(step, index) for index in range(draws)]
        complexity = sum(draw.complexity().item() for draw in drawn) / draws
        likelihood = sum(model.likelihood.cost(draw(x), y).item() for draw in drawn) / draws
        expected = [likelihood + complexity / 80, likelihood, complexity, 1 / 80]
        optimiser.zero_grad()
        cost = free_energy(x, y)
        seen = [values(cost)] if when == WHEN[0] else []
        cost.backward()
        seen += [values(cost)] if when != WHEN[2] else []
        optimiser.step()
        seen.append(values(cost))
        for each in seen:
            assert each == pytest.approx(expected, rel=1e-10)
        assert seen == [seen[0]] * len(seen)


@wraps
def test_a_cost_unpacks(wrap: Any) -> None:
    cost = cost_of(model_of(wrap))
    total, likelihood, complexity, weight = cost
    assert weight.item() == 1 / 40
    assert total is cost.total is cost
    assert likelihood is cost.likelihood
    assert complexity is cost.complexity
    assert torch.equal(weight, cost.complexity_weight)
    assert all(part.shape == () and part.dtype == torch.float64 for part in cost)
    assert all(part.requires_grad for part in (total, likelihood, complexity))
    assert not weight.requires_grad
    assert cost.item() == pytest.approx(likelihood.item() + complexity.item() / 40, rel=1e-14)


@wraps
def test_a_cost_prints(wrap: Any) -> None:
    cost = cost_of(model_of(wrap))
    total, likelihood, complexity, _ = values(cost)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        shown = repr(cost)
    finally:
        torch.set_warn_always(before)
    assert shown == f"Cost({total=:.6g}, {likelihood=:.6g}, {complexity=:.6g}, weight=0.025)"


@wraps
def test_the_parts_have_gradients_of_their_own(wrap: Any) -> None:
    model = model_of(wrap)
    parameters = [*model.parameters()]
    cost = cost_of(model)
    total, likelihood, complexity = (
        torch.autograd.grad(part, parameters, retain_graph=True) for part in (cost, cost.likelihood, cost.complexity)
    )
    with plain_kernels():
        plain = cost_of(model)
        expected = [
            torch.autograd.grad(part, parameters, retain_graph=True)
            for part in (plain, plain.likelihood, plain.complexity)
        ]
    torch.testing.assert_close([total, likelihood, complexity], expected)
    torch.testing.assert_close([*total], [a + b / 40 for a, b in zip(likelihood, complexity, strict=True)])


# --- a loss -----------------------------------------------------------------------------------------------------------


@wraps
def test_a_cost_is_a_tensor(wrap: Any) -> None:
    cost = cost_of(model_of(wrap))
    assert isinstance(cost, torch.Tensor)
    assert torch.is_tensor(cost)
    assert cost.shape == ()
    assert cost.requires_grad
    assert cost.grad_fn is not None
    assert float(cost) == cost.item() == cost.tolist() == cost.detach().numpy()
    assert f"{cost:.3f}" == f"{cost.item():.3f}"
    assert f"{cost}" == str(cost) == repr(cost)
    assert bool(cost > 0)
    assert bool(torch.isfinite(cost))


@pytest.mark.parametrize(
    "compute",
    [
        lambda cost: cost / 4,
        lambda cost: 2 * cost + cost,
        lambda cost: -cost,
        lambda cost: cost.detach(),
        lambda cost: cost.clone(),
        lambda cost: cost.float(),
        lambda cost: cost.exp(),
        lambda cost: torch.stack([cost, cost]),
        lambda cost: torch.stack([*cost]),
        lambda cost: sum([cost, cost]),
        lambda cost: cost.to("cpu", torch.float32),
    ],
)
def test_what_is_computed_from_a_cost_is_a_plain_tensor(compute: Callable[[Cost], Tensor]) -> None:
    assert type(compute(cost_of(model_of()))) is Tensor


@wraps
def test_gradients_accumulate(wrap: Any) -> None:
    """Over four parts of a batch, each divided by four, as over one with the mean of their costs."""
    model = model_of(wrap)
    x, y = data(8)
    free_energy = FreeEnergy(model, n=40)
    for rows in torch.arange(8).split(2):
        (free_energy(x[rows], y[rows], step=3) / 4).backward()
    accumulated = gradients(model)
    model.zero_grad()
    free_energy(x, y, step=3).backward()
    torch.testing.assert_close(accumulated, gradients(model))


@wraps
def test_a_scaled_cost_has_scaled_gradients(wrap: Any) -> None:
    model = model_of(wrap)
    expected = plain_gradients(model)
    (cost_of(model) / 4).backward()
    torch.testing.assert_close(gradients(model), [gradient / 4 for gradient in expected])
    model.zero_grad()
    cost_of(model).backward(torch.tensor(3.0).double())
    torch.testing.assert_close(gradients(model), [gradient * 3 for gradient in expected])


@wraps
def test_gradients_by_function(wrap: Any) -> None:
    model = model_of(wrap)
    expected = plain_gradients(model)
    parameters = [*model.parameters()]
    torch.testing.assert_close([*torch.autograd.grad(cost_of(model), parameters)], expected)
    assert all(gradient is None for gradient in gradients(model))
    some = torch.autograd.grad(cost_of(model), parameters[1:3])
    torch.testing.assert_close([*some], expected[1:3])
    cost_of(model).backward(inputs=parameters[:2])
    torch.testing.assert_close(gradients(model)[:2], expected[:2])
    assert all(gradient is None for gradient in gradients(model)[2:])


@wraps
def test_a_second_backward_needs_the_graph(wrap: Any) -> None:
    model = model_of(wrap)
    expected = plain_gradients(model)
    cost = cost_of(model)
    cost.backward(retain_graph=True)
    torch.testing.assert_close(gradients(model), expected)
    cost.total.backward()
    torch.testing.assert_close(gradients(model), [2 * gradient for gradient in expected])
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        cost.backward()


@wraps
def test_second_derivatives_need_the_plain_equations(wrap: Any) -> None:
    model = model_of(wrap)
    parameters = [*model.parameters()]
    with pytest.raises(RuntimeError, match=r"bayesbackprop\.plain_kernels"):
        torch.autograd.grad(cost_of(model), parameters, create_graph=True)
    with plain_kernels():
        first = torch.autograd.grad(cost_of(model), parameters, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), parameters)
    assert all(bool(each.abs().max() > 0) for each in second)


def optimiser_step(model: Bayesian) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def one_mean(model: Bayesian) -> None:
    with torch.no_grad():
        next(model.net.parameters())[0].add_(1)


def one_rho(model: Bayesian) -> None:
    with torch.no_grad():
        next(model.rho.parameters())[0].add_(1)


def the_centre(model: Bayesian) -> None:
    next(model.centre.buffers()).zero_()


def loaded(model: Bayesian) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


@wraps
@pytest.mark.parametrize("change", [optimiser_step, one_mean, one_rho, the_centre, loaded])
def test_weights_changed_before_backward_are_noticed(change: Callable[[Bayesian], None], wrap: Any) -> None:
    """As torch notices it. What the cost is, it stays."""
    model = model_of(wrap, centre="net")
    cost = cost_of(model)
    expected = values(cost)
    change(model)
    before = [None if gradient is None else gradient.clone() for gradient in gradients(model)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cost.backward()
    after = gradients(model)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert values(cost) == expected


# --- torch's own tools ------------------------------------------------------------------------------------------------


@wraps
def test_hooks_on_parameters_run(wrap: Any) -> None:
    model = model_of(wrap)
    expected = plain_gradients(model)
    seen: dict[str, list[Tensor]] = {"gradient": [], "accumulated": [], "node": []}
    handles: list[Any] = []
    nodes = []
    for parameter in model.parameters():
        handles.append(parameter.register_hook(lambda gradient: seen["gradient"].append(gradient.clone())))
        handles.append(
            parameter.register_post_accumulate_grad_hook(lambda it: seen["accumulated"].append(it.grad.clone()))
        )
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # where DDP has its hooks
        nodes.append(node)
        handles.append(node.register_hook(lambda *_: seen["node"].append(torch.ones(()))))
    cost_of(model).backward()
    assert {name: len(calls) for name, calls in seen.items()} == dict.fromkeys(seen, len(expected))
    for calls in (seen["gradient"], seen["accumulated"]):
        by_size = sorted(calls, key=lambda gradient: (gradient.shape, gradient.sum().item()))
        wanted = sorted(expected, key=lambda gradient: (gradient.shape, gradient.sum().item()))
        torch.testing.assert_close(by_size, wanted)
    for handle in handles:
        handle.remove()
    cost_of(model).backward()
    assert {len(calls) for calls in seen.values()} == {len(expected)}


@wraps
def test_a_hook_may_change_the_gradient(wrap: Any) -> None:
    model = model_of(wrap)
    expected = plain_gradients(model)
    parameter = next(model.parameters())
    parameter.register_hook(lambda gradient: gradient * 2)
    cost_of(model).backward()
    torch.testing.assert_close(gradients(model), [2 * expected[0], *expected[1:]])


@wraps
def test_a_hook_on_the_cost_runs(wrap: Any) -> None:
    model = model_of(wrap)
    expected = plain_gradients(model)
    cost = cost_of(model)
    cost.register_hook(lambda gradient: gradient * 3)
    cost.retain_grad()
    cost.backward()
    torch.testing.assert_close(gradients(model), [3 * gradient for gradient in expected])
    assert cost.grad is not None


@pytest.mark.supports("Training", "LBFGS", "the cost in a closure")
@wraps
def test_lbfgs(wrap: Any) -> None:
    """A closure that returns a cost, always with the noise of one step: a function to be minimised."""
    model = model_of(wrap)
    free_energy = FreeEnergy(model, n=40)
    optimiser = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10)

    def closure() -> Cost:
        optimiser.zero_grad()
        cost = free_energy(*data(), step=1)
        cost.backward()
        return cost

    first = optimiser.step(closure)
    assert float(closure()) < float(first) - 0.5


@pytest.mark.supports("Training", "GradScaler")
@wraps
def test_a_grad_scaler(wrap: Any) -> None:
    """With its scale the step is that without, and a scale that overflows skips it."""
    ends = []
    for enabled in (True, False):
        model = model_of(wrap)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        for step in range(1, 4):
            optimiser.zero_grad()
            scaled = scaler.scale(cost_of(model, step))
            scaled.backward()
            scaler.unscale_(optimiser)
            scaler.step(optimiser)
            scaler.update()
        ends.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*ends)
    model = model_of(wrap)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=float("inf"))
    scaler.scale(cost_of(model)).backward()
    scaler.step(optimiser)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@wraps
def test_a_part_of_a_larger_loss(wrap: Any) -> None:
    """A cost beside another loss, on a network before the model."""
    model = model_of(wrap)
    encoder = nn.Linear(2, 3).double()
    x, y = torch.randn(6, 2).double(), data()[1]
    found = []
    for kernels in (False, True):
        encoder.zero_grad()
        model.zero_grad()
        if kernels:
            total = FreeEnergy(model, n=40)(encoder(x), y, step=1) + encoder.weight.square().sum()
            total.backward()
        else:
            with plain_kernels():
                (FreeEnergy(model, n=40)(encoder(x), y, step=1) + encoder.weight.square().sum()).backward()
        found.append([encoder.weight.grad, encoder.bias.grad, *gradients(model)])
    torch.testing.assert_close(*found)


def test_a_detached_cost_is_copied_and_pickled() -> None:
    cost = cost_of(model_of()).detach()
    for twin in (copy.deepcopy(cost), pickle.loads(pickle.dumps(cost))):
        assert type(twin) is Tensor
        assert torch.equal(twin, cost)
    file = io.BytesIO()
    torch.save(cost, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), cost)


def test_a_cost_without_gradients() -> None:
    model = model_of()
    with torch.no_grad():
        cost = cost_of(model)
    assert not cost.requires_grad
    assert values(cost) == pytest.approx(values(cost_of(model)), rel=1e-12)
    with pytest.raises(RuntimeError, match="does not require grad"):
        cost.backward()


def test_numbers_that_are_not_finite_are_refused() -> None:
    model = Bayesian(nn.Sequential(nn.Linear(3, 2)), Categorical(), seed=0)
    free_energy = FreeEnergy(model, n=40)
    x, y = torch.randn(4, 3), torch.randint(2, (4,))
    with torch.no_grad():
        model.rho.get_parameter("0.bias")[0] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        free_energy(x, y).backward()
    with torch.no_grad():
        model.rho.get_parameter("0.bias")[0] = -3.0
        model.net[0].bias[0] = 1e30  # the square of it is too much, the logits are not
    with pytest.raises(ValueError, match=r"'complexity cost' .* must be finite"):
        free_energy(x, y).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
