"""Stacks of layers without autograd, against autograd and against the plain equations, with the same noise.

And what is more than a stack: it must not be taken for one.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bayesbackprop._engine.stack import Stack
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import prune

from bayesbackprop import (
    Bayesian,
    Bernoulli,
    Categorical,
    Cost,
    FreeEnergy,
    Gaussian,
    Likelihood,
    LogLikelihood,
    Normal,
    ScaleMixture,
)
from bayesbackprop import _engine as kernels
from opaque import Opaque

pytestmark = pytest.mark.equivalence

DTYPES = [torch.float32, torch.float64]
FUNCTIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that went through a stack."""
    sizes: list[int] = []
    forward = Stack.forward

    def spy(self: Stack, ws: Any, x: Tensor) -> list[Tensor]:
        sizes.append(len(x))
        return forward(self, ws, x)

    monkeypatch.setattr(Stack, "forward", spy)
    return sizes


class Cauchy(Gaussian):
    """A user's own: of its parent it keeps all but the log-probability."""

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return -torch.log1p((output - target).square()).sum(1) - target.shape[1] * math.log(math.pi)


def student(output: Tensor, target: Tensor) -> Tensor:
    return torch.distributions.StudentT(3.0, output).log_prob(target).sum(1)


def classes(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(4, (batch,))


def bits(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(2, (batch, 4))


def numbers(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, 4, dtype=dtype)


def half(batch: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, 2, dtype=dtype)


Targets = Callable[[int, torch.dtype], Tensor]
LIKELIHOODS: dict[str, tuple[Callable[[], Likelihood], Targets]] = {
    "categorical": (Categorical, classes),
    "bernoulli": (Bernoulli, bits),
    "gaussian": (lambda: Gaussian(0.3), numbers),
    "learnt": (lambda: Gaussian("learnt", initial=0.7), numbers),
    "per-input": (lambda: Gaussian("per-input"), half),
    "function": (lambda: LogLikelihood(student), numbers),
    "own": (lambda: Cauchy(0.3), numbers),
}


def net_of(sizes: list[int], function: str = "tanh", bias: bool = True, last: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(before, after, bias=bias), FUNCTIONS[function]()]
        if number == len(sizes) - 2 and not last:
            layers.pop()
    return nn.Sequential(*layers)


def bayesian(net: nn.Module, likelihood: Likelihood, **options: Any) -> Bayesian:
    return Bayesian(net, likelihood, options.pop("prior", Normal(0.4)), sigma=0.1, seed=7, **options)


def twins(net: nn.Module, likelihood: Likelihood, **options: Any) -> Iterator[tuple[Bayesian, Any]]:
    """As a stack, through autograd, and plain; in this order, each with the context to run it in."""
    for wrap, context in ((lambda net: net, nullcontext), (Opaque, nullcontext), (lambda net: net, kernels.plain)):
        yield bayesian(wrap(copy.deepcopy(net)), copy.deepcopy(likelihood), **options), context()


def by_backward(cost: Cost, model: Bayesian) -> list[Tensor]:
    cost.backward()
    return gradients(model)


def by_total(cost: Cost, model: Bayesian) -> list[Tensor]:
    cost.total.backward()
    return gradients(model)


def by_grad(cost: Cost, model: Bayesian) -> list[Tensor]:
    found = torch.autograd.grad(cost.total, [*model.parameters()])
    assert all(parameter.grad is None for parameter in model.parameters())
    return [*found]


def gradients(model: Bayesian) -> list[Tensor]:
    """As they are, and gone from the model."""
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert all(gradient is not None for gradient in found)
    return found  # type: ignore[return-value]


def assert_same(stack: Any, others: list[Any], dtype: torch.dtype) -> None:
    accuracy = 1e-10 if dtype == torch.float64 else 1e-4
    for other in others:
        torch.testing.assert_close(stack, other, rtol=accuracy, atol=accuracy)


# sizes, function, bias, whether an activation is last, batch, draws
SHAPES = [
    ([3, 4], "relu", True, False, 1, 1),
    ([3, 4], "sigmoid", False, True, 7, 1),
    ([3, 5, 4], "tanh", True, False, 1, 3),
    ([1, 1, 4], "relu", False, False, 5, 1),
    ([2, 7, 1, 4], "sigmoid", True, False, 9, 2),
    ([3, 5, 6, 4], "tanh", False, True, 33, 1),
    ([5, 3, 1, 2, 4], "relu", True, True, 3, 1),
    ([2, 3, 5, 7, 4], "tanh", True, False, 17, 2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_stack_is_the_network(likelihood: str, shape: Any, dtype: torch.dtype, taken: list[int]) -> None:
    sizes, function, bias, last, batch, draws = shape
    make, targets = LIKELIHOODS[likelihood]
    x, y = torch.randn(batch, sizes[0], dtype=dtype), targets(batch, dtype)
    results = []
    for model, context in twins(net_of(sizes, function, bias, last).to(dtype), make().to(dtype)):
        with context:
            cost = FreeEnergy(model, n=40, draws=draws)(x, y)
            found = by_backward(cost, model)
        results.append([*(part.detach() for part in cost), *found])
    assert_same(results[0], results[1:], dtype)
    assert taken == [batch] * draws  # the first twin, and it alone
    assert all(gradient.abs().max() > 0 for gradient in results[0][4:])


@pytest.mark.parametrize("take", [by_backward, by_total, by_grad])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_every_way_to_the_gradients(likelihood: str, take: Any, taken: list[int]) -> None:
    make, targets = LIKELIHOODS[likelihood]
    x, y = torch.randn(5, 3).double(), targets(5, torch.float64)
    results = []
    for model, context in twins(net_of([3, 6, 4]).double(), make().double(), prior=ScaleMixture()):
        with context:
            results.append(take(FreeEnergy(model, n=40, draws=2)(x, y), model))
    assert_same(results[0], results[1:], torch.float64)
    assert len(taken) == 2


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("likelihood", ["categorical", "learnt"])
def test_gradients_of_the_parts_and_of_sums_of_them(likelihood: str, draws: int) -> None:
    make, targets = LIKELIHOODS[likelihood]
    x, y = torch.randn(5, 3).double(), targets(5, torch.float64)
    results = []
    for model, context in twins(net_of([3, 6, 4]).double(), make().double()):
        with context:
            cost = FreeEnergy(model, n=40, draws=draws)(x, y)
            loss = 2 * cost.total.square() - 3 * cost.likelihood + 0.1 * cost.complexity
            found = [*torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)]
            weights = [*model.net.parameters()]
            found += torch.autograd.grad(cost.likelihood, weights, retain_graph=True)
            found += torch.autograd.grad(cost.complexity, weights, retain_graph=True)
            results.append(found)
    assert_same(results[0], results[1:], torch.float64)


@pytest.mark.parametrize("likelihood", ["gaussian", "learnt", "function"])
def test_gradients_add_up(likelihood: str) -> None:
    """Over two minibatches, and over two passes through one with ``retain_graph``."""
    make, targets = LIKELIHOODS[likelihood]
    x, y = torch.randn(6, 3).double(), targets(6, torch.float64)
    results = []
    for model, context in twins(net_of([3, 6, 4]).double(), make().double()):
        with context:
            free_energy = FreeEnergy(model, n=40)
            for rows in (slice(0, 2), slice(2, 6)):
                free_energy(x[rows], y[rows]).backward()
            both = gradients(model)
            cost = free_energy(x, y)
            cost.backward(retain_graph=True)
            once = [parameter.grad.clone() for parameter in model.parameters()]
            cost.backward()
            twice = gradients(model)
            for _ in range(2):
                free_energy(x, y).total.backward()
            totals = gradients(model)
        torch.testing.assert_close(twice, [2 * gradient for gradient in once])
        results.append([*both, *once, *totals])
    assert_same(results[0], results[1:], torch.float64)


def test_the_noise_of_two_draws_is_not_the_same() -> None:
    """The mean of the gradients of each draw: nothing of one is left in the other."""
    x, y = torch.randn(6, 3).double(), torch.randn(6, 4).double()
    model = bayesian(net_of([3, 6, 4]).double(), Gaussian(0.3))
    found = by_backward(FreeEnergy(model, n=40, draws=2)(x, y), model)
    expected = []
    for index in range(2):
        draw = model.draw(1, index)
        loss = model.likelihood.cost(draw(x), y) + draw.complexity() / 40
        expected.append(torch.autograd.grad(loss, [*model.parameters()]))
    torch.testing.assert_close(found, [(a + b) / 2 for a, b in zip(*expected, strict=True)])


def test_inputs_that_are_views(taken: list[int]) -> None:
    whole = torch.randn(5, 12).double()
    y = torch.randint(4, (5,))
    for x in (whole[:, ::4], whole[:, 3:6], torch.randn(3, 5).double().t(), torch.randn(1, 3).double().expand(5, 3)):
        results = []
        for model, context in twins(net_of([3, 6, 4]).double(), Categorical()):
            with context:
                results.append(by_backward(FreeEnergy(model, n=40)(x, y), model))
        assert_same(results[0], results[1:], torch.float64)
    assert len(taken) == 4


def test_what_the_network_does_not_use_has_the_gradient_of_its_complexity(taken: list[int]) -> None:
    net = net_of([3, 4]).double()
    net.register_parameter("unused", nn.Parameter(torch.randn(3).double()))
    x, y = torch.randn(5, 3).double(), torch.randint(4, (5,))
    results = []
    for context in (nullcontext(), kernels.plain()):
        model = bayesian(copy.deepcopy(net), Categorical())
        with context:
            results.append(by_backward(FreeEnergy(model, n=40)(x, y), model))
    assert taken == [5]
    assert_same(results[0], results[1:], torch.float64)


@pytest.mark.parametrize("wrap", [lambda net: net, Opaque], ids=["stack", "autograd"])
def test_without_data_only_the_complexity_remains(wrap: Any) -> None:
    """A likelihood that no weight has a part in."""
    x, y = torch.randn(5, 3).double(), torch.randn(5, 4).double()
    nothing = LogLikelihood(lambda output, target: target.new_zeros(len(target)))
    for take in (by_backward, by_total, by_grad):
        model = bayesian(wrap(net_of([3, 4]).double()), nothing)
        found = take(FreeEnergy(model, n=40)(x, y), model)
        expected = torch.autograd.grad(model.draw(1).complexity() / 40, [*model.parameters()])
        torch.testing.assert_close(found, [*expected])


# --- what is not a stack ----------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Shifted(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def tied() -> nn.Sequential:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


def tied_weights() -> nn.Sequential:
    net = net_of([3, 3, 3])
    net[2].weight = net[0].weight
    return net


def pruned() -> nn.Sequential:
    net = net_of([3, 4, 3])
    prune.l1_unstructured(net[0], "weight", amount=5)
    return net


def normed() -> nn.Sequential:
    net = net_of([3, 4, 3])
    nn.utils.parametrizations.weight_norm(net[0])
    return net


def kept_constant() -> nn.Sequential:
    net = net_of([3, 4, 3])
    weight = net[0].weight.detach()
    del net[0].weight
    net[0].register_buffer("weight", weight)
    return net


def frozen() -> nn.Sequential:
    net = net_of([3, 4, 3])
    net[0].requires_grad_(False)
    return net


OTHER_NETS: dict[str, Callable[[], nn.Module]] = {
    "a linear layer alone": lambda: nn.Linear(3, 3),
    "subclassed layer": lambda: nn.Sequential(Doubled(3, 4), nn.ReLU(), nn.Linear(4, 3)),
    "subclassed sequential": lambda: Shifted(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)),
    "nested": lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 3))),
    "activation first": lambda: nn.Sequential(nn.Tanh(), nn.Linear(3, 3)),
    "two activations": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.ReLU(), nn.Linear(4, 3)),
    "another function": lambda: nn.Sequential(nn.Linear(3, 4), nn.ELU(), nn.Linear(4, 3)),
    "softmax last": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Softmax(1)),
    "tied layers": tied,
    "tied weights": tied_weights,
    "frozen layer": frozen,
    "pruned": pruned,
    "weight norm": normed,
    "buffer for a weight": kept_constant,
}


