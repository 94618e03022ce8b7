"""Other libraries that are installed learn and predict."""

import itertools
from importlib import util

import pytest
import torch

from bayesbackprop_paper.bench.contenders import Task
from bayesbackprop_paper.bench.peers import PEERS, Peer

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.distribution)
@pytest.mark.filterwarnings("default")
def test_a_peer_that_is_installed_learns_and_predicts(peer: Peer) -> None:
    if util.find_spec(peer.modules[0].partition(".")[0]) is None:
        pytest.skip(f"{peer.distribution} is not installed (`make bench-peers` does it)")
    assert peer.is_installed()
    for contender, sizes in itertools.product(peer.contenders, [(6, 5, 5, 3), (6, 5, 5, 1)]):
        task = Task(sizes)
        x, y = task.data(4)
        trainee = contender.build(task)
        parameters = list(trainee.parameters)
        trainee.cost(x, y).backward()
        learnt = sum(parameter.numel() for parameter in parameters if parameter.grad is not None)
        assert learnt == contender.tensors * task.weights
        assert trainee.forward(x).shape == (4, sizes[-1])
        assert not torch.equal(trainee.forward(x), trainee.forward(x))
