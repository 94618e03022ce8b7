"""All methods get the same verdict, by the seed alone; what cannot be run is skipped and says why."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bayesbackprop import (
    Batches,
    Bayesian,
    Bernoulli,
    Categorical,
    FreeEnergy,
    Gaussian,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
    compare,
    evaluate,
)
from bayesbackprop._methods import _held_out, mixture
from bayesbackprop.comparison import METHODS, Comparison
from bayesbackprop.prediction import ClassPredictive, predictive
from bayesbackprop.verdict import ClassScores, ValueScores

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(120, 2, generator=RANDOM)
CLASSES = (X[:, 0] * X[:, 1] > 0).long()
VALUES = X[:, :1] + 0.1 * torch.randn(120, 1, generator=RANDOM)
OWN = ["bayesbackprop", "plain", "deep ensemble", "MC dropout"]


def net(outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, outputs))


def batches(targets: Tensor = CLASSES) -> Batches:
    return Batches(X, targets, 30)


def compared(**options: Any) -> Comparison:
    usual: dict[str, Any] = {"epochs": 2, "methods": OWN, "draws": 5, "progress": False}
    return compare(net, batches(), (X, CLASSES), **{**usual, **options})


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compared(outside=10 * X, shifts={"noise": lambda x: x + torch.randn_like(x)})


@pytest.mark.identities
def test_every_method_has_a_verdict_and_a_note(found: Comparison) -> None:
    assert list(found.verdicts) == list(found.notes) == list(found.models) == OWN
    assert {verdict.draws for verdict in found.verdicts.values()} == {1, 5}
    assert found.notes["MC dropout"] == "the network has no dropout: 0.1 was put before its last linear layer '2'"
    for verdict in found.verdicts.values():
        assert isinstance(verdict.scores, ClassScores)
        assert verdict.examples == 120
    assert found.seconds["deep ensemble"] > found.seconds["plain"]


@pytest.mark.identities
def test_the_verdicts_are_those_of_the_models(found: Comparison) -> None:
    for method, model in found.models.items():
        assert evaluate(model, (X, CLASSES), draws=5, seed=0).scores == found.verdicts[method].scores


@pytest.mark.identities
def test_the_seed_decides_everything(found: Comparison) -> None:
    generator = torch.get_rng_state()
    torch.manual_seed(123)
    after = torch.get_rng_state()
    again = compared(outside=10 * X, shifts={"noise": lambda x: x + torch.randn_like(x)})
    assert torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(generator)
    assert {**again.to_dict(), "seconds": None} == {**found.to_dict(), "seconds": None}
    other = compared(methods=["plain"], seed=1)
    assert other.verdicts["plain"].scores != found.verdicts["plain"].scores


@pytest.mark.equivalence
def test_the_methods_asked_for_play_no_role_for_each_other(found: Comparison) -> None:
    for method in OWN:
        assert compared(methods=[method]).verdicts[method].scores == found.verdicts[method].scores


@pytest.mark.identities
def test_the_plain_network_is_the_first_of_the_ensemble(found: Comparison) -> None:
    members = found.models["deep ensemble"].members  # type: ignore[attr-defined]
    assert len(members) == 5
    assert members[0] is found.models["plain"]
    weights = torch.stack([member.net[0].weight.flatten() for member in members])
    assert len(weights.unique(dim=0)) == 5
    together = found.models["deep ensemble"].predict(X, draws=1, seed=None).mean
    each = [member.predict(X, draws=1, seed=None).mean for member in members]
    torch.testing.assert_close(together, torch.stack(each).mean(0))


@pytest.mark.equivalence
def test_a_mixture_is_the_prediction_of_all_outputs() -> None:
    outputs = torch.randn(3, 4, 2)
    of_numbers = (Gaussian(0.3), Gaussian("per-input"), StudentT(1.0, 4.0), Poisson(), NegativeBinomial())
    for likelihood in (Categorical(), Bernoulli(), *of_numbers):
        parts = [predictive(likelihood, each[None], 1) for each in outputs]
        whole, joined = predictive(likelihood, outputs, 3), mixture(parts)
        assert joined.draws == 3
        torch.testing.assert_close(joined.mean, whole.mean)
        torch.testing.assert_close(joined.variance, whole.variance)


@pytest.mark.identities
def test_members_of_an_ensemble_have_a_noise_of_their_own() -> None:
    found = compare(lambda: net(1), batches(VALUES), (X, VALUES), epochs=2, methods=["deep ensemble"], progress=False)
    assert isinstance(found.verdicts["deep ensemble"].scores, ValueScores)
    components: Any = found.models["deep ensemble"].predict(X, draws=1, seed=None).components
    assert len(components.scale.view(5, -1)[:, 0].unique()) == 5


@pytest.mark.identities
def test_dropout_of_the_network_itself_is_used() -> None:
    def with_dropout() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))

    found = compare(with_dropout, batches(), (X, CLASSES), epochs=1, methods=["MC dropout"], progress=False)
    assert found.notes["MC dropout"] == "the network's own dropout stays on (modules: 1)"
    model: Any = found.models["MC dropout"]
    prediction = model.predict(X, draws=20, seed=0)
    assert isinstance(prediction, ClassPredictive)
    assert bool((prediction.epistemic > 0).all())
    assert torch.equal(prediction.mean, model.predict(X, draws=20, seed=0).mean)
    statistics = model.model.net[2].running_mean.clone()
    model.predict(X, draws=2, seed=0)
    assert torch.equal(model.model.net[2].running_mean, statistics)  # batch norm predicts by what it has learnt
    assert model.model.net[1].training  # as it was


@pytest.mark.identities
def test_without_a_place_for_dropout_there_is_none() -> None:
    def convolution() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 2, 2), nn.Flatten())

    found = compare(convolution, batches(), (X, CLASSES), epochs=1, methods=["MC dropout"], progress=False)
    assert not found.verdicts
    assert found.notes["MC dropout"].startswith("skipped: the network has neither dropout nor a linear layer")
    assert "skipped" in str(found)


@pytest.mark.identities
def test_what_is_skipped_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    train = Batches(X[:1], CLASSES[:1], 1)  # with no example to hold out
    found = compare(net, train, (X, CLASSES), epochs=1, methods=["plain", "Laplace"])
    assert list(found.verdicts) == ["plain"]
    line = "Laplace: skipped: it has no examples to hold out for the choice of a prior precision"
    assert line in str(found)
    assert line in capsys.readouterr().err


@pytest.mark.identities
def test_mistakes_of_the_users_are_no_skipped_methods() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compare(lambda: nn.Linear(3, 2), batches(), (X, CLASSES), epochs=1, methods=["plain"], progress=False)


@pytest.mark.identities
def test_our_own_model_may_be_made_by_the_user() -> None:
    made: list[Bayesian] = []

    def wrap(net: nn.Module) -> FreeEnergy:
        made.append(Bayesian(net, Categorical(), Normal(0.5), seed=7))
        return FreeEnergy(made[0], n=len(X), temperature=0.1)

    found = compared(methods=["bayesbackprop"], wrap=wrap, lr=0.05)
    assert found.models["bayesbackprop"] is made[0]
    assert found.notes["bayesbackprop"] == "as given by wrap, prior Normal"


@pytest.mark.equivalence
def test_a_loader_without_a_length_will_do() -> None:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter([(X[:60], CLASSES[:60]), (X[60:], CLASSES[60:])])

    loader = DataLoader(TensorDataset(X, CLASSES), batch_size=60)
    one, other = (
        compare(net, train, loader, epochs=1, methods=["bayesbackprop"], progress=False) for train in (Stream(), loader)
    )
    assert one.verdicts["bayesbackprop"].scores == other.verdicts["bayesbackprop"].scores


@pytest.mark.identities
def test_what_can_be_read_once_is_refused() -> None:
    with pytest.raises(ValueError, match="read in each epoch anew"):
        compare(net, iter(batches()), (X, CLASSES), epochs=1)


@pytest.mark.identities
def test_it_can_be_read_and_drawn(found: Comparison, tmp_path: Path) -> None:
    text = str(found)
    assert all(method in text for method in OWN)
    assert text.count("*") >= 5  # the best of each column
    json.dumps(found.to_dict(), allow_nan=False)
    assert len(found.figure().axes) == 4
    found.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(method in page for method in OWN)
    assert 'class="best"' in page


@pytest.mark.identities
def test_the_best_of_a_column_is_marked(found: Comparison) -> None:
    table = found.tables()[0]
    for column, name in ((1, "accuracy"), (2, "nll")):
        values = [getattr(verdict.scores, name) for verdict in found.verdicts.values()]
        best = max(values) if name == "accuracy" else min(values)
        assert {row for row, at in table.best if at == column} == {
            row for row, value in enumerate(values) if value == best
        }


# --- Laplace and IVON ------------------------------------------------------------------------------------------------


@pytest.mark.learning
@pytest.mark.parametrize("method", ["Laplace", "IVON"])
@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_others_learn_too(method: str, kind: str) -> None:
    targets = (X[:, 0] > 0).long() if kind == "classes" else VALUES
    outputs = 2 if kind == "classes" else 1
    options: dict[str, Any] = {"methods": [method], "epochs": 60, "lr": 0.01, "draws": 30, "progress": False}
    one, again = (compare(lambda: net(outputs), batches(targets), (X, targets), **options) for _ in range(2))
    assert list(one.verdicts) == [method], one.notes
    assert one.verdicts[method].scores == again.verdicts[method].scores
    scores: Any = one.verdicts[method].scores
    assert scores.accuracy > 0.9 if kind == "classes" else scores.rmse < 0.5 * float(VALUES.std())
    # Near the border of the classes, where no probability is rounded to 0.
    prediction = one.models[method].predict(X / 4, draws=30, seed=0)
    assert bool((prediction.epistemic > 0).all())


@pytest.mark.learning
def test_laplace_is_not_too_unsure_of_classes_that_can_be_told_apart() -> None:
    """laplace-torch takes the prior precision of highest marginal likelihood, 2.0 here: its ECE is 25 %."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    train, test = order[:1000], order[1000:]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10))

    options: dict[str, Any] = {"methods": ["plain", "Laplace"], "epochs": 30, "lr": 3e-3, "progress": False}
    found = compare(make, Batches(images[train], labels[train], 50), (images[test], labels[test]), **options)
    plain, laplace = (each.scores for each in found.verdicts.values())
    assert isinstance(plain, ClassScores)
    assert isinstance(laplace, ClassScores)
    assert laplace.ece < 0.03
    assert laplace.nll < plain.nll


