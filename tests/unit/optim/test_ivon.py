"""IVON: the equations of its paper on our own noise, what it leaves to Adam, its state, and what it refuses."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bayesbackprop as bbb
from bayesbackprop import IVON, Bayesian, FreeEnergy, Gaussian, Normal
from bayesbackprop.callbacks import Checkpoint
from bayesbackprop.training import Batches, fit
from networks import X, Y, net_with_norm, regression_model, regressor

N, STEPS, LR, HESSIAN = 40, 30, 0.3, 4.0
BETAS = (0.8, 0.9)


def model(**options: Any) -> Bayesian:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = regressor().double()
    return Bayesian(net, Gaussian(0.3), **{"prior": Normal(0.7), "seed": 3, **options})


def closed(made: Bayesian, **options: Any) -> FreeEnergy:
    return FreeEnergy(made, N, complexity="closed", **options)


def train(free_energy: FreeEnergy, optimiser: torch.optim.Optimizer, steps: int = STEPS) -> None:
    x, y = X.double(), Y.double()
    for _ in range(steps):
        optimiser.zero_grad()
        free_energy(x, y).backward()
        optimiser.step()


def parameters_of(made: Bayesian) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in made.parameters()]


# --- the numbers -----------------------------------------------------------------------------------------------------


def published(made: Bayesian, draws: int, temperature: float, hess_init: float, rescale: bool) -> dict[str, Any]:
    """The equations as the paper has them, with h in memory, on the draws that the model makes."""
    x, y, (beta1, beta2) = X.double(), Y.double(), BETAS
    ess = N / temperature
    priors = {entry.name: entry.prior.sigma for entry in made.plan if isinstance(entry.prior, Normal)}
    centres = dict(made.centre.named_buffers())
    mu = {name: q.mu.detach().clone() for name, q in made.posterior.items()}
    delta = {name: 1 / (priors[name] ** 2 * ess) for name in mu}
    h = {name: torch.full_like(value, hess_init) for name, value in mu.items()}
    g = {name: torch.zeros_like(value) for name, value in mu.items()}
    sigma = {name: (ess * (h[name] + delta[name])).rsqrt() for name in mu}
    for t in range(1, STEPS + 1):
        slopes = {name: torch.zeros_like(value) for name, value in mu.items()}
        hessians = copy.deepcopy(slopes)
        for index in range(draws):
            with torch.no_grad():  # the noise is a function of the key alone
                unit = {
                    name: (w - q.mu) / q.sigma
                    for (name, w), q in zip(made.draw(t, index).weights.items(), made.posterior.values(), strict=True)
                }
            w = {name: (mu[name] + sigma[name] * unit[name]).requires_grad_() for name in mu}
            cost = made.likelihood.cost(functional_call(made.net, w, (x,)), y)
            for name, slope in zip(w, torch.autograd.grad(cost, [*w.values()]), strict=True):
                slopes[name] += slope / draws
                hessians[name] += slope * (w[name] - mu[name]).detach() / sigma[name] ** 2 / draws
        for name in mu:
            old, new, d = h[name], hessians[name], delta[name]
            g[name] = beta1 * g[name] + (1 - beta1) * slopes[name]
            h[name] = beta2 * old + (1 - beta2) * new + 0.5 * (1 - beta2) ** 2 * (old - new) ** 2 / (old + d)
            rate = LR * (hess_init + d) if rescale else LR
            to_prior = d * (mu[name] - centres.get(name, 0.0))
            mu[name] = mu[name] - rate * (g[name] / (1 - beta1**t) + to_prior) / (h[name] + d)
            sigma[name] = (ess * (h[name] + d)).rsqrt()
    return {name: (mu[name], sigma[name]) for name in mu}


CASES: dict[str, dict[str, Any]] = {
    "one draw": {},
    "three draws": {"draws": 3},
    "cold": {"temperature": 0.3},
    "two priors": {"prior": {"*.bias": Normal(2.0), "*": Normal(0.5)}},
    "centred on the network": {"centre": "net"},
    "rate as it is": {"rescale_lr": False},
    "little curvature": {"hess_init": 0.5},
}


@pytest.mark.equivalence
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_its_steps_are_those_of_the_paper(case: dict[str, Any]) -> None:
    options = {name: value for name, value in case.items() if name in ("prior", "centre")}
    draws, temperature = case.get("draws", 1), case.get("temperature", 1.0)
    hess_init, rescale = case.get("hess_init", HESSIAN), case.get("rescale_lr", True)
    expected = published(model(**options), draws, temperature, hess_init, rescale)
    made = model(**options)
    free_energy = closed(made, draws=draws, temperature=temperature)
    train(free_energy, IVON(free_energy, LR, betas=BETAS, hess_init=hess_init, rescale_lr=rescale))
    for name, q in made.posterior.items():
        torch.testing.assert_close((q.mu.detach(), q.sigma.detach()), expected[name], rtol=1e-8, atol=1e-8)


@pytest.mark.supports("Training", "IVON", "the steps of its authors' package")
@pytest.mark.equivalence
def test_its_steps_are_those_of_the_package_of_its_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    ivon = pytest.importorskip("ivon")
    made, theirs = model(), model().net
    free_energy = closed(made)
    ours = IVON(free_energy, LR, betas=BETAS, hess_init=HESSIAN)
    settings = {"ess": N, "hess_init": HESSIAN, "beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": 1 / (0.49 * N)}
    other = ivon.IVON(theirs.parameters(), lr=LR, **settings)
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            drawn = made.draw(step).weights
            noise = torch.cat([((drawn[name] - q.mu) / q.sigma).flatten() for name, q in made.posterior.items()])
        monkeypatch.setattr(torch, "randn", lambda *_, noise=noise, **__: noise)
        with other.sampled_params(train=True):
            other.zero_grad()
            made.likelihood.cost(theirs(X.double()), Y.double()).backward()
        other.step()
        train(free_energy, ours, 1)
    for q, weight in zip(made.posterior.values(), theirs.parameters(), strict=True):
        torch.testing.assert_close(q.mu, weight, rtol=1e-8, atol=1e-8)
    sigma = (N * (other.param_groups[0]["hess"] + other.param_groups[0]["weight_decay"])).rsqrt()
    torch.testing.assert_close(torch.cat([q.sigma.flatten() for q in made.posterior.values()]).detach(), sigma)


@pytest.mark.equivalence
@pytest.mark.parametrize("centre", [None, "net"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_kernel_computes_what_the_equations_say(dtype: torch.dtype, centre: Any) -> None:
    """At sigmas of all sizes, and gradients that change them by little and by much."""
    results, net = [], nn.Linear(700, 3).to(dtype)
    for kernels in (nullcontext, bbb.plain_kernels):
        random = torch.Generator().manual_seed(0)
        made = Bayesian(copy.deepcopy(net), Gaussian(0.3), Normal(0.7), centre=centre, seed=0)
        optimiser = IVON(FreeEnergy(made, N, complexity="closed"), 1e-5, betas=BETAS, rescale_lr=False)
        with torch.no_grad():
            for q in made.posterior.values():
                q.mu.normal_(generator=random)
                q.rho.uniform_(-60, 50, generator=random)
                q.rho.view(-1)[::3] = q.rho.view(-1)[::3] / 10
                q.rho.view(-1)[1::50] = -1e30
        with kernels():
            for _ in range(3):
                for q in made.posterior.values():
                    q.mu.grad, q.rho.grad = (torch.empty_like(q.mu).normal_(generator=random) for _ in range(2))
                    q.rho.grad *= 10 ** torch.empty_like(q.mu).uniform_(-6, 0, generator=random)
                optimiser.step()
        means = [state["exp_avg"] for state in optimiser.state.values()]
        results.append([*parameters_of(made), *means])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(*results, rtol=40 * eps, atol=40 * eps)
    assert not torch.equal(results[0][2], results[1][2])  # they are two ways


@pytest.mark.identities
def test_the_first_sigma_is_that_of_the_hessian_to_begin_with() -> None:
    made = model(sigma=0.02)
    IVON(closed(made))
    assert all(torch.allclose(q.sigma, torch.tensor(0.02, dtype=q.mu.dtype)) for q in made.posterior.values())
    IVON(closed(made, temperature=0.5), hess_init=3.0)
    expected = (N / 0.5 * (3.0 + 0.5 / (0.49 * N))) ** -0.5
    assert all(torch.allclose(q.sigma, torch.tensor(expected, dtype=q.mu.dtype)) for q in made.posterior.values())


@pytest.mark.identities
def test_without_a_hessian_to_begin_with_it_goes_on_from_sigma() -> None:
    """Two runs, the second with a new optimiser, whose momentum begins at nothing."""
    one, other = model(), model()
    for made in (one, other):
        free_energy = closed(made)
        optimiser = IVON(free_energy, LR, betas=(0.0, 0.9), hess_init=HESSIAN)
        train(free_energy, optimiser, 5)
        if made is other:
            scale = optimiser.param_groups[0]["scale"]
            optimiser = IVON(free_energy, LR * scale, betas=(0.0, 0.9), rescale_lr=False)
        train(free_energy, optimiser, 5)
    torch.testing.assert_close(parameters_of(one), parameters_of(other))


@pytest.mark.equivalence
def test_accumulated_gradients_are_those_of_one_batch() -> None:
    one, other = model(), model()
    x, y = X.double(), Y.double()
    for made, parts in ((one, 1), (other, 2)):
        free_energy = closed(made)
        optimiser = IVON(free_energy, LR, betas=BETAS, hess_init=HESSIAN)
        for step in range(1, 6):
            optimiser.zero_grad()
            for _ in range(parts):
                (free_energy(x, y, step=step) / parts).backward()
            optimiser.step()
    torch.testing.assert_close(parameters_of(one), parameters_of(other))


# --- what is not random ----------------------------------------------------------------------------------------------


@pytest.mark.equivalence
def test_what_has_no_distribution_is_trained_by_adam() -> None:
    made = Bayesian(net_with_norm(), Gaussian("learnt"), seed=0)
    free_energy = FreeEnergy(made, N, complexity="closed")
    optimiser = IVON(free_energy, rest_lr=0.02)
    bayesian, rest = optimiser.param_groups
    assert set(rest["params"]) == {*made.net[1].parameters(), *made.likelihood.parameters()}
    assert set(bayesian["params"]) | set(rest["params"]) == set(made.parameters())
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in rest["params"]]
    theirs = torch.optim.Adam(twins, lr=0.02)
    for _ in range(5):
        optimiser.zero_grad()
        free_energy(X, torch.cat([Y, -Y], 1)).backward()
        for parameter, twin in zip(rest["params"], twins, strict=True):
            twin.grad = parameter.grad.clone()
        optimiser.step()
        theirs.step()
    torch.testing.assert_close(rest["params"], twins)


@pytest.mark.identities
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_constant_weights_stay_as_they_are(dtype: torch.dtype) -> None:
    pruned = bbb.prune(regression_model(), 0.5).to(dtype)
    constant = {name: ~q.random for name, q in pruned.posterior.items()}
    before = {name: q.rho.detach().clone() for name, q in pruned.posterior.items()}
    free_energy = FreeEnergy(pruned, N, complexity="closed")
    optimiser = IVON(free_energy, LR, betas=BETAS, hess_init=HESSIAN)
    for _ in range(3):
        optimiser.zero_grad()
        free_energy(X.to(dtype), Y.to(dtype)).backward()
        optimiser.step()
    for name, q in pruned.posterior.items():
        assert torch.equal(~q.random, constant[name])
        assert int(q.mu[constant[name]].count_nonzero()) == 0
        assert torch.equal(q.rho[constant[name]], before[name][constant[name]])
        assert not (q.rho == before[name])[~constant[name]].any()


@pytest.mark.identities
def test_what_has_no_gradient_is_left_alone() -> None:
    made = model()
    free_energy, before = closed(made), parameters_of(made)
    optimiser = IVON(free_energy)
    optimiser.step()
    torch.testing.assert_close(parameters_of(made), before, rtol=0, atol=0)
    free_energy(X.double(), Y.double()).backward()
    made.rho.get_parameter("0.weight").grad = None
    with pytest.raises(ValueError, match=r"those of both mu and rho. Got only that of mu"):
        optimiser.step()


# --- its state -------------------------------------------------------------------------------------------------------


@pytest.mark.equivalence
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_its_state_goes_on(way: str) -> None:
    made = model()
    free_energy = closed(made)
    optimiser = IVON(free_energy, LR, betas=BETAS, hess_init=HESSIAN)
    train(free_energy, optimiser, 3)
    if way == "state_dict":
        other = closed(model())
        again = IVON(other)
        other.load_state_dict(free_energy.state_dict())
        again.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    else:
        again = copy.deepcopy(optimiser) if way == "deepcopy" else pickle.loads(pickle.dumps(optimiser))
        other = again.objective
        assert other is not free_energy
    train(free_energy, optimiser, 3)
    train(other, again, 3)
    torch.testing.assert_close(parameters_of(other.model), parameters_of(made), rtol=0, atol=0)


@pytest.mark.learning
@pytest.mark.parametrize("given", ["model", "objective"])
def test_fit_minimises_its_objective(given: str, tmp_path: Path) -> None:
    made = regression_model()
    free_energy = FreeEnergy(made, len(X), complexity="closed")
    optimiser = IVON(free_energy, 0.1, betas=(0.9, 0.99), hess_init=10.0)
    callbacks = [Checkpoint(tmp_path / "run")]
    what = made if given == "model" else free_energy
    history = fit(what, Batches(X, X.sum(1, keepdim=True), 8), epochs=100, optimiser=optimiser, callbacks=callbacks)
    assert int(free_energy.step) == 200  # it was this one
    assert history[-1]["cost"] < 0.5 * history[0]["cost"]


@pytest.mark.learning
def test_what_follows_training_works_as_ever(tmp_path: Path) -> None:
    made = model()
    free_energy = closed(made)
    train(free_energy, IVON(free_energy, 0.1, betas=(0.9, 0.99), hess_init=10.0), 300)
    x = X.double()
    bbb.save(made, tmp_path / "model")
    loaded = bbb.load(tmp_path / "model", regressor().double())
    assert torch.equal(loaded.predict(x, draws=5, seed=0).mean, made.predict(x, draws=5, seed=0).mean)
    assert made.ensemble(3).predict(x).mean.shape == Y.shape
    assert "median snr" in made.report()
    assert int((bbb.prune(made, 0.5).net[0].weight == 0).sum()) > 0


# --- what it refuses -------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a model": (lambda: IVON(model()), "'objective' parameter of IVON must be a FreeEnergy"),  # type: ignore[arg-type]
    "sampled": (lambda: IVON(FreeEnergy(model(), N)), "'complexity' parameter of IVON must be 'closed'"),
    "warm-up": (lambda: IVON(closed(model(), warmup=5)), "'warmup' parameter of IVON must be 0"),
    "weights of minibatches": (
        lambda: IVON(closed(model(), minibatch_weights="geometric", batch_size=10)),
        "'minibatch_weights' parameter of IVON must be 'uniform'",
    ),
    "no temperature": (lambda: IVON(closed(model(), temperature=0.0)), "'temperature' parameter of IVON"),
    "another prior": (lambda: IVON(closed(model(prior=bbb.Laplace(1.0)))), "'prior' parameter of IVON must be Normal"),
    "a family": (lambda: IVON(closed(model(family=bbb.LowRank(2)))), "'family' parameter of IVON must be Diagonal"),
    "a rate below 0": (lambda: IVON(closed(model()), -0.1), "'lr' parameter of IVON must be a float in"),
    "betas": (lambda: IVON(closed(model()), betas=(0.9, 1.0)), "'betas' parameter of IVON must be two floats in"),
    "a Hessian below 0": (lambda: IVON(closed(model()), hess_init=-1.0), "'hess_init' parameter of IVON"),
    "a flag": (lambda: IVON(closed(model()), rescale_lr=1), "'rescale_lr' parameter of IVON"),  # type: ignore[arg-type]
}


@pytest.mark.identities
@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=list(WRONG))
def test_what_it_cannot_be_right_for_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.identities
def test_what_is_refused_leaves_sigma_as_it_was() -> None:
    made = model(prior={"2.*": bbb.Laplace(1.0), "*": Normal(1.0)})
    before = parameters_of(made)
    with pytest.raises(ValueError, match="must be Normal"):
        IVON(closed(made), hess_init=1.0)
    torch.testing.assert_close(parameters_of(made), before, rtol=0, atol=0)


@pytest.mark.identities
def test_fit_refuses_what_would_change_the_size_of_gradients_or_their_meaning() -> None:
    made = regression_model()
    optimiser = IVON(FreeEnergy(made, 16, complexity="closed"))
    batches = Batches(X, Y, 8)
    with pytest.raises(ValueError, match="'clip' parameter of fit must be None with IVON"):
        fit(made, batches, epochs=1, optimiser=optimiser, clip=1.0)
    for other in (FreeEnergy(made, 16, complexity="closed"), made):
        with pytest.raises(ValueError, match="'optimiser' parameter of fit must be one for this objective"):
            fit(other, batches, epochs=1, n=20 if other is made else None, optimiser=optimiser)


@pytest.mark.identities
def test_a_network_with_other_parameters_is_refused() -> None:
    made = model()
    free_energy = closed(made)
    optimiser = IVON(free_energy)
    free_energy(X.double(), Y.double()).backward()
    made.net[0].weight = nn.Parameter(made.net[0].weight.detach().clone())
    with pytest.raises(ValueError, match="one whose model has the parameters it had"):
        optimiser.step()
