"""Gradients that Adam computes where it uses them: the same step, and who needs to see gradients sees them."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bayesbackprop as bbb
from bayesbackprop import Batches, Bayesian, FreeEnergy, Gaussian, LogDensity, Normal, fit
from bayesbackprop.training import check_gradients
from networks import X, Y, net_with_norm, regressor
from opaque import Opaque

pytestmark = pytest.mark.identities


def model_of(net: nn.Module | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Bayesian:
    torch.manual_seed(0)
    given = {"likelihood": Gaussian("learnt"), "sigma": 0.05, "seed": 3, **options}
    return Bayesian(regressor() if net is None else net, **given).to(dtype)


def pair(model: Bayesian, **options: Any) -> Iterator[tuple[FreeEnergy, bbb.Adam]]:
    """The model and a copy of it, each with its objective and its optimiser."""
    for each in (model, copy.deepcopy(model)):
        free_energy = FreeEnergy(each, n=50, **options)
        yield free_energy, bbb.Adam(free_energy.param_groups(0.01, rho_lr=0.03, weight_decay=0.1))


def cost_of(free_energy: FreeEnergy) -> Tensor:
    dtype = next(free_energy.parameters()).dtype
    return free_energy(X.to(dtype), Y.to(dtype))


def gradients(free_energy: FreeEnergy) -> list[Tensor | None]:
    """Of all mu and rho."""
    return [tensor.grad for q in free_energy.model.posterior.values() for tensor in q]


def assert_equal(one: FreeEnergy, other: FreeEnergy) -> None:
    for (name, first), second in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second), name


# --- the same step ----------------------------------------------------------------------------------------------------


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.Flatten(), nn.Linear(8, 1))


def with_constants() -> Bayesian:
    model = model_of(prior=Normal(0.5))
    with torch.no_grad():
        model.posterior["0.weight"].rho[::2] = -torch.inf
        model.posterior["2.bias"].rho.fill_(-torch.inf)
    return model


MODELS: dict[str, Callable[[torch.dtype], Bayesian]] = {
    "fully connected": lambda dtype: model_of(dtype=dtype),
    "local": lambda dtype: model_of(dtype=dtype, estimator="local"),
    "flipout": lambda dtype: model_of(dtype=dtype, estimator="flipout"),
    "two estimators": lambda dtype: model_of(dtype=dtype, estimator={"0.*": "local", "*": "flipout"}),
    "Laplace": lambda dtype: model_of(dtype=dtype, prior=bbb.Laplace(0.3)),
    "a centre": lambda dtype: model_of(dtype=dtype, prior=Normal(0.3), centre="net"),
    "a prior of the user's": lambda dtype: model_of(dtype=dtype, prior=LogDensity(lambda w: -w.square() / 2)),
    "any module": lambda dtype: model_of(Opaque(regressor()), dtype),
    "convolution": lambda dtype: model_of(conv_net(), dtype),
    "layers that are not Bayesian": lambda dtype: model_of(nn.Sequential(net_with_norm(), nn.Linear(2, 1)), dtype),
    "constant weights": lambda dtype: with_constants().to(dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_a_step_is_the_same_bit_for_bit(make: Callable[[torch.dtype], Bayesian], dtype: torch.dtype) -> None:
    (fused, ours), (usual, theirs) = pair(make(dtype))
    for _ in range(5):
        ours.zero_grad()
        theirs.zero_grad()
        ours.backward(cost_of(fused))
        assert ours.postponed
        assert gradients(fused) == [None] * len(gradients(fused))
        cost_of(usual).backward()
        ours.step()
        theirs.step()
        assert gradients(fused) == [None] * len(gradients(fused))
        assert_equal(fused, usual)
    states = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert all(torch.equal(value, states[1][number][name]) for name, value in state.items())


def test_a_closed_complexity_is_the_same() -> None:
    (fused, ours), (usual, theirs) = pair(model_of(prior=Normal(0.3)), complexity="closed")
    for _ in range(3):
        ours.backward(cost_of(fused))
        assert ours.postponed
        theirs.zero_grad()
        cost_of(usual).backward()
        ours.step()
        theirs.step()
        ours.zero_grad()
    assert_equal(fused, usual)


def test_the_number_of_threads_does_not_matter() -> None:
    results, before = list[FreeEnergy](), torch.get_num_threads()
    net = nn.Sequential(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            (free_energy, optimiser), _ = pair(model_of(copy.deepcopy(net)))
            gradient = torch.linspace(-1, 1, 90_000).reshape(300, 300)
            # The matrix products of torch may depend on its threads: the gradient by weights is given.
            weights = free_energy.model.draw(1).weights["2.weight"]
            optimiser.backward((weights * gradient).sum() + free_energy.model.draw(1).complexity())
            optimiser.step()
            results.append(free_energy)
    finally:
        torch.set_num_threads(before)
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


# --- accumulation -----------------------------------------------------------------------------------------------------


def test_gradients_accumulate_in_every_order() -> None:
    for ways in ("ff", "fu", "uf", "fff", "ufu"):  # f: by the optimiser, u: by the cost
        (fused, ours), (usual, theirs) = pair(model_of(dtype=torch.float64))
        for _ in range(2):
            ours.zero_grad()
            theirs.zero_grad()
            for way in ways:
                cost = cost_of(fused)
                ours.backward(cost) if way == "f" else cost.backward()
                cost_of(usual).backward()
            ours.step()
            theirs.step()
        torch.testing.assert_close(list(fused.parameters()), list(usual.parameters()), rtol=1e-12, atol=1e-14)


def test_several_draws_of_a_step_add_up() -> None:
    (fused, ours), (usual, theirs) = pair(model_of(dtype=torch.float64), draws=3)
    ours.backward(cost_of(fused))
    cost_of(usual).backward()
    ours.step()
    theirs.step()
    torch.testing.assert_close(list(fused.parameters()), list(usual.parameters()), rtol=1e-12, atol=1e-14)


def test_a_mean_that_is_used_elsewhere_gets_both_gradients() -> None:
    (fused, ours), (usual, theirs) = pair(model_of())
    for free_energy, backward in ((fused, ours.backward), (usual, Tensor.backward)):
        mu = free_energy.model.posterior["0.weight"].mu
        backward(cost_of(free_energy) + 3 * mu.square().sum())
    ours.step()
    theirs.step()
    assert_equal(fused, usual)


# --- whoever needs gradients ------------------------------------------------------------------------------------------


def double_it(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("which", ["mu", "rho"])
def test_hooks_change_gradients(which: str, late: bool) -> None:
    (fused, ours), (usual, theirs) = pair(model_of())
    for free_energy in (fused, usual):
        parameter = getattr(free_energy.model.posterior["2.weight"], which)
        if late:
            parameter.register_post_accumulate_grad_hook(double_it)
        else:
            parameter.register_hook(lambda gradient: 2 * gradient)
    ours.backward(cost_of(fused))
    assert all(gradient is not None for gradient in gradients(fused))
    cost_of(usual).backward()
    ours.step()
    theirs.step()
    assert_equal(fused, usual)


def test_other_ranks_wait_for_gradients() -> None:
    (free_energy, optimiser), _ = pair(model_of())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimiser.backward(cost_of(free_energy))
    finally:
        dist.destroy_process_group()
    assert all(gradient is not None for gradient in gradients(free_energy))


@pytest.mark.parametrize("which", ["mu", "rho"])
def test_what_is_frozen_or_belongs_to_another_optimiser_is_left_alone(which: str) -> None:
    for frozen in (True, False):
        model = model_of()
        for each in (tensors := [getattr(q, which) for q in model.posterior.values()]):
            each.requires_grad_(not frozen)
        before = [tensor.detach().clone() for tensor in tensors]
        others = [p for p in model.parameters() if frozen or not any(p is tensor for tensor in tensors)]
        optimiser = bbb.Adam(others)
        optimiser.backward(cost_of(FreeEnergy(model, n=50)))
        assert not optimiser.postponed
        optimiser.step()
        assert all(torch.equal(tensor, then) for tensor, then in zip(tensors, before, strict=True))
        assert all((tensor.grad is None) == frozen for tensor in tensors)


def test_without_kernels_there_are_gradients() -> None:
    (free_energy, optimiser), (usual, theirs) = pair(model_of())
    with bbb.plain_kernels():
        optimiser.backward(cost_of(free_energy))
        cost_of(usual).backward()
    assert all(gradient is not None for gradient in gradients(free_energy))
    optimiser.step()
    theirs.step()
    assert_equal(free_energy, usual)


def test_a_network_that_is_not_bayesian_is_trained_as_usual() -> None:
    net, twin = nn.Linear(3, 1), nn.Linear(3, 1)
    twin.load_state_dict(net.state_dict())
    ours, theirs = bbb.Adam(net.parameters()), bbb.Adam(twin.parameters())
    ours.backward((net(X) - Y).square().mean())
    (twin(X) - Y).square().mean().backward()
    ours.step()
    theirs.step()
    assert torch.equal(net.weight, twin.weight)


# --- until the step ---------------------------------------------------------------------------------------------------


def test_materialised_gradients_can_be_clipped() -> None:
    (fused, ours), (usual, theirs) = pair(model_of())
    ours.materialise()  # of nothing: nothing
    ours.backward(cost_of(fused))
    ours.materialise()
    assert not ours.postponed
    cost_of(usual).backward()
    for one, other in zip(gradients(fused), gradients(usual), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    for free_energy, optimiser in ((fused, ours), (usual, theirs)):
        nn.utils.clip_grad_norm_(free_energy.parameters(), 0.01)
        optimiser.step()
    assert_equal(fused, usual)


def test_zero_grad_forgets() -> None:
    (free_energy, optimiser), (untouched, _) = pair(model_of())
    optimiser.backward(cost_of(free_energy))
    optimiser.zero_grad()
    optimiser.step()
    assert_equal(free_energy, untouched)


def test_a_state_that_is_exchanged_in_between_is_the_one_that_is_used() -> None:
    (free_energy, optimiser), (twin, other) = pair(model_of())
    for _ in range(3):
        optimiser.zero_grad()
        optimiser.backward(cost_of(free_energy))
        optimiser.state.clear()
        optimiser.step()
        other.zero_grad()
        cost_of(twin).backward()
        other.state.clear()
        other.step()
        assert all(int(state["step"]) == 1 for state in optimiser.state.values())
    assert_equal(free_energy, twin)


def test_a_state_that_is_loaded_forgets() -> None:
    (free_energy, optimiser), (untouched, other) = pair(model_of())
    optimiser.backward(cost_of(free_energy))
    optimiser.load_state_dict(other.state_dict())
    free_energy.model.likelihood.zero_grad()
    optimiser.step()
    assert_equal(free_energy, untouched)


@pytest.mark.parametrize("then", [bbb.Adam.step, bbb.Adam.materialise])
def test_a_parameter_that_is_changed_in_between_is_noticed(then: Callable[[bbb.Adam], None]) -> None:
    for change in (lambda q: q.rho.detach().add_(1), lambda q: setattr(q.mu, "data", q.mu.detach().clone())):
        (free_energy, optimiser), _ = pair(model_of())
        optimiser.backward(cost_of(free_energy))
        change(free_energy.model.posterior["0.weight"])
        with pytest.raises(RuntimeError, match=r"after its weights were drawn"):
            then(optimiser)
        assert not optimiser.postponed


class Fails(torch.autograd.Function):
    """Whose gradient cannot be computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise ArithmeticError("no gradient")


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    for cost_first in (True, False):
        (free_energy, optimiser), (untouched, _) = pair(model_of())
        extra = torch.ones((), requires_grad=True)
        failing = Fails.apply(extra)  # type: ignore[no-untyped-call]
        cost = cost_of(free_energy)
        with pytest.raises(ArithmeticError, match="no gradient"):
            optimiser.backward(cost + failing if cost_first else failing + cost)
        assert not optimiser.postponed
        optimiser.zero_grad()
        optimiser.step()
        assert_equal(free_energy, untouched)


