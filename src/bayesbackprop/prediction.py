"""Prediction: P(y|x) = E_q[P(y|x,w)], the mean probability (never the mean log-probability) over many draws.

The uncertainty has two parts. The *aleatoric* part is noise on which all drawn networks agree. The *epistemic* part is
their disagreement, which more data would remove. For classes the total is the entropy, and the epistemic part is the
mutual information of label and weights. For numbers and counts the total is the variance, split by the law of total
variance.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, distributions, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from bayesbackprop._batches import call_arguments, hint_for
from bayesbackprop._distributions import StudentT, as_column
from bayesbackprop._engine import OF_ALL_MODULES, Slots, evaluating, lock, memo_of, over_draws, substituting
from bayesbackprop._errors import (
    Described,
    check_batch,
    check_count,
    check_probability,
    check_type,
    invalid,
    tensors_of,
)
from bayesbackprop._trees import has_objects, map_tensors, own_objects, revive, tensors_in
from bayesbackprop.likelihoods import Joint, Likelihood

# The default limit on the memory of a prediction, in bytes.
GIGABYTE = 2**30

# The entropy of a mixture is an integral. Its nodes are at these multiples of each component's standard deviation; less
# than 1e-18 of the mass lies beyond 9. With three Gauss-Legendre points between two nodes the error is about 1e-7.
_NODES = torch.linspace(-9, 9, 37, dtype=torch.float64)
_LEGENDRE = np.polynomial.legendre.leggauss(3)
# The tails of Student's t fall as a power of the distance. There the distance of a node grows by this factor.
_GROWTH = 1.4
# The probability that an entropy may leave out, and the most values over which the entropy of a count is summed.
_REST, _MOST_VALUES = 1e-13, 2**20
# How many numbers an integration holds at a time.
_CHUNK = 2**22
# The random functions that torch's distributions call in ``sample``, and ``randint``.
_RANDOM = {"bernoulli", "binomial", "cauchy_", "exponential_", "geometric_", "multinomial", "normal", "normal_"}
_RANDOM |= {"poisson", "rand", "randint", "uniform_", "_sample_dirichlet", "_standard_gamma"}
# How often the bracket around a quantile may be halved, which is more than the bits of a double. Before that it may be
# doubled until it spans all doubles.
_HALVINGS, _DOUBLINGS = 60, 2100


class Predictive(ABC):
    """A predictive distribution: the uniform mixture of the distributions that ``draws`` networks predict.

    Its tensors have one row for each example. ``components`` is a ``torch.distributions`` object. Its rows are those of
    all examples for the first draw, then for the second, and so on.
    """

    def __init__(self, components: Any, draws: int) -> None:
        self.components = components
        self.draws = draws

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """The predictive mean. For classes, the probability of each class."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """The predictive variance, aleatoric and epistemic. For classes, the variance of each class's indicator."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """The entropy of the predictive distribution, in nats."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """The part of the uncertainty that is noise, on which all draws agree."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """The part of the uncertainty that exists because the weights are not known."""

    @abstractmethod
    def quantiles(self, q: Sequence[float]) -> Tensor:
        """Quantiles ``[len(q), ...]``. For numbers: of the target. For classes: of their probability over the draws."""

    @abstractmethod
    def _log_probs(self, target: Any) -> Tensor:
        """log P(y|x,w) of each draw, ``[draws, ...]``."""

    @abstractmethod
    def _sample(self, chosen: "_Chosen") -> Tensor:
        """Sample targets from the chosen draws, ``[count, ...]``."""

    @property
    def stddev(self) -> Tensor:
        """The square root of the variance."""
        stddev: Tensor = tree_map(torch.sqrt, self.variance)
        return stddev

    def interval(self, level: float) -> Tensor:
        """The ends ``[2, ...]`` of the central interval that contains the target with probability ``level``."""
        level = check_probability("interval", level=level)["level"]
        return self.quantiles([(1 - level) / 2, (1 + level) / 2])

    def log_prob(self, target: Any) -> Tensor:
        """log P(y|x) of each element of the target: the logarithm of its mean probability over the draws."""
        return self._log_probs(target).logsumexp(0) - math.log(self.draws)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Sample ``count`` targets for each example, ``[count, ...]``. Each sample takes one draw for all examples.

        Args:
            count: The number of samples.
            generator: The random generator. None for torch's own.
        """
        count = check_count("sample", count=count)["count"]
        check_type("sample", torch.Generator | None, "None or a torch.Generator", generator=generator)
        with nullcontext() if generator is None else _From(generator), torch.no_grad():
            return self._sample(_Chosen(self.draws, count, "cpu" if generator is None else generator.device))


class _Chosen:
    """Choose a random draw for each of ``count`` samples."""

    def __init__(self, draws: int, count: int, device: str | torch.device) -> None:
        draw = torch.randint(draws, (count,), device=device)
        ordered, position = draw.sort(stable=True)
        counts = ordered.bincount(minlength=draws)
        first = counts.cumsum(0) - counts
        # If two samples choose the same draw, the first gets its first target and the second gets its second.
        number = torch.empty_like(draw)
        number[position] = torch.arange(count, device=device) - first[ordered]
        self.most = int(counts.max())
        self._draw, self._number = draw, number

    def of(self, samples: Tensor) -> Tensor:
        """The chosen rows of ``samples``, ``[most, draws, ...]``."""
        return samples[self._number.to(samples.device), self._draw.to(samples.device)]


class _From(TorchFunctionMode):
    """A context in which all random numbers come from a generator. Torch's distributions do not accept one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {"generator": self._generator} if func.__name__ in _RANDOM else {}
        return func(*args, **{**(kwargs or {}), **given})


