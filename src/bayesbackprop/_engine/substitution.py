"""A network with other weights than its own: for one call or for many, and for this thread alone."""

import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bayesbackprop._engine import cpu
from bayesbackprop._engine.sharding import at_rest, divided
from bayesbackprop._trees import Outputs

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
        self.divided = divided(root)
        self.needs: dict[Hashable, Needs] = {}  # of calls that were made, by the kinds of their arguments
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


# --- a network with other weights ------------------------------------------------------------------------------------


def call_with(
    slots: Slots,
    weights: Sequence[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    part: Callable[..., Any] | None = None,
) -> Any:
    """``root(*args, **kwargs)`` with ``weights`` in ``slots``, for this thread alone: others see the means as ever.

    ``part`` is what runs instead of ``root``, if it is not the whole.

    ``torch.func.functional_call`` changes the network for all threads, and for a small one costs as much as the forward
    pass.
    """
    if torch.compiler.is_compiling():
        named = {slot.path: weights[slot.number] for slot in slots.each}
        return functional_call(slots.root, named, args, kwargs, tie_weights=False)
    with substituting(slots, part) as call:
        return call(weights, args, kwargs)


@contextmanager
def substituting(
    slots: Slots, part: Callable[..., Any] | None = None
) -> Iterator[Callable[[Sequence[Tensor], tuple[Any, ...], dict[str, Any]], Any]]:
    """Within it, :func:`call_with` for many calls: to make place for weights takes longer than to put them there."""
    net = slots.root
    if parametrize._cache_enabled:
        raise RuntimeError(
            "The network runs on drawn weights inside torch.nn.utils.parametrize.cached(), which would keep those of "
            "one draw for all others and for the mean. Leave that block first."
        )
    run = net if part is None else part
    places: list[tuple[_Place, list[Slot]]] = []

    def call(weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            for place, own in places:
                place.fill({slot.name: weights[slot.number] for slot in own})
            return run(*args, **kwargs)
        finally:
            for place, _ in places:
                place.fill(place.means)  # so that the memory of the others can be used again

    with lock(net), at_rest(slots.divided) if slots.divided else nullcontext():
        try:
            for module, own in slots.by_module.items():
                places.append((_Parameters.enter(module), own))
            yield call
        finally:
            for place, _ in places:
                _Parameters.leave(place.module)


class _Place(NamedTuple):
    """What one thread sees as the parameters of a module."""

    module: nn.Module
    means: dict[str, Any]
    seen: dict[str, Any]

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
            place = _Place(module, view._own, {**view._own, **view._second})
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


def kept_accumulators(tensors: Iterable[Tensor]) -> list[Any]:
    """What keeps alive, as long as it is held, the node that adds up the gradient of each parameter.

    Torch makes such a node when a parameter is used and forgets it with the graph. While it makes one it holds a mutex
    of the parameter and may wait for Python's own lock; a custom function of autograd, as ours are, waits for the mutex
    and holds that lock. Two threads that use one parameter would then wait for each other for ever.
    """
    with torch.inference_mode(False), torch.enable_grad():
        # The node of a view keeps the one before it, and no values. Subclasses of tensors may not know views.
        return [each.expand_as(each).grad_fn for each in tensors if each.requires_grad and type(each) is nn.Parameter]


def lock(net: nn.Module) -> threading.RLock:
    """The lock that guards ``net`` while its weights or its mode are not its own."""
    found = _locks.get(net)
    return _locks.setdefault(net, threading.RLock()) if found is None else found


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients, for this thread alone, and every module back to the mode it was in."""
    with lock(net):
        training = [module for module in net.modules() if module.training]
        if training:
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
# Bytes of a draw from which on one is made at a time: several need their sigma only once, and the memory of several.
_LARGE_DRAW = 2**24


class Needs(NamedTuple):
    """What a call of a network needs."""

    total: int  # the bytes of all results, no less than they hold at any one time
    operations: int
    batched: bool  # whether each operation has a rule for vmap


# Calls of which the needs are kept.
_CALLS = 64


def over_draws(
    run: Callable[..., Any],
    chunk: Callable[[int, int], list[Tensor]],
    draws: int,
    memory: int,
    known: dict[Hashable, Needs],
    arguments: Any,
) -> Any:
    """``run`` on each of ``draws`` entries, stacked; ``chunk(start, stop)`` gives some of them, as stacked tensors.

    The first runs alone and shows what one needs, unless it is ``known`` for such ``arguments``. Small networks, in
    which calling an operation takes longer than computing it, then run in parallel by ``vmap``, as many at a time as
    fit into ``memory`` bytes. Large ones would lose by it: convolutions with as many kernels as draws are slow, and all
    that is computed leaves the processor's cache. These run one after the other, and so does what has no ``vmap`` rule
    (recurrent layers).
    """
    outputs = Outputs()

    def tensors(*entry: Tensor) -> Sequence[Tensor]:
        return outputs.taken_apart(run(*entry))

    def alone(entries: list[Tensor]) -> list[Sequence[Tensor]]:
        each = (tensors(*entry) for entry in zip(*(stacked.unbind() for stacked in entries), strict=True))
        return [[tensor.unsqueeze(0) for tensor in found] for found in each]

    entries = chunk(0, 1)
    is_cpu, size = entries[0].is_cpu, sum(stacked.nbytes for stacked in entries)
    kind = tuple(map(_kind, tree_leaves(arguments)))
    needs = known.get(kind)
    if needs is None:
        with _Operations() as operations:
            results = alone(entries)
        if len(known) >= _CALLS:
            known.clear()
        needs = known[kind] = Needs(operations.total, operations.count, operations.batched)
    else:
        results = alone(entries)
    del entries
    at_a_time = max(1, memory // max(1, size + needs.total))
    large = is_cpu and needs.total > _SMALL * needs.operations
    parallel, done = at_a_time > 1 and needs.batched and not large, 1
    while parallel and done < draws:
        stop = min(draws, done + at_a_time)
        try:
            with warnings.catch_warnings():
                # Where vmap falls back to a loop of its own it warns; ours is simpler and as fast.
                warnings.filterwarnings("error", message="There is a performance drop")
                results.append(vmap(tensors, randomness="different")(*chunk(done, stop)))
            done = stop
        except (RuntimeError, UserWarning) as error:  # the first draw ran, so it is vmap that cannot
            if _out_of_memory(error):
                raise
            parallel = False
    # Beside those of the first draw, whose memory is used again if there is but one.
    together = max(1, min(at_a_time - 1, cpu.FEW)) if size < _LARGE_DRAW else 1
    for start in range(done, draws, together):
        results += alone(chunk(start, min(draws, start + together)))
    return outputs.put_together(map(torch.cat, zip(*results, strict=True)))


def _kind(argument: Any) -> Hashable:
    """What of an argument a network may need more or less memory for."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype
    return (argument if isinstance(argument, bool | int | float | str) else None), type(argument)


def _out_of_memory(error: Exception) -> bool:
    """Whether memory is what ended ``error``: on CPUs torch has no type of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


class _Operations(TorchDispatchMode):
    """Counts the :class:`Needs` of what runs while it is active.

    An operation without a rule for ``vmap`` would run, by a loop of its own, before it warns.
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
