"""Likelihoods P(y|x,w): what the network's output says about the target.

A likelihood computes the log-probability of each example. For prediction it also gives the distribution. Targets must
have exactly the shape that the output implies. Nothing is broadcast.

Training minimises the *cost* of each example, -log P(y|x,w). Three options change only this cost: class weights, label
smoothing, and the beta of a Gaussian. Log-probabilities and predictions ignore them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from bayesbackprop import _distributions
from bayesbackprop._batches import hint_for
from bayesbackprop._errors import (
    INT64,
    Described,
    check_callable,
    check_count,
    check_list,
    check_not_negative,
    check_positive,
    check_probability,
    check_text,
    check_type,
    invalid,
    tensor_shape,
)
from bayesbackprop.posterior import log_softplus, softplus

_T = TypeVar("_T")

_LOG_2PI = math.log(2 * math.pi)

# The noise of a Gaussian and its inverse must be larger than this, so that their squares are floats.
_SMALLEST = 1e-150

# No class has this index. As ignore_index it ignores nothing.
_NO_INDEX = -INT64

# More ordered classes than anyone needs. The limit keeps a damaged file from asking for a huge tensor.
_MOST_CLASSES = 2**16


class Form(NamedTuple):
    """How the kernels describe a likelihood."""

    kind: str  # its name in cpu.c
    number: float = 0.0  # the noise, or the least noise
    numbers: int = 1  # how many numbers the output has for each number of the target
    actions: int = 0  # the output describes each action; the target names one of them before its numbers


class Likelihood(nn.Module, ABC):
    """P(y|x,w), given the output of the network with the weights w.

    A subclass must define ``log_prob`` and ``distribution``. If its training cost is not -log P(y|x,w), it also defines
    ``costs``. If it sets ``has_slope``, the training of plain stacks of layers takes the gradient of ``cost`` from
    ``slope`` instead of from autograd.
    """

    has_slope = False

    def __init__(self) -> None:  # nn.Module would accept any arguments
        super().__init__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        # A method that the subclass leaves out must follow from its own log_prob. The parent's belongs to another one.
        if "costs" not in own and ("log_prob" in own or "cost" in own):
            cls.costs = Likelihood.costs if "log_prob" in own else _no_costs  # type: ignore[method-assign]
        if "cost" not in own and ("log_prob" in own or "costs" in own):
            cls.cost = Likelihood.cost  # type: ignore[method-assign]
        if "slope" not in own and not own.keys().isdisjoint(("log_prob", "costs", "cost")):
            cls.has_slope = False
        if "form" not in own and not own.keys().isdisjoint(("log_prob", "costs", "cost", "slope")):
            cls.form = Likelihood.form  # type: ignore[method-assign]

    @abstractmethod
    def log_prob(self, output: Any, target: Any) -> Tensor:
        """log P(y|x,w) of each example, shape ``[B]``."""

    def costs(self, output: Any, target: Any) -> Tensor:
        """The training cost of each example, shape ``[B]``: -log P(y|x,w) unless an option changes it."""
        return -self.log_prob(output, target)

    def cost(self, output: Any, target: Any) -> Tensor:
        """The likelihood cost: the mean of :meth:`costs`. The library's own likelihoods compute it in fewer steps."""
        return self.costs(output, target).mean()

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        """The gradient of :meth:`cost` by the output ``[B, D]``. The output has been checked before."""
        raise NotImplementedError

    def form(self) -> "Form | None":
        """How the kernels compute :meth:`cost` and :meth:`slope`; None if they cannot."""
        return None

    @abstractmethod
    def distribution(self, output: Any) -> Any:
        """P(y|x,w) as a ``torch.distributions.Distribution``, with one value for each element of the target."""

    def arguments(self) -> dict[str, Any]:
        """The arguments that differ from their defaults, as plain data for JSON. Learnt parameters are not included."""
        return {}


def _no_costs(self: Likelihood, output: Any, target: Any) -> Tensor:  # noqa: ARG001
    constraint = "defined besides cost, where examples have weights or it is a head of a Joint"
    raise invalid("costs", type(self).__name__, constraint, None)


