"""Weight decay on rho is refused at the first step, whoever takes it, and nothing else is."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import bayesbackprop as bbb
from bayesbackprop import Bayesian, FreeEnergy, Gaussian
from bayesbackprop.training import Batches, fit
from networks import X, Y, regression_model, regressor

pytestmark = pytest.mark.identities

REFUSED = r"The 'weight_decay' parameter of \w+ must be 0 for rho, .*model.param_groups\(weight_decay=...\). Got 0.01"

DECAYING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, as it is": torch.optim.AdamW,
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, weight_decay=0.01),
    "a group": lambda p: torch.optim.Adam([{"params": list(p), "weight_decay": 0.01}]),
    "ours": lambda p: bbb.Adam([{"params": list(p), "weight_decay": 0.01}]),
}


def bits(model: nn.Module) -> list[Any]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("make", DECAYING.values(), ids=list(DECAYING))
def test_it_is_refused_in_a_loop_of_ones_own(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = regression_model()
    optimiser, before = make(model.parameters()), bits(model)
    for _ in range(2):  # not only once
        FreeEnergy(model, 16)(X, Y).backward()
        with pytest.raises(ValueError, match=REFUSED):
            optimiser.step()
    torch.testing.assert_close(bits(model), before, rtol=0, atol=0)


def test_it_is_refused_in_fit_and_in_whole_steps() -> None:
    model = regression_model()
    with pytest.raises(ValueError, match=REFUSED):
        fit(model, Batches(X, Y, 8), epochs=1, optimiser=torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=REFUSED):
        DECAYING["ours"](model.parameters()).minimise(FreeEnergy(model, 16), X, Y)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_it_is_refused_of_copies(way: Callable[[Bayesian], Bayesian]) -> None:
    model = way(regression_model())
    FreeEnergy(model, 16)(X, Y).backward()
    with pytest.raises(ValueError, match=REFUSED):
        torch.optim.AdamW(model.parameters()).step()


def test_it_is_refused_of_what_makes_weights_vary_together() -> None:
    model = regression_model(family=bbb.LowRank(2))
    with pytest.raises(ValueError, match=REFUSED):
        torch.optim.AdamW(model.joint.parameters()).step()


def test_a_decay_that_comes_later_is_seen() -> None:
    model = regression_model()
    optimiser = torch.optim.Adam(model.net.parameters(), weight_decay=0.1)
    optimiser.step()
    optimiser.add_param_group({"params": list(model.rho.parameters()), "weight_decay": 0.0})
    optimiser.step()
    optimiser.param_groups[1]["weight_decay"] = 0.01
    with pytest.raises(ValueError, match=REFUSED):
        optimiser.step()


def test_what_is_no_rho_may_decay() -> None:
    model = regression_model()
    torch.optim.AdamW(regressor().parameters()).step()
    torch.optim.AdamW(model.net.parameters()).step()
    torch.optim.AdamW(model.param_groups(weight_decay=0.1)).step()
    torch.optim.Rprop(model.parameters()).step()  # which has none


def test_no_model_and_no_optimiser_is_kept() -> None:
    model = Bayesian(nn.Linear(3, 1), Gaussian(0.3), seed=0)
    optimiser = torch.optim.AdamW(model.param_groups(weight_decay=0.1))
    optimiser.step()
    dead = [weakref.ref(model), weakref.ref(model.rho), weakref.ref(optimiser)]
    del model, optimiser
    gc.collect()
    assert [reference() for reference in dead] == [None, None, None]


def test_whole_steps_are_still_taken_at_once() -> None:
    """The hook is no reason to go through autograd and the step of torch."""
    model = regression_model()
    optimiser = bbb.Adam(model.param_groups())
    assert not optimiser._is_watched()
    removable = register_optimizer_step_pre_hook(lambda *_: None)
    assert optimiser._is_watched()
    removable.remove()
    assert not optimiser._is_watched()
