"""The methods of a comparison: how each trains a user's own network.

A method is a function from a :class:`Task` to what predicts, and a row of ``METHODS``.
"""

import copy
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bayesbackprop._batches import arguments
from bayesbackprop._engine import evaluating
from bayesbackprop._errors import invalid
from bayesbackprop._laplace import Laplace
from bayesbackprop._predictors import Predictor
from bayesbackprop.callbacks import Progress
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim import IVON
from bayesbackprop.prediction import Predictive, predictive
from bayesbackprop.priors import Normal
from bayesbackprop.training import fit

# Networks of a deep ensemble.
_MEMBERS = 5

# The part of the training set that Laplace holds out to choose its prior precision, and the most examples it holds out.
# The precisions it chooses from, and the draws with which it judges each: fewer would favour narrow posteriors.
_HELD_OUT, _MOST_HELD_OUT = 0.2, 1000
_PRECISIONS, _TRIAL_DRAWS = [10 ** (k / 2) for k in range(-4, 9)], 100

# The settings of IVON unless told otherwise: of twelve that were tried on digits and on a curve, those that did well on
# both.
_IVON = {"lr": 0.3, "hess_init": 5.0, "betas": (0.9, 0.9995)}


IVON_SETTINGS = ("lr", "betas", "hess_init", "rescale_lr", "rest_lr")


class SkippedError(Exception):
    """A method cannot be run here; the text says why."""


@dataclass
class Task:
    """What all methods are given. A trained plain network is used again by those that start from one."""

    make_net: Callable[[], nn.Module]
    batches: Iterable[Any]
    n: int
    likelihood: Likelihood
    epochs: int
    lr: float | None
    dropout: float
    seed: int
    progress: bool
    wrap: Callable[[nn.Module], Bayesian | FreeEnergy] | None
    ivon: Mapping[str, Any]
    method: str = ""
    note: str = ""
    _plain: dict[int, tuple["_Network", float]] = field(default_factory=dict)
    seconds: float = 0.0

    def network(self, number: int) -> nn.Module:
        """A new network, initialised by the seed and its number."""
        with seeded(_mixed_seed(self.seed, number)):
            net = self.make_net()
        if not isinstance(net, nn.Module):
            raise invalid("make_net", "compare", "a function that makes a torch.nn.Module", net)
        return net

    def plain(self, number: int = 0) -> "_Network":
        """A network trained by Adam on its likelihood alone."""
        if number not in self._plain:
            before = self.seconds
            made = _Network(self.network(number), copy.deepcopy(self.likelihood))
            self.train(made, number)
            self._plain[number] = made, self.seconds - before
            self.seconds = before
        made, seconds = self._plain[number]
        self.seconds += seconds
        return made

    def train(
        self,
        objective: nn.Module,
        number: int = 0,
        optimiser: torch.optim.Optimizer | None = None,
        falling: bool = False,
    ) -> None:
        """Train an objective for the epochs that all have, by Adam unless another optimiser is given."""
        shows = self.progress and sys.stderr.isatty()
        callbacks = [Progress(f"{self.method} {number + 1}" if number else self.method)] if shows else []
        if optimiser is None and self.lr is not None:
            groups = objective.param_groups() if isinstance(objective, Bayesian | FreeEnergy) else None
            optimiser = torch.optim.Adam(groups or objective.parameters(), lr=self.lr)
        scheduler = None
        if falling and optimiser is not None:
            steps = self.epochs * (len(self.batches) if isinstance(self.batches, Sized) else _count(self.batches))
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        started = time.perf_counter()
        fit(
            objective,
            self.batches,
            epochs=self.epochs,
            n=self.n if isinstance(objective, Bayesian) else None,
            optimiser=optimiser,
            scheduler=scheduler,
            callbacks=callbacks,
            seed=_mixed_seed(self.seed, number),
        )
        self.seconds += time.perf_counter() - started


def _mixed_seed(seed: int, number: int) -> int:
    return (seed * _MEMBERS + number) % 2**62


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within it torch's generators start from ``seed``; afterwards they are as they were."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


