"""The operators of torch: their rules, and that eager, vectorised, compiled and exported code has the same numbers."""

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.func import functional_call, grad, jvp, vmap

from bayesbackprop import Bayesian, Categorical, Laplace, LogDensity, Normal, Prior, ScaleMixture, plain_kernels
from bayesbackprop._engine import ops
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop.noise import Key
from engine_parameters import CONSTANTS, CPU, DTYPES, KNOWN_PRIORS, parameters_of

pytestmark = pytest.mark.equivalence

CAUCHY = LogDensity(lambda w: -torch.log1p(w.square()), name="Cauchy")
OPERATORS = torch.ops.bayesbackprop
KEY = Key(seed=2**40 + 7, step=3, draw=5)

# torch's compiler uses deprecated parts of torch.
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def words(key: Key = KEY) -> tuple[Tensor, Tensor]:
    return torch.tensor(key.step), torch.tensor(key.draw)


def by_operator(parameters: Parameters, key: Key) -> tuple[list[Tensor], Tensor]:
    """A draw through the dispatcher of torch, as a compiler calls it."""
    return OPERATORS.draw(*ops._arguments(parameters), key.seed, *words(key))


def graph_calls(graph: torch.fx.Graph) -> Counter[str]:
    """How often a graph calls each operator of the library, by its name."""
    names = (str(node.target) for node in graph.nodes if node.op == "call_function")
    return Counter(name.removesuffix(".default") for name in names if name.startswith("bayesbackprop."))


# --- the rules of the operators ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", [Normal(0.3), ScaleMixture(0.25, 1.0, 0.1), CAUCHY], ids=repr)
def test_torch_accepts_the_draw(prior: Prior, centred: bool, dtype: torch.dtype) -> None:
    parameters = parameters_of(33, prior, dtype, centred=centred, constants=CONSTANTS["every third"], streams=(20, 8))
    arguments = (*ops._arguments(parameters), KEY.seed, *words())
    torch.library.opcheck(OPERATORS.draw, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_torch_accepts_the_backward(centred: bool, dtype: torch.dtype) -> None:
    parameters = parameters_of(33, ScaleMixture(0.25, 1.0, 0.1), dtype, centred=centred, streams=(20, 8))
    with torch.no_grad():
        ws, _ = by_operator(parameters, KEY)
        gradients = [torch.ones_like(w) for w in ws]
        of_cost = torch.tensor(0.5, dtype=dtype)
        mus, rhos, *rest = ops._arguments(parameters)
        detached = [[tensor.detach() for tensor in tensors] for tensors in (mus, rhos)]
        torch.library.opcheck(OPERATORS.draw_backward, (*detached, *rest, ws, gradients, of_cost))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "signs"])
def test_torch_accepts_the_noise(kind: str, dtype: torch.dtype) -> None:
    torch.library.opcheck(getattr(OPERATORS, kind), (*words(), KEY.seed, 20, [3, 11], dtype, CPU))


