"""Fully connected networks, and ways to run them that must agree."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bayesbackprop import (
    Bayesian,
    Bernoulli,
    Categorical,
    Cost,
    FreeEnergy,
    Gaussian,
    Likelihood,
    LogLikelihood,
    NegativeBinomial,
    Normal,
    Ordinal,
    Poisson,
    StudentT,
    plain_kernels,
)
from opaque import Opaque

FUNCTIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "identity": nn.Identity}


class Cauchy(Gaussian):
    """A user's own: of its parent it keeps all but the log-probability."""

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return -torch.log1p((output - target).square()).sum(1) - target.shape[1] * math.log(math.pi)


def student(output: Tensor, target: Tensor) -> Tensor:
    return torch.distributions.StudentT(3.0, output).log_prob(target).sum(1)


def classes(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(4, (batch,))


def bits(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(2, (batch, 4))


def numbers(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, 4, dtype=dtype)


def counts(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(6, (batch, 4))


def half(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, 2, dtype=dtype)


# Of an output of 4 units: the likelihood, and targets for it.
LIKELIHOODS: dict[str, tuple[Callable[[], Likelihood], Callable[[int, torch.dtype], Tensor]]] = {
    "categorical": (Categorical, classes),
    "bernoulli": (Bernoulli, bits),
    "gaussian": (lambda: Gaussian(0.3), numbers),
    "learnt": (lambda: Gaussian("learnt", initial=0.7), numbers),
    "per-input": (lambda: Gaussian("per-input"), half),
    "student": (lambda: StudentT(initial_scale=0.7), numbers),
    "poisson": (Poisson, counts),
    "negative binomial": (NegativeBinomial, counts),
    "ordinal": (lambda: Ordinal(6), counts),
    "function": (lambda: LogLikelihood(student), numbers),
    "own": (lambda: Cauchy(0.3), numbers),
}


def net_of(sizes: list[int], function: str = "tanh", bias: bool = True, last: bool = False) -> nn.Sequential:
    """Linear layers of these sizes with a function between them, and if ``last`` after them."""
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(before, after, bias=bias), FUNCTIONS[function]()]
        if number == len(sizes) - 2 and not last:
            layers.pop()
    return nn.Sequential(*layers)


def bayesian(net: nn.Module, likelihood: Likelihood, **options: Any) -> Bayesian:
    return Bayesian(net, likelihood, options.pop("prior", Normal(0.4)), sigma=0.1, seed=7, **options)


def twins(net: nn.Module, likelihood: Likelihood, **options: Any) -> Iterator[tuple[Bayesian, Any]]:
    """As a fully connected network, as any module, and on the plain equations, each with the context to run it in."""
    for wrap, context in ((lambda net: net, nullcontext), (Opaque, nullcontext), (lambda net: net, plain_kernels)):
        yield bayesian(wrap(copy.deepcopy(net)), copy.deepcopy(likelihood), **options), context()


def gradients(model: Bayesian) -> list[Tensor]:
    """As they are, and gone from the model."""
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert all(gradient is not None for gradient in found)
    return found  # type: ignore[return-value]


def by_backward(cost: Cost, model: Bayesian) -> list[Tensor]:
    cost.backward()
    return gradients(model)


def assert_same(first: Any, others: list[Any], dtype: torch.dtype) -> None:
    """The results of the twins agree to the rounding of their type."""
    accuracy = 1e-10 if dtype == torch.float64 else 1e-4
    for other in others:
        torch.testing.assert_close(first, other, rtol=accuracy, atol=accuracy)


def compare_with_plain(make: Callable[[], Bayesian], x: Any, y: Any, accuracy: float = 1e-9) -> None:
    """Cost and gradients are those of the plain equations."""
    results: list[dict[str, Tensor | None]] = []
    for context in (nullcontext(), plain_kernels()):
        model = make()
        with context:
            cost = FreeEnergy(model, n=40)(x, y)
            cost.backward()
        results.append(
            {name: parameter.grad for name, parameter in model.named_parameters()} | {"total": cost.detach()}
        )
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert (value is None) == (results[1][name] is None)
        if value is not None:
            torch.testing.assert_close(value, results[1][name], rtol=accuracy, atol=accuracy)
