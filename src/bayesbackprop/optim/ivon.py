"""IVON: the improved variational online Newton method, on the posterior of a model.

Shen et al. (2024), "Variational Learning is Effective for Large Deep Networks". With L the likelihood cost, a mean over
examples, lambda = n / T the effective number of examples, a prior N(c, s^2), and delta = 1 / (lambda s^2), it keeps an
estimate h of the diagonal of the Hessian of L. The posterior is N(mu, sigma^2) with sigma^2 = 1 / (lambda (h + delta)).
At w = mu + sigma eps and step t:

g^ = dL/dw,    h^ = g^ eps / sigma                                       (the reparameterisation trick)
g  <- beta1 g + (1 - beta1) g^
h  <- beta2 h + (1 - beta2) h^ + (1 - beta2)^2 (h - h^)^2 / (2 (h + delta))
mu <- mu - alpha (g / (1 - beta1^t) + delta (mu - c)) / (h + delta),     alpha = lr (h_0 + delta)

Here h is not stored. rho holds sigma, and so h + delta = 1 / (lambda sigma^2). What is needed of the minibatch are the
gradients of mu and rho, those of the free energy F = L + KL[q || P] / lambda with the KL in closed form:

dF/dmu  = g^ + delta (mu - c)
dF/drho = (g^ eps + sigma / (lambda s^2) - 1 / (lambda sigma)) dsigma/drho = (h^ - h) sigma dsigma/drho

So with r = (1 - beta2) (h^ - h) / (h + delta) = (1 - beta2) lambda dF/drho sigma / (dsigma/drho), the third line is

h + delta <- (h + delta) (1 + r + r^2 / 2),    sigma <- sigma / sqrt(1 + r + r^2 / 2)

and sigma stays positive whatever r is. It is at rest where dF/dmu = dF/drho = 0 on average: at the minimum of F.
"""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesbackprop._engine import cpu
from bayesbackprop._engine.parameters import Parameter, Parameters
from bayesbackprop._errors import (
    Described,
    check_betas,
    check_flag,
    check_not_negative,
    check_positive,
    check_type,
    invalid,
)
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim.adam import ADAM_DEFAULTS, entry, step_by_torch
from bayesbackprop.posterior import inverse_softplus, softplus
from bayesbackprop.priors import Normal

_OWNER = "IVON"


