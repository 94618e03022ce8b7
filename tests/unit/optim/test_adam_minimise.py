"""A whole step in one call: the same numbers as line by line, and whoever must be asked or told still is."""

import copy
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import bayesbackprop as bbb
from bayesbackprop import Bayesian, Bernoulli, Categorical, FreeEnergy, Gaussian, Laplace, LogDensity, Normal
from bayesbackprop._engine import cpu, lock, small
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.training import DivergenceError
from opaque import Opaque

pytestmark = pytest.mark.equivalence

BATCH = 7


def net_of(*sizes: int, function: type[nn.Module] = nn.ReLU, bias: bool = True, ends: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias), function()]
    return nn.Sequential(*(layers if ends else layers[:-1]))


def objective_of(
    net: nn.Module | None = None, likelihood: Likelihood | None = None, *, energy: Any = None, **options: Any
) -> FreeEnergy:
    given = {"sigma": 0.05, "seed": 3, "prior": Normal(0.5), **options}
    model = Bayesian(net_of(5, 9, 3) if net is None else net, likelihood or Gaussian(0.5), **given)
    return FreeEnergy(model, n=50, **{"warmup": 20, **(energy or {})})


def optimiser_of(objective: FreeEnergy) -> bbb.Adam:
    return bbb.Adam(objective.param_groups(0.01, rho_lr=0.03, weight_decay=0.1))


def by_lines(optimiser: bbb.Adam, objective: Any, inputs: Any, targets: Any, **options: Any) -> Tensor:
    optimiser.zero_grad()
    cost: Tensor = objective(inputs, targets, **options)
    cost.backward()
    optimiser.step()
    return cost


