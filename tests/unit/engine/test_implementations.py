"""The three implementations of the draw and of its backward, in C, in Triton and in equations: one table of tests."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bayesbackprop import Laplace, Normal, Prior, ScaleMixture, complexity
from bayesbackprop._engine import cpu, reference
from bayesbackprop._engine.parameters import KNOWN_PRIORS as KNOWN_KINDS
from bayesbackprop._engine.parameters import PRIOR_KINDS, Parameters, prior_numbers
from bayesbackprop.noise import Key
from bayesbackprop.posterior import initial_rho
from engine_parameters import CONSTANTS, DTYPES, KNOWN_PRIORS, UNKNOWN_PRIOR, parameters_of, rounding_of_constants

pytestmark = pytest.mark.equivalence

KEY = Key(seed=2**40 + 7, step=3, draw=5)
CLOSED_PRIORS = [Normal(0.7), Laplace(0.4)]


class Implementation(NamedTuple):
    """``draw(parameters, key)`` and ``backward(parameters, ws, gradients, complexity_gradient)``."""

    draw: Callable[[Parameters, Key], tuple[list[Tensor], float | Tensor]]
    backward: Callable[[Parameters, Sequence[Tensor], Sequence[Tensor], float], tuple[list[Tensor], list[Tensor]]]
    most: int  # weights to try it with: more than it takes at a time, and not so many that it takes long


def in_c() -> Implementation:
    def backward(parameters: Parameters, ws: Any, gradients: Any, factor: float) -> Any:
        return cpu.backward(parameters, ws, gradients, factor, to_mu=[torch.empty_like(w) for w in ws])

    return Implementation(cpu.draw, backward, most=9000)


def in_equations() -> Implementation:
    return Implementation(reference.draw, reference.backward, most=9000)


def in_triton() -> Implementation:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU, test_triton compares the kernels with the equations")
    from bayesbackprop._engine import ops

    return Implementation(ops._on_gpu, ops._backward_on_gpu, most=1100)


IMPLEMENTATIONS = {"C": in_c, "Triton": in_triton}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Implementation:
    """Those that are compared with the equations; Triton's under its interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return IMPLEMENTATIONS[request.param]()


# The interpreter is slow, and the kernels of Triton know no blocks of weights that are all constant or all random.
CASES = [("C", "none"), ("C", "every third"), ("C", "all"), ("Triton", "every third")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("implementation", "constants"), CASES, indirect=["implementation"])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", [*KNOWN_PRIORS, ScaleMixture(), UNKNOWN_PRIOR], ids=repr)
def test_draw_and_backward_are_those_of_the_equations(
    implementation: Implementation, prior: Prior, centred: bool, constants: str, dtype: torch.dtype
) -> None:
    """To the rounding of the type; the backward at the same weights, since a spike magnifies the rounding of them."""
    n = 600
    parameters = parameters_of(n, prior, dtype, centred=centred, constants=CONSTANTS[constants], streams=(20, 8))
    equations = in_equations()
    with torch.no_grad():
        ws, cost = implementation.draw(parameters, KEY)
        expected_ws, expected_cost = equations.draw(parameters, KEY)
    accuracy = 1e-9 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(list(ws), expected_ws, rtol=accuracy, atol=accuracy)
    of_constants = rounding_of_constants(2 * n, prior, dtype)
    torch.testing.assert_close(float(cost), float(expected_cost), rtol=accuracy, atol=accuracy + of_constants)

    gradients = [torch.linspace(-1, 1, n, dtype=dtype), torch.linspace(2, 0, n, dtype=dtype)]
    with torch.no_grad():
        found = implementation.backward(parameters, ws, gradients, 0.01)
        expected = equations.backward(parameters, ws, gradients, 0.01)
    accuracy = 1e-9 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close([list(each) for each in found], [*expected], rtol=accuracy, atol=accuracy)
    assert {tensor.dtype for each in found for tensor in each} == {dtype}


def test_the_complexity_uses_the_noise_that_was_drawn(implementation: Implementation) -> None:
    """At sigma 1e-8 a float32 near 1 does not move: from w - mu alone, half a nat of each weight would be lost."""
    n = 1000
    parameters = parameters_of(n, Normal(1.0), torch.float32)
    with torch.no_grad():
        parameters.mus[0].copy_(torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0))
        parameters.rhos[0].copy_(initial_rho(parameters.mus[0], 1e-8))
        ws, cost = implementation.draw(parameters, KEY)
        expected_ws, expected = in_equations().draw(parameters, KEY)
    assert torch.equal(ws[0], parameters.mus[0])
    assert torch.equal(ws[0], expected_ws[0])
    assert float(cost) == pytest.approx(float(expected), abs=1e-3 * n)
    assert float(cost) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("prior", [Normal(0.3), Laplace(0.2), ScaleMixture()], ids=repr)
def test_a_nan_is_seen(implementation: Implementation, prior: Prior) -> None:
    for spoil in (0, 1):  # mu, rho
        parameters = parameters_of(40, prior, torch.float32)
        with torch.no_grad():
            parameters.each[0].q[spoil][3] = torch.nan
            ws, cost = implementation.draw(parameters, KEY)
            (to_mu,), (to_rho,) = implementation.backward(parameters, ws, [torch.ones(40)], 1.0)
        for tensor in (ws[0], to_mu, to_rho):
            assert tensor.isnan().nonzero().flatten().tolist() == [3]
        assert float(cost) != float(cost)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", CLOSED_PRIORS, ids=repr)
