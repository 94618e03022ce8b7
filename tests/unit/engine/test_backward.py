"""The kernels' complexity and backward against torch.distributions in double precision, at the weights really drawn."""

import math

import pytest
import torch
from torch import Tensor, distributions

from bayesbackprop import Laplace, Normal, Prior, ScaleMixture
from bayesbackprop._engine import cpu
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop.noise import Key
from engine_parameters import CONSTANTS, DTYPES, KNOWN_PRIORS, parameters_of, rounding_of_constants

pytestmark = pytest.mark.equivalence

ZERO = torch.zeros((), dtype=torch.float64)
SIZES = [1, 3, 255, 256, 257, 1023, 1025, 8193]
KEY = Key(seed=5, step=3)


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


def drawn_noise(parameters: Parameters) -> Tensor:
    """The noise that the kernels draw for the only parameter."""
    mu = parameters.mus[0]
    return cpu.normal(torch.empty_like(mu, requires_grad=False), KEY, parameters.each[0].stream).double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", KNOWN_PRIORS, ids=repr)
def test_complexity_and_gradients(prior: Prior, centred: bool, constants: str, dtype: torch.dtype) -> None:
    """(3), (4): w moves with mu, and with rho by eps; a constant weight costs nothing and does not move."""
    for n in SIZES:
        parameters = parameters_of(n, prior, dtype, centred=centred, constants=CONSTANTS[constants])
        mu, rho = (tensor.detach().double() for tensor in parameters.each[0].q)
        random = rho > -1e6
        (w,), cost = cpu.draw(parameters, KEY)
        assert torch.equal(w[~random], parameters.mus[0].detach()[~random])

        m, r = mu[random].requires_grad_(), rho[random].requires_grad_()
        sigma = torch.nn.functional.softplus(r, threshold=100)
        drawn = w[random].double()
        eps = ((drawn - m) / sigma).detach()
        moving = m + sigma * eps
        centre = parameters.each[0].centre
        v = moving if centre is None else moving - centre[random].double()
        complexity = (distributions.Normal(m, sigma).log_prob(moving) - density(prior, v)).sum()

        # The value of log q is that at the noise that was drawn, which w - mu has only to the rounding of w.
        log_q = distributions.Normal(ZERO, 1 + ZERO).log_prob(drawn_noise(parameters)[random]) - sigma.log()
        terms = log_q - density(prior, v)
        size = log_q.abs().sum() + density(prior, v).abs().sum()
        rounding = 1e-12 if dtype == torch.float64 else 2e-6
        bound = rounding * (1 + size.item()) + rounding_of_constants(n, prior, dtype)
        assert cost == pytest.approx(terms.sum().item(), rel=0, abs=bound)

        given = torch.linspace(-1, 1, n, dtype=dtype)
        loss = (given[random].double() * moving).sum() + 0.7 * complexity
        expected = torch.autograd.grad(loss, (m, r)) if random.any() else (m, r)
        to_mu = given.clone()
        (same,), (to_rho,) = cpu.backward(parameters, [w], [to_mu], 0.7, to_mu=[to_mu])
        assert same is to_mu
        (elsewhere,), (again,) = cpu.backward(parameters, [w], [given], 0.7, to_mu=[torch.empty_like(given)])
        assert torch.equal(elsewhere, to_mu)
        assert torch.equal(again, to_rho)
        for found, gradient in zip((to_mu, to_rho), expected, strict=True):
            scale = gradient.abs().max().item() if len(gradient) else 0.0
            torch.testing.assert_close(
                found[random].double(), gradient.detach(), rtol=50 * rounding, atol=5 * rounding * (1 + scale)
            )
            assert not found[~random].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", [Normal(0.3), Laplace(0.2)], ids=repr)
