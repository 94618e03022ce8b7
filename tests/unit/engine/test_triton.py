"""The Triton kernels against the equations: on a GPU where there is one, else under Triton's interpreter."""

import math
import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bayesbackprop import complexity, noise
from bayesbackprop.noise import Key
from bayesbackprop.posterior import WeightPosterior, constant_rho
from bayesbackprop.priors import Laplace, Normal, Prior, ScaleMixture

if util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")

with pytest.MonkeyPatch.context() as patch:
    if not GPU:
        patch.setenv("TRITON_INTERPRET", "1")
    import triton
    import triton.language as tl

    from bayesbackprop._engine import triton as kernels

    @triton.jit
    def words_kernel(out, seed, step, draw, stream, BLOCKS: tl.constexpr):  # noqa: N803
        block = tl.arange(0, BLOCKS)
        x0, x1, x2, x3 = kernels._words(block, seed, step, draw, stream)
        tl.store(out + block, x0)
        tl.store(out + BLOCKS + block, x1)
        tl.store(out + 2 * BLOCKS + block, x2)
        tl.store(out + 3 * BLOCKS + block, x3)


pytestmark = pytest.mark.equivalence

STREAM = 20
KEY = Key(seed=2**40 + 7, step=3, draw=5)
KEYS = [Key(0), KEY, Key(seed=2**64 - 1, step=2**32 - 1, draw=2**31)]
# Less than, exactly and more than a group of 32 numbers, and of the 1024 numbers of a program.
SHAPES = [(), (0,), (1,), (31,), (32,), (33,), (3, 5, 7), (1024,), (2, 1030)]
DTYPES = [torch.float32, torch.float64]
NOISE_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}

