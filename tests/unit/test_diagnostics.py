"""Free energies where they are known exactly, and k-hat of samples whose tail is known."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from bayesbackprop import (
    Batches,
    Bayesian,
    Categorical,
    Conditional,
    Diagonal,
    FullCovariance,
    Gaussian,
    Joint,
    LogDensity,
    LowRank,
    Mixture,
    Normal,
    Relative,
    ScaleMixture,
    prune,
)
from bayesbackprop.diagnostics import (
    _TRIVIAL_DRAWS,
    _WIDTHS,
    Diagnosis,
    Estimate,
    Spread,
    _pareto_shape,
    diagnose,
    pareto_k,
    say_spread,
    spread,
)
from bayesbackprop.posterior import initial_rho
from ztests import assert_z

X = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
Y = 1.5 * X + 0.1 * torch.sin(37 * X)
NOISE = 0.3


def line(mean: float, sigma: float, **options: object) -> Bayesian:
    """y = w x with q(w) = N(mean, sigma^2)."""
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(net.weight, mean)
    return Bayesian(net, Gaussian(NOISE), Normal(1.0), sigma=sigma, seed=0, **options)  # type: ignore[arg-type]


def exact() -> tuple[float, float, float]:
    """Mean and standard deviation of the posterior of w, and -log P(D)."""
    precision = 1 + float(X.square().sum()) / NOISE**2
    mean = float((X * Y).sum()) / NOISE**2 / precision
    covariance = NOISE**2 * torch.eye(len(X), dtype=torch.float64) + X @ X.T
    evidence = torch.distributions.MultivariateNormal(torch.zeros(len(X), dtype=torch.float64), covariance)
    return mean, precision**-0.5, -float(evidence.log_prob(Y[:, 0]))


@pytest.mark.identities
def test_at_the_true_posterior_the_free_energy_is_the_evidence_in_every_draw() -> None:
    mean, deviation, minus_log_evidence = exact()
    found = diagnose(line(mean, deviation), (X, Y), draws=50)
    assert found.free_energy.mean == pytest.approx(minus_log_evidence, rel=1e-9)
    assert found.free_energy.standard_error < 1e-8
    assert found.examples == 40
    assert not found.is_worse_than_trivial
    assert "the best posterior that has learnt nothing" in str(found)


@pytest.mark.statistical
def test_elsewhere_it_is_higher_by_the_divergence() -> None:
    mean, deviation, minus_log_evidence = exact()
    shift, width = 0.5 * deviation, 0.7 * deviation
    found = diagnose(line(mean + shift, width), (X, Y), draws=2000)
    ratio = width / deviation
    divergence = 0.5 * (ratio**2 + (shift / deviation) ** 2 - 1) - math.log(ratio)
    z = (found.free_energy.mean - minus_log_evidence - divergence) / found.free_energy.standard_error
    assert_z(torch.tensor([z]), "the free energy")


@pytest.mark.equivalence
def test_k_hat_is_that_of_the_true_posterior_over_q() -> None:
    mean, deviation, _ = exact()
    truth, found = torch.distributions.Normal(mean, deviation), []
    for ratio in (0.5, 1.5):
        model = line(mean, ratio * deviation)
        weights = torch.stack([model.draw(0, index).weights["weight"].detach()[0, 0] for index in range(500)])
        log_weights = truth.log_prob(weights) - torch.distributions.Normal(mean, ratio * deviation).log_prob(weights)
        found.append(diagnose(model, (X, Y), draws=500).k_hat)
        assert found[-1] == pytest.approx(pareto_k(log_weights), rel=1e-5)
    narrow, wide = found
    assert wide < 0 < narrow  # the weights of a wide q are bounded, those of a narrow one are not


@pytest.mark.equivalence
def test_batches_and_estimators_play_no_role() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, 1, dtype=torch.float64))
    whole = diagnose(Bayesian(net, Gaussian(NOISE), seed=1), (X, Y), draws=25)
    for estimator in ("shared", "local", "flipout"):
        model = Bayesian(net, Gaussian(NOISE), estimator=estimator, seed=1)  # type: ignore[arg-type]
        found = diagnose(model, Batches(X, Y, 7), draws=25)
        assert found.free_energy == pytest.approx(whole.free_energy, rel=1e-9)
        assert found.k_hat == pytest.approx(whole.k_hat, rel=1e-6)
        assert found.trivial.keys() == whole.trivial.keys()
        for name, estimate in whole.trivial.items():
            assert found.trivial[name] == pytest.approx(estimate, rel=1e-9)


@pytest.mark.statistical
def test_trivial_posteriors_cost_their_divergence_from_the_prior() -> None:
    """Where the inputs are 0 the weights say nothing, and what remains is KL[N(0, s^2) || N(0, 1)]."""
    weights = 1000
    net = nn.Linear(weights, 1, bias=False, dtype=torch.float64)
    model = Bayesian(net, Gaussian(NOISE), Normal(1.0), seed=0)
    zeros, y = torch.zeros(3, weights, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    constant = -3 * float(torch.distributions.Normal(0.0, NOISE).log_prob(torch.tensor(1.0)))
    found = diagnose(model, (zeros, y), draws=25).trivial
    assert found["the prior"].mean == pytest.approx(constant, rel=1e-5)
    z = []
    for name, estimate in found.items():
        if name != "the prior":
            width = float(name.removeprefix("N(0, ").removesuffix("²)"))
            expected = constant + weights * (0.5 * (width**2 - 1) - math.log(width))
            # log q - log P = const - eps^2 (1 - s^2) / 2, and eps^2 has the variance 2.
            z.append((estimate.mean - expected) / (math.sqrt(weights / 2 / _TRIVIAL_DRAWS) * (1 - width**2)))
    assert len(z) == len(_WIDTHS)
    assert_z(torch.tensor(z[:1]), "the cost of a narrow posterior")  # all of them have the same eps
    assert torch.tensor(z).std() < 1e-6


@pytest.mark.identities
def test_what_costs_more_than_it_explains_gets_a_warning() -> None:
    x, labels = torch.randn(20, 50), torch.randint(2, (20,))
    model = Bayesian(nn.Linear(50, 2), Categorical(), Normal(1.0), sigma=1e-3, seed=0)
    found = diagnose(model, (x, labels), draws=25)
    assert found.is_worse_than_trivial
    assert "WARNING: a posterior that has learnt nothing" in str(found)


@pytest.mark.identities
def test_centres_and_constant_weights_are_kept() -> None:
    """Around a centre that is the truth, a narrow posterior needs no learning; removed weights stay removed."""
    mean, deviation, _ = exact()
    narrow = {f"N(centre, {width:g}²)" for width in _WIDTHS}
    found = diagnose(line(mean, deviation, centre="net"), (X, Y), draws=25)
    assert set(found.trivial) == {"the prior", *narrow}
    best = found.trivial[found.best_trivial or ""].mean
    assert best < diagnose(line(mean, deviation), (X, Y), draws=25).trivial["N(0, 0.1²)"].mean
    pruned = prune(line(mean, deviation), 1.0)
    log_prob = torch.distributions.Normal(torch.zeros_like(Y), NOISE).log_prob(Y)
    with pytest.raises(ValueError, match="all constant"):
        diagnose(pruned, (X, Y), draws=25)
    half = Bayesian(nn.Linear(1, 1, dtype=torch.float64), Gaussian(NOISE), Normal(1.0), seed=0)
    with torch.no_grad():
        half.net.weight.zero_()  # type: ignore[operator,union-attr]
        half.net.bias.fill_(0.0)  # type: ignore[operator,union-attr]
        half.rho.weight.fill_(-1e30)  # type: ignore[operator,union-attr]
        half.rho.bias.copy_(initial_rho(half.net.bias, 1.0))  # type: ignore[arg-type,operator,union-attr]
    found = diagnose(half, (X, Y), draws=25)
    assert found.trivial["N(0, 0.0003²)"].mean == pytest.approx(
        -float(log_prob.sum()) - math.log(3e-4) - 0.5,
        abs=2.0,  # one weight: its eps^2 / 2, over three draws
    )


@pytest.mark.identities
def test_a_prior_that_cannot_be_drawn_from_is_left_out() -> None:
    cauchy = LogDensity(lambda w: -torch.log1p(w.square()) - math.log(math.pi), name="Cauchy")
    model = Bayesian(nn.Linear(1, 1, dtype=torch.float64), Gaussian(NOISE), cauchy, seed=0)
    assert "the prior" not in diagnose(model, (X, Y), draws=25).trivial


@pytest.mark.identities
def test_diagnosing_changes_nothing_and_the_seed_decides() -> None:
    model = Bayesian(nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1)), Gaussian(NOISE), seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    data = X.float(), Y.float()
    one, same, other = (diagnose(model, data, draws=25, seed=seed) for seed in (None, 0, 1))
    assert one == same
    assert one.free_energy != other.free_energy
    assert model.net.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.identities
def test_several_targets_add_up() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1, bias=False, dtype=torch.float64)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": self.inner(x), "b": self.inner(x)}

    model = Bayesian(Twice(), Joint({"a": Gaussian(NOISE), "b": Gaussian(NOISE)}), Normal(1.0), sigma=1e-6, seed=0)
    nn.init.constant_(model.net.inner.weight, 1.5)  # type: ignore[arg-type,union-attr]
    one = line(1.5, 1e-6)
    found, expected = diagnose(model, (X, {"a": Y, "b": Y}), draws=25), diagnose(one, (X, Y), draws=25)
    costs = [sum(float(each.draw(0, index).complexity().detach()) for index in range(25)) / 25 for each in (model, one)]
    assert found.examples == 40
    assert found.free_energy.mean - costs[0] == pytest.approx(2 * (expected.free_energy.mean - costs[1]), rel=1e-4)
    assert "free energy" in model.report((X, {"a": Y, "b": Y}), draws=25)


@pytest.mark.identities
def test_an_example_of_weight_two_counts_twice() -> None:
    model, weights = line(1.0, 0.1), 1.0 + (torch.arange(40) < 10)
    found = diagnose(model, Batches(X, Y, 40, weights=weights, order=lambda _: torch.arange(40)), draws=25)
    expected = diagnose(model, (torch.cat([X, X[:10]]), torch.cat([Y, Y[:10]])), draws=25)
    assert found.free_energy.mean == pytest.approx(expected.free_energy.mean, rel=1e-9)
    assert found.trivial["the prior"].mean == pytest.approx(expected.trivial["the prior"].mean, rel=1e-9)


@pytest.mark.identities
def test_report_names_itself_in_errors() -> None:
    with pytest.raises(ValueError, match=r"The 'data' parameter of Bayesian\.report"):
        line(1.0, 0.1).report(3)  # type: ignore[arg-type]


@pytest.mark.identities
def test_report_shows_it_only_when_asked() -> None:
    model = line(1.0, 0.1)
    table = model.report()
    with_data = model.report((X, Y), draws=25, seed=4)
    assert with_data == f"{table}\n{diagnose(model, (X, Y), draws=25, seed=4)}"
    assert "free energy" not in table


# --- the spread of sigma ---------------------------------------------------------------------------------------------


@pytest.mark.identities
def test_the_spread_of_sigma_by_hand() -> None:
    net = nn.Linear(20, 1, dtype=torch.float64)
    sigmas = torch.arange(1.0, 21.0, dtype=torch.float64) / 100
    model = Bayesian(net, Gaussian(1.0), sigma={"weight": lambda _: sigmas[None], "bias": 0.21})
    with torch.no_grad():
        net.weight.copy_(sigmas * torch.tensor([0.05] * 5 + [2.0] * 15))
        net.bias.fill_(1.0)
    assert spread(model) == pytest.approx(Spread(0.02, 0.11, 0.2, 5 / 21))


@pytest.mark.identities
@pytest.mark.parametrize(
    ("sigma", "said"), [(0.01, "as when it was initialised"), (Relative(0.2, 1e-9), "the data have had their say")]
)
def test_a_sigma_that_has_not_moved_is_noticed(sigma: object, said: str) -> None:
    model = Bayesian(nn.Linear(50, 5), Gaussian(1.0), sigma=sigma)  # type: ignore[arg-type]
    assert said in " ".join(say_spread(spread(model)))


@pytest.mark.identities
@pytest.mark.parametrize(
    ("family", "has_own_sigma"),
    [(Diagonal(), True), (LowRank(2), True), (FullCovariance(), False), (Mixture(2), False), (Conditional(20), False)],
    ids=repr,
)
def test_the_initial_sigma_is_blamed_only_where_each_weight_has_its_own(family: object, has_own_sigma: bool) -> None:
    model = Bayesian(nn.Linear(1, 1).double(), Gaussian(NOISE), Normal(1.0), sigma=0.01, family=family, seed=0)  # type: ignore[arg-type]
    found = diagnose(model, (X, Y), draws=25)
    assert found.has_own_sigma == has_own_sigma
    same = replace(found, spread=Spread(0.1, 0.1, 0.1, 0.0))
    assert ("as when it was initialised" in str(same)) == has_own_sigma


NARROW, WIDE = Spread(0.1, 0.1, 0.1, 0.0), Spread(0.1, 0.2, 0.3, 0.0)


@pytest.mark.identities
@pytest.mark.parametrize(
    ("mean", "error", "said"),
    [
        (20.0, 1.0, "WARNING: a posterior that has learnt nothing, the prior, has 1 ± 0.1."),
        (0.0, 0.1, "the best posterior that has learnt nothing, the prior, has 1 ± 0.1."),
        (12.0, 1.0, "cannot tell: the difference is 0.2 ± 0.14. Give more draws."),
        (8.0, 1.0, "cannot tell: the difference is -0.2 ± 0.14. Give more draws."),
    ],
)
def test_a_difference_is_said_with_its_error(mean: float, error: float, said: str) -> None:
    found = Diagnosis(10, 100, Estimate(mean, error), {"the prior": Estimate(10.0, 1.0)}, WIDE, 0.1)
    assert said in str(found)
    assert ("cannot tell" in str(found)) == ("cannot tell" in said)
    assert ("had their say" in str(found)) == ("WARNING" not in said)
    assert "initial sigma" not in str(replace(found, spread=NARROW, has_own_sigma=False))


@pytest.mark.identities
def test_more_draws_tell_more_of_the_trivial_posteriors() -> None:
    few, many = (diagnose(line(1.0, 0.1), (X, Y), draws=draws).trivial["the prior"] for draws in (25, 2500))
    assert many.standard_error < few.standard_error


# --- k-hat -----------------------------------------------------------------------------------------------------------


def pareto(k: float, count: int) -> Tensor:
    """Logarithms of numbers with P(w > t) = t^(-1 / k)."""
    return -k * torch.rand(count, dtype=torch.float64).log()


@pytest.mark.statistical
@pytest.mark.parametrize("k", [0.2, 0.5, 0.7, 1.0, 2.0])
def test_k_hat_of_pareto_tails(k: float) -> None:
    """Over many samples: the mean is k, drawn a little towards 0.5 by the prior; the spread is (1 + k) / sqrt(M)."""
    draws, samples = 10_000, 60
    tail = 300  # 3 sqrt(10,000)
    found = torch.tensor([pareto_k(pareto(k, draws)) for _ in range(samples)], dtype=torch.float64)
    expected = (tail * k + 10 * 0.5) / (tail + 10)
    spread_of_each = (1 + k) / math.sqrt(tail) * tail / (tail + 10)
    assert_z(((found.mean() - expected) * math.sqrt(samples) / spread_of_each).view(1), f"the mean for k = {k}")
    assert_z(((found.var() / spread_of_each**2 - 1) / math.sqrt(2 / (samples - 1))).view(1), f"the spread for k = {k}")


@pytest.mark.equivalence
@pytest.mark.parametrize("k", [-0.3, 0.3, 0.9])
def test_the_shape_is_near_that_of_the_likeliest_pareto_distribution(k: float) -> None:
    x = torch.as_tensor(stats.genpareto(k).rvs(4000, random_state=1)).sort().values
    likeliest, _, _ = stats.genpareto.fit(x.numpy(), floc=0)
    assert _pareto_shape(x) == pytest.approx(likeliest, abs=0.01)


@pytest.mark.identities
@pytest.mark.parametrize(("draws", "tail"), [(25, 5), (100, 20), (400, 60)])
def test_k_hat_is_the_shape_of_the_tail_and_ten_exceedances_that_say_a_half(draws: int, tail: int) -> None:
    log_weights = pareto(0.8, draws)
    largest = log_weights.exp().sort().values[-tail - 1 :]
    shape = _pareto_shape(largest[1:] - largest[0])
    assert pareto_k(log_weights) == pytest.approx((tail * shape + 10 * 0.5) / (tail + 10), rel=1e-9)


@pytest.mark.identities
def test_k_hat_knows_no_scale_and_no_order() -> None:
    weights = pareto(0.6, 500)
    assert pareto_k(weights + 1234) == pytest.approx(pareto_k(weights), rel=1e-9)
    assert pareto_k(weights.flip(0)) == pareto_k(weights)


@pytest.mark.identities
def test_k_hat_without_a_tail_and_with_nothing_else() -> None:
    assert pareto_k(torch.full((100,), -3.0)) == -math.inf
    assert pareto_k(torch.arange(100.0) * 1000) == math.inf
    found = Diagnosis(1, 100, Estimate(1.0, 0.1), {}, Spread(0.1, 0.2, 0.3, 0.0), math.inf)
    assert "above 100" in str(found)
    assert found.best_trivial is None
    assert not found.is_worse_than_trivial


@pytest.mark.identities
def test_too_few_weights_are_refused() -> None:
    for bad in (torch.zeros(24), torch.zeros(25, 2), torch.full((30,), math.nan)):
        with pytest.raises(ValueError, match="log_weights"):
            pareto_k(bad)
    with pytest.raises(ValueError, match=r"an int in \[25, "):
        diagnose(line(0.0, 0.1), (X, Y), draws=24)


@pytest.mark.identities
def test_the_default_prior_is_drawn_from() -> None:
    model = Bayesian(nn.Linear(1, 1, dtype=torch.float64), Gaussian(NOISE), ScaleMixture(), seed=0)
    assert "the prior" in diagnose(model, (X, Y), draws=25).trivial
