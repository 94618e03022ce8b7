"""MNIST classification (section 5.1 of the paper): every method of Table 1 and its baselines, on one loop."""

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bayesbackprop._engine import ESTIMATORS, Estimator, evaluating
from bayesbackprop._errors import (
    Described,
    check_choice,
    check_count,
    check_not_negative,
    check_positive,
    check_probability,
    invalid,
)
from bayesbackprop._files import read, read_checkpoint, write_atomically
from bayesbackprop._networks import mlp
from bayesbackprop._version import __version__
from bayesbackprop.callbacks import Callback
from bayesbackprop.evaluation import error as error_of
from bayesbackprop.evaluation import score
from bayesbackprop.export import SparseNetwork, save_sparse
from bayesbackprop.likelihoods import Categorical
from bayesbackprop.model import Bayesian
from bayesbackprop.objective import FreeEnergy
from bayesbackprop.prediction import Predictive
from bayesbackprop.priors import Laplace, Normal, Prior, ScaleMixture
from bayesbackprop.saving import save
from bayesbackprop.training import Record
from bayesbackprop_paper.data import Images
from bayesbackprop_paper.experiments.recipe import (
    BEST,
    CHECKPOINT,
    EVALUATED,
    Examples,
    Experiment,
    PointEstimate,
    Schedule,
    seeded,
)

Method = Literal["bbb-mixture", "bbb-gaussian", "sgd", "dropout", "dropconnect", "map-gaussian", "map-laplace"]
METHODS: tuple[str, ...] = get_args(Method)

# The selected model of a run, for others to use.
MODEL = "model.safetensors"

# What a run gave, and how it was made.
RESULT = "result.json"


@dataclass(frozen=True)
class Config:
    """An experiment, down to the seed. All numbers were chosen on the validation set.

    Args:
        method: A row of Table 1, or a baseline.
        units: Of each of the two hidden layers.
        schedule: How to train.
        temperature: A factor on the complexity; 1 is the paper's cost.
        draws: Monte Carlo samples a step.
        estimator: How the noise of the weights enters a training step.
        complexity: Whether the complexity cost is sampled, as in the paper, or its expectation in closed form.
        minibatch_weights: How the minibatches of an epoch share the complexity cost: alike, or as the paper has it,
            the first half of it, the second a quarter, and so on.
        pi: Of the scale mixture.
        sigma1: Of the scale mixture, the slab.
        sigma2: Of the scale mixture, the spike.
        prior_sigma: Of the Gaussian prior, or the scale of the Laplace prior.
        sigma: The initial standard deviation of the posterior, of the first layer if ``hidden_sigma`` is given.
        hidden_sigma: That of the layers behind it, times the root of their inputs, so that the noise of a unit does
            not grow with the width of the network.
        dropout: How likely dropout is to forget a unit, the inputs among them.
        prediction: What predicts in the end: ``"draws"``, the average of drawn networks, or ``"selected"``, that or the
            mean network, whichever has the lower validation error.
        prediction_draws: Networks to average in the final evaluation.
        start: The experiment whose selected weights are the initial means; none for random ones.
        seed: Of the initial weights and all noise.
    """

    method: Method = "bbb-mixture"
    units: int = 400
    schedule: Schedule = field(default_factory=Schedule)
    temperature: float = 1.0
    draws: int = 1
    estimator: Estimator = "shared"
    complexity: Literal["sampled", "closed"] = "sampled"
    minibatch_weights: Literal["uniform", "geometric"] = "uniform"
    pi: float = 0.25
    sigma1: float = math.exp(-1)
    sigma2: float = math.exp(-7)
    prior_sigma: float = 0.1
    sigma: float = 0.0067
    hidden_sigma: float | None = None
    dropout: float = 0.3
    prediction: Literal["selected", "draws"] = "selected"
    prediction_draws: int = 100
    start: "Config | None" = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise invalid("method", "Config", f"one of {', '.join(METHODS)}", self.method)
        check_count("Config", units=self.units, draws=self.draws, prediction_draws=self.prediction_draws)
        check_count("Config", least=0, seed=self.seed)
        check_positive("Config", sigma=self.sigma, prior_sigma=self.prior_sigma)
        if self.hidden_sigma is not None:
            check_positive("Config", hidden_sigma=self.hidden_sigma)
        check_not_negative("Config", temperature=self.temperature)
        check_choice("Config", ESTIMATORS, estimator=self.estimator)
        check_choice("Config", ("sampled", "closed"), complexity=self.complexity)
        check_choice("Config", ("uniform", "geometric"), minibatch_weights=self.minibatch_weights)
        check_choice("Config", ("selected", "draws"), prediction=self.prediction)
        if self.prediction == "draws" and not self.is_bayesian:
            raise invalid("prediction", "Config", "'selected' where there is no distribution on the weights", "draws")
        check_probability("Config", dropout=self.dropout)
        if self.dropout == 1:
            raise invalid("dropout", "Config", "below 1, where nothing would be left", self.dropout)

    @property
    def row(self) -> str:
        """The row of a table that this belongs to."""
        return self.method if self.start is None else f"{self.method}-from-{self.start.method}"

    @property
    def epochs(self) -> int:
        """Passes over the training set, those of the start among them."""
        return self.schedule.epochs + (0 if self.start is None else self.start.epochs)

    @property
    def prior(self) -> Prior:
        """The prior on the weights."""
        if self.method == "bbb-mixture":
            return ScaleMixture(self.pi, self.sigma1, self.sigma2)
        return Laplace(self.prior_sigma) if self.method == "map-laplace" else Normal(self.prior_sigma)

    @property
    def matters(self) -> frozenset[str]:
        """What one may tune: other numbers change nothing with this method."""
        names = {"learning_rate"}
        if self.is_bayesian:
            names |= {"draws", "estimator", "complexity", "minibatch_weights", "temperature", "rho_rate", "sigma"}
        names |= {"pi", "sigma1", "sigma2"} if self.method == "bbb-mixture" else set()
        names |= {"prior_sigma"} if self.method in ("bbb-gaussian", "map-gaussian", "map-laplace") else set()
        names |= {"dropout"} if self.method == "dropout" else set()
        return frozenset(names)

    def changed(self, **values: Any) -> "Config":
        """The same with other numbers; a ``sigma`` is then that of all layers."""
        return replace(self, **({"hidden_sigma": None, **values} if "sigma" in values else values))

    @property
    def is_bayesian(self) -> bool:
        """Whether there is a distribution on the weights."""
        return self.method.startswith("bbb")


