"""The engine's four operators for one parameter as Triton kernels: normal numbers, signs, the draw and its backward.

Importing this module imports triton, so it is imported only where a tensor on a GPU asks for it. With
``TRITON_INTERPRET=1`` set before that import, the kernels run on the CPU; so the tests compare them with the equations.

A program of the kernels that make noise takes ``_BLOCKS`` Philox blocks. A block yields four numbers, and these stand
``LANES`` apart in the tensor (see ``noise``): for each of the four quarters, neighbouring threads touch runs of
``LANES`` neighbouring elements. All arithmetic is in float64 for float64 tensors and in float32 for all others.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from bayesbackprop._errors import invalid
from bayesbackprop.noise import LANES, Word

# A prior in plain numbers: its kind and what it is made of. (NORMAL, sigma, 0, 0), (MIXTURE, pi, sigma1, sigma2) or
# (LAPLACE, scale, 0, 0); (NONE, 0, 0, 0) leaves log P(w) out of the complexity. Of NORMAL_KL and LAPLACE_KL the
# complexity is KL[q || P] in closed form.
Prior: TypeAlias = tuple[int, float, float, float]
NONE, NORMAL, MIXTURE, LAPLACE, NORMAL_KL, MIXTURE_KL, LAPLACE_KL = range(7)

# The first word of a Philox counter numbers the blocks of a tensor. It has 32 bits, and a block yields 4 numbers.
MOST_ELEMENTS = 4 * 2**32

_BLOCKS = 256  # Philox blocks of a program of noise, a multiple of LANES
_ELEMENTS = 4 * _BLOCKS  # elements of any program

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)

# Constants that kernels read. Triton refuses any other kind of global variable.
_LANES = tl.constexpr(LANES)
_NORMAL, _MIXTURE, _LAPLACE = tl.constexpr(NORMAL), tl.constexpr(MIXTURE), tl.constexpr(LAPLACE)
_NORMAL_KL, _LAPLACE_KL = tl.constexpr(NORMAL_KL), tl.constexpr(LAPLACE_KL)
_CONSTANT_BELOW = tl.constexpr(-1000.0)  # a rho below this marks a constant weight
_UNIT = tl.constexpr(2.0**-32)  # turns a random word into a number in [0, 1)
_HALF_UNIT = tl.constexpr(2.0**-33)  # keeps that number away from 0
_TURN = tl.constexpr(2.0**-32 * 2.0 * math.pi)  # turns a random word into an angle
_SQRT_HALF, _SQRT_2_OVER_PI = tl.constexpr(math.sqrt(0.5)), tl.constexpr(math.sqrt(2 / math.pi))
_SMALLEST = tl.constexpr(2.0**-126)  # a float32 that is normal, as a bound of what one divides by


# --- functions of kernels ---------------------------------------------------------------------------------------------


@triton.jit
def _word(value: tl.tensor) -> tl.tensor:
    """A word of a Philox counter, from a number or from the address of one."""
    if value.dtype.is_ptr():
        value = tl.load(value)
    return value.to(tl.uint32)


@triton.jit
def _share(COUNT: tl.constexpr) -> tl.tensor:
    """The blocks or elements that this program takes, by their numbers."""
    return tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)


@triton.jit
def _place(block: tl.tensor, quarter: tl.constexpr) -> tl.tensor:
    """Where in the tensor the number ``quarter`` of each block stands."""
    return block // _LANES * (4 * _LANES) + quarter * _LANES + block % _LANES


@triton.jit
def _pick(quarter: tl.constexpr, q0: tl.tensor, q1: tl.tensor, q2: tl.tensor, q3: tl.tensor) -> tl.tensor:
    """One of four blocks. Triton 3.2, which comes with torch 2.6, indexes no tuples."""
    if quarter == 0:
        return q0
    elif quarter == 1:
        return q1
    elif quarter == 2:
        return q2
    else:
        return q3


@triton.jit
def _words(
    block: tl.tensor, seed: tl.tensor, step: tl.tensor, draw: tl.tensor, stream: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Four random words of each block: ``noise.philox``, bit by bit."""
    return tl.philox(seed, block.to(tl.uint32), _word(stream), _word(step), _word(draw))


