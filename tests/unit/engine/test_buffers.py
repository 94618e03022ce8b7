"""Memory that is used again: a cost waits as it was, and what a user keeps stays what it is."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Normal, plain_kernels
from bayesbackprop._engine import cpu
from bayesbackprop._engine.parameters import Parameters
from costs import data, gradients, model_of, wraps
from engine_parameters import parameters_of
from opaque import Opaque
from step_memory import memory_of_a_step

pytestmark = pytest.mark.equivalence


@pytest.fixture(autouse=True)
def _networks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks too use memory again."""
    monkeypatch.setattr(cpu, "_LARGE", 0)


def plain_gradients(model: Bayesian, step: int, batch: int = 6) -> list[Tensor]:
    """Those of the step, on the plain equations."""
    with plain_kernels():
        cost = FreeEnergy(model, n=40)(*data(batch), step=step)
        return [*torch.autograd.grad(cost, [*model.parameters()])]


# --- what waits, and what is kept -------------------------------------------------------------------------------------


@wraps
@pytest.mark.parametrize("read", [True, False])
def test_a_cost_keeps_its_weights_while_others_come_and_go(wrap: Any, read: bool) -> None:
    model = model_of(wrap)
    expected, later = plain_gradients(model, 1), plain_gradients(model, 4, batch=3)
    complexity = model.draw(1).complexity().item()
    free_energy = FreeEnergy(model, n=40)
    kept = free_energy(*data())
    for step in range(2, 6):
        cost = free_energy(*data(step - 1))
        cost.backward()
        assert cost.complexity.item() == pytest.approx(model.draw(step).complexity().item(), rel=1e-12)
        if step == 4:
            torch.testing.assert_close(gradients(model), later)
        model.zero_grad()
        del cost
    if read:
        assert kept.complexity.item() == pytest.approx(complexity, rel=1e-12)
    kept.backward()
    torch.testing.assert_close(gradients(model), expected)
    assert kept.complexity.item() == pytest.approx(complexity, rel=1e-12)


KEEP: dict[str, Callable[[Tensor], Any]] = {
    "the gradient": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1)[1:3],
    "a detached one": lambda gradient: gradient.detach(),
    "its transpose": lambda gradient: gradient.t(),
    "as numpy": lambda gradient: gradient.numpy(),
    "through dlpack": torch.from_dlpack,
}


@wraps
@pytest.mark.parametrize("keep", KEEP)
def test_gradients_that_someone_keeps_are_not_overwritten(keep: str, wrap: Any) -> None:
    model = model_of(wrap)
    free_energy = FreeEnergy(model, n=40)
    kept: list[tuple[Any, list[float]]] = []
    for step in range(1, 7):
        free_energy(*data()).backward()
        torch.testing.assert_close(gradients(model), plain_gradients(model, step))
        for gradient in gradients(model):
            one = KEEP[keep](gradient)
            kept.append((one, one.tolist()))
        model.zero_grad()
    for one, before in kept:
        assert one.tolist() == before


@wraps
def test_weights_that_someone_keeps_are_not_overwritten(wrap: Any) -> None:
    model = model_of(wrap)
    kept = model.draw(9).weights
    before = {name: weight.detach().clone() for name, weight in kept.items()}
    free_energy = FreeEnergy(model, n=40)
    for _ in range(3):
        free_energy(*data()).backward()
        model.draw(10).complexity()
    assert all(torch.equal(kept[name], value) for name, value in before.items())


@wraps
def test_gradients_set_to_zero_instead_of_none(wrap: Any) -> None:
    model = model_of(wrap)
    free_energy = FreeEnergy(model, n=40)
    free_energy(*data()).backward()
    first = gradients(model)
    for step in (2, 3, 4):
        model.zero_grad(set_to_none=False)
        free_energy(*data()).backward()
        torch.testing.assert_close(gradients(model), plain_gradients(model, step))
        assert all(a is b for a, b in zip(first, gradients(model), strict=True))


@wraps
def test_a_copy_has_memory_of_its_own(wrap: Any) -> None:
    model = model_of(wrap)
    expected = [plain_gradients(model, step) for step in (1, 2)]
    free_energy = FreeEnergy(model, n=40)
    free_energy(*data()).backward()
    kept = gradients(model)
    waiting = free_energy(*data())
    twin = copy.deepcopy(free_energy)
    twin.step.zero_()
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(3):
        twin.model.zero_grad()
        twin(*data()).backward()
        with torch.no_grad():
            for parameter in twin.model.parameters():
                parameter.add_(1)
    waiting.backward()
    torch.testing.assert_close(kept, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])


