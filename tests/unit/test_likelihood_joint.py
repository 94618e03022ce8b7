"""Several targets of one network: a product of likelihoods, one predictive distribution for each, and joint draws."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bayesbackprop import (
    Batches,
    Bayesian,
    Bernoulli,
    Categorical,
    Ensemble,
    FreeEnergy,
    Gaussian,
    Joint,
    LogLikelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    fit,
    load,
    save,
)
from bayesbackprop.prediction import ClassPredictive, JointPredictive, ValuePredictive

pytestmark = pytest.mark.identities

NAMES = ["price", "sold.when", "items"]  # the second no name of a module, the third that of a method of mappings


class Heads(nn.Module):
    """A trunk with three heads."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.named = named
        self.trunk = nn.Linear(3, 8)
        self.heads = nn.ModuleList([nn.Linear(8, units) for units in (2, 4, 1)])

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.trunk(x))
        outputs = [head(h) for head in self.heads]
        return dict(zip(NAMES, outputs, strict=True)) if self.named else tuple(outputs)


def likelihoods() -> list[Any]:
    return [Gaussian("per-input"), Categorical(), NegativeBinomial()]


def joint(named: bool) -> Joint:
    return Joint(dict(zip(NAMES, likelihoods(), strict=True)) if named else likelihoods())


def data(named: bool, n: int = 6) -> tuple[Tensor, Any]:
    targets = [torch.randn(n, 1).double(), torch.randint(4, (n,)), torch.randint(9, (n, 1))]
    return torch.randn(n, 3).double(), dict(zip(NAMES, targets, strict=True)) if named else tuple(targets)


def model(named: bool) -> Bayesian:
    return Bayesian(Heads(named), joint(named), sigma=0.3, seed=0).double()


def each(values: Any) -> list[Any]:
    return list(values.values()) if isinstance(values, dict) else list(values)


ways = pytest.mark.parametrize("named", [True, False], ids=["named", "in order"])


@ways
def test_the_log_probability_is_the_sum(named: bool) -> None:
    x, targets = data(named)
    likelihood = joint(named).double()
    output = Heads(named).double()(x)
    parts = [head.log_prob(o, y) for head, o, y in zip(likelihood.each, each(output), each(targets), strict=True)]
    expected = parts[0] + parts[1] + parts[2]
    assert expected.shape == (6,)
    torch.testing.assert_close(likelihood.log_prob(output, targets), expected)
    torch.testing.assert_close(likelihood.cost(output, targets), -expected.mean())
    names = [name for name, _ in likelihood.named_parameters()]
    assert names == ["heads.2.log_dispersion"]
    assert len(each(likelihood.distribution(output))) == 3


def test_heads_keep_what_they_train_on() -> None:
    likelihood = Joint([Gaussian("per-input", beta=0.5), Categorical(label_smoothing=0.1)])
    output, target = (torch.randn(5, 2), torch.randn(5, 3)), (torch.randn(5, 1), torch.randint(3, (5,)))
    expected = sum(head.cost(o, y) for head, o, y in zip(likelihood.each, output, target, strict=True))
    torch.testing.assert_close(likelihood.cost(output, target), expected)


@ways
def test_one_predictive_distribution_for_each_head(named: bool) -> None:
    x, targets = data(named)
    made = model(named)
    predicted = made.predict(x, draws=7)
    assert isinstance(predicted, JointPredictive)
    assert len(predicted) == 3
    keys: list[Any] = NAMES if named else [0, 1, 2]
    kinds = [ValuePredictive, ClassPredictive, ValuePredictive]
    outputs = [made.draw(index=k)(x) for k in range(7)]
    for number, (key, kind, head) in enumerate(zip(keys, kinds, made.likelihood.each, strict=True)):
        assert isinstance(predicted[key], kind)
        stacked = torch.cat([each(output)[number] for output in outputs]).detach()
        expected = head.distribution(stacked)
        y = each(targets)[number]
        log_probs = expected.log_prob(y.repeat(7, *[1] * (y.dim() - 1))).reshape(7, *y.shape)
        torch.testing.assert_close(predicted[key].log_prob(y), log_probs.logsumexp(0) - math.log(7))
        for name in ("mean", "variance", "stddev", "entropy", "aleatoric", "epistemic"):
            assert torch.equal(getattr(predicted, name)[key], getattr(predicted[key], name))
        assert torch.equal(predicted.quantiles([0.25, 0.75])[key], predicted[key].interval(0.5))
    assert [*predicted] == NAMES if named else [*predicted] == [predicted[0], predicted[1], predicted[2]]
    for other in (made.predict_mean(x), made.ensemble(4).predict(x)):
        assert isinstance(other, JointPredictive)
        assert other.mean[keys[0]].shape == (6, 1)


