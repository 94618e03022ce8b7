"""The kernels in C (``cpu.c``) as torch sees them: float32 and float64 on the CPU."""

import math
import os
import struct
import sys
import threading
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bayesbackprop._engine.parameters import PRIOR_KINDS, Parameters, prior_numbers
from bayesbackprop.noise import Key
from bayesbackprop.priors import GAUSSIANS, ScaleMixture

if TYPE_CHECKING:
    from bayesbackprop._engine.small import Space

try:
    from bayesbackprop._engine import _cpu  # type: ignore[attr-defined]
except ImportError:  # installed without a compiler
    _cpu = None

TYPES = (torch.float32, torch.float64)

# Classes of tensors that have memory of their own.
_PLAIN = {Tensor, torch.nn.Parameter}

# Of kernels that draw nothing.
_NO_KEY = Key(0)

_shape, _dtype, _is_cpu = attrgetter("shape"), attrgetter("dtype"), attrgetter("is_cpu")
_dtype_and_shape, _version = attrgetter("dtype", "shape"), attrgetter("_version")

if _cpu is not None:
    # The row of the table of parameters is defined in cpu.c alone.
    _NAMES, _LETTERS = zip(*(field.split(":") for field in _cpu.FIELDS.split()), strict=True)
    _ROW = struct.Struct("=" + "".join(_LETTERS))
    _WORDS = len(_NAMES)  # of 8 bytes each
    _N, _STREAM, _WIDE, _BEFORE = map(_NAMES.index, ("n", "stream", "wide", "before"))
    _MU, _RHO, _CENTRE, _W = map(_NAMES.index, ("mu", "rho", "centre", "w"))
    _GW, _GMU, _GRHO = map(_NAMES.index, ("gw", "gmu", "grho"))
    _BESIDES = tuple(map(_NAMES.index, ("gm", "gv", "slope")))
    # Where that begins which Adam needs to know of mu, and of rho; and its form, three addresses and six numbers.
    _OF_MU, _OF_RHO = (8 * _NAMES.index(name) for name in ("mu_step", "rho_step"))
    _OF_ONE = struct.Struct("=3q6d")
    _KINDS = [_cpu.PRIORS.split().index(kind) for kind in PRIOR_KINDS]


# --- whether they run ------------------------------------------------------------------------------------------------

_WANTED = os.environ.get("BAYESBACKPROP_KERNELS", "fused") != "plain"
_enabled: ContextVar[bool] = ContextVar("_enabled", default=_WANTED)

