"""What prediction cannot stack is refused at once, and what networks keep on themselves stays usable."""

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
@pytest.mark.parametrize("output", ["None", "a number", "text", "an array"])
def test_an_output_without_tensors_names_its_type(way: str, output: str) -> None:
    model = bbb.Bayesian(Outputs(ODD_OUTPUTS[output]), bbb.Gaussian(1.0), seed=0)
    with pytest.raises(ValueError, match=r"The 'net' parameter of .* whose output is a tensor, or holds them"):
        WAYS[way](model)


class Changing(nn.Linear):
    """A network whose output holds a number of the drawn weights' own."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), float(self.weight.sum())


def test_a_number_that_differs_between_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="of the same form in all draws"):
        bbb.Bayesian(Changing(3, 1), bbb.Gaussian(1.0), seed=0).outputs(X, draws=3)


def test_an_error_of_the_network_itself_is_its_own() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x.no_such_thing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no_such_thing"):
        bbb.Bayesian(Broken(3, 1), bbb.Gaussian(1.0)).predict(X)


# --- what a network keeps --------------------------------------------------------------------------------------------


class Box:
    """An object that holds a tensor."""

    def __init__(self) -> None:
        self.last: list[Any] = [None]


class Keeps(nn.Module):
    """A network that keeps what it computes, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(3, 1), way
        self.attribute: Any = "before"
        self.values: list[Tensor] = []
        self.named: dict[str, Any] = {}
        self.box = Box()
        self.register_buffer("running", torch.zeros(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        if self.way == "attribute":
            self.attribute = output
        elif self.way == "tuple":
            self.attribute = (output, None)
        elif self.way == "list":
            self.values.append(output)
        elif self.way == "dict":
            self.named["last"] = {"deeper": output}
        elif self.way == "buffer":
            self.running = output
        elif self.way == "object":
            self.box.last[0] = output
        elif self.way == "new":
            self.fresh = output
        return output

    def kept(self) -> Tensor:
        """What it kept last."""
        found: Tensor = {
            "attribute": lambda: self.attribute,
            "tuple": lambda: self.attribute[0],
            "list": lambda: self.values[-1],
            "dict": lambda: self.named["last"]["deeper"],
            "buffer": lambda: self.running,
            "object": lambda: self.box.last[0],
            "new": lambda: self.fresh,
        }[self.way]()
        return found


@pytest.mark.supports("Outputs", "what a network keeps on itself", "that of the last draw")
@pytest.mark.parametrize("way", ["attribute", "tuple", "list", "dict", "buffer", "object", "new"])
@pytest.mark.parametrize("call", [way for way in WAYS if way != "predict_mean"])
def test_what_a_network_keeps_is_that_of_the_last_draw(way: str, call: str) -> None:
    model = bbb.Bayesian(Keeps(way), bbb.Gaussian(1.0), seed=0)
    WAYS[call](model)
    net = model.net
    assert isinstance(net, Keeps)
    if call == "ensemble":  # which has a copy of the network
        assert not net.values
        ensemble = model.ensemble(4)
        outputs = ensemble(X)
        assert isinstance(ensemble.net, Keeps)
        net = ensemble.net
    else:
        outputs = model.outputs(X, draws=4, estimator="local" if "local" in call else None)
    kept = net.kept()
    assert not torch._C._functorch.is_functorch_wrapped_tensor(kept)
    assert not kept.requires_grad
    torch.testing.assert_close(kept, outputs[-1])
    model.net(X)
    deepcopy({name: value.detach() for name, value in model.net.state_dict().items()})


def test_it_is_the_same_draw_by_draw() -> None:
    kept = []
    for memory in (2**30, 1):
        model = bbb.Bayesian(Keeps("attribute"), bbb.Gaussian(1.0), seed=0)
        with torch.no_grad():
            model.net.layer.weight.fill_(0.3)
            model.net.layer.bias.fill_(0.1)
        model.predict(X, draws=4, memory=memory)
        kept.append(model.net.attribute)
    torch.testing.assert_close(*kept)


def test_a_hook_may_keep_something_too() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    net[2].register_forward_hook(lambda module, _, output: setattr(module, "seen", output))
    model = bbb.Bayesian(net, bbb.Gaussian(1.0), seed=0)
    outputs = model.outputs(X, draws=4)
    torch.testing.assert_close(net[2].seen, outputs[-1])


@pytest.mark.filterwarnings("ignore:The chains of refine")
def test_refinement_leaves_what_can_be_used() -> None:
    model = bbb.Bayesian(Keeps("attribute"), bbb.Gaussian(1.0), seed=0)
    bbb.refine(model, (X, X[:, :1]), draws=4, iterations=8, leapfrogs=1, progress=False)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(model.net.attribute)
    assert not model.net.attribute.requires_grad
