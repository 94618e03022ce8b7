"""Convolutional networks: each method is trained, and judged by the same figures."""

from typing import Any

import pytest
import torch
from torch import nn

import digits
from bayesbackprop import Bayesian, evaluate
from bayesbackprop.verdict import ClassScores
from bayesbackprop_paper.data import Images, Split
from bayesbackprop_paper.experiments import networks
from bayesbackprop_paper.experiments.truth import Figures, Run

pytestmark = pytest.mark.identities

TASK = networks.Task("MNIST", "tiny", networks.Extent(epochs=2, examples=150, draws=3, judged=40))


def tiny(dropout: float) -> nn.Module:
    """A convolution, batch normalisation, and two linear layers with dropout before the last."""
    first = [nn.Conv2d(1, 2, 5, stride=4), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, nn.Linear(72, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 10))


def clothes() -> Images:
    images = 2.0 * torch.rand(60, 784, generator=torch.Generator().manual_seed(2))
    return Images(*(3 * [Split(images, torch.zeros(60, dtype=torch.int64))]))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {"MNIST": digits.images(), "Fashion-MNIST": clothes()}
    monkeypatch.setattr(networks, "images", sets.__getitem__)
    monkeypatch.setitem(networks.NETWORKS, "tiny", tiny)  # type: ignore[arg-type]
    networks._plain_network.cache_clear()


def without_time(figures: Figures) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not name.startswith("seconds")}


def logits(model: Any, draws: int = 3) -> torch.Tensor:
    """[networks, images, classes]."""
    found: torch.Tensor = model.predict(TASK.test_set().images, draws=draws, seed=0).components.logits
    return found.view(-1, 40, 10)


def test_the_methods_and_networks_are_those_that_were_to_be_compared() -> None:
    wanted = ["plain", "dropout, off in prediction", "MC dropout", "IVON", "ensemble of 5"]
    wanted += [f"ours, {which}" for which in ("diagonal", "last layer", "low rank")]
    assert sorted(networks.METHODS) == sorted(wanted)
    assert networks.EXTENTS.keys() == networks.NETWORKS.keys() - {"tiny"} == {"LeNet-5", "ResNet-20"}
    for name in networks.EXTENTS:
        net = networks.NETWORKS[name](0.5)
        assert sum(isinstance(module, nn.Dropout) for module in net.modules()) > 0
        assert net(torch.rand(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("method", networks.METHODS)
def test_every_method_is_judged_alike_and_by_its_seed(method: str) -> None:
    figures = networks.measure(TASK, Run(TASK.name, method, 0))
    assert list(figures) == ["error %", "NLL", "ECE %", "AUROC entropy", "seconds of training"]
    assert figures["seconds of training"] > 0
    networks._plain_network.cache_clear()
    assert without_time(networks.measure(TASK, Run(TASK.name, method, 0))) == without_time(figures)
    assert without_time(networks.measure(TASK, Run(TASK.name, method, 1))) != without_time(figures)


def test_the_figures_are_those_of_the_verdict_on_test_images_and_on_the_other_set() -> None:
    figures = networks.measure(TASK, Run(TASK.name, "ours, diagonal", 0))
    model = networks.METHODS["ours, diagonal"](TASK, 0).model
    test = Split(*(part[:40] for part in digits.images().test))
    shaped = (test.images.view(-1, 1, 28, 28), test.labels)
    outside = clothes().test.images[:40].view(-1, 1, 28, 28)
    found = evaluate(model, shaped, outside=outside, draws=3, seed=0)
    assert isinstance(found.scores, ClassScores)
    assert figures["error %"] == pytest.approx(100 * (1 - found.scores.accuracy))
    assert figures["NLL"] == found.scores.nll
    assert figures["ECE %"] == 100 * found.scores.ece
    assert figures["AUROC entropy"] == found.outside["outside"]["entropy"].auroc


def test_validation_images_are_never_trained_on() -> None:
    training, held_out = TASK._replace(extent=TASK.extent._replace(examples=None)).training_set(), digits.images()
    assert torch.equal(training.images.view(-1, 784), held_out.train.images)
    assert torch.equal(TASK.training_set().labels, held_out.train.labels[:150])


def test_training_of_another_length_is_another_task() -> None:
    extents = [TASK.extent, TASK.extent._replace(epochs=3), TASK.extent._replace(examples=None)]
    names = [TASK._replace(extent=extent).name for extent in extents]
    assert names[0] == "MNIST, tiny, epochs: 2 of 150 images"
    assert len(set(names)) == 3


def test_an_ensemble_has_five_networks_begins_with_the_plain_one_and_shares_none_with_another_seed() -> None:
    ensemble = networks.METHODS["ensemble of 5"]
    one, other = ensemble(TASK, 0), ensemble(TASK, 1)
    members = torch.cat([logits(each.model) for each in (one, other)])
    assert members.shape[0] == len(members.unique(dim=0)) == 10
    plain = networks.METHODS["plain"](TASK, 0)
    assert torch.equal(logits(plain.model), logits(one.model)[:1])
    assert 0 < plain.seconds < one.seconds


def test_dropout_stays_on_or_is_off_and_batch_normalisation_is_left_alone() -> None:
    on, off = (networks.METHODS[name](TASK, 0) for name in ("MC dropout", "dropout, off in prediction"))
    net = networks._plain_network(TASK, 0, networks._DROPOUT).net
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert len(logits(on.model).unique(dim=0)) == 3
    assert torch.equal(logits(on.model), logits(on.model))
    assert logits(off.model).shape[0] == 1
    assert all(module.training for module in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert on.seconds == off.seconds  # one network


def test_the_posterior_is_of_all_weights_or_of_the_last_layer() -> None:
    for method, wanted in (("ours, diagonal", ["0", "4", "7"]), ("ours, last layer", ["7"]), ("IVON", ["0", "4", "7"])):
        model = networks.METHODS[method](TASK, 0).model
        assert isinstance(model, Bayesian)
        assert list(model.posterior) == [f"{layer}.{kind}" for layer in wanted for kind in ("weight", "bias")]
    model = networks.METHODS["ours, low rank"](TASK, 0).model
    assert isinstance(model, Bayesian)
    assert [joint.shape[1] for joint in model.joint] == [networks._RANK]


def _entry(method: str, error: float, nll: float, ece: float, task: str = "digits") -> dict[str, Any]:
    return {"task": task, "method": method, "figures": {"error %": error, "NLL": nll, "ECE %": ece}}


def test_the_verdict_leaves_out_ensembles_and_goes_by_means() -> None:
    rows = [
        _entry("plain", 1.0, 0.05, 0.9),
        _entry("MC dropout", 1.2, 0.04, 0.1),
        _entry("ours, diagonal", 1.0, 0.02, 0.2),
        _entry("ours, diagonal", 1.3, 0.04, 0.2),
        _entry("ensemble of 5", 0.1, 0.01, 0.01),
        _entry("plain", 1.0, 0.05, 0.9, task="clothes"),  # of which there is nothing to say yet
        _entry("ours, diagonal", 1.0, 0.05, 0.9, task="letters"),
        _entry("ensemble of 5", 1.0, 0.05, 0.9, task="faces"),
    ]
    text = networks.verdicts({str(number): row for number, row in enumerate(rows)})
    assert text == (
        "digits: of the single networks, ours, diagonal has the lowest NLL and MC dropout the lowest ECE; "
        "the lowest error of ours is 0.15 above the lowest of these.\n"
    )