class Weighted(Likelihood):
    """The likelihood of a minibatch whose examples have weights: P(y|x,w)^weight. The objective creates it.

    Args:
        likelihood: The likelihood of an example with weight 1.
        weights: The weight of each example, ``[B]``.
    """

    def __init__(self, likelihood: Likelihood, weights: Tensor) -> None:
        super().__init__()
        self.likelihood, self.weights = likelihood, weights
        self.has_slope = likelihood.has_slope and not weights.requires_grad

    def log_prob(self, output: Any, target: Any) -> Tensor:
        log_prob = self.likelihood.log_prob(output, target)
        return self.weights.to(log_prob) * log_prob

    def costs(self, output: Any, target: Any) -> Tensor:
        costs = self.likelihood.costs(output, target)
        return self.weights.to(costs) * costs

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        slope = self.likelihood.slope(output, target)
        return slope * self.weights.to(slope)[:, None]  # each row depends on its own example only

    def distribution(self, output: Any) -> Any:
        return self.likelihood.distribution(output)


class Categorical(Likelihood):
    """Classes: the output holds logits ``[B, C, ...]``, the target class indices ``[B, ...]`` (int64).

    The options are those of ``torch.nn.CrossEntropyLoss``, with one difference: the cost is always the mean over all
    examples. An example counts as one of the N whatever its weight, and also if its target is ignored.

    Args:
        weight: The weight of each class in training, one number per class. None means 1 for all.
        label_smoothing: The part of a target, in [0, 1], that training spreads evenly over all classes.
        ignore_index: Targets with this index are ignored: their log-probability and their cost are 0.

    Examples:
        >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2]))
        tensor([-1.3863])
        >>> Categorical(weight=[1.0, 3.0]).costs(torch.zeros(2, 2), torch.tensor([0, 1]))
        tensor([0.6931, 2.0794])
    """

    has_slope = True

    def __init__(
        self,
        *,
        weight: Sequence[float] | Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        if ignore_index is not None:
            ignore_index = check_count("Categorical", least=_NO_INDEX, ignore_index=ignore_index)["ignore_index"]
        self.weight = None if weight is None else _checked_numbers("Categorical", weight=weight)
        self.label_smoothing = check_probability("Categorical", label_smoothing=label_smoothing)["label_smoothing"]
        self.ignore_index = ignore_index
        self._is_plain = not self.arguments()
        self.has_slope = type(self).has_slope and self._is_plain

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.arguments().items())

    def arguments(self) -> dict[str, Any]:
        given = {
            "weight": None if self.weight is None else list(self.weight),
            "label_smoothing": self.label_smoothing or None,
            "ignore_index": self.ignore_index,
        }
        return {name: value for name, value in given.items() if value is not None}

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return _per_example(-self._cross_entropy(output, target, "none"))

    def costs(self, output: Tensor, target: Tensor) -> Tensor:
        return _per_example(self._cross_entropy(output, target, "none", trains=True))

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        if not self._is_plain:  # torch would compute another mean
            return self.costs(output, target).mean()
        return _per_element(self._cross_entropy(output, target, "mean"), target)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        minus_one = output.new_full((len(target), 1), -1.0)
        return output.softmax(1).scatter_add_(1, target.unsqueeze(1), minus_one).div_(len(target))

    def _cross_entropy(self, output: Tensor, target: Tensor, reduction: str, trains: bool = False) -> Tensor:
        _check_output(self, output, least_dims=2)
        _check_target(self, target, (output.shape[0], *output.shape[2:]))
        _check_classes(self, target)
        if output.device.type != "cpu":
            self._check_indices(output, target)
        options: dict[str, Any] = {"label_smoothing": self.label_smoothing} if trains else {}
        if trains and self.weight is not None:
            if len(self.weight) != output.shape[1]:
                constraint = f"a list of {output.shape[1]} floats, as many as the output has classes"
                raise invalid("weight", "Categorical", constraint, Described(f"{len(self.weight)} of them"))
            options["weight"] = output.new_tensor(self.weight)
        ignored = _NO_INDEX if self.ignore_index is None else self.ignore_index
        try:
            return F.cross_entropy(output, target, reduction=reduction, ignore_index=ignored, **options)
        except IndexError:  # on the CPU torch checks the indices itself
            self._check_indices(output, target)
            raise

    def _check_indices(self, output: Tensor, target: Tensor) -> None:
        known = target if self.ignore_index is None else target[target != self.ignore_index]
        _check_range(self, known, output.shape[1])

    def distribution(self, output: Tensor) -> distributions.Categorical:
        _check_output(self, output, least_dims=2)
        logits = output.movedim(1, -1)
        if self.ignore_index is None:
            return distributions.Categorical(logits=logits, validate_args=_validates())
        ignoring = _distributions.IgnoringCategorical(logits=logits, validate_args=_validates())
        ignoring.ignore_index = self.ignore_index
        return ignoring