@dataclass(frozen=True)
class Result:
    """What one run gave; ``prediction`` is by the mean network or by drawn ones.

    Errors and ``test_ece``, the calibration error, are in percent, ``test_nll`` in nats per image.
    """

    method: str
    units: int
    temperature: float
    seed: int
    epochs: int
    selected_epoch: int
    validation_error: float
    test_error: float
    test_nll: float
    test_ece: float
    seconds: float
    prediction: str


class DropConnect(nn.Linear):
    """A linear layer that forgets each weight with probability ``p`` while it is trained (Wan et al., 2013)."""

    def __init__(self, inputs: int, outputs: int, p: float = 0.5) -> None:
        super().__init__(inputs, outputs)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """The output, of what is left of the weights."""
        return F.linear(x, F.dropout(self.weight, self.p, self.training), self.bias)


def network(config: Config) -> nn.Sequential:
    """784-units-units-10 with rectified linear units, weights as He et al. start them."""
    sizes = [784, config.units, config.units, 10]
    behind = DropConnect if config.method == "dropconnect" else nn.Linear
    kinds = iter([nn.Linear, behind, behind])  # DropConnect forgets no weight of an input

    def linear(inputs: int, outputs: int) -> nn.Linear:
        layer = next(kinds)(inputs, outputs)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        return layer

    dropout = 3 * [config.dropout] if config.method == "dropout" else None
    with seeded(config.seed):
        return mlp(sizes, linear=linear, dropout=dropout)


def prepare(config: Config, n: int, folder: Path, start: Path | None = None) -> Experiment:
    """The run that ``config`` describes, wherever it is; ``start`` is the folder of that which it starts from."""
    about = {"n": n, **{name: value for name, value in asdict(config).items() if name != "schedule"}}
    net = network(config)
    if config.start is not None:
        if start is None:
            raise invalid("start", "prepare", "the folder of the run to start from", start)
        _copy_means(config.start, start, net)
    if config.is_bayesian:
        options = {"sigma": _initial_sigmas(config, net), "estimator": config.estimator, "seed": config.seed}
        model = Bayesian(net, Categorical(), config.prior, **options)  # type: ignore[arg-type]
        objective = FreeEnergy(
            model,
            n,
            draws=config.draws,
            complexity=config.complexity,
            minibatch_weights=config.minibatch_weights,
            batch_size=min(n, config.schedule.batch_size),
            temperature=config.temperature,
        )
        return Experiment(objective, net, config.schedule, folder, about)
    prior = config.prior if config.method.startswith("map") else None
    return Experiment(PointEstimate(net, Categorical(), n, prior), net, config.schedule, folder, about=about)


def run(
    config: Config,
    images: Images,
    folder: Path,
    *callbacks: Callback,
    curve: bool = False,
    start: Path | None = None,
) -> Result:
    """Train, select the epoch and the way to predict on the validation set, and only then look at the test set.

    With ``curve`` the test error is recorded after each epoch as well, for figure 2; nothing is selected by it.
    ``start`` is the folder of the finished run of ``config.start``, if there is one.
    """
    training, validation, test = (Examples(*split) for split in images)
    job = prepare(config, len(training.inputs), folder, start)
    watched = {"validation": validation, "test": test} if curve else {"validation": validation}
    history = job.train(training, watched, *callbacks)
    job.load_best()
    if not dist.is_initialized() or dist.get_rank() == 0:
        _ship(job, folder / MODEL)
    return evaluate(config, job, history, validation, test)


