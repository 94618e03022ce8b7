"""The other networks are those that their names say, and every estimator steps through them."""

import pytest
from torch import nn

from bayesbackprop_paper.bench import networks, report
from bayesbackprop_paper.bench.contenders import Task
from bayesbackprop_paper.bench.measuring import Config

pytestmark = pytest.mark.identities

LENET, RESNET, TRANSFORMER, LSTM = (task for task, _ in networks.tasks(networks.Sizes()))


def depth(task: Task) -> int:
    return sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in task.net().modules())


@pytest.mark.parametrize(
    ("task", "name", "layers", "weights"),
    [
        (LENET, "LeNet-5", 5, 61_706),  # of LeCun et al., with all 16 maps of the second layer connected to all 6
        (RESNET, "ResNet-20", 20, 269_722),  # He et al. give 0.27 million
    ],
    ids=["LeNet-5", "ResNet-20"],
)
def test_layers_and_weights_are_those_of_the_papers(task: Task, name: str, layers: int, weights: int) -> None:
    assert (task.name, depth(task), task.weights) == (name, layers, weights)


@pytest.mark.parametrize("task", [task for task, _ in networks.tasks(networks.QUICK)], ids=lambda task: task.name)
def test_a_batch_has_an_output_for_each_class(task: Task) -> None:
    x, y = task.data(3)
    assert task.net()(x).shape == (3, 10)
    assert y.shape == (3,)


def test_every_estimator_and_prediction_of_every_network_has_a_row() -> None:
    config = Config(report.this_run("networks", "", threads=1, rounds=2, seed=0))
    rows = networks.networks(config, networks.QUICK)
    tables = {title: [row.name for row in group] for title, group in report.by_table(rows)}
    ours = [f"bayesbackprop {estimator}" for estimator in ("shared", "flipout", "local")]
    assert list(tables.values()) == [["plain", *ours], ["passes", "bayesbackprop", "bayesbackprop kept"]] * 4
    assert all(row.milliseconds is not None for row in rows)
    notes = {(row.network, row.name): row.note for row in rows}
    assert notes["LeNet-5", "bayesbackprop local"] == "scale mixture, sampled; its own Adam"
    assert "of the weights as for shared" in notes["LSTM", "bayesbackprop local"]  # which has no rule for it
    assert notes["LSTM", "bayesbackprop shared"] == "scale mixture, sampled; its own Adam"