class Ordinal(Likelihood):
    """Ordered classes, such as grades: the output holds scores s, the target class indices (int64) of the same shape.

    If the output has the shape ``[B, 1]``, the target may also be ``[B]``.

    Learnt cut points c_1 < c_2 < ... divide the line of scores into classes:

    P(y <= k) = 1 / (1 + exp(s - c_{k+1}))

    Args:
        classes: The number of classes, K. Before training, each has the probability 1 / K at the score 0.

    Examples:
        >>> Ordinal(4).distribution(torch.zeros(1)).probs
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]], grad_fn=<SoftmaxBackward0>)
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = check_count("Ordinal", least=2, below=_MOST_CLASSES + 1, classes=classes)["classes"]
        even = (torch.arange(1, self.classes, dtype=torch.float64) / self.classes).logit()
        gaps = even.diff()
        # The first cut point. Each other one is held as the s of its distance log(1 + exp(s)) from the one before.
        raw = torch.cat([even[:1], gaps + torch.log(-torch.expm1(-gaps))])
        self.raw_cuts = nn.Parameter(raw.to(torch.get_default_dtype()))

    def extra_repr(self) -> str:
        return f"classes={self.classes}"

    def arguments(self) -> dict[str, Any]:
        return {"classes": self.classes}

    @property
    def cuts(self) -> Tensor:
        """The cut points, ``[K - 1]``."""
        return _cut_points(self.raw_cuts)

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        _check_output(self, output)
        target = _distributions.as_column(target, tuple(output.shape))
        _check_target(self, target, tuple(output.shape))
        _check_classes(self, target)
        _check_range(self, target, self.classes)
        return _per_example(self._log_probs(output).gather(-1, target.unsqueeze(-1)).squeeze(-1))

    def distribution(self, output: Tensor) -> distributions.Categorical:
        _check_output(self, output)
        return distributions.Categorical(logits=self._log_probs(output), validate_args=_validates())

    def _log_probs(self, output: Tensor) -> Tensor:
        """log P(y = k) of all classes, in a new last dimension.

        A class lies between two cut points with the logits a and b, where b - a = log(1 + exp(s)). Then

        log P(y = k) = log(sigmoid(b) - sigmoid(a)) = log sigmoid(b) + log sigmoid(-a) + log sigmoid(s)

        and nothing cancels. The first class has no a and the last no b.
        """
        raw = self.raw_cuts.to(output.dtype)
        logits = _cut_points(raw) - output.unsqueeze(-1)
        return (
            F.pad(F.logsigmoid(logits), (0, 1))
            + F.pad(F.logsigmoid(-logits), (1, 0))
            + F.pad(F.logsigmoid(raw[1:]), (1, 1))
        )


class Bernoulli(Likelihood):
    """Yes or no: the output holds logits and the target 0 or 1, both of shape ``[B, ...]``.

    Examples:
        >>> Bernoulli().log_prob(torch.zeros(2), torch.tensor([1.0, 0.0]))
        tensor([-0.6931, -0.6931])
    """

    has_slope = True

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return _per_example(-self._cross_entropy(output, target, "none"))

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return _per_element(self._cross_entropy(output, target, "mean"), target)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.sigmoid() - target).div_(target.shape[0])

    def form(self) -> Form | None:
        return Form("BERNOULLI")

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
        return distributions.Bernoulli(logits=output, validate_args=_validates())


class Gaussian(Likelihood):
    """Numbers with Gaussian noise. The target is a float tensor.

    Args:
        noise: The standard deviation of the noise. A float fixes it. ``"learnt"`` trains one number with the network.
            ``"per-input"`` reads the noise from the network. The output's last dimension is then twice that of the
            target: first the means, then the numbers s of noise = least + log(1 + exp(s)).
        initial: The initial value of a learnt noise.
        least: The lower bound of noise per input. Without one, a network that can predict some targets exactly drives
            their noise to 0. Their density then grows without bound, and nothing else is learnt.
        beta: For noise per input, a number in [0, 1]. Training multiplies the cost of each number by noise^(2 beta),
            without a gradient through this factor. The gradient of a mean has the factor 1 / noise^2. At 0 a network
            may therefore call hard examples noisy and stop learning their means. At 1 the means learn as under a
            squared error. With beta the cost is no likelihood: it is not in nats, and the posterior is not that of
            Bayes' rule.

    Examples:
        >>> Gaussian(0.5).log_prob(torch.tensor([[1.0]]), torch.tensor([[1.0]]))
        tensor([-0.2258])
    """

    has_slope = True

    def __init__(
        self,
        noise: float | Literal["learnt", "per-input"] = "learnt",
        *,
        initial: float = 1.0,
        beta: float = 0.0,
        least: float = 0.0,
    ) -> None:
        super().__init__()
        self.noise = _float_or("Gaussian", ("learnt", "per-input"), noise=noise)
        if not isinstance(self.noise, str) and not _SMALLEST < self.noise < 1 / _SMALLEST:
            constraint = f"in ({_SMALLEST}, {1 / _SMALLEST}), where its square is a float"
            raise invalid("noise", "Gaussian", constraint, noise)
        self.beta = check_probability("Gaussian", beta=beta)["beta"]
        self.least = check_not_negative("Gaussian", least=least)["least"]
        for name, option in (("beta", self.beta), ("least", self.least)):
            if option and noise != "per-input":
                raise invalid(name, "Gaussian", "0 unless the noise is 'per-input'", option)
        self.has_slope = type(self).has_slope and self.noise != "learnt" and not self.beta
        self.log_noise = _learnt("Gaussian", self.noise, initial=initial)

    def extra_repr(self) -> str:
        shown = _shown(noise=(self.noise, self.log_noise))
        return ", ".join([shown, *(f"{name}={value:g}" for name, value in self._options().items())])

    def arguments(self) -> dict[str, Any]:
        return {"noise": self.noise, **self._options()}

    def _options(self) -> dict[str, float]:
        return {name: value for name, value in (("beta", self.beta), ("least", self.least)) if value}

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return _per_example(self._log_probs(output, target)[0])

    def costs(self, output: Tensor, target: Tensor) -> Tensor:
        log_probs, scale = self._log_probs(output, target)
        if self.beta:
            assert isinstance(scale, Tensor)
            log_probs = log_probs * scale.detach() ** (2 * self.beta)
        return -_per_example(log_probs)

    def _log_probs(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor | float]:
        """log P of each number, and the noise."""
        mean, scale, log_scale = self._moments(output)
        _check_numbers(self, mean, target)
        return -0.5 * ((target - mean) / scale).square() - (log_scale + 0.5 * _LOG_2PI), scale

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        if self.noise == "per-input":
            return self.costs(output, target).mean()
        mean, scale, log_scale = self._moments(output)
        _check_numbers(self, mean, target)
        squares = (mean - target.to(mean.dtype)).square().sum()
        examples = target.shape[0]  # len() takes eight times as long
        elements = target.numel() // examples
        return squares * (0.5 / examples / scale**2) + elements * (log_scale + 0.5 * _LOG_2PI)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        if self.noise != "per-input":
            return (output - target.to(output.dtype)).mul_(1 / (float(self.noise) ** 2 * target.shape[0]))
        mean, raw = output.chunk(2, dim=-1)
        scale = softplus(raw) + self.least
        away = (mean - target.to(output.dtype)) / scale
        return torch.cat([away, (1 - away.square()) * raw.sigmoid()], -1).div_(
            torch.cat([scale, scale], -1) * len(target)
        )

    def form(self) -> Form | None:
        if not self.has_slope:
            return None
        per_input = self.noise == "per-input"
        return Form("GAUSSIAN_PER_INPUT", self.least, 2) if per_input else Form("GAUSSIAN", float(self.noise))

    def distribution(self, output: Tensor) -> distributions.Normal:
        mean, scale, _ = self._moments(output)
        deviation = torch.as_tensor(scale, dtype=mean.dtype, device=mean.device).expand_as(mean)
        return distributions.Normal(mean, deviation, validate_args=_validates())

    def _moments(self, output: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """The mean, the noise and its logarithm."""
        _check_output(self, output)
        if self.noise == "per-input":
            if output.dim() < 2 or output.shape[-1] % 2:
                constraint = "a tensor whose last dimension holds means and noises, so is even"
                raise invalid("output", "Gaussian(noise='per-input')", constraint, output)
            mean, raw = output.chunk(2, dim=-1)
            if not self.least:
                return mean, softplus(raw), log_softplus(raw)
            scale = softplus(raw) + self.least
            return mean, scale, scale.log()
        if self.log_noise is not None:
            log_scale = self.log_noise.to(output.dtype)
            return output, log_scale.exp(), log_scale
        return output, float(self.noise), math.log(float(self.noise))


class StudentT(Likelihood):
    """Numbers with outliers: Student's t around the output. The target is a float tensor of the output's shape.

    Args:
        scale: The width of the distribution. A float fixes it. ``"learnt"`` trains one number with the network.
        df: The degrees of freedom, a float or ``"learnt"``. Fewer degrees mean heavier tails. Up to 1 the distribution
            has no mean, up to 2 no variance. From about 30 on it is nearly Gaussian.
        initial_scale: The initial value of a learnt scale.
        initial_df: The initial value of learnt degrees of freedom.

    Examples:
        >>> StudentT(1.0, 3.0).log_prob(torch.zeros(1, 1), torch.tensor([[4.0]]))
        tensor([-4.6925])
    """

    def __init__(
        self,
        scale: float | Literal["learnt"] = "learnt",
        df: float | Literal["learnt"] = "learnt",
        *,
        initial_scale: float = 1.0,
        initial_df: float = 4.0,
    ) -> None:
        super().__init__()
        self.scale, self.df = _float_or("StudentT", scale=scale), _float_or("StudentT", df=df)
        self.log_scale = _learnt("StudentT", self.scale, initial_scale=initial_scale)
        self.log_df = _learnt("StudentT", self.df, initial_df=initial_df)

    def extra_repr(self) -> str:
        return _shown(scale=(self.scale, self.log_scale), df=(self.df, self.log_df))

    def arguments(self) -> dict[str, Any]:
        return {"scale": self.scale, "df": self.df}

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        _check_output(self, output)
        _check_numbers(self, output, target)
        return _per_example(_distributions.student_log_prob(*self._log_df_and_scale(output), output, target))

    def distribution(self, output: Tensor) -> distributions.StudentT:
        _check_output(self, output)
        df, scale = (logarithm.exp().to(output.dtype) for logarithm in self._log_df_and_scale(output))
        return _distributions.StudentT(df, output, scale, validate_args=_validates())

    def _log_df_and_scale(self, output: Tensor) -> tuple[Tensor, Tensor]:
        log_df, log_scale = _logarithm(self.df, self.log_df, output), _logarithm(self.scale, self.log_scale, output)
        return _distributions.within_reach(log_df), log_scale


class Poisson(Likelihood):
    """Counts: the output holds the logarithms of the rates, the target whole numbers >= 0 of the same shape.

    Examples:
        >>> Poisson().log_prob(torch.zeros(1, 1), torch.tensor([[2]]))
        tensor([-1.6931])
    """

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        _check_output(self, output)
        _check_counts(self, output, target)
        return _per_example(_distributions.poisson_log_prob(output, target))

    def distribution(self, output: Tensor) -> distributions.Poisson:
        _check_output(self, output)
        return _distributions.Poisson(output, validate_args=_validates())


class NegativeBinomial(Likelihood):
    """Counts that vary more than Poisson's: the output holds the logarithms of the means, the target whole numbers.

    A count with the mean m has the variance m + dispersion m^2. At dispersion 0 this is a Poisson distribution.

    Args:
        dispersion: A float fixes it. ``"learnt"`` trains one number with the network.
        initial: The initial value of a learnt dispersion.

    Examples:
        >>> NegativeBinomial(1.0).log_prob(torch.zeros(1, 1), torch.tensor([[2]]))  # (1 / 2)^3
        tensor([-2.0794])
    """

    def __init__(self, dispersion: float | Literal["learnt"] = "learnt", *, initial: float = 1.0) -> None:
        super().__init__()
        self.dispersion = _float_or("NegativeBinomial", dispersion=dispersion)
        self.log_dispersion = _learnt("NegativeBinomial", self.dispersion, initial=initial)

    def extra_repr(self) -> str:
        return _shown(dispersion=(self.dispersion, self.log_dispersion))

    def arguments(self) -> dict[str, Any]:
        return {"dispersion": self.dispersion}

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        _check_output(self, output)
        _check_counts(self, output, target)
        log_dispersion = self._within_reach(output)
        return _per_example(_distributions.negative_binomial_log_prob(output, log_dispersion, target))

    def distribution(self, output: Tensor) -> distributions.NegativeBinomial:
        _check_output(self, output)
        log_dispersion = self._within_reach(output).to(output.dtype)
        return _distributions.NegativeBinomial(output, log_dispersion, validate_args=_validates())

    def _within_reach(self, output: Tensor) -> Tensor:
        return _distributions.within_reach(_logarithm(self.dispersion, self.log_dispersion, output))


class Joint(Likelihood):
    """Several targets at once: the product of the likelihoods of the network's heads, P(y|x,w) = prod_h P(y_h|x,w).

    A prediction has one predictive distribution for each head: ``model.predict(x)["price"]``.

    Args:
        heads: A mapping from names to likelihoods if the network returns a mapping with these names. A sequence of
            likelihoods if it returns a tuple or list. Targets have the same form as the output.

    Examples:
        >>> joint = Joint({"price": Gaussian(1.0), "sold": Bernoulli()})
        >>> output = {"price": torch.zeros(1, 1), "sold": torch.zeros(1, 1)}
        >>> joint.log_prob(output, {"price": torch.zeros(1, 1), "sold": torch.ones(1, 1)})  # -0.9189 - 0.6931
        tensor([-1.6121])
    """

    def __init__(self, heads: Mapping[str, Likelihood] | Sequence[Likelihood]) -> None:
        super().__init__()
        self.names: tuple[str, ...] | None = None
        if isinstance(heads, Mapping):
            self.names, heads = tuple(heads), list(heads.values())
        many = list(check_list("Joint", heads=heads))
        names_known = all(isinstance(name, str) for name in self.names or ())
        if not many or not names_known or not all(isinstance(head, Likelihood) for head in many):
            raise invalid("heads", "Joint", "a mapping from names to likelihoods, or a list of likelihoods", heads)
        if len(set(many)) != len(many):
            raise invalid("heads", "Joint", "made of different likelihoods, since each learns for itself", heads)
        self.heads = nn.ModuleList(many)

    def extra_repr(self) -> str:
        return "" if self.names is None else f"names={list(self.names)}"

    def arguments(self) -> dict[str, Any]:
        described = self.join([describe(head) for head in self.each])
        return {"heads": list(described) if isinstance(described, tuple) else described}

    @property
    def each(self) -> list[Likelihood]:
        """The likelihoods of the heads."""
        return list(self.heads)  # type: ignore[arg-type]

    def split(self, values: Any, parameter: str = "output") -> list[Any]:
        """The part of ``values``, an output or a target, that belongs to each head."""
        if self.names is None:
            if isinstance(values, tuple | list) and len(values) == len(self.heads):
                return list(values)
            constraint = f"a tuple or list of {len(self.heads)}, one for each head"
        else:
            if isinstance(values, Mapping) and set(values) == set(self.names):
                return [values[name] for name in self.names]
            constraint = f"a mapping with the names of the heads, {list(self.names)}"
        got = tensor_shape(values) if isinstance(values, Tensor) else Described(f"a {type(values).__name__}")
        if isinstance(values, Mapping | tuple | list):
            got = Described(f"{got} of {list(values) if isinstance(values, Mapping) else len(values)}")
        raise invalid(parameter, "Joint", constraint, got)

    def join(self, values: Sequence[_T]) -> dict[str, _T] | tuple[_T, ...]:
        """Put ``values``, one for each head, into the form of the network's output."""
        return tuple(values) if self.names is None else dict(zip(self.names, values, strict=True))

    def log_prob(self, output: Any, target: Any) -> Tensor:
        return self._sum([head.log_prob(*both) for head, *both in self._parts(output, target)])

    def costs(self, output: Any, target: Any) -> Tensor:
        return self._sum([head.costs(*both) for head, *both in self._parts(output, target)])

    def distribution(self, output: Any) -> Any:
        return self.join([head.distribution(part) for head, part in zip(self.each, self.split(output), strict=True)])

    def _parts(self, output: Any, target: Any) -> list[tuple[Likelihood, Any, Any]]:
        return list(zip(self.each, self.split(output), self.split(target, "target"), strict=True))

    def _sum(self, parts: list[Tensor]) -> Tensor:
        lengths = [len(part) for part in parts]
        if len(set(lengths)) != 1:
            constraint = "of as many examples for each head"
            raise invalid("target", "Joint", constraint, Described(f"{lengths} examples"))
        return torch.stack(parts).sum(0)


