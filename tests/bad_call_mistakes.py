"""Calls that are wrong in other ways than by one value: swapped, missing, out of order, or of odd networks."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bayesbackprop as bbb
from bad_call_table import SAMPLE, best, classifier, fitted, folder, free_energy, inside, squared_error, world
from bad_values import CLASSES, PROBS, X, Y, quiet, small_batches, small_model, small_net
from bayesbackprop import bandits, callbacks, evaluation
from bayesbackprop.pruning import forget_momentum
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

# A call, and a word that a clear error has.
Mistake = tuple[Callable[[], Any], str]


def _twice_backward() -> None:
    cost = free_energy()(X, Y)
    cost.backward()
    cost.backward()


def _changed_in_between() -> None:
    objective = free_energy()
    cost = objective(X, Y)
    with torch.no_grad():
        objective.model.net[0].weight.add_(1)
    cost.backward()


def _evaluated() -> Any:
    return small_model().eval()


def _other_shape() -> Any:
    model = small_model()
    model.net[0] = nn.Linear(3, 5)
    return model


def _spoilt_net() -> nn.Module:
    net = small_net()
    nn.init.constant_(net[0].weight, math.nan)
    return net


def _spoilt_model() -> bbb.Bayesian:
    model = small_model()
    nn.init.constant_(model.net[0].weight, math.nan)
    return model


def _lazy() -> nn.Module:
    return quiet(lambda: nn.LazyLinear(2))


def _frozen() -> nn.Module:
    return small_net().requires_grad_(False)


def _two_agents() -> Any:
    return bandits.Uniform(3, 2, replicas=2)


def _second_optimiser() -> torch.optim.Optimizer:
    return torch.optim.Adam(small_model().parameters())


class _Squares(nn.Module):
    """An objective that knows of no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.layer(inputs) - targets).square().mean()


