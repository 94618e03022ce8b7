"""The estimators: what ``local`` and ``flipout`` make of each operation, and of weights that are used by hand."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bayesbackprop import Bayesian, Gaussian
from layers import Row, each_estimator, each_row, is_any, wrap


@pytest.mark.identities
@each_row
@each_estimator
def test_the_report_names_the_estimator_and_the_reason(row: Row, estimator: str) -> None:
    model = wrap(row.make(), estimator)
    lines = {line.split()[0]: line for line in model.report().splitlines()}
    for entry in model.plan:
        deterministic, fallback = is_any(entry.name, row.deterministic), is_any(entry.name, row.fallback)
        expected = None if deterministic else "shared" if fallback else estimator
        assert entry.estimator == expected, entry.name
        assert (entry.prior is None) == deterministic
        assert bool(entry.reason) == (deterministic or (fallback and estimator != "shared")), entry.name
        assert f" {expected or 'deterministic'} " in lines[entry.name]
        assert not entry.reason or lines[entry.name].endswith(f"  {entry.reason}")


# --- examples and positions ------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One layer, called for each half of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return torch.cat([self.layer(x[:, :half]), self.layer(x[:, half:])], 1)


@pytest.mark.identities
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), Twice], ids=["one call", "two calls"])
def test_flipout_is_one_network_inside_an_example_and_another_in_the_next(make: Callable[[], nn.Module]) -> None:
    model = wrap(make(), "flipout")
    probe = torch.cat([torch.zeros(1, 3), torch.eye(3), torch.randn(2, 3)]).double()  # reads off b, then b + W
    output = model.draw()(probe.expand(4, -1, -1))
    b, w = output[:, :1], output[:, 1:4] - output[:, :1]
    torch.testing.assert_close(output[:, 4:], probe[4:] @ w + b)
    mu = next(iter(model.posterior.values())).mu
    for one, other in itertools.combinations([*w, mu.T], 2):
        assert not torch.allclose(one, other, atol=1e-3)


@pytest.mark.identities
def test_flipout_sees_one_kernel_at_every_position() -> None:
    model = wrap(nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), "flipout")
    x = torch.randn(2, 2, 6, dtype=torch.float64)
    torch.testing.assert_close(model.draw()(x.roll(2, -1)), model.draw()(x).roll(2, -1))


@pytest.mark.identities
def test_local_refuses_a_second_call_and_says_what_to_do() -> None:
    model, x = wrap(Twice(), "local"), torch.randn(2, 4, 3, dtype=torch.float64)
    draw = model.draw()
    for _ in range(2):  # the refusal leaves nothing behind: the next pass is refused at its second call again
        with pytest.raises(RuntimeError, match=r"'layer\.weight' is called twice .* give this parameter 'shared' or"):
            draw(x)
    assert model.net(x).isfinite().all()
    once = wrap(nn.Linear(3, 2), "local").draw()
    assert torch.equal(once(x), once(x))  # one call in each of two passes is no second call


# --- weights used by hand --------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """A layer whose weights are used in another way than its own forward."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer, x)


def _add_in_place(layer: nn.Linear, x: Tensor) -> Tensor:
    y = x @ layer.weight.T
    y += layer.bias
    return y


def _write_into(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(3).copy_(layer.bias)[None], x.new_zeros(3, 3).addmm_(x[:3], layer.weight)])


USES: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "operator": lambda layer, x: x @ layer.weight.T + layer.bias,
    "in place": _add_in_place,
    "into a tensor": _write_into,
    "list": lambda layer, x: torch.cat([x, layer.weight, layer.bias[None]]),
    "nested list": lambda layer, x: torch.einsum("bi,oi->bo", [x, layer.weight]) + torch.stack((layer.bias,)),
    "multi_dot": lambda layer, x: torch.linalg.multi_dot([x, layer.weight, layer.weight.T]) + layer.bias,
    "size": lambda layer, x: x @ layer.weight.view(layer.weight.shape) + layer.bias.expand(torch.Size((4, 3))),
    "several results": lambda layer, x: x * layer.weight.max(0).values + layer.bias,
    "rows": lambda layer, x: x * sum(iter(layer.weight)) + layer.bias,
    "detached": lambda layer, x: x @ layer.weight.detach() + layer.bias.data,
    "numbers": lambda layer, x: x * layer.weight.tolist()[0][0] + layer.bias.tolist()[1],
    "array": lambda layer, x: x * float(layer.weight.numpy(force=True)[0, 0]) + float(layer.bias.numpy(force=True)[0]),
    "bias of another": lambda layer, x: F.linear(x, x[:3] + 1, layer.bias) + F.linear(x, layer.weight.T),
}


@pytest.mark.equivalence
@each_estimator
@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_a_weight_used_by_hand_is_drawn(use: Callable[[nn.Linear, Tensor], Tensor], estimator: str) -> None:
    model, x = wrap(ByHand(use, nn.Linear(3, 3)), estimator), torch.randn(4, 3, dtype=torch.float64)
    draw = model.draw()
    expected = functional_call(model.net, draw.weights, (x,))
    torch.testing.assert_close(draw(x), expected)
    for name in draw.weights:  # the reference sees every weight, so that a mean in its place would show
        shifted = functional_call(model.net, {**draw.weights, name: draw.weights[name] + 1}, (x,))
        assert not torch.allclose(shifted, expected, atol=1e-3)


class Plain(nn.Module):
    """Parameters of the module's own: no layer of the table at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.pair = nn.ParameterList([torch.randn(2), torch.randn(2)])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.pair[0]) * torch.stack(list(self.pair)).sum(0)


@pytest.mark.equivalence
@each_estimator
def test_a_module_without_a_rule_is_drawn_as_shared(estimator: str) -> None:
    model, x = wrap(Plain(), estimator), torch.randn(4, 3, dtype=torch.float64)
    assert {entry.estimator for entry in model.plan} == {"shared"}
    assert all(bool(entry.reason) == (estimator != "shared") for entry in model.plan)
    assert torch.equal(model.draw()(x), functional_call(model.net, model.draw().weights, (x,)))


@pytest.mark.identities
def test_results_of_several_parts_pass_through_the_estimators() -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(torch.split(self.layer(x), 1, dim=1), dim=1) + torch.stack(torch.aminmax(x)).sum()

    assert Bayesian(Stacked(), Gaussian(1.0), estimator="local", seed=0).draw()(torch.randn(16, 3)).shape == (16, 2)
