"""How the networks of the experiments are trained, and how plain ones predict.

A run in a folder of its own, which can be killed at any moment, is an :class:`Experiment`.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from bayesbackprop._engine import evaluating
from bayesbackprop._errors import check_count, check_not_negative, check_positive, check_probability, invalid
from bayesbackprop._files import read, write_checkpoint
from bayesbackprop.callbacks import Averaging, Best, Callback, Checkpoint, Progress, Records
from bayesbackprop.likelihoods import Categorical, Likelihood
from bayesbackprop.objective import Cost, FreeEnergy
from bayesbackprop.prediction import Predictive, predictive
from bayesbackprop.priors import Prior
from bayesbackprop.training import Batches, Record, fit

CHECKPOINT = "checkpoint.safetensors"
BEST = "best.safetensors"
METRICS = "metrics.jsonl"

# Examples to classify at a time.
EVALUATED = 5000


class Examples(NamedTuple):
    """Inputs and targets, one row each."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Schedule:
    """How to train.

    Args:
        epochs: Passes over the training set.
        batch_size: Examples of a minibatch, over all ranks.
        optimiser: ``"adam"`` or ``"sgd"``.
        learning_rate: At the start.
        rho_rate: The learning rate of rho, as a multiple of that of mu.
        momentum: Of ``"sgd"``.
        epsilon: Of ``"adam"``: weights with smaller gradients than this move in proportion to them, as under SGD.
        decay: ``"cosine"`` lets the learning rate fall to 0 at the end; ``"constant"`` keeps it.
        averaging: Evaluate and select not the parameters themselves but their exponential average over steps, with
            this factor (see :class:`~bayesbackprop.callbacks.Averaging`); 0 for none.
        settling: The share of the epochs, from the start, of which none is selected: one of the first may have the
            lowest validation error by chance, before the noise has done its work.
        seed: Of the order of the examples, and of dropout where there is any.
    """

    epochs: int = 40
    batch_size: int = 128
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    rho_rate: float = 1.0
    momentum: float = 0.0
    epsilon: float = 1e-8
    decay: Literal["cosine", "constant"] = "cosine"
    averaging: float = 0.0
    settling: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("Schedule", epochs=self.epochs, batch_size=self.batch_size)
        check_count("Schedule", least=0, seed=self.seed)
        check_positive("Schedule", learning_rate=self.learning_rate, rho_rate=self.rho_rate, epsilon=self.epsilon)
        check_not_negative("Schedule", momentum=self.momentum)
        check_probability("Schedule", averaging=self.averaging)
        if self.averaging == 1:
            raise invalid("averaging", "Schedule", "below 1, where the average would never move", self.averaging)
        check_probability("Schedule", settling=self.settling)
        if self.settling == 1:
            raise invalid("settling", "Schedule", "below 1, where no epoch could be selected", self.settling)
        if self.optimiser not in ("adam", "sgd"):
            raise invalid("optimiser", "Schedule", "'adam' or 'sgd'", self.optimiser)
        if self.decay not in ("cosine", "constant"):
            raise invalid("decay", "Schedule", "'cosine' or 'constant'", self.decay)

    @property
    def settled(self) -> int:
        """How many epochs at the start are not selected."""
        return int(self.settling * self.epochs)

    def selected(self, history: list[Record]) -> Record:
        """The record of the epoch with the lowest validation error, the first of equals."""
        return min(history[self.settled :], key=lambda record: record["validation_error"])

    def rate(self, step: int, steps: int) -> float:
        """The factor on the learning rate at ``step`` of ``steps``."""
        return 1.0 if self.decay == "constant" else 0.5 * (1 + math.cos(math.pi * step / steps))

    def make_optimiser(self, objective: "FreeEnergy | PointEstimate") -> torch.optim.Optimizer:
        """The optimiser of an objective; the spreads of a Bayesian network have a learning rate of their own."""
        groups = objective.param_groups(self.learning_rate, rho_lr=self.learning_rate * self.rho_rate)
        if self.optimiser == "adam":
            return torch.optim.Adam(groups, eps=self.epsilon, fused=True)
        return torch.optim.SGD(groups, momentum=self.momentum)


class PointEstimate(nn.Module):
    """The cost of a single network: maximum likelihood, or with a prior the maximum of the posterior.

    As a :class:`FreeEnergy` of ``n`` examples it is per example: -mean log P(y|x,w) - log P(w) / n.
    """

    def __init__(self, net: nn.Module, likelihood: Likelihood, n: int, prior: Prior | None = None) -> None:
        super().__init__()
        self.net, self.likelihood, self.n, self.prior = net, likelihood, n, prior

    def param_groups(self, lr: float | None = None, *, rho_lr: float | None = None) -> list[dict[str, Any]]:  # noqa: ARG002
        """The parameters of the network: one group, without rho."""
        return [{"params": list(self.parameters()), "lr": lr}]

    def forward(self, inputs: Tensor, targets: Tensor) -> Cost:
        """The cost of a minibatch."""
        likelihood = self.likelihood.cost(self.net(inputs), targets)
        if self.prior is None:
            return Cost(likelihood, torch.zeros(()), 0.0)
        complexity = -sum((self.prior.log_density(p).sum() for p in self.net.parameters()), torch.zeros(()))
        return Cost(likelihood, complexity, 1 / self.n)


