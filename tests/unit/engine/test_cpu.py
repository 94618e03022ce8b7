"""The kernels in C as torch sees them: noise, draws, the table they read, and what they may be given."""

import copy
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Gaussian, Normal, ScaleMixture, noise, plain_kernels
from bayesbackprop._engine import cpu, ops, reference
from bayesbackprop._engine.parameters import Parameter, Parameters
from bayesbackprop.noise import Key, Role, stream
from bayesbackprop.posterior import WeightPosterior
from engine_parameters import CONSTANTS, CPU, DTYPES, parameters_of

pytestmark = pytest.mark.equivalence

SIZES = [0, 1, 3, 31, 32, 33, 1023, 1025, 100_003]
KEY = Key(seed=123456789012345, step=2**31 + 5, draw=9)


def test_the_kernels_are_there() -> None:
    assert cpu.available()


@pytest.mark.identities
def test_a_row_of_the_table_is_defined_in_c_alone() -> None:
    """Python packs what ``_cpu.FIELDS`` says: integers and addresses of 8 bytes, and numbers of 8 bytes."""
    names, letters = zip(*(field.split(":") for field in cpu._cpu.FIELDS.split()), strict=True)
    assert set(letters) == {"q", "d"}
    assert cpu._ROW.size == 8 * len(names)
    prior = ScaleMixture(0.25, 1.0, 0.1)
    parameters = parameters_of(33, prior, torch.float64, streams=(20, 8))
    table = cpu.table(parameters)
    assert table is not None
    for number, which in enumerate((20, 8)):
        packed = cpu._ROW.unpack(table.rows[number * cpu._ROW.size : (number + 1) * cpu._ROW.size])
        row = dict(zip(names, packed, strict=True))
        kind = cpu._cpu.PRIORS.split().index("MIXTURE")
        expected = {"n": 33, "stream": which, "wide": 1, "kind": kind, "a": 0.25, "b": 1.0, "c": 0.1}
        expected |= {name: getattr(parameters.each[number].q, name).data_ptr() for name in ("mu", "rho")}
        assert row == dict.fromkeys(names, 0) | expected


@pytest.mark.identities
def test_a_table_of_another_form_is_refused() -> None:
    for table in (bytes(cpu._ROW.size), bytearray(cpu._ROW.size - 1)):
        with pytest.raises(TypeError, match=rf"rows of {cpu._ROW.size} bytes"):
            cpu._cpu.draw(table, 1, 0, 0, 0, 0.0)
    with pytest.raises(TypeError, match="expected 6 arguments, got 1"):
        cpu._cpu.draw(bytearray())


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_noise_and_signs_are_those_of_the_equations(n: int, dtype: torch.dtype) -> None:
    numbers = stream(4, Role.ACTIVATION)
    accuracy = 1e-12 if dtype == torch.float64 else 5e-4  # near r = 0 the rounding of u1 is magnified
    plain = noise.normal((n,), KEY, numbers, dtype, CPU)
    torch.testing.assert_close(cpu.normal(torch.empty(n, dtype=dtype), KEY, numbers), plain, rtol=0, atol=accuracy)
    signs = cpu.signs(torch.empty(n, dtype=dtype), KEY, numbers)
    assert torch.equal(signs, noise.signs((n,), KEY, numbers, dtype, CPU))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 11), (1025,)])
def test_the_noise_of_many_draws_is_that_of_each(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    together = ops.normals(4, shape, KEY, 6, dtype, CPU)
    one_by_one = [ops.normal(shape, KEY._replace(draw=KEY.draw + k), 6, dtype, CPU) for k in range(4)]
    assert torch.equal(together, torch.stack(one_by_one))
    with plain_kernels():
        plain = ops.normals(4, shape, KEY, 6, dtype, CPU)
    torch.testing.assert_close(together, plain, rtol=0, atol=1e-12 if dtype == torch.float64 else 5e-4)


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("many", [1, 5])
@pytest.mark.parametrize("n", SIZES[1:-1])
def test_many_draws_are_the_draws_one_by_one(n: int, many: int, dtype: torch.dtype) -> None:
    parameters = parameters_of(n, Normal(0.3), dtype, constants=CONSTANTS["every third"], streams=(20, 8))
    together = cpu.draws(parameters, KEY, many)
    assert all(w.shape == (many, n) for w in together)
    for k in range(many):
        ws, _ = cpu.draw(parameters, KEY._replace(draw=KEY.draw + k))
        assert all(torch.equal(w, all_of_it[k]) for w, all_of_it in zip(ws, together, strict=True))
    accuracy = 1e-9 if dtype == torch.float64 else 2e-3  # sigma is up to 3
    with torch.no_grad():
        torch.testing.assert_close(together, reference.draws(parameters, KEY, many), rtol=accuracy, atol=accuracy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variances_are_those_of_the_equations(dtype: torch.dtype) -> None:
    parameters = parameters_of(1025, Normal(0.3), dtype, constants=CONSTANTS["every third"], streams=(20, 8))
    found = ops.variances(parameters)
    with plain_kernels():
        expected = ops.variances(parameters)
    torch.testing.assert_close(found, expected, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=0)
    assert not any(variance[::3].any() for variance in found)


def test_an_ensemble_holds_the_draws_one_by_one() -> None:
    model = Bayesian(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), Categorical(), seed=3)
    kept = model.ensemble(5).weights
    for k in range(5):
        for name, weight in model.draw(index=k).weights.items():
            assert torch.equal(kept[name][k], weight)


def test_the_number_of_threads_changes_nothing() -> None:
    model = Bayesian(nn.Linear(300, 300), Gaussian(1.0), seed=3)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            draw = model.draw(1)
            to_mu, to_rho = torch.autograd.grad(
                draw.weights["weight"].square().sum() + draw.complexity(), [model.net.weight, model.rho.weight]
            )
            results.append([draw.weights["weight"].detach(), draw.complexity().detach(), to_mu, to_rho])
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0], strict=True))


