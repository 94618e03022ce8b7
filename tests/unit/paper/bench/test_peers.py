"""Other libraries that are installed learn and predict."""

import itertools
from importlib import util

import pytest
import torch
from torch import nn

from bayesbackprop_paper.bench import networks
from bayesbackprop_paper.bench.contenders import Contender, Task, UnsupportedError, fully_connected
from bayesbackprop_paper.bench.measuring import Step
from bayesbackprop_paper.bench.peers import PEERS, Peer

pytestmark = pytest.mark.identities

# What each has no layer for.
WITHOUT = {
    "torchbnn": {"transformer encoder of 2 layers", "LSTM"},
    "bayesian-torch": {"transformer encoder of 2 layers"},
    "blitz-bayesian-pytorch": {"transformer encoder of 2 layers"},
    "pyro-ppl": set(),
    "ivon-opt": set(),
}


def installed(peer: Peer) -> Peer:
    if util.find_spec(peer.modules[0].partition(".")[0]) is None:
        pytest.skip(f"{peer.distribution} is not installed (`make bench-peers` does it)")
    assert peer.is_installed()
    return peer


def learnt(contender: Contender, task: Task) -> int:
    """How many numbers a step changes; on the way the network must predict."""
    torch.manual_seed(0)
    x, y = task.data(4)
    trainee = contender.build(task)
    trainee.cost(x, y).backward()
    with torch.no_grad():
        outputs = [trainee.forward(x) for _ in range(2)]
    assert outputs[0].shape == (4, task.classes)
    assert not torch.equal(*outputs)
    return sum(parameter.numel() for parameter in trainee.module.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.distribution)
@pytest.mark.filterwarnings("default")
def test_a_peer_that_is_installed_learns_and_predicts(peer: Peer) -> None:
    for contender, sizes in itertools.product(installed(peer).contenders, [(6, 5, 5, 3), (6, 5, 5, 1)]):
        task = fully_connected(sizes)
        tensors = 1 if peer.distribution == "ivon-opt" else 2  # whose variances are in the optimiser
        assert learnt(contender, task) == tensors * task.weights


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.distribution)
@pytest.mark.filterwarnings("default")
def test_of_other_networks_a_peer_is_left_out_only_if_it_has_no_layer_for_it(peer: Peer) -> None:
    for contender, (task, _) in itertools.product(installed(peer).contenders, networks.tasks(networks.QUICK)):
        if task.name in WITHOUT[peer.distribution]:
            with pytest.raises(UnsupportedError, match=r"it has no (LSTM|layer of a transformer)"):
                contender.build(task)
        else:
            assert learnt(contender, task) >= task.weights


@pytest.mark.filterwarnings("default")
def test_steps_of_ivon_change_the_means_and_leave_them_in_the_network() -> None:
    (peer,) = (peer for peer in PEERS if peer.distribution == "ivon-opt")
    (contender,) = installed(peer).contenders
    task, kept = fully_connected((6, 5, 3)), []

    def build(task: Task) -> object:
        kept.append(contender.build(task))
        return kept[0]

    step = Step(contender._replace(build=build), task, *task.data(4))
    net: nn.Module = kept[0].module
    before = [parameter.detach().clone() for parameter in net.parameters()]
    x, _ = task.data(2)
    kept[0].forward(x)
    assert all(map(torch.equal, before, net.parameters()))
    step()
    assert not any(map(torch.equal, before, net.parameters()))
