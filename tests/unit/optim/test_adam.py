"""Adam: the numbers of torch's for whatever it is given, its settings and its state."""

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import bayesbackprop as bbb
from bayesbackprop import Bayesian, FreeEnergy, Gaussian
from networks import X, Y, net_with_norm, regressor

STEPS = 100
REAL = [torch.float32, torch.float64]

Parameters = Sequence[Tensor]


def twins(tensors: Sequence[Tensor]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    ours, theirs = ([nn.Parameter(tensor.clone()) for tensor in tensors] for _ in range(2))
    return ours, theirs


def give_gradients(ours: Parameters, theirs: Parameters) -> None:
    """The same random gradients to both, large ones and small ones."""
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn_like(one) * 10.0 ** torch.randint(-4, 2, ()).item()
        other.grad = one.grad.clone()


def assert_same(ours: Parameters, theirs: Parameters) -> None:
    """The same but for a rounding at each step."""
    for one, other in zip(ours, theirs, strict=True):
        accuracy = STEPS * torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=accuracy, atol=accuracy)


def same_bits(ours: Parameters, theirs: Parameters) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def slots(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimiser.state.values() for value in state.values()]


# --- the numbers ------------------------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [{}, {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-4}, {"betas": (0.0, 0.0)}]
SHAPES = [(), (1,), (3, 5), (0, 4), (2, 3, 4), (300,), (9001,)]


@pytest.mark.equivalence
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [*REAL, torch.bfloat16, torch.complex64], ids=str)
def test_it_is_the_adam_of_torch(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    ours, theirs = twins([torch.randn(shape).to(dtype) for shape in SHAPES])
    both = bbb.Adam(ours, **settings), torch.optim.Adam(theirs, **settings)
    for _ in range(STEPS):
        give_gradients(ours, theirs)
        for optimiser in both:
            optimiser.step()
    assert_same(ours, theirs)
    assert_same(*map(slots, both))
    assert dtype in REAL or same_bits(ours, theirs)  # of other types it is torch's own function


MODELS: dict[str, Callable[[], tuple[nn.Module, bbb.Likelihood]]] = {
    "fully connected": lambda: (regressor(), Gaussian(0.1)),
    "learnt noise": lambda: (regressor(), Gaussian("learnt")),
    "norm": lambda: (net_with_norm(), bbb.Categorical()),
    "convolution": lambda: (
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.Flatten(), nn.Linear(8, 1)),
        Gaussian(0.1),
    ),
}


@pytest.mark.equivalence
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_networks_are_trained_as_by_torch(make: Any, dtype: torch.dtype, weight_decay: float) -> None:
    """The twin gets the gradients of the network, so that nothing but the optimisers differs."""
    model = Bayesian(*make(), seed=0).to(dtype)
    twin, free_energy = copy.deepcopy(model), FreeEnergy(model, n=50)
    rates = {"lr": 0.003, "rho_lr": 0.02, "weight_decay": weight_decay}
    ours, theirs = bbb.Adam(model.param_groups(**rates)), torch.optim.AdamW(twin.param_groups(**rates))
    y = torch.arange(16) % 2 if isinstance(model.likelihood, bbb.Categorical) else Y.to(dtype)
    for _ in range(STEPS):
        ours.zero_grad()
        free_energy(X.to(dtype), y).backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert one.grad is not None
            other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    assert_same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.equivalence
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_without_kernels_it_is_torchs(dtype: torch.dtype) -> None:
    ours, theirs = twins([torch.randn(5000, dtype=dtype), torch.randn(3, dtype=dtype)])
    both = bbb.Adam(ours), torch.optim.Adam(theirs)
    for _ in range(5):
        give_gradients(ours, theirs)
        with bbb.plain_kernels():
            for optimiser in both:
                optimiser.step()
    assert same_bits(ours, theirs)


@pytest.mark.identities
def test_the_first_step_has_the_length_of_the_rate() -> None:
    x = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    x.grad = torch.tensor([0.3, -7.0, 1e-20], dtype=torch.float64)
    bbb.Adam([x], lr=0.5, eps=0.0).step()
    torch.testing.assert_close(x.tolist(), [0.5, -1.5, 2.5])


