"""The step of the objective: it decides the noise and the warm-up, and only training advances it."""

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Normal
from networks import classifier as small_classifier

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
