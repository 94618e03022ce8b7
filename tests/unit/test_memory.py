"""Large networks: no step, prediction or file takes much more memory than parameters, gradients and optimiser do."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, FreeEnergy, Gaussian
from bayesbackprop_paper.bench.apart import call_apart
from large_networks import PARAMETERS, WITH_ADAM, WITH_SGD, peak_of
from opaque import Opaque

BOUND = 1.3


@pytest.mark.supports("Large networks", "bounded memory", "1.3 times parameters, gradients and the state of Adam")
@pytest.mark.identities
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from Linux's /proc")
@pytest.mark.parametrize("opaque", [False, True], ids=["fully connected", "any module"])
def test_memory_is_bounded(opaque: bool, tmp_path: Path) -> None:
    path = tmp_path / "model"
    bounds = {"construct": PARAMETERS, "save": PARAMETERS, "load": PARAMETERS, "step of Adam": WITH_ADAM}
    bounds |= dict.fromkeys(("predict", "predict, many rows", "predict, shared"), WITH_SGD)
    bounds |= {} if opaque else {"step": WITH_SGD}  # autograd holds the gradients of all weights at the same time
    for what, needed in bounds.items():
        (peak,) = call_apart(peak_of, [(what, opaque, path)])
        assert peak < BOUND * needed, f"{what} takes {peak / needed:.2f} times what is needed"


@pytest.mark.equivalence
@pytest.mark.parametrize("opaque", [False, True], ids=["fully connected", "any module"])
def test_a_graph_that_is_kept_gives_the_same_gradients_twice(opaque: bool) -> None:
    """Delta_rho takes the place of the drawn weights, which a second pass draws again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2))
    model = Bayesian(Opaque(net) if opaque else net, Gaussian(1.0), seed=0)
    cost = FreeEnergy(model, n=100)(torch.randn(8, 300), torch.randn(8, 2))
    found: list[list[Tensor]] = []
    for keep in (True, True, False):
        cost.backward(retain_graph=keep)
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.zero_grad()
    for again in found[1:]:
        for first, second in zip(found[0], again, strict=True):
            assert torch.equal(first, second)
