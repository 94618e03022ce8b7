"""Predicting with networks that treat each example by itself: fully connected ones.

The outputs of a linear layer with independent Gaussian weights are, given one input, independent Gaussians; so for each
example a draw of the outputs is as good as a draw of the weights:

op(x, mu) + sqrt(op(x^2, sigma^2)) * zeta

The first random layer has the same input in all draws: two products serve them all. In later layers that is worth two
products a draw only while a draw of the weights costs more, which is for few examples. Either way each example has
exactly the predictive distribution of drawn networks; what differs is only that the examples of a batch need not share
their draws.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesbackprop import _engine as kernels
from bayesbackprop import noise
from bayesbackprop._engine import Parameters
from bayesbackprop.noise import Key, Role
from bayesbackprop.swap import untouched

# Functions of each number by itself.
ELEMENTWISE = (
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.Softplus,
    nn.Hardtanh,
    nn.Identity,
    nn.Dropout,  # in evaluation
)

# Drawing a weight takes as long as this many multiplications with it.
_ROWS = 80

# Numbers to hold at a time: more would leave the processor's cache.
_CHUNK = 2**20


def chain_of(net: nn.Module, bayesian: Sequence[Tensor]) -> list[nn.Module] | None:
    """The layers of a network that treats each example by itself, one after the other; None for any other network."""
    chain = _flat(net)
    random = set(bayesian)
    used: list[Tensor] = []
    for number, module in enumerate(chain):
        if type(module) is nn.Linear:
            own = [parameter for parameter in module.parameters() if parameter in random]
            if own and len(own) != len(list(module.parameters())):
                return None
            used += own
        elif type(module) is nn.Flatten:
            if number or (module.start_dim, module.end_dim) != (1, -1):
                return None
        elif type(module) not in ELEMENTWISE:
            return None
    return chain if len(used) == len(set(used)) == len(random) else None


def takes(net: nn.Module, chain: list[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing else would happen if the network were called with these."""
    dtype = next(net.parameters()).dtype
    if dtype is torch.float16:  # whose squares are 0 or infinite too soon
        return False
    if len(args) != 1 or kwargs or type(args[0]) is not Tensor or not untouched(net.modules()):
        return False
    dims = 2 if type(chain[0]) is not nn.Flatten else max(2, args[0].dim())
    return args[0].dim() == dims and args[0].dtype is dtype and not torch.is_autocast_enabled(args[0].device.type)


def outputs(chain: list[nn.Module], parameters: Parameters, key: Key, x: Tensor, draws: int, memory: int) -> Tensor:
    """What ``draws`` networks make of ``x``, ``[draws, B, ...]``, in about ``memory`` bytes at a time.

    The modules are in evaluation mode.
    """
    names = {p.q.mu: name for name, p in parameters.by_name.items()}
    numbers = {name: number for number, name in enumerate(parameters.by_name)}
    first = next(number for number, m in enumerate(chain) if isinstance(m, nn.Linear) and m.weight in names)
    for module in chain[:first]:
        x = module(x)
    layers: dict[nn.Module, _Layer] = {}
    for module in chain[first:]:
        if isinstance(module, nn.Linear) and module.weight in names:
            own = parameters.subset([names[parameter] for parameter in module.parameters()])
            local = module is chain[first] or len(x) < _ROWS
            stream = noise.stream(numbers[names[module.weight]], Role.ACTIVATION)
            layers[module] = _Layer(own, stream, kernels.variances(own) if local else None)
    mean, deviation = layers[chain[first]].moments(x)
    widest = max((module.out_features for module in chain if isinstance(module, nn.Linear)), default=1)
    # Of the outputs of a layer there are the noise, the means, the deviations and the inputs squared.
    at_a_time = max(1, min(_CHUNK, memory // (4 * x.element_size())) // (len(x) * widest))
    results: list[Tensor] = []
    for start in range(0, draws, at_a_time):
        keys = [key._replace(draw=draw) for draw in range(start, min(draws, start + at_a_time))]
        h = layers[chain[first]].spread(mean, deviation, keys)
        for module in chain[first + 1 :]:
            layer = layers.get(module)
            if layer is None:
                h = module(h)
            elif layer.variances is None:
                h = torch.stack([layer.drawn(each, one) for each, one in zip(h, keys, strict=True)])
            else:
                h = layer.spread(*layer.moments(h), keys)
        results.append(h)
    return torch.cat(results)


class _Layer(NamedTuple):
    """A linear layer with its weight, and its bias if it has one; its variances if it is to draw outputs."""

    parameters: Parameters
    stream: int
    variances: list[Tensor] | None

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The means and standard deviations of the outputs."""
        assert self.variances is not None
        return F.linear(x, *self.parameters.mus), F.linear(x.square(), *self.variances).sqrt_()

    def spread(self, mean: Tensor, deviation: Tensor, keys: Sequence[Key]) -> Tensor:
        """A draw of the outputs with each key."""
        shape = tuple(mean.shape[-2:])
        zetas = [kernels.normal(shape, key, self.stream, mean.dtype, mean.device) for key in keys]
        zeta = zetas[0].unsqueeze(0) if len(zetas) == 1 else torch.stack(zetas)
        return zeta.mul_(deviation).add_(mean)

    def drawn(self, x: Tensor, key: Key) -> Tensor:
        """The outputs for a draw of the weights."""
        return F.linear(x, *kernels.draw(self.parameters, key))


def _flat(net: nn.Module) -> list[nn.Module]:
    return [leaf for child in net for leaf in _flat(child)] if type(net) is nn.Sequential else [net]
