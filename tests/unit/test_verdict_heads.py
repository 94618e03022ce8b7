"""Verdicts on models with several targets, on one example, and beside a diagnosis; weights are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import (
    Batches,
    Bayesian,
    Categorical,
    Gaussian,
    Joint,
    Normal,
    Ordinal,
    calibrate_temperature,
    compare,
    conformal_intervals,
    diagnose,
    evaluate,
)
from bayesbackprop.verdict import ClassScores, ValueScores

pytestmark = pytest.mark.identities

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
PRICE, KIND = X[:, :1] + 0.5, (X[:, 1] > 0).long()
TARGETS = {"price": PRICE, "kind": KIND}


class Two(nn.Module):
    """A head for the price and one for the kind."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.first, self.second, self.named = nn.Linear(4, 1), nn.Linear(4, 2), named

    def forward(self, x: Tensor) -> Any:
        outputs = self.first(x), self.second(x)
        return {"price": outputs[0], "kind": outputs[1]} if self.named else outputs


def joint(named: bool = True) -> Bayesian:
    torch.manual_seed(1)
    heads: Any = {"price": Gaussian(0.5), "kind": Categorical()} if named else [Gaussian(0.5), Categorical()]
    return Bayesian(Two(named), Joint(heads), Normal(1.0), sigma=0.1, seed=0)


def alone(head: str) -> Bayesian:
    """The model of one head, with the weights of the other's."""
    net = joint().net
    likelihood = Gaussian(0.5) if head == "price" else Categorical()
    return Bayesian(nn.Sequential(net.first if head == "price" else net.second), likelihood, sigma=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["pair", "batches", "order"])
def test_each_head_has_a_verdict(form: str) -> None:
    model = joint(named=form != "order")
    data: Any = (X, TARGETS) if form == "pair" else Batches(X, TARGETS, 20)
    heads: list[Any] = ["price", "kind"]
    if form == "order":
        data, heads = (X, (PRICE, KIND)), [0, 1]
    for rho in model.rho.parameters():
        nn.init.constant_(rho, -30.0)
    found = {head: evaluate(model, data, head=head, outside=X + 3, draws=3) for head in heads}
    for head, name, kind in zip(heads, ("price", "kind"), (ValueScores, ClassScores), strict=True):
        assert isinstance(found[head].scores, kind)
        expected = evaluate(alone(name), (X, TARGETS[name]), draws=3).scores
        assert found[head].scores == pytest.approx(expected, rel=1e-3)
        assert found[head].examples == 60


@pytest.mark.parametrize("head", [None, "prize", 0, True])
def test_a_head_that_there_is_not_is_refused_by_name(head: Any) -> None:
    with pytest.raises(ValueError, match=r"The 'head' parameter of evaluate must be one of \['price', 'kind'\]"):
        evaluate(joint(), (X, TARGETS), head=head)
    if head is not None:
        with pytest.raises(ValueError, match="The 'head' parameter of evaluate must be None for a model with one"):
            evaluate(alone("price"), (X, PRICE), head=head)
    with pytest.raises(ValueError, match=r"The 'data' parameter of evaluate.*for the head 'kind'.*targets for"):
        evaluate(joint(), (X, {"price": PRICE}), head="kind")


def test_what_takes_one_target_says_so_by_its_own_name() -> None:
    with pytest.raises(ValueError, match="The 'likelihood' parameter of compare must be of one target"):
        compare(lambda: Two(True), Batches(X, PRICE, 20), (X, PRICE), epochs=1, likelihood=Joint([Gaussian()]))
    with pytest.raises(ValueError, match="The 'train' parameter of compare must be pairs with one tensor"):
        compare(lambda: Two(True), Batches(X, TARGETS, 20), (X, TARGETS), epochs=1)
    with pytest.raises(ValueError, match=r"The 'model' parameter of calibrate_temperature.*several targets"):
        calibrate_temperature(joint(), (X, KIND))
    with pytest.raises(ValueError, match=r"The 'model' parameter of conformal_intervals.*several targets"):
        conformal_intervals(joint(), (X, PRICE))


def test_weights_are_refused_by_name_and_with_advice() -> None:
    weights = torch.ones(60)
    batches = Batches(X, PRICE, 20, weights=weights)
    for data in (batches, (X, PRICE, weights)):
        with pytest.raises(ValueError, match=r"of evaluate must be pairs .* leave the weights out, as in"):
            evaluate(alone("price"), data)
    with pytest.raises(ValueError, match=r"of conformal_intervals must be pairs .* leave the weights out"):
        conformal_intervals(alone("price"), batches)
    with pytest.raises(ValueError, match=r"The 'train' parameter of compare must be pairs .* no weights"):
        compare(lambda: nn.Linear(4, 1), batches, (X, PRICE), epochs=1)
    found = evaluate(alone("price"), ((x, y) for x, y, _ in batches), draws=2)
    assert found.examples == 60


@pytest.mark.parametrize("head", ["price", "kind"])
def test_one_example_has_no_standard_error(head: str) -> None:
    found = evaluate(alone(head), (X[:1], TARGETS[head][:1]), draws=3)
    assert found.standard_errors == {}
    assert "nan" not in str(found)
    assert "1 example, 3 draws" in str(found)
    assert "one example: no standard errors" in str(found)


def test_ordered_classes_may_be_a_row() -> None:
    model = Bayesian(nn.Linear(4, 1), Ordinal(2), seed=0)
    row, column = (evaluate(model, (X, targets), draws=3) for targets in (KIND, KIND[:, None]))
    assert row.to_dict() == column.to_dict()


def test_a_diagnosis_is_shown_beside_the_verdict(tmp_path: Path) -> None:
    model = alone("price")
    diagnosis = diagnose(model, (X, PRICE), draws=25)
    found = evaluate(model, (X, PRICE), draws=3, diagnosis=diagnosis)
    assert str(diagnosis) in str(found)
    found.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Has the posterior been learnt?" in page
    assert "k-hat of the importance weights" in page
    assert found.to_dict()["diagnosis"]["free_energy"]["mean"] == diagnosis.free_energy.mean
    with pytest.raises(ValueError, match="what diagnose"):
        evaluate(model, (X, PRICE), diagnosis=str(diagnosis))  # type: ignore[arg-type]
