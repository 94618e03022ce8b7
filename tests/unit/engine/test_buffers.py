"""Memory that is used again: a cost waits as it was, and what a user keeps stays what it is.

And the parts of a cost, which are computed when first asked for: always those of its own step.
"""

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bayesbackprop._engine.room import Room
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, Cost, FreeEnergy, Gaussian, Likelihood, Normal
from bayesbackprop import _engine as kernels
from bayesbackprop._engine import room
from opaque import Opaque

pytestmark = pytest.mark.equivalence


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {"stack": lambda net: net, "autograd": Opaque}
wraps = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def model_of(wrap: Callable[[nn.Module], nn.Module] = WRAPS["stack"], **options: Any) -> Bayesian:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 4)).double()
    likelihood: Likelihood = options.pop("likelihood", None) or Categorical()
    return Bayesian(wrap(net), likelihood, Normal(0.4), sigma=0.1, seed=7, **options)


def data(batch: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (batch,), generator=generator)


def plain_gradients(model: Bayesian, step: int, batch: int = 6) -> list[Tensor]:
    """Those of the step, on the plain equations."""
    with kernels.plain():
        free_energy = FreeEnergy(model, n=40)
        free_energy.step.fill_(step - 1)
        cost = free_energy(*data(batch))
        return [*torch.autograd.grad(cost.total, [*model.parameters()])]


def gradients(model: Bayesian) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


# --- the parts of a cost ----------------------------------------------------------------------------------------------


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


READ: dict[str, Callable[[Cost], object]] = {
    "total": lambda cost: cost.total,
    "likelihood": lambda cost: cost.likelihood,
    "complexity": lambda cost: cost.complexity,
    "unpacked": lambda cost: [*cost],
    "printed": repr,
    "backward": lambda cost: cost.backward(),
}


def optimiser_step(model: Bayesian) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def one_rho(model: Bayesian) -> None:
    with torch.no_grad():
        next(model.rho.parameters())[0].add_(1)


def the_centre(model: Bayesian) -> None:
    next(model.centre.buffers()).zero_()


def other_data(model: Bayesian) -> None:
    weight = next(model.net.parameters())
    weight.data = weight.data * 2


def other_type(model: Bayesian) -> None:
    model.float()


def loaded(model: Bayesian) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


@wraps
@pytest.mark.parametrize("change", [optimiser_step, one_rho, the_centre, other_data, other_type, loaded])
@pytest.mark.parametrize("read", READ)
def test_parts_first_read_after_the_weights_changed_are_refused(read: str, change: Any, wrap: Any) -> None:
    model = model_of(wrap, centre="net")
    free_energy = FreeEnergy(model, n=40)
    cost, seen = free_energy(*data()), free_energy(*data())
    expected = values(seen)
    change(model)
    before = [None if gradient is None else gradient.clone() for gradient in gradients(model)]
    message = "The weights were changed (by an optimiser step?) after the cost was computed"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            READ[read](cost)
    after = gradients(model)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert values(seen) == expected  # what had been read stays readable
    with pytest.raises(RuntimeError, match=re.escape(message)):
        seen.total.backward()


@wraps
def test_a_cost_unpacks(wrap: Any) -> None:
    cost = FreeEnergy(model_of(wrap), n=40)(*data())
    total, likelihood, complexity, weight = cost
    assert weight.item() == 1 / 40
    assert total is cost.total
    assert likelihood is cost.likelihood
    assert complexity is cost.complexity
    assert all(part.shape == () and part.dtype == torch.float64 for part in cost)
    assert all(part.requires_grad for part in (total, likelihood, complexity))
    assert not weight.requires_grad


@wraps
def test_a_cost_prints(wrap: Any) -> None:
    cost = FreeEnergy(model_of(wrap), n=40)(*data())
    total, likelihood, complexity, _ = values(cost)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        shown = repr(cost)
    finally:
        torch.set_warn_always(before)
    assert shown == f"Cost({total=:.6g}, {likelihood=:.6g}, {complexity=:.6g}, weight=0.025)"