@triton.jit
def _box_muller(a: tl.tensor, b: tl.tensor, REAL: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Two standard normal numbers from two random words."""
    radius = tl.sqrt(-2.0 * tl.log(a.to(REAL) * _UNIT + _HALF_UNIT))
    angle = b.to(REAL) * _TURN
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _normals(
    block: tl.tensor,
    seed: tl.tensor,
    step: tl.tensor,
    draw: tl.tensor,
    stream: tl.tensor,
    REAL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Four standard normal numbers of each block."""
    x0, x1, x2, x3 = _words(block, seed, step, draw, stream)
    n0, n1 = _box_muller(x0, x1, REAL)
    n2, n3 = _box_muller(x2, x3, REAL)
    return n0, n1, n2, n3


@triton.jit
def _softplus(rho: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """t = exp(-|rho|) and ``scale``, from which all that depends on rho follows without overflow or underflow.

    sigma = log(1 + exp(rho)) = exp(min(rho, 0)) * scale,  log sigma = min(rho, 0) + log(scale),
    sigmoid(rho) / sigma = 1 / ((1 + t) * scale),  with scale >= log(2).
    """
    t = tl.exp(-tl.abs(rho))
    # log(1 + t) / t. The rounding of 1 + t cancels in the quotient; where 1 + t rounds to 1, the quotient is 1.
    u = 1.0 + t
    ratio = tl.where(u == 1.0, 1.0, tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0))
    return t, tl.where(rho < 0, ratio, rho + t * ratio)


@triton.jit
def _mixture(v: tl.tensor, numbers: tl.tensor, REAL: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Whether the first component is the larger at v, t = smaller / larger, and the two precisions.

    With d = log(first / second), t = exp(-|d|), which cannot overflow.
    """
    precision1, precision2 = tl.load(numbers + 1).to(REAL), tl.load(numbers + 2).to(REAL)
    d = (tl.load(numbers + 3) - tl.load(numbers + 4)).to(REAL) + 0.5 * (precision2 - precision1) * v * v
    return d >= 0, tl.exp(-tl.abs(d)), precision1, precision2


@triton.jit
def _prior_cost(v: tl.tensor, numbers: tl.tensor, KIND: tl.constexpr, REAL: tl.constexpr) -> tl.tensor:
    """-log P(v), with the constants of log q(w|theta) in it; see :func:`_numbers`."""
    cost = tl.load(numbers).to(REAL)
    if KIND == _NORMAL:
        cost += 0.5 * tl.load(numbers + 1).to(REAL) * v * v
    elif KIND == _LAPLACE:
        cost += tl.load(numbers + 1).to(REAL) * tl.abs(v)
    elif KIND == _MIXTURE:
        first, t, precision1, precision2 = _mixture(v, numbers, REAL)
        logs = tl.where(first, tl.load(numbers + 3).to(REAL), tl.load(numbers + 4).to(REAL))
        cost += 0.5 * tl.where(first, precision1, precision2) * v * v - logs - tl.log(1.0 + t)
    return cost


@triton.jit
def _prior_slope(v: tl.tensor, numbers: tl.tensor, KIND: tl.constexpr, REAL: tl.constexpr) -> tl.tensor:
    """-d log P(v) / dv."""
    # Triton compiles one of these branches. Without ``else``, it would also compile what follows the branch.
    if KIND == _NORMAL:
        return tl.load(numbers + 1).to(REAL) * v
    elif KIND == _LAPLACE:
        precision = tl.load(numbers + 1).to(REAL)
        return tl.where(v > 0, precision, tl.where(v < 0, -precision, v))  # the last one is 0 or NaN
    elif KIND == _MIXTURE:
        first, t, precision1, precision2 = _mixture(v, numbers, REAL)
        mean = tl.where(first, precision1 + precision2 * t, precision1 * t + precision2) / (1.0 + t)
        return v * mean
    else:
        return tl.zeros_like(v)


@triton.jit
def _folded(v: tl.tensor, sigma: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The derivatives of E|w|, w ~ N(v, sigma^2): erf(z / sqrt(2)) by v, sqrt(2 / pi) exp(-z^2 / 2) by sigma."""
    # Beyond |z| = 40 the exponential is 0 and erf is 1 in every precision.
    least = tl.maximum(tl.abs(v) / 40, _SMALLEST)
    z = v / tl.where(sigma < least, least, sigma)
    return tl.erf(z * _SQRT_HALF), _SQRT_2_OVER_PI * tl.exp(-0.5 * z * z)


@triton.jit
def _expected_cost(
    v: tl.tensor, sigma: tl.tensor, numbers: tl.tensor, KIND: tl.constexpr, REAL: tl.constexpr
) -> tl.tensor:
    """The expectation of :func:`_prior_cost` over w ~ N(v, sigma^2)."""
    precision = tl.load(numbers + 1).to(REAL)
    if KIND == _NORMAL_KL:
        expected = 0.5 * precision * (v * v + sigma * sigma)
    else:
        by_v, by_sigma = _folded(v, sigma)
        expected = precision * (v * by_v + sigma * by_sigma)
    return tl.load(numbers).to(REAL) + expected


@triton.jit
def _expected_slopes(
    v: tl.tensor, sigma: tl.tensor, numbers: tl.tensor, KIND: tl.constexpr, REAL: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The derivative of :func:`_expected_cost` by v, and sigma times that by sigma."""
    precision = tl.load(numbers + 1).to(REAL)
    if KIND == _NORMAL_KL:
        return precision * v, precision * sigma * sigma
    else:
        by_v, by_sigma = _folded(v, sigma)
        return precision * by_v, precision * sigma * by_sigma


# --- kernels ----------------------------------------------------------------------------------------------------------

# Numbers that differ from call to call must not be compiled into a kernel.
_VARYING = ("seed", "step", "draw", "stream")


@triton.jit(do_not_specialize=_VARYING)
def _normal_kernel(
    out: tl.tensor,
    size: tl.tensor,
    seed: tl.tensor,
    step: tl.tensor,
    draw: tl.tensor,
    stream: tl.tensor,
    REAL: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    block = _share(BLOCKS)
    n0, n1, n2, n3 = _normals(block, seed, step, draw, stream, REAL)
    for quarter in tl.static_range(4):
        at = _place(block, quarter)
        tl.store(out + at, _pick(quarter, n0, n1, n2, n3), at < size)


@triton.jit(do_not_specialize=_VARYING)
def _signs_kernel(
    out: tl.tensor,
    size: tl.tensor,
    seed: tl.tensor,
    step: tl.tensor,
    draw: tl.tensor,
    stream: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    block = _share(BLOCKS)
    x0, x1, x2, x3 = _words(block, seed, step, draw, stream)
    for quarter in tl.static_range(4):
        at = _place(block, quarter)
        tl.store(out + at, 1 - 2 * (_pick(quarter, x0, x1, x2, x3) >> 31).to(tl.int32), at < size)


@triton.jit(do_not_specialize=_VARYING)
def _draw_kernel(
    w_pointer: tl.tensor,
    costs: tl.tensor,
    mu_pointer: tl.tensor,
    rho_pointer: tl.tensor,
    centre: tl.tensor,
    numbers: tl.tensor,
    size: tl.tensor,
    seed: tl.tensor,
    step: tl.tensor,
    draw: tl.tensor,
    stream: tl.tensor,
    KIND: tl.constexpr,
    CLOSED: tl.constexpr,
    REAL: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    block = _share(BLOCKS)
    n0, n1, n2, n3 = _normals(block, seed, step, draw, stream, REAL)
    total = tl.zeros([BLOCKS], REAL)
    for quarter in tl.static_range(4):
        at, eps = _place(block, quarter), _pick(quarter, n0, n1, n2, n3)
        inside = at < size
        mu = tl.load(mu_pointer + at, inside, other=0.0).to(REAL)
        rho = tl.load(rho_pointer + at, inside, other=2 * _CONSTANT_BELOW).to(REAL)
        constant = rho < _CONSTANT_BELOW  # as is all that lies outside, and so adds nothing to the cost
        t, scale = _softplus(rho)
        sigma = tl.where(rho < 0, t, 1.0) * scale
        w = tl.where(constant, mu, mu + sigma * eps)
        w = w.to(w_pointer.dtype.element_ty)
        tl.store(w_pointer + at, w, inside)
        v = mu if CLOSED else w.to(REAL)  # as the network sees it
        if centre is not None:
            v -= tl.load(centre + at, inside, other=0.0).to(REAL)
        log_sigma = tl.where(rho < 0, rho, 0.0) + tl.log(scale)
        if CLOSED:
            cost = _expected_cost(v, sigma, numbers, KIND, REAL) - 0.5 - log_sigma
        else:
            cost = _prior_cost(v, numbers, KIND, REAL) - 0.5 * eps * eps - log_sigma
        total += tl.where(constant, 0.0, cost)
    # Four neighbours were added in REAL, which costs no more than the rounding of each; the rest adds up in float64.
    tl.store(costs + tl.program_id(0), tl.sum(total.to(tl.float64), 0))


@triton.jit
def _backward_kernel(
    to_mu: tl.tensor,
    to_rho: tl.tensor,
    mu_pointer: tl.tensor,
    rho_pointer: tl.tensor,
    centre: tl.tensor,
    w_pointer: tl.tensor,
    gradient: tl.tensor,
    complexity_gradient: tl.tensor,
    numbers: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
    CLOSED: tl.constexpr,
    REAL: tl.constexpr,
    ELEMENTS: tl.constexpr,
) -> None:
    at = _share(ELEMENTS)
    inside = at < size
    rho = tl.load(rho_pointer + at, inside, other=0.0).to(REAL)
    w = tl.load(w_pointer + at, inside, other=0.0).to(REAL)
    mu = tl.load(mu_pointer + at, inside, other=0.0).to(REAL)
    v = mu if CLOSED else w
    if centre is not None:
        v -= tl.load(centre + at, inside, other=0.0).to(REAL)
    gc = tl.load(complexity_gradient).to(REAL)
    constant = rho < _CONSTANT_BELOW
    t, scale = _softplus(rho)
    noise = w - mu  # sigma * eps, as the network saw it
    if CLOSED:
        slope, spread = _expected_slopes(v, tl.where(rho < 0, t, 1.0) * scale, numbers, KIND, REAL)
    else:
        slope = _prior_slope(v, numbers, KIND, REAL)
        spread = slope * noise
    gw = tl.load(gradient + at, inside, other=0.0).to(REAL)
    tl.store(to_mu + at, tl.where(constant, 0.0, gw + gc * slope), inside)  # (3)
    along = gw * noise + gc * spread
    tl.store(to_rho + at, tl.where(constant, 0.0, (along - gc) / ((1.0 + t) * scale)), inside)  # (4)


# --- operators --------------------------------------------------------------------------------------------------------


def normal(
    shape: Sequence[int], seed: int, step: Word, draw: Word, stream: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Standard normal numbers: ``noise.normal`` to rounding.

    Args:
        shape: the shape of the result.
        seed: the key of the noise, 64 bits.
        step: the training step, an int or a 0-dimensional int64 tensor.
        draw: the Monte Carlo sample, an int or a 0-dimensional int64 tensor.
        stream: the stream of the parameter.
        dtype: the type of the result.
        device: where the kernel runs.
    """
    programs = _programs("shape", "normal", math.prod(shape))
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    key = _key(seed, step, draw, stream, device)
    _launch(_normal_kernel, programs, out, out.numel(), *key, REAL=_real(dtype), BLOCKS=_BLOCKS)
    return out


def signs(
    shape: Sequence[int], seed: int, step: Word, draw: Word, stream: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Random signs, -1 or +1: exactly ``noise.signs``. The arguments are those of :func:`normal`."""
    programs = _programs("shape", "signs", math.prod(shape))
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    _launch(_signs_kernel, programs, out, out.numel(), *_key(seed, step, draw, stream, device), BLOCKS=_BLOCKS)
    return out


def draw(
    mu: Tensor, rho: Tensor, centre: Tensor | None, prior: Prior, stream: int, seed: int, step: Word, draw: Word
) -> tuple[Tensor, Tensor]:
    """w = mu + log(1 + exp(rho)) * eps, and log q(w|theta) - log P(w - centre) over all of w, as a float64 scalar.

    Of a prior in closed form the second is KL[q || P]. A constant weight is its mu and adds nothing to the complexity.

    Args:
        mu: the means.
        rho: the standard deviations, sigma = log(1 + exp(rho)).
        centre: what the prior is centred on; None for 0.
        prior: the prior in numbers, see :data:`Prior`.
        stream: the stream of the parameter.
        seed: the key of the noise, 64 bits.
        step: the training step, an int or a 0-dimensional int64 tensor.
        draw: the Monte Carlo sample, an int or a 0-dimensional int64 tensor.
    """
    programs = _programs("mu", "draw", mu.numel())
    w = torch.empty_like(mu, memory_format=torch.contiguous_format)
    costs = torch.empty(programs, dtype=torch.float64, device=mu.device)
    inputs = (*map(_contiguous, (mu, rho, centre)), _numbers(prior, mu.device), mu.numel())
    key = _key(seed, step, draw, stream, mu.device)
    _launch(_draw_kernel, programs, w, costs, *inputs, *key, **_constants(prior, mu.dtype), BLOCKS=_BLOCKS)
    return w, costs.sum()


def backward(
    mu: Tensor,
    rho: Tensor,
    centre: Tensor | None,
    prior: Prior,
    w: Tensor,
    gradient: Tensor,
    complexity_gradient: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Delta_mu and Delta_rho of equations (3) and (4) from df/dw; both are 0 for constant weights.

    g = df/dw - gc dlog P(w - centre)/dw,  Delta_mu = g,  Delta_rho = (g sigma eps - gc) sigmoid(rho) / sigma,

    where gc is df/dcomplexity. In closed form the prior is met at mu, and its share in Delta_rho does not depend on w.

    The noise is recovered and not generated again: sigma * eps is w - mu, to the rounding
    of the w that was used.

    Args:
        mu: the means.
        rho: the standard deviations, sigma = log(1 + exp(rho)).
        centre: what the prior is centred on; None for 0.
        prior: the prior in numbers, see :data:`Prior`.
        w: the weights that :func:`draw` returned.
        gradient: df/dw, of the network alone.
        complexity_gradient: df/dcomplexity, a float or a 0-dimensional tensor.
    """
    programs = triton.cdiv(mu.numel(), _ELEMENTS)
    to_mu, to_rho = (torch.empty_like(mu, memory_format=torch.contiguous_format) for _ in range(2))
    inputs = (*map(_contiguous, (mu, rho, centre, w, gradient)), _on(mu.device, complexity_gradient))
    numbers, constants = _numbers(prior, mu.device), _constants(prior, mu.dtype)
    _launch(_backward_kernel, programs, to_mu, to_rho, *inputs, numbers, mu.numel(), **constants, ELEMENTS=_ELEMENTS)
    return to_mu, to_rho


def _launch(kernel: Any, programs: int, out: Tensor, *arguments: object, **constants: object) -> None:
    with torch.cuda.device_of(out):  # Triton launches on the current device
        # Fused multiply-add is asked for by name, because its default differs between versions of Triton.
        kernel[(programs,)](out, *arguments, **constants, enable_fp_fusion=True)


def _programs(parameter: str, owner: str, size: int) -> int:
    """How many programs make the noise of ``size`` elements."""
    if size > MOST_ELEMENTS:
        raise invalid(parameter, owner, "of at most 2**34 elements", size)
    return triton.cdiv(size, _ELEMENTS)


def _key(seed: int, step: Word, draw: Word, stream: int, device: torch.device) -> tuple[Word, ...]:
    """The words of the noise as kernels take them: tensors stay on the device, so that nothing waits for them."""
    words = (word.to(device) if isinstance(word, Tensor) else word & (2**32 - 1) for word in (step, draw))
    return (seed & (2**64 - 1), *words, stream)


def _on(device: torch.device, value: float | Tensor) -> Tensor:
    """A number as a tensor on ``device``, without a copy that waits."""
    return value.to(device) if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=device)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _constants(prior: Prior, dtype: torch.dtype) -> dict[str, object]:
    """What a kernel is compiled for."""
    return {"KIND": prior[0], "CLOSED": prior[0] in (NORMAL_KL, LAPLACE_KL), "REAL": _real(dtype)}


def _real(dtype: torch.dtype) -> tl.dtype:
    """The type to compute in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@lru_cache(maxsize=256)  # a copy to the device for each prior, not for each draw
def _numbers(prior: Prior, device: torch.device) -> Tensor:
    """What the kernels read of a prior, in float64, because Triton passes a Python float as a float32.

    The part of log q(w|theta) - log P(v) that depends on neither w nor theta; then for each component (a mixture has
    two) 1 / sigma^2, or 1 / scale; then for each component of a mixture log(weight / sigma).
    """
    kind, a, b, c = prior
    if kind in (NORMAL, NORMAL_KL):
        numbers = [math.log(a), 1 / a**2]
    elif kind in (LAPLACE, LAPLACE_KL):
        numbers = [math.log(2 * a) - _HALF_LOG_2PI, 1 / a]
    elif kind == MIXTURE:
        numbers = [0.0, 1 / b**2, 1 / c**2, _log(a) - math.log(b), _log(1 - a) - math.log(c)]
    else:
        numbers = [-_HALF_LOG_2PI]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf
