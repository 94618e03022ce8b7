"""Hamiltonian Monte Carlo: exact in linear regression from wherever it starts; it says when it has not converged."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from bayesbackprop import (
    Bayesian,
    Categorical,
    Conditional,
    Gaussian,
    Joint,
    Laplace,
    LogDensity,
    Mixture,
    Normal,
    ScaleMixture,
    prune,
    refine,
)
from bayesbackprop.refinement import Refined, split_r_hat
from ztests import assert_mean, assert_variance

pytestmark = pytest.mark.identities

GENERATOR = torch.Generator().manual_seed(0)
MIXING = torch.tensor([[1.0, 0.9], [0.0, 0.5]], dtype=torch.float64)
X = torch.randn(30, 2, generator=GENERATOR, dtype=torch.float64) @ MIXING
Y = X @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64) + 0.5 * torch.randn(30, 1, generator=GENERATOR).double()
PRIORS = {"weight": Normal(2.0), "bias": Normal(0.5)}


def exact(centre: Tensor) -> MultivariateNormal:
    """The posterior of both weights and the bias."""
    z = torch.cat([X, torch.ones(30, 1, dtype=torch.float64)], 1)
    prior = torch.diag(torch.tensor([2.0, 2.0, 0.5], dtype=torch.float64) ** -2)
    precision = z.mT @ z / 0.25 + prior
    return MultivariateNormal(
        torch.linalg.solve(precision, z.mT @ Y[:, 0] / 0.25 + prior @ centre), precision.inverse()
    )


@pytest.mark.statistical
@pytest.mark.parametrize("centre", [None, "net"])
def test_it_is_exact_in_linear_regression(centre):
    linear = nn.Linear(2, 1).double()
    with torch.no_grad():
        linear.weight.fill_(0.8)
        linear.bias.fill_(0.3)
    model = Bayesian(linear, Gaussian(0.5), PRIORS, sigma=0.01, centre=centre, seed=1)
    refined = refine(model, (X, Y), draws=1000, iterations=300, leapfrogs=6, progress=False)
    assert refined.has_converged
    assert 0.6 < refined.acceptance < 0.99
    own = torch.tensor([0.8, 0.8, 0.3], dtype=torch.float64)
    posterior = exact(own if centre else torch.zeros_like(own))
    ws = torch.cat([refined.weights["weight"][:, 0], refined.weights["bias"]], 1)  # chains are independent
    whitened = torch.linalg.solve_triangular(posterior.scale_tril, (ws - posterior.mean).mT, upper=False).mT
    assert_mean(whitened, 0.0, "means")
    assert_variance(whitened, 1.0, "variances")
    assert_mean(whitened[:, [0, 0, 1]] * whitened[:, [1, 2, 2]], 0.0, "correlations")
    assert torch.equal(model.net.weight, torch.full_like(model.net.weight, 0.8))


@pytest.mark.statistical
@pytest.mark.parametrize("prior", [Laplace(0.7), ScaleMixture(0.5, 2.0, 0.3), LogDensity(lambda w: -w.abs() / 0.7)])
def test_any_prior_by_quadrature(prior):
    x, y = torch.ones(3, 1).double(), torch.tensor([[0.2], [0.9], [0.4]]).double()
    model = Bayesian(nn.Linear(1, 1, bias=False).double(), Gaussian(0.8), prior, seed=2)
    w = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    log_joint = prior.log_density(w) - (w[:, None] - y[:, 0]).square().sum(1) / (2 * 0.8**2)
    p = (log_joint - log_joint.logsumexp(0)).exp()
    mean = float((p * w).sum())
    variance = float((p * (w - mean) ** 2).sum())
    refined = refine(model, (x, y), draws=1000, iterations=200, leapfrogs=6, progress=False)
    assert_mean(refined.weights["weight"].flatten(), mean, "mean")
    assert_variance(refined.weights["weight"].flatten(), variance, "variance")


def test_batches_are_one_data_set():
    model = Bayesian(nn.Linear(2, 1).double(), Gaussian(0.5), PRIORS, seed=1)
    settings = {"draws": 5, "iterations": 8, "leapfrogs": 2, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, parts = (refine(model, data, **settings) for data in ((X, Y), [(X[:20], Y[:20]), (X[20:], Y[20:])]))
    for name, w in whole.weights.items():
        torch.testing.assert_close(parts.weights[name], w)


@pytest.mark.parametrize("family", [Mixture(2), Conditional(5)], ids=repr)
def test_other_families_and_likelihoods(family):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model = Bayesian(net, Categorical(), Normal(1.0), family=family, seed=0)
    refined = refine(model, (X, (Y[:, 0] > 0).long()), draws=20, iterations=200, leapfrogs=10, progress=False)
    assert refined.predict(X).probs.shape == (30, 2)
    assert refined.has_converged


def test_heads():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.linear(x)
            return h[:, :1], h[:, 1:]

    likelihood = Joint((Gaussian(0.5), Gaussian(0.3)))
    model = Bayesian(Heads().double(), likelihood, Normal(1.0), seed=0)
    with pytest.raises(ValueError, match="with a tensor of targets"):
        refine(model, [(X, (Y, Y))], progress=False)


def test_constant_weights_stay_constant():
    pruned = prune(Bayesian(nn.Linear(2, 1).double(), Gaussian(0.5), PRIORS, seed=1), 0.4)
    refined = refine(pruned, (X, Y), draws=20, iterations=200, leapfrogs=6, progress=False)
    for name, q in pruned.posterior.items():
        assert not refined.weights[name][:, ~q.random].any()
        assert (refined.weights[name][0] != refined.weights[name][1])[q.random].all()


def test_it_says_when_it_has_not_converged():
    model = Bayesian(nn.Linear(2, 1).double(), Gaussian(0.01), PRIORS, sigma=1.0, seed=1)
    with pytest.warns(UserWarning, match=r"not converged: split R-hat is .*, not below 1\.1"):
        refined = refine(model, (X, Y), draws=20, iterations=8, leapfrogs=1, progress=False)
    assert not refined.has_converged


def test_split_r_hat():
    values = torch.randn(40, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    halves = torch.cat([values[:20], values[20:]], 1)[..., 1]
    chains = halves.unbind(1)
    within = sum(float(chain.var()) for chain in chains) / 6
    between = float(torch.stack([chain.mean() for chain in chains]).var())
    assert split_r_hat(values[..., 1:]) == pytest.approx(math.sqrt(19 / 20 + between / within))
    values[:, 0, 0] += 9  # a chain that is elsewhere
    assert split_r_hat(values) > 3
    assert split_r_hat(torch.zeros(4, 3, 1)) == 1
    assert split_r_hat(torch.arange(3.0)[None, :, None].expand(4, 3, 1)) == math.inf
    for unknown in (math.nan, math.inf):
        values[0, 0, 0] = unknown
        assert split_r_hat(values) == math.inf


def test_chains_that_stay_have_not_converged():
    model = Bayesian(nn.Linear(2, 1).double(), Gaussian(0.5), PRIORS, seed=1)
    weights = model.ensemble(3).weights
    assert Refined(model.net, model.likelihood, weights, 0.8, 1.0).has_converged
    stuck = Refined(model.net, model.likelihood, weights, 0.0, 1.0)
    assert not stuck.has_converged
    assert repr(stuck).startswith("Refined(draws=3, acceptance=0.00, r_hat=1.00, ")
    assert repr(model.ensemble(3)).startswith("Ensemble(draws=3, ")


@pytest.mark.parametrize("unknown", [math.nan, math.inf])
def test_data_of_no_probability_are_refused_at_once(unknown):
    model = Bayesian(nn.Linear(2, 1).double(), Gaussian(0.5), PRIORS, seed=1)
    x = X.clone()
    x[3, 1] = unknown
    with pytest.raises(ValueError, match=r"'data' parameter of refine must be of a finite .* NaN or inf of 3 of 3"):
        refine(model, (x, Y), draws=3, iterations=10**9, progress=False)


@pytest.mark.filterwarnings("ignore")  # of chains that are too short
def test_a_tensor_that_the_network_keeps_is_usable_afterwards():
    class Keeping(nn.Linear):
        last = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    net = Keeping(2, 1).double().train()
    refine(Bayesian(net, Gaussian(0.5), PRIORS, seed=1), (X, Y), draws=3, iterations=20, progress=False)
    assert net.last.shape == Y.shape
    assert torch.equal(net.last + 1, net.last.detach().clone() + 1)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(net.last)
    assert net.training


def test_refused():
    recurrent = nn.LSTM(2, 1, batch_first=True).double()

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = recurrent

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x[:, None])[0][:, 0]

    with pytest.raises(ValueError, match=r"'model' parameter of refine must be of a network that torch\.vmap runs"):
        refine(Bayesian(Last(), Gaussian(0.5), seed=0), (X, Y), draws=3, progress=False)
    with pytest.raises(ValueError, match="'iterations' parameter of refine"):
        refine(Bayesian(nn.Linear(2, 1).double(), Gaussian(0.5)), (X, Y), iterations=7)