class IVON(Optimizer):
    """IVON: a step of mu by the inverse of its precision, and of sigma by an estimate of the Hessian.

    It trains the posterior of a :class:`~bayesbackprop.Bayesian` in place of Adam: the same draws, prior, files and
    predictions. A step takes the gradients of an ordinary ``cost.backward()``, of one draw or several, accumulated or
    averaged over ranks. They must not be clipped or rescaled: sigma follows from their size. Parameters without a
    distribution, such as those of normalisation layers and of the likelihood, are trained by Adam.

    The posterior must be ``Diagonal`` and the priors ``Normal``, centred anywhere. The objective must have its
    complexity in closed form, with the same weight in each step: its calls take no ``n`` of their own.

    Args:
        objective: The free energy to be minimised.
        lr: The learning rate of mu, in units of ``hess_init`` unless ``rescale_lr`` is False.
        betas: What the running means of the gradient and of the Hessian keep at each step. The paper has 0.99999 for
            the second, in runs of some hundred thousand steps.
        hess_init: The Hessian to begin with, which sets sigma at once. None: the one that belongs to the sigma that the
            model has, so that training can go on.
        rescale_lr: Whether the learning rate is multiplied by h_0 + delta, so that first steps are those of SGD.
        rest_lr: The learning rate of Adam, for parameters without a distribution.

    Examples:
        >>> from torch import nn
        >>> from bayesbackprop import Bayesian, Gaussian
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> model = Bayesian(nn.Linear(1, 1), Gaussian(0.1), seed=0)
        >>> free_energy = FreeEnergy(model, n=20, complexity="closed")
        >>> optimiser = IVON(free_energy, lr=0.1, betas=(0.9, 0.99), hess_init=10.0)
        >>> for _ in range(1000):
        ...     optimiser.zero_grad()
        ...     free_energy(x, 2 * x).backward()
        ...     optimiser.step()
        >>> print(f"{model.net.weight.item():.1f}, {model.posterior['weight'].sigma.item():.2f}")
        2.0, 0.04
    """

    def __init__(
        self,
        objective: FreeEnergy,
        lr: float = 0.1,
        *,
        betas: tuple[float, float] = (0.9, 0.9995),
        hess_init: float | None = None,
        rescale_lr: bool = True,
        rest_lr: float = 1e-3,
    ) -> None:
        check_type(_OWNER, FreeEnergy, "a FreeEnergy", objective=objective)
        rates = check_not_negative(_OWNER, lr=lr, rest_lr=rest_lr)
        betas = check_betas(_OWNER, betas)
        rescale_lr = check_flag(_OWNER, rescale_lr=rescale_lr)["rescale_lr"]
        if hess_init is not None:
            hess_init = check_not_negative(_OWNER, hess_init=hess_init)["hess_init"]
        _check_objective(objective)
        self.objective = objective
        model, weight = objective.model, _weight(objective)
        # The parameters of one prior share delta, and so the factor of the rate.
        by_prior: dict[float, list[Parameter]] = {}
        for each in model.engine().parameters.each:
            by_prior.setdefault(_sigma_of_prior(each), []).append(each)
        groups: list[dict[str, Any]] = []
        for prior_sigma, some in by_prior.items():
            if hess_init is not None:
                _set_precision(some, hess_init + weight / prior_sigma**2, weight)
            scale = _mean_precision(some, weight) if rescale_lr else 1.0
            pairs = [tensor for each in some for tensor in (each.q.mu, each.q.rho)]
            groups.append({"params": pairs, "lr": rates["lr"], "betas": betas, "scale": scale})
        taken = {parameter for group in groups for parameter in group["params"]}
        rest = [parameter for parameter in model.parameters() if parameter not in taken]
        if rest:
            groups.append({"params": rest, "lr": rates["rest_lr"]})
        super().__init__(groups, {**ADAM_DEFAULTS, "lr": rates["rest_lr"], "scale": None})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "objective": self.objective}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step with the gradients computed so far.

        Args:
            closure: A function that computes them and returns the cost, for those who let the optimiser call it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self.objective.model.engine().parameters
        known = {each.q.mu: each for each in parameters.each}
        given: dict[Tensor, tuple[Parameter, dict[str, Any]]] = {}
        for group in self.param_groups:
            if group["scale"] is None:
                rest = [parameter for parameter in group["params"] if parameter.grad is not None]
                step_by_torch([entry(self.state, parameter, group) for parameter in rest], group)
                continue
            for mu, rho in zip(group["params"][::2], group["params"][1::2], strict=True):
                if mu.grad is None and rho.grad is None:
                    continue
                if mu not in known or known[mu].q.rho is not rho:
                    raise invalid("objective", _OWNER, "one whose model has the parameters it had", Described("others"))
                if mu.grad is None or rho.grad is None:
                    got = Described(f"only that of {'mu' if rho.grad is None else 'rho'}")
                    raise invalid("gradients", f"{_OWNER}.step", "those of both mu and rho", got)
                given[mu] = known[mu], group
        self._step_given(parameters, given)
        return loss

    def _step_given(self, parameters: Parameters, given: dict[Tensor, tuple[Parameter, dict[str, Any]]]) -> None:
        means: dict[Tensor, Tensor] = {}
        numbers: dict[Tensor, tuple[float, float, float, float]] = {}
        for mu, (_, group) in given.items():
            state, (beta1, beta2) = self.state[mu], group["betas"]
            if not state:
                state["step"], state["exp_avg"] = torch.zeros(()), torch.zeros_like(mu)
            state["step"] += 1
            means[mu] = state["exp_avg"]
            numbers[mu] = float(group["lr"]) * group["scale"], 1 / (1 - beta1 ** int(state["step"])), beta1, beta2
        weight, mus = _weight(self.objective), parameters.mus
        in_one = len(given) == len(mus) and cpu.ivon(
            parameters, [means[mu] for mu in mus], [numbers[mu] for mu in mus], weight
        )
        if not in_one:
            for mu, (parameter, _) in given.items():
                update(parameter, means[mu], *numbers[mu], weight)


