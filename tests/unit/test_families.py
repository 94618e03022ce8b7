"""Families of posteriors: densities, draws, and that a full covariance is exact where the truth is Gaussian."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

from bayesbackprop import (
    Bayesian,
    Diagonal,
    FreeEnergy,
    FullCovariance,
    Gaussian,
    Laplace,
    LogDensity,
    LowRank,
    Normal,
    ScaleMixture,
    load,
    prune,
    save,
)
from bayesbackprop.families import Family, describe, from_description

pytestmark = pytest.mark.identities

FAMILIES = [LowRank(2), FullCovariance()]


def net(*, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)


def model(family: Family, prior=Normal(0.7), **arguments) -> Bayesian:  # noqa: B008
    made = Bayesian(net(), Gaussian(0.3), prior, sigma=0.2, family=family, seed=3, **arguments)
    with torch.no_grad():
        for joint in made.joint:
            joint += 0.1 * torch.randn(joint.shape, generator=torch.Generator().manual_seed(1), dtype=joint.dtype)
    return made


def exact(made: Bayesian) -> MultivariateNormal:
    """The posterior of the weights that are not constant."""
    random, mean, sigma = (
        torch.cat([getattr(q, name).detach().flatten() for q in made.posterior.values()])
        for name in ("random", "mu", "sigma")
    )
    joint = sigma[random, None] * made.joint[0].detach()[random]
    if isinstance(made.families[0][1], LowRank):
        return MultivariateNormal(mean[random], torch.diag(sigma[random] ** 2) + joint @ joint.mT)
    root = torch.diag(sigma[random]) + joint[:, random].tril(-1) / math.sqrt(len(sigma))
    return MultivariateNormal(mean[random], root @ root.mT)


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([w.flatten() for w in weights.values()])


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_complexity_is_the_density_of_the_draw(family):
    made = model(family)
    draw = made.draw(5)
    w = flat(draw.weights)
    expected = exact(made).log_prob(w) - Normal(0.7).log_density(w).sum()
    torch.testing.assert_close(draw.complexity(), expected)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_draws_have_the_covariance(family):
    made, many = model(family), 5000
    draws = made.ensemble(many).weights
    ws = torch.cat([w.flatten(1) for w in draws.values()], 1)
    found, wanted = torch.cov(ws.mT), exact(made).covariance_matrix
    # The variance of an entry of a sample covariance; 13 * 14 / 2 z-tests at 5.5 give a false alarm in 280,000 runs.
    deviation = ((wanted**2 + wanted.diagonal()[:, None] * wanted.diagonal()) / many).sqrt()
    assert ((found - wanted) / deviation).abs().max() < 5.5


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize("centre", [None, "net"])
def test_closed_form(family, centre):
    made = model(family, centre=centre)
    q = exact(made)
    mean = flat(dict(made.centre.named_buffers())) if centre else torch.zeros_like(q.mean)
    prior = MultivariateNormal(mean, 0.7**2 * torch.eye(len(q.mean), dtype=q.mean.dtype))
    torch.testing.assert_close(made.complexity_closed(), kl_divergence(q, prior))
    torch.testing.assert_close(made.draw(1, closed=True).complexity(), kl_divergence(q, prior))


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize("prior", [Normal(0.7), Laplace(0.5)], ids=repr)
def test_sampled_complexity_is_unbiased(family, prior):
    made = model(family, prior)
    with torch.no_grad():
        costs = torch.stack([made.draw(0, index).complexity() for index in range(1000)])
        z = (costs.mean() - made.complexity_closed()) / (costs.std() / 1000**0.5)
    assert abs(float(z)) < 5  # a false alarm in 1.7 million runs


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize("prior", [ScaleMixture(), LogDensity(lambda w: -w.abs().pow(1.5))], ids=["mixture", "own"])
def test_gradients(family, prior):
    made = model(family, prior)
    parameters = [*made.net.parameters(), *made.rho.parameters(), *made.joint]
    x, y = torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    objective = FreeEnergy(made, n=7)

    def cost(*tensors: Tensor) -> Tensor:
        return objective(x, y, step=2).as_subclass(Tensor)

    assert torch.autograd.gradcheck(cost, parameters)


@pytest.fixture
def regression() -> tuple[Tensor, Tensor, MultivariateNormal, Tensor]:
    """Inputs and targets of a linear regression, its exact posterior, and the logarithm of its evidence."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.tensor([[1.0, 0.9, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64) @ mixing
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.5 * torch.randn(30, 1, generator=generator)
    features = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], 1)
    precision = features.mT @ features / 0.25 + torch.eye(4, dtype=torch.float64)
    mean = torch.linalg.solve(precision, features.mT @ y / 0.25)[:, 0]
    marginal = MultivariateNormal(torch.zeros(30).double(), features @ features.mT + 0.25 * torch.eye(30).double())
    return x, y, MultivariateNormal(mean, torch.linalg.inv(precision)), marginal.log_prob(y[:, 0])