if _WANTED and _cpu is None:
    warnings.warn(
        "bayesbackprop was installed without its compiled kernels (no C compiler was found), so training steps take "
        "several times as long. To get them, install a C compiler and reinstall bayesbackprop. To silence this, set "
        "BAYESBACKPROP_KERNELS=plain.",
        stacklevel=2,
    )


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Within it, everything in this thread runs on the plain equations: to compare, or to differentiate twice.

    What ``torch.compile`` compiles keeps its operators.
    """
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def available() -> bool:
    """Whether the compiled kernels are there."""
    return _cpu is not None


def kernels_wanted() -> bool:
    """Whether no :func:`plain_kernels` is active. A compiler can read no context variable."""
    return _WANTED if torch.compiler.is_compiling() else _enabled.get()


def traced(key: Key | None = None) -> bool:
    """Whether an operator of torch must be called: a compiler, ``vmap`` or another transform is looking."""
    if key is not None and (isinstance(key.draw, Tensor) or isinstance(key.step, Tensor)):
        return True
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None  # no public name


def usable(parameters: Parameters, key: Key) -> "Table | None":
    """The table of ``parameters`` where the kernels may be called directly: nothing is traced or vectorised."""
    return table(parameters) if available() and kernels_wanted() and not traced(key) else None


def versions(parameters: Parameters) -> list[int]:
    """How often each tensor was changed in place, as autograd counts."""
    return list(map(_version, parameters.tensors))


def check_way_back(parameters: Parameters, then: list[int]) -> None:
    """Refuse to go back to parameters that were changed since, and to differentiate the way back itself."""
    if versions(parameters) != then:
        raise RuntimeError(
            "A parameter was modified by an inplace operation (an optimiser's step, say) after its weights were drawn: "
            "compute the cost again before backward."
        )
    refuse_second_derivatives()


def refuse_second_derivatives() -> None:
    """To be called in a backward pass: the kernels have no derivative of their own."""
    if torch.is_grad_enabled():  # which in a backward pass means create_graph=True
        raise RuntimeError(
            "The fused kernels cannot be differentiated twice. Compute the cost inside "
            "`with bayesbackprop.plain_kernels():` to use create_graph=True."
        )


# --- the table of parameters -----------------------------------------------------------------------------------------


class Table(NamedTuple):
    """The parameters as the kernels read them: a row for each, with the addresses of mu, rho and centre."""

    memory: list[object]  # how it was when the rows were made
    rows: bytes
    odd: dict[int, list[Tensor]]  # columns of which a contiguous copy is needed at each launch
    held: list[torch.UntypedStorage]  # so that nothing else comes to be at the same address


def table(parameters: Parameters) -> Table | None:
    """The table of ``parameters`` as they are now, or None where the kernels cannot read them.

    It is made once, and again where a parameter was moved or converted, which happens in place.
    """
    if not parameters.plain:
        return None
    known: tuple[list[object], Table | None] | None = parameters.cache.get("table")
    now = memory(parameters)
    if known is None or known[0] != now:
        known = parameters.cache["table"] = now, _make_table(parameters, now)
    return known[1]


def memory(parameters: Parameters) -> list[object]:
    """Where and how the numbers are stored. It tells that data were replaced, which autograd does not notice."""
    tensors = parameters.tensors
    where = [*map(Tensor.data_ptr, tensors), *map(_dtype_and_shape, tensors)]
    return [*where, *map(Tensor.is_contiguous, tensors), *map(Tensor.is_neg, tensors)]


def _make_table(parameters: Parameters, memory: list[object]) -> Table | None:
    columns = {_MU: parameters.mus, _RHO: parameters.rhos}
    if parameters.centres:
        columns[_CENTRE] = parameters.centres
    for tensors in columns.values():
        for mu, tensor in zip(parameters.mus, tensors, strict=True):
            same = tensor.dtype is mu.dtype and tensor.shape == mu.shape
            aligned = tensor.data_ptr() % tensor.itemsize == 0  # a view of bytes from a file may not be
            if not (same and aligned and tensor.dtype in TYPES and tensor.is_cpu):
                return None
    rows, held = bytearray(), [tensor.untyped_storage() for tensor in parameters.tensors]
    row: dict[str, float] = dict.fromkeys(_NAMES, 0)
    for p, deviates in zip(parameters.each, parameters.deviates, strict=True):
        kind, a, b, c = prior_numbers(p.prior, parameters.closed)
        row |= {"n": p.q.mu.numel(), "stream": p.stream, "wide": p.q.mu.dtype is torch.float64}
        row |= {"deviates": deviates, "kind": _KINDS[kind], "a": a, "b": b, "c": c, "bump": 0}
        if parameters.closed and isinstance(p.prior, ScaleMixture):
            bump = _bump(p.prior)
            row["bump"] = bump.data_ptr()
            held.append(bump.untyped_storage())
        rows += _ROW.pack(*row.values())
    odd = {column: tensors for column, tensors in columns.items() if not _readable(tensors)}
    _write(rows, {column: tensors for column, tensors in columns.items() if column not in odd}, [])
    return Table(memory, bytes(rows), odd, held)


@lru_cache(maxsize=64)
def _bump(prior: ScaleMixture) -> Tensor:
    """What ``Bump`` of cpu.c holds: the wider component, and the Gaussians by area and by square."""
    gaussians = prior.bump.gaussians if prior.bump.heights else [(0.0, 1.0)] * (GAUSSIANS + 1)
    areas, squares = zip(*gaussians, strict=True)
    return torch.tensor([*prior.wide, *areas, *squares], dtype=torch.float64)


def _needed(parameters: Parameters) -> Table:
    found = table(parameters)
    assert found is not None, "the caller asks first"
    return found


def readable(tensor: Tensor) -> Tensor:
    """The same numbers where the kernels can read them, row by row."""
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_neg().contiguous()
    return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor


def rows_of(table: Table, ws: Sequence[Tensor], gradients: Sequence[Tensor]) -> bytearray:
    """The rows of a table without odd ones for a draw to ``ws``, and for an update from the ``gradients`` by these."""
    rows = bytearray(table.rows)
    _write(rows, {_W: ws, _GW: gradients}, [])
    return rows


def _readable(tensors: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, tensors)) and not any(map(Tensor.is_neg, tensors))


def _write(rows: bytearray, columns: Mapping[int, Sequence[Tensor | None]], held: list[Tensor]) -> None:
    """Put the addresses of tensors into the rows; ``held`` keeps copies of those that the kernels cannot read."""
    with memoryview(rows) as view, view.cast("q") as words:
        for column, given in columns.items():
            tensors = [tensor for tensor in given if tensor is not None]
            if not _readable(tensors):
                tensors = [tensor.resolve_neg().contiguous() for tensor in tensors]
                held += tensors
            addresses = array("q", map(Tensor.data_ptr, tensors))
            if 0 in addresses:
                _refuse_without_memory(tensors)
            if len(tensors) < len(given):  # what is None is null
                found = iter(addresses)
                addresses = array("q", (0 if tensor is None else next(found) for tensor in given))
            words[column::_WORDS] = addresses


def _refuse_without_memory(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if not tensor.data_ptr() and tensor.numel():
            raise RuntimeError(
                f"The kernels cannot read a tensor without memory of its own (a {type(tensor).__name__}). Compute "
                "inside `with bayesbackprop.plain_kernels():` instead."
            )


def _launch(
    kernel: Callable[..., float],
    table: Table,
    columns: Mapping[int, Sequence[Tensor | None]],
    key: Key = _NO_KEY,
    own: float = 0.0,
    before: int = 0,
) -> float:
    rows, held = bytearray(table.rows), list[Tensor]()  # copies must live until the kernel has read them
    _write(rows, {**table.odd, **columns} if table.odd else columns, held)
    if before:
        with memoryview(rows) as view, view.cast("q") as words:
            words[_BEFORE::_WORDS] = array("q", [before]) * (len(words) // _WORDS)
    return kernel(rows, torch.get_num_threads(), key.seed, int(key.step), int(key.draw), own)


# --- the kernels -----------------------------------------------------------------------------------------------------


def draw(parameters: Parameters, key: Key, known: Table | None = None) -> tuple[list[Tensor], float]:
    """The weights of all ``parameters``, and log q(w|theta) - log P(w) over all, P of the known priors alone."""
    ws = buffers(parameters, "weights", parameters.mus)
    return ws, _launch(_cpu.draw, known or _needed(parameters), {_W: ws}, key)


def draws(parameters: Parameters, key: Key, many: int) -> list[Tensor]:
    """``many`` draws of each parameter, ``[many, ...]``, counted from ``key.draw``."""
    if many <= FEW:  # often called, by those who use them and forget them
        ws = buffers(parameters, "draws", [mu.expand(many, *mu.shape) for mu in parameters.mus])
    else:
        ws = [mu.new_empty((many, *mu.shape)) for mu in parameters.mus]
    _launch(_cpu.draws, _needed(parameters), {_W: ws}, key, float(many))
    return ws


def backward(
    parameters: Parameters,
    ws: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    complexity_gradient: float,
    to_mu: Sequence[Tensor],
    drawn: Table | None = None,
    besides: Sequence[Sequence[Tensor | None]] = (),
    to_rho: list[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """(3), (4): Delta_mu and Delta_rho of each parameter from df/dw at the weights ``ws``.

    Args:
        parameters: The parameters.
        ws: The weights that were drawn.
        gradients: df/dw; None is 0.
        complexity_gradient: The weight of the complexity in f.
        to_mu: Where Delta_mu goes; it may be ``gradients``, ``besides[0]`` or ``ws``.
        drawn: The table at the time of the draw, to refuse what was changed since.
        besides: df/dmu where mu is used beside w (None: it is not), df/dsigma^2 (None: 0), and -dlog P/dw where the
            kernels do not know P (None: 0).
        to_rho: Where Delta_rho goes; it may be ``besides[2]``, or ``ws`` where Delta_mu does not go there. None: to
            :func:`buffers`.
    """
    now = table_now(parameters, drawn)
    if to_rho is None:
        to_rho = buffers_for_rho(parameters)
    columns = {_W: ws, _GW: gradients, **dict(zip(_BESIDES, besides, strict=False)), _GMU: to_mu, _GRHO: to_rho}
    _launch(_cpu.backward, now, columns, own=complexity_gradient)
    return list(to_mu), to_rho


class Deltas:
    """Delta_mu and Delta_rho of several draws, one of which at a time has its weights: (3), (4).

    Between two draws, ``to_mu`` is to be given the gradient df/dw of the first. ``complexity`` adds up to that of all.

    Args:
        parameters: The parameters.
        table: Their table.
        complexity_gradient: The weight of a draw's complexity in f.
    """

    def __init__(self, parameters: Parameters, table: Table, complexity_gradient: float) -> None:
        self._parameters, self._table, self._own = parameters, table, complexity_gradient
        self.to_mu = buffers(parameters, "gradients of mu", parameters.mus)
        self.to_rho = buffers_for_rho(parameters)
        self.ws: list[Tensor] = []
        self.complexity = 0.0
        self._before = 0

    def draw(self, key: Key) -> list[Tensor]:
        """The weights of the next draw, in the place of those of the last."""
        if self.ws:
            self.complexity += self._launch(_cpu.redraw, key)
            self._before += 1
            return self.ws
        self.ws = buffers(self._parameters, "weights", self._parameters.mus)
        if self._parameters.closed:  # all draws have the same
            self.complexity = self._launch(_cpu.draw, key)
        else:
            self.complexity = _launch(_cpu.draws, self._table, {_W: self.ws}, key, 1.0)
        return self.ws

    def finish(self) -> None:
        """After the last draw."""
        self.complexity += self._launch(_cpu.backward)
        if self._parameters.closed:
            self.complexity *= self._before + 1
        self.ws = []

    def scale(self, factor: float) -> None:
        """Multiply all by a factor."""
        if factor != 1:
            for tensor in (*self.to_mu, *self.to_rho):
                tensor.mul_(factor)

    def _launch(self, kernel: Callable[..., float], key: Key = _NO_KEY) -> float:
        columns = {_W: self.ws, _GW: self.to_mu, _GMU: self.to_mu, _GRHO: self.to_rho}
        return _launch(kernel, self._table, columns, key, self._own, self._before)


def table_now(parameters: Parameters, drawn: Table | None) -> Table:
    """The table of ``parameters``, in a backward pass: what was changed since they were drawn is refused."""
    now = table(parameters)
    if now is None or (drawn is not None and now is not drawn and now.memory != drawn.memory):
        raise RuntimeError(
            "The memory, the type or the shape of a parameter was changed after its weights were drawn: compute the "
            "cost again before backward."
        )
    return now


def variances(parameters: Parameters) -> list[Tensor]:
    """sigma^2 of each parameter."""
    squares = [_empty(mu) for mu in parameters.mus]
    _launch(_cpu.variance, _needed(parameters), {_W: squares})
    return squares


def normal(out: Tensor, key: Key, stream: int, many: int = 1) -> Tensor:
    """Fill the contiguous ``out`` with the standard normal numbers of ``many`` draws: the twin of ``noise.normal``."""
    return _fill(_cpu.normal, out, key, stream, many)


def signs(out: Tensor, key: Key, stream: int) -> Tensor:
    """Fill the contiguous ``out`` with random signs: the twin of ``noise.signs``."""
    return _fill(_cpu.signs, out, key, stream)


def _fill(kernel: Callable[..., float], out: Tensor, key: Key, stream: int, many: int = 1) -> Tensor:
    words = [0] * _WORDS
    words[_N], words[_STREAM], words[_W] = out.numel() // many, stream, out.data_ptr()
    words[_WIDE] = out.dtype is torch.float64
    rows = bytearray(_ROW.pack(*words))
    kernel(rows, torch.get_num_threads(), key.seed, int(key.step), int(key.draw), float(many))
    return out


# --- Adam ------------------------------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """What Adam keeps of some tensors, in the order of the table, and the numbers of its next step."""

    addresses: Sequence[tuple[int, ...]]  # of the steps taken before, a float32, and of m and v
    numbers: Sequence[tuple[float, ...]]  # lr, 0 (for the kernels' use), beta1, beta2, eps and keep


class Backward(NamedTuple):
    """A :func:`backward` that has not been computed yet."""

    parameters: Parameters
    versions: list[int]  # of the parameters, which must stay as they are
    ws: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    complexity_gradient: float
    drawn: Table
    besides: Sequence[Sequence[Tensor | None]] = ()
    space: "Space | None" = None  # where all of it is, if that is used again
    squares: float | None = None  # the sum of those of the gradients, where it is known

    def compute(self) -> list[Tensor]:
        """The gradients of all mu and then of all rho, in memory of their own."""
        check_way_back(self.parameters, self.versions)
        places = buffers(self.parameters, "gradients of mu", self.parameters.mus)
        to_mu, to_rho = backward(
            self.parameters, self.ws, self.gradients, self.complexity_gradient, places, self.drawn, self.besides
        )
        return [*to_mu, *to_rho]

    @property
    def sources(self) -> list[Tensor]:
        """The derivatives by drawn weights, means and variances."""
        return [each for some in (self.gradients, *self.besides) for each in some if each is not None]

    def sum_of_squares(self) -> float:
        """Of the :attr:`sources`: while it is finite, each of them is, and there is room for another factor."""
        if self.squares is not None:
            return self.squares
        flat = [each.flatten() for each in self.sources]
        return sum([torch.dot(each, each).item() for each in flat])


# Whoever computes a :class:`Backward` of these parameters later gives a function that takes it; None: nobody does.
Taker = Callable[[Parameters, Table], Callable[[Backward], None] | None]

_postpones: ContextVar[Taker | None] = ContextVar("_postpones", default=None)


@contextmanager
def postponing(takes: Taker) -> Iterator[None]:
    """Within it a backward pass offers each :class:`Backward` to ``takes``, and computes it only if nobody takes it."""
    token = _postpones.set(takes)
    try:
        yield
    finally:
        _postpones.reset(token)


def postponed(
    parameters: Parameters,
    ws: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    complexity_gradient: float,
    drawn: Table,
    besides: Sequence[Sequence[Tensor | None]] = (),
) -> bool:
    """Whether someone will compute this :func:`backward` later, so that there are no gradients now."""
    takes = _postpones.get()
    take = None if takes is None else takes(parameters, drawn)
    if take is None:
        return False
    take(Backward(parameters, versions(parameters), ws, gradients, complexity_gradient, drawn, besides))
    return True


def updatable(tensors: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor]) -> bool:
    """Whether the kernels can update tensors, and what Adam keeps of them, in place."""
    changed, shapes, dtypes = [*tensors, *m, *v], list(map(_shape, tensors)), list(map(_dtype, tensors))
    return (
        {*map(type, tensors)} <= _PLAIN
        and {*dtypes} <= {*TYPES}
        and all(map(_is_cpu, changed))
        and list(map(_dtype, changed)) == 3 * dtypes
        and list(map(_shape, changed)) == 3 * shapes
        and all(map(Tensor.numel, tensors))
        and _readable(changed)
        and not any(tensor.data_ptr() % tensor.itemsize for tensor in changed)
    )


def gradients_readable(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have gradients that the kernels can read."""
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    return (
        all(map(_is_cpu, gradients))
        and list(map(_dtype, gradients)) == list(map(_dtype, tensors))
        and list(map(_shape, gradients)) == list(map(_shape, tensors))
    )