class LogLikelihood(Likelihood):
    """Any likelihood: ``function(output, target)`` returns log P(y|x,w) of each example, shape ``[B]``.

    Args:
        function: Returns the log-probability of each example.
        predictive: Returns the ``torch.distributions.Distribution`` of the targets for an output. Needed to predict.
        name: Its name in saved files.
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


_BY_NAME: dict[str, type[Likelihood]] = {
    kind.__name__: kind
    for kind in (Categorical, Ordinal, Bernoulli, Gaussian, StudentT, Poisson, NegativeBinomial, Joint)
}


def describe(likelihood: Likelihood) -> dict[str, object]:
    """Describe a likelihood as plain data for a file, without its tensors. A user's own has only its name there."""
    if type(likelihood) not in _BY_NAME.values():
        return {"kind": "own", "name": getattr(likelihood, "name", type(likelihood).__name__)}
    return {"kind": type(likelihood).__name__, **likelihood.arguments()}


def from_description(description: dict[str, Any]) -> Likelihood | None:
    """Make the likelihood that :func:`describe` described. None if it, or one of its heads, is a user's own."""
    arguments = dict(description)
    kind = arguments.pop("kind")
    if kind == "own":
        return None
    if kind == "Joint":
        heads = arguments["heads"]
        names, parts = (heads, heads.values()) if isinstance(heads, dict) else (None, heads)
        made = [from_description(part) for part in parts]
        if None in made:
            return None
        arguments["heads"] = made if names is None else dict(zip(names, made, strict=True))
    likelihood = _BY_NAME[kind](**arguments)
    if describe(likelihood) != description:  # the description is incomplete
        raise ValueError(f"likelihood {description!r:.200}")
    return likelihood


