"""A pretrained net, fine-tuned on 50 images: with a posterior it is seldom sure of what it cannot know."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bayesbackprop as bbb


def network() -> nn.Sequential:
    """A small convolutional network for five classes; its last layer, the head, is called 7."""
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, 5))


def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """All of ``x`` at each step: on the free energy, or for a plain net on the cross-entropy alone."""
    cost = bbb.FreeEnergy(model, n=len(x), complexity="closed") if isinstance(model, bbb.Bayesian) else None
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(200):
        optimiser.zero_grad()
        (cost(x, y) if cost else F.cross_entropy(model(x), y)).backward()
        optimiser.step()


def pretrained(path: Path) -> nn.Sequential:
    """The net of a checkpoint with a new head. That starts at 0, so a prior centred on the net is there one at 0."""
    net = network()
    net.load_state_dict(torch.load(path))
    for parameter in net[-1].parameters():
        nn.init.zeros_(parameter)
    return net


def main() -> None:
    """Fine-tune in three ways, and show each of them digits that are none of its classes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))  # 8x8 pixels; they come with scikit-learn
    order = torch.randperm(len(labels))
    images, labels = images[order].float().reshape(-1, 1, 8, 8) / 16, labels[order]
    old, old_labels = images[labels < 5][:300], labels[labels < 5][:300]  # what the checkpoint was trained for
    new, new_labels = images[labels >= 5], labels[labels >= 5] - 5  # the task: 50 to train on, others to test

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "net.pt"  # in place of one that you would download
        net = network()
        train(net, old[:100], old_labels[:100])
        torch.save(net.state_dict(), checkpoint)
        plain, with_head, whole = (pretrained(checkpoint) for _ in range(3))

    # Only the head is Bayesian. The rest is trained as ever; what has requires_grad=False would stay as it is.
    options = {"sigma": 0.05, "select": lambda name, _: name.startswith("7.")}
    head = bbb.Bayesian(with_head, bbb.Categorical(), bbb.Normal(1.0), estimator="flipout", **options)
    # All of it is. The prior expects the weights of the body near what they were; the noise starts at a tenth of them.
    prior, sigma = {"7.*": bbb.Normal(1.0), "*": bbb.Normal(0.02)}, {"7.*": 0.05, "*": bbb.Relative(0.1)}
    around = bbb.Bayesian(whole, bbb.Categorical(), prior, estimator="flipout", sigma=sigma, centre="net")
    for name, model in {"plain": plain, "Bayesian head": head, "Bayesian around the net": around}.items():
        train(model, new[:50], new_labels[:50])
        if isinstance(model, bbb.Bayesian):
            print(model.report())
            probs, strange = (model.predict(images, draws=50).probs for images in (new[50:350], old))
        else:
            probs, strange = (model(images).softmax(1) for images in (new[50:350], old))
        accuracy = (probs.argmax(1) == new_labels[50:350]).float().mean()
        sure, wrongly_sure = ((each.amax(1) > 0.9).float().mean() for each in (probs, strange))
        print(f"{name}: accuracy {accuracy:.1%}, sure of {sure:.1%} of its digits, of {wrongly_sure:.1%} of the others")


if __name__ == "__main__":
    main()
