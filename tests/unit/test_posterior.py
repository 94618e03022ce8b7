"""The posterior of a weight: sigma = log(1 + exp(rho)) at every scale, and constant weights (rho = -inf)."""

import math

import pytest
import torch
from torch import distributions, nn

from bayesbackprop import Adam, Bayesian, Categorical, FreeEnergy, Gaussian, Laplace, Normal, Relative, ScaleMixture
from bayesbackprop.posterior import WeightPosterior, initial_rho

pytestmark = pytest.mark.identities

DTYPES = (torch.float32, torch.float64)
ESTIMATORS = ("shared", "local", "flipout")


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_sigma_survives_the_way_through_rho(dtype, rtol):
    """In float32, rho near -18 is known to 1e-6, and so is log(sigma)."""
    mu = torch.zeros(10, dtype=dtype)
    for sigma in torch.logspace(-8, 3, 111, dtype=torch.float64).tolist():
        rho = initial_rho(mu, sigma)
        assert rho.dtype == dtype
        expected = torch.full((10,), sigma, dtype=torch.float64)
        torch.testing.assert_close(WeightPosterior(mu, rho).sigma.double(), expected, rtol=rtol, atol=0)
    each = torch.logspace(-8, 3, 10, dtype=dtype)
    torch.testing.assert_close(WeightPosterior(mu, initial_rho(mu, lambda _: each)).sigma, each, rtol=rtol, atol=0)


def log_sigma_and_slope(rho: float) -> tuple[float, float]:
    """log(log(1 + exp(rho))) and its derivative, in Python's doubles."""
    if rho < -30:
        return rho, 1.0  # to within exp(-30)
    sigma = rho + math.log1p(math.exp(-rho)) if rho > 0 else math.log1p(math.exp(rho))
    return math.log(sigma), 1 / (1 + math.exp(-rho)) / sigma


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.float64, 2e-9)])
@pytest.mark.parametrize("rho", [-1000, -100, -87, -20.1, -20, -19.9, -1, 0, 1, 30, 39.9, 40.1, 1000])
def test_log_sigma_lives_at_every_rho(rho, dtype, rtol):
    at = torch.tensor(rho, dtype=dtype, requires_grad=True)
    value = WeightPosterior(torch.zeros((), dtype=dtype), at).log_sigma
    (slope,) = torch.autograd.grad(value, at)
    assert (value.item(), slope.item()) == pytest.approx(log_sigma_and_slope(at.item()), rel=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rho", "sigma", "slope"), [(-1000, 0, 0), (0, math.log(2), 0.5), (50, 50, 1), (1000, 1000, 1)]
)
def test_sigma_neither_overflows_nor_loses_its_gradient(rho, sigma, slope, dtype):
    at = torch.tensor(float(rho), dtype=dtype, requires_grad=True)
    value = WeightPosterior(at, at).sigma
    assert value.item() == pytest.approx(sigma, rel=1e-6)
    assert torch.autograd.grad(value, at)[0].item() == pytest.approx(slope, rel=1e-6)


