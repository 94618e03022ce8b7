"""Networks for images that are known by name, of torch's layers or of those that another library has in their place."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from bayesbackprop._networks import mlp

_CLASSES = 10

# The side of an image, and of the windows of LeNet-5.
_SIDE, _WINDOW = 28, 5

Conv = Callable[..., nn.Module]
Linear = Callable[[int, int], nn.Module]


def lenet5(
    channels: tuple[int, int] = (6, 16),
    hidden: Sequence[int] = (120, 84),
    padding: int = 2,
    *,
    dropout: float = 0.0,
    conv: Conv = nn.Conv2d,
    linear: Linear = nn.Linear,
) -> nn.Sequential:
    """LeNet-5 (LeCun et al., 1998) for images of 28 x 28, with ReLU and max-pooling as it is written today.

    Args:
        channels: Of the two convolutions.
        hidden: Units of the fully connected layers but the last.
        padding: Of the first convolution: pixels around the image.
        dropout: How likely an input of a fully connected layer is to be forgotten in training.
        conv: Makes a convolution.
        linear: Makes a fully connected layer.
    """
    first, second = channels
    side = ((_SIDE + 2 * padding - _WINDOW + 1) // 2 - _WINDOW + 1) // 2
    sizes = [second * side * side, *hidden, _CLASSES]
    return nn.Sequential(
        conv(1, first, _WINDOW, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        conv(first, second, _WINDOW),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *mlp(sizes, linear=linear, dropout=[dropout] * (len(sizes) - 1) if dropout else None),
    )


def lenet5_caffe() -> nn.Sequential:
    """LeNet-5 as Caffe had it, with 431,080 weights: the one whose pruning the literature reports."""
    return lenet5((20, 50), (500,), padding=0)


class Block(nn.Module):
    """Two convolutions and a way around them, which has no weights (option A of He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, conv: Conv) -> None:
        super().__init__()
        self.first = conv(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = conv(outputs, outputs, 3, stride=1, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        h = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        around = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(h + around)


class ResNet(nn.Module):
    """For small images (section 4.2 of He et al., 2016): three stages of ``blocks``; three blocks are ResNet-20.

    Args:
        blocks: Of each stage, of two layers each.
        colours: Of an image.
        dropout: How likely an input of the last layer is to be forgotten in training.
        conv: Makes a convolution.
        linear: Makes the last layer.
    """

    def __init__(
        self,
        blocks: int = 3,
        colours: int = 3,
        *,
        dropout: float = 0.0,
        conv: Conv = nn.Conv2d,
        linear: Linear = nn.Linear,
    ) -> None:
        super().__init__()
        self.first = nn.Sequential(conv(colours, 16, 3, stride=1, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        strides = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        each = [
            Block(outputs if number else inputs, outputs, 1 if number else stride, conv)
            for inputs, outputs, stride in strides
            for number in range(blocks)
        ]
        self.blocks = nn.Sequential(*each)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.last = linear(64, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.dropout(self.blocks(self.first(x)).mean((2, 3))))
        return outputs
