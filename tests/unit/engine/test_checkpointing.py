"""Activation checkpointing: its second pass would see the means, so it is refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bayesbackprop as bbb
from bayesbackprop import FreeEnergy
from layers import each_estimator, wrap

X, Y = torch.linspace(-1, 1, 12).double().reshape(4, 3), torch.linspace(-2, 2, 8).double().reshape(4, 2)


class Checkpointed(nn.Module):
    """Activations of the middle layer are computed a second time in the backward pass, if ``active``."""

    def __init__(self, inner: nn.Module | None = None, use_reentrant: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.inner = inner or nn.Linear(4, 4)
        self.outer = nn.Linear(4, 2)
        self.active = True
        self.use_reentrant = use_reentrant

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.outer(
            checkpoint(self.middle, h, use_reentrant=self.use_reentrant) if self.active else self.middle(h)
        )


class ByHand(nn.Linear):
    """Computes with its weights without a module that would be called."""

    def __call__(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T + self.bias).square()


class Recurrent(nn.LSTM):
    """Keeps a second list of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


INNER: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: nn.Linear(4, 4),
    "by hand": lambda: ByHand(4, 4),
    "recurrent": lambda: Recurrent(4, 4),
}

each_mode = pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])


@pytest.mark.equivalence
@each_estimator
@each_mode
def test_checkpointed_activations_are_right_or_refused(estimator: str, use_reentrant: bool) -> None:
    """The second computation must see the draw as well: gradients at the mean, without a word, would be the worst."""
    start = Checkpointed(use_reentrant=use_reentrant)

    def gradients(active: bool) -> list[Tensor | None]:
        net = copy.deepcopy(start)
        net.active = active
        model = wrap(net, estimator)
        FreeEnergy(model, n=20)(X, Y).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(active=False)
    try:
        got = gradients(active=True)
    except RuntimeError:
        return
    torch.testing.assert_close(got, expected)


@pytest.mark.identities
@each_estimator
@each_mode
@pytest.mark.parametrize("inner", INNER.values(), ids=list(INNER))
@pytest.mark.parametrize("since", [1, 2, 4])
def test_checkpointing_is_refused_at_every_step(
    estimator: str, use_reentrant: bool, inner: Callable[[], nn.Module], since: int
) -> None:
    net = Checkpointed(inner(), use_reentrant)
    model = wrap(net, estimator)
    free_energy = FreeEnergy(model, n=20)
    for step in range(1, 6):
        net.active = step >= since
        if not net.active:
            free_energy(X, Y).backward()
            continue
        with pytest.raises(RuntimeError, match="Switch activation checkpointing off") as error:
            free_energy(X, Y)
        assert "flipout" not in str(error.value)
        assert free_energy.step.item() == since - 1
        assert all(
            isinstance(parameter, nn.Parameter) for module in net.modules() for parameter in module._parameters.values()
        )
    net.active = False
    free_energy(X, Y).backward()


class PartlyWithoutGradients(nn.Module):
    """Its first layer runs under ``no_grad``, as a backbone that is only read, and its second under other hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(self.backbone(x))
        with torch.autograd.graph.save_on_cpu():
            return self.head(h)


@pytest.mark.equivalence
@each_estimator
def test_a_part_without_gradients_and_other_hooks_are_not_refused(estimator: str) -> None:
    model = wrap(PartlyWithoutGradients(), estimator)
    for step in (1, 2):
        cost = FreeEnergy(model, n=20)(X, Y, step=step)
        torch.testing.assert_close(cost.likelihood, model.likelihood.cost(model.draw(step)(X), Y))
        cost.backward()
    assert model.net.head.weight.grad.any()


@pytest.mark.equivalence
@each_estimator
def test_checkpointing_is_not_refused_where_nothing_goes_back(estimator: str) -> None:
    net = Checkpointed()
    model = wrap(net, estimator)
    with torch.no_grad():
        got = [model.draw()(X), FreeEnergy(model, n=20)(X, Y).total, model.predict(X, draws=2).mean]
        net.active = False
        expected = [model.draw()(X), FreeEnergy(model, n=20)(X, Y).total, model.predict(X, draws=2).mean]
    torch.testing.assert_close(got, expected)


def test_an_objective_inside_checkpointing_is_refused() -> None:
    """Called again during backward, it would take the noise of the next step."""
    free_energy = FreeEnergy(bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian(0.5), sigma=0.5, seed=0), n=20)
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    with pytest.raises(RuntimeError, match=r"inside torch\.utils\.checkpoint"):
        torch.utils.checkpoint.checkpoint(free_energy, x, y, use_reentrant=False)
    assert int(free_energy.step) == 0