# --- what the kernels may be given ------------------------------------------------------------------------------------


def test_what_is_not_contiguous_is_read_in_its_order() -> None:
    net = nn.Linear(4, 6).double()
    net.weight = nn.Parameter(net.weight.detach().t().contiguous().t())
    model = Bayesian(net, Gaussian(1.0), Normal(0.5), centre="net", seed=3)
    same = Bayesian(copy.deepcopy(net), Gaussian(1.0), Normal(0.5), centre="net", seed=3)
    same.net.weight = nn.Parameter(same.net.weight.detach().contiguous())
    assert not model.engine().parameters.mus[0].is_contiguous()
    assert same.engine().parameters.mus[0].is_contiguous()
    results = []
    for each in (model, same):
        assert ops.has_kernel(each.engine().parameters)
        draw = each.draw(1)
        loss = (draw.weights["weight"] * torch.arange(24.0).reshape(6, 4)).sum() + draw.complexity()
        results.append([draw.weights["weight"], loss, *torch.autograd.grad(loss, [*each.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-14, atol=1e-14)


def test_parameters_may_be_of_several_types() -> None:
    """Each has a type of its own; the complexity has that of the first."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2).double())
    model = Bayesian(net, Gaussian(1.0), Normal(0.5), seed=3)
    results = []
    for twin in (ops.draw, reference.draw):
        parameters = model.engine().parameters
        assert ops.has_kernel(parameters)
        ws, cost = twin(parameters, Key(3, 1))
        assert cost.dtype == torch.float32
        loss = sum(w.double().square().sum() for w in ws) + 0.01 * cost.double()
        results.append([*ws, cost, *torch.autograd.grad(loss, [*model.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["net", "rho", "centre"])
@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[::-1]], ids=str)
def test_a_parameter_of_two_types_is_left_to_the_equations(part: str, dtypes: list[torch.dtype]) -> None:
    """The kernels would read one of its tensors beyond its end."""
    model = Bayesian(nn.Linear(4, 6).to(dtypes[0]), Gaussian(1.0), Normal(0.5), centre="net", seed=3)
    getattr(model, part).to(dtypes[1])
    parameters = model.engine().parameters
    assert not ops.has_kernel(parameters)
    found = model.draw(1)
    with plain_kernels():
        expected = model.draw(1)
        assert torch.equal(found.complexity(), expected.complexity())
        assert torch.equal(found.weights["weight"], expected.weights["weight"])


@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[::-1]], ids=str)
@pytest.mark.parametrize("parts", [["net"], ["rho"], ["net", "rho"]], ids=str)
@pytest.mark.parametrize("layers", [[nn.Linear(300, 40)], [nn.Linear(300, 40), nn.Softmax(1)]], ids=["mlp", "any"])
def test_a_type_changed_before_backward_is_refused(
    layers: list[nn.Module], parts: list[str], dtypes: list[torch.dtype]
) -> None:
    """The weights were drawn in the old type: the kernel would read and write beyond the end of them."""
    net = copy.deepcopy(nn.Sequential(*layers)).to(dtypes[0])
    model = Bayesian(net, Gaussian(1.0), Normal(0.5), seed=3)
    cost = FreeEnergy(model, n=40)(torch.ones(5, 300, dtype=dtypes[0]), torch.ones(5, 40, dtype=dtypes[0]))
    for part in parts:
        getattr(model, part).to(dtypes[1])
    with pytest.raises(RuntimeError, match="was changed after"):
        cost.backward()


@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[::-1]], ids=str)
def test_a_model_converted_before_backward_is_refused(dtypes: list[torch.dtype]) -> None:
    model = Bayesian(nn.Sequential(nn.Linear(300, 40)).to(dtypes[0]), Gaussian(1.0), Normal(0.5), seed=3)
    cost = FreeEnergy(model, n=40)(torch.ones(5, 300, dtype=dtypes[0]), torch.ones(5, 40, dtype=dtypes[0]))
    model.to(dtypes[1])
    with pytest.raises(RuntimeError, match=r"was changed after|modified by an inplace operation"):
        cost.backward()


def test_a_shape_changed_behind_the_models_back_is_refused() -> None:
    model = Bayesian(nn.Linear(4, 6), Gaussian(1.0), Normal(0.5), seed=3)
    model.draw(1).complexity()
    model.net.weight.data = torch.zeros(6, 3)
    with pytest.raises(ValueError, match=r"The 'net' parameter of Bayesian must be .* Got a tensor of shape \[6, 3\]"):
        model.draw(1).complexity()
    centred = Bayesian(nn.Linear(4, 6), Gaussian(1.0), Normal(0.5), centre="net", seed=3)
    centred.draw(1).complexity()
    centred.centre.weight = torch.zeros(2)
    with pytest.raises(ValueError, match=r"The 'centre' parameter of Bayesian must be .* Got a tensor of shape \[2\]"):
        centred.draw(1).complexity()


def test_shapes_changed_together_are_taken() -> None:
    model = Bayesian(nn.Linear(4, 6), Gaussian(1.0), Normal(0.5), seed=3)
    model.draw(1).complexity()
    for tensor in (model.net.weight, model.rho.weight):
        tensor.data = torch.zeros(900, 4)
    found = model.draw(1)
    with plain_kernels():
        torch.testing.assert_close(found.complexity(), model.draw(1).complexity(), rtol=1e-5, atol=1e-5)


def test_a_parameter_without_weights_costs_nothing() -> None:
    empty = torch.empty(0, 3)
    parameters = Parameters({"w": Parameter(WeightPosterior(empty, empty), Normal(1.0), None, 20)})
    (w,), cost = cpu.draw(parameters, KEY)
    assert w.shape == (0, 3)
    assert cost == 0
    assert [change.shape for (change,) in cpu.backward(parameters, [w], [w], 1.0, [w])] == [(0, 3)] * 2


# --- without them -----------------------------------------------------------------------------------------------------


def test_without_the_compiled_kernels_it_works_and_says_so_once() -> None:
    program = """
import sys, warnings
sys.modules["bayesbackprop._engine._cpu"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import bayesbackprop as bbb
    import torch
    model = bbb.Bayesian(torch.nn.Linear(2, 1), bbb.Gaussian(1.0), seed=0)
    cost = bbb.FreeEnergy(model, n=4)(torch.ones(4, 2), torch.ones(4, 1))
    cost.backward()
    model.predict(torch.ones(1, 2), draws=3)
assert [str(w.message)[:49] for w in caught] == ["bayesbackprop was installed without its compiled "], caught
print(float(cost.complexity))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) != 0


def test_a_step_costs_no_multiple_of_a_plain_one() -> None:
    """A coarse guard: the benchmarks measure, this only notices when the fast path is not taken at all."""
    x, y = torch.randn(128, 784), torch.randint(10, (128,))
    sizes = [(784, 400), (400, 400), (400, 10)]
    plain, bayesian = (nn.Sequential(*[nn.Linear(*size) for size in sizes]) for _ in range(2))
    free_energy = FreeEnergy(Bayesian(bayesian, Categorical(), seed=0), n=1000)
    ratios = []
    for _ in range(15):
        start = time.perf_counter()
        nn.functional.cross_entropy(plain(x), y).backward()
        middle = time.perf_counter()
        free_energy(x, y).backward()
        ratios.append((time.perf_counter() - middle) / (middle - start))
    assert sorted(ratios)[7] < 4


@pytest.mark.parametrize("net", [nn.Sequential(nn.Linear(300, 1)), nn.Sequential(nn.Dropout(0.0), nn.Linear(300, 1))])
@pytest.mark.parametrize("part", ["mu", "rho"])
def test_data_replaced_before_backward_are_noticed(net: nn.Module, part: str) -> None:
    """Once or twice: the memory that was there first is held, so that new data never come to stand at its address."""
    for times in (1, 2, 3):
        model = Bayesian(net, Gaussian(1.0), seed=0)
        cost = FreeEnergy(model, n=40)(torch.randn(2, 300), torch.randn(2, 1))
        parameter = getattr(next(iter(model.posterior.values())), part)
        for _ in range(times):
            parameter.data = parameter.data * 2
        with pytest.raises(RuntimeError, match="compute the cost again before backward"):
            cost.backward()
