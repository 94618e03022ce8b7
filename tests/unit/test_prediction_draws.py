"""How predictions draw: whole networks, by seed, in the memory that is given, with the network left as it was."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

from bayesbackprop import Bayesian, Bernoulli, Categorical, FreeEnergy, Gaussian, Normal
from bayesbackprop._engine import ops
from bayesbackprop.noise import Key
from networks import X, Y, classifier, regression_model, regressor

identities = pytest.mark.identities
equivalence = pytest.mark.equivalence


def mlp(inputs: int = 3, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def points(n: int = 5) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64)


# --- draws and memory ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2))


NETS = {
    "mlp": (mlp, (5, 3)),
    "convolutional": (convolutional, (5, 1, 5, 5)),
    "recurrent": (Recurrent, (5, 6, 3)),
    "attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten()),
        (5, 3, 4),
    ),
}


@equivalence
@pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
@pytest.mark.parametrize("kind", NETS)
def test_prediction_equals_a_loop_over_draws_whatever_the_memory(kind, estimator):
    make, shape = NETS[kind]
    model = Bayesian(make().double(), Categorical(), sigma=0.3, estimator=estimator, seed=0).eval()
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        loop = torch.stack([model.draw(index=k)(x) for k in range(11)])
    for memory in (1, 10**5, 10**6, 2**30):
        predicted = model.predict(x, draws=11, memory=memory, estimator=estimator)
        logits = predicted.components.logits.reshape(loop.shape)
        torch.testing.assert_close(logits, loop.log_softmax(-1), rtol=1e-9, atol=1e-9)
    assert (loop[0] - loop[1]).abs().max() > 1e-3


def peak(run) -> int:
    """The most bytes that torch's allocator had handed out at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).max())


@identities
@pytest.mark.parametrize("kind", ["shared", "local", "ensemble"])
def test_memory_cap_holds(kind):
    net = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 2, bias=False))
    model = Bayesian(net, Categorical(), estimator="shared" if kind == "ensemble" else kind, seed=0)
    x, draws = torch.randn(512, 32), 10

    def use(memory: int, draws: int = draws) -> int:
        if kind == "ensemble":
            ensemble = model.ensemble(draws)
            return peak(lambda: ensemble.predict(x, memory=memory).probs)
        return peak(lambda: model.predict(x, draws=draws, memory=memory, estimator="shared").probs)

    one, free = use(1, draws=1), use(2**30)
    outputs = 3 * draws * 512 * 2 * 4  # what is kept of each draw, while it is stacked and turned into probabilities
    assert free > 5 * one  # there is something to cap
    assert use(1) <= one + outputs  # one at a time is the least there is
    assert use(max(one, free // 4)) <= max(one, free // 4) + outputs
    assert use(3 * free) <= free


@identities
def test_prediction_draws_whole_networks_whatever_the_model_was_trained_with() -> None:
    x = torch.randn(4, 3, 16, 16)
    results = []
    for estimator in ("shared", "local", "flipout"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
        model = Bayesian(net, Gaussian(0.1), Normal(1.0), sigma=0.2, estimator=estimator, seed=0)  # type: ignore[arg-type]
        results += [model.predict(x, draws=20).epistemic, model.ensemble(20).predict(x).epistemic]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


@identities
def test_half_precision_predicts_with_drawn_networks() -> None:
    model = Bayesian(classifier(), Gaussian(0.1), sigma=1e-4, seed=0).half()
    x = 30 * torch.ones(2, 3).half()
    assert torch.equal(model.predict(x, draws=5).mean, model.predict(x, draws=5, estimator="shared").mean)


@identities
@pytest.mark.parametrize("estimator", [None, "shared"])
def test_seeds_decide_the_draws(estimator):
    x = points()
    model = Bayesian(mlp(), Gaussian(0.5), sigma=0.5, seed=4)
    first = model.predict(x, draws=6, estimator=estimator)
    torch.rand(3)  # torch's own generator has no say
    assert torch.equal(first.mean, model.predict(x, draws=6, estimator=estimator).mean)
    assert torch.equal(first.mean, model.predict(x, draws=6, estimator=estimator, seed=4).mean)
    assert not torch.equal(first.mean, model.predict(x, draws=6, estimator=estimator, seed=5).mean)
    longer = model.predict(x, draws=9, estimator=estimator).components.mean.reshape(9, 5, 2)
    torch.testing.assert_close(longer[:6], first.components.mean.reshape(6, 5, 2))
    assert len(longer[:, 0, 0].unique()) == 9
    apart = torch.cat([model.predict(one, draws=6, estimator=estimator).mean for one in x.split(1)])
    torch.testing.assert_close(apart, first.mean)
    many = points(100)  # a large batch has draws of its own, unless they are to be of whole networks
    whole = model.predict(many, draws=6, estimator=estimator).mean[:5]
    same_networks = estimator == "shared"
    assert torch.allclose(model.predict(many[:5], draws=6, estimator=estimator).mean, whole) == same_networks


@identities
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian(0.5), Gaussian("per-input")], ids=repr)
def test_one_example_is_predicted_as_among_others(likelihood):
    model = Bayesian(mlp(outputs=2), likelihood, sigma=0.5, seed=0)
    x = points(4)
    whole, part = model.predict(x, draws=5), model.predict(x[:1], draws=5)
    for name in ("mean", "variance", "entropy", "aleatoric", "epistemic", "stddev"):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name)[:1])
    torch.testing.assert_close(part.quantiles([0.1, 0.9]), whole.quantiles([0.1, 0.9])[:, :1])


