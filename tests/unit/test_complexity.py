"""The complexity cost: the closed form, its sum, and how the minibatches of an epoch share it."""

import math

import pytest
import torch
from torch import distributions
from torch.func import vmap

from bayesbackprop import FreeEnergy, Laplace, Normal, ScaleMixture
from bayesbackprop.complexity import closed, geometric, sampled
from bayesbackprop.posterior import WeightPosterior
from complexities import CAUCHY, linear, sampled_costs

pytestmark = pytest.mark.identities

REFERENCES = {
    Normal: lambda prior: distributions.Normal(0.0, torch.tensor(prior.sigma, dtype=torch.float64)),
    Laplace: lambda prior: distributions.Laplace(0.0, torch.tensor(prior.scale, dtype=torch.float64)),
}


@pytest.mark.parametrize("prior", [Normal(0.5), Laplace(0.5), Normal(1e-3), Laplace(1e-3)], ids=repr)
def test_closed_form_equals_torch_distributions_and_is_not_negative(prior):
    mu, rho = 2 * torch.randn(2, 1000, dtype=torch.float64)
    q = WeightPosterior(mu, 3 * rho)
    expected = distributions.kl_divergence(distributions.Normal(mu, q.sigma), REFERENCES[type(prior)](prior))
    each = vmap(lambda mu, rho: closed(WeightPosterior(mu, rho), prior, None))(*q)
    torch.testing.assert_close(each, expected, rtol=1e-8, atol=1e-8)
    assert (each >= 0).all()


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


MIXTURES = [
    ScaleMixture(0.75, math.exp(-1), math.exp(-7)),
    ScaleMixture(0.25, 1.0, math.exp(-8)),
    ScaleMixture(0.25, math.exp(-2), math.exp(-6)),
    ScaleMixture(0.5, 1.0, 0.4),
    ScaleMixture(0.9, 0.01, 1.0),  # the first component is the narrow one
]


@pytest.mark.parametrize("prior", MIXTURES, ids=repr)
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0, 3.0, 10.0, 30.0])
def test_closed_form_of_a_mixture_is_the_integral(prior, ratio):
    """To 1 % of the bump, to 0.2 % where the posterior is as wide as the spike, to 0.05 % from three times on."""
    narrow = min(prior.sigma1, prior.sigma2)
    mu = torch.linspace(0, 8, 17, dtype=torch.float64) * narrow * max(1.0, ratio)
    sigma = torch.full_like(mu, ratio * narrow)
    z = torch.linspace(-9, 9, 100_001, dtype=torch.float64)
    weights = torch.exp(-0.5 * z.square())
    weights /= weights.sum()
    integral = torch.stack([(weights * prior.log_density(m + s * z)).sum() for m, s in zip(mu, sigma, strict=True)])
    height = float(prior.log_density(torch.zeros((), dtype=torch.float64))) - math.log(
        prior.wide[1] / prior.wide[0] / math.sqrt(2 * math.pi)
    )
    errors = (prior.expected_log_density(mu, sigma) - integral).abs()
    assert float(errors.max()) <= (1e-2 if ratio < 1 else 2e-3 if ratio < 3 else 5e-4) * height


@pytest.mark.parametrize(
    ("mixture", "alone"),
    [(ScaleMixture(0.0, 1.0, 0.1), 0.1), (ScaleMixture(1.0, 2.0, 0.1), 2.0), (ScaleMixture(0.3, 0.5, 0.5), 0.5)],
)
def test_closed_form_of_a_mixture_of_one_component(mixture, alone):
    q = WeightPosterior(*torch.randn(2, 100, dtype=torch.float64))
    torch.testing.assert_close(closed(q, mixture, None), closed(q, Normal(alone), None))


@pytest.mark.parametrize("prior", [CAUCHY], ids=repr)
def test_closed_form_is_refused_where_there_is_none(prior):
    model = linear({"bias": prior, "*": Normal()})
    for ask in (model.complexity_closed, lambda: FreeEnergy(model, n=10, complexity="closed")):
        with pytest.raises(ValueError, match="parameter of FreeEnergy must be 'sampled' where the prior is") as error:
            ask()
        assert repr(prior) in str(error.value)
        assert "the library's own have one" in str(error.value)


# --- the shares of the minibatches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 2, 3, 10, 50])
def test_geometric_weights_are_the_papers(batches):
    literal = [2 ** (batches - i) / (2**batches - 1) for i in range(1, batches + 1)]
    torch.testing.assert_close(geometric(batches), torch.tensor(literal, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("batches", [1, 2, 390, 1100, 100_000])
def test_geometric_weights_sum_to_one_without_overflow(batches):
    weights = geometric(batches)
    assert weights.shape == (batches,)
    assert ((weights >= 0) & (weights <= 1)).all()
    assert float(weights.sum()) == pytest.approx(1, rel=1e-14)
    if batches >= 390:
        assert float(weights[0]) == 0.5
        assert torch.equal(weights[1:300] * 2, weights[:299])


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
        (torch.tensor(1.0), "Got a tensor of shape [] and type torch.float32 instead."),
        ("geo", "'uniform', 'geometric' or a sequence that sums to 1. Got 'geo' instead."),
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


@pytest.mark.parametrize("batch_size", [None, 0, -1, 11, 2.0, True])
def test_bad_batch_size_is_refused(batch_size):
    with pytest.raises(ValueError, match=r"The 'batch_size' parameter of FreeEnergy must be .* Got .* instead."):
        FreeEnergy(linear(Normal()), n=10, minibatch_weights="geometric", batch_size=batch_size)
