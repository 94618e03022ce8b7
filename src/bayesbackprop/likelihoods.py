"""Likelihoods P(y|x,w): what the network's output says about the target.

A likelihood gives the log-probability of each example, and the distribution behind it for prediction. Targets must have
exactly the shape the output implies: nothing is ever broadcast.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from bayesbackprop._errors import Described, check_callable, check_positive, check_text, check_type, invalid
from bayesbackprop.posterior import log_softplus, softplus

_LOG_2PI = math.log(2 * math.pi)

# The noise of a Gaussian is larger, and its inverse too: their squares must be floats.
_SMALLEST = 1e-150

# Said each time: torch.compile switches torch's own default off for the whole process.
_VALIDATE = True

# Never the index of a class: so that none is ignored.
_NO_INDEX = -(2**63)


class Likelihood(nn.Module, ABC):
    """P(y|x,w) for the output of the network at the weights w.

    A subclass need only define ``log_prob`` and ``distribution``. If it sets ``has_slope``, training plain stacks of
    layers takes the gradient of its ``cost`` from ``slope`` instead of from autograd.
    """

    has_slope = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "log_prob" in own and "cost" not in own:  # then the parent's is of another log_prob
            cls.cost = Likelihood.cost  # type: ignore[method-assign]
        if ("log_prob" in own or "cost" in own) and "slope" not in own:
            cls.has_slope = False

    @abstractmethod
    def log_prob(self, output: Any, target: Tensor) -> Tensor:
        """log P(y|x,w) of each example, shape ``[B]``."""

    def cost(self, output: Any, target: Tensor) -> Tensor:
        """The likelihood cost, -log P(y|x,w) averaged over the examples; the library's own take fewer operations."""
        return -self.log_prob(output, target).mean()

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """The gradient of :meth:`cost` by an output ``[B, D]`` that it has accepted, where that takes a line."""
        raise NotImplementedError

    @abstractmethod
    def distribution(self, output: Any) -> distributions.Distribution:
        """P(y|x,w) as a distribution with one value for each element of a target."""


