"""Activation checkpointing: what is computed a second time sees the same draw."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bayesbackprop as bbb
from bayesbackprop import FreeEnergy
from layers import each_estimator, wrap

X, Y = torch.linspace(-1, 1, 12).double().reshape(4, 3), torch.linspace(-2, 2, 8).double().reshape(4, 2)
X4 = torch.linspace(-1, 1, 16).double().reshape(4, 4)


class Checkpointed(nn.Module):
    """Activations of the middle layer are computed a second time in the backward pass, if ``active``."""

    def __init__(self, inner: nn.Module | None = None, use_reentrant: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.inner = inner or nn.Linear(4, 4)
        self.outer = nn.Linear(4, 2)
        self.active = True
        self.use_reentrant = use_reentrant

    def middle_input(self, x: Tensor) -> Tensor:
        return torch.sin(x)

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


def _gradients(model: bbb.Bayesian, *, steps: int = 1, **options: Any) -> list[Tensor | None]:
    """Of all parameters, after some steps whose costs are added."""
    free_energy = FreeEnergy(model, n=20, **options)
    sum(free_energy(X, Y) for _ in range(steps)).backward()
    return [parameter.grad for parameter in model.parameters()]


def _compare(net: Checkpointed, estimator: str, **options: Any) -> None:
    """Gradients with and without checkpointing, on the same noise."""
    plain = copy.deepcopy(net)
    plain.active = False
    got, expected = (_gradients(wrap(each, estimator), **options) for each in (net, plain))
    torch.testing.assert_close(got, expected)
    assert all(gradient is not None and gradient.any() for gradient in got)


@pytest.mark.supports("Training", "activation checkpointing", "both modes, the three estimators")
@pytest.mark.equivalence
@each_estimator
@each_mode
@pytest.mark.parametrize("inner", INNER.values(), ids=list(INNER))
@pytest.mark.parametrize("complexity", ["sampled", "closed"])
def test_gradients_are_those_without_checkpointing(
    estimator: str, use_reentrant: bool, inner: Callable[[], nn.Module], complexity: str
) -> None:
    """The second computation sees the draw, and its gradients reach mu and rho, of all steps and draws alive."""
    _compare(Checkpointed(inner(), use_reentrant), estimator, steps=2, draws=2, complexity=complexity)


@pytest.mark.equivalence
@each_estimator
@each_mode
@pytest.mark.parametrize("since", [1, 2, 4])
def test_checkpointing_may_begin_at_any_step(estimator: str, use_reentrant: bool, since: int) -> None:
    nets = [Checkpointed(use_reentrant=use_reentrant)]
    nets.append(copy.deepcopy(nets[0]))
    parameters = []
    for active, net in zip((True, False), nets, strict=True):
        model = wrap(net, estimator)
        free_energy = FreeEnergy(model, n=20)
        optimiser = bbb.Adam(model.parameters(), lr=0.1)
        for step in range(1, 6):
            net.active = active and step >= since
            optimiser.minimise(free_energy, X, Y)
        parameters.append(list(model.parameters()))
        assert all(type(module._parameters) is dict for module in net.modules())
    torch.testing.assert_close(*parameters)


class Nested(Checkpointed):
    """The middle is checkpointed, and in it a layer; the mode inside is the other one if ``mixed``."""

    mixed = False

    def middle(self, x: Tensor) -> Tensor:
        if not self.active:
            return super().middle(super().middle_input(x))
        inside = self.use_reentrant != self.mixed
        return super().middle(checkpoint(super().middle_input, x, use_reentrant=inside))


class Mixed(Nested):
    mixed = True


@pytest.mark.equivalence
@each_estimator
@each_mode
@pytest.mark.parametrize("kind", [Nested, Mixed])
def test_checkpoints_inside_checkpoints(estimator: str, use_reentrant: bool, kind: type[Checkpointed]) -> None:
    _compare(kind(use_reentrant=use_reentrant), estimator, draws=2)


class Whole(nn.Module):
    """A network that is checkpointed as a whole."""

    def __init__(self, net: Checkpointed) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # without which the reentrant mode has no gradients at all
        return checkpoint(self.net, x, use_reentrant=self.net.use_reentrant) if self.net.active else self.net(x)


@pytest.mark.equivalence
@each_estimator
@each_mode
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # of the inner one, by torch, in any network
def test_the_whole_network_may_be_checkpointed(estimator: str, use_reentrant: bool) -> None:
    got, expected = Whole(Checkpointed(use_reentrant=use_reentrant)), None
    expected = copy.deepcopy(got)
    expected.net.active = False
    torch.testing.assert_close(*(_gradients(wrap(net, estimator), draws=2) for net in (got, expected)))


@pytest.mark.equivalence
@each_estimator
@each_mode
def test_a_second_backward_pass_over_a_kept_graph(estimator: str, use_reentrant: bool) -> None:
    model = wrap(Checkpointed(use_reentrant=use_reentrant), estimator)
    cost = FreeEnergy(model, n=20)(X, Y)
    cost.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    cost.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [2 * each for each in once])


@pytest.mark.equivalence
@each_estimator
@each_mode
def test_dropout_is_the_same_a_second_time(estimator: str, use_reentrant: bool) -> None:
    net = Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), use_reentrant)
    gradients = []
    for active in (True, False):
        net.active = active
        torch.manual_seed(3)
        gradients.append(_gradients(wrap(copy.deepcopy(net), estimator)))
    torch.testing.assert_close(*gradients)


@pytest.mark.equivalence
@each_estimator
@each_mode
def test_a_layer_that_is_called_twice(estimator: str, use_reentrant: bool) -> None:
    """Once in a checkpointed part and once outside: refused for ``local``, as ever, and right for the others."""
    net = Checkpointed(use_reentrant=use_reentrant)
    net.first = net.inner
    if estimator == "local":
        model = wrap(net, {"*": "local"})
        with pytest.raises(RuntimeError, match="called twice in one forward pass"):
            FreeEnergy(model, n=20)(X4, Y)
        return
    plain = copy.deepcopy(net)
    plain.active = False
    costs = [FreeEnergy(wrap(each, estimator), n=20) for each in (net, plain)]
    for cost in costs:
        cost(X4, Y).backward()
    torch.testing.assert_close(*([parameter.grad for parameter in cost.parameters()] for cost in costs))


@pytest.mark.equivalence
@each_mode
def test_weights_that_vary_together(use_reentrant: bool) -> None:
    net = Checkpointed(use_reentrant=use_reentrant).double()
    gradients = []
    for active in (True, False):
        each = copy.deepcopy(net)
        each.active = active
        gradients.append(_gradients(bbb.Bayesian(each, bbb.Gaussian(0.5), family=bbb.LowRank(2), seed=0)))
    torch.testing.assert_close(*gradients)


@pytest.mark.equivalence
@each_estimator
@each_mode
def test_threads_recompute_their_own_draws(estimator: str, use_reentrant: bool) -> None:
    """Two objectives of one model, each with a thread and steps of its own, and a backward pass in a third thread."""
    net = Checkpointed(use_reentrant=use_reentrant)
    model = wrap(net, estimator)

    def gradients(step: int) -> list[Tensor]:
        cost = FreeEnergy(model, n=20)(X, Y, step=step)
        return list(_in_thread(lambda: _grad(cost, model)))

    net.active = False
    expected = {step: gradients(step) for step in range(1, 9)}
    net.active = True
    if use_reentrant:  # whose backward passes put gradients into parameters, which threads would share
        for step in expected:
            torch.testing.assert_close(_in_thread(lambda step=step: gradients(step)), expected[step])
        return
    with ThreadPoolExecutor(4) as pool:
        for step, got in zip(expected, pool.map(gradients, expected), strict=True):
            torch.testing.assert_close(got, expected[step])


def _grad(cost: Tensor, model: bbb.Bayesian) -> list[Tensor]:
    if not model.net.use_reentrant:
        return list(torch.autograd.grad(cost, list(model.parameters())))
    model.zero_grad()
    cost.backward()
    return [parameter.grad for parameter in model.parameters()]


def _in_thread(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.equivalence
@each_mode
def test_a_network_that_runs_another_model(use_reentrant: bool) -> None:
    """A part that is checkpointed inside both draws is computed again inside both."""

    class Two(nn.Module):
        def __init__(self, other: bbb.Bayesian, active: bool) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)
            self.others = [other]  # not a submodule
            self.active = active

        def forward(self, x: Tensor) -> Tensor:
            other = self.others[0]
            return Outer(self)(x, other.draw(3))

    class Outer:
        def __init__(self, two: Two) -> None:
            self.two = two

        def __call__(self, x: Tensor, draw: Any) -> Tensor:
            self.two.others[0].net.inside = self.inside
            return draw(x)

        def inside(self, x: Tensor) -> Tensor:
            both = lambda x: self.two.net(x) * self.two.others[0].net.own(x)  # noqa: E731
            return checkpoint(both, x, use_reentrant=use_reentrant) if self.two.active else both(x)

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x)

    gradients = []
    for active in (True, False):
        torch.manual_seed(0)
        other = wrap(Other(), "shared")
        model = wrap(Two(other, active), "shared")
        x = X.clone().requires_grad_()
        (model.draw(1)(x) ** 2).sum().backward()
        gradients.append([parameter.grad for parameter in (*model.parameters(), *other.parameters())])
    torch.testing.assert_close(*gradients)
    assert all(gradient.any() for gradient in gradients[0] if gradient is not None)


@pytest.mark.equivalence
@each_estimator
@each_mode
def test_compiled_networks(estimator: str, use_reentrant: bool) -> None:
    """A compiler takes a checkpointed part for an operation of its own, and must still see the rules inside it."""
    net = Checkpointed(use_reentrant=use_reentrant)
    gradients = []
    for active in (True, False):
        each = copy.deepcopy(net)
        each.active = active
        free_energy = FreeEnergy(wrap(each, estimator), n=20)
        call = torch.compile(free_energy, backend="aot_eager", fullgraph=True) if active else free_energy
        call(X, Y).backward()
        gradients.append([parameter.grad for parameter in free_energy.parameters()])
    torch.testing.assert_close(*gradients)


class Deep(nn.Sequential):
    """Blocks, each of which is checkpointed if there is a mode."""

    mode: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x) if self.mode is None else checkpoint(block, x, use_reentrant=self.mode)
        return x


@pytest.mark.identities
@each_estimator
@each_mode
def test_activations_are_not_kept(estimator: str, use_reentrant: bool) -> None:
    """What the graph keeps besides parameters and drawn weights: of a block it is its input alone."""
    blocks, width, examples = 8, 4, 64

    def kept(mode: bool | None) -> int:
        block = lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())  # noqa: E731
        net = Deep(*(block() for _ in range(blocks)))
        net.mode = mode
        model = wrap(net, estimator)
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.shape[:1] == (examples,):
                storages[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model.draw(1)(torch.ones(examples, width, dtype=torch.float64, requires_grad=True))
        del output
        return sum(storages.values())

    activation = examples * width * 8
    assert kept(use_reentrant) <= (blocks + 1) * activation
    assert kept(None) >= 2 * blocks * activation


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
    # The complexity goes back to all, whoever asked for the weights first.
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


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


class Normalised(nn.Module):
    """A checkpointed part with batch normalisation; None: it is not checkpointed."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.last, self.use_reentrant = nn.Linear(6, 1), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.last(self.part(x))
        return self.last(checkpoint(self.part, x, use_reentrant=self.use_reentrant))


