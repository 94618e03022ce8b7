"""The same networks in other libraries, each in the fastest way it offers without work of one's own."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from bayesbackprop_paper.bench.contenders import MIXTURE, Contender, N, Task, Trainee

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


def _torchbnn(task: Task) -> Trainee:
    torchbnn: Any = importlib.import_module("torchbnn")
    net = task.layers(lambda inputs, outputs: torchbnn.BayesLinear(0, _SIGMA, inputs, outputs))
    complexity = torchbnn.BKLLoss(reduction="sum")
    return Trainee(net.parameters(), lambda x, y: task.loss(net(x), y) + complexity(net) / N, net)


def _bayesian_torch(layer: str) -> Callable[[Task], Trainee]:
    """Its layers return (outputs, complexity), which shares work that its converter of whole networks does twice."""

    def build(task: Task) -> Trainee:
        linear: Any = getattr(importlib.import_module("bayesian_torch.layers"), layer)
        net = task.layers(lambda inputs, outputs: linear(inputs, outputs, prior_variance=_SIGMA))

        def cost(x: Tensor, y: Tensor) -> Tensor:
            complexity: Any = 0
            for module in net:
                if isinstance(module, linear):
                    x, part = module(x)
                    complexity = complexity + part
                else:
                    x = module(x)
            total: Tensor = task.loss(x, y) + complexity / N
            return total

        def forward(x: Tensor) -> Tensor:
            for module in net:
                x = module(x, return_kl=False) if isinstance(module, linear) else module(x)
            return x

        return Trainee(net.parameters(), cost, forward)

    return build


def _blitz(task: Task) -> Trainee:
    linear: Any = importlib.import_module("blitz.modules").BayesianLinear
    complexity: Any = importlib.import_module("blitz.losses").kl_divergence_from_nn
    prior = {"prior_pi": MIXTURE.pi, "prior_sigma_1": MIXTURE.sigma1, "prior_sigma_2": MIXTURE.sigma2}
    net = task.layers(lambda inputs, outputs: linear(inputs, outputs, **prior))
    return Trainee(net.parameters(), lambda x, y: task.loss(net(x), y) + complexity(net) / N, net)


def _pyro(task: Task) -> Trainee:
    """With its checks off, and the sampled objective, which is faster than its closed form."""
    pyro, names, infer = (importlib.import_module(name) for name in ("pyro", "pyro.nn", "pyro.infer"))
    dist: Any = importlib.import_module("pyro.distributions")
    guides: Any = importlib.import_module("pyro.infer.autoguide")
    pyro.clear_param_store()  # it is global, and parameters of other sizes may have the same names
    net = task.layers()
    names.module.to_pyro_module_(net)
    for module in net:
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

    guide(task.data(1)[0])  # makes its parameters
    return Trainee(guide.parameters(), cost, forward)


PEERS = (
    Peer("torchbnn", ("torchbnn",), (Contender("torchbnn", "Gaussian, closed", _torchbnn),)),
    Peer(
        "bayesian-torch",
        ("bayesian_torch.layers",),
        (
            Contender("bayesian-torch", "Gaussian, closed", _bayesian_torch("LinearReparameterization")),
            Contender("bayesian-torch flipout", "Gaussian, closed", _bayesian_torch("LinearFlipout")),
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
)
