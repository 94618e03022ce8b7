"""Fully connected networks, in training and in prediction.

The networks of the paper are ``nn.Linear`` and elementwise functions, one after the other. Their backward pass is three
lines, so training draws the weights and runs the layers in one node of the caller's graph: a small network
notices autograd's bookkeeping of every operation, and gradients of the weights that nobody else
can see become those of mu in place. How the noise enters a layer is its rule's matter (``linear.py``).

For prediction: the outputs of a linear layer with independent Gaussian weights are, given one input, independent
Gaussians; so for each example a draw of the outputs is as good as a draw of the weights:

op(x, mu) + sqrt(op(x^2, sigma^2)) * zeta

The first random layer has the same input in all draws: two products serve them all. In later layers that is worth two
products a draw only while a draw of the weights costs more, which is for few examples. Either way each example has
exactly the predictive distribution of drawn networks; what differs is only whether examples share their draws.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from bayesbackprop._engine import cpu, ops
from bayesbackprop._engine.executors import Draw, Executor
from bayesbackprop._engine.linear import RULES, Gradients, Layer, Pair
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop._engine.rules import Estimator
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.noise import Key, Role, stream


class Activation(NamedTuple):
    """An elementwise function for training: in place, and its gradient from that of its result and its result."""

    in_place: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


# Functions of each number by itself. Those without an entry are for prediction; training goes through autograd.
ACTIVATIONS: dict[type[nn.Module], Activation | None] = {
    nn.ReLU: Activation(torch.relu_, lambda gradient, h: torch.ops.aten.threshold_backward.default(gradient, h, 0)),
    nn.Tanh: Activation(torch.tanh_, torch.ops.aten.tanh_backward.default),
    nn.Sigmoid: Activation(torch.sigmoid_, torch.ops.aten.sigmoid_backward.default),
    nn.Identity: Activation(lambda h: h, lambda gradient, _: gradient),
    nn.GELU: None,
    nn.SiLU: None,
    nn.LeakyReLU: None,
    nn.ELU: None,
    nn.SELU: None,
    nn.Softplus: None,
    nn.Hardtanh: None,
    nn.Dropout: None,  # which does nothing in evaluation
}

# Drawing a weight takes as long as this many multiplications with it.
_ROWS = 80

# Numbers to hold at a time in prediction: more would leave the processor's cache.
_CHUNK = 2**20

# What a user may have put on a module that expects to be called, or on all modules; torch has no public name for it.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_has_global_hook: Callable[[], bool] = getattr(
    modules, "_has_any_global_hook", lambda: any(getattr(modules, f"_global{name}") for name in _HOOKS)
)


def layers_of(net: nn.Module) -> list[nn.Module] | None:
    """The layers of a fully connected network, one after the other; None for any other network."""
    layers = _flat(net)
    for number, module in enumerate(layers):
        if type(module) is nn.Flatten:
            if number or (module.start_dim, module.end_dim) != (1, -1):
                return None
        elif type(module) is not nn.Linear and type(module) not in ACTIVATIONS:
            return None
    return layers


def runs_only_forward(net: Sequence[nn.Module]) -> bool:
    """Whether calling these modules runs their own ``forward`` and nothing else: no hooks, nothing in its place."""
    if _has_global_hook():
        return False
    for own in map(vars, net):  # loops, here and below: a generator would take longer than what it does
        if "forward" in own:
            return False
        for name in _HOOKS:
            if own[name]:
                return False
    return True


class _Step(NamedTuple):
    """A linear layer, by the numbers of its weight and bias among the parameters, or an elementwise function."""

    module: nn.Module
    weight: int = -1
    bias: int | None = None
    rule: Estimator = "shared"

    def pair(self, tensors: Sequence[Tensor]) -> Pair:
        """Of one tensor for each parameter those of this layer."""
        return tensors[self.weight], None if self.bias is None else tensors[self.bias]


class FullyConnected(Executor):
    """A network of linear layers, each Bayesian as a whole or not at all, and elementwise functions."""

    def __init__(
        self, net: nn.Module, layers: list[nn.Module], parameters: Parameters, rules: Mapping[str, Estimator]
    ) -> None:
        self._modules = list(net.modules())
        self._parameters, self._rules = parameters, rules
        self._flattens = type(layers[0]) is nn.Flatten
        layers = layers[1:] if self._flattens else layers
        numbers = {mu: number for number, mu in enumerate(parameters.mus)}
        each = [rules.get(name, "shared") for name in parameters.by_name]
        self._steps = [_Step(module) for module in layers]
        for place, module in enumerate(layers):
            if isinstance(module, nn.Linear) and module.weight in numbers:
                weight, bias = numbers[module.weight], None if module.bias is None else numbers[module.bias]
                self._steps[place] = _Step(module, weight, bias, each[weight])
        # As flipout draws them, with the complexity sampled and in closed form.
        flipped = [name for name, rule in rules.items() if rule == "flipout"]
        self._flipped = [Parameters(parameters.by_name, closed, flipped) for closed in (False, True)] if flipped else []
        self._layers = [_Layer.of(step, parameters) for step in self._steps]
        self._widest = max((m.out_features for m in layers if isinstance(m, nn.Linear)), default=1)
        followed = all(step.bias is None or each[step.bias] == step.rule for step in self._steps)
        self._trains = not parameters.own_priors and followed and _trains(self._steps)

    @staticmethod
    def of(net: nn.Module, parameters: Parameters, rules: Mapping[str, Estimator]) -> "FullyConnected | None":
        """The executor of ``net``, if it is such a network and each parameter is used in one place."""
        layers = layers_of(net)
        if not layers:
            return None
        random = set(parameters.mus)
        used: list[Tensor] = []
        for module in layers:
            if isinstance(module, nn.Linear):
                weights = [module.weight] if module.bias is None else [module.weight, module.bias]
                own = [weight for weight in weights if weight in random]
                if own and len(own) != len(weights):
                    return None
                used += own
        return FullyConnected(net, layers, parameters, rules) if len(used) == len(set(used)) == len(random) else None

    # --- training ----------------------------------------------------------------------------------------------------

    def forward(self, draw: Draw, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._apply(draw, args, kwargs, None, None)

    def cost(
        self, draw: Draw, likelihood: Likelihood, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any
    ) -> Any:
        if not likelihood.has_slope or not isinstance(targets, Tensor) or targets.requires_grad:
            return super().cost(draw, likelihood, args, kwargs, targets)
        return self._apply(draw, args, kwargs, likelihood, targets)

    def _apply(
        self, draw: Draw, args: tuple[Any, ...], kwargs: dict[str, Any], likelihood: Likelihood | None, targets: Any
    ) -> Any:
        parameters = self._flipped[draw.parameters.closed] if self._flipped else draw.parameters
        if not self._trains or draw.has_weights or not self._takes(args, kwargs):
            return NotImplemented
        x = args[0]
        if x.device.type != "cpu" or x.layout is not torch.strided or x.is_inference():
            return NotImplemented
        table = cpu.usable(parameters, draw.key)
        if table is None:
            return NotImplemented
        x = x.flatten(1) if self._flattens else x
        tensors = (x, *parameters.mus, *parameters.rhos)
        result, complexity = _DrawAndRun.apply(self, parameters, table, draw.key, likelihood, targets, *tensors)  # type: ignore[no-untyped-call]
        draw.drawn_inside(complexity)
        return result

    def layers(self, ws: Sequence[Tensor], key: Key) -> list[Layer]:
        """The linear layers at the drawn weights ``ws``."""
        mus = self._parameters.mus
        return [
            Layer(step.pair(ws), step.pair(mus), layer.parameters, key, step.weight)
            for step, layer in zip(self._steps, self._layers, strict=True)
            if layer is not None
        ]

    def run(self, layers: Sequence[Layer], x: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        """The input, and what comes out of each linear layer; what its rule keeps. A function is computed in place."""
        hs, kept, each = [x], list[tuple[Tensor, ...]](), iter(layers)
        for step in self._steps:
            if step.weight < 0:
                _activation(step.module).in_place(hs[-1])
            else:
                output, keeps = RULES[step.rule].forward(hs[-1], next(each))
                hs.append(output)
                kept.append(keeps)
        return hs, kept

    def go_back(
        self,
        layers: Sequence[Layer],
        hs: Sequence[Tensor],
        kept: Sequence[tuple[Tensor, ...]],
        gradient: Tensor,
        to_input: bool,
    ) -> tuple[list[list[Tensor | None]], Tensor | None]:
        """The gradients by the drawn weights, means and variances, and by the input, from that by the output."""
        count = len(self._parameters.each)
        found: list[list[Tensor | None]] = [[None] * count for _ in Gradients._fields]
        number = len(hs) - 1
        for step in reversed(self._steps):
            if step.weight < 0:
                gradient = _activation(step.module).gradient(gradient, hs[number])
                continue
            number -= 1
            rule, layer = RULES[step.rule], layers[number]
            each, gradient = rule.backward(gradient, hs[number], layer, kept[number], bool(number) or to_input)
            for place, (of_weight, of_bias) in zip(found, each, strict=True):
                place[step.weight] = of_weight
                if step.bias is not None:
                    place[step.bias] = of_bias
        return found, gradient if to_input else None

    # --- prediction --------------------------------------------------------------------------------------------------

    def outputs(self, key: Key, draws: int, memory: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._rules or not self._takes(args, kwargs):
            return NotImplemented
        if args[0].dtype is torch.float16:  # whose squares are soon 0 or infinite
            return NotImplemented
        x = args[0].flatten(1) if self._flattens else args[0]
        first = next(number for number, step in enumerate(self._steps) if step.weight >= 0)
        for step in self._steps[:first]:
            x = step.module(x)
        few = len(x) < _ROWS
        variances = [
            layer and ops.variances(layer.parameters) if few or number == first else None
            for number, layer in enumerate(self._layers)
        ]
        start = self._layers[first]
        assert start is not None
        mean, deviation = start.moments(x, variances[first])
        # Of the outputs of a layer there are the noise, the means, the deviations and the inputs squared.
        at_a_time = max(1, min(_CHUNK, memory // (4 * x.element_size())) // (len(x) * self._widest))
        results: list[Tensor] = []
        for begin in range(0, draws, at_a_time):
            keys = [key._replace(draw=draw) for draw in range(begin, min(draws, begin + at_a_time))]
            h = start.spread(mean, deviation, keys, one_row=few)
            for number in range(first + 1, len(self._steps)):
                layer, squares = self._layers[number], variances[number]
                if layer is None:
                    h = self._steps[number].module(h)
                elif squares is None:
                    h = torch.stack([layer.drawn(each, one) for each, one in zip(h, keys, strict=True)])
                else:
                    h = layer.spread(*layer.moments(h, squares), keys, one_row=few)
            results.append(h)
        return torch.cat(results)

    def _takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether nothing but the arithmetic would happen if the network were called with these."""
        if len(args) != 1 or kwargs or type(args[0]) is not Tensor or args[0].is_meta:
            return False
        x, dtype = args[0], self._parameters.mus[0].dtype
        dims = max(2, x.dim()) if self._flattens else 2
        if x.dim() != dims or x.dtype is not dtype or torch.is_autocast_enabled(x.device.type):
            return False
        return runs_only_forward(self._modules)


