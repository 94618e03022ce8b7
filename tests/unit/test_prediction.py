"""Prediction: probabilities averaged, uncertainty split, and the network left as it was."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor, distributions, nn
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

from bayesbackprop import Bayesian, Bernoulli, Categorical, Ensemble, Gaussian, LogLikelihood
from ztests import assert_mean

identities = pytest.mark.identities
equivalence = pytest.mark.equivalence
statistical = pytest.mark.statistical


def mlp(inputs: int = 3, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def points(n: int = 5) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64)


def from_outputs(likelihood, outputs: list[list[list[float]]]):
    """The prediction for networks that give ``outputs`` [draws, B, D]: a bias for each draw, and inputs of 0."""
    values = torch.tensor(outputs, dtype=torch.float64)
    _, examples, width = values.shape

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(examples, width, dtype=torch.float64))

        def forward(self, rows: Tensor) -> Tensor:
            return self.table[rows]

    return Ensemble(Table(), likelihood, {"table": values}).predict(torch.arange(examples))


# --- classes ----------------------------------------------------------------------------------------------------------


@identities
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


@identities
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


@identities
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian(0.5)], ids=repr)
def test_what_is_known_has_no_epistemic_uncertainty(likelihood):
    x = points()
    unsure, sure = (Bayesian(mlp(), likelihood, sigma=sigma, seed=0) for sigma in (1.0, 1e-7))
    for predicted in (unsure.predict(x, draws=1), sure.predict(x, draws=50), unsure.predict_mean(x)):
        assert (predicted.epistemic >= 0).all()
        assert predicted.epistemic.max() < 1e-9
        assert (predicted.aleatoric > 0).all()
    assert (unsure.predict(x, draws=50).epistemic > 1e-3).all()


@identities
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


@identities
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


@identities
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


# --- numbers ----------------------------------------------------------------------------------------------------------

# Means and the s of noise = log(1 + exp(s)) of three networks for two examples.
MIXTURE = [[[0.0, 0.0], [1.0, -2.0]], [[2.0, 1.0], [1.1, -2.5]], [[-1.0, -1.0], [4.0, 0.5]]]


def mixture_parts(example: int) -> tuple[np.ndarray, np.ndarray]:
    parts = np.array(MIXTURE)[:, example]
    return parts[:, 0], np.log1p(np.exp(parts[:, 1]))


@identities
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


LEVELS = (1e-4, 0.05, 0.25, 0.5, 0.9, 0.999)


def mixture_cdf(y: float, means: np.ndarray, scales: np.ndarray, level: float = 0.0) -> float:
    return stats.norm.cdf(y, means, scales).mean() - level


@identities
def test_quantiles_are_those_of_the_mixture():
    quantiles = from_outputs(Gaussian("per-input"), MIXTURE).quantiles(LEVELS)
    assert quantiles.shape == (len(LEVELS), 2, 1)
    for example in range(2):
        means, scales = mixture_parts(example)
        for level, quantile in zip(LEVELS, quantiles[:, example, 0].tolist(), strict=True):
            root = optimize.brentq(mixture_cdf, -20, 20, args=(means, scales, level))
            assert quantile == pytest.approx(root, rel=1e-9, abs=1e-9)


@statistical
def test_quantiles_hold_their_share_of_samples():
    quantiles = from_outputs(Gaussian("per-input"), MIXTURE).quantiles(LEVELS)
    for example in range(2):
        means, scales = (torch.from_numpy(part) for part in mixture_parts(example))
        which = torch.randint(3, (1_000_000,))
        y = means[which] + scales[which] * torch.randn(1_000_000, dtype=torch.float64)
        below = (y.unsqueeze(1) < quantiles[:, example, 0]).double()
        assert_mean(below, torch.tensor(LEVELS).double(), f"samples below the quantiles of example {example}")


@identities
def test_quantiles_of_one_gaussian_and_at_the_ends():
    predicted = from_outputs(Gaussian(0.5), [[[1.0]]])
    levels = (0.01, 0.5, 0.975)
    expected = stats.norm.ppf(levels, 1.0, 0.5).tolist()
    assert predicted.quantiles(levels).flatten().tolist() == pytest.approx(expected, rel=1e-9)
    assert from_outputs(Gaussian(0.5), [[[1.0]], [[2.0]]]).quantiles([0, 1]).flatten().tolist() == [-math.inf, math.inf]


@identities
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


@identities
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


@identities
def test_log_prob_is_that_of_the_mixture():
    predicted = from_outputs(Gaussian("per-input"), MIXTURE)
    y = torch.tensor([[0.7], [60.0]]).double()  # the second so far out that no single density is above 0
    for example in range(2):
        log_probs = stats.norm.logpdf(y[example].item(), *mixture_parts(example))
        expected = np.logaddexp.reduce(log_probs) - math.log(3)
        assert predicted.log_prob(y)[example].item() == pytest.approx(expected, rel=1e-12)


@identities
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


@identities
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
    with pytest.raises(NotImplementedError, match="Poisson"):
        predicted.entropy  # noqa: B018
    with pytest.raises(ValueError, match="in order to predict"):
        Bayesian(mlp(), LogLikelihood(lambda output, target: target), seed=0).predict(x, draws=2)


# --- how the draws run ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2))


NETS = {
    "mlp": (mlp, (5, 3)),
    "convolutional": (convolutional, (5, 1, 5, 5)),
    "recurrent": (Recurrent, (5, 6, 3)),
    "attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten()),
        (5, 3, 4),
    ),
}


@equivalence
@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
@pytest.mark.parametrize("kind", NETS)
def test_prediction_equals_a_loop_over_draws_whatever_the_memory(kind, estimator):
    make, shape = NETS[kind]
    model = Bayesian(make().double(), Categorical(), sigma=0.3, estimator=estimator, seed=0).eval()
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        loop = torch.stack([model.draw(index=k)(x) for k in range(11)])
    for memory in (1, 10**5, 10**6, 2**30):
        predicted = model.predict(x, draws=11, memory=memory, estimator=estimator)
        logits = predicted.components.logits.reshape(loop.shape)
        torch.testing.assert_close(logits, loop.log_softmax(-1), rtol=1e-9, atol=1e-9)
    assert (loop[0] - loop[1]).abs().max() > 1e-3


def peak(run) -> int:
    """The most bytes that torch's allocator had handed out at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).max())


