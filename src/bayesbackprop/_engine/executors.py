"""Running a network on weights drawn from its posterior: the one interface for training and prediction.

An :class:`Executor` runs a call, or answers ``NotImplemented``; autograd, or a node of its own, goes back.
``Engine.executors`` is the list, the quickest first and :class:`AnyModule`, which runs everything, last. So a new fast
path is one class and one entry of that list.
"""

import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bayesbackprop import complexity
from bayesbackprop._engine import checkpointing, cpu, ops
from bayesbackprop._engine.joint import Moments as JointMoments
from bayesbackprop._engine.joint import kind_of
from bayesbackprop._engine.parameters import Parameter, Parameters
from bayesbackprop._engine.rules import Estimator, Rules
from bayesbackprop._errors import invalid, tensor_shape
from bayesbackprop.families import Family
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.noise import Key, Role, stream
from bayesbackprop.posterior import Moments, WeightPosterior
from bayesbackprop.priors import Prior

_shape = attrgetter("shape")

# While a network runs with other weights, or in another mode, nobody else may run it.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


# --- the tensors of a network, found once ----------------------------------------------------------------------------


class Slot(NamedTuple):
    """A place in a module where a tensor stands: ``module.name``, under the full name ``path``."""

    path: str
    module: nn.Module
    name: str
    number: int  # of the tensor in its list


class Slots:
    """Where the parameters or buffers of these names stand in ``root``, in every module that shares them.

    Looking tensors up in a tree of modules takes longer than a small network's arithmetic. So they are looked up once,
    and what was found is revalidated before each use: a module exchanged in between is noticed.
    """

    def __init__(self, root: nn.Module, names: Sequence[str]) -> None:
        self.root = root
        self.names = list(names)
        self.tensors = [_find(root, name) for name in names]
        self._shapes = [tensor.shape for tensor in self.tensors]
        self.each: list[Slot] = []
        self._seen: list[tuple[dict[str, Any], str, object]] = []
        self._children = [(module._modules, len(module._modules)) for module in root.modules()]
        numbers = {tensor: number for number, tensor in enumerate(self.tensors)}
        for path, module in root.named_modules():
            self._seen += [(module._modules, name, child) for name, child in module._modules.items()]
            for values in (module._parameters, module._buffers):
                for name, value in values.items():
                    number = None if value is None else numbers.get(value)
                    if number is not None:
                        self.each.append(Slot(f"{path}.{name}" if path else name, module, name, number))
                        self._seen.append((values, name, value))
        # The same by module; a module is listed once however many names it has.
        self.by_module: dict[nn.Module, list[Slot]] = {}
        for slot in self.each:
            self.by_module.setdefault(slot.module, []).append(slot)

    def valid(self) -> bool:
        """Whether every module and tensor is still the one that was found, and of the same shape."""
        if list(map(_shape, self.tensors)) != self._shapes:
            return False
        for values, name, value in self._seen:
            if values.get(name) is not value:
                return False
        for children, count in self._children:  # noqa: SIM110 (a generator takes longer than what it does)
            if len(children) != count:
                return False
        return True


