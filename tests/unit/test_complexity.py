"""The complexity cost: sampled = closed, the paper's gradients (3) and (4), and how minibatches share it."""

import math

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.func import vmap

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Gaussian, Laplace, LogDensity, Normal, ScaleMixture
from bayesbackprop.complexity import closed, geometric, sampled
from bayesbackprop.posterior import WeightPosterior
from ztests import assert_mean

identities = pytest.mark.identities
equivalence = pytest.mark.equivalence
statistical = pytest.mark.statistical

CAUCHY = LogDensity(lambda w: -torch.log1p(w.square()) - math.log(math.pi), name="Cauchy")
REFERENCES = {
    Normal: lambda prior: distributions.Normal(0.0, torch.tensor(prior.sigma, dtype=torch.float64)),
    Laplace: lambda prior: distributions.Laplace(0.0, torch.tensor(prior.scale, dtype=torch.float64)),
}


class Various:
    """A different sigma for each weight."""

    def __call__(self, mu: Tensor) -> Tensor:
        return torch.linspace(0.1, 0.6, mu.numel(), dtype=mu.dtype).reshape(mu.shape)


def linear(prior, sigma=0.3, centre=None, **options) -> Bayesian:
    """A small network around which the prior is centred or not; the centre is then away from the mean."""
    net = nn.Linear(3, 2).double()
    if centre == "elsewhere":
        centre = {name: torch.randn_like(mu) for name, mu in net.named_parameters()}
    return Bayesian(net, Gaussian(0.5), prior, sigma=sigma, centre=centre, seed=0, **options)


def sampled_costs(model: Bayesian, draws: int) -> Tensor:
    with torch.no_grad():
        return vmap(lambda index: model.draw(index=index).complexity())(torch.arange(draws))


# --- sampled and closed -----------------------------------------------------------------------------------------------