def update(
    parameter: Parameter, g: Tensor, alpha: float, unbiased: float, beta1: float, beta2: float, weight: float
) -> None:
    """A step on mu, rho and the running mean ``g``, as the equations above have it: the twin of ``cpu.ivon``.

    ``unbiased`` is 1 / (1 - beta1^t), and ``weight`` is 1 / lambda.
    """
    mu, rho = parameter.q
    assert mu.grad is not None
    assert rho.grad is not None
    delta = weight / _sigma_of_prior(parameter) ** 2
    sigma = softplus(rho)
    random = sigma > torch.finfo(sigma.dtype).tiny  # the others are constants
    slope = torch.where(random, -torch.expm1(-sigma), 1.0)  # dsigma/drho
    r = (1 - beta2) / weight * rho.grad * sigma / slope
    sigma = sigma / (1 + r + r.square() / 2).sqrt()
    to_prior = delta * (mu if parameter.centre is None else mu - parameter.centre)
    g.lerp_(mu.grad - to_prior, 1 - beta1)
    step = alpha / weight * sigma.square() * (unbiased * g + to_prior)
    mu.sub_(torch.where(random, step, 0.0))
    rho.copy_(torch.where(random, inverse_softplus(sigma), rho))


# --- what it can be right for ----------------------------------------------------------------------------------------


def _check_objective(objective: FreeEnergy) -> None:
    """Refuse an objective whose gradients do not say what the Hessian is."""
    if objective.complexity != "closed":
        raise invalid(
            "complexity",
            _OWNER,
            "'closed' in the objective, as in FreeEnergy(..., complexity='closed')",
            objective.complexity,
        )
    if objective.warmup:
        raise invalid("warmup", _OWNER, "0 in the objective: the scale of sigma cannot change", objective.warmup)
    if objective.weighs_minibatches:
        raise invalid("minibatch_weights", _OWNER, "'uniform' in the objective", Described("others"))
    check_positive(_OWNER, temperature=objective.temperature)
    for _, family in objective.model.families:
        raise invalid("family", _OWNER, "Diagonal() in the model: it has one number for each weight", family)


def _sigma_of_prior(parameter: Parameter) -> float:
    if not isinstance(parameter.prior, Normal):
        raise invalid("prior", _OWNER, "Normal in the model, whose Hessian is known", parameter.prior)
    return parameter.prior.sigma


def _weight(objective: FreeEnergy) -> float:
    """1 / lambda: the weight of the complexity."""
    return objective.temperature / objective.n


@torch.no_grad()
def _set_precision(parameters: list[Parameter], precision: float, weight: float) -> None:
    """sigma^2 = 1 / (lambda (h + delta)) for the weights that are random."""
    for each in parameters:
        rho = inverse_softplus(torch.tensor((weight / precision) ** 0.5, dtype=torch.float64))
        each.q.rho.masked_fill_(each.q.random, rho.item())


@torch.no_grad()
def _mean_precision(parameters: list[Parameter], weight: float) -> float:
    """The mean of h + delta = 1 / (lambda sigma^2) over the weights that are random."""
    total, count = 0.0, 0
    for each in parameters:
        variances = each.q.variance.double()
        variances = variances[variances > 0]
        total, count = total + float((weight / variances).sum()), count + variances.numel()
    return total / max(count, 1)