# --- numbers that are given or learnt --------------------------------------------------------------------------------


def _float_or(owner: str, words: Sequence[str] = ("learnt",), **values: object) -> float | str:
    """A number above 0, or one of ``words``, which says how the number is found."""
    ((name, value),) = values.items()
    if not isinstance(value, str):
        return check_positive(owner, **values)[name]
    if value not in words:
        *options, last = ["a float in (0, inf)", *map(repr, words)]
        raise invalid(name, owner, f"{', '.join(options)} or {last}", value)
    return value


def _learnt(owner: str, setting: float | str, **initial: object) -> nn.Parameter | None:
    """The parameter that holds the logarithm of a learnt number; None if the number is fixed."""
    (start,) = check_positive(owner, **initial).values()
    return nn.Parameter(torch.tensor(math.log(start))) if setting == "learnt" else None


def _logarithm(setting: float | str, learnt: nn.Parameter | None, like: Tensor) -> Tensor:
    """The logarithm of a fixed or learnt number, in double precision."""
    if learnt is not None:
        return learnt.double()
    return torch.full((), math.log(float(setting)), dtype=torch.float64, device=like.device)


def _shown(**numbers: tuple[float | str, nn.Parameter | None]) -> str:
    shown = [
        f"{name}={setting!r}" if learnt is None else f"{name}='learnt', now {learnt.exp():.4g}"
        for name, (setting, learnt) in numbers.items()
    ]
    return ", ".join(shown)


