"""Running a network on weights drawn from its posterior: the one interface for training and prediction.

An :class:`Executor` runs a call, or answers ``NotImplemented``; autograd, or a node of its own, goes back.
``Engine.executors`` is the list, the quickest first and :class:`AnyModule`, which runs everything, last. So a new fast
path is one class and one entry of that list.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesbackprop import complexity
from bayesbackprop._engine import ops
from bayesbackprop._engine.checkpointing import repeating
from bayesbackprop._engine.cpu import Taker
from bayesbackprop._engine.joint import Moments as JointMoments
from bayesbackprop._engine.joint import kind_of
from bayesbackprop._engine.parameters import Parameter, Parameters
from bayesbackprop._engine.rules import Estimator, Rules
from bayesbackprop._engine.statistics import counted_once, normalising, unmoved
from bayesbackprop._engine.substitution import Slots, call_with, kept_accumulators, over_draws, substituting
from bayesbackprop._errors import invalid, tensor_shape
from bayesbackprop._trees import has_objects, own_objects, tensors_in
from bayesbackprop.families import Family
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.noise import Key, Role, stream
from bayesbackprop.posterior import Moments, WeightPosterior
from bayesbackprop.priors import Prior


class Engine:
    """A network with its Bayesian parameters, and the executors that run it on drawn weights.

    Args:
        net: The network, whose parameters are the means.
        rho: A module with one rho for each Bayesian parameter, under the same name.
        centre: A module with what the priors are centred on, or None for 0.
        priors: The prior of each Bayesian parameter by name.
        rules: The estimator of each of them that is not ``"shared"``.
        joints: The names of parameters that vary together, how, and the tensor that says so.
        output: What picks, from what the network returns, what the likelihood takes; None for all of it.
    """

    def __init__(
        self,
        net: nn.Module,
        rho: nn.Module,
        centre: nn.Module | None,
        priors: Mapping[str, Prior],
        rules: Mapping[str, Estimator],
        joints: Sequence[tuple[Sequence[str], Family, Tensor]] = (),
        output: Callable[[Any], Any] | None = None,
    ) -> None:
        from bayesbackprop._engine.mlp import FullyConnected, FullyConnectedTogether  # which are executors

        names = list(priors)
        self.net, self.rules = net, dict(rules)
        self._means, self._rhos = Slots(net, names), Slots(rho, names)
        self._centres = None if centre is None else Slots(centre, names)
        centres: Sequence[Tensor | None] = [None] * len(names) if self._centres is None else self._centres.tensors
        by_name: dict[str, Parameter] = {}
        for number, name in enumerate(names):
            mu, its_rho = self._means.tensors[number], self._rhos.tensors[number]
            its_centre = centres[number]
            if mu.shape != its_rho.shape:
                constraint = f"the network that was wrapped: '{name}' had shape {list(its_rho.shape)}"
                raise invalid("net", "Bayesian", constraint, tensor_shape(mu))
            if its_centre is not None and mu.shape != its_centre.shape:
                raise invalid("centre", "Bayesian", f"of shape {list(mu.shape)} for '{name}'", tensor_shape(its_centre))
            weight_stream = stream(number, Role.WEIGHT)
            by_name[name] = Parameter(WeightPosterior(mu, its_rho), priors[name], its_centre, weight_stream)
        self.parameters = Parameters(by_name)
        self.joints = [
            kind_of(family)(net, self.parameters.subset(some), family, tensor) for some, family, tensor in joints
        ]
        together = {name for some, _, _ in joints for name in some}
        # Those that do not vary together.
        self.single = self.parameters.subset([n for n in names if n not in together]) if joints else self.parameters
        self.closed = self.single.in_closed_form()
        self.shared = Slots(net, [name for name in names if name not in rules])
        self.pick: Callable[[Any], Any] = output or _whole
        self.normalising = normalising(net)
        self.any_module = AnyModule(self)
        quick: Executor | None = None
        if not torch.compiler.is_compiling():
            trained = (*net.parameters(), *rho.parameters(), *(tensor for *_, tensor in joints))
            self._accumulators = kept_accumulators(trained)
        if not torch.compiler.is_compiling() and output is None:
            quick = FullyConnectedTogether.of(self) if joints else FullyConnected.of(net, self.parameters, self.rules)
        self.executors: list[Executor] = [*([quick] if quick else []), self.any_module]

    def valid(self, net: nn.Module) -> bool:
        """Whether all that was found is still there, in ``net``."""
        if net is not self.net:
            return False
        return all(slots is None or slots.valid() for slots in (self._means, self._rhos, self._centres))

    def kl(self) -> Tensor:
        """KL[q(w|theta) || P(w)] over all Bayesian weights, in nats, where the priors have a closed form."""
        each = [complexity.closed(p.q, p.prior, p.centre) for p in self.single.each]
        return torch.stack([*each, *(joint.kl() for joint in self.joints)]).sum()

    @property
    def has_kl(self) -> bool:
        """Whether KL[q || P] in closed form is one number, and not that of each draw."""
        return all(joint.has_kl for joint in self.joints)

    def moments(self) -> dict[str, JointMoments]:
        """The mean and standard deviation of each weight by parameter name."""
        found = {name: JointMoments(p.q.mu, p.q.sigma) for name, p in self.single.by_name.items()}
        for joint in self.joints:
            found |= zip(joint.parameters.by_name, joint.moments(), strict=True)
        return {name: found[name] for name in self.parameters.by_name}

    def draw(self, key: Key, parameters: Parameters, closed: bool) -> tuple[dict[str, Tensor], Tensor]:
        """All weights by name, and their complexity; of the single ones as ``parameters`` say."""
        found: dict[str, Tensor] = {}
        costs: list[Tensor] = []
        if parameters.each:
            ws, cost = ops.draw(parameters, key)
            found |= zip(parameters.by_name, ws, strict=True)
            costs.append(cost)
        for joint in self.joints:
            ws, its_costs = joint.draw(key, 1)
            found |= zip(joint.parameters.by_name, (w[0] for w in ws), strict=True)
            costs += its_costs(closed).unbind()
        return {name: found[name] for name in self.parameters.by_name}, costs[0] if len(costs) == 1 else sum(costs)  # type: ignore[return-value]

    def draws(self, key: Key, many: int, names: Sequence[str]) -> list[Tensor]:
        """``many`` draws of the parameters of these names, ``[many, ...]``, counted from ``key.draw``."""
        wanted = [name for name in names if name in self.single.by_name]
        single = self.single if len(wanted) == len(self.single.each) else self.single.subset(wanted)
        with ops.without_gradients():
            found = dict(zip(single.by_name, ops.draws(single, key, many) if single.each else [], strict=True))
            for joint in self.joints:
                found |= zip(joint.parameters.by_name, joint.draw(key, many)[0], strict=True)
        return [found[name] for name in names]

    def first(self, method: str, *args: Any) -> Any:
        """What the first executor that can do it answers."""
        for executor in self.executors:
            if (answer := getattr(executor, method)(*args)) is not NotImplemented:
                return answer
        raise AssertionError("AnyModule runs everything")


def _whole(output: Any) -> Any:
    return output


class Draw:
    """A set of weights and its complexity.

    ``draw(x)`` runs the network with these weights, ``draw.weights`` are they, and ``draw.complexity()`` is
    log q(w|theta) - log P(w) at them. Nothing is kept on the network, so draws never disturb each other. A draw is a
    pure function of its key and of the posterior as it is when it is used; ``weights`` once read stay the same.
    """

    def __init__(
        self,
        engine: Engine,
        key: Key,
        closed: bool = False,
        moments: Mapping[str, Moments | WeightPosterior] | None = None,
    ) -> None:
        self.key = key
        self.moments = moments or {}
        self.engine, self.closed = engine, closed
        self.parameters = (engine.closed if closed else None) or engine.single
        self._weights: dict[str, Tensor] | None = None
        self._complexity: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the network at this draw, or what the model picks of it (``Bayesian(..., output=...)``)."""
        return self.engine.first("forward", self, args, kwargs)

    def cost(self, likelihood: Likelihood, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> Tensor:
        """The likelihood cost at this draw, -log P(y|x,w) averaged over the examples."""
        cost: Tensor = self.engine.first("cost", self, likelihood, args, kwargs, targets)
        return cost

    @property
    def has_weights(self) -> bool:
        """Whether :attr:`weights` were asked for before."""
        return self._weights is not None

    @property
    def weights(self) -> dict[str, Tensor]:
        """The drawn weights, w = mu + log(1 + exp(rho)) * eps, by parameter name."""
        if self._weights is None:
            inside = self.complexity_inside
            self._weights, complexity = self.engine.draw(self.key, self.parameters, self.closed and inside)
            self.drawn_inside(complexity)
        return self._weights

    def complexity(self) -> Tensor:
        """log q(w|theta) - log P(w) at this draw, over all Bayesian weights, in nats; or the KL, if it is closed.

        Where the estimator uses no weights (``local``) it is that of a draw of its own: still unbiased.
        """
        if self._complexity is None and self.closed and self.engine.has_kl:
            self._complexity = self.engine.kl()
        if self._complexity is None:
            _ = self.weights
            assert self._complexity is not None
        return self._complexity

    def drawn_inside(self, complexity: Tensor) -> None:
        """Take the complexity that was found when the weights were drawn."""
        if self._complexity is None and self.complexity_inside:
            self._complexity = complexity

    def tensors(self) -> list[Tensor]:
        """What the network's output at this draw is differentiated by: all weights, and mu and rho where rules are."""
        of_rules = (self.engine.parameters.by_name[name].q for name in self.engine.rules)
        with torch._C.DisableTorchFunction():  # the rules, which would take the means for weights; no public name
            # Under the rules a hook for saved tensors would do so as well: it gets tensors that they do not know.
            return [*self.weights.values(), *(tensor.view_as(tensor) for q in of_rules for tensor in q)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Draw":
        """The same draw with these in the place of its :meth:`tensors`."""
        names, given = list(self.engine.parameters.by_name), iter(tensors)
        weights = dict(zip(names, given, strict=False))
        moments = {name: WeightPosterior(next(given), next(given)) for name in self.engine.rules}
        draw = Draw(self.engine, self.key, self.closed, moments)
        draw._weights = weights
        return draw

    @property
    def complexity_inside(self) -> bool:
        """Whether what is found when the weights are drawn is the complexity that this draw is to have."""
        return self.closed == self.parameters.closed


def costs(
    draws: Sequence[Draw],
    likelihood: Likelihood,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: Any,
    weight: float | Tensor,
    takes: Taker | None = None,
) -> tuple[Tensor, Tensor]:
    """The likelihood cost and the complexity, averaged over ``draws`` of one model.

    ``weight`` is what the complexity will most likely be weighted with; if there is someone who ``takes`` the way back,
    it certainly is.
    """
    first = draws[0]
    if len(draws) == 1:
        if takes is not None:
            found = first.engine.executors[0].at_once(first, likelihood, args, kwargs, targets, float(weight), takes)
            if found is not NotImplemented:
                return found  # type: ignore[no-any-return]
        return first.cost(likelihood, args, kwargs, targets), first.complexity()
    averages: tuple[Tensor, Tensor] = first.engine.first("costs", draws, likelihood, args, kwargs, targets, weight)
    return averages


# --- the interface ---------------------------------------------------------------------------------------------------


class Executor(ABC):
    """One way to run a network on drawn weights. A method answers ``NotImplemented`` to a call that it cannot run."""

    @abstractmethod
    def forward(self, draw: Draw, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the network at ``draw``, differentiable by all mu and rho and by whatever else is trained."""

    def cost(
        self, draw: Draw, likelihood: Likelihood, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any
    ) -> Any:
        """The likelihood cost of the network at ``draw``; to be overridden where it can be had faster."""
        output = self.forward(draw, args, kwargs)
        return output if output is NotImplemented else likelihood.cost(output, targets)

    def costs(
        self,
        draws: Sequence[Draw],
        likelihood: Likelihood,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: Any,
        weight: float | Tensor,  # noqa: ARG002
    ) -> Any:
        """The likelihood cost and the complexity, averaged over ``draws``; to be overridden where it can be had faster.

        ``weight`` is what the complexity will most likely be weighted with.
        """

        def of(draw: Draw) -> tuple[Tensor, Tensor]:
            return draw.cost(likelihood, args, kwargs, targets), draw.complexity()

        each = counted_once(draws[0].engine.normalising, [partial(of, draw) for draw in draws])
        return tuple(torch.stack(parts).mean() for parts in zip(*each, strict=True))

    def at_once(
        self,
        draw: Draw,  # noqa: ARG002
        likelihood: Likelihood,  # noqa: ARG002
        args: tuple[Any, ...],  # noqa: ARG002
        kwargs: dict[str, Any],  # noqa: ARG002
        targets: Any,  # noqa: ARG002
        weight: float,  # noqa: ARG002
        takes: Taker,  # noqa: ARG002
    ) -> Any:
        """The likelihood cost and the complexity at ``draw``, and the way back of likelihood + weight * complexity.

        Without autograd: the costs have no gradients, and ``takes`` has the way back.
        """
        return NotImplemented

    @abstractmethod
    def outputs(self, key: Key, draws: int, memory: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``draws`` networks make of the call, ``[draws, ...]``, in about ``memory`` bytes at a time.

        Each example has the distribution that drawn networks would give it.
        """


# How large sigma must be beside |mu| for a draw to differ from another in the first digits of a float.
_SEEN = 1e-4


class AnyModule(Executor):
    """Any network: called with drawn weights in place of its parameters, under the estimators' rules if there are."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def forward(self, draw: Draw, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._engine.pick(self._run(draw, args, kwargs))

    def _run(self, draw: Draw, args: tuple[Any, ...], kwargs: dict[str, Any], part: Any = None) -> Any:
        """The output at ``draw`` of the network, or of a part of it that is computed a second time."""
        shared = self._engine.shared
        weights = [draw.weights[name] for name in shared.names] if shared.names else []

        def again(tensors: Sequence[Tensor], part: Any, args: tuple[Any, ...]) -> Any:
            with unmoved(self._engine.normalising):  # the first run has counted the batch
                return self._run(draw.with_tensors(tensors), args, {}, part)

        with self._rules(draw), nullcontext() if torch.compiler.is_compiling() else repeating(draw.tensors, again):
            return call_with(shared, weights, args, kwargs, part)

    def outputs(self, key: Key, draws: int, memory: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        ruled = engine.parameters.subset(list(engine.rules))
        moments = {
            name: Moments(p.q.mu, p.q.mean, variance)
            for (name, p), variance in zip(ruled.by_name.items(), ops.variances(ruled), strict=True)
        }
        device = engine.parameters.mus[0].device

        def chunk(start: int, stop: int) -> list[Tensor]:
            weights = engine.draws(key._replace(draw=start), stop - start, engine.shared.names)
            return [torch.arange(start, stop, device=device), *weights]

        with substituting(engine.shared) as call:
            written = has_objects((args, kwargs))

            def run(index: Tensor, *weights: Tensor) -> Any:
                given = own_objects((args, kwargs)) if written else (args, kwargs)
                if not engine.rules:
                    return engine.pick(call(weights, *given))
                with self._rules(Draw(engine, key._replace(draw=index), moments=moments)):
                    return engine.pick(call(weights, *given))

            found = over_draws(run, chunk, draws, memory, engine.shared.needs, (args, kwargs))
        if draws > 1 and device.type != "meta" and all(torch.equal(each[0], each[1]) for each in tensors_in(found)):
            self._look_at_equal_draws(found)
        return found

    def _look_at_equal_draws(self, found: Any) -> None:
        """Warn if the outputs are no constant, and the weights differ by so much that they should."""
        if any((each[0] != each[0].flatten()[:1]).any() for each in tensors_in(found)) and any(
            (moments.deviation > _SEEN * moments.mean.abs()).any() for moments in self._engine.moments().values()
        ):
            warnings.warn(
                "Two draws of the weights gave the same outputs, bit for bit. Does the network use weights that it has "
                "kept from an earlier call, in an attribute say? Then it must forget them before each call.",
                stacklevel=2,
            )

    def _rules(self, draw: Draw) -> AbstractContextManager[Any]:
        engine = self._engine
        return Rules(engine.parameters, engine.rules, draw) if engine.rules else nullcontext()
