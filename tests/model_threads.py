"""A model that one thread trains while others read it: they must see the means, never weights that were drawn.

The steps of the optimiser and the reads take turns, as in any program of torch. What they do not wait for is the cost
and its gradients, which draw weights and change nothing that a reader may see.
"""

import copy
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, FreeEnergy, Gaussian, load, save

# Seconds after which a thread that is still alive hangs.
PATIENCE = 60.0

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
Y = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))


# Of a thread: whether networks take their time, so that others run meanwhile.
_slowly = threading.local()


class Normed(nn.Module):
    """A network that is no plain stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 30), nn.LayerNorm(30), nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).tanh()
        if getattr(_slowly, "on", False):
            time.sleep(1e-3)
        return self.last(hidden + 1)


NETS: dict[str, Callable[[], nn.Module]] = {
    "any network": Normed,
    "fully connected": lambda: nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 2)),
}


class Said(NamedTuple):
    """What came of one read."""

    outcome: Literal["equal", "accepted wrong", "crashed", "hung"]
    detail: str = ""


class Case(NamedTuple):
    """How a network is read while it is trained, under which estimator."""

    net: str
    reader: str
    estimator: str

    @property
    def name(self) -> str:
        return f"{self.reader}, {self.net}"


# --- readers: what they see, as tensors by name ----------------------------------------------------------------------


def _saved(model: Bayesian, folder: Path) -> dict[str, Tensor]:
    save(model, folder / "model")
    return _state(load(folder / "model", copy.deepcopy(_nets_of[model])))


def _state(model: Bayesian) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _output(output: Any) -> dict[str, Tensor]:
    return {"output": output.detach().clone()}


READERS: dict[str, Callable[[Bayesian, Path], dict[str, Tensor]]] = {
    "save": _saved,
    "state_dict": lambda model, _: _state(model),
    "deepcopy": lambda model, _: _state(copy.deepcopy(model)),
    "model(x)": lambda model, _: _output(model(X)),
    "net(x)": lambda model, _: _output(model.net(X)),
    "parameters": lambda model, _: {name: value.detach().clone() for name, value in model.named_parameters()},
    "predict_mean": lambda model, _: _output(model.predict_mean(X).mean),
    "predict": lambda model, _: _output(model.predict(X, draws=4).mean),
    "ensemble": lambda model, _: _output(model.ensemble(3).predict(X).mean),
}
# A network of the same architecture for each model, which nobody trains.
_nets_of: dict[Bayesian, nn.Module] = {}


def cases() -> list[Case]:
    """Every reader of every network, and threads that train models which share a layer."""
    read = [Case(net, reader, "shared") for reader in READERS for net in NETS]
    return [*read, *(Case(net, "train", estimator) for net in NETS for estimator in ("shared", "local"))]


def attempt(case: Case, calls: int, seed: int) -> Iterator[Said]:
    """One thread trains while another makes so many calls."""
    torch.set_num_threads(1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        attack = train_together if case.reader == "train" else read_while_training
        yield from attack(case, calls, seed)
    finally:
        sys.setswitchinterval(interval)


def read_while_training(case: Case, calls: int, seed: int) -> list[Said]:
    model = Bayesian(NETS[case.net](), Gaussian(1.0), estimator=case.estimator, sigma=0.5, seed=seed)
    twin = copy.deepcopy(model)  # which nobody trains: what a reader should see
    _nets_of[model] = _nets_of[twin] = NETS[case.net]()
    objective, optimiser = FreeEnergy(model, n=len(X)), torch.optim.SGD(model.parameters(), 1e-3)
    means, known = dict(model.named_parameters()), dict(twin.named_parameters())
    chance = random.Random(seed)
    turn, ended, said = threading.Lock(), threading.Event(), list[Said]()

    def train() -> None:
        _slowly.on = True
        while not ended.is_set():
            optimiser.zero_grad()
            objective(X, Y).backward()
            with turn, torch.no_grad():
                optimiser.step()
                for name, value in means.items():
                    known[name].copy_(value)

    def read() -> None:
        reader = READERS[case.reader]
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(calls):
                with turn:
                    time.sleep(chance.uniform(0, 2e-3))  # so that it happens at any moment of a step
                    found, expected = reader(model, Path(folder)), reader(twin, Path(folder))
                said.append(_compared(found, expected))

    try:
        return _run([read, train], ended, said)
    finally:
        del _nets_of[model], _nets_of[twin]


def train_together(case: Case, calls: int, seed: int) -> list[Said]:
    """Three threads compute costs and gradients: two of one model, one of another that shares a layer with it."""
    net = NETS[case.net]()
    other = copy.deepcopy(net)
    for name, module in net.named_children():
        if isinstance(module, nn.Linear):
            setattr(other, name, module)
            break
    models = [Bayesian(each, Gaussian(1.0), estimator=case.estimator, sigma=0.5, seed=seed) for each in (net, other)]
    ended, said = threading.Event(), list[Said]()

    def costs(model: Bayesian, step: int) -> dict[str, Tensor]:
        cost = FreeEnergy(model, n=len(X))(X, Y, step=step)
        gradients = torch.autograd.grad(cost, [*model.parameters()])
        return {"cost": cost.detach(), **{str(number): each for number, each in enumerate(gradients)}}

    steps = range(1, 6)
    alone = {(number, step): costs(model, step) for number, model in enumerate(models) for step in steps}

    def train(number: int) -> None:
        _slowly.on = True
        for call in range(calls):
            step = steps[call % len(steps)]
            said.append(_compared(costs(models[number], step), alone[number, step]))

    return _run([lambda: train(0), lambda: train(0), lambda: train(1)], ended, said)


class Scaled(nn.Module):
    """Its parameters are used by methods of their own, for which torch holds no other reference to them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.clone() * self.scale.exp()


def train_while_another_reads(dtype: str) -> None:
    model = Bayesian(Scaled(), Gaussian(1.0), seed=0)
    x, y = (torch.ones(8, size, dtype=getattr(torch, dtype)) for size in (3, 2))
    model.draw()  # makes what finds the tensors, which are then of another type
    model.to(x.dtype)
    free_energy, ended = FreeEnergy(model, n=8), threading.Event()

    def read() -> None:
        while not ended.is_set():
            model.net(x)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(500):
        free_energy(x, y).backward()
    ended.set()
    thread.join()
    print("both ended")


def _compared(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Said:
    """Equal to rounding: weights that were drawn are off by about 0.5."""
    if found.keys() != expected.keys():
        return Said("accepted wrong", f"other names: {sorted(found.keys() ^ expected.keys())}")
    for name, value in expected.items():
        if not torch.allclose(found[name], value, rtol=1e-4, atol=1e-4):
            return Said("accepted wrong", f"{name} is off by {(found[name] - value).abs().max():.2g}")
    return Said("equal")


def _run(workers: list[Callable[[], None]], ended: threading.Event, said: list[Said]) -> list[Said]:
    """Run each in a thread; the first ends them all."""

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            said.append(Said("crashed", f"{type(error).__name__}: {error}"))
        finally:
            ended.set()

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        if thread.is_alive():
            said.append(Said("hung", f"a thread after {PATIENCE:.0f} s"))
    return said
