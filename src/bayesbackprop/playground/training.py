"""A network in training: a model of the library, made as the settings say, and fitted by :func:`bayesbackprop.fit`."""

from typing import Literal

import torch
from torch import Tensor, nn

from bayesbackprop._errors import invalid
from bayesbackprop._networks import drawn_from, mlp
from bayesbackprop._runs import Callback, Run
from bayesbackprop.convergence import Convergence
from bayesbackprop.families import AnyFamily, Conditional, Diagonal, FullCovariance, LowRank, Mixture
from bayesbackprop.likelihoods import Categorical, Gaussian, Likelihood
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.optim import Adam
from bayesbackprop.playground.activities import Activity, GoesOn, History
from bayesbackprop.playground.pictures import band, class_map, snr_histogram
from bayesbackprop.playground.requests import END, Classification, Costs, Regression, Settings, Trained
from bayesbackprop.priors import Laplace, Normal, Prior, ScaleMixture
from bayesbackprop.training import fit

_ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}
# The spike of the paper's prior, as a part of its slab.
_SPIKE = 0.05
# Pseudo-inputs of Conditional in each dimension: on a grid, so that they fit any points.
_PSEUDO = {1: 24, 2: 6}
# The weights for which a full covariance is still quick: a step is of n^2 numbers.
_MOST_TOGETHER = 400
# The learning rate and the draws of a step. They were tried on the presets of the page: within two seconds each family
# is near to what it becomes.
_RATE, _RATE_TOGETHER, _BETAS = 0.02, 0.03, (0.9, 0.99)
_DRAWS, _DRAWS_TOGETHER = 1, 4


class Training(Activity):
    """A network that learns points."""

    def __init__(self, work: Regression | Classification) -> None:
        settings = work.settings
        inputs, targets, likelihood, outputs = _data(work)
        # Without points the posterior is the prior: an example that counts nothing leaves the complexity cost alone.
        self._batch: tuple[Tensor, ...] = (inputs, targets)
        if not work.points:
            self._batch = (inputs, targets, torch.zeros(len(inputs)))
        sizes = [inputs.shape[1], *[settings.width] * settings.layers, outputs]
        # The network is the same for the same of these, so that its parameters can be taken over.
        self._shape = (work.task, *sizes, settings.activation, settings.family, settings.sigma, settings.seed)
        self._model = _model(sizes, settings, likelihood)
        self._model.choose_estimator(inputs)
        self._temperature = settings.temperature
        self._draws = _DRAWS if settings.family == "diagonal" else _DRAWS_TOGETHER
        self._n = len(inputs)
        self._objective = self._make_objective(0)
        self._history = History(2)

    def _make_objective(self, step: int) -> FreeEnergy:
        def make(complexity: Literal["sampled", "closed"]) -> FreeEnergy:
            return FreeEnergy(
                self._model,
                self._n,
                draws=self._draws,
                complexity=complexity,
                temperature=self._temperature,
                step=step,
            )

        try:
            return make("closed")
        except ValueError:  # the prior has no closed form
            return make("sampled")

    def take_over(self, before: Activity) -> None:
        """Go on from the parameters of a network of the same shape, so that the picture moves to what it becomes."""
        if not isinstance(before, Training) or before._shape != self._shape:
            return
        self._model.load_state_dict(before._model.state_dict())
        self.step, self._history = before.step, before._history
        self._objective = self._make_objective(self.step)

    def run(self, goes_on: GoesOn) -> None:
        rate = _RATE if isinstance(self._family, Diagonal) else _RATE_TOGETHER
        optimiser = Adam(self._objective.param_groups(), rate, _BETAS)
        fit(self._objective, [self._batch], optimiser=optimiser, callbacks=[Convergence(), _Step(self, goes_on)])

    @property
    def _family(self) -> AnyFamily:
        return self._model.families[0][1] if self._model.families else Diagonal()

    def taken(self, likelihood: float, complexity: float) -> None:
        """Count a step and its costs, which are in nats per example and in nats."""
        self.step += 1
        self._history.add(self.step, self._n * likelihood, self._temperature * complexity)

    def look(self) -> Trained:
        model = self._model
        picture = class_map(model) if isinstance(model.likelihood, Categorical) else band(model)
        likelihood, complexity = self._history.columns
        return Trained(
            picture=picture,
            costs=Costs(step=self._history.steps, likelihood=likelihood, complexity=complexity),
            snr=snr_histogram(model),
            weights=sum(parameter.numel() for parameter in model.net.parameters()),
            estimator=", ".join(sorted({entry.estimator for entry in model.plan if entry.estimator})),
            draws=self._objective.draws,
        )


class _Step(Callback):
    """Counts the steps of a run, and ends it where it is not to go on."""

    def __init__(self, training: Training, goes_on: GoesOn) -> None:
        self._training, self._goes_on = training, goes_on

    def on_step(self, run: Run) -> None:
        self._training.taken(run.means["likelihood"], run.means["complexity"])
        if not self._goes_on():
            run.stop()


def _data(work: Regression | Classification) -> tuple[Tensor, Tensor, Likelihood, int]:
    """Inputs, targets, the likelihood, and how many outputs it needs; one point in the middle, if there is none."""
    if isinstance(work, Regression):
        x, y = torch.tensor(work.points or [(0.0, 0.0)]).unsqueeze(-1).unbind(1)
        return x, y, Gaussian(work.settings.noise), 1
    labels = torch.tensor([label for *_, label in work.points] or [0])
    places = torch.tensor([place for *place, _ in work.points] or [[0.0, 0.0]])
    return places, labels, Categorical(), max(2, int(labels.max()) + 1)


def _model(sizes: list[int], settings: Settings, likelihood: Likelihood) -> Bayesian:
    linear = drawn_from(torch.Generator().manual_seed(settings.seed))
    net = mlp(sizes, _ACTIVATIONS[settings.activation], linear=linear)
    return Bayesian(
        net,
        likelihood,
        _prior(settings),
        sigma=settings.sigma,
        estimator=None if settings.estimator == "auto" else settings.estimator,
        family=_posterior_family(settings, net, sizes[0]),
        seed=settings.seed,
    )


def _prior(settings: Settings) -> Prior:
    scale = settings.prior_scale
    if settings.prior == "normal":
        return Normal(scale)
    return Laplace(scale) if settings.prior == "laplace" else ScaleMixture(0.5, scale, _SPIKE * scale)


def _posterior_family(settings: Settings, net: nn.Module, inputs: int) -> AnyFamily:
    weights = sum(parameter.numel() for parameter in net.parameters())
    if settings.family == "full" and weights > _MOST_TOGETHER:
        constraint = f"another than 'full' for more than {_MOST_TOGETHER} weights: choose a narrower network"
        raise invalid("family", "the playground", constraint, weights)
    if settings.family == "conditional":
        line = torch.linspace(-END, END, _PSEUDO[inputs])
        return Conditional(torch.cartesian_prod(*[line] * inputs).reshape(-1, inputs))
    if settings.family == "low-rank":
        return LowRank(min(4, weights))
    others: dict[str, AnyFamily] = {"diagonal": Diagonal(), "mixture": Mixture(4), "full": FullCovariance()}
    return others[settings.family]