def adam(tensors: Sequence[Tensor], moments: Moments) -> None:
    """A step of Adam on tensors that are :func:`updatable`, from :func:`gradients_readable`."""
    rows, held = bytearray(_ROW.size * len(tensors)), list[Tensor]()
    with memoryview(rows) as view, view.cast("q") as words:
        words[_N::_WORDS] = array("q", map(Tensor.numel, tensors))
        words[_WIDE::_WORDS] = array("q", [tensor.dtype is torch.float64 for tensor in tensors])
        words[_MU::_WORDS] = array("q", map(Tensor.data_ptr, tensors))
    _write(rows, {_GMU: [tensor.grad for tensor in tensors]}, held)
    _write_moments(rows, _OF_MU, moments)
    _cpu.adam(rows, torch.get_num_threads(), 0, 0, 0, 0.0)
    _changed(tensors)


def backward_adam(given: Backward, moments: Moments) -> None:
    """:func:`backward` and a step of Adam on all mu and rho in one pass, which keeps no gradients."""
    check_way_back(given.parameters, given.versions)
    now, space, half = table_now(given.parameters, given.drawn), given.space, len(given.ws)
    held = list[Tensor]()
    if space is None:
        rows = bytearray(now.rows)
        _write(rows, {_W: given.ws, _GW: given.gradients, **dict(zip(_BESIDES, given.besides, strict=False))}, held)
    else:
        rows = space.rows
    if space is None or space.moments is not moments:
        for first, part in ((_OF_MU, slice(half)), (_OF_RHO, slice(half, None))):
            _write_moments(rows, first, Moments(moments.addresses[part], moments.numbers[part]))
    _cpu.backward_adam(rows, torch.get_num_threads(), 0, 0, 0, given.complexity_gradient)
    _changed(given.parameters.trained)
    if space is not None:
        space.moments = moments
        space.give_back()


