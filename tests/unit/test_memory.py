"""Large networks: no step, prediction or file takes much more memory than parameters, gradients and optimiser do."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Adam, Bayesian, FreeEnergy, Gaussian, load, save
from bayesbackprop_paper.bench.apart import call_apart
from bayesbackprop_paper.bench.memory import process_peak, resident_memory
from opaque import Opaque

SIZES = (1000, 5000, 1000)
WEIGHTS = 10_006_000
# Of each weight mu and rho; their gradients; and what Adam keeps. Plain SGD, which keeps nothing, is the hardest case.
PARAMETERS, WITH_SGD, WITH_ADAM = 8 * WEIGHTS, 16 * WEIGHTS, 32 * WEIGHTS
BOUND = 1.3


def _net(opaque: bool = False) -> nn.Module:
    layers = nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.ReLU(), nn.Linear(SIZES[1], SIZES[2]))
    return Opaque(layers) if opaque else layers


def _model(opaque: bool) -> Bayesian:
    return Bayesian(_net(opaque), Gaussian(1.0), seed=0)


def _step(model: Bayesian, optimiser: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimiser.zero_grad()
        FreeEnergy(model, n=100)(torch.randn(8, SIZES[0]), torch.randn(8, SIZES[-1])).backward()
        optimiser.step()


def peak_of(what: str, opaque: bool, path: Path) -> int:
    """In a process of its own: the most memory above that of the imports."""
    torch.set_num_threads(1)
    idle = resident_memory()
    assert idle is not None
    torch.manual_seed(0)
    if what == "construct":
        peak = process_peak(partial(_model, opaque))
    elif what == "load":
        with torch.device("meta"):
            net = _net(opaque)
        peak = process_peak(partial(load, path, net))
    else:
        model, x = _model(opaque), torch.randn(100 if "rows" in what else 8, SIZES[0])
        run = {
            "step": partial(_step, model, torch.optim.SGD(model.parameters(), 1e-3)),
            "step of Adam": partial(_step, model, Adam(model.parameters(), 1e-3)),
            "save": partial(save, model, path),
            "predict": partial(model.predict, x, draws=6),
            "predict, many rows": partial(model.predict, x, draws=6),
            "predict, shared": partial(model.predict, x, draws=6, estimator="shared"),
        }[what]
        peak = process_peak(run)
    assert peak is not None
    return peak - idle


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
