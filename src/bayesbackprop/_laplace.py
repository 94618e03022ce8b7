"""A Laplace approximation: a Gaussian around the weights of a trained network.

Its precision is H + delta I, where delta is the prior precision and H the Gauss-Newton matrix of the likelihood cost of
all training examples,

H = sum_n J_n^T F_n J_n

with J_n the Jacobian of the network's output by its weights and F_n the Fisher information of the likelihood in that
output. H has a block for each linear or convolutional layer, in Kronecker factors (Martens and Grosse, 2015; Ritter et
al., 2018):

H = A (x) B,    A = mean a a^T,    B = sum g g^T

where a is an input of the layer with a 1 for the bias, and g g^T the Fisher information in its output. Predictions are
those of the network linearised in its weights, f(x) + J(x) (w - w*), which is the model that H belongs to (Immer et
al., 2021).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayesbackprop._batches import arguments, on
from bayesbackprop._engine import evaluating
from bayesbackprop.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from bayesbackprop.prediction import Predictive, predictive

# The numbers of an output up to which the Fisher information is exact. Beyond, and where it has no closed form, so many
# random vectors estimate it.
_COLUMNS = 32

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Block(NamedTuple):
    """The part of H that belongs to one layer, by the eigenvectors of its factors."""

    weight: str  # the names of its parameters
    bias: str | None
    curvature: Tensor  # the eigenvalues of H, [outputs, inputs]
    of_outputs: Tensor
    of_inputs: Tensor


class Laplace:
    """A network with a Gaussian around its weights. Parameters outside linear and convolutional layers are fixed.

    Args:
        net: The trained network; it is not changed.
        likelihood: P(y|x,w).
        batches: The training set as pairs (inputs, targets), read once.
        precision: The prior precision, delta.

    Attributes:
        model: The network.
        weights: How many weights vary.
    """

    def __init__(self, net: nn.Module, likelihood: Likelihood, batches: Iterable[Any], precision: float = 1.0) -> None:
        self.model, self.likelihood, self.precision = net, likelihood, precision
        self._blocks = _blocks(net, likelihood, batches)
        names = {name for block in self._blocks for name in (block.weight, block.bias)}
        self._parameters = {name: value.detach() for name, value in net.named_parameters() if name in names}
        self.weights = sum(value.numel() for value in self._parameters.values())

    def outputs(self, *args: Any, draws: int, seed: int = 0, **kwargs: Any) -> Tensor:
        """Outputs ``[draws, ...]`` of the linearised network; a draw is of the same weights whatever the inputs."""
        random, found = torch.Generator().manual_seed(seed), []

        def run(parameters: dict[str, Tensor]) -> Any:
            return functional_call(self.model, parameters, args, kwargs)

        with evaluating(self.model), _forward_derivatives():
            for _ in range(draws):
                found.append(sum(jvp(run, (self._parameters,), (self._drawn(random),))))
        return torch.stack(found)

    def predict(self, *args: Any, draws: int = 100, seed: int | None = None, **kwargs: Any) -> Predictive:
        return predictive(self.likelihood, self.outputs(*args, draws=draws, seed=seed or 0, **kwargs), draws)

    def cost(self, batches: Iterable[Any], draws: int) -> float:
        """The mean of -log P(y|x) over examples."""
        total, count = 0.0, 0
        for inputs, targets in _on_device(self.model, batches):
            args, kwargs = arguments(inputs, "compare")
            total -= float(self.predict(*args, draws=draws, **kwargs).log_prob(targets).double().sum())
            count += len(targets)
        return total / count

    def _drawn(self, random: torch.Generator) -> dict[str, Tensor]:
        """A draw of w - w*."""
        found: dict[str, Tensor] = {}
        for block in self._blocks:
            like = self._parameters[block.weight]
            noise = torch.randn(block.curvature.shape, generator=random).to(like)
            scaled = noise / (block.curvature + self.precision).sqrt().to(like)
            drawn = block.of_outputs.to(like) @ scaled @ block.of_inputs.to(like).T
            if block.bias is not None:
                found[block.bias], drawn = drawn[:, -1].contiguous(), drawn[:, :-1]
            found[block.weight] = drawn.reshape(like.shape).contiguous()
        return {name: found[name] for name in self._parameters}  # in the same order


@contextmanager
def _forward_derivatives() -> Iterator[None]:
    """A context in which torch takes only kernels that have forward derivatives."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own, at its first jvp
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _blocks(net: nn.Module, likelihood: Likelihood, batches: Iterable[Any]) -> list[_Block]:
    layers = _layers(net)
    squares: dict[str, list[Tensor | float]] = {name: [0.0, 0.0] for name in layers}
    rows = dict.fromkeys(layers, 0)
    with evaluating(net), torch.enable_grad():
        for inputs, targets in _on_device(net, batches):
            args, kwargs = arguments(inputs, "compare")
            calls: list[tuple[str, Tensor, Tensor]] = []
            hooks = [layer.register_forward_hook(_recorder(calls, name)) for name, layer in layers.items()]
            try:
                output = net(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
            for name, received, _ in calls:
                each = _input_rows(layers[name], received)
                squares[name][0] += (each.T @ each).double().cpu()
                rows[name] += len(each)
            given = [result for _, _, result in calls]
            for column in _columns(likelihood, output.detach(), targets) if calls else ():
                slopes = torch.autograd.grad(output, given, column, retain_graph=True, allow_unused=True)
                for (name, _, _), slope in zip(calls, slopes, strict=True):
                    if slope is not None:
                        each = _output_rows(layers[name], slope)
                        squares[name][1] += (each.T @ each).double().cpu()
    found = []
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    for name, layer in layers.items():
        a, b = squares[name]
        if isinstance(a, Tensor) and isinstance(b, Tensor):  # of a layer that was called, and whose output matters
            (of_inputs, u), (of_outputs, v) = torch.linalg.eigh(a / rows[name]), torch.linalg.eigh(b)
            curvature = of_outputs.clamp(min=0)[:, None] * of_inputs.clamp(min=0)
            bias = None if layer.bias is None else names[id(layer.bias)]
            found.append(_Block(names[id(layer.weight)], bias, curvature, v, u))
    return found


def _layers(net: nn.Module) -> dict[str, Any]:
    """The layers whose parameters vary, by name: those that have them for themselves, and train them."""
    own = {id(parameter) for parameter in net.parameters() if parameter.requires_grad}
    found: dict[str, Any] = {}
    for name, layer in net.named_modules():
        if isinstance(layer, _LAYERS) and getattr(layer, "groups", 1) == 1:
            held = {id(value) for value in (layer.weight, layer.bias) if value is not None}
            if held <= own:
                found[name] = layer
                own -= held
    return found


def _recorder(calls: list[tuple[str, Tensor, Tensor]], name: str) -> Callable[..., Tensor]:
    def record(_: nn.Module, received: tuple[Tensor, ...], result: Tensor) -> Tensor:
        calls.append((name, received[0].detach(), result))
        return result.clone()  # which the next layer may write into

    return record


def _input_rows(layer: Any, received: Tensor) -> Tensor:
    """What the weights of an output are multiplied by, one row for each time: of a convolution, the patches."""
    if not isinstance(layer, nn.Linear):
        size = layer.weight[0].numel()
        one = torch.eye(size, dtype=received.dtype, device=received.device).view(size, *layer.weight.shape[1:])
        received = layer._conv_forward(received, one, None).movedim(1, -1)
    rows = received.flatten(0, -2)
    return rows if layer.bias is None else torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def _output_rows(layer: Any, slope: Tensor) -> Tensor:
    return (slope if isinstance(layer, nn.Linear) else slope.movedim(1, -1)).flatten(0, -2)


def _columns(likelihood: Likelihood, output: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Tensors v like the output whose v v^T, of each example, add up to its Fisher information or an estimate of it."""
    root = _root(likelihood, output, targets)
    if root is None:  # the slopes of targets drawn from the likelihood itself
        output = output.requires_grad_()
        for _ in range(_COLUMNS):
            with torch.no_grad():
                drawn = likelihood.distribution(output).sample()
            (slope,) = torch.autograd.grad(likelihood.log_prob(output, drawn).sum(), output)
            yield slope / _COLUMNS**0.5
        return
    size = output[0].numel()
    for number in range(min(size, _COLUMNS)):
        direction = torch.zeros_like(output)
        if size <= _COLUMNS:
            direction.view(len(output), -1)[:, number] = 1
        else:  # random signs: the mean of their squares is the identity
            direction = (torch.randint(2, output.shape).to(output) * 2 - 1) / _COLUMNS**0.5
        yield root(direction)


def _root(likelihood: Likelihood, output: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor] | None:
    """R with F = R R^T, as a function, where there is a closed form."""
    if isinstance(likelihood, Categorical):  # F = diag(p) - p p^T, R = diag(p)^1/2 - p (p^1/2)^T
        p = output.softmax(1)
        half = p.sqrt()
        counts = torch.ones_like(p[:, :1])
        if likelihood.ignore_index is not None:
            counts = (targets != likelihood.ignore_index).to(p).unsqueeze(1)
        return lambda z: counts * (half * z - p * (half * z).sum(1, keepdim=True))
    if isinstance(likelihood, Bernoulli):
        p = output.sigmoid()
        return lambda z: (p * (1 - p)).sqrt() * z
    if isinstance(likelihood, Gaussian) and likelihood.noise != "per-input":
        noise = likelihood.distribution(output).stddev.detach()
        return lambda z: z / noise
    return None


def _on_device(net: nn.Module, batches: Iterable[Any]) -> Iterator[Sequence[Any]]:
    device = next((parameter.device for parameter in net.parameters()), None)
    for batch in batches:
        yield on(batch, device)