def test_the_closed_form_in_double_precision(prior: Prior, centred: bool, dtype: torch.dtype) -> None:
    """KL[q || P] and its gradients, of means between nothing and twenty sigma from the centre."""
    n = 8193
    parameters = parameters_of(n, prior, dtype, centred=centred).in_closed_form()
    assert parameters is not None
    q, centre = parameters.each[0].q, parameters.each[0].centre
    with torch.no_grad():
        away = torch.linspace(-4, 1.3, n, dtype=torch.float64).mul_(math.log(10)).exp() * q.sigma.double()
        away[::2] *= -1
        q.mu.copy_(away + (0 if centre is None else centre))
    (w,), cost = cpu.draw(parameters, KEY)
    at = torch.zeros_like(w).double() if centre is None else centre.double()
    given = torch.zeros_like(w)
    (to_mu,), (to_rho,) = cpu.backward(parameters, [w], [given], 1.0, to_mu=[torch.empty_like(w)])

    m, r = (tensor.detach().double().requires_grad_() for tensor in q)
    posterior = distributions.Normal(m, torch.nn.functional.softplus(r, threshold=100))
    if isinstance(prior, Normal):
        kl = distributions.kl_divergence(posterior, distributions.Normal(at, prior.sigma + ZERO))
    else:
        assert isinstance(prior, Laplace)
        kl = distributions.kl_divergence(posterior, distributions.Laplace(at, prior.scale + ZERO))
    by_mu, by_rho = torch.autograd.grad(kl.sum(), (m, r))
    rounding = 1e-14 if dtype == torch.float64 else 1e-6
    assert cost == pytest.approx(kl.sum().item(), rel=0, abs=rounding * (n + kl.abs().sum().item()))
    torch.testing.assert_close(to_mu.double(), by_mu, rtol=rounding, atol=0)
    # By rho it is that of the prior less that of the entropy, each exact in proportion to itself.
    of_entropy = r.detach().sigmoid() / posterior.stddev.detach()
    assert bool(((to_rho - by_rho).abs() <= rounding * (by_rho.abs() + 2 * of_entropy)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mu", [0.0, 1e-30, 3.0, -1e20])
def test_the_closed_form_of_a_laplace_prior_where_sigma_vanishes(mu: float, dtype: torch.dtype) -> None:
    """E|w| becomes |mu|, its slope the sign of mu, and nothing is NaN; of the entropy rho is left."""
    parameters = parameters_of(40, Laplace(0.2), dtype).in_closed_form()
    assert parameters is not None
    with torch.no_grad():
        parameters.mus[0].fill_(mu)
        parameters.rhos[0].fill_(-1000.0)
    (w,), cost = cpu.draw(parameters, KEY)
    (to_mu,), (to_rho,) = cpu.backward(parameters, [w], [torch.zeros_like(w)], 1.0, to_mu=[torch.empty_like(w)])
    each = 1000 - 0.5 * math.log(2 * math.pi * math.e) + abs(mu) / 0.2 + math.log(0.4)
    assert cost == pytest.approx(40 * each, rel=1e-6)
    sign = 0.0 if mu == 0 else math.copysign(1, mu)
    torch.testing.assert_close(to_mu, torch.full_like(w, sign / 0.2))
    torch.testing.assert_close(to_rho, torch.full_like(w, -1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_rhos(dtype: torch.dtype) -> None:
    """Whether sigma is 1e-20 or 100: complexity and gradients as in closed form, at mu = 0."""
    parameters = parameters_of(7, Normal(0.5), dtype)
    with torch.no_grad():
        parameters.mus[0].zero_()
        parameters.rhos[0].copy_(torch.tensor([-50.0, -30.0, -20.0, -1e-30, 0.0, 30.0, 100.0]))
    (w,), cost = cpu.draw(parameters, KEY)
    rho = parameters.rhos[0].detach().double()
    sigma = torch.where(rho < -25, rho.exp(), torch.log1p(rho.exp()))
    eps = w.double() / sigma
    terms = -0.5 * eps.square() - sigma.log() - density(Normal(0.5), w.double()) - 0.5 * math.log(2 * math.pi)
    (to_mu,), (to_rho,) = cpu.backward(parameters, [w], [torch.zeros_like(w)], 1.0, to_mu=[torch.empty_like(w)])
    accuracy = 1e-11 if dtype == torch.float64 else 1e-5
    assert cost == pytest.approx(terms.sum().item(), rel=accuracy)
    torch.testing.assert_close(to_mu.double(), w.double() / 0.25, rtol=accuracy, atol=0)
    slope = (w.double() / 0.25 * eps - 1 / sigma) * rho.sigmoid()
    torch.testing.assert_close(to_rho.double(), slope, rtol=accuracy, atol=accuracy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_of_constant_weights(dtype: torch.dtype) -> None:
    """A weight at -1000 is random, if hardly so; below it is constant."""
    for rho, random in ((-1000.0, True), (-1001.0, False), (-math.inf, False)):
        parameters = parameters_of(40, Normal(0.5), dtype)
        with torch.no_grad():
            parameters.rhos[0].fill_(rho)
        (w,), cost = cpu.draw(parameters, KEY)
        torch.testing.assert_close(w, parameters.mus[0].detach(), rtol=0, atol=1e-30)
        (to_mu,), (to_rho,) = cpu.backward(parameters, [w], [torch.ones_like(w)], 1.0, to_mu=[torch.empty_like(w)])
        if random:
            log_q = distributions.Normal(ZERO, 1 + ZERO).log_prob(drawn_noise(parameters)) + 1000
            assert cost == pytest.approx((log_q - density(Normal(0.5), w.double())).sum().item(), rel=1e-6)
            torch.testing.assert_close(to_rho, torch.full_like(w, -1.0))
        else:
            assert cost == pytest.approx(0.0, abs=rounding_of_constants(40, Normal(0.5), dtype))
            assert not to_mu.any()
            assert not to_rho.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_factor_of_the_complexity(dtype: torch.dtype) -> None:
    """Linear in it, and with 0 only scaled: Delta_mu = df/dw, Delta_rho = df/dw * eps * sigmoid(rho)."""
    parameters = parameters_of(257, ScaleMixture(), dtype, constants=slice(3, 4))
    (w,), _ = cpu.draw(parameters, KEY)
    given = torch.linspace(-1, 1, 257, dtype=dtype)
    results = []
    for factor in (0.0, 1.0, 2.0):
        (to_mu,), (to_rho,) = cpu.backward(parameters, [w], [given], factor, to_mu=[torch.empty_like(w)])
        results.append((to_mu, to_rho))
    random = torch.arange(257) != 3
    assert torch.equal(results[0][0][random], given[random])
    mu, rho = (tensor.detach() for tensor in parameters.each[0].q)
    scaled = given * (w - mu) / torch.nn.functional.softplus(rho) * rho.sigmoid()
    torch.testing.assert_close(results[0][1][random], scaled[random], rtol=1e-4, atol=1e-5)
    for kind in (0, 1):
        zero, one, two = (result[kind] for result in results)
        torch.testing.assert_close(two - one, one - zero, rtol=1e-3, atol=1e-3)
        assert not torch.equal(one, zero)
