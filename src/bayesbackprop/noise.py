"""Noise as a pure function: eps = g(seed, step, draw, stream, index).

The generator is Philox4x32-10, a keyed bijection of 128-bit counters (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", 2011). As a bijection it gives no two (step, draw, stream, block) the same counter, and as a pure function
it has nothing to store, pass on or advance: the backward pass, another process and a resumed run all ask for the same
numbers again and get them.

=========  ====================================================================
key        the 64 bits of ``seed``
counter 0  block: which four numbers of the tensor
counter 1  stream: which parameter, and what the noise is for (see :class:`Role`)
counter 2  step: 0 for prediction, 1, 2, ... for training
counter 3  draw: which Monte Carlo sample; rank r of a distributed run takes r*K .. r*K+K-1
=========  ====================================================================
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from bayesbackprop._errors import invalid

# The constants of Philox4x32: two multipliers and two Weyl increments (golden ratio, sqrt(3)-1) for the key.
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF

# Numbers are laid out in groups of LANES blocks of 4, so that a vector unit of 8 lanes fills 32 neighbours at once.
LANES = 8

# Words of the counter, of which steps and draws have one each, and numbers of one tensor: beyond, noise would repeat.
WORDS = 2**32
LARGEST = 4 * WORDS

Word = int | Tensor  # a 32-bit word, kept in a Python int or an int64 tensor so that one code serves both


class Role(IntEnum):
    """What a parameter's noise is for; each has a stream of its own."""

    WEIGHT = 0
    ACTIVATION = 1
    OUTPUT_SIGN = 2
    INPUT_SIGN = 3


class Key(NamedTuple):
    """Where in the noise a draw stands: ``(seed, step, draw)``.

    ``step`` and ``draw`` may be 0-dimensional int64 tensors, so that a compiled graph or ``vmap`` can vary them.
    """

    seed: int
    step: Word = 0
    draw: Word = 0


def check_size(shape: tuple[int, ...]) -> None:
    """Refuse to make more numbers for one tensor than there are: the rest would be the first again."""
    if math.prod(shape) > LARGEST:
        raise invalid("shape", "noise", f"that of a tensor of at most {LARGEST} numbers", shape)


def stream(parameter: int, role: Role) -> int:
    """The stream of the ``parameter``-th parameter for ``role``."""
    return parameter * len(Role) + role


def normal(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers by Box and Muller: r = sqrt(-2 log u1), (r cos(2 pi u2), r sin(2 pi u2)).

    u1 has 32 bits and is never 0, so |eps| reaches 6.7.

    Examples:
        >>> cpu = torch.device("cpu")
        >>> a = normal((3,), Key(seed=1, step=7), stream(0, Role.WEIGHT), torch.float64, cpu)
        >>> b = normal((2, 3), Key(seed=1, step=7), stream(0, Role.WEIGHT), torch.float64, cpu)
        >>> bool((a == b[0]).all())
        True
    """
    return _lay_out(_box_muller(_words(shape, key, stream, device), dtype), shape).to(dtype)


def normals(
    shapes: Sequence[tuple[int, ...]], key: Key, streams: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """What :func:`normal` gives for each shape and stream, by one pass of Philox: for graphs, which hold it once."""
    for shape in shapes:
        check_size(shape)
    blocks = [torch.arange(_blocks(shape), device=device) for shape in shapes]
    own = [torch.full_like(block, stream) for block, stream in zip(blocks, streams, strict=True)]
    words = philox((torch.cat(blocks), torch.cat(own), key.step, key.draw), key.seed)
    quarters = [quarter.split([len(block) for block in blocks]) for quarter in _box_muller(words, dtype)]
    each = zip(shapes, zip(*quarters, strict=True), strict=True)
    return [_lay_out(numbers, shape).to(dtype) for shape, numbers in each]


def _box_muller(words: Sequence[Word], dtype: torch.dtype) -> list[Tensor]:
    wide = dtype if dtype == torch.float64 else torch.float32
    x0, x1, x2, x3 = (torch.as_tensor(word) for word in words)
    numbers: list[Tensor] = []
    for a, b in ((x0, x1), (x2, x3)):
        u1 = a.to(wide) * 2.0**-32 + 2.0**-33
        angle = b.to(wide) * (2.0**-32 * 2.0 * math.pi)
        radius = (-2.0 * u1.log()).sqrt()
        numbers += [radius * angle.cos(), radius * angle.sin()]
    return numbers


def signs(shape: tuple[int, ...], key: Key, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs, -1 or +1 at even odds: the top bit of each word."""
    words = _words(shape, key, stream, device)
    return _lay_out([1 - 2 * (word >> 31) for word in words], shape).to(dtype)


def philox(counter: tuple[Word, Word, Word, Word], seed: int) -> tuple[Word, Word, Word, Word]:
    """Four random words from four counter words and a key.

    Examples:
        >>> [f"{word:08x}" for word in philox((0, 0, 0, 0), seed=0)]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]  # 64-bit products; int64 wraps, and only bits are read
        c0, c1, c2, c3 = (p1 >> 32) & _MASK ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) & _MASK ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _words(shape: tuple[int, ...], key: Key, stream: int, device: torch.device) -> list[Tensor]:
    check_size(shape)
    block = torch.arange(_blocks(shape), device=device)
    words = philox((block, stream, key.step, key.draw), key.seed)
    return [torch.as_tensor(word) for word in words]


def _blocks(shape: tuple[int, ...]) -> int:
    """How many blocks of four numbers are made for a tensor: whole groups."""
    return -(-math.prod(shape) // (4 * LANES)) * LANES


def _lay_out(quarters: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    groups = torch.stack([quarter.reshape(-1, LANES) for quarter in quarters], dim=1)
    return groups.reshape(-1)[: math.prod(shape)].reshape(shape)