@pytest.mark.parametrize("size", [1, 31, 300, 9000])
def test_the_closed_form(
    implementation: Implementation, size: int, prior: Prior, centred: bool, constants: str, dtype: torch.dtype
) -> None:
    """The weights of any draw, the KL in place of the sampled complexity, and the gradients of both."""
    n = min(size, implementation.most)
    sampled = parameters_of(n, prior, dtype, centred=centred, constants=CONSTANTS[constants])
    parameters = sampled.in_closed_form()
    assert parameters is not None
    key, generator = Key(3, 5, 7), torch.Generator().manual_seed(n)
    with torch.no_grad():
        ws, cost = implementation.draw(parameters, key)
        assert torch.equal(ws[0], implementation.draw(sampled, key)[0][0])
        plain, expected = reference.draw(parameters, key)
    accuracy = {"rtol": 2e-5, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(ws, plain, **accuracy)
    p = parameters.each[0]
    torch.testing.assert_close(expected, complexity.closed(p.q, p.prior, p.centre).detach())
    of_constants = rounding_of_constants(n, p.prior, dtype)
    assert float(cost) == pytest.approx(float(expected), rel=accuracy["rtol"], abs=of_constants)
    gradient = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        found = implementation.backward(parameters, ws, [gradient], 0.3)
        wanted = reference.backward(parameters, ws, [gradient], 0.3)
    torch.testing.assert_close([list(each) for each in found], [*wanted], **accuracy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_closed_forms_of_several_priors(implementation: Implementation, dtype: torch.dtype) -> None:
    """Each parameter has its own: the complexity is the sum of theirs, and the gradients are theirs."""
    alone = [parameters_of(n, prior, dtype, centred=True) for n, prior in ((40, Normal(0.7)), (300, Laplace(0.4)))]
    both = Parameters({str(n): each.each[0] for n, each in enumerate(alone)}).in_closed_form()
    assert both is not None
    with torch.no_grad():
        ws, cost = implementation.draw(both, KEY)
        gradients = [torch.linspace(-1, 1, len(w), dtype=dtype) for w in ws]
        found = implementation.backward(both, ws, gradients, 0.3)
        each = [each.in_closed_form() for each in alone]
        costs = [implementation.draw(one, KEY)[1] for one in each]
        expected = [implementation.backward(one, [w], [g], 0.3) for one, w, g in zip(each, ws, gradients, strict=True)]
    assert float(cost) == pytest.approx(sum(map(float, costs)), rel=1e-6)
    for number, one in enumerate(expected):
        for together, apart in zip(found, one, strict=True):
            assert torch.equal(together[number], apart[0])


@pytest.mark.identities
def test_other_priors_have_no_closed_form_in_the_kernels() -> None:
    assert parameters_of(5, UNKNOWN_PRIOR, torch.float32).in_closed_form() is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("constants", ["none", "every third", "all"])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", [each for each in KNOWN_PRIORS if isinstance(each, ScaleMixture)], ids=repr)
@pytest.mark.parametrize("spread", [None, -2.0])
def test_the_closed_form_of_mixtures_in_c(
    spread: float | None, prior: Prior, centred: bool, constants: str, dtype: torch.dtype
) -> None:
    """As the equations, where sigma is narrow or wide and where all of a block are wide; in float32 the Gaussians of
    the bump nearly cancel."""
    n = 9000
    parameters = parameters_of(n, prior, dtype, centred=centred, constants=CONSTANTS[constants]).in_closed_form()
    assert parameters is not None
    q = parameters.each[0].q
    with torch.no_grad():
        if spread is not None:
            q.rho[q.random] = spread
        q.mu[::2] *= 0.01
        ws, cost = cpu.draw(parameters, KEY)
        _, expected = reference.draw(parameters, KEY)
        gradient = torch.linspace(-1, 1, n, dtype=dtype)
        found = cpu.backward(parameters, ws, [gradient], 0.3, to_mu=[torch.empty_like(gradient)])
        wanted = reference.backward(parameters, ws, [gradient], 0.3)
    exact = dtype is torch.float64
    at_most = rounding_of_constants(n, prior, dtype)
    assert float(cost) == pytest.approx(float(expected), rel=1e-12 if exact else 2e-5, abs=at_most)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            one[0],
            other[0],
            rtol=1e-10 if exact else 2e-3,
            atol=(1e-12 if exact else 1e-3) * float(other[0].abs().max()),
        )


@pytest.mark.identities
def test_the_priors_have_one_numbering() -> None:
    """cpu.c names them, parameters.py numbers them, and Triton's constants are these numbers."""
    names = cpu._cpu.PRIORS.split()
    assert {name for name, _ in KNOWN_KINDS.values()} < set(names)
    assert set(names) == set(PRIOR_KINDS)
    for prior in KNOWN_PRIORS:
        kind, *_ = prior_numbers(prior)
        assert PRIOR_KINDS[kind] == KNOWN_KINDS[type(prior)][0]
        assert names[cpu._KINDS[kind]] == PRIOR_KINDS[kind]
    for prior in CLOSED_PRIORS:
        kind, *numbers = prior_numbers(prior, closed=True)
        assert PRIOR_KINDS[kind] == f"{KNOWN_KINDS[type(prior)][0]}_KL"
        assert numbers == [*prior_numbers(prior)[1:]]


@pytest.mark.identities
def test_triton_has_the_same_numbering(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from bayesbackprop._engine import triton

    assert [getattr(triton, name) for name in PRIOR_KINDS] == [*range(len(PRIOR_KINDS))]
