"""The memory of steps, predictions and files of a network of ten million weights, each in a process of its own."""

from functools import partial
from pathlib import Path

import torch
from torch import nn

from bayesbackprop import Adam, Bayesian, FreeEnergy, Gaussian, load, save
from bayesbackprop_paper.bench.memory import process_peak, resident_memory
from opaque import Opaque

SIZES = (1000, 5000, 1000)
WEIGHTS = 10_006_000
# Of each weight mu and rho; their gradients; and what Adam keeps. Plain SGD, which keeps nothing, is the hardest case.
PARAMETERS, WITH_SGD, WITH_ADAM = 8 * WEIGHTS, 16 * WEIGHTS, 32 * WEIGHTS


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
    small = Bayesian(nn.Linear(1, 1), Gaussian(1.0), seed=0)
    save(small, path.with_suffix(".small"))  # so that what is imported at the first call is
    small.predict(torch.zeros(1, 1), draws=2)
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