class _DrawAndRun(torch.autograd.Function):
    """A fully connected network at a draw, as one node: a function of x and of all mu and rho.

    Its results are the complexity and the output or, given a likelihood that knows its own slope, the likelihood cost.
    """

    @staticmethod
    def forward(
        ctx: Any,
        net: FullyConnected,
        parameters: Parameters,
        table: cpu.Table,
        key: Key,
        likelihood: Likelihood | None,
        targets: Any,
        x: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ws, complexity = cpu.draw(parameters, key, table)
        hs, kept = net.run(net.layers(ws, key), x)
        output = result = hs[-1]
        ctx.net, ctx.parameters, ctx.key, ctx.slope, ctx.table = net, parameters, key, None, table
        if likelihood is not None:
            result, ctx.slope = likelihood.cost(output, targets), likelihood.slope(output, targets)
        if net._steps[-1].weight >= 0:
            hs[-1] = x  # the last output is of use only to a function on it
        ctx.counts = len(ws), len(hs), [len(each) for each in kept]
        # All parameters, so that a change in between is noticed.
        ctx.save_for_backward(*ws, *hs, *(tensor for each in kept for tensor in each), *parameters.tensors)
        ctx.set_materialize_grads(False)
        return result, x.new_full((), complexity)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, of_complexity: Tensor | None) -> tuple[Tensor | None, ...]:
        cpu.refuse_second_derivatives()
        net: FullyConnected = ctx.net
        parameters: Parameters = ctx.parameters
        saved = iter(ctx.saved_tensors)
        weights, inputs, counts = ctx.counts
        ws, hs = list(islice(saved, weights)), list(islice(saved, inputs))
        kept = [tuple(islice(saved, count)) for count in counts]
        to_x: Tensor | None = None
        found: list[list[Tensor | None]] = [[None] * len(ws) for _ in Gradients._fields]
        if gradient is not None:
            of_output = gradient if ctx.slope is None else ctx.slope * gradient
            layers = net.layers(ws, ctx.key)
            found, to_x = net.go_back(layers, hs, kept, of_output, to_input=ctx.needs_input_grad[6])
        drawn, means, variances = found
        share = 0.0 if of_complexity is None else float(of_complexity)
        besides = (means, variances) if net._rules else ()
        if cpu.postponed(parameters, ws, drawn, share, ctx.table, besides):
            return (None, None, None, None, None, None, to_x, *[None] * (2 * len(ws)))
        # Delta_mu takes the place of a gradient, which nobody else sees.
        places: list[Tensor] = []
        for w, by_mean, by_w in zip(ws, means, drawn, strict=True):
            first = by_w if by_mean is None else by_mean
            places.append(torch.empty_like(w) if first is None else first)
        to_mu, to_rho = cpu.backward(parameters, ws, drawn, share, places, ctx.table, besides)
        return (None, None, None, None, None, None, to_x, *to_mu, *to_rho)