@pytest.mark.identities
def test_the_number_of_threads_does_not_matter() -> None:
    results, before = list[Tensor](), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            x = nn.Parameter(torch.randn(100_003))
            optimiser = bbb.Adam([x])
            for _ in range(3):
                x.grad = torch.randn_like(x)
                optimiser.step()
            results.append(x)
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[:2], results[1:])


# --- whatever it is given ---------------------------------------------------------------------------------------------


def misaligned() -> Tensor:
    """Numbers at an address that is no multiple of their size, as in a file."""
    return torch.frombuffer(bytearray(81), dtype=torch.float32, offset=1, count=20).normal_()


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(4, 3).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a slice": lambda: torch.randn(5, 6)[:, 1:4],
    "a view": lambda: torch.randn(30)[1:21].view(4, 5),
    "an imaginary part": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "misaligned": misaligned,
}


@pytest.mark.equivalence
@pytest.mark.parametrize("of", ["parameter", "gradient", "both"])
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=list(LAYOUTS))
def test_tensors_may_lie_in_memory_as_they_like(make: Callable[[], Tensor], of: str) -> None:
    odd = make()
    ours = [nn.Parameter(odd if of != "gradient" else odd.resolve_neg().contiguous()), nn.Parameter(torch.randn(7))]
    theirs = [nn.Parameter(parameter.detach().resolve_neg().contiguous().clone()) for parameter in ours]
    both = bbb.Adam(ours), torch.optim.Adam(theirs)
    for _ in range(5):
        give_gradients(ours, theirs)
        if of != "parameter":
            ours[0].grad = make()
            theirs[0].grad = ours[0].grad.resolve_neg().contiguous().clone()
        for optimiser in both:
            optimiser.step()
    assert_same(ours, theirs)
    assert_same(*map(slots, both))


@pytest.mark.identities
def test_what_has_no_gradient_stays() -> None:
    x, other = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4))
    before, other.grad = x.detach().clone(), torch.ones(4)
    optimiser = bbb.Adam([x, other])
    optimiser.step()
    assert torch.equal(x, before)
    assert set(optimiser.state) == {other}


@pytest.mark.identities
def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    dense, sparse = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 2))
    dense.grad, sparse.grad = torch.ones(3), torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="no sparse gradients"):
        bbb.Adam([dense, sparse]).step()
    assert torch.equal(dense, torch.ones(3))


@pytest.mark.identities
def test_autograd_notices_a_step() -> None:
    model = Bayesian(regressor(), Gaussian(0.1), seed=0)
    optimiser, free_energy = bbb.Adam(model.param_groups()), FreeEnergy(model, n=16)
    free_energy(X, Y).backward()
    cost = free_energy(X, Y)
    optimiser.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cost.backward()


@pytest.mark.equivalence
def test_gradients_may_be_clipped_accumulated_and_scaled() -> None:
    model = Bayesian(regressor(), Gaussian(0.1), seed=0).double()
    twin, norms = copy.deepcopy(model), list[Tensor]()
    for each, kind in ((model, bbb.Adam), (twin, torch.optim.Adam)):
        free_energy, optimiser = FreeEnergy(each, n=16), kind(each.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(20):
            optimiser.zero_grad()
            for _ in range(2):
                scaler.scale(free_energy(X.double(), Y.double()) / 2).backward()
            scaler.unscale_(optimiser)
            norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.1))
            scaler.step(optimiser)
            scaler.update()
    torch.testing.assert_close(norms[:20], norms[20:])
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


@pytest.mark.identities
def test_a_scaler_skips_a_step_that_overflows() -> None:
    x = nn.Parameter(torch.ones(3))
    optimiser, scaler = bbb.Adam([x]), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((x * math.inf).sum()).backward()
    scaler.step(optimiser)
    assert torch.equal(x, torch.ones(3))


@pytest.mark.identities
def test_a_closure_is_called_with_gradients_and_hooks_once() -> None:
    x, told = nn.Parameter(torch.ones(3)), list[str]()
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # whose class is patched by torch for its hooks
    optimiser = bbb.Adam([x], lr=0.5)
    optimiser.register_step_pre_hook(lambda *_: told.append("before"))
    optimiser.register_step_post_hook(lambda *_: told.append("after"))

    def closure() -> float:
        told.append("closure")
        optimiser.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss.item()

    assert optimiser.step(closure) == 3.0
    assert told == ["before", "closure", "after"]
    torch.testing.assert_close(x.detach(), torch.full((3,), 0.5))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.identities
def test_weight_decay_is_for_the_network_alone() -> None:
    """With gradients of 0 there is nothing but the decay."""
    model = Bayesian(net_with_norm(), Gaussian("learnt"), seed=0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimiser = bbb.Adam(model.param_groups(0.1, weight_decay=0.2))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    for name, parameter in model.named_parameters():
        kept = 1 - 0.1 * 0.2 if name.startswith("net.") else 1.0
        torch.testing.assert_close(parameter.detach(), kept * before[name])
    with pytest.raises(TypeError, match="unexpected keyword argument 'weight_decay'"):
        bbb.Adam(model.parameters(), weight_decay=0.2)  # type: ignore[call-arg]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimiser: lr_scheduler.CosineAnnealingLR(optimiser, STEPS),
    "one cycle of rates and betas": lambda optimiser: lr_scheduler.OneCycleLR(optimiser, [0.1, 0.2], STEPS + 1),
}


@pytest.mark.equivalence
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=list(SCHEDULES))
def test_schedulers_move_the_rates_of_groups(make: Any) -> None:
    ours, theirs = twins([torch.randn(30), torch.randn(40)])
    both = [
        kind([{"params": [one]}, {"params": [other], "lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}], lr=0.01)
        for kind, (one, other) in ((bbb.Adam, ours), (torch.optim.Adam, theirs))
    ]
    schedulers = [make(optimiser) for optimiser in both]
    for _ in range(STEPS):
        give_gradients(ours, theirs)
        for optimiser, scheduler in zip(both, schedulers, strict=True):
            optimiser.step()
            scheduler.step()
    assert_same(ours, theirs)


@pytest.mark.identities
def test_a_group_can_be_added_later() -> None:
    x, y = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimiser = bbb.Adam([x], lr=0.5)
    optimiser.add_param_group({"params": y, "lr": 0.25})
    x.grad, y.grad = torch.ones(2), torch.ones(2)
    optimiser.step()
    torch.testing.assert_close([x.tolist(), y.tolist()], [[0.5, 0.5], [0.75, 0.75]])
    named = bbb.Adam(nn.Linear(2, 1).named_parameters())
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]


BAD_GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "a negative rate": ({"lr": -1.0}, "'lr' parameter of Adam must be a float in"),
    "a rate in a tensor": ({"lr": torch.tensor(0.1)}, "'lr' parameter of Adam must be a float in"),
    "a beta of 1": ({"betas": (0.9, 1.0)}, "'betas' parameter of Adam must be two floats in"),
    "decay below 0": ({"weight_decay": -0.1}, "'weight_decay' parameter of Adam must be a float in"),
    "amsgrad": ({"amsgrad": True}, "'amsgrad' parameter of Adam must be False: take torch.optim.AdamW"),
    "maximize": ({"maximize": True}, "'maximize' parameter of Adam must be False"),
    "differentiable": ({"differentiable": True}, "'differentiable' parameter of Adam must be False"),
}


@pytest.mark.identities
@pytest.mark.parametrize(("settings", "message"), BAD_GROUPS.values(), ids=list(BAD_GROUPS))
def test_groups_with_settings_that_it_does_not_know_are_refused(settings: dict[str, Any], message: str) -> None:
    x = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=message):
        bbb.Adam([{"params": [x], **settings}])
    optimiser = bbb.Adam([x])
    with pytest.raises(ValueError, match=message):
        optimiser.add_param_group({"params": [nn.Parameter(torch.ones(2))], **settings})
    assert len(optimiser.param_groups) == 1


@pytest.mark.identities
def test_a_parameter_cannot_be_there_twice() -> None:
    x = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="'params' parameter of Adam must be different tensors"):
        bbb.Adam([x, x])
    with pytest.raises(ValueError, match="more than one parameter group"):
        bbb.Adam([{"params": [x]}, {"params": [x]}])


