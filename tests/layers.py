"""The layers that every estimator is tested on: one row for each, with its inputs and what is known of it."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Gaussian

ESTIMATORS = ["shared", "local", "flipout"]


class First(nn.Module):
    """The first of what a recurrent layer or an attention layer returns."""

    def __init__(self, core: nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.core = core
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        return self.core(*[x] * self.copies)[0]


class Tied(nn.Module):
    """A language model of one token: the decoder's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.embedding(x)))


class Row(NamedTuple):
    """A layer, its inputs, and which of its parameters (patterns) no rule but ``shared`` can treat.

    ``linear``: the output is linear in all the weights together, so that its moments are known exactly.
    ``deterministic``: parameters that are not Bayesian unless asked for.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    linear: bool = True
    fallback: tuple[str, ...] = ()
    deterministic: tuple[str, ...] = ()


def _normal(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape, dtype=torch.float64),)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


_ATTENTION = ("*self_attn.*",)

_NORMS = ("*norm?.*",)

ROWS = {
    "linear": Row(lambda: nn.Linear(3, 2), _normal(2, 3)),
    "linear, one example": Row(lambda: nn.Linear(3, 2), _normal(3)),
    "linear, sequence": Row(lambda: nn.Linear(3, 2), _normal(2, 3, 3)),
    "linear, no bias": Row(lambda: nn.Linear(3, 2, bias=False), _normal(2, 3)),
    "bilinear": Row(lambda: nn.Bilinear(3, 2, 2), lambda: (*_normal(2, 3)(), *_normal(2, 2)())),
    "bilinear, no bias": Row(
        lambda: nn.Bilinear(3, 2, 2, bias=False), lambda: (*_normal(2, 4, 3)(), *_normal(2, 4, 2)())
    ),
    "conv1d": Row(lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), _normal(2, 2, 7)),
    "conv1d, one example": Row(lambda: nn.Conv1d(2, 3, 3), _normal(2, 5)),
    "conv1d, circular, groups": Row(
        lambda: nn.Conv1d(4, 2, 3, padding=2, padding_mode="circular", groups=2, bias=False), _normal(2, 4, 4)
    ),
    "conv2d": Row(lambda: nn.Conv2d(2, 2, (2, 3), stride=(1, 2), padding=(1, 0)), _normal(2, 2, 3, 4)),
    "conv2d, channels last": Row(lambda: nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last), _normal(2, 3, 3, 3)),
    "conv2d, reflect, dilation": Row(
        lambda: nn.Conv2d(2, 2, 2, padding=1, padding_mode="reflect", dilation=2), _normal(2, 2, 3, 3)
    ),
    "conv2d, same, depthwise": Row(lambda: nn.Conv2d(2, 4, 3, padding="same", groups=2), _normal(2, 2, 3, 3)),
    "conv3d": Row(lambda: nn.Conv3d(1, 2, 2, stride=(2, 1, 1), padding=(1, 0, 0)), _normal(2, 1, 2, 3, 3)),
    "conv3d, no bias": Row(lambda: nn.Conv3d(2, 2, (1, 2, 2), groups=2, bias=False), _normal(2, 2, 2, 2, 3)),
    "transposed conv1d": Row(
        lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), _normal(2, 2, 3)
    ),
    "transposed conv1d, holes": Row(  # stride beyond the kernel: some outputs see no weight at all
        lambda: nn.ConvTranspose1d(2, 2, 2, stride=3, bias=False), _normal(2, 2, 2)
    ),
    "transposed conv2d": Row(
        lambda: nn.ConvTranspose2d(2, 2, (2, 3), stride=(2, 1), padding=(0, 1), groups=2, dilation=(1, 2)),
        _normal(2, 2, 2, 3),
    ),
    "transposed conv3d": Row(
        lambda: nn.ConvTranspose3d(1, 2, 2, stride=(1, 2, 1), output_padding=(0, 1, 0)), _normal(2, 1, 1, 2, 2)
    ),
    "embedding": Row(lambda: nn.Embedding(5, 3), lambda: (torch.tensor([[1, 4, 1], [0, 2, 3]]),)),
    "embedding, padding": Row(
        lambda: nn.Embedding(5, 3, padding_idx=0), lambda: (torch.tensor([[1, 0, 2], [3, 4, 0]]),)
    ),
    "embedding, one example": Row(lambda: nn.Embedding(4, 2), lambda: (torch.tensor([1, 3]),)),
    "rnn": Row(lambda: First(nn.RNN(3, 2)), _normal(4, 2, 3), False, ("core.*",)),
    "lstm": Row(
        lambda: First(nn.LSTM(3, 2, num_layers=2, bidirectional=True, batch_first=True)),
        _normal(2, 4, 3),
        False,
        ("core.*",),
    ),
    "gru": Row(lambda: First(nn.GRU(3, 2, bidirectional=True, bias=False)), _normal(4, 2, 3), False, ("core.*",)),
    "attention": Row(
        lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), copies=3), _normal(2, 3, 4), False, ("core.*",)
    ),
    "encoder, training": Row(_encoder, _normal(2, 3, 4), False, _ATTENTION, _NORMS),
    "encoder": Row(lambda: _encoder().eval(), _normal(2, 3, 4), False, _ATTENTION, _NORMS),
    "norms, training": Row(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)),
        _normal(3, 3),
        False,
        (),
        ("1.*", "3.*"),
    ),
    "norms": Row(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.GELU(), nn.Flatten(), nn.Linear(6, 2)).eval(),
        _normal(2, 2, 3),
        False,
        (),
        ("1.*",),
    ),
    "tied": Row(Tied, lambda: (torch.tensor([1, 4, 2]),), False, ("embedding.weight", "decoder.bias")),
}

each_row = pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))

each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


def wrap(net: nn.Module, estimator: Any, sigma: Any = 0.5) -> Bayesian:
    return Bayesian(net.double(), Gaussian(1.0), sigma=sigma, estimator=estimator, seed=7)


def uneven(mu: Tensor) -> Tensor:
    """A sigma that differs from weight to weight, so that no permutation of them goes unnoticed."""
    return torch.linspace(0.2, 1.0, mu.numel(), dtype=mu.dtype).reshape(mu.shape)


def is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
