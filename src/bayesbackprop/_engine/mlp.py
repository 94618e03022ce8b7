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

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules import module as modules

from bayesbackprop._engine import cpu, ops, own_priors
from bayesbackprop._engine.executors import Draw, Engine, Executor
from bayesbackprop._engine.linear import At, Gradients, Layer, add_products, put_into
from bayesbackprop._engine.parameters import Parameters
from bayesbackprop._engine.rules import Estimator
from bayesbackprop._engine.small import Linear, Space
from bayesbackprop._engine.substitution import call_with
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.noise import Key


class Activation(NamedTuple):
    """An elementwise function for training: in place, and its gradient from that of its result and its result.

    ``name`` is what cpu.c calls it.
    """

    in_place: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    name: str


# Functions of each number by itself. Those without an entry are for prediction; training goes through autograd.
ACTIVATIONS: dict[type[nn.Module], Activation | None] = {
    nn.ReLU: Activation(torch.relu_, lambda g, h: torch.ops.aten.threshold_backward.default(g, h, 0), "RELU"),
    nn.Tanh: Activation(torch.tanh_, torch.ops.aten.tanh_backward.default, "TANH"),
    nn.Sigmoid: Activation(torch.sigmoid_, torch.ops.aten.sigmoid_backward.default, "SIGMOID"),
    nn.Identity: Activation(lambda h: h, lambda gradient, _: gradient, "IDENTITY"),
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


class FullyConnected(Executor):
    """A network of linear layers, each Bayesian as a whole or not at all, and elementwise functions."""

    def __init__(
        self, net: nn.Module, modules: list[nn.Module], parameters: Parameters, rules: Mapping[str, Estimator]
    ) -> None:
        self._modules = list(net.modules())
        self._parameters, self._rules = parameters, rules
        self._flattens = type(modules[0]) is nn.Flatten
        modules = modules[1:] if self._flattens else modules
        numbers = {mu: number for number, mu in enumerate(parameters.mus)}
        each = [rules.get(name, "shared") for name in parameters.by_name]
        self._steps: list[Layer | nn.Module] = []
        follow = True  # a bias its weight
        for module in modules:
            if isinstance(module, nn.Linear) and module.weight in numbers:
                weight, bias = numbers[module.weight], None if module.bias is None else numbers[module.bias]
                follow = follow and (bias is None or each[bias] == each[weight])
                self._steps.append(Layer.of(parameters, weight, bias, each[weight]))
            else:
                self._steps.append(module)
        # As flipout draws them, with the complexity sampled and in closed form.
        flipped = [name for name, rule in rules.items() if rule == "flipout"]
        self._flipped = [Parameters(parameters.by_name, closed, flipped) for closed in (False, True)] if flipped else []
        self._widest = max((m.out_features for m in modules if isinstance(m, nn.Linear)), default=1)
        self.training = _for_training(self._steps) if follow else None
        self._linear = None if self.training is None or rules else _linear(self.training)
        self.ends_in_function = not isinstance(self._steps[-1], Layer)

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
        if not _has_slope(likelihood, targets):
            return super().cost(draw, likelihood, args, kwargs, targets)
        return self._apply(draw, args, kwargs, likelihood, targets)

    def _apply(
        self, draw: Draw, args: tuple[Any, ...], kwargs: dict[str, Any], likelihood: Likelihood | None, targets: Any
    ) -> Any:
        parameters = self._drawn_for(draw)
        table = self._table(parameters, draw, args, kwargs)
        if table is None:
            return NotImplemented
        x = args[0].flatten(1) if self._flattens else args[0]
        if likelihood is None and not torch.is_grad_enabled():  # where a node of autograd would be nothing but time
            drawn = self.draw_and_run(parameters, table, draw.key, x)
            draw.drawn_inside(x.new_full((), drawn.complexity))
            return drawn.output
        tensors = (x, *parameters.trained)
        result, complexity = _DrawAndRun.apply(self, parameters, table, draw.key, likelihood, targets, *tensors)  # type: ignore[no-untyped-call]
        draw.drawn_inside(complexity)
        return result

    def at_once(
        self,
        draw: Draw,
        likelihood: Likelihood,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: Any,
        weight: float,
        takes: cpu.Taker,
    ) -> Any:
        parameters = self._drawn_for(draw)
        if not _has_slope(likelihood, targets) or not draw.complexity_inside:
            return NotImplemented
        table = self._table(parameters, draw, args, kwargs)
        if table is None or args[0].requires_grad or not torch.is_grad_enabled():
            return NotImplemented
        take = takes(parameters, table)
        if take is None:
            return NotImplemented
        x = args[0].flatten(1) if self._flattens else args[0]
        space = None
        if self._linear is not None and not parameters.own_priors:
            space = Space.taken(self._linear, parameters, table, x)
        versions = cpu.versions(parameters)
        with torch.no_grad():
            if space is not None:
                complexity = space.draw(draw.key)
                cost, squares = space.run_and_go_back(x, likelihood, targets)
                ws, gradients = space.ws, space.gradients
                take(cpu.Backward(parameters, versions, ws, gradients, weight, table, (), space, squares))
            else:
                ws, complexity, output, places = self.draw_and_run(parameters, table, draw.key, x)
                cost, slope = likelihood.cost(output, targets), likelihood.slope(output, targets)
                to, besides, _ = self.priors_and_gradients(parameters, ws, weight)
                self.go_back(output, places, slope, put_into(to), to_input=False)
                take(cpu.Backward(parameters, versions, ws, to.drawn, weight, table, besides))
            return cost, x.new_full((), complexity)

    def costs(
        self,
        draws: Sequence[Draw],
        likelihood: Likelihood,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: Any,
        weight: float | Tensor,
    ) -> Any:
        if self._rules or not _has_slope(likelihood, targets) or any(draw.has_weights for draw in draws):
            return NotImplemented
        parameters = draws[0].parameters
        table = self._table(parameters, draws[0], args, kwargs)
        if table is None or args[0].requires_grad or not draws[0].complexity_inside:
            return NotImplemented
        x = args[0].flatten(1) if self._flattens else args[0]
        together = _Draws(self, parameters, table, [draw.key for draw in draws], likelihood)
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in parameters.tensors)
        expected = float(weight) if trains else None
        return _RunDraws.apply(together, expected, x, targets, *parameters.trained)  # type: ignore[no-untyped-call]

    def _drawn_for(self, draw: Draw) -> Parameters:
        """The parameters as ``draw`` needs them."""
        return self._flipped[draw.parameters.closed] if self._flipped else draw.parameters

    def _table(
        self, parameters: Parameters, draw: Draw, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> cpu.Table | None:
        """The table of ``parameters``, if the kernels and the layers by hand can run ``draw``."""
        if self.training is None or draw.has_weights or not self._takes(args, kwargs):
            return None
        x = args[0]
        if x.device.type != "cpu" or x.layout is not torch.strided or x.is_inference():
            return None
        table = cpu.usable(parameters, draw.key)
        return table if table is not None and own_priors.divisible(parameters) else None

    def draw_and_run(self, parameters: Parameters, table: cpu.Table, key: Key, x: Tensor) -> "_Passed":
        """Draw the weights and run the layers."""
        ws, complexity = cpu.draw(parameters, key, table)
        complexity += own_priors.costs(parameters, ws)
        return _Passed(ws, complexity, *self.run(x, ws, key))

    def priors_and_gradients(
        self, parameters: Parameters, ws: Sequence[Tensor], share: float
    ) -> tuple[Gradients, Sequence[Sequence[Tensor | None]], list[Tensor] | None]:
        """Places for gradients of the layers, what :func:`cpu.backward` takes besides, and where Delta_rho goes.

        The slopes of priors that only Python knows are there already, if the complexity has a ``share``.
        """
        to = Gradients.none(len(ws))
        if parameters.own_priors and share:  # now, while there are no other gradients
            slopes, to_rho = own_priors.put_slopes(parameters, ws)
            return to, (to.mean, to.variance, slopes), to_rho
        return to, (to.mean, to.variance) if self._rules else (), None

    def run(self, x: Tensor, ws: Sequence[Tensor], key: Key) -> tuple[Tensor, list[At]]:
        """The output at the drawn weights, and where each linear layer was. A function is computed in place."""
        assert self.training is not None
        places: list[At] = []
        for step in self.training:
            if isinstance(step, Layer):
                at = At(x, ws, key)
                x, kept = step.rule.forward(step, at)
                places.append(at._replace(kept=kept) if kept else at)
            else:
                step.in_place(x)
        return x, places

    def go_back(
        self,
        output: Tensor,
        places: Sequence[At],
        gradient: Tensor,
        put: Callable[[Layer, At, Tensor], None],
        to_input: bool,
    ) -> Tensor | None:
        """From the gradient by the output that by the input; ``put`` is given that by the output of each layer."""
        assert self.training is not None
        before = len(places)
        for step in reversed(self.training):
            if isinstance(step, Layer):
                before -= 1
                at, by_output = places[before], gradient
                if before or to_input:
                    gradient = step.rule.to_input(step, at, by_output)
                put(step, at, by_output)
                output = at.x
            else:
                gradient = step.gradient(gradient, output)
        return gradient if to_input else None

    # --- prediction --------------------------------------------------------------------------------------------------

    def outputs(self, key: Key, draws: int, memory: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._rules or not self._takes(args, kwargs):
            return NotImplemented
        if args[0].dtype is torch.float16:  # whose squares are soon 0 or infinite
            return NotImplemented
        x = args[0].flatten(1) if self._flattens else args[0]
        first = next(number for number, step in enumerate(self._steps) if isinstance(step, Layer))
        for module in self._steps[:first]:
            x = module(x)  # type: ignore[operator]
        start, *others = self._steps[first:]
        assert isinstance(start, Layer)
        few = len(x) < _ROWS
        if few:  # which need those of all layers
            variances = ops.variances(self._parameters)
            mean, deviation = start.moments(x, *start.pair(variances))
        else:
            mean, deviation = start.moments(x, *ops.variances(start.own))
        # Of the outputs of a layer there are the noise, the means, the deviations and the inputs squared.
        at_a_time = max(1, min(_CHUNK, memory // (4 * x.element_size())) // (len(x) * self._widest))
        results: list[Tensor] = []
        for begin in range(0, draws, at_a_time):
            at, many = key._replace(draw=begin), min(at_a_time, draws - begin)
            h = start.spread(mean, deviation, at, many, one_row=few)
            for step in others:
                if not isinstance(step, Layer):
                    h = step(h)
                elif few:
                    h = step.spread(*step.moments(h, *step.pair(variances)), at, many, one_row=True)
                else:
                    h = torch.stack([step.drawn(each, at._replace(draw=begin + k)) for k, each in enumerate(h)])
            results.append(h)
        return results[0] if len(results) == 1 else torch.cat(results)

    def _takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether nothing but the arithmetic would happen if the network were called with these."""
        if len(args) != 1 or kwargs or type(args[0]) is not Tensor or args[0].is_meta:
            return False
        x, dtype = args[0], self._parameters.mus[0].dtype
        dims = max(2, x.dim()) if self._flattens else 2
        if x.dim() != dims or x.dtype is not dtype or torch.is_autocast_enabled(x.device.type):
            return False
        return runs_only_forward(self._modules)


class FullyConnectedTogether(Executor):
    """A fully connected network whose weights vary together: the draws of a step run at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._modules = engine, list(engine.net.modules())

    @staticmethod
    def of(engine: Engine) -> "FullyConnectedTogether | None":
        """The executor, if it is such a network."""
        return None if engine.single.each or not layers_of(engine.net) else FullyConnectedTogether(engine)

    def forward(self, draw: Draw, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        return NotImplemented

    def outputs(self, key: Key, draws: int, memory: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        return NotImplemented

    def costs(
        self,
        draws: Sequence[Draw],
        likelihood: Likelihood,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: Any,
        weight: float | Tensor,  # noqa: ARG002
    ) -> Any:
        first, engine, many = draws[0].key, self._engine, len(draws)
        if [draw.key for draw in draws] != [first._replace(draw=first.draw + number) for number in range(many)]:
            return NotImplemented
        random = any(isinstance(module, nn.Dropout) and module.training for module in self._modules)
        if random or any(draw.has_weights for draw in draws) or not runs_only_forward(self._modules):
            return NotImplemented
        found, complexity = dict[str, Tensor](), list[Tensor]()
        for joint in engine.joints:
            ws, costs = joint.draw(first, many)
            found |= zip(joint.parameters.by_name, ws, strict=True)
            complexity.append(costs(draws[0].closed).mean())
        weights = [found[name] for name in engine.shared.names]
        outputs = vmap(lambda each: call_with(engine.shared, each, args, kwargs))(weights)
        likelihoods = [likelihood.cost(output, targets) for output in outputs]
        return torch.stack(likelihoods).mean(), torch.stack(complexity).sum()


class _Passed(NamedTuple):
    """What the way to the output leaves for the way back."""

    ws: list[Tensor]
    complexity: float
    output: Tensor
    places: list[At]


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
        ws, complexity, output, places = net.draw_and_run(parameters, table, key, x)
        result, ctx.slope = output, None
        if likelihood is not None:
            result, ctx.slope = likelihood.cost(output, targets), likelihood.slope(output, targets)
        ctx.net, ctx.parameters, ctx.table, ctx.key = net, parameters, table, key
        ctx.versions = cpu.versions(parameters) if any(ctx.needs_input_grad) else []
        ctx.counts, ctx.overwritten = [len(at.kept) for at in places], False
        kept = [tensor for at in places for tensor in at.kept]
        ctx.save_for_backward(*ws, *(at.x for at in places), *kept, *([output] if net.ends_in_function else []))
        ctx.set_materialize_grads(False)
        return result, x.new_full((), complexity)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, of_complexity: Tensor | None) -> tuple[Tensor | None, ...]:
        net: FullyConnected = ctx.net
        parameters: Parameters = ctx.parameters
        cpu.check_way_back(parameters, ctx.versions)
        saved = iter(ctx.saved_tensors)
        ws = list(islice(saved, len(parameters.each)))
        if ctx.overwritten:  # by an earlier pass over a graph that was kept; the same noise gives the same weights
            ws, _ = cpu.draw(parameters, ctx.key, ctx.table)
        xs = list(islice(saved, len(ctx.counts)))
        places = [At(x, ws, ctx.key, tuple(islice(saved, count))) for x, count in zip(xs, ctx.counts, strict=True)]
        to_x: Tensor | None = None
        share = 0.0 if of_complexity is None else float(of_complexity)
        to, besides, to_rho = net.priors_and_gradients(parameters, ws, share)
        if gradient is not None:
            of_output = gradient if ctx.slope is None else _times(ctx.slope, gradient)
            output, to_input = next(saved, of_output), ctx.needs_input_grad[6]
            to_x = net.go_back(output, places, of_output, put_into(to), to_input=to_input)
        if cpu.postponed(parameters, ws, to.drawn, share, ctx.table, besides):
            return (None, None, None, None, None, None, to_x, *[None] * (2 * len(ws)))
        # Delta_mu takes the place of a gradient, which nobody else sees.
        own = [by_w if by_mean is None else by_mean for by_mean, by_w in zip(to.mean, to.drawn, strict=True)]
        to_mu = [torch.empty_like(w) if place is None else place for w, place in zip(ws, own, strict=True)]
        # In a large network Delta_rho takes the place of the weights, if nobody else sees them.
        if to_rho is None and cpu.is_large(parameters):
            ctx.overwritten = True
            to_rho = cpu.own_or_new(parameters, "weights", ws, ops.holders_of_saved(result=False))
        to_mu, to_rho = cpu.backward(parameters, ws, to.drawn, share, to_mu, ctx.table, besides, to_rho)
        return (None, None, None, None, None, None, to_x, *to_mu, *to_rho)


class _Draws(NamedTuple):
    """Several draws of a network under ``shared``, run one after the other, so that one alone has its weights."""

    net: FullyConnected
    parameters: Parameters
    table: cpu.Table
    keys: Sequence[Key]
    likelihood: Likelihood

    def run(self, x: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """The likelihood cost and the complexity, averaged over the draws."""
        costs, complexities = list[Tensor](), list[float]()
        for key in self.keys:
            ws, complexity = cpu.draw(self.parameters, key, self.table)
            costs.append(self.likelihood.cost(self.net.run(x, ws, key)[0], targets))
            complexities.append(complexity + own_priors.costs(self.parameters, ws))
        return torch.stack(costs).mean(), sum(complexities) / len(self.keys)

    def run_and_go_back(
        self, x: Tensor, targets: Tensor, by_cost: float, by_complexity: float
    ) -> tuple[Tensor, cpu.Deltas]:
        """The likelihood cost, averaged, and the gradients of both averages, so weighted."""
        costs, count = list[Tensor](), len(self.keys)
        deltas = cpu.Deltas(self.parameters, self.table, by_complexity / count)
        for number, key in enumerate(self.keys):
            ws = deltas.draw(key)
            deltas.complexity += own_priors.costs(self.parameters, ws)
            output, places = self.net.run(x, ws, key)
            costs.append(self.likelihood.cost(output, targets))
            slope = self.likelihood.slope(output, targets).mul_(by_cost / count)
            self.net.go_back(output, places, slope, partial(add_products, deltas.to_mu, number == 0), to_input=False)
            for part, of_prior in own_priors.slopes(self.parameters, ws, deltas.to_mu):
                part.add_(of_prior, alpha=by_complexity / count)
        deltas.finish()
        return torch.stack(costs).mean(), deltas


class _RunDraws(torch.autograd.Function):
    """The averages over several draws, as one node: a function of all mu and rho.

    A draw goes back before the next one is drawn, so in the forward pass: else the weights of all would have to be
    kept, or drawn again. What the gradients of the two averages will be is not known then, but expected: 1, and the
    weight of the complexity. If they turn out otherwise, but for a common factor, the draws are run again.
    """

    @staticmethod
    def forward(
        ctx: Any, draws: _Draws, expected: float | None, x: Tensor, targets: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        if expected is None:
            cost, complexity = draws.run(x, targets)
        else:
            cost, deltas = draws.run_and_go_back(x, targets, 1.0, expected)
            complexity = deltas.complexity / len(draws.keys)
            ctx.draws, ctx.expected, ctx.deltas = draws, expected, deltas
            ctx.versions = cpu.versions(draws.parameters)
            ctx.save_for_backward(x, targets)
            ctx.set_materialize_grads(False)
        return cost, x.new_full((), complexity)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, of_complexity: Tensor | None) -> tuple[Tensor | None, ...]:
        draws: _Draws = ctx.draws
        cpu.check_way_back(draws.parameters, ctx.versions)
        table = cpu.table_now(draws.parameters, draws.table)
        by_cost, by_complexity = (0.0 if part is None else float(part) for part in (gradient, of_complexity))
        deltas: cpu.Deltas | None = ctx.deltas
        ctx.deltas = None  # they become the gradients of the parameters
        rounding = 4 * torch.finfo(draws.parameters.mus[0].dtype).eps
        if deltas is not None and math.isclose(by_complexity, by_cost * ctx.expected, rel_tol=rounding):
            deltas.scale(by_cost)
        else:
            x, targets = ctx.saved_tensors
            _, deltas = draws._replace(table=table).run_and_go_back(x, targets, by_cost, by_complexity)
        return (None, None, None, None, *deltas.to_mu, *deltas.to_rho)


def _times(slope: Tensor, gradient: Tensor) -> Tensor:
    return slope if gradient.item() == 1 else slope * gradient  # the gradient of a cost by itself is 1


def _has_slope(likelihood: Likelihood, targets: Any) -> bool:
    """Whether the likelihood says by itself how its cost changes with the output."""
    return likelihood.has_slope and isinstance(targets, Tensor) and not targets.requires_grad


def _flat(net: nn.Module) -> list[nn.Module]:
    return [leaf for child in net for leaf in _flat(child)] if type(net) is nn.Sequential else [net]


def _for_training(steps: Sequence[Layer | nn.Module]) -> list[Layer | Activation] | None:
    """The same, if all layers are random, and each function, with a known gradient, can take the place of its input."""
    found: list[Layer | Activation] = []
    for before, step in zip([None, *steps], steps, strict=False):
        known = step if isinstance(step, Layer) else ACTIVATIONS.get(type(step))
        if known is None or not (isinstance(known, Layer) or isinstance(before, Layer)):
            return None
        found.append(known)
    return found


def _linear(steps: Sequence[Layer | Activation]) -> list[Linear]:
    """The same for the kernels: each layer with the function after it."""
    found: list[Linear] = []
    for step in steps:
        if isinstance(step, Layer):
            found.append(Linear(step.weight, step.bias))
        else:
            found[-1] = found[-1]._replace(function=step.name)
    return found