def test_full_covariance_is_exact_in_linear_regression(regression):
    x, y, posterior, log_evidence = regression
    made = Bayesian(nn.Linear(3, 1).double(), Gaussian(0.5), Normal(1.0), family=FullCovariance(), seed=0)
    root = torch.linalg.cholesky(posterior.covariance_matrix)
    with torch.no_grad():
        places = zip(made.posterior.values(), posterior.mean.split([3, 1]), root.diagonal().split([3, 1]), strict=True)
        for q, mean, sigma in places:
            q.mu.copy_(mean.view_as(q.mu))
            q.rho.copy_(torch.log(torch.expm1(sigma)).view_as(q.rho))
        made.joint[0].copy_(root / root.diagonal()[:, None] * math.sqrt(4))
    # log q(w) - log P(w) - log P(D|w) is the same at every draw: minus the logarithm of the evidence.
    for step in range(1, 6):
        torch.testing.assert_close(30 * FreeEnergy(made, n=30)(x, y, step=step).detach(), -log_evidence)


def test_training_finds_the_full_covariance(regression):
    x, y, posterior, _ = regression
    linear = nn.Linear(3, 1).double()
    with torch.no_grad():
        linear.weight[:], linear.bias[:] = posterior.mean[:3], posterior.mean[3]
    made = Bayesian(linear, Gaussian(0.5), Normal(1.0), sigma=0.1, family=FullCovariance(), seed=0)
    objective, steps = FreeEnergy(made, n=30, complexity="closed", draws=4), 1000
    optimiser = torch.optim.Adam(made.parameters(), 0.03)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    for _ in range(steps):
        optimiser.zero_grad()
        objective(x, y).backward()
        optimiser.step()
        schedule.step()
    best_diagonal = MultivariateNormal(posterior.mean, torch.diag(1 / posterior.precision_matrix.diagonal()))
    assert kl_divergence(best_diagonal, posterior) > 0.5
    assert kl_divergence(exact(made), posterior) < 0.05


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_constant_weights_stay_constant(family):
    pruned = prune(model(family), 0.5)
    random = torch.cat([q.random.flatten() for q in pruned.posterior.values()])
    objective = FreeEnergy(pruned, n=7)
    cost = objective(torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64))
    cost.backward()
    draws = flat(pruned.draw(1).weights)
    assert torch.equal(draws[~random], torch.zeros_like(draws[~random]))
    assert (draws[random] != 0).all()
    for q in pruned.posterior.values():
        assert q.mu.grad is not None
        assert not q.mu.grad[~q.random].any()
    # The density is that of what is left.
    expected = exact(pruned).log_prob(draws[random]) - Normal(0.7).log_density(draws[random]).sum()
    torch.testing.assert_close(pruned.draw(1).complexity(), expected)
    prior = MultivariateNormal(torch.zeros_like(draws[random]), 0.7**2 * torch.eye(int(random.sum())).double())
    torch.testing.assert_close(pruned.complexity_closed(), kl_divergence(exact(pruned), prior))


