"""The public API as a table: of each function a good call, and the kind of each of its parameters."""

import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import torch
from torch import Tensor, nn

import bayesbackprop as bbb
from bad_values import (
    ANY,
    ARRAYS,
    CLASSES,
    COUNT,
    DATA,
    FLAG,
    FUNCTION,
    INPUTS,
    MODEL,
    NOT_NEGATIVE,
    POSITIVE,
    PRIOR,
    PROBABILITY,
    PROBS,
    ROWS,
    TEXT,
    WHOLE,
    Kind,
    X,
    Y,
    small_batches,
    small_model,
    small_net,
)
from bayesbackprop import bandits, callbacks, evaluation
from bayesbackprop.calibration import TemperatureScaled
from bayesbackprop.diagnostics import pareto_k
from bayesbackprop.pruning import forget_momentum, snr, threshold, weights_left
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesbackprop.tables import TableModel, fit_table
from bayesbackprop.verdict import Verdict

Call = Callable[..., Any]


class Entry(NamedTuple):
    """A call by keywords, what makes good ones, what an error may name besides a parameter, and the kinds of these."""

    call: Call
    good: Callable[[], Mapping[str, Any]]
    says: tuple[str, ...]
    kinds: Mapping[str, Kind]


def entry(call: Call, good: Callable[[], Mapping[str, Any]] = dict, says: str = "", /, **kinds: Kind) -> Entry:
    return Entry(call, good, tuple(says.split()), kinds)


# --- good calls ------------------------------------------------------------------------------------------------------


def classifier() -> bbb.Bayesian:
    return bbb.Bayesian(small_net(3), bbb.Categorical(), seed=0)


def free_energy(**options: Any) -> bbb.FreeEnergy:
    return bbb.FreeEnergy(small_model(), **{"n": 8, **options})


def minimise(**given: Any) -> Tensor:
    whole = {"objective": bbb.FreeEnergy(small_model(), n=8), "inputs": X, "targets": Y, **given}
    return bbb.Adam(small_model().parameters()).minimise(**whole)


def step(objective: bbb.FreeEnergy, *args: Any, **kwargs: Any) -> None:
    """A step of training, as a user would take it."""
    objective(*(args or (X, Y)), **kwargs).backward()
    for parameter in objective.parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            raise FloatingPointError("a gradient that is not finite")


def used(prior: Call) -> Call:
    """What makes a prior and takes a step with it."""
    return lambda **given: step(bbb.FreeEnergy(bbb.Bayesian(small_net(), bbb.Gaussian(0.5), prior(**given), seed=0), 8))


def gaussian(**given: Any) -> None:
    step(bbb.FreeEnergy(bbb.Bayesian(small_net(), bbb.Gaussian(**given), seed=0), 8))


def trained_on(likelihood: bbb.Likelihood, targets: Tensor, outputs: int = 1) -> None:
    model = bbb.Bayesian(small_net(outputs), likelihood, seed=0)
    step(bbb.FreeEnergy(model, n=8), X, targets)
    model.predict(X, draws=2)


def heads(heads: Any) -> None:
    bbb.Joint(heads).cost((Y, Y), (Y, Y))


def counts() -> bbb.Predictive:
    return bbb.Bayesian(small_net(3), bbb.NegativeBinomial(0.5), seed=0).predict(X, draws=2)


def own_likelihood(**given: Any) -> None:
    model = bbb.Bayesian(small_net(), bbb.LogLikelihood(**given), seed=0)
    step(bbb.FreeEnergy(model, n=8))
    model.predict(X, draws=2)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return -(output - target).square().sum(1)


def unit_normal(output: Tensor) -> torch.distributions.Normal:
    return torch.distributions.Normal(output, 1.0)


def wrapped(**given: Any) -> None:
    step(bbb.FreeEnergy(bbb.Bayesian(**{"net": small_net(), "likelihood": bbb.Gaussian(0.5), **given}), n=8))


def any_module() -> bbb.Bayesian:
    return bbb.Bayesian(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), bbb.Gaussian(1.0))


def normalised() -> bbb.Bayesian:
    return bbb.Bayesian(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), bbb.Gaussian(1.0), seed=0)


def ensemble(**given: Any) -> None:
    bbb.Ensemble(**{"net": small_net(), "likelihood": bbb.Gaussian(1.0), **given})(X)


def batches_of(epoch: Any) -> None:
    batches = small_batches()
    batches.set_epoch(epoch)
    list(batches)


def trained(callback: Call) -> Call:
    """What makes a callback and trains with it."""

    def train(**given: Any) -> None:
        made = callback(**given)
        with tempfile.TemporaryDirectory() as own, contextlib.chdir(own), contextlib.redirect_stderr(io.StringIO()):
            bbb.fit(small_model(), small_batches(), epochs=1, validation=small_batches(), callbacks=[made])

    return train


def inside(write: Call, **given: Any) -> None:
    """Write a file in a folder of its own."""
    with tempfile.TemporaryDirectory() as own, contextlib.chdir(own):
        write(**given)


_kept: list[Any] = []


@cache
def folder() -> Path:
    """A folder with a good file of each kind."""
    _kept.append(tempfile.TemporaryDirectory())
    path = Path(_kept[0].name)
    bbb.save(small_model(), path / "model")
    bbb.save_sparse(bbb.sparse(small_model()), path / "sparse")
    bandits.Uniform(3, 2).save(path / "agent")
    fitted(BayesianMLPRegressor).save(path / "estimator")
    return path


@cache
def best() -> callbacks.Best:
    found = callbacks.Best(folder() / "best", monitor="cost")
    bbb.fit(small_model(), small_batches(), epochs=1, callbacks=[found])
    return found


def acted(kind: Call, **usual: Any) -> Call:
    """What makes an agent that acts and learns."""

    def act(**given: Any) -> Any:
        agent = kind(**{"features": 3, "actions": 2, **usual, **given})
        if agent.replicas == 1 and agent.features == 3:
            agent.observe([0.0, 1.0, 0.0], agent.act([0.0, 1.0, 0.0]), 1.0)
        return agent

    return act


thompson = acted(bandits.ThompsonSampling, hidden=[4], updates=1, memory=8)


def decided(reward: Call) -> Call:
    """What rewards a decision of an agent, as ``reward(agent, id, ...)`` does."""

    def call(**given: Any) -> None:
        agent = thompson()
        reward(agent, agent.decide([0.0, 1.0, 0.0]).id, **given)

    return call


def learning(behind: Any) -> None:
    with bandits.Uniform(3, 2).learning(behind) as agent:
        agent.observe([0.0, 1.0, 0.0], 1, 1.0)


def world(seed: Any = 0) -> bandits.Table:
    return bandits.Table(X, torch.ones(8, 2), seed)


def world_at(t: Any) -> None:
    table = world()
    table.t = t
    assert table.context.shape == (3,)


def simulation(**given: Any) -> None:
    bandits.simulate(**{"environments": [world()], "agent": bandits.Uniform(3, 2), "steps": 2, **given})


LOGGED = {"contexts": X, "actions": [0, 1] * 4, "rewards": torch.ones(8), "propensities": torch.full((8,), 0.5)}


DECISIONS = [bandits.Decision(str(n), n, 0.5, (0.5, 0.5), (0.0, 0.0), (0.0, 0.0), False) for n in (0, 1)]


def judged(judge: Call) -> Call:
    """What judges a policy by a log."""
    return lambda **given: judge(**{"policy": [0] * 8, "log": bandits.Log(**LOGGED), **given})


SAMPLE = {"X": X.numpy(), "y": CLASSES.numpy()}


@cache
def fitted(kind: type) -> Any:
    return kind(max_iter=1, hidden_layer_sizes=(2,), draws=2, random_state=0).fit(**SAMPLE)


def fitting(kind: type) -> Call:
    """What makes an estimator and fits it, which is when scikit-learn's check their parameters."""
    return lambda **given: kind(**{"max_iter": 1, "hidden_layer_sizes": (2,), **given}).fit(**SAMPLE)


def rows() -> Any:
    """A small table of pandas."""
    return pandas.DataFrame({"size": torch.linspace(0, 1, 30).numpy(), "price": torch.linspace(1, 2, 30).numpy()})


def tabled(**given: Any) -> TableModel:
    return fit_table(**{"table": rows(), "target": "price", "epochs": 1, "draws": 2, **given})


@cache
def table_model() -> TableModel:
    return tabled()


# --- the table -------------------------------------------------------------------------------------------------------

_AGENT = {"features": COUNT, "actions": COUNT, "replicas": COUNT, "seed": WHOLE}
_AGENT |= {"most_waiting": COUNT, "expiry": POSITIVE | "None"}
_LABELLED = (lambda: {"prediction": PROBS, "labels": CLASSES}, "")
_LONG = WHOLE | "2**63" | "2**64+5"  # a seed of 128 bits
_CONTEXT = {"context": [0.0, 1.0, 0.0]}
_POLICY = DATA | "None"
_JUDGES = {
    "policy": _POLICY,
    "log": ANY,
    "estimator": ANY,
    "model": FUNCTION | "None",
    "folds": Kind(("np.int64",)),
    "clip": POSITIVE | "None",
}

# Contexts of three numbers, however many.
_ROWS_OF_3 = DATA | Kind(("double", "array", "tensor [5, 3]", "ints [8, 3]", "booleans"))

# What gives a number for each example.
_NUMBERS = DATA | Kind(("tensor [2]", "ints [8]"))


def _predicted() -> dict[str, Any]:
    return {"prediction": small_model().predict(X, draws=2), "targets": Y}


def _compared() -> dict[str, Any]:
    """Arguments of a small comparison."""
    batches = small_batches()
    usual = {"epochs": 1, "methods": ["plain"], "draws": 2, "progress": False}
    return {"make_net": small_net, "train": batches, "test": (X, Y), **usual}


@cache
def verdict() -> Verdict:
    return bbb.evaluate(small_model(), (X, Y), draws=2)