def test_only_a_cost_can_go_back() -> None:
    optimiser = bbb.Adam(model_of().parameters())
    for cost in (3.0, torch.ones(2, requires_grad=True), torch.ones(())):
        with pytest.raises(ValueError, match=r"'cost' parameter of .* must be a tensor of one number"):
            optimiser.backward(cost)  # type: ignore[arg-type]


def test_the_gradients_are_never_in_memory() -> None:
    """Those of rho, that is: the ones of mu could take the place of the derivatives by the weights."""
    (free_energy, optimiser), (usual, _) = pair(model_of(nn.Linear(3, 30_000), likelihood=Gaussian(1.0)))
    y = torch.zeros(16, 30_000)
    optimiser.backward(free_energy(X, y))
    optimiser.step()
    usual(X, y).backward()
    assert "gradients of rho" not in free_energy.model.engine().parameters.cache
    gradients = [[rho.grad for rho in each.model.rho.parameters()] for each in (free_energy, usual)]
    assert [gradient is None for gradient in gradients[0]] == [True, True]
    assert [gradient is None for gradient in gradients[1]] == [False, False]


# --- in fit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"clip": 0.1}, {"accumulate": 2}], ids=str)
def test_fit_takes_the_quicker_way_where_it_can(options: dict[str, Any]) -> None:
    """Nobody clips or adds up gradients: then there are none to be seen."""
    model = model_of()
    fit(model, Batches(X, Y, batch_size=4), epochs=1, **options)
    assert [tensor.grad is None for q in model.posterior.values() for tensor in q] == [not options] * 8


def test_gradients_whose_squares_overflow_are_finite_all_the_same() -> None:
    (fused, ours), (usual, theirs) = pair(model_of())
    ours.backward(cost_of(fused) * 1e25)
    (cost_of(usual) * 1e25).backward()
    check_gradients(fused, ours)
    assert all(gradient is not None for gradient in gradients(fused))
    ours.step()
    theirs.step()
    assert_equal(fused, usual)
