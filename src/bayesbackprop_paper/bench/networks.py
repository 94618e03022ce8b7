"""Networks of other kinds than fully connected: convolutions, residuals, attention and recurrence."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bayesbackprop._engine import Estimator
from bayesbackprop_paper.architectures import ResNet, lenet5
from bayesbackprop_paper.bench.contenders import OWN, Contender, Layers, Task, bayesian, ours, plain
from bayesbackprop_paper.bench.measuring import Config, predictions, settings, steps
from bayesbackprop_paper.bench.report import Row

_CLASSES = 10
_ESTIMATORS: Sequence[Estimator] = ("shared", "flipout", "local")


@dataclass(frozen=True)
class Sizes:
    """How large all is. The transformer and the LSTM have sequences of ``length`` and layers of ``width``."""

    lenet_batch: int = 128
    resnet_batch: int = 64
    resnet_blocks: int = 3  # in each of three stages, of two layers each: 20 layers with the first and the last
    batch: int = 64
    length: int = 32
    width: int = 128
    words: int = 1000
    inputs: int = 32
    draws: int = 20
    warm_up: int = 3


QUICK = Sizes(2, 2, resnet_blocks=1, batch=2, length=3, width=8, words=5, inputs=2, draws=2, warm_up=1)


def networks(config: Config, sizes: Sizes) -> list[Row]:
    """A training step by each estimator beside a plain one, and a prediction beside as many plain passes.

    All have Adam: ours its own, the others torch's, but for a library that is an optimiser.
    """
    rows: list[Row] = []
    with settings(config):
        for task, batch in tasks(sizes):
            rows += steps(config, task, batch, _contenders(task, config.peers), sizes.warm_up)
            rows += predictions(config, task, sizes.inputs, sizes.draws)
    return rows


def tasks(sizes: Sizes) -> list[tuple[Task, int]]:
    """The networks with the batches of their steps."""
    depth = 6 * sizes.resnet_blocks + 2
    words, series = partial(_words, sizes.words, sizes.length), partial(_series, sizes.length, sizes.width // 2)
    transformer, lstm = partial(_Transformer, sizes.words, sizes.width), partial(_Lstm, sizes.width // 2, sizes.width)
    return [
        (Task("LeNet-5", _lenet5, partial(_images, (1, 28, 28)), _CLASSES), sizes.lenet_batch),
        (
            Task(f"ResNet-{depth}", partial(_resnet, sizes.resnet_blocks), partial(_images, (3, 32, 32)), _CLASSES),
            sizes.resnet_batch,
        ),
        (Task("transformer encoder of 2 layers", transformer, words, _CLASSES), sizes.batch),
        (Task("LSTM", lstm, series, _CLASSES), sizes.batch),
    ]


def _contenders(task: Task, peers: Sequence[Contender]) -> list[Contender]:
    base = Contender("plain", "plain loss", plain, "Adam")
    mine = [
        ours(f"bayesbackprop {estimator}", _note(task, estimator), estimator=estimator, optimiser=OWN, against="plain")
        for estimator in _ESTIMATORS
    ]
    return [base, *mine, *(peer._replace(optimiser="Adam", against="plain") for peer in peers)]


def _note(task: Task, estimator: Estimator) -> str:
    """The objective, and how much of the network has no rule for the estimator and is drawn as for ``shared``."""
    plan = [entry for entry in bayesian(task, estimator=estimator).plan if entry.prior is not None]
    others = sum(entry.numel for entry in plan if entry.estimator != estimator)
    share = others / sum(entry.numel for entry in plan)
    return "scale mixture, sampled; its own Adam" + (f"; {share:.0%} of the weights as for shared" if others else "")


def _images(shape: tuple[int, ...], batch: int) -> Tensor:
    return torch.rand(batch, *shape)


def _words(words: int, length: int, batch: int) -> Tensor:
    return torch.randint(words, (batch, length))


def _series(length: int, features: int, batch: int) -> Tensor:
    return torch.randn(batch, length, features)


def _lenet5(layers: Layers) -> nn.Module:
    return lenet5(conv=layers.conv, linear=layers.linear)


def _resnet(blocks: int, layers: Layers) -> nn.Module:
    return ResNet(blocks, conv=layers.conv, linear=layers.linear)


class _Transformer(nn.Module):
    """Two layers of an encoder over embedded words, and a class from their mean."""

    def __init__(self, words: int, width: int, layers: Layers) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.encoder = nn.Sequential(*(layers.encoder(width, 4, 4 * width) for _ in range(2)))
        self.last = layers.linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.encoder(self.embedding(x)).mean(1))
        return outputs


class _Lstm(nn.Module):
    """A recurrent layer over a series, and a class from its last state."""

    def __init__(self, features: int, width: int, layers: Layers) -> None:
        super().__init__()
        self.recurrent = layers.lstm(features, width)
        self.last = layers.linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(x)
        outputs: Tensor = self.last(states[:, -1])
        return outputs
