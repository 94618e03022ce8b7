"""Which networks and calls are trained as fully connected networks, and that all others run as they are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import prune

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Gaussian, LogLikelihood
from bayesbackprop._engine.mlp import FullyConnected
from bayesbackprop.noise import Key
from mlps import bayesian, by_backward, compare_with_plain, net_of

pytestmark = pytest.mark.equivalence


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


def with_a_parameter_not_used() -> nn.Sequential:
    """It has the gradient of its complexity alone."""
    net = net_of([3, 4, 3])
    net.register_parameter("unused", nn.Parameter(torch.randn(3)))
    return net


OTHER_NETS: dict[str, Callable[[], nn.Module]] = {
    "subclassed layer": lambda: nn.Sequential(Doubled(3, 4), nn.ReLU(), nn.Linear(4, 3)),
    "subclassed sequential": lambda: Shifted(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)),
    "subclass nested": lambda: nn.Sequential(nn.Linear(3, 4), Shifted(nn.ReLU(), nn.Linear(4, 3))),
    "another flattening": lambda: nn.Sequential(nn.Flatten(0, -2), nn.Linear(3, 3)),
    "flattened in between": lambda: nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.Linear(4, 3)),
    "a parameter not used": with_a_parameter_not_used,
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
def test_networks_that_are_not_taken(name: str, taken: list[int]) -> None:
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()

    def make() -> Bayesian:
        torch.manual_seed(5)
        return bayesian(OTHER_NETS[name]().double(), Gaussian(0.3))

    compare_with_plain(make, x, y)
    assert not taken


def test_models_that_are_not_taken(taken: list[int]) -> None:
    net = net_of([3, 4, 3]).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    for options in (
        {"select": lambda name, module: name.startswith("2.")},
        {"select": lambda name, module: not name.endswith("bias")},
    ):
        compare_with_plain(lambda options=options: bayesian(copy.deepcopy(net), Gaussian(0.3), **options), x, y)
    assert not taken


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
        compare_with_plain(make, x, y)
        assert len(called) >= 2
        assert len(taken) <= 2  # the first steps
    finally:
        for handle in handles:
            handle.remove()
    before = len(called), len(taken)
    compare_with_plain(lambda: bayesian(net, Gaussian(0.3)), x, y)
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

    compare_with_plain(make, x, y)
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

    compare_with_plain(make, x, y)


INPUTS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "1-D": (lambda: torch.randn(3).double(), (3,)),
    "3-D": (lambda: torch.randn(5, 2, 3).double(), (5, 2, 3)),
    "keyword": (lambda: {"input": torch.randn(5, 3).double()}, (5, 3)),
    "sparse": (lambda: torch.eye(3).double()[[0, 2, 1, 1, 0]].mul(2.5).to_sparse(), (5, 3)),
    "a subclass": (lambda: nn.Parameter(torch.randn(5, 3).double(), requires_grad=False), (5, 3)),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_that_are_not_taken(kind: str, taken: list[int]) -> None:
    make, shape = INPUTS[kind]
    net = net_of([3, 4, 3]).double()
    compare_with_plain(lambda: bayesian(copy.deepcopy(net), Gaussian(0.3)), make(), torch.randn(*shape).double())
    assert not taken


def test_one_tensor_is_taken() -> None:
    model = bayesian(net_of([3, 4]), Categorical())
    fully_connected, _ = model.engine().executors
    assert isinstance(fully_connected, FullyConnected)
    x = torch.randn(5, 3)
    assert fully_connected.forward(model.draw(), (x,), {}).shape == (5, 4)
    assert fully_connected.outputs(Key(0), 2, 2**20, (x,), {}).shape == (2, 5, 4)
    for args, kwargs in (((), {"input": x}), ((x, x), {}), ((x,), {"scale": 2}), ((), {}), (([x],), {})):
        assert fully_connected.forward(model.draw(), args, kwargs) is NotImplemented
        assert fully_connected.cost(model.draw(), Categorical(), args, kwargs, None) is NotImplemented
        assert fully_connected.outputs(Key(0), 2, 2**20, args, kwargs) is NotImplemented
    # As in a compiled function.
    assert fully_connected.forward(model.draw(torch.tensor(1)), (x,), {}) is NotImplemented


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


def test_autocast(taken: list[int]) -> None:
    seen = []

    def log_prob(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return -(output.float() - target).square().sum(1)

    net = net_of([3, 4, 3])
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        compare_with_plain(lambda: bayesian(copy.deepcopy(net), LogLikelihood(log_prob)), x, y, accuracy=0.03)
    assert set(seen) == {torch.bfloat16}
    assert not taken


def test_without_gradients(taken: list[int]) -> None:
    model = bayesian(net_of([3, 4, 3]).double(), Gaussian(0.3))
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    with torch.no_grad():
        cost = FreeEnergy(model, n=40)(x, y)
    assert not cost.requires_grad
    torch.testing.assert_close(cost.detach(), FreeEnergy(model, n=40)(x, y).detach())
