"""The methods of a comparison: how each trains a user's own network.

A method is a function from a :class:`Task` to what predicts, and a row of ``METHODS``. Laplace is the package of its
authors, from the extra ``compare``.
"""

import copy
import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bayesbackprop._batches import arguments
from bayesbackprop._engine import evaluating
from bayesbackprop._errors import (
    invalid,
)
from bayesbackprop._predictors import Predictor
from bayesbackprop.callbacks import Progress
from bayesbackprop.likelihoods import Categorical, Gaussian, Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim import IVON
from bayesbackprop.prediction import Predictive, predictive
from bayesbackprop.priors import Normal
from bayesbackprop.training import fit

# Networks of a deep ensemble.
_MEMBERS = 5

# Laplace is of all weights while weights * outputs, the Jacobian of an example, is not more than this; else of the last
# layer. So many numbers of Jacobians are held at a time.
_LARGEST_JACOBIAN, _JACOBIANS = 10**6, 2**26

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


class _Laplace:
    """Samples of the network's output under a Laplace approximation, linearised in the weights."""

    def __init__(self, approximation: Any, network: _Network, rows: int) -> None:
        self._approximation, self.model, self._rows = approximation, network, rows

    def predict(self, *args: Any, draws: int = 100, seed: int | None = None, **kwargs: Any) -> Predictive:
        assert not kwargs, "it was made for networks of one tensor"
        (inputs,) = args
        random = torch.Generator(inputs.device).manual_seed(0 if seed is None else seed)
        outputs = [
            self._approximation.functional_samples(rows, pred_type="glm", n_samples=draws, generator=random)
            for rows in inputs.split(self._rows)
        ]
        return predictive(self.model.likelihood, torch.cat(outputs, 1), draws)


class _Loader:
    """Batches as laplace-torch wants them: with a ``dataset`` whose length is the number of examples."""

    def __init__(self, batches: Iterable[Any], n: int) -> None:
        self._batches, self.dataset = batches, range(n)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return _count(self._batches)


def _laplace(task: Task) -> Predictor:
    likelihood = task.likelihood
    if not isinstance(likelihood, Categorical | Gaussian) or getattr(likelihood, "noise", "") == "per-input":
        raise SkippedError(f"laplace-torch has no likelihood {likelihood}")
    with _quiet():
        laplace = _package("laplace", "laplace-torch")
    network = copy.deepcopy(task.plain())
    network.net.eval()
    inputs, _ = next(iter(task.batches))
    if not isinstance(inputs, Tensor):
        raise SkippedError("laplace-torch takes networks of one tensor alone")
    one = network.predict(inputs[:1].to(next(network.parameters()).device))
    weights = sum(parameter.numel() for parameter in network.net.parameters() if parameter.requires_grad)
    jacobian = weights * one.mean.numel()
    classes = isinstance(likelihood, Categorical)
    noise = {} if classes else {"sigma_noise": float(one.components.stddev.flatten()[0])}
    tried: list[str] = []
    for subset, which in (("all", "all weights"), ("last_layer", "the last layer")):
        if subset == "all" and jacobian > _LARGEST_JACOBIAN:
            continue
        started = time.perf_counter()
        try:
            with _quiet():
                kind = "classification" if classes else "regression"
                found = laplace.Laplace(network.net, kind, subset_of_weights=subset, hessian_structure="kron", **noise)
                found.fit(_Loader(task.batches, task.n))
                found.optimize_prior_precision(method="marglik")
        except Exception as error:  # it knows few layers; the last one is usually among them
            if subset == "last_layer":
                raise
            tried.append(f" (all weights: {error})")
            continue
        task.seconds += time.perf_counter() - started
        task.note = (
            f"laplace-torch on the plain network: {which}{''.join(tried)}, Kronecker factors, prior precision by "
        )
        task.note += "marginal likelihood"
        break
    return _Laplace(found, network, max(1, _JACOBIANS // jacobian))


def _ivon(task: Task) -> Predictor:
    model = Bayesian(task.network(0), copy.deepcopy(task.likelihood), Normal(1.0), seed=task.seed)
    objective = FreeEnergy(model, task.n, complexity="closed")
    settings: dict[str, Any] = {**_IVON, **task.ivon}
    task.train(objective, optimiser=IVON(objective, **settings), falling=True)
    shown_settings = ", ".join(f"{name}={value}" for name, value in settings.items())
    task.note = f"{shown_settings}, prior Normal(1.0), the rate falling to 0 as a cosine"
    return model


def _package(name: str, distribution: str) -> Any:
    """A package of the extra, or why it cannot be used."""
    try:
        return __import__(name)
    except ImportError as error:
        raise SkippedError(f'{distribution} is not installed: pip install "bayesbackprop[compare]"') from error
    except Exception as error:
        raise SkippedError(f"{distribution} cannot be imported: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of others' packages, which the reader of a comparison can do nothing about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


METHODS: dict[str, Callable[[Task], Predictor]] = {
    "bayesbackprop": _ours,
    "plain": _single,
    "deep ensemble": _deep_ensemble,
    "MC dropout": _mc_dropout,
    "Laplace": _laplace,
    "IVON": _ivon,
}

# Methods by the packages of others: what they raise is no reason to lose the rest.
OF_OTHERS = ("Laplace",)


def _count(batches: Iterable[Any]) -> int:
    return sum(1 for _ in batches)