@pytest.mark.parametrize("name", OTHER_NETS)
def test_networks_that_are_no_stacks(name: str, taken: list[int]) -> None:
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()

    def make() -> Bayesian:
        torch.manual_seed(5)
        return bayesian(OTHER_NETS[name]().double(), Gaussian(0.3))

    compare(make, x, y)
    assert not taken


def test_networks_that_are_no_stacks_for_other_reasons(taken: list[int]) -> None:
    net = net_of([3, 4, 3]).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    for options in (
        {"select": lambda name, module: name.startswith("2.")},
        {"select": lambda name, module: not name.endswith("bias")},
        {"estimator": "local"},
        {"estimator": {"0.*": "flipout", "*": "shared"}},
    ):
        compare(lambda options=options: bayesian(copy.deepcopy(net), Gaussian(0.3), **options), x, y)

    def freeze_afterwards() -> Bayesian:
        model = bayesian(copy.deepcopy(net), Gaussian(0.3))
        model.net[0].weight.requires_grad_(False)
        return model

    compare(freeze_afterwards, x, y)
    assert not taken


def compare(make: Callable[[], Bayesian], x: Any, y: Any, accuracy: float = 1e-9) -> None:
    """Cost and gradients, fused and plain."""
    results: list[dict[str, Tensor | None]] = []
    for context in (nullcontext(), kernels.plain()):
        model = make()
        with context:
            cost = FreeEnergy(model, n=40)(x, y)
            cost.backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()} | {"total": cost.total})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert (value is None) == (results[1][name] is None)
        if value is not None:
            torch.testing.assert_close(value, results[1][name], rtol=accuracy, atol=accuracy)


