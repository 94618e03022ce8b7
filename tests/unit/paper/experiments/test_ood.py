"""Digits against clothes: each method is trained, and judged by the same figures."""

import pytest
import torch

import digits
from bayesbackprop import evaluate
from bayesbackprop.verdict import ClassScores
from bayesbackprop_paper import data
from bayesbackprop_paper.data import Images, Split
from bayesbackprop_paper.experiments import ood
from bayesbackprop_paper.experiments.mnist import Config, network
from bayesbackprop_paper.experiments.truth import Run

pytestmark = pytest.mark.identities

SIZE = ood.Size(plain=2, dropout=2, ours=2, batch_size=32, draws=3)
OURS = "ours, from dropout"


def clothes() -> Images:
    """Three parts of the same images."""
    images = 2.0 * torch.rand(60, 784, generator=torch.Generator().manual_seed(2))
    return Images(*(3 * [Split(images, torch.zeros(60, dtype=torch.int64))]))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "mnist", digits.images)
    monkeypatch.setattr(data, "fashion_mnist", clothes)
    ood._dropout_net.cache_clear()


@pytest.mark.parametrize("method", ood.METHODS)
def test_every_method_is_judged_alike_and_by_its_seed(method: str) -> None:
    figures = ood.measure(Run(ood.TASK, method, 0), SIZE)
    assert figures.keys() == ood.measure(Run(ood.TASK, OURS, 1), SIZE).keys()
    ood._dropout_net.cache_clear()
    assert ood.measure(Run(ood.TASK, method, 0), SIZE) == figures
    ood._dropout_net.cache_clear()
    assert ood.measure(Run(ood.TASK, method, 1), SIZE) != figures


def test_the_figures_are_those_of_the_verdict() -> None:
    figures = ood.measure(Run(ood.TASK, OURS, 0), SIZE)
    outside = clothes().test.images
    found = evaluate(ood.ours_from_dropout(0, SIZE), digits.images().test, outside=outside, draws=SIZE.draws, seed=0)
    assert isinstance(found.scores, ClassScores)
    assert figures["error %"] == pytest.approx(100 * (1 - found.scores.accuracy))
    assert figures["ECE %"] == 100 * found.scores.ece
    assert figures["error % at 95 %"] == 100 * found.scores.error_at_95
    for by, detection in found.outside["outside"].items():
        assert (figures[f"AUROC {by}"], figures[f"FPR95 {by}"]) == detection


def test_an_ensemble_has_five_networks_and_shares_none_with_another_seed() -> None:
    images = digits.images().test.images
    one, other = (ood.ensemble(seed, SIZE).predict(images, draws=9, seed=None).components.logits for seed in (0, 1))
    members = torch.cat([each.view(5, len(images), 10) for each in (one, other)])
    assert len(members.unique(dim=0)) == 10


def test_dropout_stays_on_or_is_off() -> None:
    images = digits.images().test.images
    on = ood.mc_dropout(0, SIZE).predict(images, draws=3, seed=0)
    off = ood.dropout(0, SIZE).predict(images, draws=3, seed=0)
    assert (on.draws, off.draws) == (3, 1)
    assert len(on.components.logits.view(3, -1).unique(dim=0)) == 3
    again = ood.mc_dropout(0, SIZE).predict(images, draws=3, seed=0)
    assert torch.equal(on.components.logits, again.components.logits)


def test_weights_of_pixels_that_are_always_black_keep_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why clothes are noticed: where the training set says nothing, the posterior goes to the prior."""
    images = digits.images()
    for part in images:
        part.images[:, :100] = 0
    monkeypatch.setattr(data, "mnist", lambda: images)
    model = ood.bayesian(network(Config("sgd", units=8)), 0, SIZE._replace(ours=400))
    sigma = torch.nn.functional.softplus(model.rho.get_parameter("0.weight"))
    black = sigma[:, :100].median().item()
    assert black == pytest.approx(1.0, rel=0.1)
    assert sigma[:, 100:].median().item() < black / 2