class Outputs(nn.Module):
    """A network whose output is not a tensor."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(3, 1), output

    def forward(self, x: Tensor) -> Any:
        return self.output(self.layer(x))


def _of(output: Callable[[Tensor], Any]) -> bbb.Bayesian:
    return bbb.Bayesian(Outputs(output), bbb.LogLikelihood(squared_error, lambda output: output), seed=0)


ODD_OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda _: None,
    "a number": lambda _: 3.0,
    "text": lambda _: "x",
    "an array": lambda output: output.detach().numpy(),
    "a scalar": lambda output: output.sum(),
}

MISTAKES: dict[str, Mistake] = {
    "Bayesian(likelihood, net)": (lambda: bbb.Bayesian(bbb.Gaussian(0.1), small_net()), "likelihood"),
    "Bayesian(net, prior)": (lambda: bbb.Bayesian(small_net(), bbb.Normal(1.0)), "likelihood"),
    "Bayesian(net, likelihood, 0.1)": (lambda: bbb.Bayesian(small_net(), bbb.Gaussian(0.1), 0.1), "prior"),
    "Bayesian(model)": (lambda: bbb.Bayesian(small_model(), bbb.Gaussian(0.1)), "net"),
    "Bayesian(net)": (lambda: bbb.Bayesian(small_net()), "likelihood"),
    "Bayesian(class)": (lambda: bbb.Bayesian(nn.Linear, bbb.Gaussian(0.1)), "net"),
    "Bayesian(net, class)": (lambda: bbb.Bayesian(small_net(), bbb.Gaussian), "likelihood"),
    "Bayesian(net, prior=class)": (lambda: bbb.Bayesian(small_net(), bbb.Gaussian(0.1), bbb.Normal), "prior"),
    "Bayesian(net of NaN)": (lambda: bbb.Bayesian(_spoilt_net(), bbb.Gaussian(0.1)), "net"),
    "Bayesian(lazy net)": (lambda: bbb.Bayesian(_lazy(), bbb.Gaussian(0.1)), "net"),
    "Bayesian(frozen net)": (lambda: bbb.Bayesian(_frozen(), bbb.Gaussian(0.1)), "net"),
    "Bayesian(empty net)": (lambda: bbb.Bayesian(nn.ReLU(), bbb.Gaussian(0.1)), "net"),
    "Bayesian(prior of other names)": (lambda: small_model(prior={"nothing": bbb.Normal()}), "prior"),
    "Bayesian(prior of some names)": (
        lambda: bbb.Bayesian(small_net(), bbb.Gaussian(0.1), {"0.weight": bbb.Normal()}),
        "prior",
    ),
    "Bayesian(sigma={1: 2})": (lambda: small_model(sigma={1: 2}), "sigma"),
    "Bayesian(sigma=function of text)": (lambda: small_model(sigma=lambda _: "x"), "sigma"),
    "Bayesian(sigma=function of negatives)": (lambda: small_model(sigma=lambda mu: -mu.abs() - 1), "sigma"),
    "Bayesian(sigma=function of another shape)": (lambda: small_model(sigma=lambda mu: mu.sum()), "sigma"),
    "Bayesian(select=function of text)": (lambda: small_model(select=lambda name, module: "x"), "select"),
    "Bayesian(estimator={1: 'local'})": (lambda: small_model(estimator={1: "local"}), "estimator"),
    "Bayesian(estimator=['local'])": (lambda: small_model(estimator=["local"]), "estimator"),
    "Bayesian(centre of some names)": (lambda: small_model(centre={"0.weight": torch.zeros(4, 3)}), "centre"),
    "Bayesian(centre of ints)": (
        lambda: small_model(centre={name: torch.zeros_like(p).long() for name, p in small_net().named_parameters()}),
        "centre",
    ),
    "Bayesian(priors=...)": (lambda: small_model(priors=bbb.Normal()), "priors"),
    "Bayesian.predict() of nothing": (lambda: small_model().predict(), "inputs"),
    "Bayesian.predict() in a list": (lambda: small_model().predict([X]), "inputs"),
    "Bayesian.predict() of numpy": (lambda: small_model().predict(X.numpy()), "inputs"),
    "Bayesian.predict() of a loader": (lambda: small_model().predict(small_batches()), "inputs"),
    "Bayesian.predict(x, 100)": (lambda: small_model().predict(X, 100), "forward"),
    "Bayesian.predict(x, samples=100)": (lambda: small_model().predict(X, samples=100), "samples"),
    "Bayesian.predict(draws=2**33)": (lambda: small_model().predict(X, draws=2**33), "draws"),
    "Bayesian.ensemble(draws=2**33)": (lambda: small_model().ensemble(draws=2**33), "draws"),
    "Bayesian.predict(estimator={1: 'local'})": (lambda: small_model().predict(X, estimator={1: "local"}), "estimator"),
    "Bayesian.load_state_dict of a bad seed": (
        lambda: small_model().load_state_dict({**small_model().state_dict(), "_seed": torch.tensor(-1)}),
        "seed",
    ),
    "Joint(one likelihood twice)": (lambda: bbb.Joint([bbb.Gaussian(1.0)] * 2), "heads"),
    "Joint(likelihood classes)": (lambda: bbb.Joint([bbb.Gaussian]), "heads"),
    "a Joint of a network without heads": (
        lambda: bbb.FreeEnergy(bbb.Bayesian(small_net(), bbb.Joint([bbb.Poisson()])), 8)(X, (Y,)),
        "output",
    ),
    "Gaussian(0.1, beta)": (lambda: bbb.Gaussian(0.1, beta=0.5), "beta"),
    "Categorical(weights of other classes)": (
        lambda: bbb.Categorical(weight=[1.0]).cost(PROBS, CLASSES),
        "weight",
    ),
    "Categorical([1, 1])": (lambda: bbb.Categorical([1.0, 1.0]), "positional"),
    "Poisson of negative counts": (lambda: bbb.Poisson().cost(Y, Y), "target"),
    "Ordinal of a higher class": (lambda: bbb.Ordinal(2).cost(Y, Y.long() + 3), "target"),
    "a network changed after it was wrapped": (lambda: _other_shape().predict(X), "net"),
    "FreeEnergy(net)": (lambda: bbb.FreeEnergy(small_net(), 8), "model"),
    "FreeEnergy(n, model)": (lambda: bbb.FreeEnergy(8, small_model()), "model"),
    "FreeEnergy(model)": (lambda: bbb.FreeEnergy(small_model()), "'n'"),
    "FreeEnergy(model, loader)": (lambda: bbb.FreeEnergy(small_model(), small_batches()), "n"),
    "FreeEnergy(closed, own prior)": (
        lambda: bbb.FreeEnergy(
            bbb.Bayesian(small_net(), bbb.Gaussian(1.0), bbb.LogDensity(lambda w: -w.abs())), 8, complexity="closed"
        ),
        "complexity",
    ),
    "FreeEnergy(batch_size=-3)": (lambda: bbb.FreeEnergy(small_model(), 8, batch_size=-3), "batch_size"),
    "FreeEnergy(step=2**32)": (lambda: bbb.FreeEnergy(small_model(), 8, step=2**32), "step"),
    "FreeEnergy(draws=2**33)": (lambda: bbb.FreeEnergy(small_model(), 8, draws=2**33), "draws"),
    "FreeEnergy(n too small)": (lambda: bbb.FreeEnergy(small_model(), 7)(X, Y), "n"),
    "FreeEnergy()(y, x)": (lambda: free_energy()(Y, X), "mat1 and mat2"),
    "FreeEnergy()((x, y))": (lambda: free_energy()((X, Y)), "targets"),
    "FreeEnergy()(x)": (lambda: free_energy()(X), "targets"),
    "FreeEnergy()([x], y)": (lambda: free_energy()([X], Y), "inputs"),
    "FreeEnergy()(numpy, y)": (lambda: free_energy()(X.numpy(), Y), "inputs"),
    "FreeEnergy()(x, numpy)": (lambda: free_energy()(X, Y.numpy()), "target"),
    "FreeEnergy()(loader, y)": (lambda: free_energy()(small_batches(), Y), "inputs"),
    "FreeEnergy()(x, y of another length)": (lambda: free_energy()(X, Y[:5]), "target"),
    "FreeEnergy()(x, y without its dimension)": (lambda: free_energy()(X, Y[:, 0]), "target"),
    "FreeEnergy()(batch=0)": (lambda: free_energy()(X, Y, 0), "batch"),
    "FreeEnergy()(step=2**32)": (lambda: free_energy()(X, Y, step=2**32), "step"),
    "FreeEnergy()(x, y, n=2)": (lambda: free_energy()(X, Y, n=2), "n"),
    "a batch that no epoch has": (
        lambda: free_energy(minibatch_weights="geometric", batch_size=4)(X[:4], Y[:4], 2),
        "batch",
    ),
    "no batch where there are weights": (
        lambda: free_energy(minibatch_weights="geometric", batch_size=4)(X[:4], Y[:4]),
        "batch",
    ),
    "backward twice": (_twice_backward, "second time"),
    "backward after a change in place": (_changed_in_between, "modified"),
    "fit(batches, model)": (lambda: bbb.fit(small_batches(), small_model(), epochs=1), "batches"),
    "fit(model, x, y)": (lambda: bbb.fit(small_model(), X, Y, epochs=1), "positional"),
    "fit(evaluated model)": (lambda: bbb.fit(_evaluated(), small_batches(), epochs=1), "model"),
    "fit(list of x)": (lambda: bbb.fit(small_model(), [X], epochs=1, n=8), "batches"),
    "fit(list of triples without weights)": (lambda: bbb.fit(small_model(), [(X, Y, Y)], epochs=1, n=8), "weights"),
    "fit(list of fours)": (lambda: bbb.fit(small_model(), [(X, Y, Y, Y)], epochs=1, n=8), "batches"),
    "fit(objective without weights)": (
        lambda: bbb.fit(_Squares(), [(X, Y, torch.ones(8))], epochs=1),
        "weights",
    ),
    "Batches(weights of another length)": (lambda: bbb.Batches(X, Y, 4, weights=torch.ones(5)), "weights"),
    "FreeEnergy()(x, y, weights of columns)": (lambda: free_energy()(X, Y, weights=torch.ones(8, 1)), "weights"),
    "FreeEnergy()(x, y, negative weights)": (lambda: free_energy()(X, Y, weights=-torch.ones(8)), "weights"),
    "FreeEnergy()(x, y, weights by position)": (lambda: free_energy()(X, Y, torch.ones(8)), "batch"),
    "fit(list of numpy)": (lambda: bbb.fit(small_model(), [(X.numpy(), Y.numpy())], epochs=1, n=8), "batches"),
    "fit(spent generator)": (lambda: bbb.fit(small_model(), ((X, Y) for _ in range(1)), epochs=2, n=8), "batches"),
    "fit without n": (lambda: bbb.fit(small_model(), [(X, Y)], epochs=1), "n"),
    "fit(objective, n)": (lambda: bbb.fit(free_energy(), small_batches(), epochs=1, n=8), "n"),
    "fit(plain network)": (lambda: bbb.fit(small_net(), small_batches(), epochs=1), "forward"),
    "fit(optimiser of another)": (
        lambda: bbb.fit(small_model(), small_batches(), epochs=1, optimiser=_second_optimiser()),
        "optimiser",
    ),
    "fit(optimiser class)": (
        lambda: bbb.fit(small_model(), small_batches(), epochs=1, optimiser=torch.optim.Adam),
        "optimiser",
    ),
    "fit(callback class)": (
        lambda: bbb.fit(small_model(), small_batches(), epochs=1, callbacks=[callbacks.Progress]),
        "callbacks",
    ),
    "fit(one callback)": (
        lambda: bbb.fit(small_model(), small_batches(), epochs=1, callbacks=callbacks.Progress()),
        "callbacks",
    ),
    "fit(validation of text)": (
        lambda: bbb.fit(small_model(), small_batches(), epochs=1, validation=lambda: "x"),
        "validation",
    ),
    "fit(empty validation)": (lambda: bbb.fit(small_model(), small_batches(), epochs=1, validation=[]), "validation"),
    "fit(autocast=float16)": (
        lambda: bbb.fit(small_model(), small_batches(), epochs=1, autocast=torch.float16),
        "autocast",
    ),
    "fit(device='nowhere')": (lambda: bbb.fit(small_model(), small_batches(), epochs=1, device="nowhere"), "device"),
    "Batches(x, batch_size, y)": (lambda: bbb.Batches(X, 4, Y), "batch_size"),
    "Batches(numpy, numpy)": (lambda: bbb.Batches(X.numpy(), Y.numpy(), 4), "inputs"),
    "Batches(x, shorter y)": (lambda: bbb.Batches(X, Y[:5], 4), "targets"),
    "Batches(order of text)": (lambda: list(bbb.Batches(X, Y, 4, order=lambda _: "x")), "order"),
    "Batches(order of floats)": (lambda: list(bbb.Batches(X, Y, 4, order=lambda _: torch.rand(8))), "order"),
    "Batches(order of half the rows)": (
        lambda: list(bbb.Batches(X, Y, 4, order=lambda _: torch.arange(4))),
        "order",
    ),
    "Batches(order out of range)": (
        lambda: list(bbb.Batches(X, Y, 4, order=lambda _: torch.arange(8) + 5)),
        "order",
    ),
    "error(labels, prediction)": (lambda: evaluation.error(CLASSES, PROBS), "prediction"),
    "error(logits)": (lambda: evaluation.error(PROBS * 10, CLASSES), "prediction"),
    "error(prediction of numbers)": (
        lambda: evaluation.error(small_model().predict(X, draws=2), CLASSES),
        "prediction",
    ),
    "error(numpy)": (lambda: evaluation.error(PROBS.numpy(), CLASSES.numpy()), "prediction"),
    "log_prob of classes that are not there": (
        lambda: classifier().predict(X, draws=2).log_prob(CLASSES + 5),
        "target",
    ),
    "log_prob of NaN": (lambda: small_model().predict(X, draws=2).log_prob(Y * math.nan), "target"),
    "quantiles(0.5)": (lambda: small_model().predict(X, draws=2).quantiles(0.5), "q"),
    "quantiles([50])": (lambda: small_model().predict(X, draws=2).quantiles([50]), "q"),
    "save(path, model)": (lambda: inside(bbb.save, model="x", path=small_model()), "model"),
    "save(net)": (lambda: inside(bbb.save, model=small_net(), path="x"), "model"),
    "save in no folder": (lambda: inside(bbb.save, model=small_model(), path="nowhere/x"), "No such file"),
    "load(net, path)": (lambda: bbb.load(small_net(), folder() / "model"), "net"),
    "load without net": (lambda: bbb.load(folder() / "model"), "'net'"),
    "load of nothing": (lambda: bbb.load("nothing", small_net()), "nothing"),
    "load on another network": (lambda: bbb.load(folder() / "model", nn.Linear(3, 1)), "path"),
    "load of an agent": (lambda: bbb.load(folder() / "agent", small_net()), "path"),
    "load_sparse of a model": (lambda: bbb.load_sparse(folder() / "model"), "path"),
    "prune(net)": (lambda: bbb.prune(small_net(), 0.5), "model"),
    "prune(fraction, model)": (lambda: bbb.prune(0.5, small_model()), "fraction"),
    "prune(50 %)": (lambda: bbb.prune(small_model(), 50), "fraction"),
    "prune(NaN)": (lambda: bbb.prune(_spoilt_model(), 0.5), "model"),
    "sparse(convolution)": (lambda: bbb.sparse(nn.Conv2d(3, 4, 3)), "network"),
    "forget_momentum(optimiser of another)": (lambda: forget_momentum(small_model(), _second_optimiser()), "optimiser"),
    "Checkpoint before what it holds": (
        lambda: _with([callbacks.Checkpoint(folder() / "order"), callbacks.Averaging(0.9)]),
        "callbacks",
    ),
    "two Averagings in a Checkpoint": (
        lambda: _with([callbacks.Averaging(0.9), callbacks.Averaging(0.8), callbacks.Checkpoint(folder() / "two")]),
        "callbacks",
    ),
    "Averaging(1)": (lambda: callbacks.Averaging(1), "factor"),
    "Best of what is not measured": (lambda: _with([callbacks.Best(folder() / "b", "accuracy")]), "monitor"),
    "Best.load before fit": (lambda: callbacks.Best(folder() / "none").load(small_model()), "none"),
    "Best.load of another network": (lambda: best().load(classifier()), "of another run"),
    "act of replicas": (lambda: _two_agents().act([0.0, 1.0, 0.0]), "act_all"),
    "observe of replicas": (lambda: _two_agents().observe([0.0, 1.0, 0.0], 0, 1.0), "observe_all"),
    "act_all of one context": (lambda: _two_agents().act_all([[0.0, 1.0, 0.0]]), "contexts"),
    "observe(action, context)": (lambda: bandits.Uniform(3, 2).observe(1, [0.0, 1.0, 0.0], 1.0), "context"),
    "observe(context, reward, action)": (
        lambda: bandits.Uniform(3, 2).observe([0.0, 1.0, 0.0], 0.5, 1),
        "action",
    ),
    "observe an action that is not there": (lambda: bandits.Uniform(3, 2).observe([0.0, 1.0, 0.0], 2, 1.0), "action"),
    "observe nan": (lambda: bandits.Uniform(3, 2).observe([0.0, 1.0, 0.0], 1, math.nan), "reward"),
    "Agent()": (lambda: bandits.Agent(3, 2), "abstract"),
    "Environment()": (lambda: bandits.Environment(3, 2, 0), "abstract"),
    "Prior()": (lambda: bbb.Prior(), "abstract"),
    "Likelihood()": (lambda: bbb.Likelihood(), "abstract"),
    "Predictive()": (lambda: bbb.Predictive(), "abstract"),
    "Table(rewards, contexts)": (lambda: bandits.Table(torch.ones(8, 2), torch.ones(5, 3)), "rewards"),
    "Table(numpy)": (lambda: bandits.Table(X.numpy(), np.ones((8, 2))), "contexts"),
    "simulate(agent, environments)": (
        lambda: bandits.simulate(bandits.Uniform(3, 2), [world()], 2),
        "environments",
    ),
    "simulate one environment": (lambda: bandits.simulate(world(), bandits.Uniform(3, 2), 2), "environments"),
    "simulate other features": (lambda: bandits.simulate([world()], bandits.Uniform(4, 2), 2), "environments"),
    "simulate one environment for two": (
        lambda: bandits.simulate([world()], _two_agents(), 2),
        "environments",
    ),
    "simulate the same environment twice": (
        lambda: bandits.simulate([world()] * 2, _two_agents(), 2),
        "environments",
    ),
    "EpsilonGreedy(epsilon for two)": (lambda: bandits.EpsilonGreedy(3, 2, epsilon=[0.1, 0.2]), "epsilon"),
    "bandits.load of a model": (lambda: bandits.load(folder() / "model"), "path"),
    "predict before fit": (lambda: BayesianMLPClassifier().predict(X.numpy()), "not fitted"),
    "save before fit": (lambda: inside(BayesianMLPClassifier().save, path="x"), "not fitted"),
    "predict of other features": (lambda: fitted(BayesianMLPClassifier).predict(np.ones((2, 5))), "features"),
    "partial_fit without classes": (lambda: BayesianMLPClassifier().partial_fit(**SAMPLE), "classes"),
    "fit(y, X)": (lambda: BayesianMLPClassifier().fit(CLASSES.numpy(), X.numpy()), "1D array"),
    "load of another estimator": (lambda: BayesianMLPClassifier.load(folder() / "estimator"), "path"),
    "predict(std and quantiles)": (
        lambda: fitted(BayesianMLPRegressor).predict(X.numpy(), return_std=True, quantiles=[0.5]),
        "quantiles",
    ),
}


def _with(given: list[Any]) -> Any:
    return bbb.fit(small_model(), small_batches(), epochs=1, callbacks=given)


for _name, _output in ODD_OUTPUTS.items():
    MISTAKES[f"predict of {_name}"] = (lambda output=_output: _of(output).predict(X, draws=3)), "output"
    MISTAKES[f"an ensemble of {_name}"] = (lambda output=_output: _of(output).ensemble(3)(X)), "output"
    MISTAKES[f"predict_mean of {_name}"] = (lambda output=_output: _of(output).predict_mean(X)), "output"
