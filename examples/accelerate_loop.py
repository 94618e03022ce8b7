"""Hugging Face's Accelerate: bf16, accumulated gradients, validation, and a run that goes on where it was stopped."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesbackprop as bbb


class Progress:
    """How many epochs are done: what a checkpoint of Accelerate does not hold by itself."""

    def __init__(self) -> None:
        self.epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


def main() -> None:
    """Train, or go on if there is a checkpoint; then look at digits and at what is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--accumulate", type=int, default=1, help="minibatches for each step of the optimiser")
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"), help="of the checkpoint, to go on from")
    options = parser.parse_args()
    set_seed(options.seed)  # for the initial weights

    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = images.float() / 16
    training, x, y = TensorDataset(images[:1300], labels[:1300]), images[1300:], labels[1300:]
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = bbb.Bayesian(net, bbb.Categorical(), bbb.Normal(0.5), sigma=0.05, seed=options.seed)

    accelerator = Accelerator(
        cpu=True,
        mixed_precision=options.precision,
        gradient_accumulation_steps=options.accumulate,
        # An order of the examples that depends on (seed, epoch) alone: a resumed run meets the same minibatches.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=options.seed),
    )
    loader = DataLoader(training, batch_size=50, shuffle=True)
    # The objective is what Accelerate wraps: it holds the model and counts the steps, from which the noise follows.
    free_energy = bbb.FreeEnergy(model, n=len(training))
    optimiser = torch.optim.Adam(free_energy.param_groups(2e-2))
    free_energy, optimiser, loader = accelerator.prepare(free_energy, optimiser, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if options.folder.exists():
        accelerator.load_state(str(options.folder))
    while progress.epochs < options.epochs:
        loader.set_epoch(progress.epochs)
        for batch in loader:
            with accelerator.accumulate(free_energy):
                cost = free_energy(*batch)
                accelerator.backward(cost)
                accelerator.clip_grad_norm_(free_energy.parameters(), 10.0)
                optimiser.step()
                optimiser.zero_grad()
        progress.epochs += 1
        accelerator.save_state(str(options.folder))
        if progress.epochs % 10 == 0:
            p = model.predict(x, draws=30)  # without the objective, and without moving its noise
            accelerator.print(f"epoch {progress.epochs}: held-out nll {-p.log_prob(y).mean():.3f}")

    torn = x[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]  # the same pixels in other places
    p, q = model.predict(x, draws=100), model.predict(torn, draws=100)
    print(f"held-out digits: accuracy {(p.labels == y).float().mean():.1%}, not known {p.epistemic.mean():.3f} nats")
    print(f"torn digits: not known {q.epistemic.mean():.3f} nats")


if __name__ == "__main__":
    main()