@ways
def test_the_joint_probability_is_that_of_shared_draws(named: bool) -> None:
    """log mean_w prod_h P(y_h|x,w), which is not the sum over heads of log mean_w P(y_h|x,w)."""
    x, targets = data(named)
    made = model(named)
    expected = torch.stack([made.likelihood.log_prob(made.draw(index=k)(x), targets) for k in range(7)])
    predicted = made.predict(x, draws=7)
    found = predicted.log_prob(targets)
    torch.testing.assert_close(found, (expected.logsumexp(0) - math.log(7)).detach())
    keys: list[Any] = NAMES if named else [0, 1, 2]
    apart = sum(predicted[key].log_prob(y).reshape(6, -1).sum(1) for key, y in zip(keys, each(targets), strict=True))
    assert (found - apart).abs().max() > 1e-3


def test_samples_of_all_heads_are_of_one_draw() -> None:
    """Two drawn networks, one at -100 and one at +100 in both heads: never one of each."""

    class Signs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sign = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return 100 * self.sign * x, -100 * self.sign * x

    weights = {"sign": torch.tensor([[-1.0], [1.0]])}
    predicted = Ensemble(Signs(), Joint([Gaussian(1.0), StudentT(1.0, 5.0)]), weights).predict(torch.ones(4, 1))
    first, second = predicted.sample(200)
    assert first.shape == second.shape == (200, 4, 1)
    assert torch.equal(first.sign(), -second.sign())
    assert (first.sign() == first[:, :1].sign()).all()  # and so are all examples
    assert 60 < int((first[:, 0] > 0).sum()) < 140


@ways
def test_it_trains_and_is_validated(named: bool) -> None:
    torch.manual_seed(1)
    x, targets = data(named, n=40)
    made = model(named)
    before = [parameter.detach().clone() for parameter in made.parameters()]
    history = fit(made, Batches(x, targets, batch_size=10), epochs=3, validation=Batches(x, targets, batch_size=20))
    assert all(math.isfinite(record["validation_nll"]) for record in history)
    assert "validation_error" not in history[0]
    for was, parameter in zip(before, made.parameters(), strict=True):
        assert not torch.equal(was, parameter)
    cost = FreeEnergy(made, n=40)(x, targets)
    torch.testing.assert_close(cost.likelihood, made.likelihood.cost(made.draw(1)(x), targets))


def test_a_loader_of_dictionaries() -> None:
    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, row: int) -> tuple[Tensor, dict[str, Any]]:
            return torch.ones(3).double(), {
                NAMES[0]: torch.ones(1).double(),
                NAMES[1]: row % 4,
                NAMES[2]: torch.ones(1),
            }

    assert len(fit(model(named=True), DataLoader(Rows(), batch_size=4), epochs=2)) == 2


@ways
def test_the_file_holds_the_heads(named: bool, tmp_path: Path) -> None:
    made = model(named)
    with torch.no_grad():
        made.likelihood.each[2].log_dispersion.fill_(0.3)
    save(made, tmp_path / "model")
    loaded = load(tmp_path / "model", Heads(named).double())
    assert loaded.likelihood.names == made.likelihood.names
    assert repr(loaded.likelihood) == repr(made.likelihood)
    x, targets = data(named)
    assert torch.equal(loaded.predict(x, draws=3).log_prob(targets), made.predict(x, draws=3).log_prob(targets))