@pytest.mark.identities
def test_laplace_says_what_it_varies() -> None:
    note = compared(methods=["Laplace"]).notes["Laplace"]
    assert re.fullmatch(
        r"around the plain network, 42 of 42 weights, Kronecker factors, linearised; "
        r"prior precision [\d.e+-]+, chosen by \d+ examples held out of a training of its own",
        note,
    )

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    found = compare(normed, batches(), (X, CLASSES), epochs=1, methods=["Laplace"], draws=5, progress=False)
    assert ", 42 of 58 weights," in found.notes["Laplace"]


@pytest.mark.identities
def test_laplace_is_skipped_where_no_layer_is_called() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    found = compare(Product, batches(), (X, CLASSES), epochs=1, methods=["Laplace"], progress=False)
    assert found.notes["Laplace"] == "skipped: the network has no linear or convolutional layer that it calls"


@pytest.mark.identities
def test_laplace_is_skipped_where_a_network_cannot_be_linearised() -> None:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return 2 * gradients[0]

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            doubled: Tensor = Backward.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return doubled

    found = compare(lambda: Own(2, 2), batches(), (X, CLASSES), epochs=1, methods=["Laplace"], progress=False)
    assert found.notes["Laplace"].startswith("skipped: the network cannot be linearised: ")


@pytest.mark.identities
def test_what_is_held_out_is_not_trained_on() -> None:
    torch.manual_seed(0)
    numbers = torch.arange(200.0)[:, None]
    given = [({"x": numbers[:150], "scale": torch.tensor(2.0)}, numbers[:150]), ({"x": numbers[150:]}, numbers[150:])]
    rest, held = _held_out(given, 200)
    assert all(torch.equal(inputs["x"], targets) for inputs, targets in (*rest, *held))
    assert all(inputs.get("scale", torch.tensor(2.0)) == 2 for inputs, _ in (*rest, *held))
    parts = [torch.cat([targets for _, targets in part]).flatten() for part in (rest, held)]
    assert torch.equal(torch.cat(parts).sort().values, numbers.flatten())
    assert 20 < len(parts[1]) < 60
    _, joined = _held_out([(numbers[:100], numbers[:100]), (numbers[100:], numbers[100:])], 200)
    assert len(joined) == 1
    pairs = [(numbers[k : k + 2], numbers[k : k + 2]) for k in range(0, 200, 2)]
    assert {len(targets) for _, targets in _held_out(pairs, 200)[0]} == {2}  # none of one example


@pytest.mark.identities
def test_the_methods_are_those_of_the_docs() -> None:
    assert list(METHODS) == [*OWN, "Laplace", "IVON"]