def data(objective: FreeEnergy, steps: int, inputs: int = 5) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches that fit the likelihood, of changing sizes."""
    generator, likelihood = torch.Generator().manual_seed(0), objective.model.likelihood
    dtype = next(objective.parameters()).dtype
    with torch.no_grad():
        width = objective.model.net(torch.zeros(1, inputs, dtype=dtype)).shape[1]
    for step in range(steps):
        batch = BATCH if step % 10 else 3
        x = torch.randn(batch, inputs, dtype=dtype, generator=generator)
        if isinstance(likelihood, Categorical):
            yield x, torch.randint(width, (batch,), generator=generator)
        elif isinstance(likelihood, Bernoulli):
            yield x, torch.randint(2, (batch, width), generator=generator).to(dtype)
        else:
            per_input = isinstance(likelihood, Gaussian) and likelihood.noise == "per-input"
            yield x, torch.randn(batch, width // 2 if per_input else width, dtype=dtype, generator=generator)


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches of steps that were taken in C."""
    taken: list[int] = []
    run = small.Space.run_and_go_back

    def counted(self: Any, x: Tensor, *arguments: Any) -> Any:
        taken.append(len(x))
        return run(self, x, *arguments)

    monkeypatch.setattr(small.Space, "run_and_go_back", counted)
    return taken


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of ``cost_at_once`` went back."""
    found: list[bool] = []
    whole = FreeEnergy.cost_at_once

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        cost = whole(self, *arguments, **options)
        found.append(not cost.requires_grad)
        return cost

    monkeypatch.setattr(FreeEnergy, "cost_at_once", noted)
    return found


# --- the same numbers -------------------------------------------------------------------------------------------------


def compare(make: Callable[[], FreeEnergy], dtype: torch.dtype, steps: int, inputs: int = 5) -> None:
    torch.manual_seed(0)
    one = make().to(dtype)
    other = copy.deepcopy(one)
    ours, theirs = optimiser_of(one), optimiser_of(other)
    accuracy = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    for x, y in data(one, steps, inputs):
        found, expected = ours.minimise(one, x, y), by_lines(theirs, other, x, y)
        assert not found.requires_grad
        for name in ("total", "likelihood", "complexity", "complexity_weight"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name).detach(), **accuracy)
    assert int(one.step) == int(other.step) == steps
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()), **accuracy)
    states = ours.state_dict()["state"], theirs.state_dict()["state"]
    torch.testing.assert_close(*states, **accuracy)


TYPES = pytest.mark.parametrize(("dtype", "steps"), [(torch.float64, 100), (torch.float32, 10)], ids=str)

IN_C: dict[str, Callable[[], FreeEnergy]] = {
    **{
        f"{function.__name__}{', without bias' * (not bias)}{', at the end' * ends}": (
            lambda function=function, bias=bias, ends=ends: objective_of(
                net_of(5, 9, 3, function=function, bias=bias, ends=ends)
            )
        )
        for function in (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity)
        for bias in (True, False)
        for ends in (True, False)
    },
    "one layer": lambda: objective_of(net_of(5, 2)),
    "odd sizes": lambda: objective_of(net_of(5, 1, 33, 17, 16, 2)),
    "wide": lambda: objective_of(net_of(5, 100, 100, 4)),
    "flattened": lambda: objective_of(nn.Sequential(nn.Flatten(), *net_of(5, 9, 2))),
    "mixture": lambda: objective_of(prior=bbb.ScaleMixture(0.5, 1.0, 0.2)),
    "Laplace": lambda: objective_of(prior=Laplace(0.3)),
    "two priors": lambda: objective_of(prior={"0.*": Laplace(0.3), "*": Normal(1.0)}),
    "a centre": lambda: objective_of(centre="net"),
    "closed": lambda: objective_of(energy={"complexity": "closed"}),
    "closed Laplace": lambda: objective_of(prior=Laplace(0.3), energy={"complexity": "closed"}),
    "cold": lambda: objective_of(energy={"temperature": 0.0}),
    "noise per input": lambda: objective_of(net_of(5, 9, 4), Gaussian("per-input")),
    "least noise": lambda: objective_of(net_of(5, 9, 2), Gaussian("per-input", least=0.1)),
    "yes or no": lambda: objective_of(likelihood=Bernoulli()),
    "classes": lambda: objective_of(likelihood=Categorical()),
}


@TYPES
@pytest.mark.parametrize("make", IN_C.values(), ids=list(IN_C))
def test_steps_in_c_are_those_line_by_line(
    make: Callable[[], FreeEnergy], dtype: torch.dtype, steps: int, in_c: list[int]
) -> None:
    compare(make, dtype, steps)
    assert len(in_c) == steps


AT_ONCE: dict[str, Callable[[], FreeEnergy]] = {
    "local": lambda: objective_of(estimator="local"),
    "flipout": lambda: objective_of(estimator="flipout"),
    "a prior of the user's": lambda: objective_of(prior=LogDensity(lambda w: -w.square() / 2)),
    "large": lambda: objective_of(net_of(5, 900, 900, 1)),
}


@TYPES
@pytest.mark.parametrize("name", AT_ONCE)
def test_other_steps_without_autograd_are_too(
    name: str, dtype: torch.dtype, steps: int, in_c: list[int], at_once: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "large":
        monkeypatch.setattr(small, "_MOST", 1000)
    compare(AT_ONCE[name], dtype, 5 if name == "large" else steps)
    assert not in_c
    assert all(at_once)


WITH_AUTOGRAD: dict[str, Callable[[], FreeEnergy]] = {
    "learnt noise": lambda: objective_of(likelihood=Gaussian("learnt")),
    "three draws": lambda: objective_of(energy={"draws": 3}),
    "any module": lambda: objective_of(Opaque(net_of(5, 9, 3))),
    "GELU": lambda: objective_of(net_of(5, 9, 3, function=nn.GELU)),
    "layers that are not Bayesian": lambda: objective_of(select=lambda name, _: name.startswith("0.")),
    "weights that vary together": lambda: objective_of(family=bbb.LowRank(2)),
}


@TYPES
@pytest.mark.parametrize("make", WITH_AUTOGRAD.values(), ids=list(WITH_AUTOGRAD))
def test_what_the_engine_cannot_do_by_hand_is_done_as_ever(
    make: Callable[[], FreeEnergy], dtype: torch.dtype, steps: int, at_once: list[bool]
) -> None:
    compare(make, dtype, min(steps, 20))
    assert not any(at_once)


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:1].expand_as(x),
    "negative view": lambda x: torch.complex(x, -x).conj().imag,
    "not aligned": lambda x: torch.frombuffer(bytearray(b"?" + x.numpy().tobytes()), dtype=x.dtype, offset=1).reshape(
        x.shape
    ),
}


@pytest.mark.parametrize("change", INPUTS.values(), ids=list(INPUTS))
def test_inputs_and_targets_may_be_stored_anyhow(change: Callable[[Tensor], Tensor], in_c: list[int]) -> None:
    one = objective_of().double()
    other = copy.deepcopy(one)
    ours, theirs = optimiser_of(one), optimiser_of(other)
    for x, y in data(one, 3):
        ours.minimise(one, change(x), change(y))
        by_lines(theirs, other, change(x), change(y))
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-10, atol=1e-12)
    assert len(in_c) == 3


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Bernoulli()], ids=["numbers", "yes or no"])
def test_targets_of_another_type(likelihood: Likelihood) -> None:
    one = objective_of(likelihood=likelihood).double()
    other = copy.deepcopy(one)
    x, y = next(data(one, 1))
    y = y.float() if isinstance(likelihood, Gaussian) else y.long()
    optimiser_of(one).minimise(one, x, y)
    by_lines(optimiser_of(other), other, x, y)
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-10, atol=1e-12)


def test_options_are_those_of_the_objective(in_c: list[int]) -> None:
    torch.manual_seed(0)
    weighing = {"minibatch_weights": "geometric", "batch_size": BATCH}
    one, other = (objective_of(energy=weighing).double() for _ in range(2))
    other.load_state_dict(one.state_dict())
    ours, theirs = optimiser_of(one), optimiser_of(other)
    generator = torch.Generator().manual_seed(1)
    for batch in range(4):
        x, y = (torch.randn(BATCH, size, dtype=torch.float64, generator=generator) for size in (5, 3))
        options = {"batch": batch, "weights": torch.rand(BATCH, generator=generator), "step": 10 + batch}
        found, expected = ours.minimise(one, x, y, **options), by_lines(theirs, other, x, y, **options)
        torch.testing.assert_close(found, expected.detach().as_subclass(type(found)))
    assert int(one.step) == 13
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-9, atol=1e-11)
    assert len(in_c) == 4


def test_any_objective_can_be_minimised() -> None:
    class Distance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.ones(3))

        def forward(self, inputs: Tensor, targets: Tensor, times: float = 1.0) -> Tensor:
            return times * (self.place * inputs - targets).square().mean()

    one, other = Distance(), Distance()
    ours, theirs = bbb.Adam(one.parameters(), lr=0.1), bbb.Adam(other.parameters(), lr=0.1)
    for _ in range(3):
        cost = ours.minimise(one, torch.ones(2, 3), torch.zeros(2, 3), times=2.0)
        assert type(cost) is Tensor
        assert not cost.requires_grad
        by_lines(theirs, other, torch.ones(2, 3), torch.zeros(2, 3), times=2.0)
    assert torch.equal(one.place, other.place)


def test_an_objective_of_ones_own_is_called() -> None:
    class Doubled(FreeEnergy):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*args, **kwargs)

    one, other = (Doubled(objective_of().model, n=50) for _ in range(2))
    other.load_state_dict(one.state_dict())
    ours, theirs = optimiser_of(one), optimiser_of(other)
    for x, y in data(one, 3):
        by_lines(theirs, other, x, y)
        ours.minimise(one, x, y)
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()))


# --- memory that is used again ----------------------------------------------------------------------------------------


def test_what_is_changed_between_steps_is_noticed(in_c: list[int]) -> None:
    one = objective_of().double()
    other = copy.deepcopy(one)
    ours, theirs = optimiser_of(one), optimiser_of(other)
    changes: list[Callable[[FreeEnergy, bbb.Adam], object]] = [
        lambda objective, _: setattr(objective.model.net[0].weight, "data", torch.ones(9, 5).double()),
        lambda _, optimiser: optimiser.load_state_dict(copy.deepcopy(optimiser.state_dict())),
        lambda _, optimiser: optimiser.state.clear(),
        lambda _, optimiser: [state.update(exp_avg=state["exp_avg"].clone() * 2) for state in optimiser.state.values()],
        lambda _, optimiser: [group.update(lr=0.002, betas=(0.8, 0.9)) for group in optimiser.param_groups],
        lambda objective, _: objective.model.net[2].weight.data.mul_(1.5),
        lambda objective, _: setattr(objective.model, "seed", 11),
    ]
    for (x, y), change in zip(data(one, len(changes)), changes, strict=True):
        ours.minimise(one, x, y)
        by_lines(theirs, other, x, y)
        change(one, ours)
        change(other, theirs)
    x, y = next(data(one, 1))
    ours.minimise(one, x, y)
    by_lines(theirs, other, x, y)
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-9, atol=1e-11)
    assert len(in_c) == len(changes) + 1


def test_steps_at_the_same_time_have_memory_of_their_own() -> None:
    """Nobody trains one network in two threads; whoever does gets the steps of two, not a mixture of their numbers."""
    objective = objective_of()
    optimiser, (x, y) = optimiser_of(objective), next(data(objective, 1))
    optimiser.minimise(objective, x, y)
    parameters = objective.model.engine().parameters
    (table, layers) = cpu.table(parameters), objective.model.engine().executors[0]._linear  # type: ignore[attr-defined]
    assert table is not None
    one, other = (small.Space.taken(layers, parameters, table, x) for _ in range(2))
    assert one is not None
    assert other is not None
    assert one.ws[0].data_ptr() != other.ws[0].data_ptr()
    one.give_back()
    assert small.Space.taken(layers, parameters, table, x) is one
    assert small.Space.taken(layers, parameters, table, x[:2]) is not one


class Keeps(Likelihood):
    """A likelihood of the user's, which keeps what it is given."""

    has_slope = True

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        self.outputs.append(output)
        return -(output - target).square().sum(1)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        return 2 * (output - target) / len(target)

    def distribution(self, output: Any) -> Any:
        raise NotImplementedError