def _checked_numbers(owner: str, **values: Any) -> tuple[float, ...]:
    """The numbers of a list, tensor or array that is not empty. All must be 0 or more."""
    many = check_list(owner, **values)
    ((name, _),) = values.items()
    has_no_numbers = isinstance(many, Tensor) and (many.layout is not torch.strided or many.is_meta)
    numbers = many.tolist() if isinstance(many, Tensor | np.ndarray) and not has_no_numbers else many
    if has_no_numbers or not numbers:
        got = tensor_shape(many) if isinstance(many, Tensor) else many
        raise invalid(name, owner, "a list of floats in [0, inf), one for each class", got)
    return tuple(check_not_negative(owner, **{name: number})[name] for number in numbers)


def _cut_points(raw: Tensor) -> Tensor:
    return torch.cat([raw[:1], softplus(raw[1:])]).cumsum(0)


# --- outputs and targets ---------------------------------------------------------------------------------------------


def _validates() -> bool:
    """Whether distributions check their parameters. Under torch.export they must not: a check cannot be traced.

    Every distribution is told explicitly, because torch.compile turns torch's default off for the whole process.
    """
    # torch 2.6 cannot tell an export from a compilation.
    return not getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()


def _check_output(likelihood: Likelihood, output: object, least_dims: int = 1) -> None:
    is_float = isinstance(output, Tensor) and output.is_floating_point() and output.layout is torch.strided
    if not is_float or output.dim() < least_dims or 0 in output.shape:  # type: ignore[attr-defined]
        shape = "[B, C, ...]" if least_dims == 2 else "[B, ...]"
        got = output if isinstance(output, Tensor) else Described(f"a {type(output).__name__}")
        hint = "" if isinstance(output, Tensor) else " (Bayesian(..., output=lambda o: o.logits) picks it)"
        raise invalid("output", type(likelihood).__name__, f"a float tensor of shape {shape}{hint}", got)