@identities
@pytest.mark.parametrize("kind", ["shared", "local", "ensemble"])
def test_memory_cap_holds(kind):
    net = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 2, bias=False))
    model = Bayesian(net, Categorical(), estimator="shared" if kind == "ensemble" else kind, seed=0)
    x, draws = torch.randn(512, 32), 10

    def use(memory: int, draws: int = draws) -> int:
        if kind == "ensemble":
            ensemble = model.ensemble(draws)
            return peak(lambda: ensemble.predict(x, memory=memory).probs)
        return peak(lambda: model.predict(x, draws=draws, memory=memory, estimator="shared").probs)

    one, free = use(1, draws=1), use(2**30)
    outputs = 3 * draws * 512 * 2 * 4  # what is kept of each draw, while it is stacked and turned into probabilities
    assert free > 5 * one  # there is something to cap
    assert use(1) <= one + outputs  # one at a time is the least there is
    assert use(max(one, free // 4)) <= max(one, free // 4) + outputs
    assert use(3 * free) <= free


@identities
@pytest.mark.parametrize("ask", ["predict", "predict_mean", "ensemble", "failing"])
def test_the_network_is_left_as_it_was(ask):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2), nn.Dropout(0.9)).double()
    net.train()
    net[2].eval()
    modes = [module.training for module in net.modules()]
    model = Bayesian(net, Gaussian(0.5), sigma=0.1, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = points()
    if ask == "failing":
        with pytest.raises(RuntimeError):
            model.predict(x[:, :2], draws=3)
    elif ask == "predict_mean":
        predicted = model.predict_mean(x)
    else:
        predicted = model.predict(x, draws=3) if ask == "predict" else model.ensemble(3).predict(x)
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())
    if ask == "failing":
        return
    assert not predicted.mean.requires_grad
    assert not predicted.log_prob(torch.zeros(5, 2).double()).requires_grad
    one = predicted.components.mean[:5]  # in evaluation mode: each example by itself, and no dropout
    net.eval()
    with torch.no_grad():
        expected = net(x[:1]) if ask == "predict_mean" else model.draw()(x[:1])
    torch.testing.assert_close(one[:1], expected)