# --- IVON ------------------------------------------------------------------------------------------------------------


def ivon(parameters: Parameters, means: Sequence[Tensor], numbers: Sequence[tuple[float, ...]], weight: float) -> bool:
    """A step of IVON on all mu and rho from their gradients; False, and nothing is done, where the kernels cannot.

    Args:
        parameters: The parameters.
        means: The running mean of the gradient of each mu, which is updated.
        numbers: For each of them alpha, 1 / (1 - beta1^t), beta1 and beta2.
        weight: 1 / lambda, the weight of the complexity.
    """
    if not available() or not kernels_wanted() or traced():
        return False
    now = table(parameters)
    if now is None or now.odd or not gradients_readable(parameters.trained) or not _alike(means, parameters.mus):
        return False
    rows, held, half = bytearray(now.rows), list[Tensor](), len(means)
    gradients = [tensor.grad for tensor in parameters.trained]
    _write(rows, {_GMU: gradients[:half], _GRHO: gradients[half:]}, held)
    addresses = [(0, mean.data_ptr(), 0) for mean in means]
    _write_moments(rows, _OF_MU, Moments(addresses, [(*each, 0.0, 0.0) for each in numbers]))
    _cpu.ivon(rows, torch.get_num_threads(), 0, 0, 0, weight)
    _changed(parameters.trained)
    return True


