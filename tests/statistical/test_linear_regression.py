"""Bayesian linear regression with known noise, where everything is known exactly.

y = X w + noise * e, w ~ N(0, s^2 I). The posterior is Gaussian with precision A = X'X / noise^2 + I / s^2 and mean
m = A^-1 X'y / noise^2. The best mean-field Gaussian has the exact mean and sigma_i^2 = 1 / A_ii, and the free energy is
-log evidence plus the gap KL[q* || posterior] = (sum log A_ii - log det A) / 2.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import IVON, Bayesian, FreeEnergy, Gaussian, Normal
from many_draws import each_step
from ztests import assert_mean

pytestmark = pytest.mark.learning

N, NOISE, PRIOR = 40, 0.5, 0.8


class Problem:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        mixing = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [-0.3, 0.2, 0.9]], dtype=torch.float64)
        self.x = torch.randn(N, 3, generator=generator, dtype=torch.float64) @ mixing.T
        self.y = self.x @ torch.tensor([[0.7], [-0.4], [0.2]], dtype=torch.float64)
        self.y = self.y + NOISE * torch.randn(N, 1, generator=generator, dtype=torch.float64)
        self.precision = self.x.T @ self.x / NOISE**2 + torch.eye(3, dtype=torch.float64) / PRIOR**2
        self.mean = torch.linalg.solve(self.precision, self.x.T @ self.y / NOISE**2).T
        self.sigma = self.precision.diagonal().rsqrt()[None]
        covariance = PRIOR**2 * self.x @ self.x.T + NOISE**2 * torch.eye(N, dtype=torch.float64)
        evidence = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=torch.float64), covariance)
        self.log_evidence = evidence.log_prob(self.y[:, 0])
        self.gap = 0.5 * (self.precision.diagonal().log().sum() - torch.logdet(self.precision))

    def model(self, estimator: str = "shared", **options: object) -> Bayesian:
        net = nn.Linear(3, 1, bias=False).double()
        return Bayesian(net, Gaussian(NOISE), Normal(PRIOR), estimator=estimator, seed=5, **options)  # type: ignore[arg-type]


def expected_free_energy(problem: Problem, mu: Tensor, sigma: Tensor) -> Tensor:
    """(1) in closed form, written out for this model alone."""
    kl = (math.log(PRIOR) - sigma.log() + (sigma.square() + mu.square()) / (2 * PRIOR**2) - 0.5).sum()
    residual = (problem.y - problem.x @ mu.T).square().sum() + (problem.x.square() @ sigma.square().T).sum()
    return kl + residual / (2 * NOISE**2) + N * math.log(NOISE * math.sqrt(2 * math.pi))


def set_posterior(model: Bayesian, mu: Tensor, sigma: Tensor) -> None:
    (q,) = model.posterior.values()
    with torch.no_grad():
        q.mu.copy_(mu)
        q.rho.copy_(sigma + torch.log(-torch.expm1(-sigma)))


def test_the_reference_itself_is_minus_log_evidence_plus_the_gap() -> None:
    problem = Problem()
    optimum = expected_free_energy(problem, problem.mean, problem.sigma)
    torch.testing.assert_close(optimum, -problem.log_evidence + problem.gap)
    assert problem.gap > 0.05  # mean field really is an approximation here


@pytest.mark.parametrize("complexity", ["sampled", "closed"])
@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
def test_training_recovers_the_exact_mean_field_optimum(estimator: str, complexity: str) -> None:
    problem = Problem()
    model = problem.model(estimator, sigma=0.3)
    draws = 1 if estimator == "local" else 4  # whose gradients have less noise
    free_energy = FreeEnergy(model, n=N, draws=draws, complexity=complexity)  # type: ignore[arg-type]
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    steps, tail = 1000, 500
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1.0 if step < 300 else 0.15)
    (q,) = model.posterior.values()
    mus, sigmas = [], []
    for step in range(steps):
        optimiser.zero_grad()
        free_energy(problem.x, problem.y).backward()
        optimiser.step()
        schedule.step()
        if step >= steps - tail:
            mus.append(q.mu.detach().clone())
            sigmas.append(q.sigma.detach().clone())
    # Averaged over the tail, what noise is left is a few hundredths of sigma.
    torch.testing.assert_close(torch.stack(mus).mean(0), problem.mean, atol=0.1 * float(problem.sigma.min()), rtol=0)
    torch.testing.assert_close(torch.stack(sigmas).mean(0), problem.sigma, atol=0, rtol=0.05)


@pytest.mark.parametrize("temperature", [1.0, 0.2])
@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
def test_ivon_comes_to_rest_at_the_exact_mean_field_optimum(estimator: str, temperature: float) -> None:
    """Of the likelihood to the power 1 / T: the exact mean, and the diagonal of the exact precision."""
    problem = Problem()
    model = problem.model(estimator)
    free_energy = FreeEnergy(model, n=N, draws=4, complexity="closed", temperature=temperature)
    optimiser = IVON(free_energy, 0.05, betas=(0.9, 0.99), hess_init=20.0)
    precision = problem.x.T @ problem.x / NOISE**2 / temperature + torch.eye(3, dtype=torch.float64) / PRIOR**2
    mean = torch.linalg.solve(precision, problem.x.T @ problem.y / NOISE**2 / temperature).T
    (q,) = model.posterior.values()
    mus, precisions = [], []
    for step in range(2000):
        optimiser.zero_grad()
        free_energy(problem.x, problem.y).backward()
        optimiser.step()
        if step >= 600:
            mus.append(q.mu.detach().clone())
            precisions.append(1 / q.variance.detach())
    sigma = precision.diagonal().rsqrt()
    torch.testing.assert_close(torch.stack(mus).mean(0), mean, atol=0.1 * float(sigma.min()), rtol=0)
    torch.testing.assert_close(torch.stack(precisions).mean(0)[0].rsqrt(), sigma, atol=0, rtol=0.05)


@pytest.mark.parametrize("complexity", ["sampled", "closed"])
@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
def test_the_gradient_vanishes_at_the_exact_optimum_and_is_unbiased_off_it(estimator: str, complexity: str) -> None:
    problem = Problem()
    model = problem.model(estimator)
    free_energy = FreeEnergy(model, n=N, complexity=complexity)  # type: ignore[arg-type]
    (q,) = model.posterior.values()
    for mu, sigma in [(problem.mean, problem.sigma), (problem.mean + 0.1, 1.5 * problem.sigma)]:
        set_posterior(model, mu, sigma)
        exact_mu, exact_rho = mu.clone().requires_grad_(), q.rho.detach().clone().requires_grad_()
        cost = expected_free_energy(problem, exact_mu, nn.functional.softplus(exact_rho)) / N
        exact = torch.cat(torch.autograd.grad(cost, (exact_mu, exact_rho)))
        _, gradients = each_step(free_energy, problem.x, problem.y, 1500)
        samples = torch.cat([gradients["model.net.weight"], gradients["model.rho.weight"]], 1)
        assert_mean(samples, exact, f"gradient of {estimator}, {complexity}")


@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
def test_the_free_energy_is_its_expectation_and_never_below_minus_log_evidence(estimator: str) -> None:
    problem = Problem()
    model = problem.model(estimator)
    free_energy = FreeEnergy(model, n=N)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        mu = problem.mean + 0.3 * torch.randn(1, 3, generator=generator, dtype=torch.float64)
        sigma = problem.sigma * torch.exp(0.7 * torch.randn(1, 3, generator=generator, dtype=torch.float64))
        set_posterior(model, mu, sigma)
        exact = expected_free_energy(problem, mu, sigma)
        assert exact > -problem.log_evidence
        costs, _ = each_step(free_energy, problem.x, problem.y, 1000)
        assert_mean(N * costs, float(exact), f"free energy of {estimator}")


def test_the_exact_posterior_has_the_least_cost_and_one_draw_of_it_may_be_lower() -> None:
    """The bound holds for the expectation; a single sample of the cost is no bound."""
    problem = Problem()
    model = problem.model()
    set_posterior(model, problem.mean, problem.sigma)
    free_energy = FreeEnergy(model, n=N)
    costs = torch.stack([free_energy(problem.x, problem.y).detach() * N for _ in range(500)])
    assert costs.min() < -problem.log_evidence < costs.mean()
