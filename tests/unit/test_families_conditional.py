"""The conditional family: exact in linear regression, and its densities layer by layer in networks."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

from bayesbackprop import (
    Bayesian,
    Conditional,
    Diagonal,
    FreeEnergy,
    Gaussian,
    Normal,
    ScaleMixture,
    fit,
    load,
    prune,
    save,
    sparse,
)
from bayesbackprop.diagnostics import diagnose
from bayesbackprop.families import describe, from_description
from commands import bbb

pytestmark = pytest.mark.identities

PRIORS = {"0.weight": Normal(1.5), "*.bias": Normal(0.7), "2.weight": Normal(0.4)}
X = torch.randn(9, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
Y = torch.randn(9, 1, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def model(a_net: nn.Module | None = None, prior=PRIORS, family: Conditional | None = None, **settings) -> Bayesian:
    family = family or Conditional(X[:4])
    made = Bayesian(net() if a_net is None else a_net, Gaussian("per-input"), prior, family=family, seed=3, **settings)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        made.joint[0] += 0.5 * torch.randn(made.joint[0].shape, generator=generator, dtype=torch.float64)
    return made


def rows(z: Tensor, v: Tensor, log_precision: Tensor, scale: Tensor, centre: Tensor) -> list[MultivariateNormal]:
    """The exact posterior of each row of weights of a layer, by the equations of a regression on v - z centre."""
    precision = torch.diag(scale**-2) + z.mT @ torch.diag(log_precision.exp()) @ z
    shift = torch.linalg.solve(precision, z.mT @ (log_precision.exp()[:, None] * v))
    return [MultivariateNormal(c + m, precision_matrix=precision) for c, m in zip(centre, shift.mT, strict=True)]


def layers(
    made: Bayesian, weights: dict[str, Tensor]
) -> list[tuple[Tensor, list[MultivariateNormal], MultivariateNormal]]:
    """Of each layer of ``net()`` at a draw: its rows, their posteriors given the layer below, and the prior of one."""
    joint = made.joint[0].detach()
    h, v1, l1, v2, l2 = joint.split([2, 3, 1, 2, 1], 1)
    centres = dict(made.centre.named_buffers()) if made.has_centre else {}
    found = []
    for number, v, log_precision in ((0, v1, l1), (2, v2, l2)):
        names = f"{number}.weight", f"{number}.bias"
        z = torch.cat([h, torch.ones(len(h), 1, dtype=h.dtype)], 1)
        scale = torch.tensor([PRIORS["0.weight" if number == 0 else "2.weight"].sigma] * h.shape[1] + [0.7]).to(h)
        w = torch.cat([weights[names[0]], weights[names[1]][:, None]], 1).detach()
        centre = torch.cat([centres[names[0]], centres[names[1]][:, None]], 1) if centres else torch.zeros_like(w)
        prior = [MultivariateNormal(c, torch.diag(scale**2)) for c in centre]
        found.append((w, rows(z, v, log_precision[:, 0], scale, centre), prior))
        h = (z @ w.mT).tanh()
    return found


@pytest.mark.parametrize("centre", [None, "net"])
def test_complexity_is_the_density_of_the_draw_layer_by_layer(centre):
    made = model(centre=centre)
    draw = made.draw(5)
    expected = sum(
        q.log_prob(row) - p.log_prob(row)
        for w, posteriors, priors in layers(made, draw.weights)
        for row, q, p in zip(w, posteriors, priors, strict=True)
    )
    torch.testing.assert_close(draw.complexity().detach(), expected)


@pytest.mark.parametrize("centre", [None, "net"])
def test_closed_is_the_kl_of_each_layer_given_those_below(centre):
    made = model(centre=centre)
    draw = made.draw(5, closed=True)
    expected = sum(
        kl_divergence(q, p)
        for _, posteriors, priors in layers(made, draw.weights)
        for q, p in zip(posteriors, priors, strict=True)
    )
    torch.testing.assert_close(draw.complexity().detach(), expected)


def test_sampled_and_closed_have_the_same_mean():
    made, many = model(), 4000
    with torch.no_grad():
        _, costs = made.engine().joints[0].draw(made._key(0, 0, None), many)
        difference = costs(False) - costs(True)
    assert abs(float(difference.mean() / (difference.std() / many**0.5))) < 5  # a false alarm in 1.7 million runs


def test_it_is_exact_in_linear_regression():
    linear = nn.Linear(2, 1).double()
    noise, priors = 0.3, {"weight": Normal(1.5), "bias": Normal(0.7)}
    made = Bayesian(linear, Gaussian(noise), priors, family=Conditional(X), seed=0)
    with torch.no_grad():
        made.joint[0][:, :2], made.joint[0][:, 2:3] = X, Y
        made.joint[0][:, 3] = -2 * torch.tensor(noise).log()
    z = torch.cat([X, torch.ones(9, 1, dtype=torch.float64)], 1) * torch.tensor([1.5, 1.5, 0.7])
    evidence = MultivariateNormal(torch.zeros(9).double(), z @ z.mT + noise**2 * torch.eye(9)).log_prob(Y[:, 0])
    # log q(w) - log P(w) - log P(D|w) is the same at every draw: minus the logarithm of the evidence.
    for step in range(1, 6):
        torch.testing.assert_close(9 * FreeEnergy(made, n=9)(X, Y, step=step).detach(), -evidence)
    assert diagnose(made, (X, Y), draws=25).free_energy.mean == pytest.approx(-float(evidence))


@pytest.mark.learning
def test_training_finds_the_exact_posterior_of_linear_regression():
    made = Bayesian(nn.Linear(2, 1).double(), Gaussian(0.3), Normal(1.0), family=Conditional(20), seed=0)
    z = torch.cat([X, torch.ones(9, 1, dtype=torch.float64)], 1)
    evidence = MultivariateNormal(torch.zeros(9).double(), z @ z.mT + 0.09 * torch.eye(9)).log_prob(Y[:, 0])
    objective, steps = FreeEnergy(made, n=9, complexity="closed", draws=8), 400
    optimiser = torch.optim.Adam(made.parameters(), 0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    before = [parameter.detach().clone() for parameter in (*made.net.parameters(), *made.rho.parameters())]
    fit(objective, [(X, Y)] * steps, epochs=1, optimiser=optimiser, scheduler=rate)
    found = diagnose(made, (X, Y), draws=400).free_energy
    assert 0 <= found.mean + float(evidence) + 5 * found.standard_error < 0.2
    # Mean and spread of the network's own are only where it started.
    after = (*made.net.parameters(), *made.rho.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("complexity", ["sampled", "closed"])
def test_gradients(complexity):
    made = model()
    objective = FreeEnergy(made, n=9, complexity=complexity, draws=2)
    assert torch.autograd.gradcheck(lambda _: objective(X, Y, step=2).as_subclass(Tensor), [made.joint[0]])


@pytest.mark.equivalence
@pytest.mark.parametrize("complexity", ["sampled", "closed"])
def test_draws_at_once_are_draws_one_by_one(complexity):
    made = model()
    together = FreeEnergy(made, n=9, complexity=complexity, draws=3)(X, Y, step=4)
    singles = [made.draw(4, index, closed=complexity == "closed") for index in range(3)]
    torch.testing.assert_close(together.complexity, torch.stack([draw.complexity() for draw in singles]).mean())
    each = torch.stack([made.likelihood.cost(draw(X), Y) for draw in singles]).mean()
    torch.testing.assert_close(together.likelihood, each)
    ensemble = made.ensemble(3)
    for index in range(3):
        torch.testing.assert_close(ensemble(X)[index], made.draw(0, index)(X))
    torch.testing.assert_close(made.predict(X, draws=3).mean, ensemble.predict(X).mean)


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 3), nn.Sequential(nn.GELU(), nn.Linear(3, 2, bias=False))),
    ],
    ids=["without bias", "flattened"],
)
def test_other_networks(other):
    made = model(other.double(), Normal(1.0))
    objective = FreeEnergy(made, n=9, complexity="closed", draws=2)
    assert torch.autograd.gradcheck(lambda _: objective(X, Y, step=2).as_subclass(Tensor), [made.joint[0]])


def test_deterministic_layers_are_passed_through():
    made = model(net(), Normal(1.0), select=lambda name, _: name.startswith("2."))
    FreeEnergy(made, n=9, draws=2)(X, Y).backward()
    assert made.joint[0].shape == (4, 2 + 2 + 1)
    assert made.net[0].weight.grad.abs().sum() > 0
    h = torch.cat([made.net[:2](made.joint[0][:, :2]), torch.ones(4, 1)], 1).detach()
    v, log_precision = made.joint[0].detach()[:, 2:].split([2, 1], 1)
    ones, none = torch.ones(4).double(), torch.zeros(2, 4).double()
    draw = made.draw(7)
    w = torch.cat([draw.weights["2.weight"], draw.weights["2.bias"][:, None]], 1).detach()
    posteriors = rows(h, v, log_precision[:, 0], ones, none)
    log_prior = Normal(1.0).log_density(w).sum()
    expected = sum(q.log_prob(row) for q, row in zip(posteriors, w, strict=True)) - log_prior
    torch.testing.assert_close(draw.complexity().detach(), expected)


def test_saved_shown_and_reported(tmp_path: Path):
    made = model()
    save(made, tmp_path / "model")
    again = load(tmp_path / "model", net())
    assert again.families == made.families == [(list(made.posterior), Conditional(4))]
    for other in (again, copy.deepcopy(made)):
        assert torch.equal(other.predict(X, draws=7).mean, made.predict(X, draws=7).mean)
    assert from_description(describe(made.families[0][1])) == Conditional(4)
    shown = bbb("show", tmp_path / "model").stdout
    assert "Conditional(inputs=4) of 4 parameters together" in " ".join(shown.split())
    assert "0.01" not in shown  # the sigma of rho, of which nothing is drawn
    found = float(made.engine().moments()["2.bias"].deviation.median())
    draws = made.ensemble(4000).weights["2.bias"].std(0).median()
    assert found == pytest.approx(float(draws), rel=0.3)  # 200 draws: a standard deviation to 5 %
    assert f"{found:.3g}" in made.report()


def test_narrow_types():
    made = model()
    expected = FreeEnergy(made, n=9, complexity="closed", draws=2)(X, Y, step=1).complexity
    narrow = FreeEnergy(made.bfloat16(), n=9, complexity="closed", draws=2)(X.bfloat16(), Y.bfloat16(), step=1)
    narrow.backward()
    assert narrow.complexity.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.complexity.double(), expected, rtol=0.05, atol=0.1)


def test_inputs_may_be_a_number():
    made = model(family=Conditional(6))
    assert made.joint[0].shape == (6, 2 + 3 + 1 + 2 + 1)
    assert torch.equal(model(family=Conditional(X[:4])).families[0][1].given, X[:4])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: model(nn.Conv2d(1, 1, 3).double(), Normal(1.0)), "fully connected networks.* Got Conv2d"),
        (lambda: model(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), Normal(1.0)), "fully connected networks"),
        (lambda: model(prior=ScaleMixture()), "for Normal priors. Got ScaleMixture"),
        (lambda: model(select=lambda name, _: name != "2.bias", prior=Normal(1.0)), "Bayesian as a whole"),
        (lambda: model(nn.Sequential(*[nn.Linear(2, 2)] * 2), Normal(1.0)), "each layer once"),
        (lambda: model(family=Conditional(torch.zeros(4, 3))), r"2 numbers each. Got a tensor of shape \[4, 3\]"),
        (
            lambda: Bayesian(net(), Gaussian(0.1), Normal(1.0), family={"2.*": Conditional(9), "*": Diagonal()}),
            r"one Conditional for all parameters that are Bayesian. Got \['0.bias', '0.weight'\] besides",
        ),
        (lambda: model().complexity_closed(), "KL is the same at all draws"),
        (lambda: prune(model(), 0.5), "of prune must be one whose mean is a network.* Got Conditional"),
        (lambda: sparse(model()), "of sparse must be one whose mean is a network"),
        (lambda: model().predict_mean(X), "whose mean is a network that predicts"),
        (lambda: model()(X), "whose mean is a network that predicts"),
        (lambda: Conditional(torch.zeros(4)), "a row for each"),
        (lambda: Conditional(torch.full((4, 2), torch.nan)), "must be finite"),
        (lambda: Conditional(0), "an int in"),
    ],
)
def test_refused(made, says):
    with pytest.raises(ValueError, match=says):
        made()
