"""Predictions of several models differ by what is between them, and by no more than their draws where nothing is."""

import math

import pytest
import torch
from torch import nn

from bayesbackprop import Bayesian, Bernoulli, Categorical, Gaussian, Joint, Normal, StudentT, agreement
from bayesbackprop.diagnostics import Agreement, Distance
from ztests import assert_z

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def certain(bias: float, noise: float = 0.5) -> Bayesian:
    """A model that predicts N(bias, noise^2) for everything."""
    net = nn.Linear(3, 1, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    nn.init.constant_(net.bias, bias)
    return Bayesian(net, Gaussian(noise), Normal(1.0), sigma=1e-9, seed=0)


@pytest.mark.identities
def test_of_numbers_it_is_the_distance_in_standard_deviations_and_their_ratio() -> None:
    found = agreement([certain(0.0), certain(1.0), certain(1.0)], X, draws=3)
    assert found.between.distance == pytest.approx((2 + 2 + 0) / 3, rel=1e-5)  # 1 / 0.5, of two pairs of three
    assert found.between.ratio == pytest.approx(1.0, rel=1e-5)
    assert found.within.distance < 1e-6
    assert not found.agree
    assert "WARNING: what is predicted depends on the seed" in str(found)
    found = agreement([certain(0.0, 0.5), certain(0.0, 1.5)], [(X[:9], X[:9]), (X[9:], X[9:])], draws=3)
    assert found.between.distance < 1e-6
    assert found.between.ratio == pytest.approx(3.0, rel=1e-5)
    assert found.examples == 40


@pytest.mark.identities
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=["classes", "yes or no"])
def test_of_classes_it_is_the_total_variation(likelihood: Categorical | Bernoulli) -> None:
    models = []
    for p in (0.2, 0.9):
        net = nn.Linear(3, 2 if isinstance(likelihood, Categorical) else 1, dtype=torch.float64)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        nn.init.constant_(net.bias[-1:], math.log(p / (1 - p)))
        models.append(Bayesian(net, likelihood, sigma=1e-9, seed=0))
    found = agreement(models, X, draws=3)
    assert found.of_classes
    assert found.between == pytest.approx((0.7, 1.0), rel=1e-5)


@pytest.mark.statistical
@pytest.mark.parametrize(("likelihood", "outputs"), [(Gaussian(0.3), 1), (Categorical(), 3), (Bernoulli(), 2)], ids=str)
def test_one_model_differs_from_itself_by_what_the_draws_make_of_it(
    likelihood: Gaussian | Categorical | Bernoulli, outputs: int
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, outputs)).double()
    model = Bayesian(net, likelihood, Normal(1.0), sigma=0.1, seed=0)
    found = [agreement([model, model], X, draws=100, seed=10 * seed) for seed in range(200)]
    for part in (0, 1) if isinstance(likelihood, Gaussian) else (0,):
        measure = math.log if part else float
        between, within = (
            torch.tensor([measure(which[part]) for which in both], dtype=torch.float64)
            for both in ([each.between for each in found], [each.within for each in found])
        )
        gap = between - within
        assert_z((gap.mean() / (gap.std() / math.sqrt(len(found)))).view(1), f"the noise of the draws, {part}")
    assert sum(each.agree for each in found) > 180


@pytest.mark.identities
def test_the_advice_is_by_what_the_draws_explain() -> None:
    little = Agreement(2, 10, 5, True, Distance(0.03, 1.0), Distance(0.001, 1.0))
    assert "the seed hardly matters" in str(little)
    same = Agreement(2, 10, 5, False, Distance(0.03, 1.02), Distance(0.02, 1.01))
    assert "one of them is enough" in str(same)
    assert "a factor of 1.02" in str(same)


@pytest.mark.identities
def test_models_that_cannot_be_compared_are_refused() -> None:
    one = certain(0.0)
    for models in ([one], one, [one, 3], []):
        with pytest.raises(ValueError, match="The 'models' parameter of agreement"):
            agreement(models, X)  # type: ignore[arg-type]
    others = [
        Bayesian(nn.Linear(3, 2).double(), Gaussian(1.0)),
        Bayesian(nn.Linear(3, 1).double(), StudentT(1.0, 1.5)),
        Bayesian(nn.Sequential(nn.Linear(3, 2).double(), Halves()), Joint([Gaussian(1.0), Gaussian(2.0)])),
    ]
    for other in others:
        with pytest.raises(ValueError, match="The 'models' parameter of agreement"):
            agreement([one, other], X, draws=2)


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, :1], x[:, 1:]