class Outputs:
    """What predicts classes by the outputs of several plain networks, or of one that has random parts."""

    def __init__(self, outputs: Callable[..., list[Tensor]]) -> None:
        self._outputs = outputs

    @torch.no_grad()
    def predict(self, *args: Any, draws: int, seed: int | None, **kwargs: Any) -> Predictive:
        """The predictive distribution for the inputs."""
        with seeded(0 if seed is None else seed):
            outputs = self._outputs(*args, draws=draws, **kwargs)
        return predictive(Categorical(), torch.stack(outputs), len(outputs))


def train_falling(
    objective: FreeEnergy | PointEstimate, optimiser: torch.optim.Optimizer, batches: Batches, epochs: int, seed: int
) -> None:
    """Train with a rate that falls to 0 as a cosine."""
    falling = CosineAnnealingLR(optimiser, epochs * len(batches))
    fit(objective, batches, epochs=epochs, optimiser=optimiser, scheduler=falling, seed=seed)


class Experiment:
    """A training run in a folder of its own, which holds its checkpoint, its best parameters and its metrics.

    Args:
        objective: Gives the cost of a minibatch: a ``FreeEnergy``, say.
        net: The network to evaluate: that of the means.
        schedule: How to train.
        folder: If there is a checkpoint of the same run in it, it goes on there.
        about: What else, beside the schedule, makes a run the same, as far as JSON can say it.
    """

    def __init__(
        self,
        objective: FreeEnergy | PointEstimate,
        net: nn.Module,
        schedule: Schedule,
        folder: Path,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.objective, self.net, self.schedule, self.folder = objective, net, schedule, folder
        self.optimiser = schedule.make_optimiser(objective)
        self.best = Best(folder / BEST, "validation_error", after=schedule.settled)
        self._about = {**(about or {}), **{f"schedule.{name}": value for name, value in asdict(schedule).items()}}

    def train(self, training: Examples, watched: Mapping[str, Examples], *callbacks: Callback) -> list[Record]:
        """Run to the end, from wherever the run is, and return its records. Ctrl-C leaves a checkpoint of its step.

        Args:
            training: The training set.
            watched: What to measure the error on after each epoch. ``"validation"``, which must be there, selects.
            callbacks: What else to do, after the checkpoint of an epoch has been written.
        """
        schedule = self.schedule
        batches = Batches(*training, schedule.batch_size, schedule.seed)
        steps = schedule.epochs * len(batches)
        scheduler = LambdaLR(self.optimiser, lambda step: schedule.rate(step, steps))

        def errors() -> dict[str, float]:
            return {f"{name}_error": error_percent(self.net, examples) for name, examples in watched.items()}

        _upgrade(self.folder / CHECKPOINT, self.optimiser, scheduler, len(batches))
        averaging = [Averaging(schedule.averaging)] if schedule.averaging else []
        files = [
            self.best,
            Records(self.folder / METRICS),  # a run that is killed before the checkpoint writes them again
            Checkpoint(self.folder / CHECKPOINT, about=self._about),
        ]
        return fit(
            self.objective,
            batches,
            epochs=schedule.epochs,
            optimiser=self.optimiser,
            scheduler=scheduler,
            validation=errors,
            callbacks=[*averaging, *files, *callbacks],
            seed=schedule.seed,
        )

    def load_best(self) -> None:
        """Give the objective the parameters of the epoch that the validation set selects."""
        self.best.load(self.objective)


def read_metrics(folder: Path) -> list[Record]:
    """The records of a run, epoch by epoch."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def progress(title: str) -> Progress:
    """Shows a run, with its validation error in percent."""
    return Progress(title, lambda record: f"validation {record['validation_error']:.2f} %")


def error_percent(net: nn.Module, examples: Examples) -> float:
    """The percentage of examples that ``net`` puts in the wrong class, as the tables show it."""
    with evaluating(net):
        parts = zip(examples.inputs.split(EVALUATED), examples.targets.split(EVALUATED), strict=True)
        wrong = sum(int((net(x).argmax(1) != y).sum()) for x, y in parts)
    return 100 * wrong / len(examples.targets)


def _upgrade(path: Path, optimiser: torch.optim.Optimizer, scheduler: LambdaLR, batches: int) -> None:
    """Bring a checkpoint of version 0.2 to the present layout.

    It held no settings of optimiser and scheduler, which follow from the step, and averaged an epoch over its batches
    instead of its examples: all batches but the last are full, and after the last one no sums are left.
    """
    if not path.exists():
        return
    file = read(path, "checkpoint", "resume")
    metadata = file.contents
    if "state" not in metadata or "scheduler" in metadata:
        return
    with file.understanding():
        about, state = metadata["about"], metadata["state"]
        step, size = state["step"], about.get("schedule.batch_size", 1)
        taken = step % batches
        sums = {name: size * total for name, total in state["sums"].items()}
        if sums:
            weight = {"bbb": about["temperature"], "map": 1.0}.get(about["method"][:3], 0.0) / about["n"]
            sums = {"cost": sums["likelihood"] + weight * sums["complexity"], **sums}
        factor = scheduler.lr_lambdas[0](step)
        groups = [{**group, "lr": group["initial_lr"] * factor} for group in optimiser.state_dict()["param_groups"]]
        follows = {"last_epoch": step, "_step_count": step + 1, "_last_lr": [group["lr"] for group in groups]}
        metadata |= {
            "about": {"schedule.epsilon": Schedule.epsilon, "schedule.settling": Schedule.settling, **about},
            "state": {**state, "taken": taken, "examples": taken * size, "sums": sums},
            "optimiser": {"groups": groups, "slots": {}},
            "scheduler": {**scheduler.state_dict(), **follows},
            "callbacks": {},
        }
    write_checkpoint(path, file.tensors, metadata)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within it torch's generator starts at ``seed``, which decides initial weights; after it, it is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
