"""Draws and batch normalisation: predictions have the statistics of training, or it is said that they have not."""

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bayesbackprop as bbb
from bayesbackprop.diagnostics import DrawsAndMean
from bayesbackprop.evaluation import nll
from ztests import assert_mean

REMARK = "flipout for batch normalisation"


def estimators(model: bbb.Bayesian) -> dict[str, str | None]:
    return {entry.name: entry.estimator for entry in model.plan if entry.prior is not None}


def normalised(**options: Any) -> bbb.Bayesian:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    return bbb.Bayesian(net, bbb.Categorical(), seed=0, **options)


# --- which estimator -------------------------------------------------------------------------------------------------


@pytest.mark.supports("Batch normalisation", "the default estimator", "flipout: a draw for each example")
@pytest.mark.identities
def test_batch_normalisation_has_flipout_unless_an_estimator_is_given() -> None:
    model = normalised()
    assert set(estimators(model).values()) == {"flipout"}
    assert model.report().count(REMARK) == 4
    assert set(estimators(normalised(estimator="shared")).values()) == {"shared"}
    assert REMARK not in normalised(estimator="flipout").report()  # it was asked for
    together = normalised(family={"0.*": bbb.LowRank(1), "*": bbb.Diagonal()})
    assert estimators(together) == {
        "0.weight": "shared",
        "0.bias": "shared",
        "3.weight": "flipout",
        "3.bias": "flipout",
    }


@pytest.mark.identities
@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4, track_running_stats=False), nn.LayerNorm(4), nn.Tanh()]
)
def test_other_layers_change_nothing(layer: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2))
    assert set(estimators(bbb.Bayesian(net, bbb.Categorical())).values()) == {"shared"}


@pytest.mark.identities
@pytest.mark.parametrize(("before", "after", "found"), [(False, True, "flipout"), (True, False, "shared")])
def test_fit_looks_at_the_mode_again(before: bool, after: bool, found: str) -> None:
    model = normalised()
    model.net[1].train(before)
    model = bbb.Bayesian(model.net, bbb.Categorical(), seed=0)
    model.net[1].train(after)
    bbb.fit(model, [(torch.randn(8, 3), torch.randint(2, (8,)))], n=8, epochs=1)
    assert set(estimators(model).values()) == {found}
    assert model.report().count(REMARK) == (4 if after else 0)


# --- the statistics --------------------------------------------------------------------------------------------------


@pytest.mark.statistical
def test_the_variance_of_a_batch_is_that_over_examples_and_draws() -> None:
    """E[s^2] = Var_x(mu x) + mean_x sigma^2 (|x|^2 + 1) with flipout; shared, what a draw adds to all is missing."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, generator=random, dtype=torch.float64) + 1
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=1.0)).double()
    found = {}
    for estimator in ("flipout", "shared"):
        model = bbb.Bayesian(net, bbb.Gaussian(1.0), sigma=0.5, seed=0, estimator=estimator)
        variances = []
        with torch.no_grad():
            for step in range(1, 2001):
                model.draw(step)(x)
                variances.append(net[1].running_var.clone())
        found[estimator] = torch.stack(variances)
    mean = net[0](x).detach()
    noise = 0.25 * (x.square().sum(1) + 1)
    assert_mean(found["flipout"], mean.var(0) + noise.mean(), "the variance of a batch with flipout")
    assert_mean(found["shared"], mean.var(0) + 0.25 * x.var(0).sum(), "the variance of a batch of one draw")


# --- predictions -----------------------------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(labels)


@pytest.mark.learning
def test_draws_predict_as_well_as_the_mean_and_where_not_the_cause_is_named() -> None:
    x, y = digits()
    held_out = x[1200:], y[1200:]
    found = {}
    for estimator in (None, "shared"):
        torch.manual_seed(0)
        first = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        net = nn.Sequential(*first, *second, nn.Linear(16, 10))
        model = bbb.Bayesian(net, bbb.Categorical(), seed=0, estimator=estimator)
        bbb.fit(model, bbb.Batches(x[:1200], y[:1200], batch_size=64), epochs=20)
        found[estimator] = model, bbb.evaluate(model, held_out, draws=30)
    ours, verdict = found[None]
    assert verdict.scores.nll < nll(ours.predict_mean(held_out[0]), held_out[1]) + 0.1  # 0.54 and 0.50
    assert "batch normalisation" not in str(verdict)
    assert verdict.draws_and_mean is None
    shared, blurred = found["shared"]
    assert blurred.scores.nll > verdict.scores.nll + 0.1  # 0.72
    both = blurred.draws_and_mean
    assert both is not None
    assert both.is_blurred
    assert both.draws == pytest.approx(blurred.scores.nll)
    assert both.mean == pytest.approx(nll(shared.predict_mean(held_out[0]), held_out[1]))
    assert "batch normalisation with the estimator 'shared'" in str(blurred)
    assert blurred.to_dict()["draws_and_mean"]["mean"] == both.mean
    assert "batch normalisation with the estimator 'shared'" in shared.report((x[:300], y[:300]), draws=25)


@pytest.mark.identities
def test_a_small_or_uncertain_difference_is_no_reason_to_warn() -> None:
    assert DrawsAndMean(0.5, 0.3, 0.01).advice()
    assert not DrawsAndMean(0.35, 0.3, 0.001).advice()
    assert not DrawsAndMean(0.5, 0.3, 0.1).advice()
    assert not DrawsAndMean(0.3, 0.5, 0.01).advice()


@pytest.mark.identities
def test_what_is_measured_is_the_average_of_the_draws() -> None:
    model, x, y = normalised(estimator="shared", sigma=0.5), torch.randn(30, 3), torch.randint(2, (30,))
    both = bbb.diagnose(model, [(x[:10], y[:10]), (x[10:], y[10:])], draws=25).draws_and_mean
    assert both is not None
    assert both.draws == pytest.approx(nll(model.predict(x, draws=25, estimator="shared"), y), rel=1e-5)
    assert both.mean == pytest.approx(nll(model.predict_mean(x), y), rel=1e-5)
    assert bbb.diagnose(normalised(), (x, y), draws=25).draws_and_mean is None
