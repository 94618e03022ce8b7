"""The fast twin against the plain one, with the same noise."""

import copy
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from bayesbackprop import (
    Bayesian,
    Categorical,
    FreeEnergy,
    Gaussian,
    Laplace,
    LogDensity,
    Normal,
    Prior,
    ScaleMixture,
    noise,
)
from bayesbackprop import _engine as kernels
from bayesbackprop._engine import cpu as fused
from bayesbackprop._engine import reference
from bayesbackprop.noise import Key, Role, stream
from bayesbackprop.posterior import CONSTANT
from ztests import assert_mean, assert_z

pytestmark = pytest.mark.equivalence

ESTIMATORS = ["shared", "local", "flipout"]
CPU = torch.device("cpu")
CAUCHY = LogDensity(lambda w: -torch.log1p(w.square()), name="Cauchy")
PRIORS: list[Prior] = [Normal(0.3), Laplace(0.2), ScaleMixture(0.25, 1.0, 0.1), ScaleMixture(0.0, 1.0, 0.1)]
SIZES = [1, 3, 31, 32, 33, 1023, 1025]


def test_the_kernels_are_there() -> None:
    assert fused.available()


def _parameters(n: int, prior: Prior, dtype: torch.dtype, centred: bool) -> kernels.Parameters:
    generator = torch.Generator().manual_seed(n)
    mu = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    rho = (6 * torch.rand(n, generator=generator, dtype=torch.float64) - 7).to(dtype)
    rho[1::5] = CONSTANT
    centre = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) if centred else None
    q = (
        Bayesian(nn.Linear(1, 1), Categorical(), seed=0)
        .posterior["weight"]
        ._replace(mu=mu.requires_grad_(), rho=rho.requires_grad_())
    )
    return kernels.Parameters(
        {"w": kernels.Parameter(q, prior, centre, 20), "v": kernels.Parameter(q, prior, centre, 8)}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", PRIORS, ids=repr)
@pytest.mark.parametrize("n", SIZES)
def test_weights_complexity_and_gradients(n: int, prior: Prior, centred: bool, dtype: torch.dtype) -> None:
    parameters, key = _parameters(n, prior, dtype, centred), Key(seed=2**40 + 7, step=3, draw=5)
    assert kernels.all_fused(parameters)
    results = []
    for twin in (fused, reference):
        ws, cost = twin.sample(parameters, key)
        loss = sum((w * torch.linspace(-1, 1, n, dtype=dtype)).sum() for w in ws) + 0.01 * cost
        q = parameters.each[0].q
        results.append([*ws, cost, *torch.autograd.grad(loss, (q.mu, q.rho))])
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
    torch.testing.assert_close(*results, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [0, *SIZES, 100_003])
def test_noise_and_signs(n: int, dtype: torch.dtype) -> None:
    key, numbers = Key(seed=123456789012345, step=2**31 + 5, draw=9), stream(4, Role.ACTIVATION)
    accuracy = 1e-12 if dtype == torch.float64 else 5e-4  # near r = 0 the rounding of u1 is magnified
    plain = noise.normal((n,), key, numbers, dtype, CPU)
    torch.testing.assert_close(fused.normal((n,), key, numbers, dtype), plain, rtol=0, atol=accuracy)
    assert torch.equal(fused.signs((n,), key, numbers, dtype), noise.signs((n,), key, numbers, dtype, CPU))


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("prior", [*PRIORS[:3], {"*.bias": CAUCHY, "*": Normal(0.5)}], ids=repr)
def test_a_hundred_training_steps(prior: Prior, estimator: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 5, generator=generator).to(dtype)
    y = torch.randint(3, (16,), generator=generator)
    start = _net().to(dtype)
    ends = []
    for context in (nullcontext, kernels.plain):
        model = Bayesian(copy.deepcopy(start), Categorical(), prior, estimator=estimator, sigma=0.05, seed=1)  # type: ignore[arg-type]
        free_energy = FreeEnergy(model, n=64, draws=2)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with context():
            for _ in range(100):
                optimiser.zero_grad()
                free_energy(x, y).backward()
                optimiser.step()
        ends.append({name: value.detach() for name, value in model.named_parameters()})
    tolerance = {"rtol": 1e-8, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(*ends, **tolerance)
    assert any(not torch.allclose(ends[0][f"net.{name}"], value) for name, value in start.named_parameters())


def test_what_is_not_contiguous_is_left_to_the_plain_twin() -> None:
    net = nn.Linear(4, 6).double()
    net.weight = nn.Parameter(net.weight.detach().t().contiguous().t())
    model = Bayesian(net, Gaussian(1.0), Normal(0.5), seed=3)
    parameters = model.layout().parameters
    assert not parameters.mus[0].is_contiguous()
    assert not kernels.all_fused(parameters)
    same = Bayesian(copy.deepcopy(net), Gaussian(1.0), Normal(0.5), seed=3)
    same.net.weight = nn.Parameter(same.net.weight.detach().contiguous())
    torch.testing.assert_close(model.draw(1).weights["weight"], same.draw(1).weights["weight"])
    torch.testing.assert_close(model.draw(1).complexity(), same.draw(1).complexity())


def test_inside_vmap_and_beside_it() -> None:
    model = Bayesian(_net().double(), Categorical(), seed=3)
    inside = vmap(lambda index: model.draw(2, index).weights["0.weight"])(torch.arange(4))
    torch.testing.assert_close(inside, torch.stack([model.draw(2, k).weights["0.weight"] for k in range(4)]))


def test_many_draws_are_the_draws_one_by_one() -> None:
    model = Bayesian(_net(), Categorical(), seed=3)
    kept = model.ensemble(5).weights
    for k in range(5):
        for name, weight in model.draw(index=k).weights.items():
            assert torch.equal(kept[name][k], weight)


def test_the_number_of_threads_changes_nothing() -> None:
    model = Bayesian(nn.Linear(300, 300), Gaussian(1.0), seed=3)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            draw = model.draw(1)
            results.append((draw.weights["weight"].detach(), draw.complexity().detach()))
    finally:
        torch.set_num_threads(before)
    for weight, complexity in results[1:]:
        assert torch.equal(weight, results[0][0])
        assert torch.equal(complexity, results[0][1])


def _gradients(model: Bayesian) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert all(gradient is not None for gradient in gradients)
    return [gradient.clone() for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("backward", [lambda cost: cost.backward(), lambda cost: cost.total.backward()])
def test_costs_wait_for_their_backward_pass_in_any_order(backward: Callable[..., None]) -> None:
    """And weights and gradients that someone keeps stay what they are."""
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    model = Bayesian(_net(), Categorical(), seed=3)
    expected = []
    for step in range(6):
        with kernels.plain():
            free_energy = FreeEnergy(model, n=64)
            free_energy.step.fill_(step)
            free_energy(x, y).backward()
        expected.append(_gradients(model))
    free_energy = FreeEnergy(model, n=64)
    waiting = [free_energy(x, y) for _ in range(4)]
    for step in (2, 0, 3, 1):
        backward(waiting[step])
        torch.testing.assert_close(_gradients(model), expected[step], rtol=1e-4, atol=1e-5)
    del waiting
    kept = model.draw(9).weights
    before = {name: weight.detach().clone() for name, weight in kept.items()}
    gradients = []
    for step in (4, 5):
        backward(free_energy(x, y))
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
        torch.testing.assert_close(gradients[-1], expected[step], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, expected[4:], rtol=1e-4, atol=1e-5)  # those of step 4 are still theirs
    assert all(torch.equal(kept[name], value) for name, value in before.items())


def test_without_the_compiled_kernels_it_works_and_says_so_once() -> None:
    program = """
import sys, warnings
sys.modules["bayesbackprop._engine._cpu"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import bayesbackprop as bbb
    import torch
    model = bbb.Bayesian(torch.nn.Linear(2, 1), bbb.Gaussian(1.0), seed=0)
    cost = bbb.FreeEnergy(model, n=4)(torch.ones(4, 2), torch.ones(4, 1))
    cost.backward()
    model.predict(torch.ones(1, 2), draws=3)
assert [str(w.message)[:49] for w in caught] == ["bayesbackprop was installed without its compiled "], caught
print(float(cost.complexity))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) != 0


def test_a_step_costs_no_multiple_of_a_plain_one() -> None:
    """A coarse guard: the benchmarks measure, this only notices when the fast path is not taken at all."""
    x, y = torch.randn(128, 784), torch.randint(10, (128,))
    sizes = [(784, 400), (400, 400), (400, 10)]
    plain, bayesian = (nn.Sequential(*[nn.Linear(*size) for size in sizes]) for _ in range(2))
    free_energy = FreeEnergy(Bayesian(bayesian, Categorical(), seed=0), n=1000)
    ratios = []
    for _ in range(15):
        start = time.perf_counter()
        nn.functional.cross_entropy(plain(x), y).backward()
        middle = time.perf_counter()
        free_energy(x, y).backward()
        ratios.append((time.perf_counter() - middle) / (middle - start))
    assert sorted(ratios)[7] < 4


def test_prediction_with_another_estimator_has_the_same_distribution() -> None:
    """For a fully connected network ``local`` gives each input what weight draws give it."""
    torch.manual_seed(1)
    model = Bayesian(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), Gaussian(0.1), sigma=0.3, seed=5)
    x, draws = torch.randn(4, 3), 20_000
    drawn = model.predict(x, draws=draws, estimator="shared")
    local = model.predict(x, draws=draws, estimator="local")
    error = (drawn.epistemic / draws).sqrt()
    assert_z(((drawn.mean - local.mean) / (error * 2**0.5)).flatten(), "mean")
    pair = [p._by_draw(p.components.mean) for p in (drawn, local)]
    squares = [(each - each.mean(0)).square() for each in pair]
    assert_mean(squares[0] - squares[1], 0.0, "variance")
    again = model.predict(x, draws=50, estimator="local")
    assert torch.equal(again.mean, model.predict(x, draws=50, estimator="local", memory=10_000).mean)
    with kernels.plain():
        torch.testing.assert_close(again.mean, model.predict(x, draws=50, estimator="local").mean, rtol=1e-4, atol=1e-4)
