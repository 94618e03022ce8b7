"""Mixtures of diagonal posteriors: their density, whose turn it is, where they start."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as Choice
from torch.distributions import Independent, MixtureSameFamily
from torch.distributions import Normal as TorchNormal

from bayesbackprop import (
    Bayesian,
    Diagonal,
    FreeEnergy,
    Gaussian,
    Mixture,
    Normal,
    ScaleMixture,
    load,
    prune,
    save,
    sparse,
)
from bayesbackprop.families import describe, from_description
from commands import bbb

pytestmark = pytest.mark.identities

X = torch.randn(7, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
Y = torch.randn(7, 1, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def model(components: int = 3, prior=Normal(0.7)) -> Bayesian:  # noqa: B008
    made = Bayesian(net(), Gaussian(0.3), prior, sigma=0.2, family=Mixture(components), seed=3)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        made.joint[0] += 0.3 * torch.randn(made.joint[0].shape, generator=generator, dtype=torch.float64)
    return made


def exact(made: Bayesian) -> MixtureSameFamily:
    means, rhos = made.joint[0].detach()
    components = Independent(TorchNormal(means, nn.functional.softplus(rhos)), 1)
    return MixtureSameFamily(Choice(torch.ones(len(means))), components)


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([w.flatten() for w in weights.values()])


@pytest.mark.parametrize("prior", [Normal(0.7), ScaleMixture()], ids=repr)
def test_complexity_is_the_density_of_the_draw(prior):
    made = model(prior=prior)
    for index in range(4):
        draw = made.draw(5, index)
        w = flat(draw.weights)
        expected = exact(made).log_prob(w.detach()) - prior.log_density(w).sum()
        torch.testing.assert_close(draw.complexity(), expected)


def test_components_take_turns():
    made = model()
    with torch.no_grad():
        made.joint[0][1] = -30  # so narrow that a draw is its mean
    means = made.joint[0][0].detach()
    for step, index in ((0, 0), (0, 1), (0, 5), (1, 0), (2, 2)):
        torch.testing.assert_close(flat(made.draw(step, index).weights).detach(), means[(step + index) % 3])
    ws = torch.cat([w.flatten(1) for w in made.ensemble(6).weights.values()], 1)
    torch.testing.assert_close(ws, means.repeat(2, 1))


def test_draws_have_the_moments():
    made, many = model(), 6000
    ws = torch.cat([w.flatten(1) for w in made.ensemble(many).weights.values()], 1)
    moments = made.engine().moments().values()
    mean, deviation = (flat(dict(enumerate(part))).detach() for part in zip(*moments, strict=True))
    torch.testing.assert_close(mean, exact(made).mean)
    torch.testing.assert_close(deviation**2, exact(made).variance)
    # 26 z-tests at 5.5 give a false alarm in a million runs; components in turn have less noise than at random.
    assert ((ws.mean(0) - mean).abs() / (deviation / many**0.5)).max() < 5.5
    kurtosis = ((ws - mean) ** 4).mean(0) / deviation**4 - 1
    assert ((ws.var(0) / deviation**2 - 1).abs() / (kurtosis / many).sqrt()).max() < 5.5


def test_each_starts_elsewhere_with_the_same_numbers():
    made = Bayesian(net(), Gaussian(0.3), sigma=lambda mu: mu.abs() + 0.1, family=Mixture(3), seed=3)
    own = flat(dict(made.net.named_parameters()))
    means, rhos = made.joint[0].detach()
    assert torch.equal(means[0], own.detach())
    sigma = nn.functional.softplus(rhos)
    torch.testing.assert_close(sigma, means.abs() + 0.1)  # which goes with its mean
    for other in means[1:]:
        for one, shuffled in zip(own.split([6, 3, 3, 1]), other.split([6, 3, 3, 1]), strict=True):
            assert torch.equal(one.sort().values, shuffled.sort().values)
        assert not torch.equal(other, own)
    assert not torch.equal(means[1], means[2])


def test_constant_weights_stay_where_they_are():
    embedding = nn.Embedding(5, 2, padding_idx=1).double()
    made = Bayesian(embedding, Gaussian("per-input"), family=Mixture(4), sigma=0.1, seed=0)
    assert not made.ensemble(8).weights["weight"][:, 1].any()
    objective = FreeEnergy(made, n=3, draws=4)
    objective(torch.tensor([0, 1, 4]), torch.zeros(3, 1).double()).backward()
    assert not made.joint[0].grad[..., 2:4].any()
    assert made.joint[0].grad[..., :2].all()


@pytest.mark.parametrize("draws", [1, 3])
def test_gradients(draws):
    made = model()
    objective = FreeEnergy(made, n=7, draws=draws)
    assert torch.autograd.gradcheck(lambda _: objective(X, Y, step=2).as_subclass(Tensor), [made.joint[0]])


@pytest.mark.equivalence
def test_draws_at_once_are_draws_one_by_one():
    made = model()
    together = FreeEnergy(made, n=7, draws=4)(X, Y, step=4)
    singles = [made.draw(4, index) for index in range(4)]
    torch.testing.assert_close(together.complexity, torch.stack([draw.complexity() for draw in singles]).mean())
    each = torch.stack([made.likelihood.cost(draw(X), Y) for draw in singles]).mean()
    torch.testing.assert_close(together.likelihood, each)


def test_of_one_component_it_is_the_diagonal_one():
    costs = [
        FreeEnergy(Bayesian(net(), Gaussian(0.3), sigma=0.2, family=family, seed=3), n=7)(X, Y).detach()
        for family in (Diagonal(), Mixture(1))
    ]
    torch.testing.assert_close(costs[0], costs[1], check_dtype=False)


def test_saved_shown_and_reported(tmp_path: Path):
    made = model()
    save(made, tmp_path / "model")
    again = load(tmp_path / "model", net())
    assert again.families == made.families
    for other in (again, copy.deepcopy(made)):
        assert torch.equal(other.predict(X, draws=7).mean, made.predict(X, draws=7).mean)
    assert from_description(describe(Mixture(3))) == Mixture(3)
    assert "Mixture(components=3) of 4 parameters together" in " ".join(bbb("show", tmp_path / "model").stdout.split())
    found = made.engine().moments()["0.weight"].deviation.detach().median()
    assert f"{float(found):.3g}" in made.report()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: FreeEnergy(model(), n=7, complexity="closed"), "'sampled' for Mixture.*no closed form"),
        (lambda: model().complexity_closed(), "no closed form"),
        (lambda: prune(model(), 0.5), "of prune must be one whose mean is a network.* Got Mixture"),
        (lambda: sparse(model()), "of sparse must be one whose mean is a network"),
        (lambda: model().predict_mean(X), "whose mean is a network that predicts"),
        (lambda: model()(X), "whose mean is a network that predicts"),
        (lambda: Mixture(0), "'components' parameter of Mixture must be an int in"),
    ],
)
def test_refused(made, says):
    with pytest.raises(ValueError, match=says):
        made()