def _alike(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether the kernels can write to ``tensors``, which are of the types and shapes of ``others``."""
    same = list(map(_dtype_and_shape, tensors)) == list(map(_dtype_and_shape, others))
    return same and all(map(_is_cpu, tensors)) and _readable(tensors)


def _write_moments(rows: bytearray, first: int, moments: Moments) -> None:
    for place, (addresses, numbers) in enumerate(zip(*moments, strict=True)):
        _OF_ONE.pack_into(rows, place * _ROW.size + first, *addresses, *numbers)


def _changed(tensors: Iterable[Tensor]) -> None:
    """Let autograd know, which sees only what torch itself changes."""
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


# --- memory that is used again ---------------------------------------------------------------------------------------

# How many tensors share a storage. Torch has no public name for it; where it does not say, memory is always new.
_use_count = getattr(torch._C, "_storage_Use_Count", None)

# Threads take turns.
_taking = threading.Lock()

# Draws whose memory is kept for the next ones. As many are made at a time where networks run one after the other, since
# sigma is then computed once for them.
FEW = 4

# Weights of which the C library keeps the memory by itself.
_LARGE = 2**16

# Buffers to keep for each tensor: weights may become gradients, which a user clears only after the next draw.
_KEPT = 2


def buffers(parameters: Parameters, purpose: str, like: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors like these, with whatever is in them: those of the last call, if nobody holds them any more.

    What a training step frees is tens of megabytes, which the C library hands back to the operating system; paging it
    in again at the next step takes up to a third of a plain one.
    """
    if not is_large(parameters):
        return [_empty(tensor) for tensor in like]
    with _taking:
        pools: list[list[Tensor]] = parameters.cache.setdefault(purpose, [])
        if len(pools) != len(like):
            pools[:] = [[] for _ in like]
        return [_unheld(pool, wanted).detach() for pool, wanted in zip(pools, like, strict=True)]


def is_large(parameters: Parameters) -> bool:
    """Whether memory for its weights is worth looking after."""
    return parameters.numel >= _LARGE


def buffers_for_rho(parameters: Parameters) -> list[Tensor]:
    """Those for Delta_rho."""
    return buffers(parameters, "gradients of rho", parameters.rhos)


def _unheld(pool: list[Tensor], wanted: Tensor) -> Tensor:
    for buffer in pool:
        if buffer.dtype is wanted.dtype and buffer.shape == wanted.shape and holders(buffer) == 1:
            return buffer
    pool[:] = [*pool[1 - _KEPT :], _empty(wanted)]
    return pool[-1]


def own_or_new(parameters: Parameters, purpose: str, tensors: Sequence[Tensor], expected: int) -> list[Tensor]:
    """The same memory as these :func:`buffers`, to be overwritten; new where it has more holders than ``expected``."""
    kept = {buffer.data_ptr() for pool in parameters.cache.get(purpose, ()) for buffer in pool}
    return [
        tensor.detach() if holders(tensor) <= expected + (tensor.data_ptr() in kept) else _empty(tensor)
        for tensor in tensors
    ]


def holders(tensor: Tensor) -> float:
    """How many tensors share the memory of this one; infinitely many where others may who are not counted."""
    if _use_count is None:
        return math.inf
    storage = tensor.untyped_storage()
    # Someone may hold the storage object itself; other processes may; what inference mode made cannot be trained with.
    if sys.getrefcount(storage) > _UNHELD or storage.is_shared() or tensor.is_inference():
        return math.inf
    return float(_use_count(storage._cdata) - 1)  # one count is that of the storage object asked


def _references(tensor: Tensor) -> int:
    return sys.getrefcount(tensor.untyped_storage())


# References to the storage object of a tensor that nobody but the tensor and the asking function has.
_UNHELD = _references(torch.empty(1)) + 1


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, requires_grad=False, memory_format=torch.contiguous_format)