@statistical
@pytest.mark.parametrize("sigma", [1e-4, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("centre", [None, "net", "elsewhere"])
@pytest.mark.parametrize("prior", [Normal(0.6), Laplace(0.5)], ids=repr)
def test_sampled_cost_averages_to_the_closed_form(prior, centre, sigma):
    model = linear(prior, sigma, centre)
    assert_mean(sampled_costs(model, 20_000), model.complexity_closed().item(), f"{prior}, sigma {sigma}")


@statistical
@pytest.mark.parametrize("sigma", [1e-3, 0.05, 1.0])
@pytest.mark.parametrize("prior", [ScaleMixture(0.25, 1.0, 0.01), ScaleMixture(), CAUCHY], ids=repr)
def test_sampled_cost_averages_to_the_integral(prior, sigma):
    model = linear(prior, sigma, "elsewhere")
    eps = torch.linspace(-10, 10, 100_001, dtype=torch.float64)
    density = torch.exp(-eps.square() / 2) / math.sqrt(2 * math.pi)
    expected = 0.0
    for name, q in model.posterior.items():
        w = (q.mu - model.centre.get_buffer(name)).detach().unsqueeze(-1) + sigma * eps
        log_q = -eps.square() / 2 - math.log(sigma * math.sqrt(2 * math.pi))
        expected += float(torch.trapezoid(density * (log_q - prior.log_density(w)), eps).sum())
    assert_mean(sampled_costs(model, 20_000), expected, f"{prior}, sigma {sigma}")


@identities
@pytest.mark.parametrize("prior", [Normal(0.5), Laplace(0.5), Normal(1e-3), Laplace(1e-3)], ids=repr)
def test_closed_form_equals_torch_distributions_and_is_not_negative(prior):
    mu, rho = 2 * torch.randn(2, 1000, dtype=torch.float64)
    q = WeightPosterior(mu, 3 * rho)
    expected = distributions.kl_divergence(distributions.Normal(mu, q.sigma), REFERENCES[type(prior)](prior))
    each = vmap(lambda mu, rho: closed(WeightPosterior(mu, rho), prior, None))(*q)
    torch.testing.assert_close(each, expected, rtol=1e-8, atol=1e-8)
    assert (each >= 0).all()


@identities
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rho", [-1000.0, -100.0, -60.0, -20.0])
@pytest.mark.parametrize("prior", [Normal(0.5), Laplace(0.5)], ids=repr)
def test_closed_form_of_an_ever_narrower_posterior(prior, rho, dtype):
    """For sigma -> 0 the cost is -log(sigma) - H(0, 1) - log P(mu), however little sigma is left in floats."""
    mu = torch.tensor([-2.0, 0.0, 1.0], dtype=dtype, requires_grad=True)
    at = torch.full_like(mu, rho, requires_grad=True)
    cost = closed(WeightPosterior(mu, at), prior, None)
    slope_mu, slope_rho = torch.autograd.grad(cost, (mu, at))
    w = mu.detach().requires_grad_()
    log_p = prior.log_density(w).sum()
    expected = 3 * (-rho - 0.5 * math.log(2 * math.pi * math.e)) - log_p.item()
    assert cost.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(slope_mu, -torch.autograd.grad(log_p, w)[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope_rho, torch.full_like(mu, -1), rtol=1e-5, atol=0)


@identities
@pytest.mark.parametrize("sigma", [1e-6, 0.1, 10.0])
@pytest.mark.parametrize("centred", [True, False])
def test_cost_of_the_prior_itself_is_zero_in_every_draw(sigma, centred):
    model = linear(Normal(sigma), sigma, "net" if centred else None)
    if not centred:
        with torch.no_grad():
            for q in model.posterior.values():
                q.mu.zero_()
    assert abs(model.complexity_closed().item()) < 1e-12
    # w - centre is exact to 1e-16 of w, so eps to 1e-16 / sigma
    assert sampled_costs(model, 1000).abs().max() < 1e-12 + 1e-14 / sigma


@identities
def test_cost_is_summed_over_weights_and_parameters():
    model = linear(Normal(0.7))
    draw, expected = model.draw(3), 0.0
    for name, q in model.posterior.items():
        w = draw.weights[name]
        difference = distributions.Normal(q.mu, q.sigma).log_prob(w) - Normal(0.7).log_density(w)
        expected += difference.sum()
        eps = (w - q.mu) / q.sigma
        torch.testing.assert_close(sampled(q, Normal(0.7), None, w, eps), difference.sum())
    torch.testing.assert_close(draw.complexity(), expected)


@identities
@pytest.mark.parametrize("prior", [ScaleMixture(), CAUCHY], ids=repr)
def test_closed_form_is_refused_where_there_is_none(prior):
    model = linear({"bias": prior, "*": Normal()})
    for ask in (model.complexity_closed, lambda: FreeEnergy(model, n=10, complexity="closed")):
        with pytest.raises(ValueError, match="parameter of FreeEnergy must be 'sampled' where the prior is") as error:
            ask()
        assert repr(prior) in str(error.value)
        assert "Normal and Laplace have one" in str(error.value)


# --- gradients --------------------------------------------------------------------------------------------------------


@equivalence
@pytest.mark.parametrize("draws", [1, 3])
def test_gradients_are_the_papers(draws):
    """(3) and (4) of f(w, theta) = log q(w|theta) - log P(w) P(D|w), each derivative written by hand."""
    noise, n = 0.5, 7
    prior = ScaleMixture(0.25, 1.0, 0.05)
    x, y = torch.randn(n, 3).double(), torch.randn(n, 1).double()
    model = Bayesian(nn.Linear(3, 1, bias=False).double(), Gaussian(noise), prior, sigma=Various(), seed=2)
    cost = FreeEnergy(model, n=n, draws=draws)(x, y)
    mu, rho = model.posterior["weight"]
    autograd_mu, autograd_rho = torch.autograd.grad(n * cost.total, (mu, rho))

    delta_mu, delta_rho = [], []
    for k in range(draws):
        w = model.draw(step=1, index=k).weights["weight"].detach()
        m, r = mu.detach(), rho.detach()
        sigma = torch.log1p(torch.exp(r))
        eps = (w - m) / sigma
        slab = 0.25 * torch.exp(-(w**2) / 2) / 1.0
        spike = 0.75 * torch.exp(-(w**2) / (2 * 0.05**2)) / 0.05
        dlog_prior = -w * (slab / 1.0**2 + spike / 0.05**2) / (slab + spike)
        dlog_likelihood = ((y - x @ w.T) / noise**2).T @ x
        df_dw = -eps / sigma - dlog_prior - dlog_likelihood
        df_dmu = eps / sigma
        df_drho = (eps**2 - 1) / sigma / (1 + torch.exp(-r))
        delta_mu.append(df_dw + df_dmu)  # (3)
        delta_rho.append(df_dw * eps / (1 + torch.exp(-r)) + df_drho)  # (4)
    torch.testing.assert_close(autograd_mu, torch.stack(delta_mu).mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(autograd_rho, torch.stack(delta_rho).mean(0), rtol=1e-9, atol=1e-9)


@equivalence
@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
@pytest.mark.parametrize(
    ("prior", "complexity", "likelihood"),
    [
        (ScaleMixture(0.25, 1.0, 0.1), "sampled", Categorical()),
        (Normal(0.5), "closed", Gaussian("per-input")),
        (Laplace(0.5), "sampled", Gaussian("learnt")),
        (Laplace(0.5), "closed", Gaussian(0.3)),
        (CAUCHY, "sampled", Categorical()),
    ],
    ids=repr,
)
def test_gradients_equal_finite_differences(prior, complexity, likelihood, estimator):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    model = Bayesian(net, likelihood, prior, sigma=0.3, estimator=estimator, centre="net", seed=1).double()
    x = torch.randn(5, 2).double()
    y = net(x).detach().argmax(1) if isinstance(likelihood, Categorical) else torch.randn(5, 2).double()
    if isinstance(likelihood, Gaussian) and likelihood.noise == "per-input":
        y = y[:, :1]
    free_energy = FreeEnergy(model, n=20, draws=2, complexity=complexity)

    def total() -> Tensor:
        free_energy.step.zero_()  # the noise held fixed
        return free_energy(x, y).total

    parameters = list(model.parameters())
    gradients = torch.autograd.grad(total(), parameters)
    h = 1e-5
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            differences = torch.empty_like(gradient)
            for i in range(parameter.numel()):
                at = parameter.view(-1)[i]
                start = at.clone()
                above, below = (total().item() for value in (start + h, start - h) if at.copy_(value) is not None)
                at.copy_(start)
                differences.view(-1)[i] = (above - below) / (2 * h)
            torch.testing.assert_close(gradient, differences, rtol=1e-6, atol=1e-7)


@statistical
@pytest.mark.parametrize(
    ("complexity", "estimator"),
    [("sampled", "shared"), ("sampled", "local"), ("sampled", "flipout"), ("closed", "shared")],
)
def test_gradients_are_unbiased(complexity, estimator):
    """Against the exact free energy of a linear model with Gaussian noise."""
    noise, n = 0.7, 6
    x, y = torch.randn(n, 3).double(), torch.randn(n, 2).double()
    model = Bayesian(nn.Linear(3, 2).double(), Gaussian(noise), Normal(0.8), sigma=0.4, estimator=estimator, seed=4)
    posterior = model.posterior
    thetas = [theta for q in posterior.values() for theta in q]
    weight, bias = posterior["weight"], posterior["bias"]
    squares = (y - x @ weight.mu.T - bias.mu).square() + x.square() @ weight.sigma.square().T + bias.sigma.square()
    exact = (squares / (2 * noise**2) + math.log(noise * math.sqrt(2 * math.pi))).sum()
    for q in posterior.values():
        exact = (
            exact
            + distributions.kl_divergence(
                distributions.Normal(q.mu, q.sigma), distributions.Normal(0.0, torch.tensor(0.8).double())
            ).sum()
        )
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(exact / n, thetas)])

    free_energy = FreeEnergy(model, n=n, complexity=complexity)
    totals, gradients = [], []
    for _ in range(800):
        cost = free_energy(x, y)
        totals.append(cost.total.detach())
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(cost.total, thetas)]))
    assert_mean(torch.stack(totals), exact.item() / n, "free energy")
    assert_mean(torch.stack(gradients), expected, "gradients")


