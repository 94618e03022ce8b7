"""A Bayesian network with all its defaults beside plain training of the same network for as many epochs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesbackprop import Batches, Bayesian, Categorical, Gaussian, Likelihood, fit
from bayesbackprop._networks import mlp
from bayesbackprop.prediction import predictive
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments.truth import Figures, Run

# Of MNIST, to learn from and to test on: enough to tell methods apart within minutes.
_IMAGES = 5000


class Task(NamedTuple):
    """Training and test set, a network for them, and how long it is trained. Targets are classes or numbers."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    net: Callable[[], nn.Module]
    epochs: int
    batch_size: int

    def likelihood(self) -> Likelihood:
        """Of such targets; the noise of numbers is learnt."""
        return Gaussian("learnt") if self.y.is_floating_point() else Categorical()


def _halves(x: Any, y: Any, seed: int, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """70 % for training, the rest to test; of classes as many in both. Inputs by ``scale``, or standardised."""
    from sklearn.model_selection import train_test_split

    classes = y.dtype.kind == "i"
    parts = train_test_split(x, y, test_size=0.3, random_state=seed, stratify=y if classes else None)
    x, test_x, y, test_y = (torch.from_numpy(part) for part in parts)

    def standard(values: Tensor, like: Tensor) -> Tensor:
        return ((values - like.mean(0)) / like.std(0).clamp(min=1e-6)).float()

    if not classes:
        y, test_y = standard(y, y)[:, None], standard(test_y, y)[:, None]
    if scale is not None:
        return scale * x.float(), y, scale * test_x.float(), test_y
    return standard(x, x), y, standard(test_x, x), test_y


def _digits(seed: int, shape: tuple[int, ...], net: Callable[[], nn.Module]) -> Task:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y, test_x, test_y = _halves(x, y, seed, 1 / 16)
    return Task(x.view(-1, *shape), y, test_x.view(-1, *shape), test_y, net, epochs=20, batch_size=64)


def _mnist(seed: int, shape: tuple[int, ...], net: Callable[[], nn.Module], epochs: int, batch_size: int) -> Task:
    images = data.mnist(raw=True)
    train, test = images.train, images.test
    rows = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))[:_IMAGES]
    x, test_x = ((part / 255).view(-1, *shape) for part in (train.images[rows], test.images[:_IMAGES]))
    return Task(x, train.labels[rows], test_x, test.labels[:_IMAGES], net, epochs, batch_size)


def _table(seed: int, load: Callable[..., Any], outputs: int, epochs: int, **options: Any) -> Task:
    x, y = load(**options)
    return Task(*_halves(x, y, seed), lambda: mlp([x.shape[1], 50, 50, outputs]), epochs, batch_size=32)


def _of_scikit(name: str, outputs: int, epochs: int) -> Callable[[int], Task]:
    def task(seed: int) -> Task:
        from sklearn import datasets

        return _table(seed, getattr(datasets, f"load_{name}"), outputs, epochs, return_X_y=True)

    return task


def _friedman(seed: int) -> Task:
    from sklearn.datasets import make_friedman1

    return _table(seed, make_friedman1, 1, 40, n_samples=1000, n_features=10, noise=1.0, random_state=seed)


def _small_cnn() -> nn.Module:
    first = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, 10))


def _mnist_cnn() -> nn.Module:
    first = (nn.Conv2d(1, 8, 5, stride=2), nn.ReLU())
    second = (nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(400, 10))


TASKS: Mapping[str, Callable[[int], Task]] = {
    "digits, MLP": lambda seed: _digits(seed, (64,), lambda: mlp([64, 100, 100, 10])),
    "digits, CNN": lambda seed: _digits(seed, (1, 8, 8), _small_cnn),
    "MNIST 5,000, MLP": lambda seed: _mnist(seed, (784,), lambda: mlp([784, 200, 200, 10]), 10, 128),
    "MNIST 5,000, CNN": lambda seed: _mnist(seed, (1, 28, 28), _mnist_cnn, 6, 64),
    "wine": _of_scikit("wine", 3, 40),
    "breast cancer": _of_scikit("breast_cancer", 2, 20),
    "diabetes": _of_scikit("diabetes", 1, 20),
    "friedman": _friedman,
}


class _Plain(nn.Module):
    """A network with its likelihood, whose cost is the mean of -log P(y|x)."""

    def __init__(self, net: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.net, self.likelihood = net, likelihood

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.likelihood.cost(self.net(inputs), targets)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Any:
        return predictive(self.likelihood, self.net(inputs)[None], 1)


def _plain(task: Task, batches: Batches, _: int) -> Any:
    model = _Plain(task.net(), task.likelihood())
    fit(model, batches, epochs=task.epochs, optimiser=torch.optim.Adam(model.parameters(), lr=1e-3))
    return model


def _plain_falling(task: Task, batches: Batches, _: int) -> Any:
    model = _Plain(task.net(), task.likelihood())
    fit(model, batches, epochs=task.epochs)
    return model


def _defaults(task: Task, batches: Batches, seed: int) -> Any:
    model = Bayesian(task.net(), task.likelihood(), seed=seed)
    fit(model, batches, epochs=task.epochs)
    return model


METHODS: Mapping[str, Callable[[Task, Batches, int], Any]] = {
    "plain, Adam 1e-3": _plain,
    "plain, rate and decay of fit": _plain_falling,
    "Bayesian, defaults": _defaults,
}


def measure(run: Run) -> Figures:
    """Accuracy in % or the root of the mean squared error, and the mean of -log P(y|x), on the test set."""
    task = TASKS[run.task](run.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        model = METHODS[run.method](task, Batches(task.x, task.y, task.batch_size, run.seed), run.seed)
    predicted = model.predict(task.test_x)
    nll = -float(predicted.log_prob(task.test_y).mean())
    if task.y.is_floating_point():
        return {"RMSE": float((predicted.mean - task.test_y).square().mean().sqrt()), "NLL": nll}
    return {"accuracy": 100 * float((predicted.mean.argmax(-1) == task.test_y).double().mean()), "NLL": nll}


def verdicts(found: Mapping[str, Any]) -> str:
    """On how many tasks the defaults are as good as each plain training: within half a point, and NLL no higher."""
    means: dict[tuple[str, str], dict[str, float]] = {}
    for method in METHODS:
        for task in TASKS:
            own = [entry["figures"] for entry in found.values() if (entry["task"], entry["method"]) == (task, method)]
            if own:
                means[task, method] = {name: sum(each[name] for each in own) / len(own) for name in own[0]}
    *others, ours = METHODS
    lines = []
    for other in others:
        both = [task for task in TASKS if (task, other) in means and (task, ours) in means]
        good = [task for task in both if _as_good(means[task, ours], means[task, other])]
        lines.append(f'As good as "{other}" on {len(good)} of {len(both)} tasks: {", ".join(good) or "none"}.')
    return "\n".join(lines) + "\n"


def _as_good(ours: Mapping[str, float], other: Mapping[str, float]) -> bool:
    if ours["NLL"] > other["NLL"]:
        return False
    return ours["accuracy"] >= other["accuracy"] - 0.5 if "accuracy" in ours else ours["RMSE"] <= 1.005 * other["RMSE"]