class Engine:
    """A network with its Bayesian parameters, and the executors that run it on drawn weights.

    Args:
        net: The network, whose parameters are the means.
        rho: A module with one rho for each Bayesian parameter, under the same name.
        centre: A module with what the priors are centred on, or None for 0.
        priors: The prior of each Bayesian parameter by name.
        rules: The estimator of each of them that is not ``"shared"``.
        joints: The names of parameters that vary together, how, and the tensor that says so.
    """

    def __init__(
        self,
        net: nn.Module,
        rho: nn.Module,
        centre: nn.Module | None,
        priors: Mapping[str, Prior],
        rules: Mapping[str, Estimator],
        joints: Sequence[tuple[Sequence[str], Family, Tensor]] = (),
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
        self.any_module = AnyModule(self)
        quick: Executor | None = None
        if not torch.compiler.is_compiling():
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
        found = dict(zip(single.by_name, ops.draws(single, key, many) if single.each else [], strict=True))
        with torch.no_grad():
            for joint in self.joints:
                found |= zip(joint.parameters.by_name, joint.draw(key, many)[0], strict=True)
        return [found[name] for name in names]

    def first(self, method: str, *args: Any) -> Any:
        """What the first executor that can do it answers."""
        for executor in self.executors:
            if (answer := getattr(executor, method)(*args)) is not NotImplemented:
                return answer
        raise AssertionError("AnyModule runs everything")


class Draw:
    """A set of weights and its complexity.

    ``draw(x)`` runs the network with these weights, ``draw.weights`` are they, and ``draw.complexity()`` is
    log q(w|theta) - log P(w) at them. Nothing is kept on the network, so draws never disturb each other. A draw is a
    pure function of its key and of the posterior as it is when it is used; ``weights`` once read stay the same.
    """

    def __init__(
        self, engine: Engine, key: Key, closed: bool = False, moments: Mapping[str, Moments] | None = None
    ) -> None:
        self.key = key
        self.moments = moments or {}
        self.engine, self.closed = engine, closed
        self.parameters = (engine.closed if closed else None) or engine.single
        self._weights: dict[str, Tensor] | None = None
        self._complexity: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the network at this draw."""
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
) -> tuple[Tensor, Tensor]:
    """The likelihood cost and the complexity, averaged over ``draws`` of one model.

    ``weight`` is what the complexity will most likely be weighted with.
    """
    first = draws[0]
    if len(draws) == 1:
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
        each = [(draw.cost(likelihood, args, kwargs, targets), draw.complexity()) for draw in draws]
        return tuple(torch.stack(parts).mean() for parts in zip(*each, strict=True))

    @abstractmethod
    def outputs(self, key: Key, draws: int, memory: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``draws`` networks make of the call, ``[draws, ...]``, in about ``memory`` bytes at a time.

        Each example has the distribution that drawn networks would give it.
        """


class AnyModule(Executor):
    """Any network: called with drawn weights in place of its parameters, under the estimators' rules if there are."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def forward(self, draw: Draw, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shared = self._engine.shared
        weights = [draw.weights[name] for name in shared.names] if shared.names else []
        with self._rules(draw):
            return call_with(shared, weights, args, kwargs)

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

            def run(index: Tensor, *weights: Tensor) -> Any:
                if not engine.rules:
                    return call(weights, args, kwargs)
                with self._rules(Draw(engine, key._replace(draw=index), moments=moments)):
                    return call(weights, args, kwargs)

            return over_draws(run, chunk, draws, memory)

    def _rules(self, draw: Draw) -> AbstractContextManager[Any]:
        engine = self._engine
        return Rules(engine.parameters, engine.rules, draw) if engine.rules else nullcontext()


# --- a network with other weights ------------------------------------------------------------------------------------


def call_with(slots: Slots, weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``root(*args, **kwargs)`` with ``weights`` in ``slots``, for this thread alone: others see the means as ever.

    ``torch.func.functional_call`` changes the network for all threads, and for a small one costs as much as the forward
    pass.
    """
    if torch.compiler.is_compiling():
        named = {slot.path: weights[slot.number] for slot in slots.each}
        return functional_call(slots.root, named, args, kwargs, tie_weights=False)
    with substituting(slots) as call:
        return call(weights, args, kwargs)


@contextmanager
def substituting(slots: Slots) -> Iterator[Callable[[Sequence[Tensor], tuple[Any, ...], dict[str, Any]], Any]]:
    """Within it, :func:`call_with` for many calls: to make place for weights takes longer than to put them there."""
    net = slots.root
    places: list[tuple[_Place, list[Slot]]] = []

    def call(weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            for place, own in places:
                place.fill({slot.name: weights[slot.number] for slot in own})
            return checkpointing.call(net, args, kwargs)
        finally:
            for place, _ in places:
                place.fill(place.means)  # so that the memory of the others can be used again

    with lock(net):
        try:
            for module, own in slots.by_module.items():
                places.append((_Parameters.enter(module), own))
            yield call
        finally:
            for place, _ in places:
                _Parameters.leave(place.module)


class _Place(NamedTuple):
    """What one thread sees as the parameters of a module, and whether gradients were wanted when it began."""

    module: nn.Module
    means: dict[str, Any]
    seen: dict[str, Any]
    trains: bool

    def fill(self, weights: Mapping[str, Any]) -> None:
        """From now on it is these."""
        seen = self.seen
        seen.update(weights)
        if isinstance(self.module, nn.RNNBase):
            flat = [seen.get(name) for name in self.module._flat_weights_names]
            references = [None if weight is None else weakref.ref(weight) for weight in flat]
            seen.update(_flat_weights=flat, _flat_weight_refs=references)


class _Parameters(dict[str, Any]):
    """The parameters of a module that runs on drawn weights: these for the thread that runs it, its own for others.

    Modules look their parameters up in a dictionary. For the time of a call this one takes its place.
    """

    _changing = threading.Lock()

    def __init__(self, module: nn.Module) -> None:
        self._own: dict[str, Any] = vars(module)["_parameters"]
        super().__init__(self._own)
        # Recurrent layers keep a second list of their weights, and weak references that tell whether it is up to date.
        second = ("_flat_weights", "_flat_weight_refs") if isinstance(module, nn.RNNBase) else ()
        self._second = {name: vars(module)[name] for name in second}
        self._drawn: dict[int, list[_Place]] = {}  # of each thread, the innermost call last

    @classmethod
    def enter(cls, module: nn.Module) -> _Place:
        """A place for what this thread sees in ``module`` from now on: at first the means."""
        with cls._changing:
            view = vars(module)["_parameters"]
            if not isinstance(view, cls):
                view = vars(module)["_parameters"] = cls(module)
                for name in view._second:
                    del vars(module)[name]  # so that it is looked up here
            place = _Place(module, view._own, {**view._own, **view._second}, torch.is_grad_enabled())
            view._drawn.setdefault(threading.get_ident(), []).append(place)
            return place

    @classmethod
    def leave(cls, module: nn.Module) -> None:
        """What this thread saw before; the last one to leave puts the module's own dictionary back."""
        with cls._changing:
            view: _Parameters = vars(module)["_parameters"]
            calls = view._drawn[threading.get_ident()]
            calls.pop()
            if not calls:
                del view._drawn[threading.get_ident()]
            if not view._drawn:
                vars(module).update(view._second)
                vars(module)["_parameters"] = view._own

    def __getitem__(self, name: str) -> Any:
        calls = self._drawn.get(threading.get_ident())
        if calls:
            if calls[-1].trains:
                checkpointing.refuse_checkpointing()
            return calls[-1].seen[name]
        return self._own[name] if name in self._own else self._second[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._second

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._own else default

    def keys(self) -> Any:
        return self._own.keys()

    def values(self) -> Any:
        return {name: self[name] for name in self._own}.values()

    def items(self) -> Any:
        return {name: self[name] for name in self._own}.items()

    def __setitem__(self, name: str, value: Any) -> None:
        self._own[name] = value
        for calls in self._drawn.values():
            calls[-1].seen[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)  # a copy, or a pickle, has an ordinary dictionary


def lock(net: nn.Module) -> threading.RLock:
    """The lock that guards ``net`` while its weights or its mode are not its own."""
    found = _locks.get(net)
    return _locks.setdefault(net, threading.RLock()) if found is None else found


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients, for this thread alone, and every module back to the mode it was in."""
    with lock(net):
        training = [module for module in net.modules() if module.training]
        net.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True


# --- many draws of a network -----------------------------------------------------------------------------------------

# Bytes of a result, on average over the operations of a network, below which a CPU takes longer to call them than to
# compute them.
_SMALL = 3 * 2**14


def over_draws(run: Callable[..., Any], chunk: Callable[[int, int], list[Tensor]], draws: int, memory: int) -> Any:
    """``run`` on each of ``draws`` entries, stacked; ``chunk(start, stop)`` gives some of them, as stacked tensors.

    The first runs alone and shows what one needs. Small networks, in which calling an operation takes longer than
    computing it, then run in parallel by ``vmap``, as many at a time as fit into ``memory`` bytes. Large ones would
    lose by it: convolutions with as many kernels as draws are slow, and all that is computed leaves the processor's
    cache. These run one after the other, and so does what has no ``vmap`` rule (recurrent layers).
    """

    def alone(entries: list[Tensor]) -> list[Any]:
        return [_unsqueeze(run(*entry)) for entry in zip(*(stacked.unbind() for stacked in entries), strict=True)]

    entries = chunk(0, 1)
    is_cpu, size = entries[0].is_cpu, sum(stacked.nbytes for stacked in entries)
    with _Operations() as first:
        results = alone(entries)
    del entries
    at_a_time = max(1, memory // max(1, size + first.total))
    large = is_cpu and first.total > _SMALL * first.count
    parallel, done = at_a_time > 1 and first.batched and not large, 1
    while parallel and done < draws:
        stop = min(draws, done + at_a_time)
        try:
            with warnings.catch_warnings():
                # Where vmap falls back to a loop of its own it warns; ours is simpler and as fast.
                warnings.filterwarnings("error", message="There is a performance drop")
                results.append(vmap(run, randomness="different")(*chunk(done, stop)))
            done = stop
        except (RuntimeError, UserWarning) as error:  # the first draw ran, so it is vmap that cannot
            if _out_of_memory(error):
                raise
            parallel = False
    together = max(1, min(at_a_time - 1, cpu.FEW))  # beside those of the first draw
    for start in range(done, draws, together):
        results += alone(chunk(start, min(draws, start + together)))
    return tree_map(lambda *parts: torch.cat(parts), *results)


def _unsqueeze(output: Any) -> Any:
    """What a network has computed, with a first dimension for the draws."""
    if isinstance(output, Tensor):  # the usual case, and quick
        return output.unsqueeze(0)
    return tree_map(lambda tensor: tensor.unsqueeze(0), output)


def _out_of_memory(error: Exception) -> bool:
    """Whether memory is what ended ``error``: on CPUs torch has no type of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


class _Operations(TorchDispatchMode):
    """Counts the operations while active.

    ``total`` are the bytes of all results: no less than they can hold at any one time. ``batched`` tells whether each
    operation on tensors has a rule for ``vmap``. Without one it would run, by a loop of its own, before it warns.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.count = 0
        self.batched = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        self.total += sum(tensor.nbytes for tensor in _tensors(result))
        # Without a tensor, or with a constant, there is nothing to batch.
        if not _has_rule(func) and _tensors(args) and func is not torch.ops.aten.lift_fresh.default:
            self.batched = False
        return result


@cache
def _has_rule(func: Any) -> bool:
    """Whether ``vmap`` has a rule for an operator."""
    found: bool = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.FuncTorchBatched)
    return found


def _tensors(values: Any) -> list[Tensor]:
    return (
        [values] if isinstance(values, Tensor) else [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    )


def _find(root: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    tensor = module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]
    assert tensor is not None
    return tensor
