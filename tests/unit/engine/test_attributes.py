"""What a network keeps on itself: copies have it without its graph, and weights that it keeps are noticed."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from bayesbackprop import Bayesian, Categorical, DrawnNetwork, FreeEnergy, mean_network, prune

pytestmark = pytest.mark.identities


class Keeping(nn.Module):
    """Stores what it computed: on itself, in a list and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("kept", torch.zeros(1, 4))
        self.around: dict[str, Any] = {}
        self.around["itself"] = self.around

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        self.hidden, self.all, self.kept = hidden, [{"hidden": hidden}], hidden
        return self.head(hidden)


COPIES: dict[str, Callable[[Bayesian], Any]] = {
    "deepcopy": copy.deepcopy,
    "ensemble": lambda model: model.ensemble(3),
    "prune": lambda model: prune(model, 0.5),
    "mean_network": mean_network,
    "drawn network": DrawnNetwork,
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_network_that_kept_what_it_computed_in_training_is_copied(kind: str) -> None:
    model, x = Bayesian(Keeping(), Categorical(), seed=0), torch.randn(5, 3)
    FreeEnergy(model, n=5)(x, torch.zeros(5, dtype=torch.int64)).backward()
    kept = model.net.hidden
    copied = COPIES[kind](model)
    holder = copied if isinstance(copied, nn.Module) else copied.net
    (net,) = (module for module in holder.modules() if isinstance(module, Keeping))
    assert model.net.hidden is kept
    assert kept.grad_fn is not None
    for tensor in (net.hidden, net.kept, net.all[0]["hidden"]):
        assert torch.equal(tensor, kept)
        assert tensor.grad_fn is None
    assert net.hidden is net.kept is net.all[0]["hidden"]  # one tensor stays one


class Remembering(nn.Module):
    """Computes something from its weights once."""

    def __init__(self) -> None:
        super().__init__()
        self.raw, self.cache = nn.Parameter(torch.ones(2, 3)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = self.raw.exp()
        return x @ self.cache.T


def test_draws_that_are_all_the_same_are_noticed() -> None:
    x = torch.randn(5, 3)
    with pytest.warns(UserWarning, match="Two draws of the weights gave the same outputs"):
        Bayesian(Remembering(), Categorical(), seed=0).predict(x, draws=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Bayesian(Remembering(), Categorical(), seed=0).predict(x, draws=1)
        Bayesian(Remembering(), Categorical(), sigma=1e-9, seed=0).predict(x, draws=3)  # they hardly differ


def test_weights_that_parametrizations_cache_are_refused() -> None:
    model, x = Bayesian(parametrizations.weight_norm(nn.Linear(3, 2)), Categorical(), seed=0), torch.randn(5, 3)
    expected = model.predict(x, draws=3).mean
    with parametrize.cached(), pytest.raises(RuntimeError, match=r"parametrize\.cached"):
        model.predict(x)
    assert torch.equal(model.predict(x, draws=3).mean, expected)
