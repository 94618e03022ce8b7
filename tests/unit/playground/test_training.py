"""Networks in training: made as the settings say, taken over where they are alike, and the pictures of them."""

import math
from typing import Any

import pytest
import torch

from playgrounds import POINTS, bandit, classification, regression

from bayesbackprop import pruning  # isort: skip
from bayesbackprop.families import Conditional, Diagonal, FullCovariance, LowRank, Mixture  # isort: skip
from bayesbackprop.playground.bandit import Contest  # isort: skip
from bayesbackprop.playground.pictures import snr_histogram  # isort: skip
from bayesbackprop.playground.requests import Band, Map  # isort: skip
from bayesbackprop.playground.training import Training  # isort: skip
from bayesbackprop.priors import Laplace, Normal, ScaleMixture  # isort: skip

pytestmark = pytest.mark.identities

SMALL = {"width": 8, "layers": 1}


def trained(work: Any, steps: int) -> Training:
    training = Training(work)
    training.run(lambda: training.step < steps)
    assert training.step == steps
    return training


def band_of(training: Training) -> Band:
    picture = training.look().picture
    assert isinstance(picture, Band)
    return picture


def map_of(training: Training) -> Map:
    picture = training.look().picture
    assert isinstance(picture, Map)
    return picture


@pytest.mark.parametrize(
    ("settings", "prior"),
    [
        ({"prior": "normal", "prior_scale": 0.7}, Normal(0.7)),
        ({"prior": "laplace", "prior_scale": 0.7, "family": "diagonal"}, Laplace(0.7)),
        ({"prior": "mixture", "prior_scale": 0.5, "family": "diagonal"}, ScaleMixture(0.5, 0.5, 0.025)),
    ],
)
def test_the_prior_is_the_one_chosen(settings: dict[str, Any], prior: Any) -> None:
    model = Training(regression(**SMALL, **settings))._model
    assert {entry.prior for entry in model.plan} == {prior}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("conditional", Conditional),
        ("diagonal", Diagonal),
        ("low-rank", LowRank),
        ("mixture", Mixture),
        ("full", FullCovariance),
    ],
)
def test_each_family_trains_and_is_shown(family: str, kind: type[Any]) -> None:
    training = trained(regression(**SMALL, family=family), 3)
    assert type(training._family) is kind
    seen = training.look()
    assert seen.weights == sum(seen.snr.counts) == 8 + 8 + 8 + 1
    assert len(seen.costs.step) == 3


def test_the_estimator_is_that_of_fit_unless_one_is_chosen() -> None:
    assert Training(regression(**SMALL, family="diagonal")).look().estimator == "local"
    assert Training(regression(**SMALL, family="diagonal", estimator="flipout")).look().estimator == "flipout"


def test_what_the_library_refuses_is_said() -> None:
    with pytest.raises(ValueError, match="estimator"):
        Training(regression(**SMALL, family="low-rank", estimator="local"))
    with pytest.raises(ValueError, match="another than 'full' for more than 400 weights"):
        Training(regression(family="full"))
    with pytest.raises(ValueError, match="Conditional"):
        Training(regression(**SMALL, prior="laplace"))


def test_the_costs_are_those_of_the_whole_set_in_nats() -> None:
    training = trained(regression(**SMALL, family="diagonal", temperature=0.5), 1)
    fresh = Training(regression(**SMALL, family="diagonal", temperature=0.5))
    with torch.no_grad():
        cost = fresh._objective(*fresh._batch)
    costs = training.look().costs
    assert costs.likelihood == [pytest.approx(len(POINTS) * float(cost.likelihood), rel=1e-4)]
    assert costs.complexity == [pytest.approx(0.5 * float(cost.complexity), rel=1e-4)]


def test_without_points_it_learns_the_prior() -> None:
    training = trained(regression([], **SMALL, family="diagonal"), 400)
    costs = training.look().costs
    assert set(costs.likelihood) == {0.0}
    assert costs.complexity[0] > 30
    assert costs.complexity[-1] < 1
    for q in training._model.posterior.values():
        assert torch.allclose(q.sigma, torch.ones(()), atol=0.2)


