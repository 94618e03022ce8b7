"""Training runs for the tests: on the small digits, by command, and of an objective that writes down what it sees."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import digits
from bayesbackprop._cli import app
from bayesbackprop._files import read_checkpoint
from bayesbackprop.objective import Cost
from bayesbackprop.training import Record
from bayesbackprop_paper.experiments import mnist
from bayesbackprop_paper.experiments.recipe import BEST, CHECKPOINT, Examples, Experiment, Schedule
from digits import metrics

OPTIONS = {
    "mixture": ["--method", "bbb-mixture", "--units", "8"],
    "averaged": ["--method", "bbb-mixture", "--units", "8", "--averaging", "0.9"],
    "dropout": ["--method", "dropout", "--units", "8"],
    "momentum": ["--method", "sgd", "--units", "8"],
}


def bbb(*command: object) -> Result:
    return CliRunner().invoke(app, list(map(str, command)))


def succeed(*command: object) -> dict[str, Any]:
    """The result that a command prints as JSON, but for the seconds."""
    result = bbb(*command, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    del found["seconds"]
    return found


def start(folder: Path, config: mnist.Config = digits.RECIPES["bbb-mixture"]) -> Experiment:
    return mnist.prepare(config, digits.N, folder)


def parts() -> tuple[Examples, dict[str, Examples]]:
    training, validation, _ = digits.images()
    return Examples(*training), {"validation": Examples(*validation)}


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, averages and the optimiser's memory, bit for bit; all metrics; and the selected weights."""
    for name in (CHECKPOINT, BEST):
        (mine, about), (others, about_others) = read_checkpoint(one / name), read_checkpoint(other / name)
        assert mine.keys() == others.keys()
        different = [key for key, value in mine.items() if not torch.equal(value, others[key])]
        assert not different, (name, different)
        assert about.get("epoch") == about_others.get("epoch")
    assert metrics(one) == metrics(other)


def assert_resumes(folder: Path, whole: Path, config: mnist.Config = digits.RECIPES["bbb-mixture"]) -> None:
    start(folder, config).train(*parts())
    start(whole, config).train(*parts())
    assert_same_run(folder, whole)


class Recorder(nn.Module):
    """A cost whose gradient is 1 for every parameter; remembers what it saw, and the parameters it was asked with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 2)
        self.rho = nn.ParameterList([torch.full((2,), 5.0)])
        self.seen: list[list[int]] = []
        self.asked: list[list[Tensor]] = []

    def forward(self, inputs: Tensor, targets: Tensor) -> Cost:
        assert torch.equal(inputs[:, 0].long(), targets)
        self.seen.append(targets.tolist())
        self.asked.append(self.values())
        likelihood = sum((parameter.sum() for parameter in self.parameters()), torch.zeros(()))
        return Cost(likelihood, targets.double().mean(), 0.0)

    def param_groups(self, lr: float, *, rho_lr: float) -> list[dict[str, Any]]:
        rates = ((self.net, lr), (self.rho, rho_lr))
        return [{"params": list(part.parameters()), "lr": rate} for part, rate in rates]

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]


def counted(n: int) -> Examples:
    return Examples(torch.arange(n)[:, None].float(), torch.arange(n))


def record(folder: Path, schedule: Schedule, n: int = 10) -> tuple[Recorder, list[Record]]:
    objective = Recorder()
    run = Experiment(objective, objective.net, schedule, folder)
    return objective, run.train(counted(n), {"validation": counted(4)})


@contextmanager
def ctrl_c_counts() -> Iterator[None]:
    """Ctrl-C counts, also where the tests run in the background, whose processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
