"""Prediction: P(y|x) = E_q[P(y|x,w)], the probabilities (never the log-probabilities) of many draws, averaged.

The uncertainty splits in two. *Aleatoric* is what every drawn network agrees is noise; *epistemic* is what they
disagree about, and what more data would remove. For classes the whole is the entropy and the epistemic part the mutual
information of label and weights; for numbers the whole is the variance, split by the law of total variance.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributions, nn
from torch.utils._pytree import tree_leaves, tree_map

from bayesbackprop._engine import Slots, call_with, evaluating, lock, over_draws
from bayesbackprop._errors import (
    Described,
    check_batch,
    check_count,
    check_probability,
    check_type,
    invalid,
    tensors_of,
)
from bayesbackprop.likelihoods import Likelihood

# What predictions may hold at a time unless told otherwise.
GIGABYTE = 2**30

# The entropy of a mixture is integrated between nodes at these multiples of each component's standard deviation (beyond
# 9 there is less than 1e-18 of it), with three Gauss-Legendre points in between: about 1e-7.
_NODES = torch.linspace(-9, 9, 37, dtype=torch.float64)
_LEGENDRE = np.polynomial.legendre.leggauss(3)
# Numbers to hold at a time while integrating.
_CHUNK = 2**22
# What every module has, besides what is its own.
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
# Halvings of the bracket around a quantile: more than the bits of a double.
_HALVINGS = 60


class Predictive(ABC):
    """A predictive distribution: the uniform mixture of the distributions that ``draws`` networks give.

    Its tensors have one row for each example. ``components`` is a ``torch.distributions`` object over all draws and
    examples, one draw after the other.
    """

    def __init__(self, components: distributions.Distribution, draws: int) -> None:
        self.components = components
        self.draws = draws

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """The predictive mean; for classes, their probabilities."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """The predictive variance, of both kinds together; for classes, of each class's indicator."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """The entropy of the predictive distribution, in nats."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """The part of the uncertainty that every draw agrees is noise."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """The part of the uncertainty that comes from not knowing the weights."""

    @abstractmethod
    def quantiles(self, q: Sequence[float]) -> Tensor:
        """Quantiles ``[len(q), ...]``: of the target for numbers, over the draws of its probability for classes."""

    @property
    def stddev(self) -> Tensor:
        """The square root of the variance."""
        return self.variance.sqrt()

    def log_prob(self, target: Tensor) -> Tensor:
        """log P(y|x) of each element of the target: the logarithm of the mean probability over the draws."""
        shape = self.components.batch_shape + self.components.event_shape
        expected = (shape[0] // self.draws, *shape[1:])
        if not isinstance(target, Tensor) or tuple(target.shape) != expected:
            raise invalid("target", "Predictive.log_prob", f"a tensor of shape {list(expected)}", target)
        return self._by_draw(self.components.log_prob(self._repeated(target))).logsumexp(0) - math.log(self.draws)

    def _repeated(self, values: Tensor) -> Tensor:
        if isinstance(self.components, distributions.Bernoulli):
            values = values.to(self.components.probs.dtype)  # which takes no integers
        return values.unsqueeze(0).expand(self.draws, *values.shape).flatten(0, 1)

    def _by_draw(self, values: Tensor) -> Tensor:
        return values.reshape(self.draws, -1, *values.shape[1:])


class ClassPredictive(Predictive):
    """The predictive distribution of classes (probabilities on the last dimension) or of yes and no."""

    components: distributions.Categorical | distributions.Bernoulli

    @property
    def probs(self) -> Tensor:
        """The predictive probabilities."""
        return self._by_draw(self.components.probs).mean(0)

    mean = probs

    @property
    def labels(self) -> Tensor:
        """The most probable class, or 1 where yes is more probable than no."""
        if isinstance(self.components, distributions.Categorical):
            return self.probs.argmax(-1)
        return (self.probs > 0.5).long()

    @property
    def variance(self) -> Tensor:
        return self.probs * (1 - self.probs)

    @property
    def entropy(self) -> Tensor:
        mixture: Tensor = type(self.components)(probs=self.probs).entropy()  # type: ignore[no-untyped-call]
        return mixture

    @property
    def aleatoric(self) -> Tensor:
        """The expected entropy, E_w H[y|x,w]."""
        return self._by_draw(self.components.entropy()).mean(0)  # type: ignore[no-untyped-call]

    @property
    def epistemic(self) -> Tensor:
        """The mutual information I[y; w|x] = H[y|x] - E_w H[y|x,w]."""
        return (self.entropy - self.aleatoric).clamp(min=0)  # below 0 only by rounding

    def quantiles(self, q: Sequence[float]) -> Tensor:
        probs = self._by_draw(self.components.probs)
        return probs.quantile(_levels(q, probs), dim=0)


class ValuePredictive(Predictive):
    """The predictive distribution of numbers: a mixture of, say, Gaussians."""

    @property
    def mean(self) -> Tensor:
        return self._by_draw(self.components.mean).mean(0)

    @property
    def variance(self) -> Tensor:
        return self.aleatoric + self.epistemic

    @property
    def aleatoric(self) -> Tensor:
        """The expected variance, E_w Var[y|x,w]."""
        return self._by_draw(self.components.variance).mean(0)

    @property
    def epistemic(self) -> Tensor:
        """The variance of the expectation, Var_w E[y|x,w]."""
        return self._by_draw(self.components.mean).var(0, correction=0)

    @property
    def entropy(self) -> Tensor:
        """-E[log P(y|x)] by quadrature, for Gaussian components."""
        if not isinstance(self.components, distributions.Normal):
            raise NotImplementedError(f"The entropy of a mixture of {type(self.components).__name__} is not available.")
        mean = self._by_draw(self.components.mean).double().flatten(1)
        scale = self._by_draw(self.components.stddev).double().flatten(1)
        grid = (mean + _NODES.to(mean.device)[:, None, None] * scale).flatten(0, 1).sort(dim=0).values
        middle, half = (grid[1:] + grid[:-1]) / 2, (grid[1:] - grid[:-1]) / 2
        total = torch.zeros_like(mean[0])
        rows = max(1, _CHUNK // mean.numel())
        for node, weight in zip(*_LEGENDRE, strict=True):
            for y, width in zip((middle + node * half).split(rows), half.split(rows), strict=True):
                each = distributions.Normal(mean, scale).log_prob(y[:, None])
                log_density = each.logsumexp(1) - math.log(self.draws)
                total -= (weight * width * log_density.exp() * log_density.clamp(min=-1e4)).sum(0)
        return total.to(self.components.mean.dtype).reshape(self.mean.shape)

    def quantiles(self, q: Sequence[float]) -> Tensor:
        """Where the mixture's distribution function is q, by bisection between the extremes of the components."""
        return torch.stack([self._quantile(float(level)) for level in _levels(q, self.mean)])

    def _quantile(self, level: float) -> Tensor:
        each = self._by_draw(self.components.icdf(torch.full_like(self.components.mean, level)))
        low, high = each.amin(0), each.amax(0)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = self._by_draw(self.components.cdf(self._repeated(middle))).mean(0) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


@contextmanager
def predicting(owner: str, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Within it ``net`` is evaluated. Refuses outputs that cannot be stacked, and tensors that it leaves on itself."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in net.modules()]
    with evaluating(net):
        try:
            yield
        except AttributeError:  # of what has no ``unsqueeze``, if it is not the network's own
            _check_outputs(owner, net(*args, **kwargs))
            raise
        finally:
            kept = [name for module, *places in before for name in _put_back(module, *places)]
    if kept:
        constraint = "a network that keeps no tensor of parallel draws (give memory=1 to run one after the other)"
        raise invalid("net", owner, constraint, Described(f"one that keeps {kept}"))


def has_hooks(net: nn.Module) -> bool:
    """Whether anything else than the modules of ``net`` sees what they compute."""
    for module in net.modules():  # noqa: SIM110 (a generator takes longer than what it does)
        if module._forward_hooks:
            return True
    return False


def _put_back(module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> list[str]:
    """Remove what ``vmap`` has left on a module, which nobody can use any more; the names of those attributes."""
    kept: list[str] = []
    for values, old in ((vars(module), attributes), (module._buffers, buffers)):
        for name, value in list(values.items()):
            if _is_wrapped(value):
                values[name] = old.get(name)
                kept.append(name)
            elif isinstance(value, list | dict) and name not in _OF_ALL_MODULES:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                places = [place for place, item in items if _is_wrapped(item)]
                for place in reversed(places):
                    del value[place]
                kept += [name] if places else []
    return kept


def _is_wrapped(value: Any) -> bool:
    """Whether a tensor belongs to a transform of ``torch.func``; torch has no public name for it."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def _check_outputs(owner: str, outputs: Any) -> None:
    for leaf in tree_leaves(outputs):
        if not isinstance(leaf, Tensor):
            constraint = "a network whose output is a tensor, or tensors in tuples, lists and dicts"
            raise invalid("net", owner, constraint, Described(f"one whose output holds a {type(leaf).__name__}"))


class Ensemble:
    """A fixed set of weight draws: ``ensemble(x)`` gives their outputs ``[draws, ...]``, ``predict`` averages them."""

    def __init__(self, net: nn.Module, likelihood: Likelihood, weights: Mapping[str, Tensor]) -> None:
        check_type("Ensemble", nn.Module, "a torch.nn.Module", net=net)
        check_type(
            "Ensemble", Likelihood, "a Likelihood, such as Categorical() or Gaussian(0.1)", likelihood=likelihood
        )
        parameters = dict(net.named_parameters())
        tensors = list(weights.values()) if isinstance(weights, Mapping) else []
        fits = all(isinstance(tensor, Tensor) and tensor.dim() and len(tensor) for tensor in tensors) and all(
            name in parameters and tensor.shape == (len(tensors[0]), *parameters[name].shape)
            for name, tensor in (weights.items() if tensors else ())
        )
        if not tensors or not fits:
            constraint = f"a mapping from names of the network's {list(parameters)} to draws of them, [draws, ...]"
            raise invalid("weights", "Ensemble", constraint, weights)
        with lock(net):
            self.net = copy.deepcopy(net)  # what is not random must not change either
        self.likelihood = copy.deepcopy(likelihood)
        self.weights = dict(weights)
        self._slots = Slots(self.net, list(self.weights))
        self.draws = len(next(iter(self.weights.values())))

    def __call__(self, *args: Any, memory: int = GIGABYTE, **kwargs: Any) -> Any:
        """The outputs of all the draws, stacked along a new first dimension."""
        memory = check_count("Ensemble", memory=memory)["memory"]
        check_batch("inputs", "Ensemble", tensors_of((args, kwargs)))

        def run(weights: list[Tensor]) -> Any:
            return call_with(self._slots, weights, args, kwargs)

        def chunk(start: int, stop: int) -> list[Tensor]:
            return [weight[start:stop] for weight in self.weights.values()]

        with predicting("Ensemble", self.net, args, kwargs):
            return over_draws(run, chunk, self.draws, memory)

    def predict(self, *args: Any, memory: int = GIGABYTE, **kwargs: Any) -> Predictive:
        """The predictive distribution of the ensemble."""
        return predictive(self.likelihood, self(*args, memory=memory, **kwargs), self.draws)


def predictive(likelihood: Likelihood, outputs: Any, draws: int) -> Predictive:
    """The predictive distribution from outputs ``[draws, B, ...]``."""
    for output in tensors_of(outputs):
        if output.dim() < 2:
            constraint = "a network whose output has a row for each example"
            raise invalid("net", "predict", constraint, Described("an output without dimensions"))
    with torch.no_grad():
        components = likelihood.distribution(tree_map(lambda output: output.flatten(0, 1), outputs))
    if isinstance(components, (distributions.Categorical, distributions.Bernoulli)):
        return ClassPredictive(components, draws)
    return ValuePredictive(components, draws)


def _levels(q: Sequence[float], like: Tensor) -> Tensor:
    if not isinstance(q, Sequence) or not q:
        raise invalid("q", "quantiles", "a list of floats in [0, 1]", q)
    levels = [check_probability("quantiles", q=level)["q"] for level in q]
    return torch.as_tensor(levels, dtype=like.dtype, device=like.device)