@pytest.mark.parametrize("kind", ["normal", "signs"])
def test_noise_with_a_key_of_tensors_is_that_with_ints(kind: str) -> None:
    of_ints, of_tensors = (
        getattr(ops, kind)((3, 37), key, 20, torch.float64, CPU) for key in (KEY, Key(KEY.seed, *words()))
    )
    assert torch.equal(of_ints, of_tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("prior", KNOWN_PRIORS, ids=repr)
def test_the_eager_draw_is_the_operator(prior: Prior, centred: bool, dtype: torch.dtype) -> None:
    """Values and gradients, bit by bit; and to rounding those of the equations."""
    parameters = parameters_of(65, prior, dtype, centred=centred, constants=CONSTANTS["every third"], streams=(20, 8))
    results = []
    for draw in (ops.draw, by_operator):
        ws, cost = draw(parameters, KEY)
        loss = sum((w * torch.linspace(-1, 1, 65, dtype=dtype)).sum() for w in ws) + 0.01 * cost
        inputs = [parameters.mus[0], parameters.rhos[0]]
        results.append([*ws, cost, *torch.autograd.grad(loss, inputs)])
    assert results[0][0].grad_fn is not results[1][0].grad_fn
    assert all(torch.equal(eager, other) for eager, other in zip(*results, strict=True))


def test_the_complexity_alone_and_the_weights_alone_have_gradients() -> None:
    """Where the rest of the results has no part in the loss."""
    for wanted in (lambda ws, cost: cost, lambda ws, cost: ws[1].sum()):
        found = []
        parameters = parameters_of(65, Normal(0.3), torch.float64, streams=(20, 8))
        for draw in (ops.draw, by_operator):
            found.append(torch.autograd.grad(wanted(*draw(parameters, KEY)), [*parameters.mus, *parameters.rhos]))
        with plain_kernels():
            expected = torch.autograd.grad(
                wanted(*ops.draw(parameters, KEY)), [*parameters.mus, *parameters.rhos], materialize_grads=True
            )
        for each in found:
            torch.testing.assert_close(each, expected)


def test_a_prior_that_only_python_knows_is_added() -> None:
    results = []
    for context_draw in (ops.draw, ops.reference.draw):
        parameters = parameters_of(65, CAUCHY, torch.float64, centred=True, constants=CONSTANTS["every third"])
        (w,), cost = context_draw(parameters, KEY)
        results.append([w, cost, *torch.autograd.grad(w.square().sum() + cost, parameters.mus + parameters.rhos)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.identities
def test_operators_use_their_memory_again_and_give_it_back_with_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is handed tensors alone: what it may keep is found by them, and keeps none of them."""
    monkeypatch.setattr(ops.cpu, "_LARGE", 0)
    gc.collect()  # what other tests left
    before = len(ops._caches)
    first, second = (parameters_of(65, prior, torch.float64) for prior in (Normal(0.3), Laplace(0.2)))
    places: list[set[int]] = [set(), set()]
    for _ in range(5):
        for parameters, used in zip((first, second), places, strict=True):
            ws, cost = by_operator(parameters, KEY)
            gradients = torch.autograd.grad(ws[0].sum() + cost, parameters.mus + parameters.rhos)
            used |= {tensor.data_ptr() for tensor in (*ws, *gradients)}
            del ws, cost, gradients
    assert [len(used) for used in places] == [3, 3]
    assert not places[0] & places[1]
    assert len(ops._caches) == before + 2
    kept = by_operator(first, KEY)[0]
    values = kept[0].detach().clone()
    other = by_operator(first, KEY._replace(draw=1))[0]
    assert torch.equal(kept[0], values)  # held: not to be used again
    assert not torch.equal(other[0], values)
    del first, second, parameters, kept, other
    gc.collect()
    assert len(ops._caches) == before


def test_the_kernels_are_not_differentiated_twice() -> None:
    parameters = parameters_of(9, Normal(0.3), torch.float64)
    (w,), cost = ops.draw(parameters, KEY)
    with pytest.raises(RuntimeError, match="plain_kernels"):
        torch.autograd.grad(w.sum() + cost, parameters.mus, create_graph=True)
    with plain_kernels():
        (w,), cost = ops.draw(parameters, KEY)
        (first,) = torch.autograd.grad(w.square().sum() + cost, parameters.rhos, create_graph=True)
        assert torch.autograd.grad(first.sum(), parameters.rhos)[0].abs().min() > 0


# --- vmap -------------------------------------------------------------------------------------------------------------


def model_of(prior: Prior | None = None, dtype: torch.dtype = torch.float64) -> Bayesian:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    return Bayesian(net, Categorical(), Normal(0.4) if prior is None else prior, sigma=0.1, seed=3)


def assert_all_equal(found: Any, expected: list[Any]) -> None:
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=0)


@pytest.mark.parametrize("prior", [Normal(0.4), Laplace(0.2), CAUCHY], ids=repr)
def test_vmap_over_the_draws_is_a_loop(prior: Prior) -> None:
    model = model_of(prior)

    def one(index: int | Tensor) -> tuple[Tensor, Tensor]:
        draw = model.draw(2, index)
        return draw.weights["0.weight"], draw.complexity()

    weights, complexities = vmap(one)(torch.arange(4))
    each = [one(index) for index in range(4)]
    assert_all_equal(weights, [weight for weight, _ in each])
    torch.testing.assert_close(complexities, torch.stack([complexity for _, complexity in each]), rtol=1e-14, atol=0)


def test_vmap_over_steps_and_draws_is_a_loop() -> None:
    model = model_of()
    steps, indices = torch.tensor([1, 2, 3]), torch.tensor([4, 0])
    found = vmap(lambda step: vmap(lambda index: model.draw(step, index).weights["2.bias"])(indices))(steps)
    assert found.shape == (3, 2, 3)
    for i, step in enumerate(steps.tolist()):
        assert_all_equal(found[i], [model.draw(step, index).weights["2.bias"] for index in indices.tolist()])


def test_vmap_over_the_inputs_is_a_loop() -> None:
    model, x = model_of(), torch.randn(4, 5).double()
    found = vmap(lambda row: model.draw(2)(row))(x)
    torch.testing.assert_close(found, torch.stack([model.draw(2)(row) for row in x]), rtol=1e-12, atol=1e-12)
    both = vmap(lambda row, index: model.draw(2, index)(row))(x, torch.arange(4))
    expected = torch.stack([model.draw(2, index)(row) for index, row in enumerate(x)])
    torch.testing.assert_close(both, expected, rtol=1e-12, atol=1e-12)


def test_vmap_over_the_parameters_is_a_loop() -> None:
    """An ensemble of posteriors: the means are batched, in any dimension."""
    parameters = parameters_of(20, Normal(0.3), torch.float64)
    _, rhos, centres, streams, priors = ops._arguments(parameters)
    mus = torch.randn(20, 3).double()

    def one(mu: Tensor) -> Tensor:
        (w,), cost = OPERATORS.draw([mu], rhos, centres, streams, priors, KEY.seed, *words())
        return w + cost

    assert_all_equal(vmap(one, in_dims=1)(mus), [one(mu) for mu in mus.unbind(1)])


def test_vmap_over_noise_is_a_loop() -> None:
    for kind in (ops.normal, ops.signs):

        def one(draw: int | Tensor, kind: Callable[..., Tensor] = kind) -> Tensor:
            return kind((3, 37), Key(9, 1, draw), 20, torch.float32, CPU)

        assert_all_equal(vmap(one)(torch.arange(5)), [one(draw) for draw in range(5)])


def test_backward_through_vmap_is_that_of_a_loop() -> None:
    model, x = model_of(), torch.randn(6, 5).double()

    def loss(index: int | Tensor) -> Tensor:
        draw = model.draw(1, index)
        return draw(x).square().mean() + draw.complexity() / 40

    found = torch.autograd.grad(vmap(loss)(torch.arange(3)).sum(), [*model.parameters()])
    expected = torch.autograd.grad(sum(loss(index) for index in range(3)), [*model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class LossOfDraw(nn.Module):
    def __init__(self, model: Bayesian, x: Tensor) -> None:
        super().__init__()
        self.model, self.x = model, x

    def forward(self, index: int | Tensor) -> Tensor:
        draw = self.model.draw(1, index)
        return draw(self.x).square().mean() + draw.complexity() / 40


@compiles
@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
def test_derivatives_by_function(estimator: str) -> None:
    """``grad``, ``vmap`` over ``grad``, and ``jvp``, for which the plain equations run."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model = Bayesian(net, Categorical(), Normal(0.4), sigma=0.1, estimator=estimator, seed=3)
    loss = LossOfDraw(model, torch.randn(6, 5).double())
    named = {name: parameter.detach() for name, parameter in loss.named_parameters()}

    def value(values: dict[str, Tensor], index: int | Tensor) -> Tensor:
        return functional_call(loss, values, (index,))

    together = vmap(grad(value), in_dims=(None, 0))(named, torch.arange(3))
    for index in range(3):
        expected = [*torch.autograd.grad(loss(index), [*loss.parameters()])]
        torch.testing.assert_close([each[index] for each in together.values()], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close([*grad(value)(named, index).values()], expected, rtol=1e-10, atol=1e-10)
        tangents = {name: torch.ones_like(parameter) for name, parameter in named.items()}
        _, slope = jvp(lambda values, index=index: value(values, index), (named,), (tangents,))
        torch.testing.assert_close(slope, sum(each.sum() for each in expected), rtol=1e-10, atol=1e-10)


# --- torch.compile and torch.export -----------------------------------------------------------------------------------


class OfDraw(nn.Module):
    """A network at a draw, and its complexity: a function of the input, the step and the index."""

    def __init__(self, model: Bayesian) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, step: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        draw = self.model.draw(step, index)
        return draw(x), draw.complexity()


@compiles
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_draws_are_one_node(dtype: torch.dtype) -> None:
    model, x = model_of(dtype=dtype), torch.randn(6, 5, dtype=dtype)
    forward: list[Counter[str]] = []
    backward: list[Counter[str]] = []

    def note(calls: list[Counter[str]]) -> Callable[..., Any]:
        def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
            calls.append(graph_calls(module.graph))
            return make_boxed_func(module.forward)

        return compiler

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=note(forward), bw_compiler=note(backward))
    compiled = torch.compile(OfDraw(model), fullgraph=True, backend=backend)
    accuracy = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for step, index in ((1, 0), (2, 7)):
        output, complexity = compiled(x, torch.tensor(step), torch.tensor(index))
        found = torch.autograd.grad(output.square().sum() + complexity, [*model.parameters()])
        draw = model.draw(step, index)
        expected_output = draw(x)
        expected = torch.autograd.grad(expected_output.square().sum() + draw.complexity(), [*model.parameters()])
        torch.testing.assert_close((output, complexity), (expected_output, draw.complexity()), **accuracy)
        torch.testing.assert_close(found, expected, **accuracy)
    assert forward == [{"bayesbackprop.draw": 1}]
    assert backward == [{"bayesbackprop.draw_backward": 1}]


@compiles
def test_a_compiled_function_of_the_engine_is_one_node() -> None:
    parameters = parameters_of(33, ScaleMixture(), torch.float64, streams=(20, 8))
    seen: list[Counter[str]] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(graph_calls(module.graph))
        return module.forward

    def both(step: Tensor) -> tuple[Tensor, Tensor]:
        (first, second), cost = ops.draw(parameters, Key(3, step, 0))
        return first + second, cost

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend=backend)
    for step in (1, 2):
        torch.testing.assert_close(compiled(torch.tensor(step)), both(step), rtol=0, atol=0)
    assert seen == [{"bayesbackprop.draw": 1}]


@compiles
def test_what_is_compiled_keeps_to_the_kernels() -> None:
    """A compiler has no guard for a context variable: what it compiled must not depend on when it did."""
    parameters = parameters_of(33, Normal(0.3), torch.float64)
    seen: list[Counter[str]] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(graph_calls(module.graph))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda step: ops.draw(parameters, Key(3, step, 0))[0][0], fullgraph=True, backend=backend)
    with plain_kernels():
        inside = compiled(torch.tensor(1))
    assert torch.equal(inside, compiled(torch.tensor(1)))
    assert seen == [{"bayesbackprop.draw": 1}]


@compiles
def test_compiled_noise_is_one_node() -> None:
    seen: list[Counter[str]] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(graph_calls(module.graph))
        return module.forward

    def both(step: Tensor) -> tuple[Tensor, Tensor]:
        key = Key(3, step, 0)
        return ops.normal((33,), key, 20, torch.float32, CPU), ops.signs((33,), key, 20, torch.float32, CPU)

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend=backend)
    for step in (1, 2):
        torch.testing.assert_close(compiled(torch.tensor(step)), both(step), rtol=0, atol=0)
    assert seen == [{"bayesbackprop.normal": 1, "bayesbackprop.signs": 1}]


@compiles
def test_an_exported_draw_is_one_node() -> None:
    model, x = model_of(), torch.randn(6, 5).double()
    program = torch.export.export(OfDraw(model), (x, torch.tensor(1), torch.tensor(0)), strict=False)
    assert graph_calls(program.graph) == {"bayesbackprop.draw": 1}
    run = program.module()
    for step, index in ((1, 0), (2, 7)):
        draw = model.draw(step, index)
        found = run(x, torch.tensor(step), torch.tensor(index))
        torch.testing.assert_close(found, (draw(x), draw.complexity()), rtol=1e-12, atol=1e-12)
