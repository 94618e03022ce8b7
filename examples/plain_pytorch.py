"""A loop in plain PyTorch: a regression that says where it has seen data."""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesbackprop as bbb

NOISE = 0.05  # of the instrument that measured y, as its data sheet says


def measurements(n: int, random: torch.Generator) -> TensorDataset:
    """Noisy points of the paper's curve at 0 <= x <= 1/2; nothing was measured elsewhere."""
    x = torch.rand(n, 1, generator=random) / 2
    y = x + 0.3 * torch.sin(2 * math.pi * x) + 0.3 * torch.sin(4 * math.pi * x)
    return TensorDataset(x, y + NOISE * torch.randn(n, 1, generator=random))


def main() -> None:
    """Train, check the bands on points held out, then ask ever further away from the data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=150)
    options = parser.parse_args()
    torch.manual_seed(options.seed)  # decides the initial weights, the order of the examples and the model's noise
    random = torch.Generator().manual_seed(options.seed)
    training, held_out = measurements(400, random), measurements(1000, random)
    loader = DataLoader(training, batch_size=100, shuffle=True)

    net = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1))
    # The net stays as it is and its parameters are the means. The likelihood takes the place of the loss.
    # With "local" every example has noise of its own, and the gradients are calmer.
    model = bbb.Bayesian(net, bbb.Gaussian(NOISE), bbb.Normal(1.0), estimator="local")
    # The size of the training set, not of a minibatch: it sets the scale of the complexity cost.
    free_energy = bbb.FreeEnergy(model, n=len(training), complexity="closed")
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-2)  # the means, and a rho for each
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, options.epochs)
    for epoch in range(1, options.epochs + 1):
        for x, y in loader:
            optimiser.zero_grad()
            cost = free_energy(x, y)
            cost.backward()
            optimiser.step()
        schedule.step()
        if epoch % 50 == 0:
            print(f"epoch {epoch}: likelihood cost {cost.likelihood:.3f}, complexity cost {cost.complexity:.0f} nats")

    print(model.report())
    x, y = held_out.tensors
    low, high = model.predict(x, draws=100).quantiles([0.05, 0.95])
    print(f"held-out points in the 5-95 % band: {((low <= y) & (y <= high)).float().mean():.1%}")
    for x in (0.25, 0.75, 1.0, 2.0):
        p = model.predict(torch.tensor([[x]]), draws=1000)
        noise, unknown = p.aleatoric.sqrt().item(), p.epistemic.sqrt().item()
        # All drawn networks agree on the noise; what they disagree about is what the data did not tell.
        print(f"x = {x}: y = {p.mean.item():.2f}, noise {noise:.3f}, not known {unknown:.3f}")


if __name__ == "__main__":
    main()
