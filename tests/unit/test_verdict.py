"""The verdict is what the metrics say, whatever form the data have, and can be read, drawn and written."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.utils.data import DataLoader, TensorDataset

from bayesbackprop import Bayesian, Bernoulli, Categorical, Gaussian, LogLikelihood, Normal, Poisson, StudentT, evaluate
from bayesbackprop.evaluation import auroc, calibration, covered, crps, error, fpr95, nll, rmse, score
from bayesbackprop.prediction import ClassPredictive
from bayesbackprop.verdict import ClassScores, Coverage, ValueScores, Verdict
from ztests import assert_z

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(300, 4, generator=RANDOM)
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
VALUES = X[:, :2] + 0.3 * torch.randn(300, 2, generator=RANDOM)


def net(outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def classifier() -> Bayesian:
    return Bayesian(net(3), Categorical(), Normal(1.0), sigma=0.2, seed=0)


def regressor() -> Bayesian:
    return Bayesian(net(2), Gaussian(0.5), Normal(1.0), sigma=0.2, seed=0)


@pytest.fixture(scope="module")
def of_classes() -> Verdict:
    shifts = {"none at all": lambda x: x, "zero": torch.zeros_like}
    return evaluate(classifier(), (X, CLASSES), outside={"far": 10 * X, "same": X}, shifts=shifts, draws=10)


@pytest.fixture(scope="module")
def of_values() -> Verdict:
    return evaluate(regressor(), (X, VALUES), outside=10 * X, shifts={"half": lambda x: x / 2}, draws=10)


@pytest.mark.identities
def test_of_classes_it_is_what_the_metrics_say() -> None:
    ensemble = classifier().ensemble(10)
    prediction = ensemble.predict(X)
    found = evaluate(ensemble, (X, CLASSES), outside=2 * X)
    assert found.draws == 10
    assert found.examples == 300
    assert isinstance(found.scores, ClassScores)
    wrong, nats, squares, ece = score(prediction, CLASSES)
    assert found.scores[:4] == pytest.approx((1 - wrong, nats, squares, ece), rel=1e-5)
    assert isinstance(prediction, ClassPredictive)
    confidence, labels = prediction.probs.max(1)
    surest = confidence.argsort(descending=True)[:285]
    assert found.scores.error_at_95 == pytest.approx(float((labels != CLASSES)[surest].double().mean()))
    assert torch.equal(found.diagram[0], calibration(prediction, CLASSES)[0])
    inside, outside = prediction.entropy.double(), ensemble.predict(2 * X).entropy.double()
    assert found.outside["outside"]["entropy"] == (auroc(inside, outside), fpr95(inside, outside))
    assert set(found.outside["outside"]) == {
        "entropy",
        "max probability",
        "epistemic",
        "variance",
        "reverse information",
    }


@pytest.mark.identities
def test_of_numbers_it_is_what_the_metrics_say() -> None:
    ensemble = regressor().ensemble(10)
    prediction = ensemble.predict(X)
    found = evaluate(ensemble, (X, VALUES), outside=2 * X)
    assert isinstance(found.scores, ValueScores)
    expected = (rmse(prediction, VALUES), nll(prediction, VALUES), float(crps(prediction, VALUES).mean()))
    assert found.scores[:3] == pytest.approx(expected, rel=1e-5)
    inside = covered(prediction, VALUES, [0.5, 0.9]).double().mean((1, 2)).tolist()
    assert found.scores[3:] == pytest.approx(inside)
    assert isinstance(found.diagram, Coverage)
    assert found.diagram.observed[4] == found.scores.coverage_50
    near, far = (ensemble.predict(x).variance.double().sum(1) for x in (X, 2 * X))
    assert found.outside["outside"]["variance"].auroc == pytest.approx(auroc(near, far), abs=1e-6)


@pytest.mark.equivalence
@pytest.mark.parametrize("form", ["loader", "dataset", "list"])
def test_the_form_of_the_data_plays_no_role(form: str) -> None:
    ensemble = classifier().ensemble(5)
    made: dict[str, Any] = {
        "loader": DataLoader(TensorDataset(X, CLASSES), 77),
        "dataset": TensorDataset(X, CLASSES),
        "list": [(X[:200], CLASSES[:200]), (X[200:], CLASSES[200:])],
    }
    expected = evaluate(ensemble, (X, CLASSES), outside=X + 1)
    found = evaluate(ensemble, made[form], outside=[X[:100] + 1, X[100:] + 1])
    assert found.scores == pytest.approx(expected.scores, rel=1e-5)
    assert found.outside["outside"]["epistemic"] == pytest.approx(expected.outside["outside"]["epistemic"], abs=1e-3)


@pytest.mark.equivalence
def test_yes_or_no_are_two_classes() -> None:
    torch.manual_seed(1)
    one = nn.Linear(4, 1)
    two = nn.Linear(4, 2)
    with torch.no_grad():
        two.weight[0], two.bias[0] = 0, 0
        two.weight[1], two.bias[1] = one.weight[0], one.bias[0]
    answers = CLASSES.clamp(max=1)
    binary = Bayesian(one, Bernoulli(), sigma=1e-6).ensemble(1)
    categorical = Bayesian(two, Categorical(), sigma=1e-6).ensemble(1)
    found = evaluate(binary, (X, answers[:, None].float()), outside=-X)
    assert evaluate(binary, (X, answers[:, None].bool())).scores == found.scores
    expected = evaluate(categorical, (X, answers), outside=-X)
    assert found.scores == pytest.approx(expected.scores, rel=1e-4)
    entropy = (each.outside["outside"]["entropy"].auroc for each in (found, expected))
    assert next(entropy) == pytest.approx(next(entropy), abs=1e-3)


@pytest.mark.identities
def test_targets_of_ignore_index_are_left_out() -> None:
    ignoring = Bayesian(net(3), Categorical(ignore_index=-100), Normal(1.0), sigma=0.2, seed=0)
    some, batches = CLASSES.clone(), [slice(0, 100), slice(100, 120), slice(120, 300)]
    some[:50] = some[100:120] = some[-1] = -100
    known = some >= 0
    found = evaluate(ignoring.ensemble(5), [(X[part], some[part]) for part in batches], outside=-X)
    expected = evaluate(classifier().ensemble(5), (X[known], CLASSES[known]), outside=-X)
    assert found.examples == expected.examples == 229
    assert found.scores == pytest.approx(expected.scores, rel=1e-5)
    assert found.standard_errors == pytest.approx(expected.standard_errors, rel=1e-5)
    assert found.outside["outside"]["entropy"] == pytest.approx(expected.outside["outside"]["entropy"], rel=1e-5)
    with pytest.raises(ValueError, match="'data' parameter of evaluate must be with targets other than ignore_index"):
        evaluate(ignoring, (X, torch.full_like(CLASSES, -100)), draws=2)
    with pytest.raises(ValueError, match="class indices"):
        evaluate(classifier(), (X, some), draws=2)


@pytest.mark.identities
def test_of_maps_only_the_elements_of_ignore_index_are_left_out() -> None:
    model = Bayesian(nn.Conv2d(1, 3, 1), Categorical(ignore_index=9), sigma=0.1, seed=0)
    images, labels = torch.randn(6, 1, 2, 2), torch.randint(3, (6, 2, 2))
    labels[0] = labels[1, 0] = labels[2, 1, 1] = 9
    known = labels != 9
    found = evaluate(model, (images, labels), draws=3)
    prediction = model.predict(images, draws=3)
    assert isinstance(prediction, ClassPredictive)
    assert isinstance(found.scores, ClassScores)
    assert found.examples == 5
    assert found.scores.accuracy == pytest.approx(1 - error(prediction.probs[known], labels[known]))
    log_probs = prediction.probs.gather(-1, labels.where(known, 0)[..., None])[..., 0].log().where(known, 0.0)
    assert found.scores.nll == pytest.approx(-float(log_probs.sum()) / 5, rel=1e-5)
    right = (prediction.labels == labels).double()
    sums = ((right - right[known].mean()) * known)[1:].flatten(1).sum(1)  # of a ratio of means over examples
    expected = math.sqrt(5 / 4 * float(sums.square().sum())) / int(known.sum())
    assert found.standard_errors["accuracy"] == pytest.approx(expected)


@pytest.mark.identities
def test_of_counts_it_says_that_intervals_hold_more() -> None:
    model = Bayesian(nn.Linear(4, 1), Poisson(), sigma=0.01, seed=0)
    counts = evaluate(model, (X, CLASSES[:, None].float()), draws=3)
    assert counts.of_counts
    assert "holds at least its level" in repr(counts)
    assert "holds at least its level" not in repr(evaluate(regressor(), (X, VALUES), draws=3))


@pytest.mark.identities
def test_maps_of_classes_are_as_many_examples_but_the_nll_adds_up() -> None:
    model = Bayesian(nn.Conv2d(1, 3, 1), Categorical(), sigma=0.1, seed=0)
    images, labels = torch.randn(6, 1, 2, 2), torch.randint(3, (6, 2, 2))
    found = evaluate(model, (images, labels), outside=images, draws=3)
    prediction = model.predict(images, draws=3)
    assert isinstance(prediction, ClassPredictive)
    flat = prediction.probs.flatten(0, -2)
    assert isinstance(found.scores, ClassScores)
    assert found.examples == 6
    assert found.scores.accuracy == pytest.approx(1 - error(flat, labels.flatten()))
    assert found.scores.nll == pytest.approx(4 * nll(flat, labels.flatten()), rel=1e-5)


@pytest.mark.identities
def test_a_shift_is_a_verdict_on_shifted_inputs(of_classes: Verdict) -> None:
    assert of_classes.shifts["none at all"] == of_classes.scores
    zeros = evaluate(classifier(), (torch.zeros_like(X), CLASSES), draws=10)
    assert of_classes.shifts["zero"] == zeros.scores != of_classes.scores


@pytest.mark.identities
def test_the_inside_is_not_told_from_itself(of_classes: Verdict) -> None:
    for found in of_classes.outside["same"].values():
        assert found.auroc == pytest.approx(0.5)
        assert found.fpr95 >= 0.95


@pytest.mark.identities
def test_one_draw_has_no_epistemic_part() -> None:
    found = evaluate(classifier(), (X, CLASSES), outside=5 * X, draws=1)
    assert found.outside["outside"]["epistemic"].auroc == 0.5
    assert found.outside["outside"]["variance"].auroc == 0.5
    assert found.outside["outside"]["reverse information"].auroc == 0.5


@pytest.mark.statistical
def test_standard_errors_are_those_of_the_means(of_values: Verdict) -> None:
    """Of replicated data: their spread is what a single verdict estimates."""
    prediction = regressor().ensemble(1)
    means = prediction(X)[0]
    found = [evaluate(prediction, (X, means + 0.5 * torch.randn_like(means))) for _ in range(100)]
    for name in ("nll", "crps", "rmse", "coverage_90"):
        values = torch.tensor([getattr(each.scores, name) for each in found], dtype=torch.float64)
        said = sum(each.standard_errors[name] ** 2 for each in found) / 100
        # The variance of 100 normal numbers has the relative standard deviation sqrt(2 / 99).
        assert_z((values.var() / said - 1).view(1) / math.sqrt(2 / 99), f"the standard error of {name}")
    assert set(of_values.standard_errors) == {"rmse", "nll", "crps", "coverage_50", "coverage_90"}


@pytest.mark.statistical
def test_intervals_of_a_true_model_hold_what_they_promise() -> None:
    ensemble = regressor().ensemble(4)
    x = torch.randn(4000, 4)
    outputs = ensemble(x)
    chosen = outputs[torch.randint(4, (4000,)), torch.arange(4000)]
    found = evaluate(ensemble, (x, chosen + 0.5 * torch.randn_like(chosen)))
    assert isinstance(found.diagram, Coverage)
    level = found.diagram.level
    # Two elements of an example share a component: half as many are counted.
    assert_z((found.diagram.observed - level) / (level * (1 - level) / 4000).sqrt(), "coverage")


@pytest.mark.identities
def test_a_distribution_without_quantiles_has_the_other_scores() -> None:
    class Odd(distributions.Normal):  # of whose quantiles there is no need
        def icdf(self, value: Tensor) -> Tensor:
            raise NotImplementedError

    class Other(distributions.Laplace):
        def icdf(self, value: Tensor) -> Tensor:
            raise NotImplementedError

        def cdf(self, value: Tensor) -> Tensor:
            raise NotImplementedError

    def score_of(kind: type[distributions.Distribution]) -> Any:
        def distribution(output: Tensor) -> distributions.Distribution:
            return kind(output, torch.ones_like(output))  # type: ignore[call-arg,arg-type]

        likelihood = LogLikelihood(lambda output, target: distribution(output).log_prob(target).sum(1), distribution)
        return evaluate(Bayesian(net(2), likelihood, seed=0), (X, VALUES), draws=2).scores

    assert math.isfinite(score_of(Odd).crps)
    found = score_of(Other)
    assert math.isnan(found.crps)
    assert math.isfinite(found.nll)


@pytest.mark.identities
@pytest.mark.parametrize("kind", ["classes", "values"])
def test_it_can_be_read(kind: str, request: pytest.FixtureRequest) -> None:
    verdict: Verdict = request.getfixturevalue(f"of_{kind}")
    text = str(verdict)
    assert "300 examples, 10 draws" in text
    assert f"{verdict.scores.nll:.4g}" in text
    assert "AUROC" in text
    assert max(map(len, text.splitlines())) < 120
    plain = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert plain["scores"] == pytest.approx(verdict.scores._asdict())
    assert plain["shifts"].keys() == verdict.shifts.keys()
    assert plain["risk_coverage"]["risk"][-1] == pytest.approx(verdict.risk_coverage.at(1.0))


@pytest.mark.identities
@pytest.mark.parametrize("kind", ["classes", "values"])
def test_it_is_drawn_on_one_page_that_needs_no_other(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    verdict: Verdict = request.getfixturevalue(f"of_{kind}")
    assert len(verdict.figure().axes) == 4
    for number in range(2):
        verdict.save_html(tmp_path / f"{number}.html", title="A <b> & c")
    text = (tmp_path / "0.html").read_text()
    assert text == (tmp_path / "1.html").read_text()
    assert "<title>A &lt;b&gt; &amp; c</title>" in text
    assert "<svg" in text
    assert not re.search(r"""(src|href)\s*=\s*["']?http""", text)


