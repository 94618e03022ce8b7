"""The networks are those that their names say."""

import pytest
import torch
from torch import nn

from bayesbackprop_paper.architectures import Block, ResNet, lenet5, lenet5_caffe

pytestmark = pytest.mark.identities


def test_the_weights_are_those_that_are_published() -> None:
    def weights(net: nn.Module) -> int:
        return sum(parameter.numel() for parameter in net.parameters())

    assert weights(lenet5_caffe()) == 431_080  # 520 + 25,050 + 400,500 + 5,010
    assert weights(ResNet(3, 1)) == 269_434  # in one colour 288 fewer than He et al.


@pytest.mark.parametrize("net", [lenet5(dropout=0.5), ResNet(1, 1, dropout=0.5)], ids=["LeNet-5", "ResNet"])
def test_dropout_is_on_in_training_alone(net: nn.Module) -> None:
    x = torch.rand(1, 1, 28, 28).expand(4, -1, -1, -1)
    assert net(x).shape == (4, 10)
    assert len(net(x).unique(dim=0)) == 4  # the same image, other units
    net.eval()
    outputs = net(x)
    assert torch.allclose(outputs, outputs[:1].expand_as(outputs), atol=1e-5)


def test_a_residual_block_without_weights_adds_nothing_to_its_input() -> None:
    """Where it has half the positions and more channels, they are the even positions, and the new channels are 0."""
    x = torch.rand(2, 3, 8, 8)
    block = Block(3, 5, 2, nn.Conv2d).eval()
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    outputs = block(x)
    assert torch.equal(outputs[:, :3], x[:, :, ::2, ::2])
    assert torch.equal(outputs[:, 3:], torch.zeros(2, 2, 4, 4))
