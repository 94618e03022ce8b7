"""What a network is compared with, and the verdict in words: it turns where the numbers do."""

import numpy as np
import pytest
import torch
from torch import Tensor, distributions

from bayesbackprop._rivals import Predicting, promises, rivals, trust, worth
from bayesbackprop.likelihoods import NegativeBinomial
from bayesbackprop.prediction import ClassPredictive, ValuePredictive
from bayesbackprop.verdict import Verdict, evaluate

pytestmark = pytest.mark.identities

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(400, 2)).astype(np.float32)


def of_numbers(scale: float, n: int = 400) -> Verdict:
    """On standard normal targets."""
    y = torch.tensor(RANDOM.normal(size=(n, 1)))
    model = Predicting(lambda x: ValuePredictive(distributions.Normal(torch.zeros(len(x), 1).double(), scale), 1))
    return evaluate(model, (torch.zeros(n, 1), y), draws=1)


def of_classes(confidence: float) -> Verdict:
    """Right in three of four cases."""
    y = torch.tensor([0, 0, 0, 1] * 100)
    probs = torch.tensor([[confidence, 1 - confidence]]).double()
    model = Predicting(lambda x: ClassPredictive(distributions.Categorical(probs.expand(len(x), 2)), 1))
    return evaluate(model, (torch.zeros(400, 1), y), draws=1)


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (of_numbers(1.0), "can be trusted"),
        (of_numbers(0.6), "Do not trust"),
        (of_numbers(1.8), "on the safe side"),
        (of_numbers(1.0, n=5), "too few"),
        (of_classes(0.75), "can be trusted"),
        (of_classes(0.95), "Do not trust"),
        (of_classes(0.6), "on the safe side"),
    ],
)
def test_whether_uncertainty_can_be_trusted(verdict: Verdict, says: str) -> None:
    assert says in trust(verdict)


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        ((0.47, 0.98), "Its 90 % intervals are on the safe side, wider than they need be: 47 % of the targets"),
        ((0.53, 0.80), "Do not trust its 90 % intervals, which are too narrow: 53 % of the targets"),
        ((0.30, 0.98), "Do not trust its 50 % intervals, which are too narrow: 30 % of the targets"),
        ((0.60, 0.98), "Its uncertainty is on the safe side, larger than it need be: 60 % of the targets"),
    ],
)
def test_no_word_about_some_intervals_contradicts_the_others(inside: tuple[float, float], says: str) -> None:
    half, most = (round(400 * share) for share in inside)
    y = torch.cat([torch.zeros(half), torch.ones(most - half), torch.full((400 - most,), 9.0)])[:, None].double()
    model = Predicting(lambda x: ValuePredictive(distributions.Normal(torch.zeros(len(x), 1).double(), 1.0), 1))
    assert trust(evaluate(model, (torch.zeros(400, 1), y), draws=1)).startswith(says)


@pytest.mark.parametrize(
    ("mean", "dispersion", "says"),
    [(3.0, 1e-6, "can be trusted"), (3.0, 0.5, "safe side"), (1.0, 1e-6, "Do not trust")],
)
def test_intervals_of_counts_hold_more_by_nature(mean: float, dispersion: float, says: str) -> None:
    """Counts of mean 3, beside predictions that are right, too wide and wrong."""
    y = torch.tensor(RANDOM.poisson(3.0, (1000, 1))).double()
    log_mean = torch.full((1000, 1), mean).double().log()
    prediction = ValuePredictive(NegativeBinomial(dispersion).distribution(log_mean), 1)
    verdict = evaluate(Predicting(lambda _: prediction), (torch.zeros(1000, 1), y), draws=1)
    promised = promises([prediction])
    assert 0.5 < promised[0.5] < 1
    assert says in trust(verdict, promised)
    assert f"by nature: {100 * promised[0.5]:.0f} % and {100 * promised[0.9]:.0f} % here" in trust(verdict, promised)


def test_intervals_of_other_numbers_promise_their_level() -> None:
    prediction = ValuePredictive(distributions.Normal(torch.zeros(9, 1).double(), 1.0), 1)
    assert promises([prediction, prediction]) == pytest.approx({0.5: 0.5, 0.9: 0.9})


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ((1.0, 2.0, 3.0), "Worth it: on 100 held-out rows the network is 1 ± 0.0"),
        ((2.0, 1.0, 3.0), "Not worth it: on 100 held-out rows the network is 1 ± 0.0"),
        ((1.0, 1.0, 3.0), "Not needed"),
        ((3.0, 2.0, 3.0), "not clearly better than the mean alone"),
    ],
)
def test_whether_it_is_worth_it(costs: tuple[float, ...], says: str) -> None:
    names, noise = ("network", "linear model", "mean alone"), torch.linspace(-0.1, 0.1, 100)
    rows: dict[str, Tensor] = {
        name: cost + noise * number for number, (name, cost) in enumerate(zip(names, costs, strict=True))
    }
    verdicts = dict.fromkeys(names, of_numbers(1.0))
    assert says in worth(verdicts, rows)
    few = {name: values[:5] for name, values in rows.items()}
    assert "5 held-out rows are too few" in worth(verdicts, few)


def test_rivals_of_numbers_are_the_best_of_their_kind() -> None:
    y = (X @ [1.0, -2.0])[:, None] + 0.1 * RANDOM.normal(size=(400, 1))
    linear, constant = rivals("regression", X, y).values()
    assert linear.predictive(X).stddev.mean() == pytest.approx(0.1, rel=0.1)
    assert constant.predictive(X).mean[0] == pytest.approx(y.mean())
    assert constant.predictive(X).stddev[0] == pytest.approx(y.std())


def test_a_line_without_noise_has_a_spread_still() -> None:
    y = (X @ [1.0, -2.0])[:, None].astype(np.float64)
    prediction = rivals("regression", X, y)["linear model"].predictive(X)
    assert (prediction.stddev > 0).all()
    assert prediction.log_prob(torch.tensor(y)).isfinite().all()


def test_rivals_of_classes_know_their_frequencies() -> None:
    y = np.where(X[:, 0] > 0.5, "yes", "no")
    logistic, constant = rivals("classification", X, y).values()
    assert (logistic.predictive(X).mean.argmax(1).numpy() == (y == "yes")).mean() > 0.95
    assert constant.predictive(X).mean[7].tolist() == pytest.approx([(y == "no").mean(), (y == "yes").mean()])


def test_rivals_of_counts_know_mean_and_variance() -> None:
    y = RANDOM.negative_binomial(2, 0.25, (4000, 1)).astype(float)
    x = np.zeros((4000, 1), dtype=np.float32)
    for rival in rivals("counts", x, y).values():
        assert rival.predictive(x).mean[0] == pytest.approx(y.mean(), rel=1e-3)
        assert rival.predictive(x).variance[0] == pytest.approx(y.var(), rel=1e-3)
