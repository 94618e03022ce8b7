"""What prediction cannot stack, or would leave behind on the network, is refused at once."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesbackprop as bbb
from bad_call_mistakes import ODD_OUTPUTS, Outputs

pytestmark = pytest.mark.identities

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

WAYS: dict[str, Callable[[bbb.Bayesian], Any]] = {
    "predict": lambda model: model.predict(X, draws=4),
    "predict, local": lambda model: model.predict(X, draws=4, estimator="local"),
    "ensemble": lambda model: model.ensemble(4)(X),
    "predict_mean": lambda model: model.predict_mean(X),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("output", [name for name in ODD_OUTPUTS if name != "a scalar"])
def test_an_output_without_tensors_names_its_type(way: str, output: str) -> None:
    model = bbb.Bayesian(Outputs(ODD_OUTPUTS[output]), bbb.Gaussian(1.0), seed=0)
    with pytest.raises(ValueError, match=r"The 'net' parameter of .* whose output is a tensor, or tensors in tuples"):
        WAYS[way](model)


def test_an_error_of_the_network_itself_is_its_own() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x.no_such_thing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no_such_thing"):
        bbb.Bayesian(Broken(3, 1), bbb.Gaussian(1.0)).predict(X)


class Keeps(nn.Module):
    """A network that keeps what it computes, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(3, 1), way
        self.attribute: Any = "before"
        self.values: list[Tensor] = []
        self.named: dict[str, Tensor] = {}
        self.register_buffer("running", torch.zeros(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        if self.way == "attribute":
            self.attribute = output
        elif self.way == "list":
            self.values.append(output)
        elif self.way == "dict":
            self.named["last"] = output
        elif self.way == "buffer":
            self.running = output
        elif self.way == "new":
            self.fresh = output
        return output


def parallel_ways() -> list[str]:
    return [way for way in WAYS if way != "predict_mean"]


@pytest.mark.parametrize("way", ["attribute", "list", "dict", "buffer", "new"])
@pytest.mark.parametrize("call", parallel_ways())
def test_a_tensor_of_parallel_draws_never_stays_on_the_network(way: str, call: str) -> None:
    model = bbb.Bayesian(Keeps(way), bbb.Gaussian(1.0), seed=0)
    with pytest.raises(ValueError, match="keeps no tensor of parallel draws"):
        WAYS[call](model)
    model.net(X)
    if way != "list":  # of which the first draw, made alone, is an ordinary tensor
        deepcopy(model.net.state_dict())
    for value in (model.net.attribute, model.net.running, *model.net.values, *model.net.named.values()):
        assert repr(value)
        assert "BatchedTensor" not in repr(value)


def test_one_draw_after_the_other_may_be_kept() -> None:
    model = bbb.Bayesian(Keeps("attribute"), bbb.Gaussian(1.0), seed=0)
    one_by_one = model.predict(X, draws=4, memory=1)
    assert isinstance(model.net.attribute, Tensor)
    plain = bbb.Bayesian(deepcopy(model.net), bbb.Gaussian(1.0), seed=0)
    plain.net.way = "nothing"
    assert torch.equal(one_by_one.mean, plain.predict(X, draws=4, memory=1).mean)


def test_a_hook_may_keep_nothing_either() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    net[0].register_forward_hook(lambda module, _, output: setattr(module, "seen", output))
    with pytest.raises(ValueError, match="keeps no tensor of parallel draws"):
        bbb.Bayesian(net, bbb.Gaussian(1.0), seed=0).predict(X, draws=4)