PRIORS: dict[kernels.Prior, Prior | None] = {
    (kernels.NONE, 0.0, 0.0, 0.0): None,
    (kernels.NORMAL, 0.3, 0.0, 0.0): Normal(0.3),
    (kernels.MIXTURE, 0.25, 1.0, 0.1): ScaleMixture(0.25, 1.0, 0.1),
    (kernels.MIXTURE, 0.5, math.exp(-1), math.exp(-7)): ScaleMixture(),
    (kernels.MIXTURE, 0.0, 1.0, 0.1): ScaleMixture(0.0, 1.0, 0.1),
    (kernels.MIXTURE, 1.0, 1.0, 0.1): ScaleMixture(1.0, 1.0, 0.1),
    (kernels.LAPLACE, 0.2, 0.0, 0.0): Laplace(0.2),
    (kernels.NORMAL_KL, 0.3, 0.0, 0.0): Normal(0.3),
    (kernels.LAPLACE_KL, 0.2, 0.0, 0.0): Laplace(0.2),
}
CLOSED = (kernels.NORMAL_KL, kernels.LAPLACE_KL)
NORMAL = (kernels.NORMAL, 0.3, 0.0, 0.0)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_the_random_words_are_those_of_the_reference_bit_by_bit(key: Key) -> None:
    blocks = 64
    out = torch.empty(4, blocks, dtype=torch.int64, device=DEVICE)
    words_kernel[(1,)](out, *kernels._key(*key, STREAM, DEVICE), BLOCKS=blocks)
    expected = noise.philox((torch.arange(blocks), STREAM, key.step, key.draw), key.seed)
    assert torch.equal(out.cpu(), torch.stack([torch.as_tensor(word) for word in expected]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noise_is_that_of_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for key in KEYS:
        numbers = kernels.normal(shape, *key, STREAM, dtype, DEVICE)
        expected = noise.normal(shape, key, STREAM, dtype, DEVICE)
        torch.testing.assert_close(numbers, expected, rtol=0, atol=NOISE_TOLERANCE[dtype])
        assert torch.equal(
            kernels.signs(shape, *key, STREAM, dtype, DEVICE), noise.signs(shape, key, STREAM, dtype, DEVICE)
        )


def test_the_step_and_the_draw_may_be_tensors() -> None:
    mu, rho, _, _ = parameter(40, torch.float64)
    for key in KEYS:
        tensors = Key(
            key.seed, torch.tensor(key.step, device=DEVICE), torch.tensor(key.draw)
        )  # the draw may be elsewhere
        for make in (kernels.normal, kernels.signs):
            expected = make((40,), *key, STREAM, torch.float64, DEVICE)
            assert torch.equal(make((40,), *tensors, STREAM, torch.float64, DEVICE), expected)
        for one, other in zip(
            kernels.draw(mu, rho, None, NORMAL, STREAM, *key),
            kernels.draw(mu, rho, None, NORMAL, STREAM, *tensors),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_more_elements_than_counters_are_refused() -> None:
    many = torch.empty(1, device=DEVICE).expand(2**34 + 1)
    for call in (
        lambda: kernels.normal(many.shape, 0, 0, 0, 0, torch.float32, DEVICE),
        lambda: kernels.signs(many.shape, 0, 0, 0, 0, torch.float32, DEVICE),
        lambda: kernels.draw(many, many, None, NORMAL, 0, 0, 0, 0),
    ):
        with pytest.raises(ValueError, match=r"must be of at most 2\*\*34 elements. Got 17179869185 instead"):
            call()


# --- the draw and its backward ----------------------------------------------------------------------------------------


def parameter(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mu, rho, a centre and a gradient; sigma runs from 1e-5 to 5, and every fifth weight is constant."""
    generator = torch.Generator().manual_seed(size)
    mu, centre, gradient = torch.randn(3, size, generator=generator, dtype=torch.float64)
    rho = torch.linspace(-11.5, 5, size, dtype=torch.float64)
    rho[1::5] = constant_rho(torch.float32)
    return tuple(tensor.to(dtype).to(DEVICE) for tensor in (mu, rho, centre, gradient))


def equations(
    mu: Tensor, rho: Tensor, centre: Tensor | None, numbers: kernels.Prior, used: Tensor, gradient: Tensor, gc: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w, the complexity, Delta_mu and Delta_rho by autograd, in float64, with the noise of the type of ``mu``.

    The prior is taken at the weights that were used: a spike is so steep that the rounding of w matters.
    """
    eps = noise.normal(tuple(mu.shape), KEY, STREAM, mu.dtype, mu.device).double()
    q = WeightPosterior(mu.double().requires_grad_(), rho.double().requires_grad_())
    exact = q.weight(eps)
    w = exact + (used.double() - exact).detach()
    prior, at = PRIORS[numbers], None if centre is None else centre.double()
    if prior is None:
        cost = torch.where(q.random, q.log_density(eps), 0.0).sum()
    else:
        closed = numbers[0] in CLOSED
        cost = complexity.closed(q, prior, at) if closed else complexity.sampled(q, prior, at, w, eps)
    total = (gradient.double() * w).sum() + gc * cost
    return exact.detach(), cost.detach(), *torch.autograd.grad(total, (q.mu, q.rho))


def compare(
    mu: Tensor, rho: Tensor, centre: Tensor | None, numbers: kernels.Prior, gradient: Tensor, gc: float | Tensor
) -> None:
    w, cost = kernels.draw(mu, rho, centre, numbers, STREAM, *KEY)
    to_mu, to_rho = kernels.backward(mu, rho, centre, numbers, w, gradient, gc)
    assert cost.dtype == torch.float64
    assert cost.device == mu.device
    assert {w.dtype, to_mu.dtype, to_rho.dtype} == {mu.dtype}
    expected = equations(mu, rho, centre, numbers, w, gradient, float(gc))
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if mu.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close((w.double(), cost, to_mu.double(), to_rho.double()), expected, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("numbers", "size"), [(NORMAL, 1), *((numbers, 1500) for numbers in PRIORS)], ids=str)
def test_weights_complexity_and_gradients(numbers: kernels.Prior, size: int, centred: bool, dtype: torch.dtype) -> None:
    mu, rho, centre, gradient = parameter(size, dtype)
    compare(mu, rho, centre if centred else None, numbers, gradient, 0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rho", [math.log(1e-8), -60.0, 20.0, 45.0], ids=str)
def test_sigma_may_be_tiny_or_large(rho: float, dtype: torch.dtype) -> None:
    _, _, centre, gradient = parameter(64, dtype)
    mu = torch.ones_like(centre)
    for numbers in PRIORS:
        scale = 1e-6 if rho > 0 else 1.0  # the gradients of a large sigma are large: a spike is 1e6 times as steep
        compare(mu, torch.full_like(mu, rho), centre, numbers, gradient * scale, 1e-3 * scale)


def test_the_gradient_of_the_complexity_may_be_a_tensor() -> None:
    mu, rho, centre, gradient = parameter(40, torch.float64)
    compare(mu, rho, centre, NORMAL, gradient, torch.tensor(0.25, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_weights_are_their_means_and_cost_nothing(dtype: torch.dtype) -> None:
    mu, _, centre, gradient = parameter(40, dtype)
    for rho in (torch.full_like(mu, math.nextafter(-1000.0, -math.inf) - 1e-3), torch.full_like(mu, -math.inf)):
        for numbers in PRIORS:
            w, cost = kernels.draw(mu, rho, centre, numbers, STREAM, *KEY)
            assert torch.equal(w, mu)
            assert cost == 0
            for change in kernels.backward(mu, rho, centre, numbers, w, gradient, 1.0):
                assert torch.equal(change, torch.zeros_like(mu))


def test_a_weight_at_the_bound_is_random() -> None:
    mu, _, _, gradient = parameter(40, torch.float64)
    rho = torch.full_like(mu, -1000.0)
    w, cost = kernels.draw(mu, rho, None, NORMAL, STREAM, *KEY)
    eps = noise.normal((40,), KEY, STREAM, torch.float64, DEVICE)
    expected = (-0.5 * eps.square() + 1000 - 0.5 * math.log(2 * math.pi) - Normal(0.3).log_density(w)).sum()
    torch.testing.assert_close(cost, expected)
    _, to_rho = kernels.backward(mu, rho, None, NORMAL, w, gradient, 1.0)
    torch.testing.assert_close(to_rho, torch.full_like(mu, -1.0))


def test_a_nan_is_seen() -> None:
    mu, rho, _, gradient = parameter(40, torch.float32)
    rho[0] = math.nan
    for numbers in PRIORS:
        w, cost = kernels.draw(mu, rho, None, numbers, STREAM, *KEY)
        to_mu, to_rho = kernels.backward(mu, rho, None, numbers, w, gradient, 1.0)
        assert w[0].isnan()
        assert to_mu[0].isnan() or numbers[0] in (kernels.NONE, kernels.NORMAL_KL)  # whose slopes do not have rho
        assert cost.isnan()
        assert to_rho[0].isnan()
        assert w[1:].isfinite().all()
        assert to_rho[1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    mu, rho, centre, gradient = parameter(100, dtype)
    wide = [tensor.float() for tensor in (mu, rho, centre)]
    numbers = (kernels.MIXTURE, 0.25, 1.0, 0.1)
    w, cost = kernels.draw(mu, rho, centre, numbers, STREAM, *KEY)
    wide_w, _ = kernels.draw(*wide, numbers, STREAM, *KEY)
    changes = kernels.backward(mu, rho, centre, numbers, w, gradient, 0.01)
    wide_changes = kernels.backward(*wide, numbers, w.float(), gradient.float(), 0.01)
    # A GPU rounds to bfloat16; the interpreter cuts off, which is one unit of the last of 8 bits away.
    tolerance = 2**-7 if dtype == torch.bfloat16 and not GPU else 0.0
    for narrow, full in zip((w, *changes), (wide_w, *wide_changes), strict=True):
        torch.testing.assert_close(narrow, full.to(dtype), rtol=tolerance, atol=0.0)
    # The complexity is that of the weights as they are, rounded to the type.
    eps = noise.normal((100,), KEY, STREAM, torch.float32, DEVICE).double()
    q = WeightPosterior(mu.double(), rho.double())
    expected = complexity.sampled(q, PRIORS[numbers], centre.double(), w.double(), eps)
    torch.testing.assert_close(cost, expected, rtol=1e-5, atol=1e-5)


def test_the_order_of_elements_is_that_of_the_shape() -> None:
    mu, rho, centre, gradient = (tensor.reshape(40, 50) for tensor in parameter(2000, torch.float64))
    expected, cost = kernels.draw(mu, rho, centre, NORMAL, STREAM, *KEY)
    changes = kernels.backward(mu, rho, centre, NORMAL, expected, gradient, 0.1)
    mu, rho, centre, gradient = (tensor.t().contiguous().t() for tensor in (mu, rho, centre, gradient))
    assert not mu.is_contiguous()
    w, again = kernels.draw(mu, rho, centre, NORMAL, STREAM, *KEY)
    assert torch.equal(w, expected)
    assert torch.equal(again, cost)
    for one, other in zip(kernels.backward(mu, rho, centre, NORMAL, w, gradient, 0.1), changes, strict=True):
        assert torch.equal(one, other)


def test_a_call_repeated_gives_the_same_bits() -> None:
    mu, rho, centre, gradient = parameter(3000, torch.float32)
    numbers = (kernels.MIXTURE, 0.25, 1.0, 0.1)

    def once() -> list[Tensor]:
        w, cost = kernels.draw(mu, rho, centre, numbers, STREAM, *KEY)
        return [w, cost, *kernels.backward(mu, rho, centre, numbers, w, gradient, 0.01)]

    for one, other in zip(once(), once(), strict=True):
        assert torch.equal(one, other)


def test_a_parameter_without_weights_costs_nothing() -> None:
    empty = torch.empty(0, 3, device=DEVICE)
    w, cost = kernels.draw(empty, empty, None, NORMAL, STREAM, *KEY)
    assert w.shape == (0, 3)
    assert cost == 0
    assert all(change.shape == (0, 3) for change in kernels.backward(empty, empty, None, NORMAL, w, empty, 1.0))


# --- the module -------------------------------------------------------------------------------------------------------


def test_the_kernels_compile_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = str(Path(__file__).with_name("compile_triton.py"))
    result = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.split()) == {"_normal_kernel", "_signs_kernel", "_draw_kernel", "_backward_kernel"}