# --- state ------------------------------------------------------------------------------------------------------------

KINDS = {
    "ours": bbb.Adam,
    "torch": torch.optim.Adam,
    "torch fused": lambda parameters, **options: torch.optim.Adam(parameters, fused=True, **options),
    "torch AdamW": lambda parameters, **options: torch.optim.AdamW(parameters, weight_decay=0.0, **options),
}


@pytest.mark.equivalence
@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("then", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("first", KINDS.values(), ids=list(KINDS))
def test_a_run_can_go_over_to_torchs_adam_and_back(first: Any, then: Any, dtype: torch.dtype) -> None:
    ours, theirs = twins([torch.randn(300, dtype=dtype), torch.randn(4, 5, dtype=dtype)])
    one, other, reference = first(ours, lr=0.01), then(ours, lr=0.5), torch.optim.Adam(theirs, lr=0.01)
    for number in range(STEPS):
        if number == STEPS // 2:
            other.load_state_dict(one.state_dict())
        give_gradients(ours, theirs)
        (one if number < STEPS // 2 else other).step()
        reference.step()
    assert_same(ours, theirs)
    assert {float(state["step"]) for state in other.state.values()} == {STEPS}


@pytest.mark.identities
@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("way", ["torch.save", "pickle", "deepcopy"])
def test_a_run_is_resumed_bit_for_bit(way: str, dtype: torch.dtype) -> None:
    ours, theirs = twins([torch.randn(300, dtype=dtype), torch.randn(4, 5, dtype=dtype)])
    one, other = bbb.Adam(ours, lr=0.01), bbb.Adam(theirs, lr=0.01)
    for number in range(20):
        if number == 10:
            if way == "torch.save":
                file = io.BytesIO()
                torch.save(one.state_dict(), file)
                file.seek(0)
                one = bbb.Adam(ours)
                one.load_state_dict(torch.load(file, weights_only=True))
            else:
                one = copy.deepcopy(one) if way == "deepcopy" else pickle.loads(pickle.dumps(one))
                ours = one.param_groups[0]["params"]
        give_gradients(ours, theirs)
        one.step()
        other.step()
    assert same_bits(ours, theirs)
    assert same_bits(slots(one), slots(other))


@pytest.mark.identities
def test_states_of_other_optimisers_are_refused() -> None:
    x = nn.Parameter(torch.ones(2))
    optimiser = bbb.Adam([x], lr=0.5)
    others = {
        "'amsgrad' parameter of Adam must be False": torch.optim.Adam([x], amsgrad=True),
        "'maximize' parameter of Adam must be False": torch.optim.Adam([x], maximize=True),
        "of an optimiser with decoupled weight decay": torch.optim.Adam([x], weight_decay=0.1),
        "'betas' parameter of Adam must be two floats": torch.optim.SGD([x]),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            optimiser.load_state_dict(other.state_dict())
    assert optimiser.param_groups[0]["lr"] == 0.5
    optimiser.load_state_dict(torch.optim.AdamW([x], lr=0.25, weight_decay=0.1).state_dict())
    assert optimiser.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.identities
def test_a_state_of_other_shapes_is_never_written_to() -> None:
    """A kernel that trusted it would write beyond its end."""
    x = nn.Parameter(torch.ones(1000))
    optimiser = bbb.Adam([x])
    other = torch.optim.Adam([small := nn.Parameter(torch.ones(3))])
    small.grad = torch.ones(3)
    other.step()
    optimiser.load_state_dict(other.state_dict())
    x.grad = torch.ones(1000)
    with pytest.raises(RuntimeError, match="size of tensor"):
        optimiser.step()


@pytest.mark.equivalence
def test_steps_may_be_counted_in_other_types() -> None:
    ours, theirs = twins([torch.randn(30)])
    both = bbb.Adam(ours), torch.optim.Adam(theirs)
    for number in range(4):
        if number == 2:
            both[0].state[ours[0]]["step"] = torch.tensor(2)  # an int
        give_gradients(ours, theirs)
        for optimiser in both:
            optimiser.step()
    assert_same(ours, theirs)
    assert both[0].state[ours[0]]["step"].item() == 4