def test_an_output_that_someone_keeps_is_not_overwritten(in_c: list[int]) -> None:
    likelihood = Keeps()
    objective = objective_of(likelihood=likelihood)
    optimiser, (x, y) = optimiser_of(objective), next(data(objective, 1))
    optimiser.minimise(objective, x, y)
    first = likelihood.outputs[0].clone()
    optimiser.minimise(objective, x, y)
    assert torch.equal(likelihood.outputs[0], first)
    assert not torch.equal(likelihood.outputs[1], first)
    assert len(in_c) == 2


def test_a_cost_that_was_exchanged_is_the_one_that_is_minimised() -> None:
    one = objective_of().double()
    one.model.likelihood.cost = lambda output, target: (output - target).abs().mean()  # type: ignore[method-assign]
    x, y = next(data(one, 1))
    cost: Any = optimiser_of(one).minimise(one, x, y)
    assert float(cost.likelihood) < 5  # that of the likelihood is in units of its noise, and has a constant


def test_a_slope_unlike_the_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = objective_of(likelihood=Keeps())
    optimiser, (x, y) = optimiser_of(objective), next(data(objective, 1))
    for wrong in (lambda _, output, __: output[:1], lambda _, output, __: output.double()):
        monkeypatch.setattr(Keeps, "slope", wrong)
        with pytest.raises(RuntimeError, match="slope like the output"):
            optimiser.minimise(objective, x, y)
        assert not optimiser.postponed


