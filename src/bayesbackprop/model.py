"""The wrapper: the user's network with a distribution on each weight, a prior and a likelihood."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesbackprop._batches import Data, call_arguments
from bayesbackprop._decay import watch
from bayesbackprop._engine import Draw, Engine, Estimator, divided, evaluating, kind_of, lock, memo_of
from bayesbackprop._errors import (
    INT64,
    Described,
    check_batch,
    check_count,
    check_flag,
    check_not_negative,
    check_seed,
    check_type,
    check_whole,
    invalid,
    is_finite,
    tensors_of,
)
from bayesbackprop._meta import check_in_memory, is_meta, materialise
from bayesbackprop._specification import (
    Select,
    Specification,
    check_shared,
    default_estimator,
    grouped,
    in_groups,
    per_parameter,
    print_specifications,
    remarked,
    specify,
)
from bayesbackprop._trees import with_draw
from bayesbackprop.diagnostics import diagnosis_of
from bayesbackprop.families import AnyFamily, Diagonal, Family
from bayesbackprop.likelihoods import Likelihood
from bayesbackprop.noise import WORDS, Key, Word
from bayesbackprop.posterior import InitialSigma, Mirror, WeightPosterior, constant_rho, initial_rho
from bayesbackprop.prediction import GIGABYTE, Ensemble, Predictive, check_output, has_hooks, predicting, predictive
from bayesbackprop.priors import Normal, Prior, ScaleMixture, check_range


class Bayesian(nn.Module):
    """A network with a distribution on every weight.

    The parameters of ``net`` are the posterior means mu; this adds one rho for each, sigma = log(1 + exp(rho)). So
    ``net(x)`` is the prediction at the mean, ``net.state_dict()`` is an ordinary checkpoint, and ``model.net`` is the
    network itself. The families ``Mixture`` and ``Conditional`` differ: they start at ``net`` and do not change it.

    Args:
        net: Any module. It is used as it is, not copied.
        likelihood: P(y|x,w), such as ``Categorical()`` or ``Gaussian(0.1)``.
        prior: P(w), ``Normal(1.0)`` unless given: one for all or a mapping of name patterns such as
            ``{"*.bias": Normal(1.0), "*": ScaleMixture()}``.
        sigma: Initial standard deviation: a float, ``Relative(0.1)`` for a tenth of \\|mu\\|, any function of mu, or a
            mapping of name patterns to those.
        estimator: ``"shared"``, ``"local"`` or ``"flipout"`` (see ``estimators``), or a mapping of name patterns. None
            is ``"flipout"`` where the network has a batch normalisation in training mode, whose statistics then are
            those of predictions; otherwise ``"shared"`` until :func:`~bayesbackprop.fit` chooses the one with the
            least noise for its price. Weights that vary together have ``"shared"`` alone.
        family: How the weights vary together: ``Diagonal()``, ``LowRank(8)``, ``FullCovariance()``, ``Mixture(5)``,
            ``Conditional(inputs)``, or a mapping of name patterns. Parameters of the same pattern vary together, all
            of them if it is not a mapping.
        select: Which parameters are Bayesian: a function of the parameter's name and the module that owns it.
        normalisation: Whether the weights of normalisation layers may be Bayesian too.
        centre: What the prior is centred on: None for 0, ``"net"`` for the weights ``net`` has now, or a mapping from
            names to tensors.
        output: A function that picks, from what the network returns, what the likelihood takes, such as
            ``lambda o: o.logits``; None for all of it. A file cannot hold it: give it to :func:`~bayesbackprop.load`.
        seed: Of all its noise. None takes one from torch's generator, so that ``torch.manual_seed`` decides.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> from bayesbackprop import Gaussian
        >>> model = Bayesian(net, Gaussian(0.1), select=lambda name, module: name.startswith("2."))
        >>> [entry.name for entry in model.plan if entry.prior is not None]
        ['2.weight', '2.bias']
    """

    _seed: Tensor
    is_divided = False  # whether fully_shard has divided parts of it

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: Prior | Mapping[str, Prior] | None = None,
        *,
        sigma: InitialSigma | Mapping[str, InitialSigma] = 0.01,
        estimator: Estimator | Mapping[str, Estimator] | None = None,
        family: AnyFamily | Mapping[str, AnyFamily] = Diagonal(),  # noqa: B008 (it cannot be changed)
        select: Select | None = None,
        normalisation: bool = False,
        centre: Literal["net"] | Mapping[str, Tensor] | None = None,
        output: Callable[[Any], Any] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        _check_net(net)
        check_type("Bayesian", Callable | None, "None or a function", select=select)
        check_flag("Bayesian", normalisation=normalisation)
        known = "a Likelihood, such as Categorical() or Gaussian(0.1)"
        check_type("Bayesian", Likelihood, known, likelihood=likelihood)
        check_output("Bayesian", output)
        if is_meta(likelihood):
            constraint = "in memory, with its values: make it outside of torch.device('meta')"
            raise invalid("likelihood", "Bayesian", constraint, Described("one on the meta device"))
        self.net = net
        self.likelihood = likelihood
        self._output = output
        self._may_choose = estimator is None
        self._default, why = default_estimator(net)
        self.plan: list[Specification] = specify(
            net,
            Normal(1.0) if prior is None else prior,
            self._default if estimator is None else estimator,
            select,
            normalisation,
        )
        if estimator is None:
            self.plan = remarked(self.plan, self._default, why)
        self._check_priors()
        names = [entry.name for entry in self.plan if entry.prior is not None]
        self.families: list[tuple[list[str], Family]] = grouped(net, names, family)
        check_shared(names, estimator, self.families)
        self.plan = in_groups(self.plan, self.families)
        self._rules = _rules(self.plan)
        sigmas: dict[str, InitialSigma] = per_parameter(sigma, names, "sigma")
        self.rho = Mirror({name: nn.Parameter(rho) for name, rho in _initial_rhos(net, sigmas).items()})
        # What to begin with where the network gets its memory later.
        self._sigmas = sigmas if is_meta(net) else {}
        self.centre = Mirror(_centres(net, names, centre))
        chosen = int(torch.randint(INT64 - 1, (), device="cpu")) if seed is None else seed
        seed = check_seed("Bayesian", seed=chosen)["seed"]
        # In the state_dict, so that a run resumes with its own noise.
        self.register_buffer("_seed", torch.zeros((), dtype=torch.int64))
        self.seed = seed
        self.register_load_state_dict_post_hook(_adopt_seed)  # type: ignore[no-untyped-call]
        self._engines: dict[str, Engine] = {}
        # What makes the weights of each group vary together.
        self.joint = nn.ParameterList()
        if self.families and self._sigmas:
            raise invalid("family", "Bayesian", "Diagonal() for a network on the meta device, without values", family)
        every = self._make_engine({}, []).parameters if self.families else None
        for some, its_family in self.families:
            parameters, generator = every.subset(some), torch.Generator().manual_seed(seed)  # type: ignore[union-attr]
            self.joint.append(nn.Parameter(kind_of(its_family).start(net, parameters, its_family, generator)))
        watch(self.rho, self.joint)

    @property
    def seed(self) -> int:
        """The seed of all its noise."""
        return self._seed_number

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed_number = check_seed("Bayesian", seed=seed)["seed"]
        self._seed.fill_(self._seed_number)

    @property
    def output(self) -> Callable[[Any], Any] | None:
        """The function that picks the likelihood's argument from the output of the network."""
        return self._output

    # --- reading the posterior ---------------------------------------------------------------------------------------

    @property
    def posterior(self) -> dict[str, WeightPosterior]:
        """The posterior of each Bayesian parameter by name: ``mu``, ``rho``, ``sigma``, ``snr``, ``numel``.

        For the families ``Mixture`` and ``Conditional`` it is only the initial posterior.
        """
        return {name: parameter.q for name, parameter in self.engine().parameters.by_name.items()}

    def report(self, data: Data | None = None, *, draws: int = 100, seed: int | None = None) -> str:
        """A table of what is Bayesian, with which prior and estimator and how uncertain, and why the rest is not.

        Given the training set, :func:`~bayesbackprop.diagnostics.diagnose` adds whether the posterior has been learnt,
        with a line of advice for each figure.
        """
        moments = self.engine().moments()
        ratios = {name: each.mean.abs() / each.deviation for name, each in moments.items()}
        numbers = {
            name: (f"{_median(moments[name].deviation):.3g}", f"{_median(ratios[name]):.3g}") for name in moments
        }
        table = print_specifications(self.plan, numbers, ("median sigma", "median snr"))
        return table if data is None else f"{table}\n{diagnosis_of(self, data, draws, seed, 'Bayesian.report')}"

    def param_groups(
        self, lr: float | None = None, *, rho_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """The parameters in groups for an optimiser: means, spreads, and those of the likelihood, if it has any.

        Weight decay is for the network alone: on rho it would widen the posterior, on the noise bias it.

        Args:
            lr: The learning rate; None for the optimiser's own.
            rho_lr: The learning rate of rho; None for that of the means.
            weight_decay: Of the network's parameters.

        Examples:
            >>> from bayesbackprop import Gaussian
            >>> model = Bayesian(nn.Linear(2, 1), Gaussian(0.1))
            >>> optimiser = torch.optim.AdamW(model.param_groups(1e-3, rho_lr=1e-2, weight_decay=1e-4))
            >>> [group["weight_decay"] for group in optimiser.param_groups]
            [0.0001, 0.0]
        """
        rates = {name: rate for name, rate in (("lr", lr), ("rho_lr", rho_lr)) if rate is not None}
        checked = check_not_negative("Bayesian.param_groups", weight_decay=weight_decay, **rates)
        lr, rho_lr, weight_decay = checked.get("lr"), checked.get("rho_lr"), checked["weight_decay"]
        parts = (
            (self.net, lr, weight_decay),
            (self.rho, lr if rho_lr is None else rho_lr, 0.0),
            (self.joint, lr if rho_lr is None else rho_lr, 0.0),
            (self.likelihood, lr, 0.0),
        )
        groups: list[dict[str, Any]] = []
        taken: set[nn.Parameter] = set()  # a likelihood may have a parameter of the network's
        for part, rate, decay in parts:
            if parameters := [parameter for parameter in part.parameters() if parameter not in taken]:
                taken.update(parameters)
                own_rate = {} if rate is None else {"lr": rate}
                groups.append({"params": parameters, "weight_decay": decay, **own_rate})
        return groups

    def choose_estimator(self, inputs: Any) -> None:
        """Choose the estimator with the least noise for its cost on such ``inputs``, unless one was given.

        It is ``"local"`` for a fully connected network and a row of numbers for each example: twice the matrix
        products, and a fraction of the noise. Otherwise it is ``"shared"``: with convolutions the others cost more,
        and with sequences ``"local"`` has other weights at each position. But where a batch normalisation trains it is
        ``"flipout"``, without which drawn networks predict worse than they were trained.
        """
        if not self._may_choose:
            return
        self._may_choose = False
        wanted, why = default_estimator(self.net)  # a layer may be in another mode than when it was wrapped
        if isinstance(inputs, Tensor) and inputs.dim() == 2 and len(self.engine().executors) > 1:
            wanted, why = "local", ""
        if wanted == self._default:
            return
        priors = {entry.name: entry.prior for entry in self.plan if entry.prior is not None}
        chosen = specify(self.net, priors, wanted, lambda name, _: name in priors, normalisation=True)
        now = {entry.name: entry for entry in remarked(chosen, wanted, why) if entry.prior is not None}
        self.plan = in_groups([now.get(entry.name, entry) for entry in self.plan], self.families)
        self._rules, self._engines = _rules(self.plan), {}

    # --- drawing weights ---------------------------------------------------------------------------------------------

    def draw(self, step: Word = 0, index: Word = 0, seed: int | None = None, *, closed: bool = False) -> "Draw":
        """A draw from the posterior: a pure function of (seed, step, index) and the parameters.

        Step 0 is for prediction; training counts from 1. The complexity of a ``closed`` draw is KL[q || P] itself,
        where the priors have a closed form, instead of log q(w|theta) - log P(w).
        """
        return Draw(self.engine(), self._key(step, index, seed), closed)

    def complexity_closed(self) -> Tensor:
        """KL[q(w|theta) || P(w)] over all Bayesian weights, in nats, where the priors have a closed form."""
        return self.engine().kl()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network at the posterior mean, as ``net(...)``."""
        self.check_about_mu("Bayesian.forward")
        return self.net(*args, **kwargs)

    # --- predicting --------------------------------------------------------------------------------------------------

    def predict(
        self,
        *args: Any,
        draws: int = 100,
        seed: int | None = None,
        memory: int = GIGABYTE,
        estimator: Estimator | Mapping[str, Estimator] | None = None,
        inputs: Any = None,
        **kwargs: Any,
    ) -> Predictive:
        """The predictive distribution P(y|x) = E_q[P(y|x,w)]: the probabilities of ``draws`` networks, averaged.

        The network runs in evaluation mode and without gradients. The same seed gives the same draws.
        Attributes that the network sets hold the values of the last draw afterwards.

        Each example has exactly the predictive distribution of drawn networks. In fully connected networks its draws
        are made in the quickest way and need not be those of the other examples of the batch. Below 80 examples the
        prediction of one does not depend on the others; from 80 on it does, by the noise of its draws. Where all
        examples must see the same drawn networks, to plot drawn functions say, use ``estimator="shared"`` or
        :meth:`ensemble`.

        Args:
            *args: What the network takes.
            draws: How many weight draws to average.
            seed: Of the draws; None for the model's own.
            memory: Bytes that the draws running in parallel may hold at a time, as far as one draw's own use tells.
            estimator: None for the quickest way that is exact for each example; ``"shared"`` for whole drawn networks,
                whatever the model was trained with; ``"local"``, which with convolutions or sequences makes positions
                independent and is then not exact; ``"flipout"``; or a mapping of name patterns.
            inputs: What the network takes, as :class:`FreeEnergy` has it, in place of all other arguments: a tensor, a
                tuple of positional or a mapping of keyword arguments. For networks with arguments of the names above.
            **kwargs: What the network takes.
        """
        options: dict[str, Any] = {"draws": draws, "seed": seed, "memory": memory, "estimator": estimator}
        return predictive(self.likelihood, self.outputs(*args, **options, inputs=inputs, **kwargs), draws)

    def outputs(
        self,
        *args: Any,
        draws: int = 100,
        seed: int | None = None,
        memory: int = GIGABYTE,
        estimator: Estimator | Mapping[str, Estimator] | None = None,
        inputs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The outputs of ``draws`` networks, ``[draws, ...]``, before :meth:`predict` averages them.

        Tensors are stacked wherever they are: in tuples, dicts, dataclasses, or objects such as caches.
        """
        _check_no_arguments(draws=draws, seed=seed, memory=memory)
        memory, draws = check_count("Bayesian.predict", memory=memory)["memory"], _checked_draws("predict", draws)
        args, kwargs = call_arguments("Bayesian.predict", args, kwargs, inputs)
        check_batch("inputs", "Bayesian.predict", tensors_of((args, kwargs)))
        key = self._key(0, 0, seed)
        if estimator is None or (isinstance(estimator, str) and estimator == "shared"):
            engine = self._engine("shared", {})
        else:
            names = list(self.engine().parameters.by_name)
            entries = specify(self.net, ScaleMixture(), estimator, lambda name, _: name in names, normalisation=True)
            engine = self._make_engine(_rules(in_groups(entries, self.families)))
        call = (key, draws, memory, args, kwargs)
        # A fully connected network is made of torch's own modules, on which only a hook can leave anything.
        quick = estimator is None and len(engine.executors) > 1 and not has_hooks(self.net)
        with evaluating(self.net) if quick else predicting(self.net):
            return engine.first("outputs", *call) if estimator is None else engine.any_module.outputs(*call)

    def predict_mean(self, *args: Any, inputs: Any = None, **kwargs: Any) -> Predictive:
        """The prediction of the network at the posterior mean alone; ``inputs`` as in :meth:`predict`."""
        args, kwargs = call_arguments("Bayesian.predict_mean", args, kwargs, inputs)
        check_batch("inputs", "Bayesian.predict_mean", tensors_of((args, kwargs)))
        self.check_about_mu("Bayesian.predict_mean")
        with evaluating(self.net):
            outputs = with_draw(self.engine().pick(self.net(*args, **kwargs)))
        return predictive(self.likelihood, outputs, 1)

    def ensemble(self, draws: int = 100, seed: int | None = None) -> Ensemble:
        """A fixed ensemble of ``draws`` weight draws, kept in memory and reused for every prediction."""
        draws = _checked_draws("ensemble", draws)
        engine = self.engine()
        names = list(engine.parameters.by_name)
        weights = engine.draws(self._key(0, 0, seed), draws, names)
        return Ensemble(self.net, self.likelihood, dict(zip(names, weights, strict=True)), self.output)

    # --- what draws need ---------------------------------------------------------------------------------------------

    def engine(self) -> Engine:
        """What runs the network on drawn weights, under the model's own estimators."""
        return self._engine("own", self._rules)

    def _engine(self, purpose: str, rules: dict[str, Estimator]) -> Engine:
        """The engine for ``purpose``, made once and revalidated at each use."""
        if torch.compiler.is_compiling():
            return self._make_engine(rules)
        with lock(self.net):
            engine = self._engines.get(purpose)
            if engine is None or not engine.valid(self.net):
                engine = self._engines[purpose] = self._make_engine(rules)
            return engine

    def _make_engine(
        self, rules: dict[str, Estimator], families: list[tuple[list[str], Family]] | None = None
    ) -> Engine:
        if not torch.compiler.is_compiling():
            check_whole("net", "Bayesian", self)
            self.is_divided = bool(divided(self))
            if self._sigmas:
                check_in_memory("net", "Bayesian", self)
        priors = {entry.name: entry.prior for entry in self.plan if entry.prior is not None}
        pairs = zip(self.families if families is None else families, self.joint, strict=True)
        joints = [(names, family, joint) for (names, family), joint in pairs]
        centre = self.centre if self.has_centre else None
        return Engine(self.net, self.rho, centre, priors, rules, joints, self.output)

    def check_about_mu(self, owner: str) -> None:
        """Refuse, for ``owner``, a posterior whose mean is no network that predicts."""
        for _, family in self.families:
            if not family.about_mu:
                constraint = "one whose mean is a network that predicts (draws do: predict, ensemble)"
                raise invalid("family", owner, constraint, family)

    def _key(self, step: Word, index: Word, seed: int | None) -> Key:
        words = {name: _checked_word(name, word) for name, word in (("step", step), ("index", index))}
        return Key(self.seed if seed is None else check_seed("Bayesian", seed=seed)["seed"], *words.values())

    def _check_priors(self) -> None:
        for entry in self.plan:
            if entry.prior is not None:
                check_range(entry.prior, self.net.get_parameter(entry.name).dtype, entry.name)

    def _apply(self, fn: Any, recurse: bool = True) -> "Bayesian":
        """What ``.half()`` and the like go through: the rho of constant weights stays finite in a narrower type."""
        if self._sigmas and not fn(torch.empty((), device="meta")).is_meta:
            raise RuntimeError(
                "A module that contains this model gives it memory, without the values that the spreads start with. "
                "Call to_empty(device=...) of the Bayesian itself."
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._engines = {}  # which hold on to nodes of autograd of the dtype and the device that were
        self._check_priors()
        with torch.no_grad():
            for rho in self.rho.parameters():
                rho.clamp_(min=constant_rho(rho.dtype))
        return self

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> "Bayesian":
        """Memory on ``device`` for a network on the meta device: its means are undefined until they are loaded.

        rho is that of ``sigma``. For a model that has its values it is what torch's ``to_empty`` is.
        """
        if not is_meta(self):
            return super().to_empty(device=device, recurse=recurse)
        if self.has_centre:
            constraint = "None for a network on the meta device, unless it comes from a file: load(path, net)"
            raise invalid("centre", "Bayesian", constraint, Described("the weights of a network without values"))
        materialise(self, device)
        self._seed.fill_(self._seed_number)
        with torch.no_grad():
            for name, rho in _initial_rhos(self.net, self._sigmas).items():
                self.rho.get_parameter(name).copy_(rho)
        self._sigmas, self._engines = {}, {}
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engines": {}}  # a copy finds its own tensors

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch(self.rho, self.joint)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bayesian":
        with lock(self.net):  # while it runs on drawn weights, a recurrent layer cannot be copied
            made = type(self).__new__(type(self))
            memo[id(self)] = made
            memo |= memo_of(self)
            made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
            return made

    @property
    def has_centre(self) -> bool:
        """Whether the prior is centred on given weights instead of 0."""
        return bool(self.centre._buffers or self.centre._modules)


def _rules(entries: list[Specification]) -> dict[str, Estimator]:
    """The estimators that are not ``shared``, by name."""
    return {entry.name: entry.estimator for entry in entries if entry.estimator and entry.estimator != "shared"}


def _check_no_arguments(**options: object) -> None:
    """Refuse a tensor with dimensions where an option of a prediction is meant: it is for the network."""
    for name, value in options.items():
        if isinstance(value, Tensor) and value.dim():
            constraint = f"an int (an argument of the network of that name goes into inputs={{'{name}': ...}})"
            raise invalid(name, "Bayesian.predict", constraint, value)


def _checked_draws(method: str, draws: int) -> int:
    """How many draws there are to be: each has a word of the counter of the noise."""
    if type(draws) is int and 0 < draws < WORDS:  # the usual case, and quick
        return draws
    check_count(f"Bayesian.{method}", draws=draws)
    return check_count(f"Bayesian.{method}", below=WORDS, draws=draws)["draws"]


def _checked_word(name: str, word: Word) -> Word:
    """A step or a draw, as a word of the counter of the noise."""
    if not isinstance(word, Tensor):
        if type(word) is int and 0 <= word < WORDS:  # the usual case, and quick
            return word
        return check_count("Bayesian.draw", least=0, below=WORDS, **{name: word})[name]
    if word.dtype != torch.int64 or word.dim():
        raise invalid(name, "Bayesian.draw", "an int, or a tensor of one int64", word)
    return word


def _adopt_seed(model: Bayesian, _: Any) -> None:
    model._seed_number = check_seed("Bayesian", seed=int(model._seed))["seed"]


def _check_net(net: object) -> None:
    if not isinstance(net, nn.Module):
        raise invalid("net", "Bayesian", "a torch.nn.Module", net)
    check_whole("net", "Bayesian", net)
    if divided(net):
        constraint = "wrapped before it is divided: fully_shard(free_energy) comes last"
        raise invalid("net", "Bayesian", constraint, Described("one that fully_shard has divided"))
    if any(isinstance(module, Bayesian) for module in net.modules()):
        raise invalid("net", "Bayesian", "a network that has not been wrapped yet", Described("a Bayesian inside it"))
    for name, parameter in net.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            constraint = f"a module whose parameters have a shape: run one batch through it first ('{name}' is lazy)"
            raise invalid("net", "Bayesian", constraint, net)
        if parameter.is_floating_point() and not parameter.is_meta and not is_finite(parameter.detach()):
            raise invalid("net", "Bayesian", f"a module with finite weights ('{name}' has NaN or inf)", net)


def _initial_rhos(net: nn.Module, sigmas: Mapping[str, InitialSigma]) -> dict[str, Tensor]:
    rhos: dict[str, Tensor] = {}
    for name, value in sigmas.items():
        mu = net.get_parameter(name)
        if mu.is_meta and callable(value):
            constraint = f"a number where the network is on the meta device: '{name}' has no values yet"
            raise invalid("sigma", "Bayesian", constraint, value)
        rho = initial_rho(mu, value).detach()
        if not callable(value):  # a number has been checked
            rhos[name] = rho
            continue
        if rho.shape != mu.shape or not is_finite(rho):
            raise invalid("sigma", "Bayesian", f"positive and finite for each weight of '{name}'", rho)
        rhos[name] = rho
    for module in net.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
            for name, rho in rhos.items():
                if net.get_parameter(name) is module.weight:
                    rho[module.padding_idx] = constant_rho(rho.dtype)  # padding stays what it is: a constant
    return rhos


def _centres(
    net: nn.Module, names: list[str], centre: Literal["net"] | Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    if centre is None:
        return {}
    if isinstance(centre, str) and centre == "net":
        return {name: net.get_parameter(name).detach().clone() for name in names}
    if not isinstance(centre, Mapping) or not set(names) <= set(centre) <= set(net.state_dict()):
        raise invalid("centre", "Bayesian", f"None, 'net' or a mapping with a tensor for each of {names}", centre)
    chosen: dict[str, Tensor] = {}
    for name in names:
        mu, given = net.get_parameter(name), centre[name]
        fits = isinstance(given, Tensor) and given.shape == mu.shape and not given.is_complex()
        if not fits or not is_finite(given):
            raise invalid("centre", "Bayesian", f"finite and of shape {list(mu.shape)} for '{name}'", given)
        chosen[name] = given.detach().to(mu).clone()
    return chosen


def _median(values: Tensor) -> float:
    return float(values.detach().median()) if values.numel() else float("nan")
