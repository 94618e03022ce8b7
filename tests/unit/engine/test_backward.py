"""The fused backward pass against torch.distributions in double precision, at the weights that were really drawn."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, distributions, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Gaussian, Laplace, Normal, Prior, ScaleMixture
from bayesbackprop import _engine as kernels
from bayesbackprop._engine import cpu as fused
from bayesbackprop.noise import Key
from bayesbackprop.posterior import CONSTANT, WeightPosterior

pytestmark = pytest.mark.equivalence

ZERO = torch.zeros((), dtype=torch.float64)
DTYPES = [torch.float32, torch.float64]
SIZES = [1, 3, 255, 256, 257, 1023, 1025, 8193]
PRIORS: list[Prior] = [
    Normal(0.3),
    Laplace(0.2),
    ScaleMixture(0.25, 1.0, 0.1),
    ScaleMixture(0.0, 1.0, 0.1),
    ScaleMixture(1.0, 2.0, 0.1),
    ScaleMixture(0.5, 1.0, 0.002),
]
CONSTANTS = {
    "none": lambda n: [],
    "every third": lambda n: slice(0, n, 3),
    "the first": lambda n: [0],
    "the last": lambda n: [n - 1],
    "all": lambda n: slice(0, n),
    "all but the last": lambda n: slice(0, n - 1),
    "the second block": lambda n: slice(256, 512),
}


def density(prior: Prior, v: Tensor) -> Tensor:
    """log P(v), by torch.distributions."""
    if isinstance(prior, Normal):
        return distributions.Normal(ZERO, prior.sigma + ZERO).log_prob(v)
    if isinstance(prior, Laplace):
        return distributions.Laplace(ZERO, prior.scale + ZERO).log_prob(v)
    assert isinstance(prior, ScaleMixture)
    parts = [
        distributions.Normal(ZERO, sigma + ZERO).log_prob(v) + (share + ZERO).log()
        for share, sigma in ((prior.pi, prior.sigma1), (1 - prior.pi, prior.sigma2))
    ]
    return torch.logaddexp(*parts)


def parameters_of(n: int, prior: Prior, centred: bool, constants: object, dtype: torch.dtype) -> kernels.Parameters:
    generator = torch.Generator().manual_seed(n)
    mu = torch.randn(n, generator=generator, dtype=torch.float64)
    rho = 9 * torch.rand(n, generator=generator, dtype=torch.float64) - 6
    centre = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) if centred else None
    rho[constants] = CONSTANT
    q = WeightPosterior(mu.to(dtype).requires_grad_(), rho.to(dtype).requires_grad_())
    return kernels.Parameters({"w": kernels.Parameter(q, prior, centre, 20)})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_complexity_and_gradients(prior: Prior, centred: bool, constants: str, dtype: torch.dtype) -> None:
    """(3), (4): w moves with mu, and with rho by eps; a constant weight costs nothing and does not move."""
    for n in SIZES:
        parameters = parameters_of(n, prior, centred, CONSTANTS[constants](n), dtype)
        mu, rho = (tensor.detach().double() for tensor in parameters.each[0].q)
        random = rho > -1e6
        (w,) = fused.draw(parameters, Key(seed=5, step=3))
        assert torch.equal(w[~random], parameters.mus[0].detach()[~random])
        given = torch.linspace(-1, 1, n, dtype=dtype)

        m, r = mu[random].requires_grad_(), rho[random].requires_grad_()
        sigma = torch.nn.functional.softplus(r, threshold=100)
        drawn = w[random].double()
        eps = ((drawn - m) / sigma).detach()
        moving = m + sigma * eps
        centre = parameters.each[0].centre
        v = moving if centre is None else moving - centre[random].double()
        complexity = (distributions.Normal(m, sigma).log_prob(moving) - density(prior, v)).sum()
        loss = (given[random].double() * moving).sum() + 0.7 * complexity
        expected = torch.autograd.grad(loss, (m, r)) if random.any() else (m, r)
        size = sum(value.abs().sum() for value in (density(prior, v), distributions.Normal(m, sigma).log_prob(moving)))

        to_mu = given.clone()
        (to_rho,), cost = fused.backward(parameters, [w], [to_mu], 0.7)
        rounding = 1e-12 if dtype == torch.float64 else 2e-6
        # Constant weights are counted as if at 0, and subtracted.
        of_constants = 4 * n * (2 + density(prior, ZERO).abs().item()) * torch.finfo(dtype).eps
        assert cost == pytest.approx(complexity.item(), rel=0, abs=rounding * (1 + size.item()) + of_constants)
        assert cost == fused.complexity(parameters, [w])
        for found, gradient in zip((to_mu, to_rho), expected, strict=True):
            scale = gradient.abs().max().item() if len(gradient) else 0.0
            torch.testing.assert_close(
                found[random].double(), gradient.detach(), rtol=50 * rounding, atol=5 * rounding * (1 + scale)
            )
            assert not found[~random].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_rhos(dtype: torch.dtype) -> None:
    """Whether sigma is 1e-20 or 100: complexity and gradients as in closed form, at mu = 0."""
    parameters = parameters_of(7, Normal(0.5), False, [], dtype)
    with torch.no_grad():
        parameters.mus[0].zero_()
        parameters.rhos[0].copy_(torch.tensor([-50.0, -30.0, -20.0, -1e-30, 0.0, 30.0, 100.0]))
    (w,) = fused.draw(parameters, Key(seed=5))
    rho = parameters.rhos[0].detach().double()
    sigma = torch.where(rho < -25, rho.exp(), torch.log1p(rho.exp()))
    eps = w.double() / sigma
    terms = -0.5 * eps.square() - sigma.log() - density(Normal(0.5), w.double())
    terms -= 0.5 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    to_mu = torch.zeros(7, dtype=dtype)
    (to_rho,), cost = fused.backward(parameters, [w], [to_mu], 1.0)
    accuracy = 1e-11 if dtype == torch.float64 else 1e-5
    assert cost == pytest.approx(terms.sum().item(), rel=accuracy)
    torch.testing.assert_close(to_mu.double(), w.double() / 0.25, rtol=accuracy, atol=0)
    slope = (w.double() / 0.25 * eps - 1 / sigma) * rho.sigmoid()
    torch.testing.assert_close(to_rho.double(), slope, rtol=accuracy, atol=accuracy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_factor_of_the_complexity(dtype: torch.dtype) -> None:
    """Linear in it, and with 0 only scaled: Delta_mu = df/dw, Delta_rho = df/dw * eps * sigmoid(rho)."""
    parameters = parameters_of(257, ScaleMixture(), False, [3], dtype)
    (w,) = fused.draw(parameters, Key(seed=5))
    given = torch.linspace(-1, 1, 257, dtype=dtype)
    results = []
    for factor in (0.0, 1.0, 2.0):
        to_mu = given.clone()
        (to_rho,), cost = fused.backward(parameters, [w], [to_mu], factor)
        results.append((to_mu, to_rho.clone(), cost))
    random = torch.arange(257) != 3
    assert torch.equal(results[0][0][random], given[random])
    mu, rho = (tensor.detach() for tensor in parameters.each[0].q)
    scaled = given * (w - mu) / torch.nn.functional.softplus(rho) * rho.sigmoid()
    torch.testing.assert_close(results[0][1][random], scaled[random], rtol=1e-4, atol=1e-5)
    for kind in (0, 1):
        zero, one, two = (result[kind] for result in results)
        torch.testing.assert_close(two - one, one - zero, rtol=1e-3, atol=1e-3)
        assert not torch.equal(one, zero)
    assert results[0][2] == results[1][2] == results[2][2]


@pytest.mark.parametrize("prior", PRIORS[:3], ids=repr)
def test_a_hundred_steps_with_a_centre_and_constant_weights(prior: Prior) -> None:
    """Fused and plain, with the same noise; the parts of each step agree on the way."""
    start = nn.Sequential(nn.Linear(5, 33), nn.ReLU(), nn.Linear(33, 9), nn.Sigmoid(), nn.Linear(9, 3)).double()
    x, y = torch.randn(16, 5).double(), torch.randn(16, 3).double()
    ends = []
    for context in (nullcontext, kernels.plain):
        model = Bayesian(copy.deepcopy(start), Gaussian("learnt").double(), prior, sigma=0.05, seed=1, centre="net")
        with torch.no_grad():
            for rho in model.rho.parameters():
                rho.view(-1)[::4] = CONSTANT
        free_energy = FreeEnergy(model, n=64, warmup=10)
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
        costs = []
        with context():
            for _ in range(100):
                optimiser.zero_grad()
                cost = free_energy(x, y)
                cost.backward()
                optimiser.step()
                costs.append(torch.stack([*cost]).detach())
        ends.append({name: value.detach() for name, value in model.named_parameters()} | {"costs": torch.stack(costs)})
    torch.testing.assert_close(*ends, rtol=1e-7, atol=1e-7)
    for name, value in start.named_parameters():
        same = ends[0][f"net.{name}"] == value
        assert bool(same.view(-1)[::4].all())
        assert not bool(same.all()) or value.numel() == 1


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
    with pytest.raises(ValueError, match="The complexity cost must be finite"):
        free_energy(x, y).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
