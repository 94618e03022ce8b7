"""The kernels in C (``cpu.c``) as torch sees them: float32 and float64 on the CPU."""

import struct
import sys
import threading
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayesbackprop._engine.parameters import PRIOR_KINDS, Parameters, prior_numbers
from bayesbackprop.noise import Key

try:
    from bayesbackprop._engine import _cpu  # type: ignore[attr-defined]
except ImportError:  # installed without a compiler
    _cpu = None

TYPES = (torch.float32, torch.float64)

# Of kernels that draw nothing.
_NO_KEY = Key(0)

if _cpu is not None:
    # The row of the table of parameters is defined in cpu.c alone.
    _NAMES, _LETTERS = zip(*(field.split(":") for field in _cpu.FIELDS.split()), strict=True)
    _ROW = struct.Struct("=" + "".join(_LETTERS))
    _WORDS = len(_NAMES)  # of 8 bytes each
    _N, _STREAM, _WIDE = map(_NAMES.index, ("n", "stream", "wide"))
    _MU, _RHO, _CENTRE, _W, _GW, _GMU, _GRHO = map(_NAMES.index, ("mu", "rho", "centre", "w", "gw", "gmu", "grho"))
    _KINDS = [_cpu.PRIORS.split().index(kind) for kind in PRIOR_KINDS]


def available() -> bool:
    """Whether the compiled kernels are there."""
    return _cpu is not None


def takes(parameters: Parameters) -> bool:
    """Whether the kernels can read all of these, as they are now: ``.to`` changes a parameter in place."""
    if not parameters.plain:
        return False
    for tensors in (parameters.mus, parameters.rhos, parameters.centres):
        for mu, tensor in zip(parameters.mus, tensors, strict=False):  # there may be no centres
            if tensor.dtype is not mu.dtype or tensor.dtype not in TYPES or not tensor.is_cpu:
                return False
    return True


def normal(out: Tensor, key: Key, stream: int, many: int = 1) -> Tensor:
    """Fill the contiguous ``out`` with the standard normal numbers of ``many`` draws: the twin of ``noise.normal``."""
    return _fill(_cpu.normal, out, key, stream, many)


def signs(out: Tensor, key: Key, stream: int) -> Tensor:
    """Fill the contiguous ``out`` with random signs: the twin of ``noise.signs``."""
    return _fill(_cpu.signs, out, key, stream)


def draw(parameters: Parameters, key: Key) -> tuple[list[Tensor], float]:
    """The weights of all ``parameters``, and log q(w|theta) - log P(w) over all, P of the known priors alone."""
    ws = buffers(parameters, "weights", parameters.mus)
    return ws, _launch(_cpu.draw, parameters, {_W: ws}, key)


def draws(parameters: Parameters, key: Key, many: int) -> list[Tensor]:
    """``many`` draws of each parameter, ``[many, ...]``, counted from ``key.draw``."""
    if many == 1:  # often called, by those who use a draw and forget it
        ws = [w.unsqueeze(0) for w in buffers(parameters, "weights", parameters.mus)]
    else:
        ws = [mu.new_empty((many, *mu.shape)) for mu in parameters.mus]
    _launch(_cpu.draws, parameters, {_W: ws}, key, float(many))
    return ws