# --- whoever must be asked or told ------------------------------------------------------------------------------------


def step_with(objective: FreeEnergy, optimiser: bbb.Adam) -> None:
    x, y = next(data(objective, 1))
    optimiser.minimise(objective, x, y)


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_parameters_see_gradients(late: bool, at_once: list[bool]) -> None:
    objective, seen = objective_of(), list[Tensor]()
    parameter = objective.model.posterior["2.weight"].rho
    if late:
        parameter.register_post_accumulate_grad_hook(seen.append)
    else:
        parameter.register_hook(seen.append)
    step_with(objective, optimiser_of(objective))
    assert len(seen) == 1
    assert at_once == [False]


def test_hooks_of_modules_are_called() -> None:
    for of_objective in (True, False):
        objective, seen = objective_of(), list[nn.Module]()
        module = objective if of_objective else objective.model.net[1]
        x, y = next(data(objective, 1))
        module.register_forward_hook(lambda module, *_, seen=seen: seen.append(module))  # type: ignore[misc]
        optimiser_of(objective).minimise(objective, x, y)
        assert seen == [module]


def test_hooks_and_schedulers_of_the_optimiser_are_told() -> None:
    one = objective_of().double()
    other = copy.deepcopy(one)
    ours, theirs, told = optimiser_of(one), optimiser_of(other), list[str]()
    ours.register_step_pre_hook(lambda *_: told.append("before"))
    ours.register_step_post_hook(lambda *_: told.append("after"))
    rates = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (ours, theirs)]
    for x, y in data(one, 3):
        ours.minimise(one, x, y)
        by_lines(theirs, other, x, y)
        for rate in rates:
            rate.step()  # warns if it knows of no step
    assert told == ["before", "after"] * 3
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-9, atol=1e-11)
    handle = register_optimizer_step_pre_hook(lambda *_: told.append("any"))
    try:
        step_with(one := objective_of(), optimiser_of(one))
    finally:
        handle.remove()
    assert told[-1] == "any"


