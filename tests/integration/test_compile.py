"""A compiled step is the eager step: one graph, and a refused step leaves no trace."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from bayesbackprop import Cost, FreeEnergy
from layers import each_estimator
from small_runs import data, gradients, parts, small_free_energy

pytestmark = pytest.mark.equivalence


def _assert_same_steps(eager: FreeEnergy, backend: str, **tolerance: float) -> None:
    """Three steps of training, the same compiled as eager; one graph for all; and no step on numbers that are none."""
    x, y = (value.to(eager.model.likelihood.log_noise.dtype) for value in data())
    twin = copy.deepcopy(eager)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    pairs = [(each, torch.optim.Adam(each.parameters(), lr=0.01)) for each in (eager, twin)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            for _, optimiser in pairs:
                optimiser.zero_grad()
            expected, got = eager(x, y), compiled(x, y)
            assert isinstance(got, Cost)
            torch.testing.assert_close(parts(got), parts(expected), **tolerance)
            expected.backward()
            got.backward()
            torch.testing.assert_close(gradients(twin), gradients(eager), **tolerance)
            for _, optimiser in pairs:
                optimiser.step()
        first, second = compiled(x, y).total, compiled(x, y).total  # of one posterior: noise alone tells them apart
        assert not torch.isclose(first, second, **tolerance)
        assert int(twin.step) == 5

        for spoilt in ((torch.full_like(x, torch.nan), y), (x, torch.full_like(y, torch.inf))):
            with pytest.raises(RuntimeError, match="must be finite"):
                compiled(*spoilt)
            assert int(twin.step) == 5
        eager.load_state_dict(twin.state_dict())
        torch.testing.assert_close(compiled(x, y).total, eager(x, y).total, **tolerance)  # it goes on as if nothing was
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.supports("Training", "torch.compile", "the eager step, by the three estimators")
@each_estimator
@pytest.mark.parametrize("complexity", ["sampled", "closed"])
def test_a_compiled_step_is_the_eager_step(estimator: str, complexity: str) -> None:
    net = nn.Linear(3, 2, bias=complexity == "closed")  # tracing noise is slow: with a bias where there is less of it
    _assert_same_steps(small_free_energy(estimator, complexity, net), backend="aot_eager")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own imports
def test_generated_code_computes_the_eager_step() -> None:
    """Inductor's code, for one small network in the type of everyday use, since a compiler takes its time."""
    eager = small_free_energy("shared", "sampled", nn.Linear(3, 2, bias=False)).float()
    _assert_same_steps(eager, backend="inductor", rtol=1e-4, atol=1e-5)


def _operators(graph: torch.fx.Graph) -> Counter[str]:
    """How often each operator of the library's own is called."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return Counter(name for name in names if name.startswith("bayesbackprop."))


def test_a_compiled_step_draws_all_weights_in_one_operator() -> None:
    graphs: list[Counter[str]] = []

    def record(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(_operators(module.graph))
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    free_energy = small_free_energy("shared", "sampled")
    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    torch.compile(free_energy, fullgraph=True, backend=backend)(*data()).backward()
    assert graphs == [{"bayesbackprop.draw.default": 1}, {"bayesbackprop.draw_backward.default": 1}]


def test_a_compiled_evaluation_changes_nothing() -> None:
    torch._dynamo.reset()
    free_energy = small_free_energy("shared", "sampled", nn.Linear(3, 2, bias=False), warmup=9)
    compiled = torch.compile(free_energy, fullgraph=True, backend="aot_eager")
    compiled(*data())
    with torch.no_grad():
        first, second = compiled(*data()), compiled(*data())
        expected = free_energy(*data())
    assert int(free_energy.step) == 1
    torch.testing.assert_close(parts(first), parts(expected))
    torch.testing.assert_close(parts(second), parts(expected))
