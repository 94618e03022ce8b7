"""A model with something of everything, its file, and what a refusal must leave alone."""

from pathlib import Path

import torch
from torch import nn

from bayesbackprop import Bayesian, Gaussian, Laplace, Normal, ScaleMixture, save


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def everything(net: nn.Module) -> Bayesian:
    return Bayesian(
        net,
        Gaussian("learnt", initial=0.3),
        {"3.bias": Laplace(0.1), "*.bias": Normal(1 / 3), "*": ScaleMixture(0.25, 0.7, 1e-3)},
        estimator={"0.*": "local", "3.weight": "flipout", "3.bias": "shared"},
        centre="net",
        seed=2**62 + 1,
    )


def good_file(path: Path) -> bytes:
    torch.manual_seed(5)
    save(everything(normalised()), path)
    return path.read_bytes()


def bits_of(module: nn.Module) -> dict[str, tuple[torch.dtype, bytes, bool]]:
    """All that a refusal must leave alone."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: (
            tensor.dtype,
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            tensor.requires_grad,
        )
        for name, tensor in tensors.items()
    } | {f"mode of {name}": module.training for name, module in module.named_modules()}