def evaluate(config: Config, job: Experiment, history: list[Record], validation: Examples, test: Examples) -> Result:
    """What the selected network of a run gives; the way to predict is selected on the validation set as well."""
    predictions: dict[str, Callable[[Tensor], Predictive | Tensor]] = {"mean": functools.partial(_by_mean, job.net)}
    if isinstance(job.objective, FreeEnergy):
        predictions["draws"] = functools.partial(job.objective.model.predict, draws=config.prediction_draws)
    if config.prediction == "draws":
        predictions.pop("mean")
    on_validation = {name: error_of(by(validation.inputs), validation.targets) for name, by in predictions.items()}
    prediction = min(on_validation, key=on_validation.__getitem__)
    scores = score(predictions[prediction](test.inputs), test.targets)
    return Result(
        method=config.row,
        units=config.units,
        temperature=config.temperature,
        seed=config.seed,
        epochs=config.epochs,
        selected_epoch=config.epochs - config.schedule.epochs + int(config.schedule.selected(history)["epoch"]),
        validation_error=100 * on_validation[prediction],
        test_error=100 * scores.error,
        test_nll=scores.nll,
        test_ece=100 * scores.ece,
        seconds=sum(record["seconds"] for record in history),
        prediction=prediction,
    )


def began(folder: Path) -> Config:
    """The configuration of the run whose checkpoint is in ``folder``."""
    file = read(folder / CHECKPOINT, "checkpoint", "resume")
    with file.understanding():
        about = {name: value for name, value in file.contents.get("about", {}).items() if name != "n"}
    if "method" not in about:
        raise invalid("folder", "resume", "that of a run on MNIST", Described(folder))
    prefix = "schedule."
    with file.understanding():
        schedule = {name.removeprefix(prefix): about.pop(name) for name in list(about) if name.startswith(prefix)}
        return configuration({**about, "schedule": schedule})


def write_result(config: Config, folder: Path, result: Result, command: str) -> None:
    """Write down what a run gave, so that it need not be run again."""
    made = {"made": {"command": command, **describe(config)}, "result": asdict(result)}
    write_atomically(folder / RESULT, json.dumps(made, indent=1).encode())


def finished(config: Config, folder: Path) -> Result | None:
    """What the run in ``folder`` gave, if it is complete and was one of ``config``."""
    try:
        was = json.loads((folder / RESULT).read_text())
        made = {name: value for name, value in was["made"].items() if name not in ("command", "version")}
        result = Result(**was["result"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None  # there is none, or none that can be read: it is made again
    _, metadata = read_checkpoint(folder / CHECKPOINT)
    complete = len(metadata["state"]["records"]) == config.schedule.epochs and (folder / MODEL).exists()
    return result if complete and made == asdict(config) else None


def flat(config: Config) -> dict[str, object]:
    """All settings, one by one."""
    values = asdict(config)
    schedule = values.pop("schedule")
    return values | {f"schedule.{name}": value for name, value in schedule.items()}


def describe(config: Config) -> dict[str, object]:
    """A configuration as plain data, with the version that ran it."""
    return {**asdict(config), "version": __version__}


# Fields that configurations did not have from the start.
_LATER = ("estimator", "complexity", "minibatch_weights", "hidden_sigma", "dropout", "prediction", "start")


def configuration(made: Mapping[str, Any]) -> Config:
    """The configuration that :func:`describe` described; what older versions did not write is as by default."""
    known = {each.name: made[each.name] for each in fields(Config) if each.name in made or each.name not in _LATER}
    start = known.get("start")
    known["schedule"] = Schedule(**known["schedule"])
    return Config(**{**known, "start": None if start is None else configuration(start)})


def _initial_sigmas(config: Config, net: nn.Sequential) -> dict[str, float]:
    """The initial standard deviation of the posterior by the name of a parameter."""
    layers = {place: layer for place, layer in net.named_children() if isinstance(layer, nn.Linear)}
    first, *behind = layers
    sigmas = {first: config.sigma}
    for place in behind:
        by_inputs = config.hidden_sigma
        sigmas[place] = config.sigma if by_inputs is None else by_inputs / math.sqrt(layers[place].in_features)
    return {name: sigmas[name.split(".")[0]] for name, _ in net.named_parameters()}


def _ship(job: Experiment, path: Path) -> None:
    """Write what was trained, for others to use: a Bayesian network, or a plain one."""
    if isinstance(job.objective, FreeEnergy):
        save(job.objective.model, path)
    else:
        layers = (layer for layer in job.net.children() if not isinstance(layer, nn.Dropout))
        save_sparse(SparseNetwork(nn.Sequential(*layers)), path)


def _copy_means(config: Config, folder: Path, net: nn.Module) -> None:
    """Give ``net`` the weights that ``config`` selected in ``folder``, whatever stands between its layers."""
    start = network(config)
    file = read(folder / BEST, "checkpoint", "start")
    with file.understanding():
        start.load_state_dict(
            {name.split(".net.")[1]: value for name, value in file.tensors.items() if ".net." in name}
        )
    with torch.no_grad():
        for own, theirs in zip(net.parameters(), start.parameters(), strict=True):
            own.copy_(theirs)


def _by_mean(net: nn.Module, inputs: Tensor) -> Tensor:
    with evaluating(net):
        return torch.cat([net(part).softmax(1) for part in inputs.split(EVALUATED)])
