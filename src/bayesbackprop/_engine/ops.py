"""Draw, its backward, normal numbers and signs: four operators of torch.

``torch.ops.bayesbackprop.{draw, draw_backward, normal, signs}`` are what ``torch.compile``, ``torch.export`` and
``vmap`` see: each has a fake, a ``vmap`` and, where it is differentiable, an autograd rule. Behind each name stand
three implementations: the kernels in C for CPUs (``cpu``), those in Triton for GPUs (``triton``), and the equations
(``reference``).

Eager code does not pass through the dispatcher of torch, whose way through Python takes 0.15 ms a draw, a quarter of a
small network's step: the functions below call the same implementations with the same backward.
"""

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import cache, lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from bayesbackprop import noise
from bayesbackprop._engine import cpu, own_priors, reference
from bayesbackprop._engine.parameters import KNOWN_PRIORS, PRIOR_KINDS, Parameter, Parameters, prior_numbers
from bayesbackprop.complexity import prior_cost
from bayesbackprop.noise import Key, Word
from bayesbackprop.posterior import WeightPosterior
from bayesbackprop.priors import LogDensity, Prior, ScaleMixture

# --- what the engine calls -------------------------------------------------------------------------------------------


def draw(parameters: Parameters, key: Key) -> tuple[list[Tensor], Tensor]:
    """w = mu + log(1 + exp(rho)) * eps of each parameter, and log q(w|theta) - log P(w) over all, differentiably."""
    if not has_kernel(parameters):
        return reference.draw(parameters, key)
    pieces = False
    if cpu.traced(key):
        ws, cost = torch.ops.bayesbackprop.draw(*_arguments(parameters), key.seed, *_words(key, parameters))
    else:
        pieces = own_priors.divisible(parameters)
        *ws, cost = _Draw.apply(parameters, key, pieces, *parameters.mus, *parameters.rhos)  # type: ignore[no-untyped-call]
    for number in () if pieces else parameters.own_priors:  # of which the kernels have only q
        p = parameters.each[number]
        cost = cost + prior_cost(p.q, p.prior, p.centre, ws[number]).to(cost.dtype)
    return ws, cost


def draws(parameters: Parameters, key: Key, many: int) -> list[Tensor]:
    """``many`` draws of each parameter, ``[many, ...]``, counted from ``key.draw``, without gradients."""
    with without_gradients():
        if has_kernel(parameters) and not cpu.traced(key) and parameters.mus[0].device.type == "cpu":
            return cpu.draws(parameters, key, many)
        return reference.draws(parameters, key, many)


def without_gradients() -> AbstractContextManager[Any]:
    """``torch.no_grad()``, except for torch.export, whose graphs have no gradients and do not survive a switch."""
    # torch 2.6 says only that a compiler looks.
    exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
    return nullcontext() if exporting() else torch.no_grad()


def variances(parameters: Parameters) -> list[Tensor]:
    """sigma^2 of each parameter, without gradients."""
    with torch.no_grad():
        fast = has_kernel(parameters) and not cpu.traced() and parameters.mus[0].device.type == "cpu"
        return cpu.variances(parameters) if fast else reference.variances(parameters)