HOOKS = {
    "forward": lambda module, called: module.register_forward_hook(lambda *args: (called.append(0), args[2] * 2)[1]),
    "pre": lambda module, called: module.register_forward_pre_hook(lambda *args: (called.append(0), args[1][0] * 2)[1]),
    "backward": lambda module, called: module.register_full_backward_hook(lambda *args: called.append(0)),
    "pre-backward": lambda module, called: module.register_full_backward_pre_hook(lambda *args: called.append(0)),
    "global forward": lambda _, called: modules.register_module_forward_hook(lambda *args: called.append(0)),
    "global backward": lambda _, called: modules.register_module_full_backward_hook(lambda *args: called.append(0)),
}


@pytest.mark.parametrize("where", ["net", "linear", "function"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:For backward hooks to be called")
def test_hooks_are_called(hook: str, where: str, taken: list[int]) -> None:
    """Also those that come after the first step, and only until they go."""
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    net = net_of([3, 4, 3]).double()
    called: list[int] = []
    handles = []

    def make() -> Bayesian:
        model = bayesian(copy.deepcopy(net), Gaussian(0.3))
        FreeEnergy(model, n=40)(x, y).backward()
        model.zero_grad()
        module = {"net": model.net, "linear": model.net[2], "function": model.net[1]}[where]
        handles.append(HOOKS[hook](module, called))
        return model

    try:
        compare(make, x, y)
        assert len(called) >= 2
        assert len(taken) <= 2  # the first steps
    finally:
        for handle in handles:
            handle.remove()
    before = len(called), len(taken)
    compare(lambda: bayesian(net, Gaussian(0.3)), x, y)
    assert (len(called), len(taken)) == (before[0], before[1] + 1)


@pytest.mark.parametrize("where", [None, 0, 1])
def test_a_forward_of_its_own_is_called(where: int | None, taken: list[int]) -> None:
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    net = net_of([3, 4, 3]).double()

    def make() -> Bayesian:
        model = bayesian(copy.deepcopy(net), Gaussian(0.3))
        module = model.net if where is None else model.net[where]
        forward = module.forward
        module.forward = lambda x: forward(x).cos()
        return model

    compare(make, x, y)
    assert not taken


def replace_function(net: nn.Sequential) -> None:
    net[1] = nn.Sigmoid()


def replace_by_another(net: nn.Sequential) -> None:
    net[1] = nn.GELU()


def replace_layer(net: nn.Sequential) -> None:
    net[2] = nn.Linear(4, 3).double()


def replace_weight(net: nn.Sequential) -> None:
    net[2].weight = nn.Parameter(torch.ones_like(net[2].weight))


def append(net: nn.Sequential) -> None:
    net.append(nn.Tanh())


def remove(net: nn.Sequential) -> None:
    del net[3]


@pytest.mark.parametrize(
    "change", [replace_function, replace_by_another, replace_layer, replace_weight, append, remove]
)
def test_a_network_changed_after_wrapping(change: Callable[[nn.Sequential], None]) -> None:
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    net = net_of([3, 4, 3], last=True).double()

    def make() -> Bayesian:
        model = bayesian(copy.deepcopy(net), Gaussian(0.3))
        FreeEnergy(model, n=40)(x, y).backward()
        model.zero_grad()
        torch.manual_seed(5)
        change(model.net)
        return model

    compare(make, x, y)


INPUTS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "1-D": (lambda: torch.randn(3).double(), (3,)),
    "3-D": (lambda: torch.randn(5, 2, 3).double(), (5, 2, 3)),
    "keyword": (lambda: {"input": torch.randn(5, 3).double()}, (5, 3)),
    "sparse": (lambda: torch.eye(3).double()[[0, 2, 1, 1, 0]].mul(2.5).to_sparse(), (5, 3)),
    "a subclass": (lambda: nn.Parameter(torch.randn(5, 3).double(), requires_grad=False), (5, 3)),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_that_a_stack_does_not_take(kind: str, taken: list[int]) -> None:
    make, shape = INPUTS[kind]
    net = net_of([3, 4, 3]).double()
    compare(lambda: bayesian(copy.deepcopy(net), Gaussian(0.3)), make(), torch.randn(*shape).double())
    assert not taken


def test_a_stack_takes_one_tensor() -> None:
    net = net_of([3, 4])
    stack, x = bayesian(net, Categorical()).layout().parameters.stack, torch.randn(5, 3)
    assert stack is not None
    assert stack.takes((x,), {}, torch.float32)
    for args, kwargs in (((), {"input": x}), ((x, x), {}), ((x,), {"scale": 2}), ((), {}), (([x],), {})):
        assert not stack.takes(args, kwargs, torch.float32)


def test_inputs_of_another_type_are_refused_as_torch_does(taken: list[int]) -> None:
    model = bayesian(net_of([3, 4, 3]), Gaussian(0.3))
    for x in (torch.randn(5, 3).double(), torch.ones(5, 3).half(), torch.ones(5, 3, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="dtype"):
            FreeEnergy(model, n=40)(x, torch.randn(5, 3))
    assert not taken
    FreeEnergy(model, n=40)(torch.randn(5, 3), torch.randn(5, 3)).backward()
    assert taken == [5]


def test_the_type_of_the_model_may_change(taken: list[int]) -> None:
    model = bayesian(net_of([3, 4, 3]), Gaussian(0.3))
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    single = by_backward(FreeEnergy(model, n=40)(x, y), model)
    double = by_backward(FreeEnergy(model.double(), n=40)(x.double(), y.double()), model)
    assert all(gradient.dtype == torch.float64 for gradient in double)
    torch.testing.assert_close(single, [gradient.float() for gradient in double], rtol=1e-3, atol=1e-3)
    assert len(taken) == 2


def test_the_gradient_of_the_input(taken: list[int]) -> None:
    found = []
    y = torch.randn(5, 3).double()
    start = torch.randn(5, 3).double()
    for model, context in twins(net_of([3, 4, 3]).double(), Gaussian(0.3)):
        x = start.clone().requires_grad_()
        with context:
            FreeEnergy(model, n=40)(x, y).backward()
        found.append([x.grad, *gradients(model)])
    assert not taken
    assert_same(found[0], found[1:], torch.float64)


def test_autocast(taken: list[int]) -> None:
    seen = []

    def log_prob(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return -(output.float() - target).square().sum(1)

    net = net_of([3, 4, 3])
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        compare(lambda: bayesian(copy.deepcopy(net), LogLikelihood(log_prob)), x, y, accuracy=0.03)
    assert set(seen) == {torch.bfloat16}
    assert not taken


def test_without_gradients(taken: list[int]) -> None:
    model = bayesian(net_of([3, 4, 3]).double(), Gaussian(0.3))
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    with torch.no_grad():
        cost = FreeEnergy(model, n=40)(x, y)
    assert not cost.total.requires_grad
    torch.testing.assert_close(cost.total, FreeEnergy(model, n=40)(x, y).total.detach())
    assert len(taken) == 1


# --- the cost and its slope -------------------------------------------------------------------------------------------


@pytest.mark.identities
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("positions", [(), (3,), (2, 3)])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_cost_is_the_mean_and_the_slope_its_gradient(
    likelihood: str, positions: tuple[int, ...], batch: int, dtype: torch.dtype
) -> None:
    if positions and likelihood in ("own", "function"):
        pytest.skip("these take two dimensions")
    given = LIKELIHOODS[likelihood][0]().to(dtype)
    output = 3 * torch.randn(batch, 4, *positions, dtype=dtype)
    target = {
        "categorical": lambda: torch.randint(4, (batch, *positions)),
        "bernoulli": lambda: torch.randint(2, output.shape),
        "per-input": lambda: torch.randn_like(output.chunk(2, -1)[0]),
    }.get(likelihood, lambda: torch.randn_like(output))
    if likelihood == "per-input" and output.shape[-1] % 2:
        output = torch.cat([output, output], -1)
    y = target()
    accuracy = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    leaf = output.clone().requires_grad_()
    cost = given.cost(leaf, y)
    mean = -given.log_prob(leaf, y).mean()
    assert cost.shape == ()
    torch.testing.assert_close(cost, mean, **accuracy)
    variables = [leaf, *given.parameters()]
    expected = torch.autograd.grad(mean, variables)
    torch.testing.assert_close(torch.autograd.grad(cost, variables), expected, **accuracy)
    before = output.clone()
    assert given.has_slope == (likelihood in ("gaussian", "categorical"))
    if given.has_slope and not positions:
        slope = given.slope(output, y)
        assert torch.equal(output, before)
        assert slope.dtype == dtype
        torch.testing.assert_close(slope, expected[0], **accuracy)


@pytest.mark.identities
def test_a_single_class_and_far_logits() -> None:
    one = torch.randn(5, 1)
    assert torch.equal(Categorical().slope(one, torch.zeros(5, dtype=torch.int64)), torch.zeros(5, 1))
    far = torch.tensor([[1000.0, -1000.0, 0.0]])
    assert Categorical().slope(far, torch.tensor([1])).tolist() == [[1.0, -1.0, 0.0]]


@pytest.mark.identities
def test_targets_of_another_precision() -> None:
    """Single precision in, single precision out."""
    output, target = torch.randn(5, 3), torch.randn(5, 3).double()
    for likelihood in (Gaussian(0.3), Gaussian("learnt")):
        assert likelihood.cost(output, target).dtype == torch.float32
    assert Gaussian(0.3).slope(output, target).dtype == torch.float32


@pytest.mark.identities
@pytest.mark.parametrize("wrap", [lambda net: net, Opaque], ids=["stack", "autograd"])
@pytest.mark.parametrize("wrong", [-100, -1, 4, 2**40, 1 - 2**63])
def test_targets_out_of_range_are_refused(wrong: int, wrap: Any) -> None:
    """-100 is what torch ignores: here no target is."""
    model = bayesian(wrap(net_of([3, 4])), Categorical())
    free_energy = FreeEnergy(model, n=40)
    y = torch.tensor([0, wrong, 3])
    low, high = min(0, wrong), max(3, wrong)
    message = rf"must be class indices in \[0, 3\]\. Got indices from {low} to {high} instead\."
    with pytest.raises(ValueError, match=message):
        free_energy(torch.randn(3, 3), y)
    assert free_energy.step == 0
    for function in (Categorical().cost, Categorical().log_prob):
        with pytest.raises(ValueError, match=message):
            function(torch.randn(3, 4), y)
    assert all(parameter.grad is None for parameter in model.parameters())


class OnlyLogProb(Categorical):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return -F.cross_entropy(output, target, label_smoothing=0.5, reduction="none")


class OnlyDistribution(Categorical):
    def distribution(self, output: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=output / 2)


class CostAndSlope(Categorical):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return -F.cross_entropy(output, target, label_smoothing=0.5, reduction="none")

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.5)

    def slope(self, output: Tensor, target: Tensor) -> Tensor:
        wanted = 0.5 * F.one_hot(target, output.shape[1]) + 0.5 / output.shape[1]
        return (output.softmax(1) - wanted) / len(target)


class Grandchild(OnlyLogProb):
    pass


class OnlyCost(Categorical):
    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.5)


class LogProbAndCost(OnlyCost):
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        return -F.cross_entropy(output, target, label_smoothing=0.5, reduction="none")

    def cost(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.5)


@pytest.mark.parametrize(
    "kind",
    [
        OnlyLogProb,
        OnlyDistribution,
        CostAndSlope,
        Grandchild,
        OnlyCost,
        LogProbAndCost,
    ],
)
def test_a_subclass_has_the_slope_of_its_own_cost(kind: type[Likelihood], taken: list[int]) -> None:
    x, y = torch.randn(5, 3).double(), torch.randint(4, (5,))
    results = []
    for model, context in twins(net_of([3, 6, 4]).double(), kind()):
        with context:
            cost = FreeEnergy(model, n=40)(x, y)
            results.append([cost.total.detach(), *by_backward(cost, model)])
    assert_same(results[0], results[1:], torch.float64)
    assert len(taken) == 1


@pytest.mark.identities
def test_what_a_subclass_keeps() -> None:
    assert OnlyLogProb.cost is Grandchild.cost is Likelihood.cost
    assert not any(kind.has_slope for kind in (OnlyLogProb, Grandchild, OnlyCost, LogProbAndCost, Likelihood))
    assert OnlyDistribution.cost is Categorical.cost
    assert OnlyDistribution.slope is Categorical.slope
    assert "slope" in vars(CostAndSlope)
    assert all(kind.has_slope for kind in (Categorical, Gaussian, OnlyDistribution, CostAndSlope))


def test_the_gradient_of_the_targets() -> None:
    found = []
    x = torch.randn(5, 3).double()
    start = torch.randn(5, 3).double()
    for model, context in twins(net_of([3, 4, 3]).double(), Gaussian(0.3)):
        y = start.clone().requires_grad_()
        with context:
            FreeEnergy(model, n=40)(x, y).backward()
        found.append([y.grad, *gradients(model)])
    assert_same(found[0], found[1:], torch.float64)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: net,
        Opaque,
    ],
    ids=["stack", "autograd"],
)
def test_an_input_changed_before_backward_is_noticed(wrap: Any) -> None:
    model = bayesian(wrap(net_of([3, 4])), Categorical())
    x, y = torch.randn(5, 3), torch.randint(4, (5,))
    cost = FreeEnergy(model, n=40)(x, y)
    x.zero_()
    with pytest.raises(RuntimeError, match=r"changed|modified"):
        cost.backward()


def test_a_function_may_work_in_place() -> None:
    x, y = torch.randn(5, 3).double(), torch.randn(5, 4).double()
    results = []
    likelihood = LogLikelihood(lambda output, target: -output.sub_(target).square().sum(1))
    for model, context in twins(net_of([3, 4]).double(), likelihood):
        with context:
            results.append(by_backward(FreeEnergy(model, n=40)(x, y), model))
    assert_same(results[0], results[1:], torch.float64)
