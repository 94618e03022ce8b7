"""The same networks in other libraries, each in the fastest way it offers without work of one's own."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from bayesbackprop_paper.bench.contenders import MIXTURE, Contender, Layers, N, Task, Trainee, UnsupportedError

_SIGMA = 0.1


class Peer(NamedTuple):
    """Another library: the package to install, the modules needed of it, and what it enters."""

    distribution: str
    modules: tuple[str, ...]
    contenders: tuple[Contender, ...]

    def is_installed(self) -> bool:
        """Whether it can be imported."""
        try:
            for module in self.modules:
                importlib.import_module(module)
        except ImportError:
            return False
        return True


def _without(what: str) -> Callable[..., NoReturn]:
    """In the place of a layer that a library does not have."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedError(f"it has no {what}")

    return refuse


# None of the libraries of layers has attention.
_NO_ENCODER = _without("layer of a transformer")


def _torchbnn(task: Task) -> Trainee:
    torchbnn: Any = importlib.import_module("torchbnn")
    linear, conv = partial(torchbnn.BayesLinear, 0, _SIGMA), partial(torchbnn.BayesConv2d, 0, _SIGMA)
    net = task.net(Layers(linear, conv, _without("LSTM"), _NO_ENCODER))
    complexity = torchbnn.BKLLoss(reduction="sum")
    return Trainee(net, lambda x, y: task.loss(net(x), y) + complexity(net) / N, net)


class _Counted(nn.Module):
    """A layer of bayesian-torch, which keeps the complexity that the layer returns beside its outputs.

    So its forward pass serves both, where its converter of whole networks computes the complexity a second time.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.complexity: Any = 0

    def forward(self, x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self.layer(x, return_kl=False)
        *outputs, self.complexity = self.layer(x)
        return outputs[0] if len(outputs) == 1 else outputs


def _bayesian_torch(kind: str, task: Task) -> Trainee:
    """Of ``kind`` Reparameterization or Flipout."""
    library: Any = importlib.import_module("bayesian_torch.layers")

    def layer(name: str, *sizes: int, **options: Any) -> nn.Module:
        return _Counted(getattr(library, f"{name}{kind}")(*sizes, prior_variance=_SIGMA, **options))

    net = task.net(Layers(partial(layer, "Linear"), partial(layer, "Conv2d"), partial(layer, "LSTM"), _NO_ENCODER))
    counted = [module for module in net.modules() if isinstance(module, _Counted)]

    def cost(x: Tensor, y: Tensor) -> Tensor:
        loss = task.loss(net(x), y)
        complexity: Tensor = sum(module.complexity for module in counted)
        return loss + complexity / N

    return Trainee(net, cost, net)


def _blitz(task: Task) -> Trainee:
    modules: Any = importlib.import_module("blitz.modules")
    complexity: Any = importlib.import_module("blitz.losses").kl_divergence_from_nn
    prior = {"prior_pi": MIXTURE.pi, "prior_sigma_1": MIXTURE.sigma1, "prior_sigma_2": MIXTURE.sigma2}

    def conv(inputs: int, outputs: int, kernel: int, **options: Any) -> nn.Module:
        layer: nn.Module = modules.BayesianConv2d(inputs, outputs, (kernel, kernel), **options, **prior)
        return layer

    linear, lstm = partial(modules.BayesianLinear, **prior), partial(modules.BayesianLSTM, **prior)
    net = task.net(Layers(linear, conv, lstm, _NO_ENCODER))
    return Trainee(net, lambda x, y: task.loss(net(x), y) + complexity(net) / N, net)


def _pyro(task: Task) -> Trainee:
    """With its checks off, and the sampled objective, which is faster than its closed form."""
    pyro, names, infer = (importlib.import_module(name) for name in ("pyro", "pyro.nn", "pyro.infer"))
    dist: Any = importlib.import_module("pyro.distributions")
    guides: Any = importlib.import_module("pyro.infer.autoguide")
    pyro.clear_param_store()  # it is global, and parameters of other sizes may have the same names
    net = task.net()
    names.module.to_pyro_module_(net)
    for module in list(net.modules()):
        if not isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):  # plain in all libraries
            for name, parameter in list(module.named_parameters(recurse=False)):
                prior = dist.Normal(0.0, _SIGMA).expand(parameter.shape).to_event(parameter.dim())
                setattr(module, name, names.PyroSample(prior))

    def model(x: Tensor, y: Tensor | None = None) -> None:
        outputs = net(x)
        likelihood = dist.Categorical(logits=outputs) if task.classifies else dist.Normal(outputs, 1.0).to_event(1)
        with pyro.poutine.scale(scale=N / len(x)), pyro.plate("data", len(x)):
            pyro.sample("y", likelihood, obs=y)

    guide = guides.AutoNormal(pyro.poutine.block(model, hide=["y"]), init_scale=0.01)
    objective = infer.Trace_ELBO()

    def cost(x: Tensor, y: Tensor) -> Tensor:
        with pyro.validation_enabled(False):
            total: Tensor = objective.differentiable_loss(model, guide, x, y) / N
        return total

    def forward(x: Tensor) -> Tensor:
        with pyro.validation_enabled(False):
            outputs: Tensor = pyro.poutine.condition(net, guide(x))(x)
        return outputs

    guide(task.data(2)[0])  # makes its parameters
    return Trainee(nn.ModuleList([guide, net]), cost, forward)


class _OnDrawnWeights(NamedTuple):
    """A loss whose forward and backward pass are both on the weights that IVON draws for as long as it is asked to."""

    optimiser: Any
    loss: Callable[[], Tensor]

    def backward(self) -> None:
        """Draw, both passes, and put the means back."""
        with self.optimiser.sampled_params(train=True):
            self.loss().backward()


def _ivon(task: Task) -> Trainee:
    """An optimiser: the network stays as it is, and its gradients at drawn weights give means and variances."""
    net = task.net()
    optimiser: Any = importlib.import_module("ivon").IVON(net.parameters(), lr=1e-5, ess=N)

    def cost(x: Tensor, y: Tensor) -> _OnDrawnWeights:
        return _OnDrawnWeights(optimiser, lambda: task.loss(net(x), y))

    def forward(x: Tensor) -> Tensor:
        with optimiser.sampled_params():
            outputs: Tensor = net(x)
        return outputs

    return Trainee(net, cost, forward, optimiser)


PEERS = (
    Peer("torchbnn", ("torchbnn",), (Contender("torchbnn", "Gaussian, closed", _torchbnn),)),
    Peer(
        "bayesian-torch",
        ("bayesian_torch.layers",),
        (
            Contender("bayesian-torch", "Gaussian, closed", partial(_bayesian_torch, "Reparameterization")),
            Contender("bayesian-torch flipout", "Gaussian, closed", partial(_bayesian_torch, "Flipout")),
        ),
    ),
    Peer(
        "blitz-bayesian-pytorch",
        ("blitz.modules", "blitz.losses"),
        (Contender("BLiTZ", "scale mixture, sampled", _blitz),),
    ),
    Peer(
        "pyro-ppl",
        ("pyro", "pyro.infer.autoguide"),
        (Contender("Pyro AutoNormal", "Gaussian, sampled", _pyro),),
    ),
    Peer("ivon-opt", ("ivon",), (Contender("IVON", "Gaussian, an optimiser", _ivon),)),
)