@wraps
@pytest.mark.parametrize("read", [True, False])
def test_backward_and_total_backward_mix(wrap: Any, read: bool) -> None:
    model = model_of(wrap)
    expected = plain_gradients(model, 1)
    cost = FreeEnergy(model, n=40)(*data())
    if read:
        values(cost)
    cost.backward(retain_graph=True)
    cost.total.backward()
    torch.testing.assert_close(gradients(model), [2 * gradient for gradient in expected])


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
def test_training_reuses_memory(wrap: Any) -> None:
    """Once a step is over, the next one draws its weights, and takes the gradients of rho, where the last one did."""
    model = model_of(wrap)
    free_energy = FreeEnergy(model, n=40)
    rooms = model.layout().parameters.room_for_weights, model.layout().parameters.room_for_gradients
    places = []
    for _ in range(4):
        model.zero_grad()
        free_energy(*data()).backward()
        places.append([kept.data_ptr() for each in rooms for kept in each._kept])
    assert places[1:] == places[:1] * 3
    assert places[0][4:] == [rho.grad.data_ptr() for rho in model.rho.parameters()]


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
            found.append((cost.complexity.item(), [g.clone() for g in torch.autograd.grad(cost.total, parameters)]))
        return found

    expected = {first: steps(first, 8) for first in (0, 100)}
    found: dict[int, list[tuple[float, list[Tensor]]]] = {}
    in_threads([lambda first=first: found.update({first: steps(first, 8)}) for first in (0, 100)])
    for first, results in expected.items():
        for (complexity, gradient), (other, others) in zip(results, found[first], strict=True):
            assert complexity == other
            torch.testing.assert_close(gradient, others, rtol=1e-12, atol=1e-12)


# --- the room itself --------------------------------------------------------------------------------------------------


def places(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_a_room_gives_out_again_what_nobody_holds() -> None:
    like = [torch.ones(3, 5, requires_grad=True), torch.ones(7)]
    room = Room()
    tensors = room.take(like)
    assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in like]
    assert not any(tensor.requires_grad for tensor in tensors)
    first = places(tensors)
    del tensors
    assert places(room.take(like)) == first
    kept = room.take(like)[1]  # of the two, one is held
    second = room.take(like)
    assert second[0].data_ptr() == first[0]
    assert second[1].data_ptr() != kept.data_ptr()
    third = room.take(like)
    assert len({*places(second), *places(third), kept.data_ptr()}) == 5
    del second, third


@pytest.mark.parametrize("keep", KEEP)
def test_a_room_sees_every_holder(keep: str) -> None:
    like = [torch.ones(3, 5)]
    room = Room()
    (tensor,) = room.take(like)
    place, kept = tensor.data_ptr(), KEEP[keep](tensor)
    del tensor
    assert room.take(like)[0].data_ptr() != place
    assert kept is not None


def test_a_room_does_not_give_out_what_another_process_may_hold() -> None:
    like = [torch.ones(3, 5)]
    room = Room()
    (tensor,) = room.take(like)
    tensor.share_memory_()
    del tensor
    assert not room.take(like)[0].is_shared()


def test_a_room_fits_what_is_asked_for() -> None:
    room = Room()
    for like in (
        [torch.ones(4)],
        [torch.ones(4).double()],
        [torch.ones(2, 2).double()],
        [torch.ones(5), torch.ones(6)],
        [torch.ones(6), torch.ones(5)],
        [torch.ones(6)],
        [],
    ):
        tensors = room.take(like)
        assert [(tensor.shape, tensor.dtype) for tensor in tensors] == [(each.shape, each.dtype) for each in like]
        assert all(tensor.is_contiguous() for tensor in tensors)
        del tensors  # or the next ones would be new in any case


def test_where_torch_does_not_say_who_holds_memory_is_always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_use_count", None)
    like, each = [torch.ones(3, 5)], Room()
    given = [each.take(like)[0].fill_(number) for number in range(5)]
    assert [tensor[0, 0].item() for tensor in given] == [0, 1, 2, 3, 4]
    assert len({tensor.data_ptr() for tensor in given}) == 5


def test_threads_never_get_the_same_memory() -> None:
    like, each = [torch.ones(64)], Room()
    clashes = []

    def use(number: float) -> None:
        for _ in range(300):
            (mine,) = each.take(like)
            mine.fill_(number)
            if not bool((mine == number).all()):
                clashes.append(number)

    in_threads([lambda number=number: use(number) for number in (1.0, 2.0, 3.0)])
    assert not clashes


def test_data_replaced_twice_is_noticed() -> None:
    missed = []
    for size in range(100, 2000, 100):
        model = Bayesian(nn.Sequential(nn.Linear(size, 1, bias=False)), Gaussian(1.0), seed=0)
        weight = model.net[0].weight
        cost = FreeEnergy(model, n=40)(torch.randn(2, size), torch.randn(2, 1))
        before = weight.data_ptr()
        for _ in range(4):
            weight.data = weight.data * 2
            if weight.data_ptr() == before:
                break
        else:
            continue
        try:
            values(cost)
            missed.append(size)
        except RuntimeError:
            pass
    assert not missed