@identities
@pytest.mark.parametrize("estimator", [None, "shared"])
def test_seeds_decide_the_draws(estimator):
    x = points()
    model = Bayesian(mlp(), Gaussian(0.5), sigma=0.5, seed=4)
    first = model.predict(x, draws=6, estimator=estimator)
    torch.rand(3)  # torch's own generator has no say
    assert torch.equal(first.mean, model.predict(x, draws=6, estimator=estimator).mean)
    assert torch.equal(first.mean, model.predict(x, draws=6, estimator=estimator, seed=4).mean)
    assert not torch.equal(first.mean, model.predict(x, draws=6, estimator=estimator, seed=5).mean)
    longer = model.predict(x, draws=9, estimator=estimator).components.mean.reshape(9, 5, 2)
    torch.testing.assert_close(longer[:6], first.components.mean.reshape(6, 5, 2))
    assert len(longer[:, 0, 0].unique()) == 9
    apart = torch.cat([model.predict(one, draws=6, estimator=estimator).mean for one in x.split(1)])
    same_networks = estimator == "shared"
    assert torch.allclose(apart, first.mean) == same_networks


@identities
def test_ensemble_is_kept():
    x = points()
    model = Bayesian(mlp(), Categorical(), sigma=0.5, seed=0)
    ensemble = model.ensemble(5)
    predicted = ensemble.predict(x)
    torch.testing.assert_close(predicted.probs, model.predict(x, draws=5, estimator="shared").probs)
    assert not torch.equal(model.ensemble(5, seed=1).predict(x).probs, predicted.probs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(ensemble.predict(x).probs, predicted.probs)
    assert ensemble.draws == 5
    assert {name: w.shape[0] for name, w in ensemble.weights.items()} == dict.fromkeys(model.posterior, 5)
    each = [functional_call(model.net, {name: w[k] for name, w in ensemble.weights.items()}, x) for k in range(5)]
    torch.testing.assert_close(ensemble(x), torch.stack(each))
    torch.testing.assert_close(predicted.probs, torch.stack(each).softmax(-1).mean(0))


@identities
def test_predict_mean_is_the_network_itself():
    x = points()
    model = Bayesian(mlp(), Categorical(), sigma=0.5, seed=0)
    logits = model.net(x).detach()
    torch.testing.assert_close(model.predict_mean(x).probs, logits.softmax(-1))
    assert torch.equal(model(x).detach(), logits)
    assert model.predict_mean(x).draws == 1


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.linear(left - 2 * right) * scale


@identities
def test_several_and_keyword_inputs():
    model = Bayesian(Several().double(), Gaussian(0.5), sigma=0.3, seed=0)
    left, right = points(), points()
    expected = torch.stack([model.draw(index=k)(left, right, scale=3.0) for k in range(4)]).mean(0).detach()
    ensemble = model.ensemble(4)
    for predicted in (
        model.predict(left, right, scale=3.0, draws=4),
        model.predict(right=right, left=left, scale=3.0, draws=4),
        ensemble.predict(left, right=right, scale=3.0),
    ):
        torch.testing.assert_close(predicted.mean, expected)
    torch.testing.assert_close(ensemble(left, right, scale=3.0).mean(0), expected)
    torch.testing.assert_close(model.predict_mean(left, right=right).mean, model.net(left, right).detach())


@identities
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian(0.5), Gaussian("per-input")], ids=repr)
def test_one_example_is_predicted_as_among_others(likelihood):
    model = Bayesian(mlp(outputs=2), likelihood, sigma=0.5, seed=0)
    x = points(4)
    whole, part = model.predict(x, draws=5), model.predict(x[:1], draws=5)
    for name in ("mean", "variance", "entropy", "aleatoric", "epistemic", "stddev"):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name)[:1])
    torch.testing.assert_close(part.quantiles([0.1, 0.9]), whole.quantiles([0.1, 0.9])[:, :1])


@identities
@pytest.mark.parametrize("draws", [0, -1, 2.0, True, None, "3"])
def test_bad_numbers_of_draws_are_refused(draws):
    model = Bayesian(mlp(), Categorical(), seed=0)
    for ask, owner in [
        (lambda: model.predict(points(), draws=draws), "Bayesian.predict"),
        (lambda: model.ensemble(draws), "Bayesian.ensemble"),
    ]:
        with pytest.raises(ValueError, match="parameter of") as error:
            ask()
        assert (
            str(error.value) == f"The 'draws' parameter of {owner} must be an int in [1, inf). Got {draws!r} instead."
        )
    with pytest.raises(ValueError, match="The 'memory' parameter of"):
        model.predict(points(), memory=0)
    with pytest.raises(ValueError, match="The 'memory' parameter of"):
        model.ensemble(2)(points(), memory=0)