class Categorical(Likelihood):
    """Classes: the output holds logits ``[B, C, ...]``, the target class indices ``[B, ...]`` (int64).

    Examples:
        >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2]))
        tensor([-1.3863])
    """

    has_slope = True

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return _per_example(-self._cross_entropy(output, target, "none"))

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return _per_element(self._cross_entropy(output, target, "mean"), target)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        minus_one = output.new_full((len(target), 1), -1.0)
        return output.softmax(1).scatter_add_(1, target.unsqueeze(1), minus_one).div_(len(target))

    def _cross_entropy(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        _check_output(self, output, least_dims=2)
        _check_target(self, target, (output.shape[0], *output.shape[2:]))
        if target.dtype != torch.int64:
            raise invalid("target", "Categorical", "a tensor of class indices of type torch.int64", target)
        if output.device.type != "cpu":
            self._check_indices(output, target)
        try:
            return F.cross_entropy(output, target, reduction=reduction, ignore_index=_NO_INDEX)
        except IndexError:  # on the CPU torch checks as it goes
            self._check_indices(output, target)
            raise

    def _check_indices(self, output: Tensor, target: Tensor) -> None:
        last = output.shape[1] - 1
        if not torch.compiler.is_compiling() and target.numel() and not _between(target, 0, last):
            got = Described(f"indices from {int(target.min())} to {int(target.max())}")
            raise invalid("target", "Categorical", f"class indices in [0, {last}]", got)

    def distribution(self, output: Tensor) -> distributions.Categorical:
        _check_output(self, output, least_dims=2)
        return distributions.Categorical(logits=output.movedim(1, -1), validate_args=_VALIDATE)


class Bernoulli(Likelihood):
    """Yes or no: the output holds logits, the target 0 or 1, of the same shape ``[B, ...]``.

    Examples:
        >>> Bernoulli().log_prob(torch.zeros(2), torch.tensor([1.0, 0.0]))
        tensor([-0.6931, -0.6931])
    """

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return _per_example(-self._cross_entropy(output, target, "none"))

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return _per_element(self._cross_entropy(output, target, "mean"), target)

    def _cross_entropy(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        _check_output(self, output)
        _check_target(self, target, tuple(output.shape))
        known = not target.is_complex() and (
            torch.compiler.is_compiling() or bool(((target == 0) | (target == 1)).all())
        )
        if not known:
            raise invalid("target", "Bernoulli", "made of 0 and 1", target)
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction=reduction)

    def distribution(self, output: Tensor) -> distributions.Bernoulli:
        _check_output(self, output)
        return distributions.Bernoulli(logits=output, validate_args=_VALIDATE)


class Gaussian(Likelihood):
    """Numbers with Gaussian noise; the target is a float tensor.

    Args:
        noise: The standard deviation of the noise. A float fixes it. ``"learnt"`` makes it one number that is trained
            along. ``"per-input"`` reads it from the network, whose last dimension is then twice the target's: first the
            means, then the numbers s of noise = log(1 + exp(s)).
        initial: Where a learnt noise starts.

    Examples:
        >>> Gaussian(0.5).log_prob(torch.tensor([[1.0]]), torch.tensor([[1.0]]))
        tensor([-0.2258])
    """

    has_slope = True

    def __init__(self, noise: float | Literal["learnt", "per-input"] = "learnt", *, initial: float = 1.0) -> None:
        super().__init__()
        initial = check_positive("Gaussian", initial=initial)["initial"]
        if not isinstance(noise, str):
            noise = check_positive("Gaussian", noise=noise)["noise"]
            if not _SMALLEST < noise < 1 / _SMALLEST:
                raise invalid(
                    "noise", "Gaussian", f"in ({_SMALLEST}, {1 / _SMALLEST}), where its square is a float", noise
                )
        elif noise not in ("learnt", "per-input"):
            raise invalid("noise", "Gaussian", "a float in (0, inf), 'learnt' or 'per-input'", noise)
        self.noise = noise
        self.has_slope = type(self).has_slope and not isinstance(noise, str)
        self.log_noise = nn.Parameter(torch.tensor(math.log(initial))) if noise == "learnt" else None

    def extra_repr(self) -> str:
        return f"noise={self.noise!r}" if self.log_noise is None else f"noise='learnt', now {self.log_noise.exp():.4g}"

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        mean, scale, log_scale = self._moments(output)
        self._check_numbers(mean, target)
        return _per_example(-0.5 * ((target - mean) / scale).square() - (log_scale + 0.5 * _LOG_2PI))

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        if self.noise == "per-input":
            return super().cost(output, target)
        mean, scale, log_scale = self._moments(output)
        self._check_numbers(mean, target)
        squares = (mean - target.to(mean.dtype)).square().sum()
        elements = target.numel() // len(target)
        return squares * (0.5 / len(target) / scale**2) + elements * (log_scale + 0.5 * _LOG_2PI)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target.to(output.dtype)).mul_(1 / (float(self.noise) ** 2 * len(target)))

    def distribution(self, output: Tensor) -> distributions.Normal:
        mean, scale, _ = self._moments(output)
        deviation = torch.as_tensor(scale, dtype=mean.dtype, device=mean.device).expand_as(mean)
        return distributions.Normal(mean, deviation, validate_args=_VALIDATE)

    def _check_numbers(self, mean: Tensor, target: Tensor) -> None:
        _check_target(self, target, tuple(mean.shape))
        if not target.is_floating_point():
            raise invalid("target", "Gaussian", "a tensor of floats", target)

    def _moments(self, output: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """The mean, the noise and its logarithm."""
        _check_output(self, output)
        if self.noise == "per-input":
            if output.dim() < 2 or output.shape[-1] % 2:
                constraint = "a tensor whose last dimension holds means and noises, so is even"
                raise invalid("output", "Gaussian(noise='per-input')", constraint, output)
            mean, raw = output.chunk(2, dim=-1)
            return mean, softplus(raw), log_softplus(raw)
        if self.log_noise is not None:
            log_scale = self.log_noise.to(output.dtype)
            return output, log_scale.exp(), log_scale
        return output, float(self.noise), math.log(float(self.noise))


class LogLikelihood(Likelihood):
    """Any likelihood: ``function(output, target)`` gives log P(y|x,w) of each example, shape ``[B]``.

    Args:
        function: The log-probability of each example.
        predictive: For prediction, the ``torch.distributions.Distribution`` of the targets given the output.
        name: What a saved file calls it.
    """

    def __init__(
        self,
        function: Callable[[Any, Tensor], Tensor],
        predictive: Callable[[Any], distributions.Distribution] | None = None,
        name: str = "custom",
    ) -> None:
        super().__init__()
        check_callable("LogLikelihood", function=function)
        check_type("LogLikelihood", Callable | None, "None or a function", predictive=predictive)
        check_text("LogLikelihood", name=name)
        self.function = function
        self.predictive = predictive
        self.name = name

    def log_prob(self, output: Any, target: Tensor) -> Tensor:
        log_prob = self.function(output, target)
        if not isinstance(log_prob, Tensor) or log_prob.shape != target.shape[:1]:
            constraint = f"a function that gives one number per example, shape {list(target.shape[:1])}"
            raise invalid("function", "LogLikelihood", constraint, log_prob)
        return log_prob

    def distribution(self, output: Any) -> distributions.Distribution:
        if self.predictive is None:
            constraint = "a function from the output to a torch.distributions.Distribution in order to predict"
            raise invalid("predictive", "LogLikelihood", constraint, None)
        return self.predictive(output)


_BY_NAME: dict[str, type[Likelihood]] = {kind.__name__: kind for kind in (Categorical, Bernoulli, Gaussian)}


def describe(likelihood: Likelihood) -> dict[str, object]:
    """A likelihood as plain data for a file, without its tensors; of a user's own only what it is called."""
    if type(likelihood) not in _BY_NAME.values():
        return {"kind": "own", "name": getattr(likelihood, "name", type(likelihood).__name__)}
    arguments = {"noise": likelihood.noise} if isinstance(likelihood, Gaussian) else {}
    return {"kind": type(likelihood).__name__, **arguments}


def from_description(description: dict[str, Any]) -> Likelihood | None:
    """The likelihood that :func:`describe` described, or None for a user's own."""
    if description["kind"] == "own":
        return None
    arguments = {"noise": description["noise"]} if description["kind"] == "Gaussian" else {}
    return _BY_NAME[description["kind"]](**arguments)


def _check_output(likelihood: Likelihood, output: object, least_dims: int = 1) -> None:
    is_float = isinstance(output, Tensor) and output.is_floating_point() and output.layout is torch.strided
    if not is_float or output.dim() < least_dims or 0 in output.shape:  # type: ignore[attr-defined]
        shape = "[B, C, ...]" if least_dims == 2 else "[B, ...]"
        got = output if isinstance(output, Tensor) else Described(f"a {type(output).__name__}")
        raise invalid("output", type(likelihood).__name__, f"a float tensor of shape {shape}", got)


def _check_target(likelihood: Likelihood, target: object, shape: tuple[int, ...]) -> None:
    if not isinstance(target, Tensor) or tuple(target.shape) != shape or target.layout is not torch.strided:
        got = target if isinstance(target, Tensor) else Described(f"a {type(target).__name__}")
        constraint = f"a tensor of shape {list(shape)}, as the output has it"
        raise invalid("target", type(likelihood).__name__, constraint, got)


def _per_element(mean: Tensor, target: Tensor) -> Tensor:
    """The mean over examples from the mean over all their elements."""
    elements = target.numel() // max(1, len(target))
    return mean if elements == 1 else mean * elements


def _per_example(log_prob: Tensor) -> Tensor:
    return log_prob.flatten(1).sum(1) if log_prob.dim() > 1 else log_prob


def _between(values: Tensor, low: int, high: int) -> bool:
    return bool((values >= low).all() and (values <= high).all())