# --- the shares of the minibatches ------------------------------------------------------------------------------------


@identities
@pytest.mark.parametrize("batches", [1, 2, 3, 10, 50])
def test_geometric_weights_are_the_papers(batches):
    literal = [2 ** (batches - i) / (2**batches - 1) for i in range(1, batches + 1)]
    torch.testing.assert_close(geometric(batches), torch.tensor(literal, dtype=torch.float64), rtol=1e-14, atol=0)


@identities
@pytest.mark.parametrize("batches", [1, 2, 390, 1100, 100_000])
def test_geometric_weights_sum_to_one_without_overflow(batches):
    weights = geometric(batches)
    assert weights.shape == (batches,)
    assert ((weights >= 0) & (weights <= 1)).all()
    assert float(weights.sum()) == pytest.approx(1, rel=1e-14)
    if batches >= 390:
        assert float(weights[0]) == 0.5
        assert torch.equal(weights[1:300] * 2, weights[:299])


@identities
def test_free_energy_uses_the_weights_it_is_given():
    x, y = torch.zeros(4, 3).double(), torch.zeros(4, 2).double()
    for weights, expected in [
        ("geometric", [4 / 7, 2 / 7, 1 / 7]),
        ([0.2, 0.0, 0.8], [0.2, 0.0, 0.8]),
        ((1, 0, 0), [1, 0, 0]),
        (torch.tensor([0.25, 0.25, 0.5]), [0.25, 0.25, 0.5]),
        ([0.5, 0.5], [0.5, 0.5]),  # as many as drop_last leaves
    ]:
        free_energy = FreeEnergy(linear(Normal()), n=10, minibatch_weights=weights, batch_size=4)
        for batch, pi in enumerate(expected):
            examples = 2 if batch == 2 else 4
            cost = free_energy(x[:examples], y[:examples], batch=batch)
            assert cost.complexity_weight.item() == pytest.approx(pi / examples, rel=1e-12)