def _check_target(likelihood: Likelihood, target: object, shape: tuple[int, ...]) -> None:
    if not isinstance(target, Tensor) or tuple(target.shape) != shape or target.layout is not torch.strided:
        got = target if isinstance(target, Tensor) else Described(f"a {type(target).__name__}")
        hint = hint_for(target)
        constraint = f"a tensor of shape {list(shape)}, as the output has it{f' ({hint})' if hint else ''}"
        raise invalid("target", type(likelihood).__name__, constraint, got)


def _check_numbers(likelihood: Likelihood, mean: Tensor, target: Tensor) -> None:
    _check_target(likelihood, target, tuple(mean.shape))
    if not target.is_floating_point():
        raise invalid("target", type(likelihood).__name__, "a tensor of floats", tensor_shape(target))


def _check_counts(likelihood: Likelihood, output: Tensor, target: Tensor) -> None:
    _check_target(likelihood, target, tuple(output.shape))
    known = not target.is_complex()
    if known and not torch.compiler.is_compiling():
        counts = target.double()
        known = bool(((counts >= 0) & (counts == counts.floor()) & counts.isfinite()).all())
    if not known:
        raise invalid("target", type(likelihood).__name__, "made of whole numbers from 0 on", tensor_shape(target))


def _check_classes(likelihood: Likelihood, target: Tensor) -> None:
    if target.dtype != torch.int64:
        constraint = "a tensor of class indices of type torch.int64"
        raise invalid("target", type(likelihood).__name__, constraint, tensor_shape(target))


def _check_range(likelihood: Likelihood, target: Tensor, classes: int) -> None:
    if not torch.compiler.is_compiling() and target.numel() and not _between(target, 0, classes - 1):
        got = Described(f"indices from {int(target.min())} to {int(target.max())}")
        raise invalid("target", type(likelihood).__name__, f"class indices in [0, {classes - 1}]", got)


def _per_element(mean: Tensor, target: Tensor) -> Tensor:
    """Turn a mean over elements into a mean over examples."""
    elements = target.numel() // max(1, len(target))
    return mean if elements == 1 else mean * elements


def _per_example(log_prob: Tensor) -> Tensor:
    return log_prob.flatten(1).sum(1) if log_prob.dim() > 1 else log_prob


def _between(values: Tensor, low: int, high: int) -> bool:
    return bool((values >= low).all() and (values <= high).all())