@pytest.mark.equivalence
@each_estimator
@each_mode
@pytest.mark.parametrize("draws", [1, 3])
def test_batch_normalisation_counts_a_batch_once(estimator: Any, use_reentrant: bool, draws: int) -> None:
    statistics = []
    for mode in (None, use_reentrant):
        torch.manual_seed(0)
        net = Normalised(mode)
        model = bbb.Bayesian(net, bbb.Gaussian(0.5), estimator=estimator, seed=1)
        inputs = torch.linspace(-1, 1, 40).reshape(10, 4).requires_grad_()
        bbb.FreeEnergy(model, 50, draws=draws)(inputs, torch.zeros(10, 1)).backward()
        statistics.append(net.part[1].state_dict())
        assert net.part[1].num_batches_tracked == 1
    torch.testing.assert_close(statistics[0], statistics[1])


@pytest.mark.equivalence
@each_estimator
@each_mode
@pytest.mark.parametrize("pack", [torch.Tensor.clone, lambda tensor: tensor], ids=["copied", "the same"])
def test_hooks_may_copy_what_is_saved(pack: Any, estimator: str, use_reentrant: bool) -> None:
    """As ``save_on_cpu`` does. They run where a mean that is copied would be taken for a weight that is used."""
    found = []
    for mode in (None, use_reentrant):
        net = Deep(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        net.mode = mode
        model = wrap(net, estimator)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model.draw(1)(torch.ones(5, 3, dtype=torch.float64, requires_grad=True))
        output.square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(found[1], found[0])
    assert all(gradient.any() for gradient in found[0])
