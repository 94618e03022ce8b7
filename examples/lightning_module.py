"""A LightningModule: validation, checkpoints, bf16, accumulation, and a run that goes on where it was stopped."""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bayesbackprop as bbb


class Digits(lightning.LightningDataModule):
    """Handwritten digits of 8x8 pixels, which come with scikit-learn: 1,300 to train on and 497 held out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
        self.training = TensorDataset(images[:1300].float() / 16, labels[:1300])
        self.held_out = TensorDataset(images[1300:].float() / 16, labels[1300:])
        # A sampler whose order depends on (seed, epoch) alone: a resumed run meets the same minibatches.
        self.order = DistributedSampler(self.training, num_replicas=1, rank=0, seed=seed)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, batch_size=100, sampler=self.order)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=len(self.held_out))


class Classifier(lightning.LightningModule):
    """A Bayesian network and its free energy on ``n`` examples."""

    def __init__(self, n: int, seed: int) -> None:
        super().__init__()
        self.save_hyperparameters()  # for load_from_checkpoint
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        model = bbb.Bayesian(net, bbb.Categorical(), bbb.Normal(0.5), sigma=0.05, seed=seed)
        # It holds the model and counts the steps, from which the noise follows; checkpoints have both.
        self.free_energy = bbb.FreeEnergy(model, n=n)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        cost = self.free_energy(*batch)
        self.log_dict({"likelihood": cost.likelihood, "complexity": cost.complexity})
        return cost  # a tensor, as Lightning wants it; it calls backward itself

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        x, y = batch
        p = self.free_energy.model.predict(x, draws=30)  # without the free energy, whose next call is a training step
        self.log_dict({"accuracy": (p.labels == y).float().mean(), "nll": -p.log_prob(y).mean()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-2)


def main() -> None:
    """Train, or go on if there is a checkpoint; then look at digits and at what is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--precision", default="32-true", help="such as bf16-mixed")
    parser.add_argument("--accumulate", type=int, default=1, help="minibatches for each step of the optimiser")
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"), help="of checkpoints, to go on from")
    options = parser.parse_args()
    lightning.seed_everything(options.seed)  # for the initial weights
    digits = Digits(options.seed)
    module = Classifier(n=len(digits.training), seed=options.seed)  # the whole training set, not a minibatch
    keep = ModelCheckpoint(options.folder, filename="last", enable_version_counter=False)  # after every epoch
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    how = {"precision": options.precision, "accumulate_grad_batches": options.accumulate}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=options.epochs, callbacks=keep, **how, **quiet)
    last = options.folder / "last.ckpt"
    trainer.fit(module, digits, ckpt_path=last if last.exists() else None)

    model = Classifier.load_from_checkpoint(last).free_energy.model
    x, y = digits.held_out.tensors
    torn = x[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]  # the same pixels in other places
    p, q = model.predict(x, draws=100), model.predict(torn, draws=100)
    print(f"held-out digits: accuracy {(p.labels == y).float().mean():.1%}, not known {p.epistemic.mean():.3f} nats")
    print(f"torn digits: not known {q.epistemic.mean():.3f} nats")


if __name__ == "__main__":
    main()
