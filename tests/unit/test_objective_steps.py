"""The step of the objective: it decides the noise and the warm-up, and only training advances it."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import bayesbackprop
from bayesbackprop import Bayesian, Categorical, FreeEnergy, Normal
from networks import classifier as small_classifier
from opaque import Opaque

pytestmark = pytest.mark.identities

N = 7


def classifier(seed=0, **options) -> Bayesian:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return Bayesian(net, Categorical(), options.pop("prior", Normal(0.5)), sigma=0.2, seed=seed, **options)


def data(n: int = N) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, dtype=torch.float64), torch.randint(3, (n,))


def test_every_call_has_new_noise_and_the_step_decides_it():
    x, y = data()
    free_energy = FreeEnergy(classifier(), N)
    costs = [free_energy(x, y).total.item() for _ in range(5)]
    assert len(set(costs)) == 5
    assert free_energy.step.item() == 5
    again = FreeEnergy(classifier(), N)
    again.load_state_dict(free_energy.state_dict())
    again.step.fill_(2)
    assert [again(x, y).total.item() for _ in range(3)] == costs[2:]
    other = FreeEnergy(classifier(seed=1), N)
    other.model.net.load_state_dict(free_energy.model.net.state_dict())
    assert not {other(x, y).total.item() for _ in range(5)} & set(costs)


def test_draws_do_not_disturb_each_other():
    """Of one model, of two, in any order, with forward passes and training steps of others between."""
    x, y = data()
    model, other = classifier(seed=0), classifier(seed=1)
    expected = {k: (model.draw(1, k)(x), model.draw(1, k).complexity()) for k in range(2)}
    a, b = model.draw(1, 0), model.draw(1, 1)
    output = a(x)
    b(x), b.complexity(), other.draw(1, 0)(x), other.draw(1, 0).complexity(), model.predict(x, draws=3)
    FreeEnergy(other, N)(x, y).backward()
    assert torch.equal(a.complexity(), expected[0][1])
    assert torch.equal(output, expected[0][0])
    assert torch.equal(a(x), output)
    assert torch.equal(b(x), expected[1][0])
    assert torch.equal(b.complexity(), expected[1][1])
    assert not torch.equal(a.complexity(), b.complexity())
    assert all(q.mu.grad is None for q in model.posterior.values())


@pytest.mark.parametrize("function", [nn.ReLU, nn.GELU])
def test_evaluating_in_inference_mode_first_does_not_stop_training(function: type[nn.Module]) -> None:
    free_energy = FreeEnergy(Bayesian(small_classifier(function), Categorical(), seed=0), 10)
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    with torch.inference_mode():
        assert free_energy(x, y).total.isfinite()
    free_energy(x, y).backward()


# --- evaluating changes nothing --------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[FreeEnergy], AbstractContextManager[Any]]] = {
    "eval": lambda free_energy: nullcontext(free_energy.eval()),
    "no_grad": lambda free_energy: torch.no_grad(),
    "inference_mode": lambda free_energy: torch.inference_mode(),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize(
    "make", [classifier, lambda: Bayesian(Opaque(small_classifier()).double(), Categorical(), seed=0)]
)
def test_evaluating_changes_nothing(make, way):
    x, y = data()
    free_energy = FreeEnergy(make(), N, draws=2, warmup=10)
    free_energy(x, y), free_energy(x, y)
    twin = copy.deepcopy(free_energy)
    with way(free_energy):
        first, second = ([part.item() for part in free_energy(x, y)] for _ in range(2))
        assert first == second
        assert free_energy.step.item() == 2
    free_energy.train()
    for step in (3, 4):
        assert [part.item() for part in free_energy(x, y)] == [part.item() for part in twin(x, y)]
        assert free_energy.step.item() == step


def test_an_evaluation_has_the_noise_and_the_warmup_of_the_step_to_come():
    x, y = data()
    free_energy = FreeEnergy(classifier(), N, warmup=10)
    with torch.no_grad():
        evaluated = [part.item() for part in free_energy(x, y)]
    assert [part.item() for part in free_energy(x, y)] == evaluated


# --- arguments of a call ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [N, 50, 10**6])
def test_n_of_a_call_is_that_of_an_objective_made_with_it(n):
    x, y = data()
    model = classifier()
    cost, expected = FreeEnergy(model, 8)(x, y, n=n), FreeEnergy(model, n)(x, y)
    assert [part.item() for part in cost] == [part.item() for part in expected]


def test_n_of_a_call_is_of_that_call_alone():
    x, y = data()
    free_energy = FreeEnergy(classifier(), 8)
    free_energy(x, y, n=50)
    assert free_energy.n == 8
    assert free_energy(x, y).complexity_weight.item() == pytest.approx(1 / 8)


@pytest.mark.parametrize("warmup", [0, 8])
def test_step_of_a_call_is_that_of_an_objective_at_it(warmup):
    x, y = data()
    model = classifier()
    at = FreeEnergy(model, N, warmup=warmup)
    at.step.fill_(4)
    given = FreeEnergy(model, N, warmup=warmup)
    for step in (5, 6):  # the second one counts on from the first
        expected = [part.item() for part in at(x, y)]
        cost = given(x, y, step=5) if step == 5 else given(x, y)
        assert [part.item() for part in cost] == expected
        assert given.step.item() == step


def test_the_step_of_an_evaluation_is_not_remembered():
    x, y = data()
    free_energy = FreeEnergy(classifier(), N)
    free_energy(x, y)
    with torch.no_grad():
        free_energy(x, y, step=9)
    assert free_energy.step.item() == 1


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        *(("step", value, "an int in [1, inf)") for value in (0, -1, 1.5, True, "3")),
        ("step", 2**32, "an int in [0, 4294967296)"),
        *(("n", value, "an int in [1, inf)") for value in (0, -1, 7.0, True, "7")),
        ("n", N - 1, "the size of the training set, at least the 7 examples of this minibatch"),
    ],
)
def test_bad_arguments_of_a_call_are_refused_and_leave_no_trace(argument, value, message):
    free_energy = FreeEnergy(classifier(), N)
    free_energy(*data())
    with pytest.raises(ValueError, match=f"The '{argument}' parameter of .* must be") as error:
        free_energy(*data(), **{argument: value})
    assert message in str(error.value)
    assert free_energy.step.item() == 1


def test_another_n_does_not_go_with_minibatch_weights():
    free_energy = FreeEnergy(classifier(), N, minibatch_weights="geometric", batch_size=4)
    free_energy(*data(4), 0, n=N)
    with pytest.raises(ValueError, match=f"The 'n' parameter of FreeEnergy.forward must be left out, or {N}"):
        free_energy(*data(4), 0, n=8)


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the second of two."""
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("n", [5, 6, 7])
def test_examples_that_a_sampler_repeats_are_no_mistake(n):
    """A DistributedSampler gives all ranks as many examples: together up to one less than a rank each too many."""
    x, y = data(n)
    mine = list(DistributedSampler(range(n), num_replicas=2, rank=1, shuffle=False))
    assert len(mine) == -(-n // 2)
    cost = FreeEnergy(classifier(), n, own_averaging=True)(x[mine], y[mine])
    assert cost.complexity_weight.item() == pytest.approx(1 / n, rel=1e-12)
    too_many = data(len(mine) + 1)
    with pytest.raises(ValueError, match=f"at least the {2 * len(mine) + 2} examples of this minibatch. Got {n}"):
        FreeEnergy(classifier(), n, own_averaging=True)(*too_many)


@pytest.mark.usefixtures("two_ranks")
def test_the_repeated_examples_of_the_last_minibatch_are_no_mistake_either():
    """7 examples in minibatches of 4 over two ranks: 2 + 2 and 2 + 2, the last with one repeated."""
    free_energy = FreeEnergy(classifier(), 7, minibatch_weights="geometric", batch_size=4, own_averaging=True)
    for batch, pi in ((0, 2 / 3), (1, 1 / 3)):
        assert free_energy(*data(2), batch).complexity_weight.item() == pytest.approx(pi / 4, rel=1e-12)
        for examples in (1, 3):
            with pytest.raises(ValueError, match=f"minibatch {batch} has 4 examples. Got {2 * examples} examples"):
                free_energy(*data(examples), batch)


def test_a_model_in_evaluation_mode_is_evaluated() -> None:
    free_energy = FreeEnergy(Bayesian(nn.Linear(3, 1), bayesbackprop.Gaussian(0.5), seed=0), n=20)
    free_energy.model.eval()
    costs = [float(free_energy(torch.ones(2, 3), torch.ones(2, 1))) for _ in range(2)]
    assert costs[0] == costs[1]
    assert int(free_energy.step) == 0