def test_more_points_are_learnt_from_where_the_network_stands() -> None:
    before = trained(regression(**SMALL), 5)
    after = Training(regression([*POINTS, (0.0, 1.0)], **SMALL, prior_scale=2.0, temperature=0.5))
    after.take_over(before)
    assert after.step == 5
    assert int(after._objective.step) == 5
    for name, parameter in before._model.named_parameters():
        assert torch.equal(parameter, after._model.get_parameter(name))
    assert {entry.prior for entry in after._model.plan} == {Normal(2.0)}


@pytest.mark.parametrize("other", [{"width": 9}, {"layers": 2}, {"activation": "relu"}, {"family": "diagonal"}])
@pytest.mark.parametrize("more", [{}, {"seed": 1}, {"sigma": 0.1}])
def test_another_network_begins_anew(other: dict[str, Any], more: dict[str, Any]) -> None:
    before = trained(regression(**SMALL), 2)
    settings = {**SMALL, **(more or other)}
    after, fresh = Training(regression(**settings)), Training(regression(**settings))
    after.take_over(before)
    assert after.step == 0
    for name, parameter in fresh._model.named_parameters():
        assert torch.equal(parameter, after._model.get_parameter(name))


def test_nothing_is_taken_over_from_a_bandit() -> None:
    after = Training(regression(**SMALL))
    after.take_over(Contest(bandit()))
    assert after.step == 0


# --- pictures --------------------------------------------------------------------------------------------------------


def test_the_band_is_the_predictive_distribution() -> None:
    training = trained(regression(**SMALL, noise=0.3), 20)
    band = band_of(training)
    predicted = training._model.predict(torch.tensor(band.x)[:, None], draws=80, estimator="shared")
    assert (band.x[0], band.x[-1]) == (-3, 3)
    assert torch.allclose(
        torch.tensor(band.quantiles), predicted.quantiles([0.025, 0.25, 0.5, 0.75, 0.975])[..., 0], atol=1e-3
    )
    variance = torch.tensor(band.epistemic).square() + torch.tensor(band.aleatoric).square()
    assert torch.allclose(variance, predicted.variance[:, 0], atol=1e-3)
    assert set(band.aleatoric) == {0.3}
    assert {len(each) for each in band.functions} == {len(band.x)}


@pytest.mark.learning
def test_the_band_is_narrow_at_the_points_and_wide_between_and_beyond() -> None:
    band = band_of(trained(regression(), 300))
    at = dict(zip(band.x, band.epistemic, strict=True))
    points = max(at[-1.5], at[1.5])
    assert points < 0.4 * at[0.0]
    assert points < 0.4 * min(at[-3.0], at[3.0])


@pytest.mark.learning
def test_the_map_has_each_class_where_its_points_are() -> None:
    corners = {(1.5, 1.5): 0, (-1.5, 1.5): 1, (1.5, -1.5): 2}
    points = [(x + dx / 10, y + dy / 10, k) for (x, y), k in corners.items() for dx in (-2, 0, 2) for dy in (-2, 0, 2)]
    found = map_of(trained(classification(points, family="diagonal"), 400))

    def place(x: float, y: float) -> int:
        row, column = (round((value + 3) / 6 * (found.size - 1)) for value in (y, x))
        return row * found.size + column

    for (x, y), k in corners.items():
        assert found.probabilities[k][place(x, y)] > 0.8 * 255
        assert [classes[place(x, y)] for classes in found.classes].count(k) > len(found.classes) / 2
    sums = torch.tensor(found.probabilities).sum(0)
    assert torch.allclose(sums.float(), torch.tensor(255.0), atol=2)
    # What is known least is farthest away from all points.
    assert found.epistemic[place(-3, -3)] > max(found.epistemic[place(x, y)] for x, y in corners)
    leads = torch.tensor(found.leads)
    assert int(leads.min()) >= 0
    assert int(leads.max()) <= 255


def test_there_are_as_many_classes_as_were_painted_and_at_least_two() -> None:
    for points, classes in (([], 2), ([(0, 0, 0)], 2), ([(0, 0, 1)], 2), ([(0, 0, 2)], 3)):
        assert len(map_of(Training(classification(points, **SMALL))).probabilities) == classes


def test_the_histogram_is_of_the_ratios_that_pruning_goes_by() -> None:
    model = trained(regression(**SMALL, family="diagonal"), 10)._model
    found = snr_histogram(model)
    logs = pruning.snr(model).log10()
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        least, most = (low if low > found.edges[0] else -math.inf), (high if high < found.edges[-1] else math.inf)
        assert count == int(((logs >= least) & (logs < most)).sum())
