"""The equations: the backward that is written out is autograd's of the draw."""

import pytest
import torch

from bayesbackprop import LogDensity, Prior
from bayesbackprop._engine import reference
from bayesbackprop.noise import Key, normal
from engine_parameters import CONSTANTS, CPU, KNOWN_PRIORS, UNKNOWN_PRIOR, parameters_of

pytestmark = pytest.mark.identities

CAUCHY = LogDensity(lambda w: -torch.log1p(w.square()), name="Cauchy")
KEY = Key(seed=5, step=3, draw=1)


@pytest.mark.parametrize("constants", ["none", "every third", "all"])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", [*KNOWN_PRIORS, UNKNOWN_PRIOR, CAUCHY], ids=repr)
def test_the_backward_is_the_gradient_of_the_draw(prior: Prior, centred: bool, constants: str) -> None:
    """(3), (4): for f(w, theta) = <g, w> + c (log q(w|theta) - log P(w))."""
    n, factor = 50, 0.7
    parameters = parameters_of(n, prior, torch.float64, centred=centred, constants=CONSTANTS[constants])
    (w,), complexity = reference.draw(parameters, KEY)
    gradient = torch.linspace(-1, 1, n, dtype=torch.float64)
    f = (gradient * w).sum() + factor * complexity
    expected = torch.autograd.grad(f, [*parameters.mus, *parameters.rhos])
    for c in (factor, torch.tensor(factor, dtype=torch.float64)):
        with torch.no_grad():
            (to_mu,), (to_rho,) = reference.backward(parameters, [w], [gradient], c)
        torch.testing.assert_close((to_mu, to_rho), expected, rtol=1e-10, atol=1e-10)


def test_a_draw_is_the_mean_and_the_noise_of_its_stream() -> None:
    parameters = parameters_of(50, KNOWN_PRIORS[0], torch.float64, streams=(20, 8))
    ws, _ = reference.draw(parameters, KEY)
    for p, w in zip(parameters.each, ws, strict=True):
        eps = normal((50,), KEY, p.stream, torch.float64, CPU)
        torch.testing.assert_close(w, p.q.mu + torch.log1p(p.q.rho.exp()) * eps)


def test_many_draws_are_the_draws_one_by_one() -> None:
    parameters = parameters_of(50, KNOWN_PRIORS[0], torch.float64, streams=(20, 8))
    together = reference.draws(parameters, KEY, 3)
    for k in range(3):
        ws, _ = reference.draw(parameters, KEY._replace(draw=KEY.draw + k))
        assert all(torch.equal(all_of_it[k], w) for all_of_it, w in zip(together, ws, strict=True))


def test_second_derivatives_are_to_be_had() -> None:
    parameters = parameters_of(20, KNOWN_PRIORS[0], torch.float64, centred=True)
    mu, rho = parameters.each[0].q

    def complexity(mu: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
        parameter = parameters.each[0]
        moved = parameter._replace(q=parameter.q._replace(mu=mu, rho=rho))
        return reference.draw(type(parameters)({"w": moved}), KEY)[1]

    assert torch.autograd.gradgradcheck(complexity, (mu, rho))
