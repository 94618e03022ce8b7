"""A data set shaped like MNIST that takes no time, recipes that fit it, and a process that can be killed with them."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from bayesbackprop import _cli as cli
from bayesbackprop._files import read_checkpoint
from bayesbackprop_paper import data
from bayesbackprop_paper.data import Images, Split
from bayesbackprop_paper.experiments import table1
from bayesbackprop_paper.experiments.mnist import METHODS, Config
from bayesbackprop_paper.experiments.recipe import CHECKPOINT, METRICS, Schedule

N, BATCH, EPOCHS = 200, 32, 3
BATCHES = 7  # the last has 8 examples
MIDDLE = BATCHES + 4  # steps: in the middle of the second epoch


def images() -> Images:
    """Ten patterns under noise: 200 examples to train on, 100 to validate and 100 to test."""
    generator = torch.Generator().manual_seed(1)
    patterns = 2.0 * (torch.rand(10, 784, generator=generator) < 0.1)
    labels = torch.randint(10, (N + 200,), generator=generator)
    pixels = patterns[labels] + 0.5 * torch.randn(N + 200, 784, generator=generator)
    sizes = [N, 100, 100]
    return Images(*(Split(*parts) for parts in zip(pixels.split(sizes), labels.split(sizes), strict=True)))


def recipe(method: Any, **options: Any) -> Config:
    schedule = Schedule(epochs=EPOCHS, batch_size=BATCH, **{"learning_rate": 0.01, **options})
    return Config(method, units=8, schedule=schedule, prediction_draws=3, sigma=0.01, dropout=0.2)


RECIPES: dict[Any, Config] = {
    **{method: recipe(method) for method in METHODS},
    "sgd": recipe("sgd", optimiser="sgd", learning_rate=0.05, momentum=0.9),
    "bbb-mixture-from-dropout": replace(recipe("bbb-mixture"), start=recipe("dropout")),
}


def checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return read_checkpoint(folder / CHECKPOINT)


def metrics(folder: Path) -> list[dict[str, float]]:
    """The records in the folder, but for the seconds."""
    records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def send_in_step(number: int, step: int) -> Any:
    """Send this process a signal within a step, when the noise is drawn and the weights are not yet changed."""
    left = step + 1

    def count(*_: Optimizer | Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)

    return register_optimizer_step_pre_hook(count)


def fork_and_kill(cases: dict[str, tuple[int, list[str]]], folder: Path) -> None:
    """Run each command in a process of its own, which gets a signal in the middle; write down how they ended."""
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]  # which takes long to start
    data.mnist = images  # type: ignore[assignment]
    table1.RECIPES.update(RECIPES)
    ends = {}
    for name, (number, command) in cases.items():
        child = os.fork()
        if child == 0:
            os.dup2(os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT), 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            send_in_step(number, MIDDLE)
            sys.argv = ["bbb", *command]
            cli.main()
        ends[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (folder / "ends.json").write_text(json.dumps(ends))