class _Network(nn.Module):
    """A network with its likelihood: as an objective the likelihood cost of a batch, as a model one prediction."""

    def __init__(self, net: nn.Module, likelihood: Likelihood) -> None:
        super().__init__()
        self.net, self.likelihood = net, likelihood

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        args, kwargs = arguments(inputs, "compare")
        return self.likelihood.cost(self.net(*args, **kwargs), targets)

    def predict(self, *args: Any, draws: int = 1, seed: int | None = None, **kwargs: Any) -> Predictive:  # noqa: ARG002
        with evaluating(self.net):
            return self.predict_as_it_is(*args, **kwargs)

    @torch.no_grad()
    def predict_as_it_is(self, *args: Any, **kwargs: Any) -> Predictive:
        """In the mode that it is in."""
        return predictive(self.likelihood, self.net(*args, **kwargs).unsqueeze(0), 1)


class _Members:
    """A deep ensemble: the mixture of the predictions of its members."""

    def __init__(self, members: Sequence[_Network]) -> None:
        self.members, self.model = members, members[0]

    def predict(self, *args: Any, draws: int = 1, seed: int | None = None, **kwargs: Any) -> Predictive:  # noqa: ARG002
        return mixture([member.predict(*args, **kwargs) for member in self.members])


class _Stochastic:
    """A network that predicts otherwise in each pass: within ``sampling()`` once for each draw."""

    def __init__(self, network: _Network, sampling: Callable[[], Any]) -> None:
        self.model, self._sampling = network, sampling

    def predict(self, *args: Any, draws: int = 100, seed: int | None = None, **kwargs: Any) -> Predictive:
        parts = []
        with evaluating(self.model.net), seeded(0 if seed is None else seed):
            for _ in range(draws):
                with self._sampling():
                    parts.append(self.model.predict_as_it_is(*args, **kwargs))
        return mixture(parts)


def mixture(parts: Sequence[Predictive]) -> Predictive:
    """The mixture of predictions of one kind, with as many draws each: their draws one after the other."""
    kind: Any = type(parts[0].components)
    names = [name for name in inspect.signature(kind).parameters if hasattr(parts[0].components, name)]
    if "logits" in names and "probs" in names:  # two ways to say the same
        names.remove("probs")
    values = {name: torch.cat([getattr(part.components, name) for part in parts]) for name in names}
    return type(parts[0])(kind(**values), sum(part.draws for part in parts))


def _ours(task: Task) -> Predictor:
    net = task.network(0)
    wrapped = Bayesian(net, copy.deepcopy(task.likelihood), seed=task.seed) if task.wrap is None else task.wrap(net)
    if not isinstance(wrapped, Bayesian | FreeEnergy):
        raise invalid("wrap", "compare", "a function from a network to a Bayesian, or to its FreeEnergy", wrapped)
    task.train(wrapped)
    model = wrapped.model if isinstance(wrapped, FreeEnergy) else wrapped
    priors = dict.fromkeys(type(entry.prior).__name__ for entry in model.plan if entry.prior is not None)
    task.note = f"{'defaults' if task.wrap is None else 'as given by wrap'}, prior {', '.join(priors)}"
    return model


def _single(task: Task) -> Predictor:
    task.note = f"Adam, learning rate {1e-3 if task.lr is None else task.lr:g}"
    return task.plain()


def _deep_ensemble(task: Task) -> Predictor:
    task.note = f"{_MEMBERS} plain networks of other initial weights and orders"
    return _Members([task.plain(number) for number in range(_MEMBERS)])


def _mc_dropout(task: Task) -> Predictor:
    net = task.network(0)
    dropouts: list[nn.Module] = [each for each in net.modules() if isinstance(each, nn.modules.dropout._DropoutNd)]
    if dropouts:
        task.note = f"the network's own dropout stays on (modules: {len(dropouts)})"
    else:
        linear = [(name, each) for name, each in net.named_modules() if isinstance(each, nn.Linear)]
        if not linear:
            raise SkippedError("the network has neither dropout nor a linear layer to put it before")
        name, last = linear[-1]
        dropout = nn.Dropout(task.dropout)
        # A hook, so that whoever looks for the layer's weight still finds it.
        last.register_forward_pre_hook(lambda _, inputs: (dropout(inputs[0]), *inputs[1:]))
        dropouts = [dropout]
        task.note = f"the network has no dropout: {task.dropout:g} was put before its last linear layer '{name}'"
    network = _Network(net, copy.deepcopy(task.likelihood))
    task.train(network)

    @contextmanager
    def dropping() -> Iterator[None]:
        modes = [each.training for each in dropouts]
        for each in dropouts:
            each.train()
        try:
            yield
        finally:
            for each, mode in zip(dropouts, modes, strict=True):
                each.train(mode)

    return _Stochastic(network, dropping)