@pytest.mark.identities
def test_without_matplotlib_the_text_says_which_extra_has_it(
    of_classes: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "bayesbackprop\[figures\]"'):
        of_classes.figure()


@pytest.mark.identities
@pytest.mark.parametrize(
    ("targets", "match"),
    [(CLASSES.float(), "torch.int64"), (CLASSES + 1, r"in \[0, 2\]"), (CLASSES[:, None], "'target'")],
)
def test_targets_of_another_kind_are_refused(targets: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        evaluate(classifier(), (X, targets), draws=2)


@pytest.mark.identities
def test_predictions_without_a_variance_are_refused() -> None:
    model = Bayesian(nn.Linear(2, 1), StudentT(1.0, 1.5), Normal(1.0))
    with pytest.raises(ValueError, match="whose predictions have a variance"):
        evaluate(model, (torch.randn(4, 2), torch.randn(4, 1)), draws=2)


@pytest.mark.identities
def test_what_does_not_predict_is_refused() -> None:
    class Wrong:
        def predict(self, x: Tensor, draws: int, seed: int | None) -> Tensor:
            return x

    with pytest.raises(ValueError, match="predict gives a Predictive"):
        evaluate(Wrong(), (X, CLASSES))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a method predict"):
        evaluate(net(3), (X, CLASSES))  # type: ignore[arg-type]


@pytest.mark.identities
def test_evaluating_changes_nothing() -> None:
    model = classifier().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    one, other = (evaluate(model, (X, CLASSES), draws=5, seed=3) for _ in range(2))
    assert one.to_dict() == other.to_dict()
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