def backward(
    parameters: Parameters,
    ws: Sequence[Tensor],
    gradients: Sequence[Tensor],
    complexity_gradient: float,
    to_mu: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """(3), (4): Delta_mu and Delta_rho of each parameter from df/dw, into ``to_mu``, which may be ``gradients``."""
    for tensors in (parameters.mus, parameters.rhos, parameters.centres):
        for w, tensor in zip(ws, tensors, strict=False):  # there may be no centres
            if w.dtype is not tensor.dtype or w.shape != tensor.shape:
                raise RuntimeError(
                    "The type or the shape of a parameter was changed after its weights were drawn: compute the cost "
                    "again before backward."
                )
    to_rho = buffers(parameters, "gradients of rho", parameters.rhos)
    columns = {_W: ws, _GW: gradients, _GMU: to_mu, _GRHO: to_rho}
    _launch(_cpu.backward, parameters, columns, own=complexity_gradient)
    return list(to_mu), to_rho


def addresses(parameters: Parameters) -> list[int]:
    """Where the numbers are: what tells that data were replaced, which autograd does not notice."""
    found = [tensor.data_ptr() for tensor in parameters.tensors]
    if found != parameters.cache.get("addresses"):
        # Held, so that nothing else comes to be at the same address.
        parameters.cache["addresses"] = found
        parameters.cache["held"] = [tensor.untyped_storage() for tensor in parameters.tensors]
    return found


def check_addresses(parameters: Parameters, before: list[int]) -> None:
    """Refuse to go back where data were replaced since the weights were drawn."""
    if addresses(parameters) != before:
        raise RuntimeError(
            "The memory of a parameter was changed after the cost was computed: compute the cost again before backward."
        )


def variances(parameters: Parameters) -> list[Tensor]:
    """sigma^2 of each parameter."""
    squares = [torch.empty_like(mu, memory_format=torch.contiguous_format) for mu in parameters.mus]
    _launch(_cpu.variance, parameters, {_W: squares})
    return squares


def _fill(kernel: Callable[..., float], out: Tensor, key: Key, stream: int, many: int = 1) -> Tensor:
    words = [0] * _WORDS
    words[_N], words[_STREAM], words[_W] = out.numel() // many, stream, out.data_ptr()
    words[_WIDE] = out.dtype is torch.float64
    table = bytearray(_ROW.pack(*words))
    kernel(table, torch.get_num_threads(), key.seed, int(key.step), int(key.draw), float(many))
    return out


def _launch(
    kernel: Callable[..., float],
    parameters: Parameters,
    columns: dict[int, Sequence[Tensor]],
    key: Key = _NO_KEY,
    own: float = 0.0,
) -> float:
    table = bytearray(_table(parameters))
    words = memoryview(table).cast("q")
    held: list[Tensor] = []  # contiguous copies, which must live until the kernel has read them
    read = ((_MU, parameters.mus), (_RHO, parameters.rhos), (_CENTRE, parameters.centres))
    for column, tensors in (*read, *columns.items()):
        if tensors:
            addresses = [
                t.data_ptr() if t.is_contiguous() and not t.is_neg() else _address_of_copy(t, held) for t in tensors
            ]
            if 0 in addresses:
                _refuse_without_memory(tensors, addresses)
            words[column::_WORDS] = array("q", addresses)
    words.release()
    return kernel(table, torch.get_num_threads(), key.seed, int(key.step), int(key.draw), own)


def _address_of_copy(tensor: Tensor, held: list[Tensor]) -> int:
    held.append(tensor.resolve_neg().contiguous())
    return held[-1].data_ptr()


def _refuse_without_memory(tensors: Sequence[Tensor], addresses: Sequence[int]) -> None:
    for tensor, address in zip(tensors, addresses, strict=True):
        if not address and tensor.numel():
            raise RuntimeError(
                f"The kernels cannot read a tensor without memory of its own (a {type(tensor).__name__}). Compute "
                "inside `with bayesbackprop.plain_kernels():` instead."
            )


def _table(parameters: Parameters) -> bytes:
    """The table of the kernels, with no addresses in it; made anew where a type has changed."""
    types = [mu.dtype for mu in parameters.mus]
    known: tuple[list[torch.dtype], bytes] = parameters.cache.get("table", ([], b""))
    if known[0] != types:
        row: dict[str, float] = dict.fromkeys(_NAMES, 0)
        rows: list[bytes] = []
        for p, dtype in zip(parameters.each, types, strict=True):
            kind, a, b, c = prior_numbers(p.prior)
            row |= {"n": p.q.mu.numel(), "stream": p.stream, "wide": dtype is torch.float64}
            row |= {"kind": _KINDS[kind], "a": a, "b": b, "c": c}
            rows.append(_ROW.pack(*row.values()))
        known = parameters.cache["table"] = types, b"".join(rows)
    return known[1]


# --- memory that is used again ---------------------------------------------------------------------------------------

# How many tensors share a storage. Torch has no public name for it; where it does not say, memory is always new.
_use_count = getattr(torch._C, "_storage_Use_Count", None)

# Threads take turns.
_taking = threading.Lock()

# Weights of which the C library keeps the memory by itself.
_LARGE = 2**16


def buffers(parameters: Parameters, purpose: str, like: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors like these, with whatever is in them: those of the last call, if nobody holds them any more.

    What a training step frees is tens of megabytes, which the C library hands back to the operating system; paging it
    in again at the next step takes up to a third of a plain one.
    """
    if parameters.numel < _LARGE:
        return [_empty(tensor) for tensor in like]
    with _taking:
        kept: list[Tensor] = parameters.cache.setdefault(purpose, [])
        if len(kept) != len(like):
            kept[:] = map(_empty, like)
        for number, (buffer, wanted) in enumerate(zip(kept, like, strict=True)):
            if buffer.dtype is not wanted.dtype or buffer.shape != wanted.shape or _is_held(buffer):
                kept[number] = _empty(wanted)
        return [buffer.detach() for buffer in kept]


def _references(tensor: Tensor) -> int:
    return sys.getrefcount(tensor.untyped_storage())


# References to the storage object of a tensor that nobody but the tensor and the asking function has.
_UNHELD = _references(torch.empty(1)) + 1


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, requires_grad=False, memory_format=torch.contiguous_format)


def _is_held(tensor: Tensor) -> bool:
    # One count is the tensor's own, one that of the storage object asked. Other processes are not counted.
    storage = tensor.untyped_storage()
    held = _use_count is None or storage.is_shared() or _use_count(storage._cdata) > 2
    held = held or sys.getrefcount(storage) > _UNHELD  # a user may hold the storage object itself
    return held or tensor.is_inference()  # which could not be trained with
