"""The moments of what the estimators give: exact for layers that are linear in their weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bayesbackprop import Bayesian
from layers import ROWS, Row, each_estimator, uneven, wrap
from many_draws import each_draw
from ztests import assert_mean, assert_variance

# What torch says of this file's own vmap.
pytestmark = [pytest.mark.statistical, pytest.mark.filterwarnings("ignore:There is a performance drop")]

DRAWS = 4000  # a variance off by 12 % is then 5 standard errors away


def _draws(model: Bayesian, inputs: tuple[Tensor, ...], first: int = 0) -> Tensor:
    return each_draw(lambda index: model.draw(index=index)(*inputs), DRAWS, first)


def _assert_moments(samples: Tensor, mean: Tensor, variance: Tensor, what: str) -> None:
    """Outputs that no random weight reaches are the mean to the last bit or so; the others agree by z-test."""
    random = variance > 0
    assert random.any(), what
    torch.testing.assert_close(samples[:, ~random], mean[~random].expand(len(samples), -1))
    assert_mean(samples[:, random], mean[random], f"mean, {what}")
    assert_variance(samples[:, random], variance[random], f"variance, {what}")


def _exact_moments(model: Bayesian, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The mean net(x) and the variance sum_i (d output / d w_i)^2 sigma_i^2 of an output that is linear in w.

    By brute force: each weight in turn is 1 more, the constant ones (padding) never.
    """
    posterior, mean = model.posterior, model.net(*inputs).detach()
    change, variance = torch.zeros_like(mean), torch.zeros_like(mean)
    for name, q in posterior.items():
        for at in q.random.nonzero().tolist():
            shifted = q.mu.detach().clone()
            shifted[tuple(at)] += 1.0
            column = functional_call(model.net, {name: shifted}, inputs).detach() - mean
            change += column
            variance += column.square() * q.sigma[tuple(at)].item() ** 2
    together = {name: q.mu.detach() + q.random for name, q in posterior.items()}
    torch.testing.assert_close(functional_call(model.net, together, inputs) - mean, change)  # linear indeed
    return mean, variance


@each_estimator
@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.linear], ids=[n for n, r in ROWS.items() if r.linear])
def test_moments_of_a_linear_layer_are_exact(row: Row, estimator: str) -> None:
    model, inputs = wrap(row.make(), estimator, sigma=uneven), row.inputs()
    _assert_moments(_draws(model, inputs), *_exact_moments(model, inputs), estimator)


@pytest.mark.parametrize("name", ["encoder", "norms"])
def test_flipout_has_the_moments_of_shared_in_a_deep_network(name: str) -> None:
    """The weights an example sees under flipout have the posterior as their law, whatever the network."""
    net, inputs = ROWS[name].make(), ROWS[name].inputs()
    pair = [_draws(wrap(net, rule), inputs, first) for first, rule in ((0, "shared"), (DRAWS, "flipout"))]
    assert_mean(pair[0] - pair[1], 0.0, "mean")
    squares = [(each - each.mean(0)).square() for each in pair]
    assert_mean(squares[0] - squares[1], 0.0, "variance")


class ByHand(nn.Module):
    """A layer whose weights are used in another way than its own forward."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer, x)


Use = Callable[[Any, Tensor], Tensor]

OPERATIONS: dict[str, tuple[Callable[[], nn.Module], Use]] = {
    "linear": (lambda: nn.Linear(3, 3), lambda layer, x: F.linear(x, layer.weight, layer.bias)),
    "linear, bias by name": (lambda: nn.Linear(3, 3), lambda layer, x: F.linear(x, layer.weight, bias=layer.bias)),
    "linear, all by name": (
        lambda: nn.Linear(3, 3),
        lambda layer, x: F.linear(bias=layer.bias, weight=layer.weight, input=x),
    ),
    "linear, another bias": (lambda: nn.Linear(3, 3, bias=False), lambda layer, x: F.linear(x, layer.weight, x[0])),
    "bilinear, weight by name": (
        lambda: nn.Bilinear(3, 3, 2),
        lambda layer, x: F.bilinear(x, x, weight=layer.weight, bias=layer.bias),
    ),
    "convolution, options by name": (
        lambda: nn.Conv1d(3, 2, 2),
        lambda layer, x: F.conv1d(x[..., None], layer.weight, bias=layer.bias, stride=2, padding=1),
    ),
    "convolution, options by place": (
        lambda: nn.Conv1d(3, 2, 2, bias=False),
        lambda layer, x: F.conv1d(x[..., None], layer.weight, None, 1, padding=2),
    ),
    "transposed convolution": (
        lambda: nn.ConvTranspose1d(3, 2, 2),
        lambda layer, x: F.conv_transpose1d(x[..., None], layer.weight, layer.bias, 2, output_padding=1),
    ),
    "embedding, by name": (
        lambda: nn.Embedding(3, 2),
        lambda layer, x: F.embedding(weight=layer.weight, input=x.argsort()),
    ),
}


@each_estimator
@pytest.mark.parametrize(("make", "use"), OPERATIONS.values(), ids=list(OPERATIONS))
def test_an_operation_is_itself_however_its_arguments_are_given(
    make: Callable[[], nn.Module], use: Use, estimator: str
) -> None:
    model, x = wrap(ByHand(use, make()), estimator, sigma=uneven), torch.randn(2, 3, dtype=torch.float64)
    _assert_moments(_draws(model, (x,)), *_exact_moments(model, (x,)), estimator)
    # The rule of the estimator is at work: other outputs than those of the drawn weights, unless it is 'shared'.
    draw = model.draw()
    drawn = functional_call(model.net, draw.weights, (x,))
    assert torch.allclose(draw(x), drawn) == (estimator == "shared")
