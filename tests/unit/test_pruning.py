"""Pruning removes exactly what it should, for good."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Adam, Bayesian, FreeEnergy, Gaussian, Normal, ScaleMixture, load, plain_kernels, prune, save
from bayesbackprop._networks import mlp
from bayesbackprop.pruning import forget_momentum, snr, threshold, weights_left

pytestmark = pytest.mark.identities


def _model(**kwargs: Any) -> Bayesian:
    kwargs.setdefault("sigma", lambda mu: 0.01 + 0.1 * torch.rand_like(mu))
    return Bayesian(mlp((5, 7, 3)), Gaussian(0.5), **kwargs)


def _removed(model: Bayesian) -> Tensor:
    return torch.cat([((q.mu == 0) & (q.sigma == 0)).flatten() for q in model.posterior.values()])


# --- which weights go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0, 0.01, 0.3, 0.5, 0.98, 1])
def test_the_lowest_of_all_layers_together_go(fraction: float) -> None:
    model = _model()
    ratios, pruned = snr(model), prune(model, fraction)
    n = len(ratios)
    gone = _removed(pruned)
    assert int(gone.sum()) == round(fraction * n) == n - weights_left(pruned)
    if 0 < fraction < 1:
        assert float(ratios[gone].max()) < float(ratios[~gone].min())
        assert float(ratios[gone].max()) == pytest.approx(threshold(model, fraction))
    for name, q in pruned.posterior.items():
        left = ~((q.mu == 0) & (q.sigma == 0))
        assert torch.equal(q.mu[left], model.posterior[name].mu[left])
        assert torch.equal(q.rho[left], model.posterior[name].rho[left])


def test_layers_are_ranked_together_by_the_ratio_and_not_by_size() -> None:
    model = Bayesian(mlp((1, 1, 1)), Gaussian(1.0), {"0.weight": Normal(1.0), "*": Normal(2.0)})
    means, sigmas = [100.0, -1.0, 0.5, -3.0], [50.0, 1.0, 0.01, 1.0]  # ratios 2, 1, 50, 3
    with torch.no_grad():
        for q, mu, sigma in zip(model.posterior.values(), means, sigmas, strict=True):
            q.mu.fill_(mu)
            q.rho.copy_(torch.tensor(sigma).expm1().log())
    assert snr(model).tolist() == pytest.approx([2, 1, 50, 3], rel=1e-5)
    assert _removed(prune(model, 0.5)).tolist() == [True, True, False, False]
    assert threshold(model, 0.5) == pytest.approx(2)


def test_of_equal_ones_the_first_go() -> None:
    model = _model(sigma=0.1)
    with torch.no_grad():
        for q in model.posterior.values():
            q.mu.fill_(-0.5)
    n = len(snr(model))
    for count in range(n + 1):
        assert _removed(prune(model, count / n)).tolist() == [True] * count + [False] * (n - count)


def test_what_is_pruned_counts_when_pruned_again() -> None:
    model = _model()
    with torch.no_grad():
        model.net[2].bias.zero_()  # as low as what has been pruned, but random
    half = prune(model, 0.5)
    for fraction in (0.1, 0.5):
        assert torch.equal(_removed(prune(half, fraction)), _removed(half))
    assert torch.equal(_removed(prune(half, 0.8)), _removed(prune(model, 0.8)))


def test_the_model_is_not_changed_and_shares_nothing_with_the_pruned_one() -> None:
    model = _model()
    before = copy.deepcopy(model.state_dict())
    pruned = prune(model, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    pointers = {tensor.data_ptr() for tensor in model.parameters()}
    assert not any(tensor.data_ptr() in pointers for tensor in pruned.parameters())


def test_constants_that_are_not_zero_go_last_and_a_tiny_sigma_is_no_nan() -> None:
    model = Bayesian(nn.Embedding(4, 2, padding_idx=0), Gaussian(1.0))
    with torch.no_grad():
        model.net.weight[0] = 5.0
        model.rho.weight[3] = -300.0  # sigma is 0 in single precision, but the weight is random
        model.net.weight[3, 0] = 0.0
    assert snr(model)[:2].tolist() == [float("inf")] * 2
    assert snr(model)[6] == 0
    assert not snr(model).isnan().any()
    assert not _removed(prune(model, 0.6))[:2].any()


@pytest.mark.parametrize("fraction", [-0.1, 1.1, "half", None, float("nan")])
def test_a_bad_fraction_is_refused(fraction: Any) -> None:
    with pytest.raises(ValueError, match=r"'fraction' parameter of prune must be a float in \[0, 1\]"):
        prune(_model(), fraction)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a Bayesian"):
        prune(mlp((2, 2)), 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["net", "rho"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_pruned(bad: float, part: str) -> None:
    model = _model()
    with torch.no_grad():
        next(iter(getattr(model, part).parameters())).view(-1)[0] = bad
    with pytest.raises(ValueError, match=r"'model' parameter of prune must be finite\. Got NaN or inf in 1 of"):
        prune(model, 0.5)


# --- what it means to be pruned --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [ScaleMixture(), Normal(0.3)], ids=["mixture", "normal"])
@torch.no_grad()
def test_pruned_weights_cost_nothing(prior: Any) -> None:
    pruned = prune(_model(prior=prior), 1)
    with plain_kernels():
        assert float(pruned.draw().complexity()) == 0
    # The fused kernel adds a term for them, of up to 8 nats, and takes it away again: to the rounding of both.
    assert abs(float(pruned.draw().complexity())) <= len(snr(pruned)) * 2 * 8 * 2**-24


@torch.no_grad()
def test_the_cost_of_a_pruned_model_is_that_of_what_is_left() -> None:
    model = _model(prior=Normal(0.3))
    half = prune(model, 0.5)
    left = [(q.mu[q.random], q.sigma[q.random]) for q in half.posterior.values()]
    mu, sigma = (torch.cat(parts) for parts in zip(*left, strict=True))
    q, prior = torch.distributions.Normal(mu, sigma), torch.distributions.Normal(0, 0.3)
    expected = torch.distributions.kl_divergence(q, prior).sum()
    assert float(half.complexity_closed()) == pytest.approx(float(expected), rel=1e-5)
    assert float(prune(model, 1).complexity_closed()) == 0


@pytest.mark.parametrize("estimator", [None, "shared", "local", "flipout"])
def test_draws_of_a_network_without_random_weights_are_constant(estimator: Any) -> None:
    pruned = prune(_model(), 1)
    prediction = pruned.predict(torch.randn(4, 5), draws=10, estimator=estimator)
    assert float(prediction.mean.abs().max()) == 0
    assert float(prediction.epistemic.abs().max()) == 0


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "our Adam": lambda p: Adam(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
}


def _train(model: Bayesian, optimiser: torch.optim.Optimizer, steps: int = 10, step: int = 0) -> None:
    free_energy = FreeEnergy(model, n=20)
    free_energy.step.fill_(step)
    generator = torch.Generator().manual_seed(step)
    for _ in range(steps):
        optimiser.zero_grad()
        free_energy(torch.randn(20, 5, generator=generator), torch.randn(20, 3, generator=generator)).backward()
        optimiser.step()


@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=list(OPTIMISERS))
@pytest.mark.parametrize("old_state", [False, True], ids=["new", "with old momentum"])
def test_training_leaves_pruned_weights_at_zero(make: Any, old_state: bool) -> None:
    model = _model()
    before = make(model.param_groups(weight_decay=0.1))
    _train(model, before)
    pruned = prune(model, 0.6)
    gone, left = _removed(pruned), copy.deepcopy(pruned.state_dict())
    optimiser = make(pruned.param_groups(weight_decay=0.1))
    if old_state:
        optimiser.load_state_dict(before.state_dict())
        forget_momentum(pruned, optimiser)
    _train(pruned, optimiser, step=10)
    assert torch.equal(_removed(pruned), gone)
    assert not torch.equal(pruned.state_dict()["net.0.weight"], left["net.0.weight"])  # the rest goes on


def test_without_forgetting_momentum_moves_them() -> None:
    model = _model()
    before = torch.optim.Adam(model.parameters(), 0.01)
    _train(model, before)
    pruned = prune(model, 0.6)
    again = torch.optim.Adam(pruned.parameters(), 0.01)
    again.load_state_dict(before.state_dict())
    _train(pruned, again, step=10)
    assert int(_removed(pruned).sum()) < len(snr(model)) * 0.6 - 1
    with pytest.raises(ValueError, match="one that trains the model"):
        forget_momentum(pruned, before)


@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
def test_no_estimator_gives_pruned_weights_a_gradient(estimator: Any) -> None:
    pruned = prune(_model(estimator=estimator), 0.6)
    FreeEnergy(pruned, n=20)(torch.randn(20, 5), torch.randn(20, 3)).backward()
    for q in pruned.posterior.values():
        assert q.mu.grad is not None
        assert q.rho.grad is not None
        for gradient in (q.mu.grad, q.rho.grad):
            assert float(gradient[~q.random].abs().sum()) == 0
            assert float(gradient[q.random].abs().min()) > 0 or q.numel < 10


def test_a_pruned_model_survives_its_file(tmp_path: Path) -> None:
    pruned = prune(_model(), 0.6)
    save(pruned, tmp_path / "model")
    assert torch.equal(_removed(load(tmp_path / "model", mlp((5, 7, 3)))), _removed(pruned))


# --- half precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pruned_first", [True, False], ids=["pruned, then half", "half, then pruned"])
@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
def test_removed_weights_stay_removed_in_half_precision(pruned_first: bool, dtype: torch.dtype, estimator: Any) -> None:
    """The rho of constant weights does not fit into float16; what it becomes there must still mean constant."""
    model = _model(estimator=estimator, seed=0)
    pruned = prune(model, 0.5).to(dtype) if pruned_first else prune(model.to(dtype), 0.5)
    gone = _removed(pruned)
    assert int(gone.sum()) == len(gone) // 2
    x, y = torch.randn(4, 5).to(dtype), torch.randn(4, 3).to(dtype)
    optimiser = torch.optim.SGD(pruned.param_groups(weight_decay=0.1), lr=0.01, momentum=0.9)
    for _ in range(2):
        optimiser.zero_grad()
        cost = FreeEnergy(pruned, n=100)(x, y)
        assert cost.isfinite()
        cost.backward()
        for q in pruned.posterior.values():
            assert torch.equal(q.mu.grad[~q.random], torch.zeros_like(q.mu.grad[~q.random]))
            assert torch.equal(q.rho.grad[~q.random], torch.zeros_like(q.rho.grad[~q.random]))
        optimiser.step()
    assert torch.equal(_removed(pruned), gone)
    weights = torch.cat([w.flatten() for w in pruned.draw().weights.values()])
    assert torch.equal(weights == 0, gone)
    assert pruned.predict(x, draws=3).mean.isfinite().all()
    assert torch.equal(_removed(copy.deepcopy(pruned).float()), gone)
