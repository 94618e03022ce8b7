"""The seed of a model: of all its noise, in its files, and the only number it may take from torch's generator."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Gaussian, load, prune, save
from networks import X, Y, classifier, regression_model, regressor

pytestmark = pytest.mark.identities


def _noise(model: Bayesian) -> list[Tensor]:
    """Of a draw, of a training step and of both ways to predict."""
    ensemble = model.ensemble(2).predict(X).mean
    return [model.draw()(X), FreeEnergy(model, 100)(X, Y).total, model.predict(X, draws=2).mean, ensemble]


# --- assigning it ----------------------------------------------------------------------------------------------------


def test_a_seed_that_is_assigned_decides_the_noise() -> None:
    model = regression_model()
    other = Bayesian(copy.deepcopy(model.net), Gaussian(0.3), seed=5)
    before = _noise(model)
    model.seed = 5
    assert model.seed == 5
    for old, new, expected in zip(before, _noise(model), _noise(other), strict=True):
        assert torch.equal(new, expected)
        assert not torch.equal(new, old)


def test_a_seed_that_is_assigned_is_saved(tmp_path: Path) -> None:
    model = regression_model()
    model.seed = 5
    assert copy.deepcopy(model).seed == 5
    twin = regression_model()
    twin.load_state_dict(model.state_dict())
    save(model, tmp_path / "model")
    for again in (twin, load(tmp_path / "model", regressor())):
        assert again.seed == 5
        assert all(torch.equal(one, other) for one, other in zip(_noise(again), _noise(model), strict=True))


# --- mistakes --------------------------------------------------------------------------------------------------------


def _assign(seed: Any) -> None:
    regression_model().seed = seed


TAKERS: dict[str, Callable[[Any], Any]] = {
    "Bayesian": lambda seed: Bayesian(regressor(), Gaussian(0.3), seed=seed),
    "assignment": _assign,
    "draw": lambda seed: regression_model().draw(seed=seed),
    "predict": lambda seed: regression_model().predict(X, draws=2, seed=seed),
    "predict, shared": lambda seed: regression_model().predict(X, draws=2, seed=seed, estimator="shared"),
    "ensemble": lambda seed: regression_model().ensemble(2, seed=seed),
}


@pytest.mark.parametrize("take", TAKERS.values(), ids=list(TAKERS))
@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 5, True, False, 5.0, "5", torch.tensor(5)], ids=repr)
def test_bad_seeds_are_refused_wherever_one_is_taken(take: Callable[[Any], Any], seed: Any) -> None:
    with pytest.raises(
        ValueError, match=r"The 'seed' parameter of Bayesian must be an int in \[0, 9223372036854775808\)"
    ):
        take(seed)


@pytest.mark.parametrize("take", TAKERS.values(), ids=list(TAKERS))
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_least_and_the_largest_seed_are_taken(take: Callable[[Any], Any], seed: int) -> None:
    take(seed)


def test_a_seed_that_is_refused_leaves_the_old_one() -> None:
    model = regression_model()
    with pytest.raises(ValueError, match="'seed'"):
        model.seed = -1
    assert model.seed == 0
    assert int(model.state_dict()["_seed"]) == 0


# --- torch's own generator -------------------------------------------------------------------------------------------


def _use(net: nn.Module, path: Path, estimator: Any) -> None:
    """All that a user does with a model, from wrapping to saving."""
    x, y = torch.linspace(-1, 1, 12).reshape(4, 3), torch.tensor([0, 1, 2, 0])
    model = Bayesian(net, Categorical(), estimator=estimator, seed=0)
    free_energy = FreeEnergy(model, 10, draws=2)
    optimiser = torch.optim.Adam(model.param_groups(1e-3))
    free_energy(x, y).backward()
    optimiser.step()
    with torch.no_grad():
        free_energy(x, y)
    for how in (None, "shared", "local", "flipout"):
        model.predict(x, draws=3, estimator=how)
    model.predict_mean(x), model.ensemble(3).predict(x), model.draw()(x), model.report()
    save(prune(model, 0.5), path)
    load(path, copy.deepcopy(net))


@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
def test_no_number_is_taken_from_torchs_generator(estimator: str, tmp_path: Path) -> None:
    nets = [classifier(), nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 3, 3), nn.Flatten())]
    for net in nets:
        before = torch.get_rng_state()
        _use(net, tmp_path / "model", estimator)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_model_without_a_seed_takes_one_number() -> None:
    torch.manual_seed(3)
    net = regressor()
    before = torch.get_rng_state()
    model = Bayesian(net, Gaussian(0.3))
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    assert model.seed == int(torch.randint(2**63 - 1, ()))
    assert torch.equal(torch.get_rng_state(), after)