@wraps
def test_training_uses_memory_again(wrap: Any) -> None:
    """Once a step is over, the next one draws its weights, and takes the gradients of rho, where the last one did.

    In a fully connected network these are in the place of the weights.
    """
    model = model_of(wrap)
    free_energy = FreeEnergy(model, n=40)
    cache = model.engine().parameters.cache
    places = []
    for _ in range(4):
        model.zero_grad()
        free_energy(*data()).backward()
        purposes = ("weights", "gradients of rho") if wrap is Opaque else ("weights",)
        assert set(cache) & {"weights", "gradients of rho"} == set(purposes)
        pools = [pool for purpose in purposes for pool in cache[purpose]]
        assert [len(pool) for pool in pools] == [1] * 4 * len(purposes)
        places.append([kept.data_ptr() for (kept,) in pools])
    assert places[1:] == places[:1] * 3
    assert places[0][-4:] == [rho.grad.data_ptr() for rho in model.rho.parameters()]


@wraps
def test_gradients_cleared_after_the_draw_alternate_between_two_buffers(wrap: Any) -> None:
    model = model_of(wrap)
    free_energy = FreeEnergy(model, n=40)
    cache = model.engine().parameters.cache
    for step in range(1, 6):
        cost = free_energy(*data())
        model.zero_grad()
        cost.backward()
        torch.testing.assert_close(gradients(model), plain_gradients(model, step))
        assert max(len(pool) for purpose in ("weights", "gradients of rho") for pool in cache.get(purpose, [])) <= 2


@wraps
@pytest.mark.parametrize("kept", [True, False])
def test_a_second_pass_over_a_kept_graph_gives_the_same_gradients(wrap: Any, kept: bool) -> None:
    """Delta_mu takes the place of weights that nobody holds: those of a second pass are drawn again."""
    model = model_of(wrap)
    free_energy = FreeEnergy(model, n=40)
    expected = plain_gradients(model, 1)
    waiting = [free_energy(*data())] if kept else []  # then the memory of the weights is not the pool's any more
    cost = free_energy(*data(), step=1)
    for _ in range(3):
        model.zero_grad()
        cost.backward(retain_graph=True)
        torch.testing.assert_close(gradients(model), expected)
    for other in waiting:
        model.zero_grad()
        other.backward()
        torch.testing.assert_close(gradients(model), expected)


@pytest.mark.parametrize("older", [True, False], ids=["out of the pool", "of the pool"])
@pytest.mark.parametrize("keep", ["the weights", *KEEP])
def test_weights_that_someone_keeps_do_not_become_gradients(keep: str, older: bool) -> None:
    model = model_of(Opaque)
    draw = model.draw(1)
    output = draw(data()[0])
    name, weight = next(iter(draw.weights.items()))
    one = weight.detach() if keep == "the weights" else KEEP[keep](weight.detach())
    before = one.tolist()
    if older:
        _ = model.draw(2).weights
    del draw, weight
    output.sum().backward()
    assert one.tolist() == before, name


@wraps
def test_a_step_needs_one_copy_of_the_weights_besides_parameters_and_gradients(wrap: Any) -> None:
    assert memory_of_a_step(lambda net: Bayesian(wrap(net), Categorical(), seed=0)) < 1.3


@wraps
@pytest.mark.parametrize("retain", [False, True])
def test_costs_wait_for_their_backward_in_any_order(wrap: Any, retain: bool) -> None:
    model = model_of(wrap)
    expected = [plain_gradients(model, step) for step in range(1, 7)]
    free_energy = FreeEnergy(model, n=40)
    waiting = [free_energy(*data()) for _ in range(4)]
    for step in (2, 0, 3, 1):
        waiting[step].backward(retain_graph=retain)
        torch.testing.assert_close(gradients(model), expected[step])
        model.zero_grad()
    del waiting
    kept = []
    for step in (4, 5):
        free_energy(*data()).backward()
        kept.append(gradients(model))
        model.zero_grad()
        torch.testing.assert_close(kept[-1], expected[step])
    torch.testing.assert_close(kept, expected[4:])  # those of the first are still theirs


def test_what_inference_mode_made_is_not_trained_with() -> None:
    """Its memory could not be saved for backward."""
    model = model_of()
    with torch.inference_mode():
        model.draw(3)(data()[0])
    expected = plain_gradients(model, 1)
    FreeEnergy(model, n=40)(*data()).backward()
    torch.testing.assert_close(gradients(model), expected)


# --- threads ----------------------------------------------------------------------------------------------------------


def in_threads(functions: list[Callable[[], None]]) -> None:
    problems: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


@wraps
def test_two_threads_train_two_models(wrap: Any) -> None:
    def train(model: Bayesian) -> None:
        free_energy = FreeEnergy(model, n=40)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(40):
            optimiser.zero_grad()
            free_energy(*data()).backward()
            optimiser.step()

    alone, *together = (model_of(wrap) for _ in range(3))
    train(alone)
    in_threads([lambda model=model: train(model) for model in together])
    for model in together:
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(a, b)