@identities
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.4, 0.2], "a sequence that sums to 1. Got a sum of 1.1 instead."),
        ([0.3, 0.3, 0.3999], "a sequence that sums to 1. Got a sum of 0.9999 instead."),
        ([1.5, -0.5, 0.0], "a float in [0, 1]. Got 1.5 instead."),
        ([-0.5, 0.5, 1.0], "a float in [0, 1]. Got -0.5 instead."),
        ([float("nan"), 0.5, 0.5], "a float in [0, 1]. Got nan instead."),
        ([float("inf"), 0.0, 0.0], "a float in [0, 1]. Got inf instead."),
        ([0.25] * 4, "a sequence of 3 numbers, one for each minibatch of an epoch. Got shape [4] instead."),
        ([1.0], "a sequence of 3 numbers, one for each minibatch of an epoch. Got shape [1] instead."),
        ([], "a sequence of 3 numbers, one for each minibatch of an epoch. Got shape [0] instead."),
        (torch.full((3, 1), 1 / 3), "Got shape [3, 1] instead."),
        (torch.full((3, 2), 1 / 6), "Got shape [3, 2] instead."),
        (torch.tensor(1.0), "Got tensor(1.) instead."),
        ("exponential", "'uniform', 'geometric' or a sequence that sums to 1. Got 'exponential' instead."),
        (None, "Got None instead."),
        (0.5, "Got 0.5 instead."),
        (["a", "b", "c"], "Got ['a', 'b', 'c'] instead."),
    ],
    ids=repr,
)
def test_bad_minibatch_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match="The 'minibatch_weights' parameter of FreeEnergy must be") as error:
        FreeEnergy(linear(Normal()), n=10, minibatch_weights=weights, batch_size=4)
    assert message in str(error.value)


@identities
@pytest.mark.parametrize("batch_size", [None, 0, -1, 11, 2.0, True])
def test_bad_batch_size_is_refused(batch_size):
    with pytest.raises(ValueError, match=r"The 'batch_size' parameter of FreeEnergy must be .* Got .* instead."):
        FreeEnergy(linear(Normal()), n=10, minibatch_weights="geometric", batch_size=batch_size)
