"""A network that is no plain stack of layers."""

from torch import Tensor, nn


class Opaque(nn.Module):
    """The same network, but not a plain stack of layers: it goes through autograd."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)