class MixturePredictive(Predictive):
    """The common base of predictions of classes and of numbers."""

    components: distributions.Distribution

    def _log_probs(self, target: Tensor) -> Tensor:
        self._check("log_prob", target=target)
        return self._by_draw(self.components.log_prob(self._repeated(target)))

    def _check(self, method: str, **values: object) -> None:
        """Refuse values whose shape is not that of the targets."""
        shape = self.components.batch_shape + self.components.event_shape
        expected = (shape[0] // self.draws, *shape[1:])
        for name, value in values.items():
            is_real = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_complex()
            if not is_real or tuple(value.shape) != expected:  # type: ignore[attr-defined]
                hint = hint_for(value)
                constraint = f"a tensor of real numbers of shape {list(expected)}{f' ({hint})' if hint else ''}"
                raise invalid(name, f"Predictive.{method}", constraint, value)

    def _sample(self, chosen: _Chosen) -> Tensor:
        samples = self.components.sample(torch.Size([chosen.most]))
        return chosen.of(samples.unflatten(1, (self.draws, -1)))

    def _repeated(self, values: Tensor) -> Tensor:
        if isinstance(self.components, distributions.Bernoulli):
            values = values.to(self.components.probs.dtype)  # Bernoulli takes no integers
        return values.unsqueeze(0).expand(self.draws, *values.shape).flatten(0, 1)

    def _by_draw(self, values: Tensor) -> Tensor:
        return values.reshape(self.draws, -1, *values.shape[1:])


class ClassPredictive(MixturePredictive):
    """The predictive distribution of classes, with their probabilities in the last dimension, or of yes and no."""

    components: distributions.Categorical | distributions.Bernoulli

    @property
    def probs(self) -> Tensor:
        """The predictive probabilities."""
        return self._by_draw(self.components.probs).mean(0)

    mean = probs

    @property
    def labels(self) -> Tensor:
        """The most probable class. For yes and no: 1 if yes is more probable than no."""
        if isinstance(self.components, distributions.Categorical):
            return self.probs.argmax(-1)
        return (self.probs > 0.5).long()

    @property
    def variance(self) -> Tensor:
        return self.probs * (1 - self.probs)

    def _log_probs(self, target: Tensor) -> Tensor:
        if isinstance(self.components, distributions.Categorical):  # the targets of Ordinal
            rows, *shape = self.components.batch_shape
            target = as_column(target, (rows // self.draws, *shape))
        return super()._log_probs(target)

    @property
    def entropy(self) -> Tensor:
        # The probabilities were checked before; their mean needs no check.
        mixture = type(self.components)(probs=self.probs, validate_args=False)
        entropy: Tensor = mixture.entropy()  # type: ignore[no-untyped-call]
        return entropy

    @property
    def aleatoric(self) -> Tensor:
        """The expected entropy, E_w H[y|x,w]."""
        return self._by_draw(self.components.entropy()).mean(0)  # type: ignore[no-untyped-call]

    @property
    def epistemic(self) -> Tensor:
        """The mutual information I[y; w|x] = H[y|x] - E_w H[y|x,w]."""
        return (self.entropy - self.aleatoric).clamp(min=0)  # rounding may make it negative

    def quantiles(self, q: Sequence[float]) -> Tensor:
        probs = self._by_draw(self.components.probs)
        return probs.quantile(torch.as_tensor(_levels(q), dtype=probs.dtype, device=probs.device), dim=0)


class ValuePredictive(MixturePredictive):
    """The predictive distribution of numbers or counts, such as a mixture of Gaussians."""

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
        """-E[log P(y|x)]. A sum for counts; a quadrature if the components are Gaussian or Student's t."""
        if self.is_whole:
            return self._summed_entropy()
        if not isinstance(self.components, distributions.Normal | distributions.StudentT):
            raise NotImplementedError(f"The entropy of a mixture of {type(self.components).__name__} is not available.")
        loc, scale = (self._by_draw(each).double().flatten(1) for each in (self.components.loc, self.components.scale))
        nodes, each = _NODES, cast(distributions.Distribution, distributions.Normal(loc, scale, validate_args=False))
        if isinstance(self.components, distributions.StudentT):
            df = self._by_draw(self.components.df).double().flatten(1)
            nodes, each = _heavy_nodes(float(df.min())), StudentT(df, loc, scale, validate_args=False)
        grid = (loc + nodes.to(loc.device)[:, None, None] * scale).flatten(0, 1).sort(dim=0).values
        middle, half = (grid[1:] + grid[:-1]) / 2, (grid[1:] - grid[:-1]) / 2
        total = torch.zeros_like(loc[0])
        rows = max(1, _CHUNK // loc.numel())
        for node, weight in zip(*_LEGENDRE, strict=True):
            for y, width in zip((middle + node * half).split(rows), half.split(rows), strict=True):
                log_density = each.log_prob(y[:, None]).logsumexp(1) - math.log(self.draws)
                total += (weight * width * _minus_p_log_p(log_density)).sum(0)
        return self._in_shape(total)

    def _summed_entropy(self) -> Tensor:
        """-sum_k P(k) log P(k), without tails of negligible probability."""
        low, high = (self._quantile(level).flatten() for level in (_REST, 1 - _REST))
        values = int((high - low).max()) + 1
        if values > _MOST_VALUES:
            found = f"The entropy of counts that spread over {values:,} values is not available"
            raise NotImplementedError(f"{found} (at most {_MOST_VALUES:,}).")
        total = torch.zeros_like(low)
        steps = torch.arange(values, dtype=low.dtype, device=low.device)[:, None]
        for k in (low + steps).split(max(1, _CHUNK // (low.numel() * self.draws))):
            total += _minus_p_log_p(self._log_prob_at(k)).sum(0)
        return self._in_shape(total)

    def _log_prob_at(self, y: Tensor) -> Tensor:
        """log P(y|x) in double precision at points ``[points, elements]``."""
        shape = self.components.batch_shape[1:]
        points = y.reshape(len(y), 1, -1, *shape).expand(-1, self.draws, -1, *shape).flatten(1, 2)
        each: Tensor = self.components.log_prob(points).double().unflatten(1, (self.draws, -1))
        return (each.logsumexp(1) - math.log(self.draws)).flatten(1)

    def _in_shape(self, values: Tensor) -> Tensor:
        like = self.mean
        return values.to(like.dtype).reshape(like.shape)

    def quantiles(self, q: Sequence[float]) -> Tensor:
        """Where the mixture's distribution function reaches q, by bisection. For counts, the first such value."""
        return torch.stack([self._in_shape(self._quantile(level)) for level in _levels(q)])

    def _quantile(self, level: float) -> Tensor:
        """A quantile in double precision. It starts from the quantiles of the components, or from :meth:`_bracket`."""
        try:
            levels = torch.full_like(self.components.mean, level, dtype=torch.float64)
            each = self._by_draw(self.components.icdf(levels))
            low, high = each.amin(0), each.amax(0)
        except NotImplementedError:
            low, high = self._bracket(level)
        is_whole, rounding = self.is_whole, torch.finfo(self.mean.dtype).eps / 8
        for _ in range(_HALVINGS):
            close = 1 if is_whole else rounding * torch.maximum(low.abs(), high.abs())
            if bool(((high == low) | (high - low <= close)).all()):  # also where both are infinite
                break
            middle = ((low + high) / 2).floor() if is_whole else (low + high) / 2
            below = self.cdf(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high if is_whole else (low + high) / 2

    def _bracket(self, level: float) -> tuple[Tensor, Tensor]:
        """Two numbers between which the distribution function reaches ``level``, found by doubling their distance."""
        like = self.mean.double()
        ends = [torch.full_like(like, end) for end in self.ends]
        if level in (0, 1):
            return ends[int(level)], ends[int(level)]
        spread = self.stddev.double()
        # If the mean or the variance does not exist or is not finite, any number will do.
        centre = torch.where(like.isfinite(), like, 0.0)
        spread = torch.where((spread > 0) & spread.isfinite(), spread, 1.0)
        edges: list[Tensor] = []
        for sign, end in zip((-1, 1), ends, strict=True):
            if bool(end.isfinite().all()):
                edges.append(end - 1 if sign < 0 and self.is_whole else end)
                continue
            step = spread
            for _ in range(_DOUBLINGS):
                edge = (centre + sign * step).ceil() if self.is_whole else centre + sign * step
                inside = (self.cdf(edge) < level) == (sign > 0)
                if not bool(inside.any()):
                    break
                step = torch.where(inside, 2 * step, step)
            edges.append(edge)
        return edges[0], edges[1]

    def cdf(self, value: Tensor) -> Tensor:
        """P(y <= value|x): the mean over the draws, from the components' own ``cdf`` or as a sum over counts."""
        self._check("cdf", value=value)
        try:
            return self._by_draw(self.components.cdf(self._repeated(value))).mean(0)
        except NotImplementedError:
            if not self.is_whole:
                kind = type(self.components).__name__
                raise NotImplementedError(
                    f"Quantiles of a mixture of {kind} are not available: it has no cdf."
                ) from None
        first, _ = self.ends
        last = max(first, float(value.max()))
        total = torch.zeros_like(value)
        rows = max(1, _CHUNK // (value.numel() * self.draws))
        for k in torch.arange(first, last + 1, dtype=value.dtype, device=value.device).split(rows):
            points = k.reshape(-1, *(1,) * value.dim()).expand(-1, *value.shape)
            probs = self._log_prob_at(points.flatten(1)).exp().reshape(points.shape)
            total += torch.where(points <= value, probs, 0.0).sum(0)
        return total

    @property
    def is_whole(self) -> bool:
        """Whether the targets are whole numbers."""
        return self._support.is_discrete and not self.components.event_shape

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest possible target."""
        low, high = (
            getattr(self._support, name, end) for name, end in (("lower_bound", -math.inf), ("upper_bound", math.inf))
        )
        return float(torch.as_tensor(low).min()), float(torch.as_tensor(high).max())

    @property
    def _support(self) -> distributions.constraints.Constraint:
        try:
            return self.components.support or distributions.constraints.real
        except NotImplementedError:
            return distributions.constraints.real


class JointPredictive(Predictive):
    """The predictive distributions of the heads of a :class:`Joint`: ``predicted["price"]``, ``predicted[0]``.

    The heads share their draws, so their targets depend on each other. ``log_prob`` and ``sample`` therefore treat all
    targets of an example together. Everything else has one value for each head, in a dictionary or tuple like the
    network's output.
    """

    def __init__(self, likelihood: Joint, heads: Sequence[Predictive]) -> None:
        super().__init__(likelihood.join([head.components for head in heads]), heads[0].draws)
        self._likelihood, self._each = likelihood, list(heads)
        self.heads = likelihood.join(heads)

    def __getitem__(self, head: Any) -> Predictive:
        return self.heads[head]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def mean(self) -> Any:
        return self._of_each(lambda head: head.mean)

    @property
    def variance(self) -> Any:
        return self._of_each(lambda head: head.variance)

    @property
    def entropy(self) -> Any:
        return self._of_each(lambda head: head.entropy)

    @property
    def aleatoric(self) -> Any:
        return self._of_each(lambda head: head.aleatoric)

    @property
    def epistemic(self) -> Any:
        return self._of_each(lambda head: head.epistemic)

    def quantiles(self, q: Sequence[float]) -> Any:
        return self._of_each(lambda head: head.quantiles(q))

    def _of_each(self, function: Callable[[Predictive], Any]) -> Any:
        return self._likelihood.join([function(head) for head in self._each])

    def _log_probs(self, target: Any) -> Tensor:
        """For each example, the sum over all elements of all its targets."""
        parts = zip(self._each, self._likelihood.split(target, "target"), strict=True)
        each = [head._log_probs(part) for head, part in parts]
        return torch.stack([log_probs.reshape(*log_probs.shape[:2], -1).sum(2) for log_probs in each]).sum(0)

    def _sample(self, chosen: _Chosen) -> Any:
        return self._of_each(lambda head: head._sample(chosen))


@contextmanager
def predicting(net: nn.Module) -> Iterator[None]:
    """A context for evaluating ``net``. Afterwards, whatever the network stored on itself is that of the last draw."""
    with evaluating(net):
        try:
            yield
        finally:
            seen: set[int] = set()
            for module in net.modules():
                revive(module._buffers, seen)
                for name, value in list(vars(module).items()):
                    if name not in OF_ALL_MODULES and (revived := revive(value, seen)) is not value:
                        vars(module)[name] = revived


def has_hooks(net: nn.Module) -> bool:
    """Whether ``net`` has forward hooks, which see what its modules compute."""
    for module in net.modules():  # noqa: SIM110 (a generator would take longer than the check)
        if module._forward_hooks:
            return True
    return False


class Ensemble:
    """A fixed set of weight draws. ``ensemble(x)`` returns their outputs ``[draws, ...]``; ``predict`` averages them.

    Args:
        net: The network. The ensemble keeps a copy of it.
        likelihood: P(y|x,w).
        weights: Draws of parameters by name, ``[draws, ...]``.
        output: A function that picks the input of the likelihood from what the network returns. None takes all of it.
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        weights: Mapping[str, Tensor],
        output: Callable[[Any], Any] | None = None,
    ) -> None:
        check_type("Ensemble", nn.Module, "a torch.nn.Module", net=net)
        check_type(
            "Ensemble", Likelihood, "a Likelihood, such as Categorical() or Gaussian(0.1)", likelihood=likelihood
        )
        check_output("Ensemble", output)
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
            self.net = copy.deepcopy(net, memo_of(net))  # parameters without draws must not change either
        self.likelihood = copy.deepcopy(likelihood)
        self.weights, self.output = dict(weights), output
        self._slots = Slots(self.net, list(self.weights))
        self.draws = len(next(iter(self.weights.values())))

    def __repr__(self) -> str:
        return f"Ensemble(draws={self.draws}, likelihood={self.likelihood!r})"

    def __call__(self, *args: Any, memory: int = GIGABYTE, inputs: Any = None, **kwargs: Any) -> Any:
        """The outputs of all draws, stacked along a new first dimension."""
        memory = check_count("Ensemble", memory=memory)["memory"]
        args, kwargs = call_arguments("Ensemble", args, kwargs, inputs)
        check_batch("inputs", "Ensemble", tensors_of((args, kwargs)))
        written = has_objects((args, kwargs))

        def chunk(start: int, stop: int) -> list[Tensor]:
            return [weight[start:stop] for weight in self.weights.values()]

        with predicting(self.net), substituting(self._slots) as call:

            def run(*weights: Tensor) -> Any:
                found = call(weights, *(own_objects((args, kwargs)) if written else (args, kwargs)))
                return found if self.output is None else self.output(found)

            return over_draws(run, chunk, self.draws, memory, self._slots.needs, (args, kwargs))

    def predict(self, *args: Any, memory: int = GIGABYTE, inputs: Any = None, **kwargs: Any) -> Predictive:
        """The predictive distribution of the ensemble. For ``inputs`` see :meth:`Bayesian.predict`."""
        return predictive(self.likelihood, self(*args, memory=memory, inputs=inputs, **kwargs), self.draws)


def check_output(owner: str, output: object) -> None:
    """Refuse an ``output`` that is no function, or a module, which would have to be trained and saved."""
    if isinstance(output, nn.Module) or not isinstance(output, Callable | None):  # type: ignore[arg-type]
        constraint = "None or a function of what the network returns, such as lambda o: o.logits (no module)"
        raise invalid("output", owner, constraint, output)


def predictive(likelihood: Likelihood, outputs: Any, draws: int) -> Predictive:
    """The predictive distribution for outputs ``[draws, B, ...]``. Some may be ``[draws]``, such as a loss."""
    if all(output.dim() < 2 for output in tensors_in(outputs)):
        constraint = "a network whose output has a row for each example"
        raise invalid("net", "predict", constraint, Described("an output without dimensions"))
    with torch.no_grad():
        return predictive_of_rows(likelihood, map_tensors(_rows, outputs), draws)


def predictive_of_rows(likelihood: Likelihood, outputs: Any, draws: int) -> Predictive:
    """The predictive distribution for outputs ``[draws * B, ...]``, one draw after the other."""
    if isinstance(likelihood, Joint):
        parts = zip(likelihood.each, likelihood.split(outputs), strict=True)
        return JointPredictive(likelihood, [predictive_of_rows(head, output, draws) for head, output in parts])
    components = likelihood.distribution(outputs)
    if isinstance(components, (distributions.Categorical, distributions.Bernoulli)):
        return ClassPredictive(components, draws)
    return ValuePredictive(components, draws)


def _rows(output: Tensor) -> Tensor:
    """Merge the dimensions of draws and examples, one draw after the other."""
    return output.flatten(0, 1) if output.dim() > 1 else output


def _levels(q: Sequence[float]) -> list[float]:
    if not isinstance(q, Sequence) or not q:
        raise invalid("q", "quantiles", "a list of floats in [0, 1]", q)
    return [check_probability("quantiles", q=level)["q"] for level in q]


def _minus_p_log_p(log_p: Tensor) -> Tensor:
    return -log_p.exp() * log_p.clamp(min=-1e4)  # p is 0 there; this avoids 0 * inf


def _heavy_nodes(df: float) -> Tensor:
    """The nodes for integrals over Student's t, for a scale of 1."""
    core = torch.linspace(0, 8, 33, dtype=torch.float64)
    # Less than y^-df of the mass lies beyond y. The nodes end at 1e150 at the latest.
    furthest = min(150.0, -math.log10(_REST) / df)
    growing = max(0, math.ceil((furthest - math.log10(8)) / math.log10(_GROWTH)))
    half = torch.cat([core, 8 * _GROWTH ** torch.arange(1, growing + 1, dtype=torch.float64)])
    return torch.cat([-half.flip(0), half[1:]])