def test_a_subclass_of_the_optimiser_takes_its_own_steps() -> None:
    class Counts(bbb.Adam):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    objective = objective_of()
    optimiser = Counts(objective.param_groups())
    step_with(objective, optimiser)
    assert optimiser.steps == 1


@pytest.mark.parametrize("before", [True, False])
def test_a_step_that_was_exchanged_is_the_one_that_is_taken(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    objective, steps = objective_of(), list[bbb.Adam]()
    optimiser = None if before else optimiser_of(objective)
    monkeypatch.setattr(bbb.Adam, "step", lambda self: steps.append(self))
    optimiser = optimiser or optimiser_of(objective)
    step_with(objective, optimiser)
    assert steps == [optimiser]


def test_nobody_watches_a_step_unless_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own wrapper of a step is not someone."""
    objective, called = objective_of(), list[bool]()
    optimiser = optimiser_of(objective)
    monkeypatch.setattr(bbb.Adam, "_step_postponed", lambda _: called.append(True))
    step_with(objective, optimiser)
    assert not called


def test_other_ranks_wait_for_gradients(at_once: list[bool]) -> None:
    objective = objective_of(energy={"own_averaging": True})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        step_with(objective, optimiser_of(objective))
    finally:
        dist.destroy_process_group()
    assert at_once == [False]


@pytest.mark.parametrize("which", ["mu", "rho"])
@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_or_belongs_to_another_optimiser_is_left_alone(which: str, frozen: bool) -> None:
    objective = objective_of()
    tensors = [getattr(q, which) for q in objective.model.posterior.values()]
    before = [tensor.detach().clone() for tensor in tensors]
    if frozen:
        for tensor in tensors:
            tensor.requires_grad_(False)
    others = [p for p in objective.parameters() if not any(p is tensor for tensor in tensors)]
    step_with(objective, bbb.Adam(others))
    assert all(torch.equal(tensor, then) for tensor, then in zip(tensors, before, strict=True))
    assert not any(torch.equal(p, torch.zeros_like(p)) for p in others)


def test_without_kernels_the_equations_are_taken(at_once: list[bool]) -> None:
    one = objective_of().double()
    other = copy.deepcopy(one)
    with bbb.plain_kernels():
        step_with(one, optimiser_of(one))
    step_with(other, optimiser_of(other))
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-9, atol=1e-11)
    assert at_once == [False, True]


def test_an_input_that_is_trained_gets_its_gradient(at_once: list[bool]) -> None:
    objective = objective_of()
    x, y = next(data(objective, 1))
    x.requires_grad_()
    optimiser_of(objective).minimise(objective, x, y)
    assert x.grad is not None
    assert at_once == [False]


def test_gradients_from_before_are_forgotten() -> None:
    one = objective_of().double()
    other = copy.deepcopy(one)
    ours, theirs = optimiser_of(one), optimiser_of(other)
    x, y = next(data(one, 1))
    one(x, y, step=7).backward()
    ours.backward(one(x, y, step=8))
    other(x, y, step=8)
    ours.minimise(one, x, y)
    by_lines(theirs, other, x, y)
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-9, atol=1e-11)


def test_others_save_the_network_before_a_step_or_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has the network's lock keeps an update waiting."""
    objective = objective_of()
    optimiser, (x, y) = optimiser_of(objective), next(data(objective, 1))
    optimiser.minimise(objective, x, y)
    arrived, update = threading.Event(), cpu.backward_adam
    monkeypatch.setattr(cpu, "backward_adam", lambda *arguments: (arrived.set(), update(*arguments)))
    thread = threading.Thread(target=optimiser.minimise, args=(objective, x, y), daemon=True)
    with lock(objective.model.net):
        thread.start()
        assert not arrived.wait(0.2)
    thread.join(60)
    assert arrived.is_set()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_step_that_is_refused_changes_nothing(in_c: list[int]) -> None:
    wrong: list[tuple[Callable[[Tensor, Tensor], tuple[Any, Any]], str]] = [
        (lambda x, y: (x * torch.nan, y), "'inputs' parameter"),
        (lambda x, y: (x, y * torch.inf), "'targets' parameter"),
        (lambda x, y: (x[:0], y[:0]), "at least one example"),
        (lambda x, y: (x, y[:, :2]), "'target' parameter"),
        (lambda x, y: (x[:, :4], y), "shapes cannot be multiplied"),
        (lambda x, y: (x, y.long()), "'target' parameter"),
        (lambda x, y: (x, (y + 1) * 1e38), "'likelihood cost' parameter"),
    ]
    objective = objective_of()
    optimiser, (x, y) = optimiser_of(objective), next(data(objective, 1))
    optimiser.minimise(objective, x, y)
    before = copy.deepcopy(objective.state_dict())
    for change, text in wrong:
        with pytest.raises((ValueError, RuntimeError), match=text):
            optimiser.minimise(objective, *change(x, y))
        assert not optimiser.postponed
        optimiser.step()
        torch.testing.assert_close(objective.state_dict(), before, rtol=0, atol=0)
    optimiser.minimise(objective, x, y)
    assert in_c[-1] == len(x)


def test_answers_that_are_neither_yes_nor_no_are_refused() -> None:
    objective = objective_of(likelihood=Bernoulli())
    x, y = next(data(objective, 1))
    with pytest.raises(ValueError, match="made of 0 and 1"):
        optimiser_of(objective).minimise(objective, x, y + 0.5)


def test_gradients_that_are_not_finite_are_refused(in_c: list[int]) -> None:
    """The cost is finite: the output does not depend on the weights whose gradients overflow."""
    objective = objective_of(net_of(2, 1, bias=False), Gaussian(1e-10), sigma=1e-30, energy={"warmup": 0})
    with torch.no_grad():
        objective.model.net[0].weight.zero_()
    optimiser, before = optimiser_of(objective), copy.deepcopy(dict(objective.named_parameters()))
    with pytest.raises(DivergenceError, match=r"'model.net.0.weight' is not finite.*likelihood cost is to blame"):
        optimiser.minimise(objective, torch.full((4, 2), 1e25), torch.full((4, 1), 1e-5))
    for name, parameter in objective.named_parameters():
        assert torch.equal(parameter, before[name])
    assert in_c == [4]


def test_gradients_whose_squares_overflow_are_finite_all_the_same() -> None:
    """The sum of squares that the kernels give is no more than a first look."""
    one = objective_of(net_of(5, 1), Gaussian(1.0), sigma=1e-4)
    other = copy.deepcopy(one)
    ours, theirs = optimiser_of(one), optimiser_of(other)
    x, y = torch.full((4, 5), 1e15), torch.full((4, 1), 1e6)
    with torch.no_grad():
        for objective in (one, other):
            objective.model.net[0].weight.fill_(1e-9)
    ours.minimise(one, x, y)
    by_lines(theirs, other, x, y)
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()))


def test_without_gradients_there_is_nothing_to_minimise() -> None:
    objective = objective_of()
    optimiser, (x, y) = optimiser_of(objective), next(data(objective, 1))
    with torch.no_grad(), pytest.raises(ValueError, match="'cost' parameter"):
        optimiser.minimise(objective, x, y)
    assert int(objective.step) == 0


def test_only_an_objective_can_be_minimised() -> None:
    objective = objective_of()
    with pytest.raises(ValueError, match=r"'objective' parameter of Adam\.minimise"):
        optimiser_of(objective).minimise(lambda x, y: x, torch.ones(1, 5), torch.ones(1, 3))  # type: ignore[arg-type]


def test_in_evaluation_neither_noise_nor_warm_up_advances() -> None:
    objective = objective_of().eval()
    step_with(objective, optimiser_of(objective))
    assert int(objective.step) == 0
