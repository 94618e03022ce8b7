"""Parameters whose weights vary together: drawn by the equations of their family, and differentiated by autograd."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesbackprop._engine import ops
from bayesbackprop._engine.parameters import Parameter, Parameters
from bayesbackprop._errors import Described, invalid, tensor_shape
from bayesbackprop.families import Conditional, Family, GaussianFamily, Mixture
from bayesbackprop.noise import Key, Role
from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.priors import Normal

_LOG_2PI = math.log(2 * math.pi)
# The draws from which the moments are estimated that have no formula.
_DRAWS = 200
# Where pseudo-outputs start: precisions of the last layer and of those below it.
_LAST, _HIDDEN = 1.0, 0.01

# What the complexity of each draw is, [many]: log q(w|theta) - log P(w), or in closed form.
Costs = Callable[[bool], Tensor]


class Moments(NamedTuple):
    """The mean and standard deviation of each weight of a parameter."""

    mean: Tensor
    deviation: Tensor


class Together(ABC):
    """A posterior of several parameters together.

    Args:
        net: The network.
        parameters: These parameters of it.
        family: How they vary together.
        joint: The tensor that says how.
    """

    # Whether KL[q || P] is one number, and not that of each draw.
    has_kl = True

    def __init__(self, net: nn.Module, parameters: Parameters, family: Any, joint: Tensor) -> None:
        self.net, self.parameters, self.family, self.joint = net, parameters, family, joint

    @classmethod
    @abstractmethod
    def start(cls, net: nn.Module, parameters: Parameters, family: Any, generator: torch.Generator) -> Tensor:
        """The tensor ``joint`` to begin with."""

    @abstractmethod
    def draw(self, key: Key, many: int) -> tuple[list[Tensor], Costs]:
        """``many`` draws of each parameter, ``[many, ...]``, counted from ``key.draw``, and what they cost."""

    @abstractmethod
    def kl(self) -> Tensor:
        """KL[q(w|theta) || P(w)], where it has a closed form."""

    @abstractmethod
    def moments(self) -> list[Moments]:
        """The mean and standard deviation of each weight; 0 of those that are constant."""

    def _noise(self, key: Key, many: int) -> Tensor:
        """Standard normal numbers ``[many, n]``."""
        kind = self.joint.dtype, self.joint.device
        each = [ops.normals(many, tuple(p.q.mu.shape), key, p.stream, *kind) for p in self.parameters.each]
        return torch.cat([eps.flatten(1) for eps in each], 1)

    def _parts(self, values: Tensor) -> list[Tensor]:
        """Numbers ``[..., n]`` of all weights as those of each parameter."""
        mus = self.parameters.mus
        parts = values.split([mu.numel() for mu in mus], -1)
        return [part.reshape(*values.shape[:-1], *mu.shape) for part, mu in zip(parts, mus, strict=True)]

    def _minus_log_prior(self, ws: list[Tensor], random: Tensor) -> Tensor:
        """-log P(w) of each draw, over the weights that are random."""
        each = [
            p.prior.log_density(w if p.centre is None else w - p.centre).flatten(1)
            for p, w in zip(self.parameters.each, ws, strict=True)
        ]
        return -torch.where(random, torch.cat(each, 1), 0.0).sum(1)


class GaussianTogether(Together):
    """One Gaussian about mu."""

    family: GaussianFamily

    @classmethod
    def start(
        cls,
        net: nn.Module,  # noqa: ARG003
        parameters: Parameters,
        family: GaussianFamily,
        generator: torch.Generator,
    ) -> Tensor:
        sigma = torch.cat([p.q.sigma.detach().flatten() for p in parameters.each])
        return family.start(sigma, generator)

    def draw(self, key: Key, many: int) -> tuple[list[Tensor], Costs]:
        of, family = self._spread(), self.family
        eps = torch.where(of.random, self._noise(key, many), 0.0)
        size, kind = family.size(self.joint), (self.joint.dtype, self.joint.device)
        # The weights have one draw for all examples, so the stream of outputs is free.
        stream = self.parameters.each[0].stream + Role.ACTIVATION
        z = ops.normals(many, (size,), key, stream, *kind) if size else self.joint.new_empty(many, 0)
        deviations = self._parts(torch.where(of.random, family.deviation(of.sigma, of.joint, eps, z), 0.0))
        ws = [p.q.mean + deviation for p, deviation in zip(self.parameters.each, deviations, strict=True)]

        def costs(closed: bool) -> Tensor:
            if closed:
                return self.kl().expand(many)
            distance = family.distance(of.sigma, of.joint, eps, z)
            log_density = -0.5 * (distance + of.random.sum() * _LOG_2PI) - self._log_root(of)
            return (log_density + self._minus_log_prior(ws, of.random)).to(self.joint.dtype)

        return ws, costs

    def kl(self) -> Tensor:
        """-H[q] - E_q[log P(w)], of which the second part needs the variances alone."""
        of = self._spread()
        total = -0.5 * of.random.sum() * (_LOG_2PI + 1) - self._log_root(of)
        for p, moments in zip(self.parameters.each, self.moments(), strict=True):
            mu = p.q.mu if p.centre is None else p.q.mu - p.centre
            expected = p.prior.expected_log_density(mu, torch.where(p.q.random, moments.deviation, 1.0))
            total = total - torch.where(p.q.random, expected, 0.0).sum()
        return total.to(self.joint.dtype)

    def moments(self) -> list[Moments]:
        of = self._spread()
        each = self._parts(torch.where(of.random, self.family.variance(of.sigma, of.joint).sqrt(), 0.0))
        return [Moments(p.q.mean, deviation) for p, deviation in zip(self.parameters.each, each, strict=True)]

    def _spread(self) -> "_Spread":
        each = [p.q for p in self.parameters.each]
        random = torch.cat([q.random.flatten() for q in each])
        sigma = torch.where(random, torch.cat([q.sigma.flatten() for q in each]), 1.0)
        log_sigma = torch.where(random, torch.cat([q.log_sigma.flatten() for q in each]), 0.0)
        joint = torch.where(random[:, None], self.joint, 0.0)
        if not self.family.size(joint):  # its columns are of the weights too
            joint = torch.where(random, joint, 0.0)
        return _Spread(random, sigma, log_sigma, joint)

    def _log_root(self, of: "_Spread") -> Tensor:
        return self.family.log_root(of.sigma, of.log_sigma, of.joint)


class _Spread(NamedTuple):
    """How the weights vary. A constant one has sigma = 1 and no noise: it adds nothing to determinant and distance."""

    random: Tensor
    sigma: Tensor
    log_sigma: Tensor
    joint: Tensor


class MixtureTogether(Together):
    """Diagonal posteriors in turn: the means and the rhos of all, ``[2, components, n]``."""

    family: Mixture

    @classmethod
    def start(
        cls,
        net: nn.Module,  # noqa: ARG003
        parameters: Parameters,
        family: Mixture,
        generator: torch.Generator,
    ) -> Tensor:
        def pairs(p: Parameter, shuffle: bool) -> Tensor:
            """Its mu and rho, ``[2, n]``; in another order, but for constant weights."""
            order = torch.arange(p.q.numel)
            (moving,) = p.q.random.flatten().cpu().nonzero(as_tuple=True)
            if shuffle:
                order[moving] = moving[torch.randperm(len(moving), generator=generator)]
            return torch.stack([part.detach().flatten()[order.to(part.device)] for part in p.q])

        each = [torch.cat([pairs(p, number > 0) for p in parameters.each], 1) for number in range(family.components)]
        return torch.stack(each, 1)

    def draw(self, key: Key, many: int) -> tuple[list[Tensor], Costs]:
        q, components = WeightPosterior(*self.joint.unbind()), self.family.components
        eps = self._noise(key, many)
        # Of the steps of training with one draw each, too, every component has its turn.
        which = (key.step + key.draw + torch.arange(many, device=eps.device)) % components
        chosen = WeightPosterior(q.mu[which], q.rho[which])
        random = chosen.random
        w = torch.where(random, chosen.weight(eps), chosen.mu.detach())
        ws = self._parts(w)

        def costs(closed: bool) -> Tensor:
            if closed:
                return self.kl()
            own = which[:, None] == torch.arange(components, device=eps.device)
            away = (w[:, None] - q.mean) / torch.where(q.random, q.sigma, 1.0)
            # Of the component that drew it, w - mu would have lost what eps still has where sigma is small.
            whitened = torch.where(own[..., None], eps[:, None], away)
            log_densities = torch.where(q.random, q.log_density(whitened), 0.0).sum(2)
            log_density = log_densities.logsumexp(1) - math.log(components)
            return log_density + self._minus_log_prior(ws, random)

        return ws, costs

    def kl(self) -> Tensor:
        raise invalid("complexity", "FreeEnergy", f"'sampled' for {self.family}, which has no closed form", "closed")

    def moments(self) -> list[Moments]:
        q = WeightPosterior(*self.joint.unbind())
        mean = q.mu.mean(0)
        deviation = (q.variance + (q.mu - mean).square()).mean(0).sqrt()
        return [Moments(*each) for each in zip(self._parts(mean), self._parts(deviation), strict=True)]


class _Layer(NamedTuple):
    """A random linear layer: its weight, its bias, and the columns of ``joint`` that are its pseudo-outputs."""

    numbers: list[int]  # of weight and bias among the parameters
    each: list[Parameter]
    outputs: slice

    @property
    def scales(self) -> list[float]:
        """The standard deviations of the priors."""
        return [p.prior.sigma for p in self.each]  # type: ignore[attr-defined]


class ConditionalTogether(Together):
    """Each layer given those below, in the columns of ``joint``: pseudo-inputs, then of each layer v and l."""

    family: Conditional
    has_kl = False

    def __init__(self, net: nn.Module, parameters: Parameters, family: Conditional, joint: Tensor) -> None:
        super().__init__(net, parameters, family, joint)
        self._inputs, self._steps = _steps(net, parameters)

    @classmethod
    def start(cls, net: nn.Module, parameters: Parameters, family: Conditional, generator: torch.Generator) -> Tensor:
        inputs, steps = _steps(net, parameters)
        layers = [step for step in steps if isinstance(step, _Layer)]
        last = layers[-1].outputs
        joint = torch.randn(family.inputs, last.stop + 1, generator=generator, dtype=torch.float64)  # type: ignore[arg-type]
        if family.given is not None:
            if family.given.shape[1] != inputs:
                constraint = f"a Conditional of inputs that the network takes, {inputs} numbers each"
                raise invalid("family", "Bayesian", constraint, tensor_shape(family.given))
            joint[:, :inputs] = family.given
        for layer in layers:
            joint[:, layer.outputs.stop] = math.log(_LAST if layer.outputs == last else _HIDDEN)
        joint[:, last] = 0
        return joint.to(parameters.mus[0])

    def draw(self, key: Key, many: int) -> tuple[list[Tensor], Costs]:
        joint = self.joint.to(torch.promote_types(self.joint.dtype, torch.float32))  # roots have no narrower type
        ws = self._parts(self._noise(key, many).to(joint))  # which the weights take the place of, layer by layer
        h, each = joint[:, : self._inputs].expand(many, -1, -1), list[Costs]()
        for step in self._steps:
            if isinstance(step, _Layer):
                each.append(_draw_layer(step, joint, h, ws))
                weight, *bias = (ws[number] for number in step.numbers)
                h = h @ weight.mT + (bias[0][:, None] if bias else 0)
            else:
                h = step(h.to(self.joint.dtype)).to(h.dtype)

        def costs(closed: bool) -> Tensor:
            return torch.stack([cost(closed) for cost in each]).sum(0).to(self.joint.dtype)

        return [w.to(self.joint.dtype) for w in ws], costs

    def kl(self) -> Tensor:
        constraint = "one whose KL is the same at all draws (of this one it is draw(closed=True).complexity())"
        raise invalid("family", "Bayesian.complexity_closed", constraint, self.family)

    def moments(self) -> list[Moments]:
        with torch.no_grad():
            ws, _ = self.draw(Key(0), _DRAWS)
        return [Moments(w.mean(0), w.std(0)) for w in ws]


def _draw_layer(layer: _Layer, joint: Tensor, h: Tensor, ws: list[Tensor]) -> Costs:
    """Put the weights of a layer into ``ws``, where their noise is, given its pseudo-inputs ``h [many, M, inputs]``."""
    v, log_precision = joint[:, layer.outputs], joint[:, layer.outputs.stop, None]
    outputs = v.shape[1]
    noise = torch.cat([ws[number].reshape(len(h), outputs, -1) for number in layer.numbers], 2).mT
    features = [h, h.new_ones(*h.shape[:2], 1)]  # the second for the bias
    z = torch.cat([each * scale for each, scale in zip(features, layer.scales, strict=False)], 2)
    one, weighted = torch.eye(z.shape[2]).to(z), z * log_precision.exp()
    root = torch.linalg.cholesky(one + z.mT @ weighted)
    mean = torch.cholesky_solve(weighted.mT @ v, root)
    w = mean + torch.linalg.solve_triangular(root.mT, noise, upper=True)  # [many, D, outputs], in units of the prior
    parts = w[:, : h.shape[2]].mT, w[:, -1]
    for number, p, scale, part in zip(layer.numbers, layer.each, layer.scales, parts, strict=False):
        ws[number] = scale * part if p.centre is None else scale * part + p.centre

    def costs(closed: bool) -> Tensor:
        log_det = 2 * root.diagonal(dim1=1, dim2=2).log().sum(1)
        if closed:
            trace = torch.linalg.solve_triangular(root, one, upper=False).square().sum((1, 2))
            twice = outputs * (trace - len(one) + log_det) + mean.square().sum((1, 2))
        else:  # log q(w) - log P(w), whose constants cancel
            twice = outputs * log_det + (w.square() - noise.square()).sum((1, 2))
        half: Tensor = twice / 2
        return half

    return costs


def _steps(net: nn.Module, parameters: Parameters) -> tuple[int, list[_Layer | nn.Module]]:
    """How many numbers the network takes, and its layers, refused where they cannot be drawn one given the other."""
    from bayesbackprop._engine.mlp import layers_of  # which needs executors, which need this

    def refused(constraint: str, got: str) -> ValueError:
        return invalid("family", "Bayesian", f"another one than Conditional, which is for {constraint}", Described(got))

    modules = layers_of(net)
    if modules is None or any(isinstance(module, nn.Dropout) for module in modules):
        raise refused("fully connected networks: nn.Linear and elementwise functions", type(net).__name__)
    for name, p in parameters.by_name.items():
        if type(p.prior) is not Normal:
            raise refused("Normal priors", f"{p.prior} for '{name}'")
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    if len(set(linear)) < len(linear):
        raise refused("networks that use each layer once", "a layer that is used twice")
    numbers = {mu: number for number, mu in enumerate(parameters.mus)}
    inputs = linear[0].in_features
    steps, begin = list[_Layer | nn.Module](), inputs
    for module in modules:
        own = [each for each in module.parameters() if each in numbers]
        if not own:
            steps += [] if isinstance(module, nn.Flatten) else [module]
            continue
        if len(own) < len(list(module.parameters())):
            raise refused("layers that are Bayesian as a whole", "one whose weight or bias alone is")
        each = [numbers[mu] for mu in own]
        outputs = slice(begin, begin + len(own[0]))
        begin = outputs.stop + 1  # after the log-precisions
        steps.append(_Layer(each, [parameters.each[number] for number in each], outputs))
    return inputs, steps


_KINDS: dict[type[Family], type[Together]] = {Mixture: MixtureTogether, Conditional: ConditionalTogether}


def kind_of(family: Family) -> type[Together]:
    """What draws the weights of a family."""
    return _KINDS.get(type(family), GaussianTogether)