def test_densities_equal_torch_distributions():
    mu, rho, eps = torch.randn(3, 50, dtype=torch.float64)
    q = WeightPosterior(mu, 4 * rho)
    reference = distributions.Normal(mu, q.sigma)
    torch.testing.assert_close(q.entropy(), reference.entropy(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(q.log_density(eps), reference.log_prob(q.weight(eps)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(q.weight(eps), mu + q.sigma * eps, rtol=0, atol=0)
    torch.testing.assert_close(q.snr, mu.abs() / q.sigma, rtol=1e-12, atol=0)
    assert q.numel == 50


def test_density_where_the_weight_cannot_show_its_noise():
    """sigma = 1e-8 is below the spacing of float32 around 1: (w - mu) / sigma would be 0 or 12."""
    mu, eps = torch.ones(5), torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    q = WeightPosterior(mu, initial_rho(mu, 1e-8))
    expected = distributions.Normal(0.0, 1e-8).log_prob(1e-8 * eps)
    torch.testing.assert_close(q.log_density(eps), expected, rtol=1e-6, atol=1e-5)


def test_initial_sigmas():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].weight.mul_(10)[0, 0] = 0
    sigma = {"0.weight": Relative(0.1, floor=1e-4), "*.bias": 0.5, "*": lambda mu: torch.full_like(mu, 2.0)}
    q = Bayesian(net, Gaussian(0.1), sigma=sigma).posterior
    expected = (0.1 * net[0].weight.detach().abs()).clamp(min=1e-4)
    torch.testing.assert_close(q["0.weight"].sigma, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(q["1.bias"].sigma, torch.full((2,), 0.5))
    torch.testing.assert_close(q["1.weight"].sigma, torch.full((2, 4), 2.0))


@pytest.mark.parametrize("name", ["fraction", "floor"])
@pytest.mark.parametrize("value", [-1, 0, True, float("nan"), float("inf"), "a", None])
def test_bad_relative_is_refused(name, value):
    with pytest.raises(ValueError, match="parameter of") as error:
        Relative(**{"fraction": 0.1, name: value})
    expected = f"The '{name}' parameter of Relative must be a float in (0, inf). Got {value!r} instead."
    assert str(error.value) == expected


# --- constant weights -------------------------------------------------------------------------------------------------


def with_constants(prior=None, estimator="shared", centre=None) -> tuple[Bayesian, dict[str, torch.Tensor]]:
    """A net whose output layer's first row is constant, half of it pruned, and so are some of its other weights."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = Bayesian(net, Gaussian(0.5), prior, sigma=0.3, estimator=estimator, centre=centre, seed=0)
    constant = {name: torch.zeros_like(q.mu, dtype=torch.bool) for name, q in model.posterior.items()}
    constant["0.weight"][:, 1] = constant["2.weight"][0] = constant["2.bias"][0] = True
    with torch.no_grad():
        for name, q in model.posterior.items():
            q.rho[constant[name]] = -math.inf
        net[2].weight[0, :3] = 0
    return model, constant


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_constant_weights_are_what_they_are(estimator):
    model, constant = with_constants(estimator=estimator)
    for step in range(5):
        for name, w in model.draw(step).weights.items():
            q = model.posterior[name]
            assert torch.equal(w == q.mu, constant[name])
            assert torch.equal(q.sigma == 0, constant[name])
            assert torch.equal(q.random, ~constant[name])
    outputs = torch.stack([model.draw(index=index)(torch.ones(2, 4).double()) for index in range(3)])
    assert outputs.isfinite().all()
    assert (outputs[0] != outputs[1]).any()


def test_signal_to_noise_ratio_of_constants():
    snr = with_constants()[0].posterior["2.weight"].snr
    assert torch.equal(snr[0], torch.tensor([0, 0, 0, math.inf, math.inf, math.inf]).double())
    assert (snr[1:].isfinite() & (snr[1:] > 0)).all()


@pytest.mark.parametrize("centre", [None, "net"])
@pytest.mark.parametrize("prior", [Normal(0.7), Laplace(0.7), ScaleMixture()], ids=repr)
def test_constant_weights_cost_nothing(prior, centre):
    model, constant = with_constants(prior, centre=centre)
    draw, expected_sampled, expected_closed = model.draw(1), 0.0, 0.0
    for name, q in model.posterior.items():
        random = ~constant[name]
        w = draw.weights[name]
        log_q = distributions.Normal(q.mu, q.sigma.clamp(min=1e-9)).log_prob(w)
        origin = 0.0 if centre is None else model.centre.get_buffer(name)
        expected_sampled += (log_q - prior.log_density(w - origin))[random].sum()
        if not isinstance(prior, ScaleMixture):
            mean, scale = (q.mu - origin)[random], q.sigma[random]
            entropy = distributions.Normal(mean, scale).entropy()
            expected_closed -= (entropy + prior.expected_log_density(mean, scale)).sum()
    torch.testing.assert_close(draw.complexity(), expected_sampled)
    if not isinstance(prior, ScaleMixture):
        torch.testing.assert_close(model.complexity_closed(), expected_closed)


@pytest.mark.parametrize(
    "optimiser", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, Adam]
)
@pytest.mark.parametrize("complexity", ["sampled", "closed"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_constant_weights_stay_constant(estimator, complexity, optimiser):
    model, constant = with_constants(Normal(0.5), estimator)
    before = {name: q.mu.detach().clone() for name, q in model.posterior.items()}
    free_energy = FreeEnergy(model, n=8, complexity=complexity)
    options = {"momentum": 0.9} if optimiser in (torch.optim.SGD, torch.optim.RMSprop) else {}
    optimise = optimiser(model.parameters(), lr=0.01, **options)
    x, y = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    x[:, 1] = 0  # an input whose weights are all constant
    for _ in range(5):
        optimise.zero_grad()
        free_energy(x, y).backward()
        for name, q in model.posterior.items():
            for gradient in (q.mu.grad, q.rho.grad):
                assert gradient.isfinite().all()
                assert (gradient[constant[name]] == 0).all()
        optimise.step()
    for name, q in model.posterior.items():
        assert torch.equal(q.mu == before[name], constant[name])
        assert torch.equal(q.rho == -math.inf, constant[name])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_padding_of_an_embedding_is_constant(estimator):
    net = nn.Sequential(nn.Embedding(5, 3, padding_idx=2), nn.Flatten(), nn.Linear(6, 2))
    model = Bayesian(net, Categorical(), estimator=estimator, seed=0)
    assert torch.equal(model.posterior["0.weight"].random, torch.arange(5).ne(2).unsqueeze(1).expand(5, 3))
    assert torch.equal(model.draw().weights["0.weight"][2], torch.zeros(3))
    FreeEnergy(model, n=2)(torch.tensor([[2, 2], [1, 0]]), torch.tensor([0, 1])).backward()
    for gradient in (net[0].weight.grad, model.rho.get_parameter("0.weight").grad):
        assert (gradient[2] == 0).all()
        assert (gradient[1] != 0).any()


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_weight_decay_leaves_padding_constant(optimiser):
    model = Bayesian(nn.Embedding(5, 3, padding_idx=2), Categorical(), seed=0)
    free_energy = FreeEnergy(model, n=2)
    optimise = optimiser(model.param_groups(weight_decay=1e-2), lr=1e-3)
    for _ in range(2):
        free_energy(torch.tensor([2, 1]), torch.tensor([0, 1])).backward()
        optimise.step()
    q = model.posterior["weight"]
    assert torch.equal(q.random, torch.arange(5).ne(2).unsqueeze(1).expand(5, 3))
    assert torch.equal(model.draw().weights["weight"][2], torch.zeros(3))
