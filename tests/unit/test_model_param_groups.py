"""Groups for optimisers: every parameter once, with the rate it was given, and weight decay on the network alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, FreeEnergy, Gaussian
from bayesbackprop.likelihoods import Likelihood
from networks import Tied, X, Y, net_with_norm, regressor

pytestmark = pytest.mark.identities


class Scaled(Gaussian):
    """A likelihood that has a parameter of the network's as well as one of its own."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__("learnt")
        self.shared = shared


def _sharing() -> tuple[nn.Module, Likelihood]:
    net = regressor()
    return net, Scaled(net[0].weight)


MODELS = {
    "fixed noise": lambda: (regressor(), Gaussian(0.1)),
    "learnt noise": lambda: (regressor(), Gaussian("learnt")),
    "norm": lambda: (net_with_norm(), Gaussian(0.1)),
    "tied": lambda: (Tied(), Gaussian(0.1)),
    "shared with the likelihood": _sharing,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_every_parameter_is_in_one_group(make: Any) -> None:
    model = Bayesian(*make(), seed=0)
    groups = model.param_groups(0.1)
    parameters = [parameter for group in groups for parameter in group["params"]]
    assert len(parameters) == len(set(parameters))
    assert set(parameters) == set(model.parameters())
    torch.optim.AdamW(groups)  # which would refuse a parameter that is in two


def test_groups_are_those_of_the_network_of_rho_and_of_the_likelihood() -> None:
    model = Bayesian(net_with_norm(), Gaussian("learnt"), seed=0)
    net, rho, likelihood = model.param_groups(0.1, rho_lr=0.2, weight_decay=0.3)
    assert net == {"params": list(model.net.parameters()), "lr": 0.1, "weight_decay": 0.3}
    assert rho == {"params": list(model.rho.parameters()), "lr": 0.2, "weight_decay": 0.0}
    assert likelihood == {"params": [model.likelihood.log_noise], "lr": 0.1, "weight_decay": 0.0}
    assert len(Bayesian(net_with_norm(), Gaussian(0.1), seed=0).param_groups()) == 2


def test_rates_that_are_left_out_are_the_optimisers_own() -> None:
    model = Bayesian(regressor(), Gaussian("learnt"), seed=0)
    rates = {
        (None, None): [0.5, 0.5, 0.5],
        (0.1, None): [0.1, 0.1, 0.1],
        (None, 0.2): [0.5, 0.2, 0.5],
        (0.1, 0.0): [0.1, 0.0, 0.1],
    }
    for (lr, rho_lr), expected in rates.items():
        optimiser = torch.optim.AdamW(model.param_groups(lr, rho_lr=rho_lr), lr=0.5)
        assert [group["lr"] for group in optimiser.param_groups] == expected
        assert all(group["weight_decay"] == 0 for group in optimiser.param_groups)  # and not AdamW's own 0.01


@pytest.mark.parametrize("optimiser", [torch.optim.AdamW, torch.optim.SGD])
def test_weight_decay_narrows_no_posterior_and_no_noise(optimiser: type[torch.optim.Optimizer]) -> None:
    """With gradients of 0 only weight decay moves anything."""
    model = Bayesian(regressor(), Gaussian("learnt", initial=0.5), seed=0)
    FreeEnergy(model, 100)(X, Y).backward()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, Tensor)
        parameter.grad.zero_()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimiser(model.param_groups(0.1, weight_decay=0.5), lr=0.1).step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (not name.startswith("net.")), name


@pytest.mark.parametrize("argument", ["lr", "rho_lr", "weight_decay"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.1", True])
def test_bad_rates_are_refused(argument: str, value: Any) -> None:
    model = Bayesian(regressor(), Gaussian(0.1), seed=0)
    with pytest.raises(ValueError, match=f"The '{argument}' parameter of Bayesian.param_groups must be a float in"):
        model.param_groups(**{argument: value})
