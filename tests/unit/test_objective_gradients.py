"""Gradients of the free energy: the paper's (3) and (4), by every way back, to whatever the cost depends on."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import (
    Bayesian,
    Categorical,
    Cost,
    FreeEnergy,
    Gaussian,
    Laplace,
    LogLikelihood,
    Normal,
    ScaleMixture,
    plain_kernels,
)
from complexities import CAUCHY
from layers import Row, each_estimator, each_row, wrap
from networks import X, Y, classifier, regression_model

# --- the equations ---------------------------------------------------------------------------------------------------


class Various:
    """A different sigma for each weight."""

    def __call__(self, mu: Tensor) -> Tensor:
        return torch.linspace(0.1, 0.6, mu.numel(), dtype=mu.dtype).reshape(mu.shape)


@pytest.mark.equivalence
@pytest.mark.parametrize("draws", [1, 3])
def test_gradients_are_the_papers(draws):
    """(3) and (4) of f(w, theta) = log q(w|theta) - log P(w) P(D|w), each derivative written by hand."""
    noise, n = 0.5, 7
    prior = ScaleMixture(0.25, 1.0, 0.05)
    x, y = torch.randn(n, 3).double(), torch.randn(n, 1).double()
    model = Bayesian(nn.Linear(3, 1, bias=False).double(), Gaussian(noise), prior, sigma=Various(), seed=2)
    cost = FreeEnergy(model, n=n, draws=draws)(x, y)
    mu, rho = model.posterior["weight"]
    autograd_mu, autograd_rho = torch.autograd.grad(n * cost.total, (mu, rho))

    delta_mu, delta_rho = [], []
    for k in range(draws):
        w = model.draw(step=1, index=k).weights["weight"].detach()
        m, r = mu.detach(), rho.detach()
        sigma = torch.log1p(torch.exp(r))
        eps = (w - m) / sigma
        slab = 0.25 * torch.exp(-(w**2) / 2) / 1.0
        spike = 0.75 * torch.exp(-(w**2) / (2 * 0.05**2)) / 0.05
        dlog_prior = -w * (slab / 1.0**2 + spike / 0.05**2) / (slab + spike)
        dlog_likelihood = ((y - x @ w.T) / noise**2).T @ x
        df_dw = -eps / sigma - dlog_prior - dlog_likelihood
        df_dmu = eps / sigma
        df_drho = (eps**2 - 1) / sigma / (1 + torch.exp(-r))
        delta_mu.append(df_dw + df_dmu)  # (3)
        delta_rho.append(df_dw * eps / (1 + torch.exp(-r)) + df_drho)  # (4)
    torch.testing.assert_close(autograd_mu, torch.stack(delta_mu).mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(autograd_rho, torch.stack(delta_rho).mean(0), rtol=1e-9, atol=1e-9)


@pytest.mark.equivalence
@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
@pytest.mark.parametrize(
    ("prior", "complexity", "likelihood"),
    [
        (ScaleMixture(0.25, 1.0, 0.1), "sampled", Categorical()),
        (Normal(0.5), "closed", Gaussian("per-input")),
        (Laplace(0.5), "sampled", Gaussian("learnt")),
        (Laplace(0.5), "closed", Gaussian(0.3)),
        (CAUCHY, "sampled", Categorical()),
    ],
    ids=repr,
)
def test_gradients_equal_finite_differences(prior, complexity, likelihood, estimator):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    model = Bayesian(net, likelihood, prior, sigma=0.3, estimator=estimator, centre="net", seed=1).double()
    x = torch.randn(5, 2).double()
    y = net(x).detach().argmax(1) if isinstance(likelihood, Categorical) else torch.randn(5, 2).double()
    if isinstance(likelihood, Gaussian) and likelihood.noise == "per-input":
        y = y[:, :1]
    free_energy = FreeEnergy(model, n=20, draws=2, complexity=complexity)

    def total() -> Tensor:
        free_energy.step.zero_()  # the noise held fixed
        return free_energy(x, y).total

    parameters = list(model.parameters())
    gradients = torch.autograd.grad(total(), parameters)
    h = 1e-5
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            differences = torch.empty_like(gradient)
            for i in range(parameter.numel()):
                at = parameter.view(-1)[i]
                start = at.clone()
                above, below = (total().item() for value in (start + h, start - h) if at.copy_(value) is not None)
                at.copy_(start)
                differences.view(-1)[i] = (above - below) / (2 * h)
            torch.testing.assert_close(gradient, differences, rtol=1e-6, atol=1e-7)


# --- every row, every estimator --------------------------------------------------------------------------------------


@pytest.mark.identities
@each_row
@each_estimator
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero input"])
def test_gradients_reach_every_mu_and_rho(row: Row, estimator: str, zero: bool) -> None:
    model, inputs = wrap(row.make(), estimator), row.inputs()
    if zero:
        inputs = tuple(torch.zeros_like(x) for x in inputs)
    target = torch.randn_like(model.net(*inputs))
    # The likelihood alone has to reach the weights, except where a zero input hides them; with the complexity, all do.
    for temperature in (1.0,) if zero else (0.0, 1.0):
        model.zero_grad()
        FreeEnergy(model, n=20, temperature=temperature)(inputs, target).backward()
        for name, q in model.posterior.items():
            for gradient in (q.mu.grad, q.rho.grad):
                assert gradient is not None, name
                assert gradient.isfinite().all(), name
                assert gradient.any(), name


@pytest.mark.equivalence
@each_row
@each_estimator
@pytest.mark.parametrize("complexity", ["sampled", "closed"])
def test_every_way_back_gives_the_gradient_of_the_equation(row: Row, estimator: str, complexity: str) -> None:
    """``cost.backward()``, ``cost.total.backward()`` and the free energy written out with autograd."""
    net, inputs = row.make().double(), row.inputs()
    model = Bayesian(net, Gaussian("learnt"), Normal(0.5), sigma=0.5, estimator=estimator, seed=7).double()
    target = torch.randn_like(net(*inputs))

    def by_hand() -> Tensor:
        draw = model.draw(step=1)
        cost = draw.complexity() if complexity == "sampled" else model.complexity_closed()
        return cost / 20 - model.likelihood.log_prob(draw(*inputs), target).mean()

    def of_free_energy() -> Cost:
        return FreeEnergy(model, n=20, complexity=complexity)(inputs, target)

    gradients = []
    for start in (by_hand, of_free_energy, lambda: of_free_energy().total):
        model.zero_grad()
        start().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


# --- the way back ----------------------------------------------------------------------------------------------------


WAYS: dict[str, Callable[[Cost], None]] = {"cost": lambda cost: cost.backward(), "total": lambda c: c.total.backward()}

each_way = pytest.mark.parametrize("back", WAYS.values(), ids=list(WAYS))


@pytest.mark.identities
@each_way
@each_estimator
@pytest.mark.parametrize("own", [False, True], ids=["Gaussian", "own likelihood"])
def test_gradients_reach_whatever_else_the_cost_depends_on(
    own: bool, estimator: str, back: Callable[[Cost], None]
) -> None:
    scale = torch.ones(2, dtype=torch.float64, requires_grad=True)  # nobody's parameter
    likelihood = LogLikelihood(lambda output, target: -(scale * (output - target)).square().sum(1))
    net = nn.Linear(3, 2).double()
    model = Bayesian(net, likelihood if own else Gaussian(1.0), sigma=0.5, estimator=estimator, seed=7)
    for wanted in ("x", "y", "xy", ""):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad="x" in wanted)
        y = torch.randn(4, 2, dtype=torch.float64, requires_grad="y" in wanted)
        scale.grad = None
        back(FreeEnergy(model, n=20)(x, y))
        assert (scale.grad is not None) == own, wanted
        for value in (value for value in (x, y) if value.requires_grad):
            assert value.grad is not None, wanted
            assert value.grad.any()


@pytest.mark.identities
@each_way
@each_estimator
@pytest.mark.parametrize("which", ["mu", "rho"])
def test_weights_changed_between_the_passes_do_no_harm(
    estimator: str, back: Callable[[Cost], None], which: str
) -> None:
    """As everywhere in torch: a step of an optimiser in between leaves the gradients right, or is refused."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model, x, y = wrap(net, estimator), torch.randn(4, 3).double(), torch.randn(4, 2).double()
    back(FreeEnergy(model, n=20)(x, y))
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    cost = FreeEnergy(model, n=20)(x, y)
    with torch.no_grad():
        for q in model.posterior.values():
            getattr(q, which).add_(1.0)
    try:
        back(cost)
    except RuntimeError:
        return
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


