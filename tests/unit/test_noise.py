"""The noise: Philox against its known answers and a second implementation, the layout, and every way to the numbers."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.func import vmap

from bayesbackprop import Bayesian, Gaussian, noise
from bayesbackprop._engine import ops
from bayesbackprop.noise import Key, Role, normal, philox, signs, stream

CPU = torch.device("cpu")
ONES = 0xFFFFFFFF
DTYPES = (torch.float32, torch.float64)
SIZES = (0, 1, 3, 31, 32, 33, 1023, 1025)

identities = pytest.mark.identities
equivalence = pytest.mark.equivalence


def scalar_philox(counter: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Philox4x32-10 as Salmon et al. print it, one counter at a time, on Python's unbounded integers."""
    c = list(counter)
    key = [seed % 2**32, seed // 2**32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def scalar_words(i: int, key: Key, stream: int) -> tuple[tuple[int, ...], int]:
    """The block that number ``i`` comes from, and which of its four it is: 8 lanes of blocks, a quarter at a time."""
    group, rest = divmod(i, 32)
    quarter, lane = divmod(rest, 8)
    return scalar_philox((group * 8 + lane, stream, key.step, key.draw), key.seed), quarter


def scalar_normal(i: int, key: Key, stream: int) -> float:
    words, quarter = scalar_words(i, key, stream)
    a, b = words[:2] if quarter < 2 else words[2:]
    radius = math.sqrt(-2 * math.log((a + 0.5) / 2**32))
    angle = 2 * math.pi * b / 2**32
    return radius * (math.cos(angle) if quarter % 2 == 0 else math.sin(angle))


# --- the bits ---------------------------------------------------------------------------------------------------------


@identities
@pytest.mark.parametrize("implementation", [philox, scalar_philox])
@pytest.mark.parametrize(
    ("counter", "seed", "answer"),
    [  # the vectors that come with Random123, the authors' own implementation
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(implementation, counter, seed, answer):
    assert " ".join(f"{word:08x}" for word in implementation(counter, seed)) == answer


@equivalence
def test_ints_tensors_and_vmap_agree():
    counters = torch.randint(2**32, (500, 4))
    counters[:2] = torch.tensor([[0] * 4, [ONES] * 4])
    for seed in (0, 1, 2**32, 2**63 - 1):
        expected = torch.tensor([scalar_philox(tuple(row), seed) for row in counters.tolist()])
        assert torch.equal(torch.tensor([philox(tuple(row), seed) for row in counters.tolist()]), expected)
        assert torch.equal(torch.stack(philox(tuple(counters.unbind(1)), seed), 1), expected)
        mapped = vmap(lambda row, seed=seed: torch.stack(philox(tuple(row.unbind()), seed)))(counters)
        assert torch.equal(mapped, expected)
        mixed = philox((counters[:, 0], 7, torch.tensor(5), 3), seed)
        assert torch.equal(
            torch.stack(mixed, 1), torch.tensor([scalar_philox((c, 7, 5, 3), seed) for c in counters[:, 0].tolist()])
        )


# --- the layout -------------------------------------------------------------------------------------------------------


@identities
@pytest.mark.parametrize("key", [Key(0), Key(2**63 - 1, 3, 5), Key(11, 2**32 - 1, 2**32 - 1)])
def test_layout_is_the_documented_one(key):
    which = stream(2, Role.OUTPUT_SIGN)
    indices = [*range(70), 1023, 1024]
    expected = torch.tensor([scalar_normal(i, key, which) for i in indices], dtype=torch.float64)
    got = normal((1025,), key, which, torch.float64, CPU)[indices]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    words = [scalar_words(i, key, which) for i in indices]
    tops = torch.tensor([-1.0 if block[quarter] >= 2**31 else 1.0 for block, quarter in words])
    assert torch.equal(signs((1025,), key, which, torch.float32, CPU)[indices], tops)


@identities
@pytest.mark.parametrize("generator", [normal, signs])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_do_not_depend_on_how_many_are_asked_for(generator, dtype):
    whole = generator((4096,), Key(1, 2, 3), 4, dtype, CPU)
    for size in SIZES:
        part = generator((size,), Key(1, 2, 3), 4, dtype, CPU)
        assert part.shape == (size,)
        assert part.dtype == dtype
        assert torch.equal(part, whole[:size])
    for shape in [(), (0, 3), (3, 0), (5, 7), (2, 3, 4), (1, 1023)]:
        assert torch.equal(generator(shape, Key(1, 2, 3), 4, dtype, CPU), whole[: math.prod(shape)].reshape(shape))


@identities
def test_roles_and_parameters_have_streams_of_their_own():
    streams = [stream(parameter, role) for parameter in range(50) for role in Role]
    assert len(set(streams)) == 50 * len(Role)


@identities
def test_no_two_steps_draws_and_streams_share_a_number():
    combinations = list(itertools.product((0, 1, 2, 3, 2**32 - 1), (0, 1, 2, 7, 2**32 - 1), range(12)))
    drawn = torch.stack(
        [normal((64,), Key(5, step, draw), which, torch.float64, CPU) for step, draw, which in combinations]
    )
    assert len(drawn.unique()) == drawn.numel()  # 64 random bits each: a chance collision has probability 1e-11
    model = Bayesian(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), Gaussian(0.1), seed=3).double()
    eps = [
        (model.draw(step, index).weights[name] - q.mu) / q.sigma
        for step in range(4)
        for index in range(4)
        for name, q in model.posterior.items()
    ]
    flat = torch.cat([e.flatten() for e in eps]).mul(2**26).round()  # far above what the rounding of w leaves
    assert len(flat.unique()) == len(flat)


# --- the same numbers everywhere --------------------------------------------------------------------------------------


@equivalence
@pytest.mark.parametrize("generator", [normal, signs])
def test_tensor_and_vmapped_keys_give_the_numbers_of_int_keys(generator):
    def one(step, draw):
        return generator((3, 37), Key(9, step, draw), 2, torch.float64, CPU)

    steps, draws = torch.tensor([0, 1, 2, 2**32 - 1]), torch.tensor([5, 0, 2**32 - 1, 1])
    expected = torch.stack([one(step, draw) for step, draw in zip(steps.tolist(), draws.tolist(), strict=True)])
    assert torch.equal(torch.stack([one(step, draw) for step, draw in zip(steps, draws, strict=True)]), expected)
    assert torch.equal(vmap(one)(steps, draws), expected)
    assert torch.equal(vmap(one, in_dims=(None, 0))(1, draws)[1], one(1, 0))


@equivalence
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses deprecated parts of torch
def test_compiled_equals_eager():
    def both(step, draw):
        key = Key(2**40 + 1, step, draw)
        words = torch.stack(philox((torch.arange(64), 3, step, draw), key.seed))
        return words, normal((999,), key, 3, torch.float32, CPU), signs((999,), key, 3, torch.float32, CPU)

    compiled = torch.compile(both, fullgraph=True)
    for step, draw in [(1, 0), (2, 2**32 - 1)]:
        words, values, flips = compiled(torch.tensor(step), torch.tensor(draw))
        eager = both(step, draw)
        assert torch.equal(words, eager[0])
        torch.testing.assert_close(values, eager[1], rtol=1e-5, atol=1e-5)
        assert torch.equal(flips, eager[2])


@equivalence
def test_float32_agrees_with_float64_to_float32_accuracy():
    n = 2**20
    single, double = (normal((n,), Key(1, 1), 0, dtype, CPU).double().reshape(-1, 4, 8) for dtype in DTYPES)
    radius = double[:, ::2].hypot(double[:, 1::2]).repeat_interleave(2, 1)
    # u1 is rounded by at most 2^-24 of itself, so r^2 = -2 log u1 by 2^-23 and r by 2^-24 / r; the angle and the
    # products add a few roundings of r.
    limit = (2**-24 / radius).clamp(max=2**-11.5) + 10 * 2**-23 * radius
    assert ((single - double).abs() <= limit).all()


@equivalence
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_rounded(dtype):
    single = normal((1000,), Key(1), 0, torch.float32, CPU)
    assert torch.equal(normal((1000,), Key(1), 0, dtype, CPU), single.to(dtype))


@identities
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_words_give_finite_numbers(dtype, monkeypatch):
    """No run will meet them by chance: words of all zeros and all ones."""
    words = torch.tensor([0, ONES]).repeat(4)
    monkeypatch.setattr(noise, "philox", lambda counter, seed: (words, words.flip(0), words, words))
    values = normal((32,), Key(0), 0, dtype, CPU)
    assert values.isfinite().all()
    assert float(values.abs().max()) == pytest.approx(math.sqrt(66 * math.log(2)), rel=1e-6)  # 6.76


# --- noise that would repeat -----------------------------------------------------------------------------------------

HUGE = (2**17 + 1, 2**17)


@identities
@pytest.mark.parametrize("make", [normal, signs, ops.normal, ops.signs])
@pytest.mark.parametrize("key", [Key(0), Key(0, torch.tensor(1), torch.tensor(0))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_more_noise_than_there_is_is_refused(make, key, dtype):
    with pytest.raises(ValueError, match=r"The 'shape' parameter of noise must be .* at most 17179869184 numbers"):
        make(HUGE, key, stream(0, Role.ACTIVATION), dtype, CPU)


@identities
def test_more_noise_for_many_draws_is_refused():
    with pytest.raises(ValueError, match="The 'shape' parameter of noise must be"):
        ops.normals(2, HUGE, Key(0), 0, torch.float32, CPU)


@pytest.mark.equivalence
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_noise_of_several_tensors_is_that_of_each(dtype: torch.dtype) -> None:
    shapes, streams, cpu = [(3,), (40, 7), (1,), ()], [0, 4, 9, 12], torch.device("cpu")
    for key in (noise.Key(5, 2, 3), noise.Key(5, torch.tensor(2), torch.tensor(3))):
        found = noise.normals(shapes, key, streams, dtype, cpu)
        each = [noise.normal(shape, key, stream, dtype, cpu) for shape, stream in zip(shapes, streams, strict=True)]
        assert all(torch.equal(one, other) for one, other in zip(found, each, strict=True))