def normal(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers, a pure function of ``key`` and ``stream``."""
    return _numbers("normal", shape, key, stream, dtype, device)


def normals(
    many: int, shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The standard normal numbers ``[many, *shape]`` of ``many`` draws, counted from ``key.draw``."""
    noise.check_size(shape)
    if cpu.kernels_wanted() and dtype in cpu.TYPES and device.type == "cpu" and cpu.available() and not cpu.traced(key):
        return cpu.normal(torch.empty((many, *shape), dtype=dtype, device=device), key, stream, many)
    keys = (key._replace(draw=key.draw + number) for number in range(many))
    return torch.stack([normal(shape, each, stream, dtype, device) for each in keys])


def signs(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs, a pure function of ``key`` and ``stream``."""
    return _numbers("signs", shape, key, stream, dtype, device)


def has_kernel(parameters: Parameters) -> bool:
    """Whether a kernel, not the plain equations, draws these parameters."""
    if not parameters.mus or not cpu.kernels_wanted() or _differentiated_by_function():
        return False
    if parameters.mus[0].device.type == "cpu":
        # What a compiler traces stands for tensors that were looked at when the parameters were found.
        return cpu.available() and (torch.compiler.is_compiling() or cpu.table(parameters) is not None)
    return _triton_takes(parameters)


class _Draw(torch.autograd.Function):
    """The weights and their complexity as a function of all mu and rho: the eager twin of the operator.

    With ``pieces`` it has the priors that only Python knows as well.
    """

    @staticmethod
    def forward(ctx: Any, parameters: Parameters, key: Key, pieces: bool, *_: Tensor) -> tuple[Tensor, ...]:
        ws, cost = _draw(parameters, key)
        own = pieces and bool(parameters.own_priors)
        if own:
            cost += own_priors.costs(parameters, ws)
        ctx.parameters, ctx.key, ctx.own = parameters, key, own
        ctx.table, ctx.overwritten = cpu.table(parameters), False
        ctx.save_for_backward(*ws, *parameters.tensors)  # all, so that a change in between is noticed
        ctx.set_materialize_grads(False)
        return (*ws, cost)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cpu.refuse_second_derivatives()
        parameters: Parameters = ctx.parameters
        *of_ws, of_cost = gradients
        ws: Sequence[Tensor] = ctx.saved_tensors[: len(of_ws)]
        if ctx.overwritten:  # by an earlier pass over a graph that was kept; the same noise gives the same weights
            ws, _ = _draw(parameters, ctx.key)
        dense = [_dense(gradient, w) for w, gradient in zip(ws, of_ws, strict=True)]
        share = 0.0 if of_cost is None else float(of_cost)
        besides: Sequence[Sequence[Tensor | None]] = ()
        to_rho: list[Tensor] | None = None
        if ctx.own and share:
            slopes, to_rho = own_priors.put_slopes(parameters, ws)
            besides = ([None] * len(ws), [None] * len(ws), slopes)
        if ctx.table is None:
            to_mu, to_rho = _backward_on_gpu(parameters, ws, dense, share)
        elif cpu.postponed(parameters, ws, dense, share, ctx.table, besides):
            return (None, None, None, *[None] * (2 * len(ws)))
        else:
            # Delta_mu takes the place of the weights that nobody else sees any more: a third large copy is saved.
            ctx.overwritten = True
            places = cpu.own_or_new(parameters, "weights", ws, holders_of_saved())
            to_mu, to_rho = cpu.backward(parameters, ws, dense, share, places, ctx.table, besides, to_rho)
        return (None, None, None, *to_mu, *to_rho)


@cache
def holders_of_saved(result: bool = True) -> int:
    """How many tensors share the memory of what a node saved, if nobody else holds it: torch decides.

    It may be a ``result`` of the node, or nothing that anyone else has seen.
    """

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            made = torch.empty_like(x)
            ctx.save_for_backward(made)
            return made if result else made + 0

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Tensor:
            (saved,) = ctx.saved_tensors
            return torch.full_like(saved, cpu.holders(saved))

    with torch.enable_grad():
        x = torch.zeros((), requires_grad=True)
        (count,) = torch.autograd.grad(Probe.apply(x) + 0, x)  # type: ignore[no-untyped-call]  # + 0: nobody holds it
    return int(count)


def _draw(parameters: Parameters, key: Key) -> tuple[list[Tensor], Tensor]:
    if parameters.mus[0].device.type == "cpu" and cpu.available():
        ws, cost = cpu.draw(parameters, key)
        return ws, parameters.mus[0].new_tensor(cost)
    return _on_gpu(parameters, key)


def _backward(
    parameters: Parameters, ws: Sequence[Tensor], gradients: Sequence[Tensor], complexity_gradient: float | Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    if parameters.mus[0].device.type == "cpu" and cpu.available():
        # New memory: what autograd hands over may be seen by others as well.
        to_mu = cpu.buffers(parameters, "gradients of mu", parameters.mus)
        return cpu.backward(parameters, ws, gradients, float(complexity_gradient), to_mu)
    return _backward_on_gpu(parameters, ws, gradients, complexity_gradient)


def _dense(gradient: Tensor | None, w: Tensor) -> Tensor:
    """A gradient of ``w`` as the kernels take it: there, and strided."""
    if gradient is None or gradient._is_zerotensor():  # which has no memory
        return torch.zeros_like(w)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _numbers(
    kind: str, shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    noise.check_size(shape)
    has_kernel = cpu.available() if device.type == "cpu" else device.type == "cuda" and _has_triton()
    if not has_kernel or not cpu.kernels_wanted() or dtype not in cpu.TYPES:
        plain: Tensor = getattr(noise, kind)(shape, key, stream, dtype, device)
        return plain
    if cpu.traced(key):
        words = (torch.as_tensor(word, device=device) for word in (key.step, key.draw))
        traced: Tensor = getattr(torch.ops.bayesbackprop, kind)(*words, key.seed, stream, shape, dtype, device)
        return traced
    return _fill(kind, shape, key, stream, dtype, device)


def _fill(kind: str, shape: Sequence[int], key: Key, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu" and cpu.available():
        filled: Tensor = getattr(cpu, kind)(torch.empty(tuple(shape), dtype=dtype, device=device), key, stream)
        return filled
    from bayesbackprop._engine import triton

    made: Tensor = getattr(triton, kind)(tuple(shape), key.seed, key.step, key.draw, stream, dtype, device)
    return made


def _differentiated_by_function() -> bool:
    """Whether ``torch.func.grad``, ``jvp`` or the like is active, for which an operator of torch can have no rule."""
    if torch.compiler.is_compiling():
        return False
    levels = torch._C._functorch.get_interpreter_stack()  # no public name
    return levels is not None and any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


# --- the operators ---------------------------------------------------------------------------------------------------

_PARAMETERS = "Tensor[] mus, Tensor[] rhos, Tensor[] centres, int[] streams, float[] priors"
_NOISE = "Tensor step, Tensor draw, int seed, int stream, SymInt[] shape, ScalarType dtype, Device device"


def _arguments(parameters: Parameters) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int], list[float]]:
    """The parameters in the types that a schema of torch has."""
    numbers = [float(number) for p in parameters.each for number in prior_numbers(p.prior, parameters.closed)]
    return parameters.mus, parameters.rhos, parameters.centres, [p.stream for p in parameters.each], numbers


def _parameters(
    mus: list[Tensor], rhos: list[Tensor], centres: list[Tensor], streams: list[int], priors: list[float]
) -> Parameters:
    """What :func:`_arguments` was given, but for its names, and for priors that the kernels do not know."""
    by_name: dict[str, Parameter] = {}
    given: Sequence[Tensor | None] = centres or [None] * len(mus)
    each = zip(mus, rhos, given, _priors(tuple(priors)), streams, strict=True)
    for number, (mu, rho, centre, prior, stream) in enumerate(each):
        by_name[str(number)] = Parameter(WeightPosterior(mu, rho), prior, centre, stream)
    made = Parameters(by_name, closed=PRIOR_KINDS[int(priors[0])].endswith("_KL"))
    made.cache = _caches.setdefault(mus[0], {}).setdefault((*streams, *priors), made.cache)
    return made


# The caches of the parameters that operators were called with, by the first mean: a call is handed tensors alone, and
# without one it would make a table, and page in new memory, at each step.
_caches: MutableMapping[Tensor, dict[tuple[float, ...], dict[str, Any]]] = WeakTensorKeyDictionary()


@lru_cache(maxsize=64)
def _priors(numbers: tuple[float, ...]) -> list[Prior]:
    """The priors by what :func:`prior_numbers` says of each."""
    return [_prior(int(kind), list(rest)) for kind, *rest in zip(*[iter(numbers)] * 4, strict=True)]


def _prior(kind: int, numbers: list[float]) -> Prior:
    for prior, (name, _) in KNOWN_PRIORS.items():
        if name == PRIOR_KINDS[kind].removesuffix("_KL"):
            used = len(fields(prior))  # type: ignore[arg-type]
            return prior(*numbers[:used])
    return LogDensity(torch.zeros_like, name="left to the caller")


def _draw_operator(*args: Any) -> tuple[list[Tensor], Tensor]:
    *of_parameters, seed, step, draw = args
    return _draw(_parameters(*of_parameters), Key(seed, *_read(step, draw)))


def _draw_fake(mus: list[Tensor], *_: Any) -> tuple[list[Tensor], Tensor]:
    return [_empty_like(mu) for mu in mus], mus[0].new_empty(())


def _backward_operator(*args: Any) -> tuple[list[Tensor], list[Tensor]]:
    *of_parameters, ws, gradients, of_cost = args
    return _backward(_parameters(*of_parameters), ws, gradients, of_cost)


def _backward_fake(mus: list[Tensor], *_: Any) -> tuple[list[Tensor], list[Tensor]]:
    return [_empty_like(mu) for mu in mus], [_empty_like(mu) for mu in mus]


def _numbers_operator(kind: str) -> Callable[..., Tensor]:
    def operator(step: Tensor, draw: Tensor, seed: int, stream: int, shape: Any, dtype: Any, device: Any) -> Tensor:
        return _fill(kind, shape, Key(seed, *_read(step, draw)), stream, dtype, device)

    return operator


def _numbers_fake(*args: Any) -> Tensor:
    *_, shape, dtype, device = args
    return torch.empty(shape, dtype=dtype, device=device)


def _one_by_one(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A ``vmap`` rule: the operator on each entry of what is batched."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        def entry(number: int, dims: Any, arg: Any) -> Any:
            if isinstance(arg, (list, tuple)) and isinstance(dims, (list, tuple)):
                return [entry(number, dim, item) for dim, item in zip(dims, arg, strict=True)]
            return arg if dims is None else arg.select(dims, number)

        results = [
            operator(*(entry(number, dims, arg) for dims, arg in zip(in_dims, args, strict=True)))
            for number in range(info.batch_size)
        ]
        stacked = _stack(results)
        return stacked, tree_map_only(Tensor, lambda _: 0, stacked)

    return rule


def _stack(results: list[Any]) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        return torch.stack(results)
    return type(first)(_stack(list(parts)) for parts in zip(*results, strict=True))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    mus, rhos, centres, ctx.streams, ctx.priors, *_ = inputs
    ctx.sizes = len(mus), len(rhos), len(centres), len(output[0])
    ctx.save_for_backward(*mus, *rhos, *centres, *output[0])


def _go_back(ctx: Any, of_ws: list[Tensor | None], of_cost: Tensor | None) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    mus, rhos, centres, ws = (list(islice(saved, size)) for size in ctx.sizes)
    dense = [_dense(gradient, w) for gradient, w in zip(of_ws, ws, strict=True)]
    of_cost = mus[0].new_zeros(()) if of_cost is None else of_cost
    arguments = (mus, rhos, centres, ctx.streams, ctx.priors)
    to_mu, to_rho = torch.ops.bayesbackprop.draw_backward(*arguments, ws, dense, of_cost)
    return to_mu, to_rho, [None] * len(centres), None, None, None, None, None


def _register(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    qualified = f"bayesbackprop::{name}"
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "default", implementation)
    torch.library.register_fake(qualified, fake)
    torch.library.register_vmap(qualified, _one_by_one(getattr(torch.ops.bayesbackprop, name)))


_WEIGHTS = "Tensor[] ws, Tensor[] gradients, Tensor complexity_gradient"
_register(
    "draw", f"({_PARAMETERS}, int seed, Tensor step, Tensor draw) -> (Tensor[], Tensor)", _draw_operator, _draw_fake
)
_register("draw_backward", f"({_PARAMETERS}, {_WEIGHTS}) -> (Tensor[], Tensor[])", _backward_operator, _backward_fake)
_register("normal", f"({_NOISE}) -> Tensor", _numbers_operator("normal"), _numbers_fake)
_register("signs", f"({_NOISE}) -> Tensor", _numbers_operator("signs"), _numbers_fake)
torch.library.register_autograd("bayesbackprop::draw", _go_back, setup_context=_keep)


def _words(key: Key, parameters: Parameters) -> tuple[Tensor, Tensor]:
    device = parameters.mus[0].device
    step, draw = (torch.as_tensor(word, device=device) for word in (key.step, key.draw))
    return step, draw


def _read(step: Tensor, draw: Tensor) -> tuple[Word, Word]:
    """On a CPU the numbers themselves; a GPU is not waited for."""
    return (int(step), int(draw)) if step.device.type == "cpu" else (step, draw)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


# --- GPUs ------------------------------------------------------------------------------------------------------------


def _has_triton() -> bool:
    try:
        from bayesbackprop._engine import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _triton_takes(parameters: Parameters) -> bool:
    known = parameters.plain and all(tensor.dtype in cpu.TYPES for tensor in parameters.tensors)
    if parameters.closed and any(isinstance(p.prior, ScaleMixture) for p in parameters.each):
        return False  # whose closed form is written in C and in Python alone
    return known and parameters.mus[0].is_cuda and _has_triton()


def _on_gpu(parameters: Parameters, key: Key) -> tuple[list[Tensor], Tensor]:
    from bayesbackprop._engine import triton

    each = [
        triton.draw(*p.q, p.centre, prior_numbers(p.prior, parameters.closed), p.stream, key.seed, key.step, key.draw)
        for p in parameters.each
    ]
    ws, costs = zip(*each, strict=True)
    return list(ws), torch.stack(costs).sum().to(ws[0].dtype)


def _backward_on_gpu(
    parameters: Parameters, ws: Sequence[Tensor], gradients: Sequence[Tensor], complexity_gradient: float | Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    from bayesbackprop._engine import triton

    each = [
        triton.backward(*p.q, p.centre, prior_numbers(p.prior, parameters.closed), w, gradient, complexity_gradient)
        for p, w, gradient in zip(parameters.each, ws, gradients, strict=True)
    ]
    to_mu, to_rho = zip(*each, strict=True)
    return list(to_mu), list(to_rho)