@pytest.mark.identities
@pytest.mark.parametrize("frozen", ["net.0.weight", "rho.2.bias"])
def test_what_is_frozen_after_wrapping_stays(frozen: str) -> None:
    model = regression_model()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    parameter = model.get_parameter(frozen).requires_grad_(False)
    before = parameter.clone()
    for _ in range(3):
        optimiser.zero_grad()
        FreeEnergy(model, 100)(X, Y).backward()
        optimiser.step()
    assert torch.equal(parameter, before)
    assert model.get_parameter("net.2.weight").grad is not None


@pytest.mark.identities
@pytest.mark.parametrize("part", ["total", "likelihood", "complexity"])
def test_the_parts_can_be_differentiated_one_by_one_and_again(part: str) -> None:
    model = regression_model()
    cost = FreeEnergy(model, 100)(X, Y)
    parameters = list(model.parameters())
    first = torch.autograd.grad(getattr(cost, part), parameters, retain_graph=True)
    again = torch.autograd.grad(getattr(cost, part), parameters, retain_graph=True)
    torch.testing.assert_close(first, again)
    with plain_kernels():
        plain = FreeEnergy(model, 100)(X, Y)
    given = torch.autograd.grad(getattr(plain, part), parameters, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(first, given, rtol=1e-4, atol=1e-4)


@pytest.mark.identities
@pytest.mark.parametrize("function", [nn.ReLU, nn.GELU])
@pytest.mark.parametrize("way", ["cost", "total"])
def test_a_second_backward_needs_the_graph_kept(function: type[nn.Module], way: str) -> None:
    model = Bayesian(classifier(function), Categorical(), seed=0)
    free_energy = FreeEnergy(model, 10)
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    cost = free_energy(x, y)
    back = cost.backward if way == "cost" else cost.total.backward
    back(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    back()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [2 * g for g in once])
    with pytest.raises(RuntimeError, match="second time"):
        back()


class Kept:
    """A tensor that the graph keeps for the backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.identities
@pytest.mark.parametrize("way", ["cost", "total"])
def test_a_kept_cost_holds_no_weights_after_backward(way: str) -> None:
    model = Bayesian(classifier(), Categorical(), seed=0)
    free_energy = FreeEnergy(model, 10)
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def keep(tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        alive.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        cost = free_energy(torch.randn(4, 3), torch.randint(3, (4,)))
    drawn = model.draw(step=1).weights.values()
    assert all(any(torch.equal(kept.tensor, w) for kept in alive) for w in drawn if w.dim() == 2)
    (cost.backward if way == "cost" else cost.total.backward)()
    assert not alive
    assert cost.total.isfinite()
