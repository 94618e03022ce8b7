"""Predictive distributions: probabilities averaged, and uncertainty split in two."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor, distributions, nn

from bayesbackprop import Bayesian, Bernoulli, Categorical, Gaussian, LogLikelihood
from mixtures import LEVELS, MIXTURE, from_outputs, mixture_parts

pytestmark = pytest.mark.identities


def mlp(inputs: int = 3, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def points(n: int = 5) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64)


# --- classes ---------------------------------------------------------------------------------------------------------


def test_probabilities_are_averaged_not_log_probabilities():
    """One network is sure of class 0 (e^8 : 1 : 1), the other mildly for class 1 (1 : e : 1)."""
    logits = [[[8.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]]
    probs = torch.tensor(logits).double().softmax(-1).mean(0)
    log_average = torch.tensor(logits).double().mean(0).softmax(-1)
    predicted = from_outputs(Categorical(), logits)
    torch.testing.assert_close(predicted.probs, probs)
    torch.testing.assert_close(predicted.mean, probs)
    assert (probs - log_average).abs().max() > 0.3
    torch.testing.assert_close(predicted.log_prob(torch.tensor([1])), probs[:, 1].log())
    torch.testing.assert_close(predicted.variance, probs * (1 - probs))
    torch.testing.assert_close(predicted.stddev, (probs * (1 - probs)).sqrt())
    assert predicted.labels.tolist() == [0]


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=repr)
def test_entropy_splits_in_two(likelihood):
    model = Bayesian(mlp(), likelihood, sigma=0.8, seed=0)
    x = 3 * points()
    predicted = model.predict(x, draws=20, estimator="shared")
    each = torch.stack([model.draw(index=k)(x) for k in range(20)]).detach()
    if isinstance(likelihood, Categorical):
        p = each.softmax(-1)
        entropy, aleatoric = -(p.mean(0) * p.mean(0).log()).sum(-1), -(p * p.log()).sum(-1).mean(0)
    else:
        p, q = each.sigmoid(), (-each).sigmoid()
        entropy = -(p.mean(0) * p.mean(0).log() + q.mean(0) * q.mean(0).log())
        aleatoric = -(p * p.log() + q * q.log()).mean(0)
    torch.testing.assert_close(predicted.probs, p.mean(0))
    torch.testing.assert_close(predicted.entropy, entropy)
    torch.testing.assert_close(predicted.aleatoric, aleatoric)
    torch.testing.assert_close(predicted.epistemic, entropy - aleatoric)
    torch.testing.assert_close(predicted.entropy, predicted.aleatoric + predicted.epistemic)
    assert (predicted.epistemic > 1e-3).all()
    torch.testing.assert_close(predicted.quantiles([0.1, 0.5, 1]), p.quantile(torch.tensor([0.1, 0.5, 1]).double(), 0))


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian(0.5)], ids=repr)
def test_what_is_known_has_no_epistemic_uncertainty(likelihood):
    x = points()
    unsure, sure = (Bayesian(mlp(), likelihood, sigma=sigma, seed=0) for sigma in (1.0, 1e-7))
    for predicted in (unsure.predict(x, draws=1), sure.predict(x, draws=50), unsure.predict_mean(x)):
        assert (predicted.epistemic >= 0).all()
        assert predicted.epistemic.max() < 1e-9
        assert (predicted.aleatoric > 0).all()
    assert (unsure.predict(x, draws=50).epistemic > 1e-3).all()


def test_disagreement_of_sure_networks_is_all_epistemic():
    for likelihood, outputs in [
        (Categorical(), [[[90.0, 0.0]], [[0.0, 90.0]]]),
        (Bernoulli(), [[[90.0]], [[-90.0]]]),
    ]:
        predicted = from_outputs(likelihood, outputs)
        assert predicted.entropy.item() == pytest.approx(math.log(2), rel=1e-9)
        assert predicted.epistemic.item() == pytest.approx(math.log(2), rel=1e-9)
        assert predicted.aleatoric.item() == pytest.approx(0, abs=1e-9)
        nothing = torch.zeros(predicted.labels.shape, dtype=predicted.probs.dtype)
        assert predicted.log_prob(nothing).exp().item() == pytest.approx(0.5)


def test_multi_label_bernoulli():
    model = Bayesian(mlp(outputs=4), Bernoulli(), sigma=0.5, seed=0)
    x = points()
    predicted = model.predict(x, draws=10, estimator="shared")
    probs = torch.stack([model.draw(index=k)(x) for k in range(10)]).sigmoid().mean(0).detach()
    torch.testing.assert_close(predicted.probs, probs)
    assert torch.equal(predicted.labels, (probs > 0.5).long())
    target = torch.randint(2, (5, 4))
    expected = torch.where(target == 1, probs, 1 - probs).log()
    torch.testing.assert_close(predicted.log_prob(target.double()), expected)
    torch.testing.assert_close(predicted.log_prob(target), expected)  # training takes integers as well


def test_segmentation():
    net = nn.Conv2d(3, 4, 3, padding=1).double()
    model = Bayesian(net, Categorical(), sigma=0.5, seed=0)
    x = torch.randn(2, 3, 6, 5).double()
    predicted = model.predict(x, draws=10)
    probs = torch.stack([model.draw(index=k)(x) for k in range(10)]).softmax(2).mean(0).movedim(1, -1).detach()
    torch.testing.assert_close(predicted.probs, probs)
    assert predicted.labels.shape == predicted.entropy.shape == predicted.epistemic.shape == (2, 6, 5)
    target = torch.randint(4, (2, 6, 5))
    expected = probs.gather(-1, target.unsqueeze(-1)).squeeze(-1).log()
    torch.testing.assert_close(predicted.log_prob(target), expected)
    assert predicted.quantiles([0.25, 0.75]).shape == (2, 2, 6, 5, 4)


def test_classes_of_a_deterministic_head_still_predict() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    model = Bayesian(net, Categorical(), select=lambda name, module: name.startswith("0."), seed=0)
    assert model.predict(torch.randn(16, 3), draws=4).probs.shape == (16, 4)


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_law_of_total_variance():
    predicted = from_outputs(Gaussian("per-input"), MIXTURE)
    for example in range(2):
        means, scales = mixture_parts(example)
        assert predicted.mean[example].item() == pytest.approx(means.mean())
        assert predicted.aleatoric[example].item() == pytest.approx((scales**2).mean())
        assert predicted.epistemic[example].item() == pytest.approx(means.var())
        raw = (scales**2 + means**2).mean() - means.mean() ** 2
        assert predicted.variance[example].item() == pytest.approx(raw)
        assert predicted.stddev[example].item() == pytest.approx(math.sqrt(raw))


def mixture_cdf(y: float, means: np.ndarray, scales: np.ndarray, level: float = 0.0) -> float:
    return stats.norm.cdf(y, means, scales).mean() - level


def test_quantiles_are_those_of_the_mixture():
    quantiles = from_outputs(Gaussian("per-input"), MIXTURE).quantiles(LEVELS)
    assert quantiles.shape == (len(LEVELS), 2, 1)
    for example in range(2):
        means, scales = mixture_parts(example)
        for level, quantile in zip(LEVELS, quantiles[:, example, 0].tolist(), strict=True):
            root = optimize.brentq(mixture_cdf, -20, 20, args=(means, scales, level))
            assert quantile == pytest.approx(root, rel=1e-9, abs=1e-9)


def test_quantiles_of_one_gaussian_and_at_the_ends():
    predicted = from_outputs(Gaussian(0.5), [[[1.0]]])
    levels = (0.01, 0.5, 0.975)
    expected = stats.norm.ppf(levels, 1.0, 0.5).tolist()
    assert predicted.quantiles(levels).flatten().tolist() == pytest.approx(expected, rel=1e-9)
    assert from_outputs(Gaussian(0.5), [[[1.0]], [[2.0]]]).quantiles([0, 1]).flatten().tolist() == [-math.inf, math.inf]


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Categorical()], ids=repr)
@pytest.mark.parametrize("level", [-0.1, 1.1, math.nan, "0.5", None])
def test_bad_quantiles_are_refused(level, likelihood):
    predicted = from_outputs(likelihood, [[[1.0, 2.0]]])
    with pytest.raises(ValueError, match=r"The 'q' parameter of quantiles must be a float in \[0, 1\]"):
        predicted.quantiles([0.5, level])


def integrated_entropy(means: np.ndarray, scales: np.ndarray) -> float:
    edges = sorted({m + c * s for m, s in zip(means, scales, strict=True) for c in (-12, -4, -2, 0, 2, 4, 12)})

    def integrand(y: float) -> float:
        p = stats.norm.pdf(y, means, scales).mean()
        return -p * math.log(p) if p > 0 else 0.0

    return sum(integrate.quad(integrand, low, high, epsabs=1e-11)[0] for low, high in itertools.pairwise(edges))


@pytest.mark.parametrize(
    ("means", "scales"),
    [
        ([0.3], [0.7]),
        ([0.0, 0.5, 1.0], [1.0, 1.0, 1.0]),
        ([0.0, 4.0], [1.0, 1.0]),
        ([-3.0, 0.0, 6.0], [0.5, 0.5, 0.5]),
        ([0.0, 0.1], [0.5, 1.0]),
        ([0.0, 0.0], [1.0, 0.1]),
        ([0.0, 1.0, 3.0], [1.0, 0.03, 0.3]),
    ],
)
def test_entropy_of_a_mixture_of_gaussians(means, scales):
    outputs = [[[m, math.log(math.expm1(s))]] for m, s in zip(means, scales, strict=True)]
    entropy = from_outputs(Gaussian("per-input"), outputs).entropy
    assert entropy.shape == (1, 1)
    # ten times what the library states for its quadrature
    assert entropy.item() == pytest.approx(integrated_entropy(np.array(means), np.array(scales)), abs=1e-5)


def test_log_prob_is_that_of_the_mixture():
    predicted = from_outputs(Gaussian("per-input"), MIXTURE)
    y = torch.tensor([[0.7], [60.0]]).double()  # the second so far out that no single density is above 0
    for example in range(2):
        log_probs = stats.norm.logpdf(y[example].item(), *mixture_parts(example))
        expected = np.logaddexp.reduce(log_probs) - math.log(3)
        assert predicted.log_prob(y)[example].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "shape"),
    [
        (Gaussian(0.5), 1, (5,)),
        (Gaussian(0.5), 2, (5, 1)),
        (Gaussian(0.5), 1, (1, 1)),
        (Bernoulli(), 1, (5,)),
        (Bernoulli(), 2, (5, 1)),
        (Categorical(), 2, (5, 1)),
        (Categorical(), 2, (1,)),
    ],
)
def test_log_prob_broadcasts_nothing(likelihood, outputs, shape):
    """[B] against [B, 1] would give a table of B x B numbers, and a mean over it that looks like one."""
    predicted = Bayesian(mlp(outputs=outputs), likelihood, seed=0).predict(points(), draws=3)
    target = torch.zeros(shape, dtype=torch.int64 if isinstance(likelihood, Categorical) else torch.float64)
    with pytest.raises(ValueError, match=r"The 'target' parameter of .* must be"):
        predicted.log_prob(target)


def test_a_likelihood_of_the_users_own_predicts():
    """The output is a dictionary, the targets are counts."""

    class Rates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"log_rate": self.net(x)}

    def poisson(output: dict[str, Tensor]) -> distributions.Poisson:
        return distributions.Poisson(output["log_rate"].exp())

    likelihood = LogLikelihood(lambda output, target: poisson(output).log_prob(target).sum(1), poisson)
    model = Bayesian(Rates(), likelihood, sigma=0.3, seed=0)
    x = points()
    rates = torch.stack([model.draw(index=k)(x)["log_rate"] for k in range(7)]).exp().detach()
    predicted = model.predict(x, draws=7)
    torch.testing.assert_close(predicted.mean, rates.mean(0))
    torch.testing.assert_close(predicted.aleatoric, rates.mean(0))
    torch.testing.assert_close(predicted.epistemic, rates.var(0, correction=0))
    probs = np.mean([stats.poisson.pmf(np.arange(200)[:, None, None], each) for each in rates.numpy()], axis=0)
    torch.testing.assert_close(predicted.entropy, torch.from_numpy(stats.entropy(probs)))
    with pytest.raises(ValueError, match="in order to predict"):
        Bayesian(mlp(), LogLikelihood(lambda output, target: target), seed=0).predict(x, draws=2)