@wraps
@pytest.mark.parametrize("width", [20, 400])  # the kernels let others run where there is more to do
def test_two_threads_use_one_model(wrap: Any, width: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 100)).double()
    model = Bayesian(wrap(net), Categorical(), Normal(0.4), sigma=0.1, seed=7)
    parameters = [*model.parameters()]

    def steps(first: int, number: int) -> list[tuple[float, list[Tensor]]]:
        free_energy = FreeEnergy(model, n=40)
        free_energy.step.fill_(first)
        found = []
        for _ in range(number):
            cost = free_energy(*data())
            found.append((cost.complexity.item(), [g.clone() for g in torch.autograd.grad(cost, parameters)]))
        return found

    expected = {first: steps(first, 8) for first in (0, 100)}
    found: dict[int, list[tuple[float, list[Tensor]]]] = {}
    in_threads([lambda first=first: found.update({first: steps(first, 8)}) for first in (0, 100)])
    for first, results in expected.items():
        for (complexity, gradient), (other, others) in zip(results, found[first], strict=True):
            assert complexity == other
            torch.testing.assert_close(gradient, others, rtol=1e-12, atol=1e-12)


# --- the buffers themselves -------------------------------------------------------------------------------------------


def places(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def take(parameters: Parameters, like: list[Tensor]) -> list[Tensor]:
    return cpu.buffers(parameters, "test", like)


def test_what_nobody_holds_is_given_out_again() -> None:
    like = [torch.ones(3, 5, requires_grad=True), torch.ones(7)]
    owner = Parameters({})
    tensors = take(owner, like)
    assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in like]
    assert not any(tensor.requires_grad for tensor in tensors)
    first = places(tensors)
    del tensors
    assert places(take(owner, like)) == first
    kept = take(owner, like)[1]  # of the two, one is held
    second = take(owner, like)
    assert second[0].data_ptr() == first[0]
    assert second[1].data_ptr() != kept.data_ptr()
    third = take(owner, like)
    assert len({*places(second), *places(third), kept.data_ptr()}) == 5
    del second, third


def test_each_purpose_and_each_owner_has_memory_of_its_own() -> None:
    like = [torch.ones(3, 5)]
    owner, other = Parameters({}), Parameters({})
    given = [cpu.buffers(each, purpose, like)[0] for each in (owner, other) for purpose in ("weights", "gradients")]
    assert len({*places(given)}) == 4


@pytest.mark.parametrize("keep", KEEP)
def test_every_holder_is_seen(keep: str) -> None:
    like = [torch.ones(3, 5)]
    owner = Parameters({})
    (tensor,) = take(owner, like)
    place, kept = tensor.data_ptr(), KEEP[keep](tensor)
    del tensor
    assert take(owner, like)[0].data_ptr() != place
    assert kept is not None


def test_what_another_process_may_hold_is_not_given_out() -> None:
    like = [torch.ones(3, 5)]
    owner = Parameters({})
    (tensor,) = take(owner, like)
    tensor.share_memory_()
    del tensor
    assert not take(owner, like)[0].is_shared()


def test_buffers_fit_what_is_asked_for() -> None:
    owner = Parameters({})
    for like in (
        [torch.ones(4)],
        [torch.ones(4).double()],
        [torch.ones(2, 2).double()],
        [torch.ones(5), torch.ones(6)],
        [torch.ones(6), torch.ones(5)],
        [torch.ones(6)],
        [],
    ):
        tensors = take(owner, like)
        assert [(tensor.shape, tensor.dtype) for tensor in tensors] == [(each.shape, each.dtype) for each in like]
        assert all(tensor.is_contiguous() for tensor in tensors)
        del tensors  # or the next ones would be new in any case


def test_where_torch_does_not_say_who_holds_memory_is_always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_use_count", None)
    like, owner = [torch.ones(3, 5)], Parameters({})
    given = [take(owner, like)[0].fill_(number) for number in range(5)]
    assert [tensor[0, 0].item() for tensor in given] == [0, 1, 2, 3, 4]
    assert len({tensor.data_ptr() for tensor in given}) == 5


def test_threads_never_get_the_same_memory() -> None:
    like, owner = [torch.ones(64)], Parameters({})
    clashes = []

    def use(number: float) -> None:
        for _ in range(300):
            (mine,) = take(owner, like)
            mine.fill_(number)
            if not bool((mine == number).all()):
                clashes.append(number)

    in_threads([lambda number=number: use(number) for number in (1.0, 2.0, 3.0)])
    assert not clashes


def test_small_networks_take_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_LARGE", 10)
    like = [torch.ones(3, 3)]
    for n, used_again in ((9, False), (10, True)):
        owner = parameters_of(n, Normal(1.0), torch.float32)
        take(owner, like)
        assert bool(owner.cache) == used_again