class _Layer(NamedTuple):
    """A linear layer in prediction: its own parameters, and the stream of the noise on its outputs."""

    parameters: Parameters
    stream: int

    @staticmethod
    def of(step: _Step, parameters: Parameters) -> "_Layer | None":
        """The layer of a step, if it is random."""
        if step.weight < 0:
            return None
        names = list(parameters.by_name)
        own = parameters.subset([names[step.weight]] + ([] if step.bias is None else [names[step.bias]]))
        return _Layer(own, stream(step.weight, Role.ACTIVATION))

    def moments(self, x: Tensor, variances: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        """The means and standard deviations of the outputs, from the variances of the parameters."""
        assert variances is not None
        return F.linear(x, *self.parameters.mus), F.linear(x.square(), *variances).sqrt_()

    def spread(self, mean: Tensor, deviation: Tensor, keys: Sequence[Key], one_row: bool) -> Tensor:
        """A draw of the outputs with each key; with ``one_row`` of noise for all, a row's draws are its own matter."""
        rows, units = mean.shape[-2:]
        shape = (1 if one_row else rows, units)
        zeta = ops.normals(len(keys), shape, keys[0], self.stream, mean.dtype, mean.device)
        return torch.addcmul(mean, zeta, deviation) if one_row and rows > 1 else zeta.mul_(deviation).add_(mean)

    def drawn(self, x: Tensor, key: Key) -> Tensor:
        """The outputs for a draw of the weights."""
        return F.linear(x, *(w[0] for w in ops.draws(self.parameters, key, 1)))


def _flat(net: nn.Module) -> list[nn.Module]:
    return [leaf for child in net for leaf in _flat(child)] if type(net) is nn.Sequential else [net]


def _trains(steps: Sequence[_Step]) -> bool:
    """Whether all layers are random, and each function, with a known gradient, can take the place of its input."""
    for before, step in zip([None, *steps], steps, strict=False):
        if isinstance(step.module, nn.Linear):
            if step.weight < 0:
                return False
        elif ACTIVATIONS[type(step.module)] is None or before is None or before.weight < 0:
            return False
    return True


def _activation(module: nn.Module) -> Activation:
    activation = ACTIVATIONS[type(module)]
    assert activation is not None
    return activation