TABLE: dict[str, Entry] = {
    # priors, likelihoods and the spread to begin with
    "Normal": entry(used(bbb.Normal), sigma=POSITIVE),
    "ScaleMixture": entry(used(bbb.ScaleMixture), pi=PROBABILITY, sigma1=POSITIVE, sigma2=POSITIVE),
    "Laplace": entry(used(bbb.Laplace), scale=POSITIVE),
    "LogDensity": entry(used(bbb.LogDensity), lambda: {"function": torch.neg}, function=FUNCTION, name=TEXT),
    "Gaussian": entry(gaussian, noise=POSITIVE),
    "Gaussian, learnt": entry(gaussian, dict, "likelihood_cost", initial=POSITIVE),
    "Gaussian, per input": entry(
        lambda **given: trained_on(bbb.Gaussian("per-input", **given), Y, outputs=2),
        beta=PROBABILITY,
        least=NOT_NEGATIVE,
    ),
    "StudentT": entry(
        lambda **given: trained_on(bbb.StudentT(**given), Y),
        dict,
        "likelihood_cost",
        scale=POSITIVE,
        df=POSITIVE,
        initial_scale=POSITIVE,
        initial_df=POSITIVE,
    ),
    "NegativeBinomial": entry(
        lambda **given: trained_on(bbb.NegativeBinomial(**given), torch.ones(8, 1)),
        dispersion=POSITIVE,
        initial=POSITIVE,
    ),
    "Ordinal": entry(
        lambda **given: trained_on(bbb.Ordinal(**given), torch.ones(8, 1, dtype=torch.int64)),
        classes=Kind(("np.int64",)),
    ),
    "Categorical": entry(
        lambda **given: trained_on(bbb.Categorical(**given), CLASSES, outputs=3),
        weight=DATA | "None",
        label_smoothing=PROBABILITY,
        ignore_index=WHOLE | "None" | "-3",
    ),
    "Joint": entry(heads, heads=DATA),
    "LogLikelihood": entry(
        own_likelihood,
        lambda: {"function": squared_error, "predictive": unit_normal},
        function=FUNCTION,
        predictive=FUNCTION,
        name=TEXT,
    ),
    "Relative": entry(
        lambda **given: small_model(sigma=bbb.Relative(**given)),
        lambda: {"fraction": 0.1},
        "sigma",
        fraction=POSITIVE,
        floor=POSITIVE,
    ),
    "Categorical.log_prob": entry(
        bbb.Categorical().log_prob, lambda: {"output": PROBS, "target": CLASSES}, "target", output=DATA, target=DATA
    ),
    "Categorical.distribution": entry(bbb.Categorical().distribution, dict, output=DATA),
    "Bernoulli.log_prob": entry(
        bbb.Bernoulli().log_prob, lambda: {"output": X, "target": torch.ones(8, 3)}, "target", output=DATA, target=DATA
    ),
    **{
        f"{type(likelihood).__name__}.log_prob": entry(
            likelihood.log_prob, lambda: {"output": X, "target": torch.ones(8, 3)}, "target", output=DATA, target=DATA
        )
        for likelihood in (bbb.Poisson(), bbb.NegativeBinomial(), bbb.StudentT())
    },
    "Ordinal.log_prob": entry(
        bbb.Ordinal(3).log_prob,
        lambda: {"output": X, "target": torch.ones(8, 3, dtype=torch.int64)},
        "target",
        output=DATA,
        target=DATA | "ints [8, 3]",
    ),
    "Gaussian.log_prob": entry(
        bbb.Gaussian(0.1).log_prob, lambda: {"output": X, "target": X}, "target", output=DATA, target=DATA
    ),
    # the model and its predictions
    "Bayesian": entry(
        wrapped,
        dict,
        "likelihood_cost",
        net=Kind(("module",)),
        likelihood=Kind(("likelihood",)),
        prior=PRIOR,
        sigma=POSITIVE | FUNCTION,
        estimator=Kind(("None",)),
        family=ANY,
        select=FUNCTION | "None",
        normalisation=FLAG,
        centre=Kind(("None",)),
        output=Kind(("None",)),
        seed=WHOLE | "None",
    ),
    "LowRank": entry(lambda rank: wrapped(family=bbb.LowRank(rank)), rank=COUNT),
    "Mixture": entry(lambda components: wrapped(family=bbb.Mixture(components)), components=COUNT),
    "Conditional": entry(
        lambda inputs: wrapped(family=bbb.Conditional(inputs), prior=bbb.Normal(1.0)),
        dict,
        "family",
        inputs=COUNT | DATA,
    ),
    "Bayesian.seed": entry(lambda seed: setattr(small_model(), "seed", seed), seed=WHOLE),
    "Bayesian.draw": entry(
        lambda **given: small_model().draw(**given)(X),
        step=DATA | WHOLE | "tensor of one",
        index=DATA | WHOLE | "tensor of one",
        seed=WHOLE | "None",
    ),
    "Draw": entry(lambda inputs: small_model().draw()(inputs), inputs=INPUTS),
    "Bayesian.forward": entry(lambda inputs: small_model()(inputs), inputs=INPUTS),
    "Bayesian.predict": entry(
        lambda inputs=X, **given: small_model().predict(inputs, **{"draws": 2, **given}),
        inputs=INPUTS,
        draws=COUNT,
        seed=WHOLE | "None",
        memory=COUNT,
        estimator=Kind(("None",)),
    ),
    "Bayesian.predict, inputs": entry(lambda inputs: small_model().predict(inputs=inputs, draws=2), inputs=INPUTS),
    "Bayesian.predict of any module": entry(lambda inputs: any_module().predict(inputs, draws=2), inputs=INPUTS),
    "Bayesian.predict_mean": entry(lambda inputs: small_model().predict_mean(inputs), inputs=INPUTS),
    "Bayesian.ensemble": entry(lambda **given: small_model().ensemble(**given), draws=COUNT, seed=WHOLE | "None"),
    "Bayesian.param_groups": entry(
        lambda **given: torch.optim.SGD(small_model().param_groups(**given), lr=0.1),
        lr=NOT_NEGATIVE | "None",
        rho_lr=NOT_NEGATIVE | "None",
        weight_decay=NOT_NEGATIVE,
    ),
    "Adam": entry(
        lambda **given: bbb.Adam(**{"params": small_model().parameters(), **given}),
        params=ANY,
        lr=NOT_NEGATIVE,
        betas=ANY,
        eps=NOT_NEGATIVE,
        fused=FLAG | "None",
    ),
    "IVON": entry(
        lambda **given: bbb.IVON(**{"objective": bbb.FreeEnergy(small_model(), 20, complexity="closed"), **given}),
        objective=ANY,
        lr=NOT_NEGATIVE,
        betas=ANY,
        hess_init=NOT_NEGATIVE | "None",
        rescale_lr=FLAG,
        rest_lr=NOT_NEGATIVE,
    ),
    "Adam.minimise": entry(
        minimise,
        dict,
        "target targets inputs n",
        objective=ANY,
        inputs=INPUTS,
        targets=DATA,
        n=COUNT | "None",
    ),
    "Adam.backward": entry(lambda cost: bbb.Adam(small_model().parameters()).backward(cost), cost=DATA),
    "Adam.add_param_group": entry(
        lambda **given: bbb.Adam(small_model().parameters()).add_param_group(
            {"params": small_net().parameters(), **given}
        ),
        params=Kind(("[]", "tensor of one", "tensor [2]")),
        lr=NOT_NEGATIVE,
        weight_decay=NOT_NEGATIVE,
    ),
    "Ensemble": entry(
        ensemble,
        lambda: {"weights": {"0.weight": torch.ones(2, 4, 3)}},
        "weights",
        net=ANY,
        likelihood=Kind(("likelihood",)),
        weights=DATA,
        output=Kind(("None",)),
    ),
    "Ensemble.__call__": entry(
        lambda inputs=X, **given: small_model().ensemble(2)(inputs, **given), inputs=INPUTS, memory=COUNT
    ),
    "Ensemble.predict": entry(
        lambda inputs=X, **given: small_model().ensemble(2).predict(inputs, **given), inputs=INPUTS, memory=COUNT
    ),
    "Predictive.log_prob": entry(lambda target: small_model().predict(X, draws=2).log_prob(target), target=DATA),
    "Predictive.quantiles": entry(lambda q: small_model().predict(X, draws=2).quantiles(q), q=DATA | "[1]"),
    "Predictive.sample": entry(
        lambda **given: small_model().predict(X, draws=2).sample(**{"count": 2, **given}),
        count=COUNT,
        generator=Kind(("None",)),
    ),
    "Predictive.cdf": entry(lambda value: small_model().predict(X, draws=2).cdf(value), value=DATA),  # type: ignore[attr-defined]
    "Predictive.interval": entry(lambda level: small_model().predict(X, draws=2).interval(level), level=PROBABILITY),
    "Predictive.log_prob, counts": entry(lambda target: counts().log_prob(target), target=DATA | "ints [8, 3]"),
    "Predictive.quantiles, counts": entry(lambda q: counts().quantiles(q), q=DATA | "[1]"),
    "Predictive.log_prob, classes": entry(
        lambda target: classifier().predict(X, draws=2).log_prob(target), target=DATA
    ),
    "Predictive.quantiles, classes": entry(lambda q: classifier().predict(X, draws=2).quantiles(q), q=DATA | "[1]"),
    # the objective
    "Cost": entry(
        lambda **given: repr(bbb.Cost(**given)),
        lambda: {"likelihood": torch.ones(()), "complexity": torch.ones(()), "complexity_weight": 0.1},
        likelihood=DATA | "float tensor of one",
        complexity=DATA | "float tensor of one",
        complexity_weight=NOT_NEGATIVE | "tensor of one",
    ),
    "FreeEnergy": entry(
        lambda **given: step(bbb.FreeEnergy(**{"model": small_model(), "n": 8, **given})),
        dict,
        "total_cost",
        model=MODEL,
        n=COUNT,
        draws=COUNT,
        complexity=ANY,
        batch_size=COUNT | "None",
        temperature=NOT_NEGATIVE,
        warmup=WHOLE,
        step=WHOLE,
        own_averaging=FLAG,
    ),
    "FreeEnergy, weighed minibatches": entry(
        lambda **given: step(free_energy(**{"minibatch_weights": "geometric", "batch_size": 8, **given}), X, Y, 0),
        dict,
        "inputs",
        minibatch_weights=DATA | "[1]",
        batch_size=COUNT,
    ),
    "FreeEnergy.forward": entry(
        lambda inputs=X, targets=Y, **given: step(free_energy(), inputs, targets, **given),
        dict,
        "target targets inputs n",
        inputs=INPUTS,
        targets=DATA,
        batch=Kind(("None",)),
        weights=DATA | "None",
        n=COUNT | "None",
        step=COUNT | "None",
    ),
    "FreeEnergy.forward, classes": entry(
        lambda targets: bbb.FreeEnergy(classifier(), n=8)(X, targets), dict, "target n inputs", targets=DATA
    ),
    # training
    "Batches": entry(
        lambda **given: list(bbb.Batches(**{"inputs": X, "targets": Y, "batch_size": 4, **given})),
        dict,
        "targets",
        inputs=ROWS | "tensor [2]",
        targets=ROWS,
        batch_size=COUNT,
        seed=WHOLE,
        order=FUNCTION | "None",
        weights=DATA | "None",
    ),
    "Batches.set_epoch": entry(batches_of, epoch=WHOLE),
    "fit": entry(
        lambda **given: bbb.fit(**given),
        lambda: {"model": small_model(), "batches": small_batches(), "epochs": 1},
        "n",
        model=MODEL,
        batches=Kind(("loader",)),
        epochs=COUNT | "None",
        n=COUNT | "None",
        optimiser=Kind(("None",)),
        scheduler=Kind(("None",)),
        validation=Kind(("None", "loader")),
        device=Kind(("None",)),
        autocast=Kind(("None",)),
        accumulate=COUNT,
        clip=POSITIVE | "None",
        callbacks=Kind(("[]",)),
        seed=WHOLE,
    ),
    "Checkpoint": entry(
        trained(callbacks.Checkpoint),
        lambda: {"path": "x"},
        path=TEXT,
        about=Kind(("None", "{}", "{1: 2}")),
        every=COUNT | "None",
    ),
    "Best": entry(trained(callbacks.Best), lambda: {"path": "x"}, path=TEXT, monitor=ANY),
    "Best.load": entry(lambda objective: best().load(objective), objective=MODEL),
    "EarlyStopping": entry(trained(callbacks.EarlyStopping), monitor=ANY, patience=COUNT),
    "Convergence": entry(
        lambda **given: trained(callbacks.Convergence)(**{"most": 10**9, **given}), first=COUNT, most=COUNT
    ),
    "Averaging": entry(trained(callbacks.Averaging), factor=PROBABILITY),
    "Progress": entry(trained(callbacks.Progress), title=TEXT, describe=FUNCTION),
    "Diagnose": entry(
        trained(callbacks.Diagnose),
        lambda: {"data": (X, Y)},
        "target",
        data=DATA | "loader",
        every=COUNT | "None",
        draws=Kind(),
    ),
    "Records": entry(trained(callbacks.Records), path=TEXT),
    "TensorBoard": entry(callbacks.TensorBoard, folder=TEXT),
    # files and pruning
    "save": entry(
        lambda **given: inside(bbb.save, **{"model": small_model(), "path": "x", **given}),
        model=MODEL,
        path=TEXT,
        frozen=FLAG,
    ),
    "save_pretrained": entry(
        lambda **given: inside(bbb.save_pretrained, **{"model": small_model(), "folder": "x", **given}),
        model=MODEL,
        folder=TEXT,
        frozen=FLAG,
    ),
    "mean_network": entry(bbb.mean_network, model=MODEL),
    "DrawnNetwork": entry(bbb.DrawnNetwork, model=MODEL),
    "EnsembleNetwork": entry(bbb.EnsembleNetwork, ensemble=ANY),
    "load": entry(
        bbb.load,
        lambda: {"path": folder() / "model", "net": small_net()},
        "path",
        path=ANY,
        net=ANY,
        likelihood=Kind(("likelihood", "None")),
        prior=PRIOR,
        output=Kind(("None", "function", "class")),
    ),
    "save_sparse": entry(
        lambda **given: inside(bbb.save_sparse, **{"net": bbb.sparse(small_model()), "path": "x", **given}),
        net=ANY,
        path=TEXT,
    ),
    "load_sparse": entry(bbb.load_sparse, path=ANY),
    "sparse": entry(bbb.sparse, network=MODEL | "module"),
    "refine": entry(
        lambda **given: bbb.refine(
            **{"model": small_model(), "data": (X, Y), "draws": 2, "iterations": 8, "leapfrogs": 1, **given}
        ),
        model=MODEL,
        data=DATA | "loader",
        draws=COUNT,
        iterations=COUNT,
        leapfrogs=COUNT,
        seed=WHOLE | "None",
        progress=FLAG,
    ),
    "unsharded": entry(bbb.unsharded, lambda: {"model": small_model()}, model=MODEL),
    "update_batchnorm": entry(
        bbb.update_batchnorm,
        lambda: {"model": normalised(), "data": X},
        model=Kind(("model", "module", "likelihood")),
        data=INPUTS | "loader",
        draws=WHOLE,
        seed=WHOLE | "None",
    ),
    "prune": entry(bbb.prune, lambda: {"model": small_model(), "fraction": 0.5}, model=MODEL, fraction=PROBABILITY),
    "threshold": entry(threshold, lambda: {"model": small_model()}, fraction=PROBABILITY),
    "snr": entry(snr, model=MODEL),
    "weights_left": entry(weights_left, model=MODEL),
    "forget_momentum": entry(
        forget_momentum,
        lambda: {"model": (model := small_model()), "optimiser": torch.optim.SGD(model.parameters())},
        "optimiser",
        model=ANY,
        optimiser=ANY,
    ),
    # evaluation
    "error": entry(evaluation.error, *_LABELLED, prediction=DATA, labels=DATA),
    "nll": entry(evaluation.nll, *_LABELLED, prediction=DATA, labels=DATA),
    "brier": entry(evaluation.brier, *_LABELLED, prediction=DATA, labels=DATA),
    "score": entry(evaluation.score, *_LABELLED, prediction=DATA, labels=DATA),
    "calibration": entry(evaluation.calibration, *_LABELLED, bins=COUNT),
    "rmse": entry(evaluation.rmse, _predicted, prediction=DATA, targets=DATA),
    "crps": entry(evaluation.crps, _predicted, prediction=DATA, targets=DATA),
    "covered": entry(
        evaluation.covered,
        lambda: {**_predicted(), "levels": [0.5]},
        prediction=DATA,
        targets=DATA,
        levels=DATA | "[1]",
    ),
    "auroc": entry(evaluation.auroc, lambda: {"inside": X[0], "outside": X[1]}, inside=_NUMBERS, outside=_NUMBERS),
    "fpr95": entry(evaluation.fpr95, lambda: {"inside": X[0], "outside": X[1]}, inside=_NUMBERS, outside=_NUMBERS),
    "risk_coverage": entry(
        evaluation.risk_coverage,
        lambda: {"uncertainty": X[:, 0], "loss": Y[:, 0]},
        "loss",
        uncertainty=_NUMBERS,
        loss=_NUMBERS,
    ),
    "evaluate": entry(
        lambda **given: bbb.evaluate(**{"model": small_model(), "data": (X, Y), "draws": 2, **given}),
        dict,
        "target inputs",
        model=MODEL,
        data=DATA | "loader",
        outside=INPUTS | "None" | "loader" | "{}",
        shifts=Kind(("None", "{}")),
        head=Kind(("None",)),
        diagnosis=Kind(("None",)),
        draws=COUNT,
        seed=WHOLE | "None",
    ),
    "Verdict.save_html": entry(
        lambda **given: inside(verdict().save_html, **{"path": "x", **given}), path=TEXT, title=TEXT
    ),
    "calibrate_temperature": entry(
        lambda **given: bbb.calibrate_temperature(
            **{"model": classifier(), "held_out": (X, CLASSES), "draws": 2, **given}
        ),
        dict,
        "target",
        model=ANY,
        held_out=DATA,
        draws=COUNT,
        seed=WHOLE | "None",
    ),
    "TemperatureScaled": entry(
        lambda **given: TemperatureScaled(**{"model": classifier(), "temperature": 1.0, **given}), temperature=POSITIVE
    ),
    "conformal_intervals": entry(
        lambda **given: bbb.conformal_intervals(
            **{"model": small_model(), "held_out": (X, Y), "level": 0.5, "draws": 2, **given}
        ),
        dict,
        "target",
        model=MODEL,
        held_out=DATA | "loader",
        level=Kind(("0.5", "Fraction", "np.float32", "1e-200")),
        draws=COUNT,
        seed=WHOLE | "None",
    ),
    "ConformalIntervals.intervals": entry(
        lambda inputs: bbb.conformal_intervals(small_model(), (X, Y), level=0.5, draws=2).intervals(inputs),
        inputs=INPUTS,
    ),
    "compare": entry(
        lambda **given: bbb.compare(**{**_compared(), **given}),
        dict,
        "data outside inputs",
        make_net=FUNCTION,
        train=Kind(("loader",)),
        test=DATA | "loader",
        epochs=COUNT,
        likelihood=Kind(("likelihood", "None")),
        methods=ANY,
        wrap=FUNCTION | "None",
        outside=INPUTS | "None" | "loader" | "{}",
        shifts=Kind(("None", "{}")),
        n=COUNT | "None",
        lr=POSITIVE | "None",
        dropout=PROBABILITY,
        ivon=Kind(("None", "{}")),
        draws=COUNT,
        seed=WHOLE,
        progress=FLAG,
    ),
    "diagnose": entry(
        lambda **given: bbb.diagnose(**{"model": small_model(), "data": (X, Y), "draws": 25, **given}),
        dict,
        "target",
        model=MODEL,
        data=DATA | "loader",
        draws=Kind(),
        seed=WHOLE | "None",
    ),
    "agreement": entry(
        lambda **given: bbb.agreement(**{"models": [small_model(), small_model()], "data": X, "draws": 2, **given}),
        dict,
        "inputs",
        models=ANY,
        data=INPUTS | "loader",
        draws=Kind(("np.int64",)),
        seed=WHOLE | "None",
    ),
    "pareto_k": entry(pareto_k, log_weights=DATA),
    "Bayesian.report": entry(
        lambda data: small_model().report(data, draws=25), dict, "target", data=DATA | "loader" | "None"
    ),
    # bandits
    "Uniform": entry(acted(bandits.Uniform), dict, "context", **_AGENT),
    "LinearThompson": entry(
        acted(bandits.LinearThompson), precision=POSITIVE, a=POSITIVE, b=POSITIVE, candidates=COUNT
    ),
    "ThompsonSampling": entry(
        thompson,
        dict,
        "likelihood_cost",
        **_AGENT,
        hidden=Kind(("[1]", "[]")),
        encoding=ANY,
        action_features=Kind(("None",)),
        likelihood=Kind(("likelihood", "None")),
        scale=POSITIVE | "None",
        updates=COUNT,
        batch_size=COUNT,
        memory=COUNT,
        learning_rate=POSITIVE,
        halving=COUNT | "None",
        alarm=POSITIVE | "None",
        prior=PRIOR,
        sigma=POSITIVE,
        exploration=NOT_NEGATIVE,
        settling=COUNT | "None",
        optimism=NOT_NEGATIVE | "None",
        draws=COUNT,
        temperature=NOT_NEGATIVE,
        rho_rate=POSITIVE,
        candidates=COUNT,
    ),
    "EpsilonGreedy": entry(
        acted(bandits.EpsilonGreedy, hidden=[4], updates=1, memory=8), epsilon=DATA | PROBABILITY | "[1]"
    ),
    "Agent.act": entry(lambda context: thompson().act(context), context=DATA),
    "Agent.act_all": entry(lambda contexts: thompson().act_all(contexts), dict, "context", contexts=DATA),
    "Agent.observe": entry(
        lambda **given: thompson().observe(**given),
        lambda: {**_CONTEXT, "action": 1, "reward": 1.0},
        context=DATA,
        action=WHOLE,
        reward=DATA | NOT_NEGATIVE,
    ),
    "Agent.observe_all": entry(
        lambda **given: bandits.Uniform(3, 2).observe_all(**given),
        lambda: {"contexts": torch.ones(1, 3), "actions": [1], "rewards": [1.0]},
        "context action reward actions",
        contexts=DATA,
        actions=DATA | "[1]",
        rewards=DATA | "[1]",
    ),
    "Agent.decide": entry(
        lambda **given: thompson().decide(**given),
        lambda: _CONTEXT,
        "",
        context=DATA,
        mask=Kind(("None",)),
        features=Kind(("None",)),
    ),
    "Agent.decide_many": entry(
        lambda **given: thompson().decide_many(**given),
        lambda: {"contexts": torch.ones(2, 3)},
        "context mask",
        contexts=_ROWS_OF_3,
        masks=Kind(("None",)),
        features=Kind(("None",)),
    ),
    "Agent.explain": entry(
        lambda **given: thompson().explain(**given),
        lambda: _CONTEXT,
        "",
        context=DATA,
        mask=Kind(("None",)),
        features=Kind(("None",)),
    ),
    "Agent.explain_many": entry(
        lambda contexts: thompson().explain_many(contexts), dict, "context", contexts=_ROWS_OF_3
    ),
    "Explanation.sample": entry(
        lambda generator: thompson().explain([0.0] * 3).sample(generator), generator=Kind(("None",))
    ),
    "Agent.reward": entry(
        decided(lambda agent, which, id=None, reward=1.0: agent.reward(which if id is None else id, reward)),
        dict,
        "",
        id=Kind(("None",)),
        reward=DATA | NOT_NEGATIVE,
    ),
    "Agent.reward_many": entry(
        decided(
            lambda agent, which, ids=None, rewards=(1.0,): agent.reward_many(
                ids if ids is not None else [which], rewards
            )
        ),
        dict,
        "id reward ids",
        ids=Kind(("None",)),
        rewards=DATA | "[1]",
    ),
    "Agent.warm_start": entry(
        lambda **given: thompson().warm_start(**given),
        lambda: {"contexts": X, "actions": [1] * 8, "rewards": [1.0] * 8},
        "context action reward contexts",
        contexts=DATA | "double" | "array" | "ints [8, 3]" | "booleans",
        actions=Kind(()),
        rewards=DATA | "ints [8]",
        features=Kind(("None",)),
    ),
    "Agent.add_arms": entry(
        lambda **given: thompson().add_arms(**given), dict, "", count=COUNT, features=Kind(("None",))
    ),
    "Agent.retire": entry(lambda action: thompson().retire(action), action=WHOLE),
    "Agent.learning": entry(learning, behind=COUNT),
    "Agent.save": entry(lambda path: inside(bandits.Uniform(3, 2).save, path=path), path=TEXT),
    "bandits.load": entry(bandits.load, lambda: {"path": folder() / "agent"}, path=ANY, prior=PRIOR),
    "Table": entry(
        lambda **given: bandits.Table(**given).step(0),
        lambda: {"contexts": X, "rewards": torch.ones(8, 2)},
        "features actions rewards",
        contexts=DATA | "double" | "tensor [8, 7]",
        rewards=DATA | "double" | "tensor [8, 7]",
        seed=_LONG,
    ),
    "Table.step": entry(lambda action: world().step(action), action=WHOLE),
    "Table.t": entry(world_at, t=WHOLE),
    "classification": entry(
        lambda **given: bandits.classification(**given).step(0),
        lambda: {"features": X, "labels": CLASSES, "classes": 3},
        "contexts rewards labels",
        features=DATA | "double" | "tensor [8, 7]",
        labels=DATA,
        classes=COUNT,
        seed=_LONG,
    ),
    "simulate": entry(
        simulation,
        dict,
        "environments",
        environments=ANY,
        agent=ANY,
        steps=COUNT,
        checkpoint=TEXT | "None",
        watch=FUNCTION | "None",
    ),
    "Log": entry(
        bandits.Log,
        lambda: LOGGED,
        "actions rewards propensities masks",
        features=DATA | "None",
        contexts=ARRAYS,
        actions=DATA | "ints [8]",
        rewards=DATA | "ints [8]",
        propensities=DATA,
        masks=DATA | "None" | Kind(("array", "booleans", "double", "ints [8, 3]", "tensor [8, 7]")),
    ),
    "Log.of": entry(
        lambda **given: bandits.Log.of(**{"decisions": DECISIONS, "contexts": X[:2], "rewards": [1, 0], **given}),
        dict,
        "contexts rewards",
        decisions=ANY,
        contexts=DATA,
        rewards=DATA | "tensor [2]",
        masks=DATA | "None",
        features=DATA | "None",
    ),
    "Log.write_csv": entry(lambda path: inside(bandits.Log(**LOGGED).write_csv, path=path), path=TEXT),
    "Log.read_csv": entry(bandits.Log.read_csv, dict, path=ANY),
    "Log[]": entry(lambda rows: bandits.Log(**LOGGED)[rows], dict, "contexts", rows=ANY | "[1]"),
    "bandits.evaluate": entry(judged(bandits.evaluate), **_JUDGES),
    "bandits.compare": entry(judged(bandits.compare), against=_POLICY, **_JUDGES),
    # scikit-learn
    "BayesianMLPClassifier": entry(
        fitting(BayesianMLPClassifier),
        dict,
        "likelihood_cost total_cost",
        hidden_layer_sizes=COUNT | "[1]" | "[]",
        activation=ANY,
        prior=PRIOR,
        sigma=POSITIVE,
        temperature=NOT_NEGATIVE | "None",
        batch_size=COUNT,
        learning_rate_init=POSITIVE | "None",
        max_iter=COUNT | "None",
        early_stopping=FLAG,
        validation_fraction=PROBABILITY,
        n_iter_no_change=COUNT,
        warm_start=FLAG,
        draws=COUNT,
        random_state=WHOLE | "None",
        verbose=FLAG | WHOLE,
        class_weight=Kind(("None", "{}", "{1: 2}")),  # of classes that there are not, as in scikit-learn
    ),
    "BayesianMLPRegressor": entry(fitting(BayesianMLPRegressor), noise=POSITIVE),
    "BayesianMLPClassifier.fit": entry(
        lambda **given: BayesianMLPClassifier(max_iter=1).fit(**{**SAMPLE, **given}),
        X=ARRAYS,
        y=DATA | "ints [8]",
        sample_weight=DATA | "None" | POSITIVE | "True" | "Decimal" | "ints [8]",
    ),
    "BayesianMLPRegressor.fit": entry(
        lambda **given: BayesianMLPRegressor(max_iter=1).fit(**{**SAMPLE, **given}),
        X=ARRAYS,
        y=ARRAYS | "ints [8]",
        sample_weight=DATA | "None" | POSITIVE | "True" | "Decimal" | "ints [8]",
    ),
    "BayesianMLPClassifier.partial_fit": entry(
        lambda **given: BayesianMLPClassifier().partial_fit(**{**SAMPLE, "classes": [0, 1, 2], **given}),
        dict,
        "y",
        classes=DATA,
        n_samples=COUNT | "None",
    ),
    "BayesianMLPClassifier.predict_proba": entry(
        lambda **given: fitted(BayesianMLPClassifier).predict_proba(**given), X=ARRAYS
    ),
    "BayesianMLPClassifier.predict_log_proba": entry(
        lambda **given: fitted(BayesianMLPClassifier).predict_log_proba(**given), X=ARRAYS
    ),
    "BayesianMLPRegressor.sample_y": entry(
        lambda **given: fitted(BayesianMLPRegressor).sample_y(**{"X": X.numpy(), **given}),
        X=ARRAYS,
        n_samples=COUNT,
        random_state=WHOLE | "None",
    ),
    "BayesianMLPRegressor.predict": entry(
        lambda **given: fitted(BayesianMLPRegressor).predict(**{"X": X.numpy(), **given}),
        dict,
        "q",
        X=ARRAYS,
        return_std=FLAG,
        quantiles=PROBABILITY | "None" | "[1]",
    ),
    "BayesianMLPRegressor.save": entry(lambda path: inside(fitted(BayesianMLPRegressor).save, path=path), path=TEXT),
    "BayesianMLPRegressor.load": entry(BayesianMLPRegressor.load, path=ANY),
    # tables
    "fit_table": entry(
        tabled,
        table=ANY,
        target=ANY,
        kind=Kind(("None",)),
        drop=Kind(("[]",)),
        held_out=Kind(("0.5", "Fraction", "np.float32")),
        epochs=COUNT | "None",
        draws=COUNT,
        seed=WHOLE,
        progress=FLAG,
    ),
    "TableModel.predict": entry(lambda table: table_model().predict(table), table=ANY),
    "TableModel.save": entry(lambda path: inside(table_model().save, path=path), path=TEXT),
    "TableModel.save_html": entry(
        lambda **given: inside(table_model().save_html, **{"path": "x", **given}), path=TEXT, title=TEXT | "None"
    ),
    "TableModel.load": entry(TableModel.load, path=ANY),
}
