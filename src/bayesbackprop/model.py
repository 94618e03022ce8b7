"""The wrapper: a network of the user's, a distribution on each of its weights, a prior and a likelihood."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesbackprop import _engine as kernels
from bayesbackprop import complexity, rowwise
from bayesbackprop._errors import (
    Described,
    check_batch,
    check_callable,
    check_count,
    check_positive,
    invalid,
    tensor_shape,
    tensors_of,
)
from bayesbackprop._specification import Entry, Select, make_plan, per_parameter, print_plan
from bayesbackprop.estimators import Estimating, Estimator, Site
from bayesbackprop.layout import Layout
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.noise import Key, Word
from bayesbackprop.posterior import CONSTANT, InitialSigma, Mirror, Moments, WeightPosterior, initial_rho
from bayesbackprop.prediction import GIGABYTE, Ensemble, Predictive, evaluating, over_draws, predictive
from bayesbackprop.priors import Prior, ScaleMixture
from bayesbackprop.swap import call_with, lock

# Seeds stay below this so that they fit a signed 64-bit integer wherever they are stored.
_SEEDS = 2**63

# Steps and draws are words of the counter of the noise.
_WORDS = 2**32


class Bayesian(nn.Module):
    """A network with a distribution on every weight.

    The parameters of ``net`` are the posterior means mu; this adds one rho for each, sigma = log(1 + exp(rho)). So
    ``net(x)`` is the prediction at the mean, ``net.state_dict()`` is an ordinary checkpoint, and ``model.net`` is the
    way back.

    Args:
        net: Any module. It is used as it is, not copied.
        likelihood: P(y|x,w), such as ``Categorical()`` or ``Gaussian(0.1)``.
        prior: P(w), one for all or a mapping of name patterns such as ``{"*.bias": Normal(1.0), "*": ScaleMixture()}``.
        sigma: Initial standard deviation: a float, ``Relative(0.1)`` for a tenth of \\|mu\\|, any function of mu, or a
            mapping of name patterns to those.
        estimator: ``"shared"``, ``"local"`` or ``"flipout"`` (see ``estimators``), or a mapping of name patterns.
        select: Which parameters are Bayesian: a function of the parameter's name and the module that owns it.
        normalisation: Whether the weights of normalisation layers may be Bayesian too.
        centre: What the prior is centred on: None for 0, ``"net"`` for the weights ``net`` has now, or a mapping from
            names to tensors.
        seed: Of all its noise. None takes one from torch's generator, so that ``torch.manual_seed`` decides.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> from bayesbackprop import Gaussian
        >>> model = Bayesian(net, Gaussian(0.1), select=lambda name, module: name.startswith("2."))
        >>> [entry.name for entry in model.plan if entry.prior is not None]
        ['2.weight', '2.bias']
    """

    _seed: Tensor

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: Prior | Mapping[str, Prior] | None = None,
        *,
        sigma: InitialSigma | Mapping[str, InitialSigma] = 0.01,
        estimator: Estimator | Mapping[str, Estimator] = "shared",
        select: Select | None = None,
        normalisation: bool = False,
        centre: Literal["net"] | Mapping[str, Tensor] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        _check_net(net)
        if select is not None:
            check_callable("Bayesian", select=select)
        if not isinstance(likelihood, Likelihood):
            raise invalid("likelihood", "Bayesian", "a Likelihood, such as Categorical() or Gaussian(0.1)", likelihood)
        self.net = net
        self.likelihood = likelihood
        self.plan: list[Entry] = make_plan(net, prior or ScaleMixture(), estimator, select, normalisation)
        self._entries = {entry.name: entry for entry in self.plan if entry.prior is not None}
        names = list(self._entries)
        self.rho = Mirror({name: nn.Parameter(rho) for name, rho in _initial_rhos(net, names, sigma).items()})
        self.centre = Mirror(_centres(net, names, centre))
        if seed is None:
            seed = int(torch.randint(_SEEDS - 1, ()))
        check_count("Bayesian", least=0, seed=seed)
        if seed >= _SEEDS:
            raise invalid("seed", "Bayesian", f"an int in [0, {_SEEDS})", seed)
        self.seed = seed
        # In the state_dict too, so that a run resumes with its own noise.
        self.register_buffer("_seed", torch.tensor(seed))
        self.register_load_state_dict_post_hook(_adopt_seed)  # type: ignore[no-untyped-call]
        self._kept: Layout | None = None

    # --- reading the posterior ---------------------------------------------------------------------------------------

    @property
    def posterior(self) -> dict[str, WeightPosterior]:
        """The posterior of each Bayesian parameter by name: ``mu``, ``rho``, ``sigma``, ``snr``, ``numel``."""
        return {name: parameter.q for name, parameter in self.layout().parameters.by_name.items()}

    def report(self) -> str:
        """A table: what is Bayesian, with which prior and estimator, how uncertain it is, and why not where not."""
        numbers = {name: (f"{_median(q.sigma):.3g}", f"{_median(q.snr):.3g}") for name, q in self.posterior.items()}
        return print_plan(self.plan, numbers, ("median sigma", "median snr"))

    # --- drawing weights ---------------------------------------------------------------------------------------------

    def draw(self, step: Word = 0, index: Word = 0, seed: int | None = None) -> "Draw":
        """A draw from the posterior: a pure function of (seed, step, index) and the parameters.

        Step 0 is for prediction; training counts from 1.
        """
        return Draw(self, self._key(step, index, seed))

    def complexity_closed(self) -> Tensor:
        """KL[q(w|theta) || P(w)] over all Bayesian weights, in nats, where the priors have a closed form."""
        terms = [complexity.closed(p.q, p.prior, p.centre) for p in self.layout().parameters.each]
        return torch.stack(terms).sum()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network at the posterior mean, as ``net(...)``."""
        return self.net(*args, **kwargs)

    # --- predicting --------------------------------------------------------------------------------------------------

    def predict(
        self,
        *args: Any,
        draws: int = 100,
        seed: int | None = None,
        memory: int = GIGABYTE,
        estimator: Estimator | Mapping[str, Estimator] | None = None,
        **kwargs: Any,
    ) -> Predictive:
        """The predictive distribution P(y|x) = E_q[P(y|x,w)]: the probabilities of ``draws`` networks, averaged.

        The network runs in evaluation mode and without gradients. The same seed gives the same draws.

        Each example has exactly the predictive distribution of drawn networks. In fully connected networks its draws
        are made in the quickest way and need not be those of the other examples of the batch. Where all examples must
        see the same drawn networks, to plot drawn functions say, use ``estimator="shared"`` or :meth:`ensemble`.

        Args:
            *args: What the network takes.
            draws: How many weight draws to average.
            seed: Of the draws; None for the model's own.
            memory: Bytes that the draws running in parallel may hold at a time, as far as one draw's own use tells.
            estimator: None for the quickest way that is exact for each example; ``"shared"`` for whole drawn networks,
                whatever the model was trained with; ``"local"``, which with convolutions or sequences makes positions
                independent and is then not exact; ``"flipout"``; or a mapping of name patterns.
            **kwargs: What the network takes.
        """
        check_count("Bayesian.predict", draws=draws, memory=memory)
        check_batch("inputs", "Bayesian.predict", tensors_of((args, kwargs)))
        key = self._key(0, 0, seed)
        layout = self.layout()
        if estimator is None and layout.chain is not None and rowwise.takes(self.net, layout.chain, args, kwargs):
            with evaluating(self.net):
                outputs = rowwise.outputs(layout.chain, layout.parameters, key, args[0], draws, memory)
            return predictive(self.likelihood, outputs, draws)
        if estimator not in (None, "shared") or layout.rules:
            layout = self._layout_with(estimator or "shared")
        shared = layout.shared.names
        with torch.no_grad():
            parameters = layout.parameters.subset(list(layout.rules))
            moments = {
                name: Moments(p.q.mu, p.q.mean, variance)
                for (name, p), variance in zip(parameters.by_name.items(), kernels.variances(parameters), strict=True)
            }

        def run(each: tuple[Tensor, list[Tensor]]) -> Any:
            index, weights = each
            return Draw(self, key._replace(draw=index), layout, moments).run_with(weights, args, kwargs)

        def chunk(start: int, stop: int) -> tuple[Tensor, list[Tensor]]:
            weights = self._draw_many(shared, key._replace(draw=start), stop - start)
            return torch.arange(start, stop), list(weights.values())

        outputs = over_draws(self.net, run, chunk, draws, memory)
        return predictive(self.likelihood, outputs, draws)

    def predict_mean(self, *args: Any, **kwargs: Any) -> Predictive:
        """The prediction of the network at the posterior mean alone."""
        check_batch("inputs", "Bayesian.predict_mean", tensors_of((args, kwargs)))
        outputs = over_draws(self.net, lambda _: self.net(*args, **kwargs), lambda *_: torch.zeros(1), 1, GIGABYTE)
        return predictive(self.likelihood, outputs, 1)

    def ensemble(self, draws: int = 100, seed: int | None = None) -> Ensemble:
        """A fixed ensemble of ``draws`` weight draws, kept in memory and used again for every prediction."""
        check_count("Bayesian.ensemble", draws=draws)
        return Ensemble(self.net, self.likelihood, self._draw_many(list(self._entries), self._key(0, 0, seed), draws))

    # --- what draws need ---------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Where everything stands now."""
        if torch.compiler.is_compiling():
            return self._make_layout(self.plan)
        with lock(self.net):
            if self._kept is None or not self._kept.holds(self.net):
                self._kept = self._make_layout(self.plan)
            return self._kept

    def _layout_with(self, estimator: Estimator | Mapping[str, Estimator]) -> Layout:
        priors = {name: parameter.prior for name, parameter in self.layout().parameters.by_name.items()}
        with lock(self.net):
            return self._make_layout(make_plan(self.net, priors, estimator, lambda name, _: name in priors, True))

    def _make_layout(self, plan: list[Entry]) -> Layout:
        return Layout(self.net, self.likelihood, self.rho, self.centre if self.has_centre else None, plan)

    def _key(self, step: Word, index: Word, seed: int | None) -> Key:
        if seed is not None:
            check_count("Bayesian", least=0, seed=seed)
        for name, word in (("step", step), ("index", index)):
            if not isinstance(word, Tensor) and not (type(word) is int and 0 <= word < _WORDS):
                raise invalid(name, "Bayesian.draw", f"an int in [0, {_WORDS})", word)
        return Key(self.seed if seed is None else seed, step, index)

    def _draw_many(self, names: list[str], key: Key, many: int) -> dict[str, Tensor]:
        parameters = self.layout().parameters.subset(names)
        return dict(zip(names, kernels.draw_many(parameters, key, many), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # a copy finds its own places

    @property
    def has_centre(self) -> bool:
        """Whether the prior is centred on given weights instead of 0."""
        return bool(self.centre._buffers or self.centre._modules)


class Draw:
    """A set of weights and its complexity.

    ``draw(x)`` runs the network with these weights, ``draw.weights`` are they, and ``draw.complexity()`` is
    log q(w|theta) - log P(w) at them. Nothing is kept on the network, so draws never disturb each other. The weights
    are drawn when first asked for, from the posterior as it then is.
    """

    def __init__(
        self,
        model: Bayesian,
        key: Key,
        layout: Layout | None = None,
        moments: Mapping[str, Moments] | None = None,
    ) -> None:
        self._model = model
        self._key = key
        self._layout = model.layout() if layout is None else layout
        self._moments = moments or {}
        self._drawn: tuple[dict[str, Tensor], Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the network at this draw."""
        shared = self._layout.shared.names
        return self.run_with([self.weights[name] for name in shared] if shared else [], args, kwargs)

    def run_with(self, shared: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output with these weights for what is ``shared``, and the estimators' rules for the rest."""
        layout = self._layout
        if not layout.rules:
            return call_with(layout.shared, shared, args, kwargs)
        sites = {
            parameter.q.mu: Site(
                name,
                number,
                self._moments.get(name, parameter.q),
                layout.rules[name],
                functools.partial(self._weight, name),
            )
            for number, (name, parameter) in enumerate(layout.parameters.by_name.items())
            if name in layout.rules
        }
        with Estimating(sites, self._key):
            return call_with(layout.shared, shared, args, kwargs)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The drawn weights, w = mu + log(1 + exp(rho)) * eps, by parameter name."""
        return self._draw()[0]

    def complexity(self) -> Tensor:
        """log q(w|theta) - log P(w) at this draw, over all Bayesian weights, in nats.

        Where the estimator uses no weights (``local``) it is that of a draw of its own: still unbiased.
        """
        return self._draw()[1]

    def _draw(self) -> tuple[dict[str, Tensor], Tensor]:
        if self._drawn is None:
            parameters = self._layout.parameters
            ws, complexity = kernels.sample(parameters, self._key)
            self._drawn = dict(zip(parameters.by_name, ws, strict=True)), complexity
        return self._drawn

    def _weight(self, name: str) -> Tensor:
        return self.weights[name]


def _adopt_seed(model: Bayesian, _: Any) -> None:
    model.seed = int(model._seed)


def _check_net(net: object) -> None:
    if not isinstance(net, nn.Module):
        raise invalid("net", "Bayesian", "a torch.nn.Module", net)
    if any(isinstance(module, Bayesian) for module in net.modules()):
        raise invalid("net", "Bayesian", "a network that has not been wrapped yet", Described("a Bayesian inside it"))
    for name, parameter in net.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            constraint = f"a module whose parameters have a shape: run one batch through it first ('{name}' is lazy)"
            raise invalid("net", "Bayesian", constraint, net)
        if parameter.is_floating_point() and not bool(parameter.detach().isfinite().all()):
            raise invalid("net", "Bayesian", f"a module with finite weights ('{name}' has NaN or inf)", net)


def _initial_rhos(
    net: nn.Module, names: list[str], sigma: InitialSigma | Mapping[str, InitialSigma]
) -> dict[str, Tensor]:
    rhos: dict[str, Tensor] = {}
    each: dict[str, InitialSigma] = per_parameter(sigma, names, "sigma")
    for name, value in each.items():
        if not callable(value):
            check_positive("Bayesian", sigma=value)
        mu = net.get_parameter(name)
        rho = initial_rho(mu, value).detach()
        if rho.shape != mu.shape or not bool(rho.isfinite().all()):
            raise invalid("sigma", "Bayesian", f"positive and finite for each weight of '{name}'", tensor_shape(rho))
        rhos[name] = rho
    for module in net.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
            for name, rho in rhos.items():
                if net.get_parameter(name) is module.weight:
                    rho[module.padding_idx] = CONSTANT  # padding stays what it is: a constant
    return rhos


def _centres(
    net: nn.Module, names: list[str], centre: Literal["net"] | Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    if centre is None:
        return {}
    if centre == "net":
        return {name: net.get_parameter(name).detach().clone() for name in names}
    if not isinstance(centre, Mapping) or not set(names) <= set(centre) <= set(net.state_dict()):
        raise invalid("centre", "Bayesian", f"None, 'net' or a mapping with a tensor for each of {names}", centre)
    chosen: dict[str, Tensor] = {}
    for name in names:
        mu, given = net.get_parameter(name), centre[name]
        if not isinstance(given, Tensor) or given.shape != mu.shape or not bool(given.isfinite().all()):
            got = tensor_shape(given) if isinstance(given, Tensor) else given
            raise invalid("centre", "Bayesian", f"finite and of shape {list(mu.shape)} for '{name}'", got)
        chosen[name] = given.detach().to(mu).clone()
    return chosen


def _median(values: Tensor) -> float:
    return float(values.detach().median()) if values.numel() else float("nan")