def test_a_file_with_a_head_of_the_users_own(tmp_path: Path) -> None:
    own = LogLikelihood(lambda output, target: -(output - target).square().sum(1), name="squares")
    made = Bayesian(Heads(named=False), Joint([Gaussian("per-input"), Categorical(), own]), seed=0)
    save(made, tmp_path / "model")
    with pytest.raises(ValueError, match="The 'likelihood' parameter of load must be given"):
        load(tmp_path / "model", Heads(named=False))
    assert load(tmp_path / "model", Heads(named=False), likelihood=made.likelihood).seed == 0


def test_heads_within_heads(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Any:
            h = self.layer(x)
            return {"a": h[:, :1], "b": (h[:, 1:3], h[:, 3:])}

    made = Bayesian(Nested(), Joint({"a": Poisson(), "b": Joint([Gaussian("per-input"), Ordinal(3)])}), seed=0)
    targets = {"a": torch.ones(5, 1), "b": (torch.zeros(5, 1), torch.ones(5, 1, dtype=torch.int64))}
    predicted = made.predict(torch.ones(5, 3), draws=4)
    assert predicted.log_prob(targets).shape == (5,)
    assert predicted["b"][1].probs.shape == (5, 1, 3)
    assert predicted.sample(6)["b"][0].shape == (6, 5, 1)
    FreeEnergy(made, n=5)(torch.ones(5, 3), targets).backward()
    save(made, tmp_path / "model")
    assert repr(load(tmp_path / "model", Nested()).likelihood) == repr(made.likelihood)


# --- errors ----------------------------------------------------------------------------------------------------------

SHARED = Gaussian(0.1)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        *((value, "The 'heads' parameter of Joint must be a list") for value in (None, 1, "x", Gaussian(0.1))),
        *(
            (
                value,
                "The 'heads' parameter of Joint must be a mapping from names to likelihoods, or a list of likelihoods",
            )
            for value in ([], {}, [1], ["x"], {"a": 1}, {1: Poisson()}, [Gaussian], torch.ones(2))
        ),
        ([SHARED, SHARED], "The 'heads' parameter of Joint must be made of different likelihoods"),
    ],
)
def test_bad_heads_are_refused(heads: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Joint(heads)


A = torch.zeros(4, 1)


IN_ORDER = "parameter of Joint must be a tuple or list of 1, one for each head. Got"
NAMED = "parameter of Joint must be a mapping with the names of the heads, ['a']. Got"


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "message"),
    [
        (Joint([Poisson()]), A, (A,), f"'output' {IN_ORDER} a tensor of shape [4, 1] and type torch.float32 instead."),
        (Joint([Poisson()]), (A, A), (A,), f"'output' {IN_ORDER} a tuple of 2 instead."),
        (Joint([Poisson()]), (A,), A, f"'target' {IN_ORDER} a tensor"),
        (Joint([Poisson()]), (A,), {"a": A}, f"'target' {IN_ORDER} a dict of ['a'] instead."),
        (Joint({"a": Poisson()}), {"a": A, "b": A}, {"a": A}, f"'output' {NAMED} a dict of ['a', 'b'] instead."),
        (Joint({"a": Poisson()}), {"a": A}, {}, f"'target' {NAMED} a dict of [] instead."),
        (Joint({"a": Poisson()}), {"a": A}, None, f"'target' {NAMED} a NoneType instead."),
        (Joint({"a": Poisson()}), {"a": A}, {"a": A[:3]}, "parameter of Poisson must be a tensor of shape [4, 1]"),
        (Joint([Poisson(), Bernoulli()]), (A, A[:1]), (A, A[:1]), "of as many examples for each head. Got [4, 1]"),
    ],
)
def test_bad_outputs_and_targets_are_refused(likelihood: Joint, output: Any, target: Any, message: str) -> None:
    for function in (likelihood.log_prob, likelihood.cost):
        with pytest.raises(ValueError, match=re.escape(message)):
            function(output, target)


def test_a_network_without_heads_is_refused() -> None:
    made = Bayesian(nn.Linear(3, 1), Joint([Poisson()]), seed=0)
    message = re.escape("The 'output' parameter of Joint must be a tuple or list of 1, one for each head. Got a tensor")
    with pytest.raises(ValueError, match=message):
        FreeEnergy(made, n=4)(torch.ones(4, 3), (A,))
    with pytest.raises(ValueError, match=message):
        made.predict(torch.ones(4, 3), draws=2)