def _laplace(task: Task) -> Predictor:
    """A Laplace approximation around the plain network. Held-out examples choose its prior precision.

    The usual choice is the marginal likelihood. It assumes that the weights are the mode of the posterior, and that the
    posterior is Gaussian. Neither holds for a network that was trained without a prior and separates its classes; the
    result is far too unsure. See docs/decisions/laplace.md.
    """
    network = task.plain()
    rest, held = _held_out(task.batches, task.n)
    if not held or not rest:
        raise SkippedError("it has no examples to hold out for the choice of a prior precision")
    of_rest = replace(task, batches=_Shuffled(rest), n=sum(len(targets) for _, targets in rest), _plain={}, seconds=0.0)
    trained = of_rest.plain()
    started = time.perf_counter()
    trial = Laplace(trained.net, trained.likelihood, rest)
    if not trial.weights:
        raise SkippedError("the network has no linear or convolutional layer that it calls")
    costs: dict[float, float] = {}
    for precision in _PRECISIONS:
        trial.precision = precision
        try:
            cost = trial.cost(held, _TRIAL_DRAWS)
        except NotImplementedError as error:
            raise SkippedError(f"the network cannot be linearised: {error}") from error
        costs[precision] = math.inf if math.isnan(cost) else cost
    best = min(costs, key=costs.__getitem__)
    found = Laplace(network.net, network.likelihood, task.batches, best)
    task.seconds += of_rest.seconds + time.perf_counter() - started
    weights = sum(parameter.numel() for parameter in network.net.parameters())
    examples = sum(len(targets) for _, targets in held)
    task.note = f"around the plain network, {found.weights:,} of {weights:,} weights, Kronecker factors, linearised; "
    task.note += f"prior precision {best:.3g}, chosen by {examples:,} examples held out of a training of its own"
    return found


def _held_out(batches: Iterable[Any], n: int) -> tuple[list[Any], list[Any]]:
    """Split the batches of one epoch at random: the rows to train on, and those that are held out."""
    parts: tuple[list[Any], list[Any]] = [], []
    for batch in batches:
        chosen = torch.rand(len(batch[1])) < min(_HELD_OUT, _MOST_HELD_OUT / n)
        if int((~chosen).sum()) == 1:  # batch norm cannot train on one example
            chosen[:] = False
        for part, rows in zip(parts, (~chosen, chosen), strict=True):
            if rows.any():
                part.append(_rows(batch, rows))
    return parts[0], _joined(parts[1])


def _rows(batch: Any, rows: Tensor) -> tuple[Any, Tensor]:
    def chosen(each: Tensor) -> Tensor:
        return each[rows.to(each.device)] if each.shape[:1] == rows.shape else each

    inputs, targets = tree_map_only(Tensor, chosen, batch)
    return inputs, targets


def _joined(batches: list[Any]) -> list[Any]:
    """The same rows in one batch, which is faster to predict, if they are tensors of one shape."""
    shapes = {tuple(part.shape[1:] for part in batch) if isinstance(batch[0], Tensor) else None for batch in batches}
    if len(shapes) != 1 or None in shapes:
        return batches
    return [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]


class _Shuffled:
    """A list of batches, in another order each time."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter([self._batches[number] for number in torch.randperm(len(self._batches)).tolist()])

    def __len__(self) -> int:
        return len(self._batches)


def _ivon(task: Task) -> Predictor:
    model = Bayesian(task.network(0), copy.deepcopy(task.likelihood), Normal(1.0), seed=task.seed)
    objective = FreeEnergy(model, task.n, complexity="closed")
    settings: dict[str, Any] = {**_IVON, **task.ivon}
    task.train(objective, optimiser=IVON(objective, **settings), falling=True)
    shown_settings = ", ".join(f"{name}={value}" for name, value in settings.items())
    task.note = f"{shown_settings}, prior Normal(1.0), the rate falling to 0 as a cosine"
    return model


METHODS: dict[str, Callable[[Task], Predictor]] = {
    "bayesbackprop": _ours,
    "plain": _single,
    "deep ensemble": _deep_ensemble,
    "MC dropout": _mc_dropout,
    "Laplace": _laplace,
    "IVON": _ivon,
}


def _count(batches: Iterable[Any]) -> int:
    return sum(1 for _ in batches)