@identities
def test_ensemble_is_kept():
    x = points()
    model = Bayesian(mlp(), Categorical(), sigma=0.5, seed=0)
    ensemble = model.ensemble(5)
    predicted = ensemble.predict(x)
    torch.testing.assert_close(predicted.probs, model.predict(x, draws=5, estimator="shared").probs)
    assert not torch.equal(model.ensemble(5, seed=1).predict(x).probs, predicted.probs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(ensemble.predict(x).probs, predicted.probs)
    assert ensemble.draws == 5
    assert {name: w.shape[0] for name, w in ensemble.weights.items()} == dict.fromkeys(model.posterior, 5)
    each = [functional_call(model.net, {name: w[k] for name, w in ensemble.weights.items()}, x) for k in range(5)]
    torch.testing.assert_close(ensemble(x), torch.stack(each))
    torch.testing.assert_close(predicted.probs, torch.stack(each).softmax(-1).mean(0))


@identities
def test_an_ensemble_is_fixed_in_what_is_not_random_too() -> None:
    model = regression_model(select=lambda name, module: name.startswith("2."))
    ensemble = model.ensemble(3)
    before = ensemble.predict(X).mean
    with torch.no_grad():
        model.net[0].weight.add_(1.0)
    assert torch.equal(ensemble.predict(X).mean, before)


class FailsOnce(nn.Module):
    """Runs the first draw, fails in the second call, where the others run in parallel, and then runs again."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.error = error
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise self.error
        return self.linear(x)


def predict_with(model: Bayesian, how: str, x: Tensor) -> Tensor:
    ensemble = model.ensemble(5)
    calls = ensemble.net if how == "ensemble" else model.net
    predicted = ensemble.predict(x) if how == "ensemble" else model.predict(x, draws=5)
    assert calls.calls == 1 + 1 + 4  # alone, in parallel, and one after the other
    return predicted.mean


@identities
@pytest.mark.parametrize("how", ["predict", "ensemble"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
    ids=["GPU", "CPU"],
)
def test_a_lack_of_memory_is_raised_and_not_taken_for_a_missing_rule(error, how):
    model = Bayesian(FailsOnce(error), Gaussian(0.5), seed=0)
    with pytest.raises(type(error), match="allocate"):
        predict_with(model, how, torch.randn(4, 3))


@identities
@pytest.mark.parametrize("how", ["predict", "ensemble"])
def test_what_has_no_rule_for_parallel_draws_runs_one_by_one(how):
    net, x = FailsOnce(RuntimeError("vmap: there is no batching rule")), torch.randn(4, 3)
    plain = Bayesian(net.linear, Gaussian(0.5), seed=0)
    got = predict_with(Bayesian(net, Gaussian(0.5), seed=0), how, x)
    torch.testing.assert_close(got, plain.predict(x, draws=5, estimator="shared").mean)


@identities
def test_the_numbers_of_the_draws_are_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch):
    """On the meta device, which every machine has; numbers elsewhere could not be mixed with the noise of a GPU."""
    made: list[torch.device] = []
    normal = ops.normal

    def record(shape, key, *rest):
        made.append(torch.as_tensor(key.draw).device)
        return normal(shape, key, *rest)

    model = Bayesian(nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU()), Gaussian(0.5), estimator="local", seed=0).to("meta")
    monkeypatch.setattr(ops, "normal", record)
    with torch.no_grad():
        x = torch.randn(4, 1, 5, device="meta")
        outputs = model.engine().any_module.outputs(Key(0), 3, 2**30, (x,), {})
    assert outputs.shape == (3, 4, 2, 3)
    assert set(made) == {torch.device("meta")}


# --- the network and its inputs --------------------------------------------------------------------------------------


@identities
@pytest.mark.parametrize("ask", ["predict", "predict_mean", "ensemble", "failing"])
def test_the_network_is_left_as_it_was(ask):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2), nn.Dropout(0.9)).double()
    net.train()
    net[2].eval()
    modes = [module.training for module in net.modules()]
    model = Bayesian(net, Gaussian(0.5), sigma=0.1, estimator="shared", seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = points()
    if ask == "failing":
        with pytest.raises(RuntimeError):
            model.predict(x[:, :2], draws=3)
    elif ask == "predict_mean":
        predicted = model.predict_mean(x)
    else:
        predicted = model.predict(x, draws=3) if ask == "predict" else model.ensemble(3).predict(x)
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())
    if ask == "failing":
        return
    assert not predicted.mean.requires_grad
    assert not predicted.log_prob(torch.zeros(5, 2).double()).requires_grad
    one = predicted.components.mean[:5]  # in evaluation mode: each example by itself, and no dropout
    net.eval()
    with torch.no_grad():
        expected = net(x[:1]) if ask == "predict_mean" else model.draw()(x[:1])
    torch.testing.assert_close(one[:1], expected)


ASKS = {
    "free_energy": lambda model, x: FreeEnergy(model, 10)(x, torch.zeros(len(x), 2).double()).backward(),
    "predict": lambda model, x: model.predict(x, draws=3),
    "predict, shared": lambda model, x: model.predict(x, draws=3, estimator="shared"),
    "predict_mean": lambda model, x: model.predict_mean(x),
    "ensemble": lambda model, x: model.ensemble(3).predict(x),
}


@identities
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
def test_frozen_parts_stay_in_evaluation_mode(ask, training):
    """A backbone whose statistics and dropout are off, inside a network that trains; or the other way round."""
    backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).requires_grad_(False)
    net = nn.Sequential(backbone, nn.Linear(4, 2)).double().train(training)
    backbone.train(not training)
    backbone[2].train(training)
    modes = [module.training for module in net.modules()]
    model = Bayesian(net, Gaussian(0.5), sigma=0.1, seed=0)
    statistics = backbone[1].running_mean.clone()
    for _ in range(2):
        ask(model, points())
        assert [module.training for module in net.modules()] == modes
    if training:  # then the norm is frozen
        assert torch.equal(backbone[1].running_mean, statistics)


@identities
@pytest.mark.parametrize("where", ["root", "nested"])
@pytest.mark.parametrize("how", ["hook", "forward"])
def test_prediction_honours_hooks_and_replaced_forwards_of_containers(where: str, how: str) -> None:
    net = nn.Sequential(classifier())
    model = Bayesian(net, Categorical(), seed=0)
    module = net if where == "root" else net[0]
    if how == "hook":
        module.register_forward_hook(lambda _module, _inputs, output: output * 0)
    else:
        own = module.forward
        module.forward = lambda x: own(x) * 0
    torch.testing.assert_close(model.predict(torch.randn(4, 3), draws=2).mean, torch.full((4, 3), 1 / 3))


@identities
def test_predictions_carry_no_gradients() -> None:
    model = Bayesian(regressor(), Gaussian("learnt"), seed=0)
    predicted = model.predict(X, draws=3)
    for value in (
        predicted.mean,
        predicted.stddev,
        predicted.quantiles([0.5]),
        predicted.log_prob(Y),
        predicted.entropy,
    ):
        assert not value.requires_grad


@identities
def test_predict_mean_is_the_network_itself():
    x = points()
    model = Bayesian(mlp(), Categorical(), sigma=0.5, seed=0)
    logits = model.net(x).detach()
    torch.testing.assert_close(model.predict_mean(x).probs, logits.softmax(-1))
    assert torch.equal(model(x).detach(), logits)
    assert model.predict_mean(x).draws == 1


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.linear(left - 2 * right) * scale


@identities
def test_several_and_keyword_inputs():
    model = Bayesian(Several().double(), Gaussian(0.5), sigma=0.3, seed=0)
    left, right = points(), points()
    expected = torch.stack([model.draw(index=k)(left, right, scale=3.0) for k in range(4)]).mean(0).detach()
    ensemble = model.ensemble(4)
    for predicted in (
        model.predict(left, right, scale=3.0, draws=4),
        model.predict(right=right, left=left, scale=3.0, draws=4),
        ensemble.predict(left, right=right, scale=3.0),
    ):
        torch.testing.assert_close(predicted.mean, expected)
    torch.testing.assert_close(ensemble(left, right, scale=3.0).mean(0), expected)
    torch.testing.assert_close(model.predict_mean(left, right=right).mean, model.net(left, right).detach())


@identities
@pytest.mark.parametrize("draws", [0, -1, 2.0, True, None, "3"])
def test_bad_numbers_of_draws_are_refused(draws):
    model = Bayesian(mlp(), Categorical(), seed=0)
    for ask, owner in [
        (lambda: model.predict(points(), draws=draws), "Bayesian.predict"),
        (lambda: model.ensemble(draws), "Bayesian.ensemble"),
    ]:
        with pytest.raises(ValueError, match="parameter of") as error:
            ask()
        assert (
            str(error.value) == f"The 'draws' parameter of {owner} must be an int in [1, inf). Got {draws!r} instead."
        )
    with pytest.raises(ValueError, match="The 'memory' parameter of"):
        model.predict(points(), memory=0)
    with pytest.raises(ValueError, match="The 'memory' parameter of"):
        model.ensemble(2)(points(), memory=0)


@identities
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: regression_model().predict(X * torch.nan), "'inputs' parameter of Bayesian.predict"),
        (lambda: regression_model().predict(X[:0]), "'inputs' parameter of Bayesian.predict"),
        (lambda: regression_model().ensemble(2).predict(X[:0]), "'inputs' parameter of Ensemble"),
        (lambda: regression_model().predict(X, draws=2).quantiles(0.5), "'q' parameter of quantiles"),
        (lambda: regression_model().predict(X, draws=2).quantiles([]), "'q' parameter of quantiles"),
    ],
)
def test_mistakes_are_explained(call, message):
    with pytest.raises(ValueError, match=message):
        call()