def test_groups_by_pattern():
    last, first = FullCovariance(), LowRank(1)
    made = Bayesian(net(), Gaussian(0.3), family={"2.*": last, "0.weight": first, "*": Diagonal()})
    assert [(names, family) for names, family in made.families] == [
        (["0.weight"], first),
        (["2.weight", "2.bias"], last),
    ]
    assert {entry.name: entry.estimator for entry in made.plan}["2.weight"] == "shared"
    assert "FullCovariance() of 2 parameters together" in made.report()
    made.predict(torch.randn(3, 2, dtype=torch.float64), draws=5)
    made.predict(torch.randn(3, 2, dtype=torch.float64), draws=5, estimator="local")


def test_an_estimator_for_weights_that_vary_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'estimator' .* must be left out, or 'shared' .*LowRank"):
        Bayesian(net(), Gaussian(0.3), family=LowRank(2), estimator="local")
    family = {"2.*": FullCovariance(), "*": Diagonal()}
    with pytest.raises(ValueError, match=r"\['2.weight', '2.bias'\].*\{'2.weight': 'shared', ..., '\*': 'flipout'\}"):
        Bayesian(net(), Gaussian(0.3), family=family, estimator="flipout")
    made = Bayesian(net(), Gaussian(0.3), family=family, estimator={"2.*": "shared", "*": "local"})
    assert [entry.estimator for entry in made.plan] == ["local", "local", "shared", "shared"]
    assert {entry.estimator for entry in Bayesian(net(), Gaussian(0.3), family=LowRank(2)).plan} == {"shared"}
    assert Bayesian(net(), Gaussian(0.3), family=LowRank(2), estimator="shared").families


def test_without_joint_noise_it_is_the_diagonal_one():
    x, y = torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    costs = [
        FreeEnergy(Bayesian(net(), Gaussian(0.3), sigma=0.2, family=family, seed=3), n=7)(x, y)
        for family in (Diagonal(), FullCovariance())
    ]
    torch.testing.assert_close(costs[0].detach(), costs[1].detach(), check_dtype=False)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_saved_and_loaded(family, tmp_path: Path):
    made = model(family)
    save(made, tmp_path / "model")
    again = load(tmp_path / "model", copy.deepcopy(net()))
    assert again.families == made.families
    x = torch.randn(4, 2, dtype=torch.float64)
    assert torch.equal(again.predict(x, draws=7).mean, made.predict(x, draws=7).mean)
    copied = copy.deepcopy(made)
    assert torch.equal(copied.predict(x, draws=7).mean, made.predict(x, draws=7).mean)


@pytest.mark.parametrize("family", [Diagonal(), *FAMILIES], ids=repr)
def test_described(family):
    assert from_description(describe(family)) == family


def test_refused():
    with pytest.raises(ValueError, match=r"'family' parameter of Bayesian must be a family for '0\.weight'"):
        Bayesian(net(), Gaussian(0.3), family="full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="FullCovariance for at most 8192 weights together"):
        Bayesian(nn.Linear(100, 100), Gaussian(0.3), family=FullCovariance())
    with pytest.raises(ValueError, match="'rank' parameter of LowRank"):
        LowRank(0)
    with pytest.raises(ValueError, match="'rank' parameter of LowRank must be at most the number of weights, 13"):
        Bayesian(net(), Gaussian(0.3), family=LowRank(14))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match="the same type and device"):
        Bayesian(mixed, Gaussian(0.3), family=LowRank(1))


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize("complexity", ["sampled", "closed"])
def test_narrow_types(family, complexity):
    made = Bayesian(net(dtype=torch.float32), Gaussian(0.3), Normal(0.7), sigma=0.2, family=family, seed=3)
    x, y = torch.randn(7, 2), torch.randn(7, 1)
    expected = FreeEnergy(made, n=7, complexity=complexity)(x, y, step=1).complexity
    narrow = FreeEnergy(made.bfloat16(), n=7, complexity=complexity)(x.bfloat16(), y.bfloat16(), step=1)
    narrow.backward()
    assert narrow.complexity.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.complexity.float(), expected, rtol=0.03, atol=0.1)


def test_param_groups_train_what_is_joint():
    made = model(LowRank(2))
    groups = made.param_groups(1e-3, rho_lr=1e-2, weight_decay=0.1)
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert rates[id(made.joint[0])] == (1e-2, 0.0)
