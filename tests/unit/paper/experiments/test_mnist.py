"""The methods of Table 1 compute what they are named after, and a run leaves the model that it selected."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import digits
from bayesbackprop import Bayesian, FreeEnergy, Laplace, Normal, load, load_sparse
from bayesbackprop.evaluation import calibration
from bayesbackprop_paper.experiments import figures, mnist
from bayesbackprop_paper.experiments.mnist import Config, DropConnect, network
from bayesbackprop_paper.experiments.recipe import Examples, Schedule, error_percent
from ztests import assert_mean, assert_z

pytestmark = pytest.mark.identities


def _normal(w: Tensor, scale: float) -> Tensor:
    return -0.5 * (w / scale) ** 2 - math.log(scale * math.sqrt(2 * math.pi))


def _laplace(w: Tensor, scale: float) -> Tensor:
    return -w.abs() / scale - math.log(2 * scale)


@pytest.mark.parametrize(
    ("method", "density"), [("sgd", None), ("dropout", None), ("map-gaussian", _normal), ("map-laplace", _laplace)]
)
def test_point_estimates_by_hand(method: Any, density: Callable[..., Tensor] | None, tmp_path: Path) -> None:
    config = Config(method, units=5, prior_sigma=0.3, schedule=Schedule())
    run = mnist.prepare(config, 1000, tmp_path)
    run.net.eval()
    x, y = torch.randn(7, 784), torch.randint(10, (7,))
    weights = list(run.net.parameters())
    logits = F.linear(F.relu(F.linear(F.relu(F.linear(x, *weights[:2])), *weights[2:4])), *weights[4:])
    likelihood = -logits.log_softmax(1)[range(7), y].mean()
    complexity = torch.zeros(()) if density is None else -sum(density(w, 0.3).sum() for w in weights)
    cost = run.objective(x, y)
    torch.testing.assert_close(cost.likelihood, likelihood)
    torch.testing.assert_close(cost.complexity, complexity)
    torch.testing.assert_close(cost.total, likelihood + complexity / 1000)
    expected = torch.autograd.grad(likelihood + complexity / 1000, weights)
    cost.backward()
    torch.testing.assert_close([w.grad for w in weights], list(expected))


def test_minibatches_share_the_complexity_as_the_paper_has_it(tmp_path: Path) -> None:
    """Two minibatches of 20 examples have two thirds and one third of it, each example a twentieth of that."""
    config = Config(units=5, schedule=Schedule(batch_size=20), minibatch_weights="geometric")
    objective = mnist.prepare(config, 40, tmp_path).objective
    x, y = torch.randn(20, 784), torch.randint(10, (20,))
    weights = [objective(x, y, batch).complexity_weight.item() for batch in (0, 1)]
    assert weights == pytest.approx([2 / 3 / 20, 1 / 3 / 20])


def test_priors_of_the_methods() -> None:
    priors = {method: Config(method, prior_sigma=0.3, pi=0.5).prior for method in mnist.METHODS}  # type: ignore[arg-type]
    assert priors["map-gaussian"] == priors["bbb-gaussian"] == Normal(0.3)
    assert priors["map-laplace"] == Laplace(0.3)
    assert (priors["bbb-mixture"].pi, priors["bbb-mixture"].sigma1) == (0.5, math.exp(-1))  # type: ignore[attr-defined]
    assert {method for method in mnist.METHODS if Config(method).is_bayesian} == {"bbb-mixture", "bbb-gaussian"}  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["bbb-mixture", "bbb-gaussian"])
def test_bayesian_runs_are_what_the_configuration_says(method: Any, tmp_path: Path) -> None:
    config = Config(method, units=5, temperature=0.5, draws=2, sigma=0.02, prior_sigma=0.3, seed=4)
    run = mnist.prepare(config, 1000, tmp_path)
    model = run.objective.model
    assert run.net is model.net
    for rho in model.rho.parameters():
        torch.testing.assert_close(F.softplus(rho), torch.full_like(rho, 0.02))
    x, y = torch.randn(7, 784), torch.randint(10, (7,))
    cost = run.objective(x, y)
    likelihood = complexity = 0.0
    for index in range(2):
        draw = model.draw(step=1, index=index, seed=4)
        likelihood += F.cross_entropy(draw(x), y).item() / 2
        for name, w in draw.weights.items():
            posterior = torch.distributions.Normal(model.net.get_parameter(name), 0.02)
            complexity += (posterior.log_prob(w) - config.prior.log_density(w)).sum().item() / 2
    assert cost.likelihood.item() == pytest.approx(likelihood, rel=1e-4)
    assert cost.complexity.item() == pytest.approx(complexity, rel=1e-4)
    assert cost.total.item() == pytest.approx(likelihood + 0.5 * complexity / 1000, rel=1e-4)


def test_drop_connect_drops_weights() -> None:
    layer, p = DropConnect(6, 4, p=0.25), 0.25
    x = torch.eye(6)
    layer.eval()
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    layer.train()
    kept = []
    for _ in range(2000):
        output = (layer(x) - layer.bias).T  # what is left of each weight
        kept.append((output != 0).double())
        torch.testing.assert_close(output, torch.where(output != 0, layer.weight / (1 - p), 0), rtol=1e-4, atol=1e-6)
    shares = torch.stack(kept)
    assert_mean(shares.flatten(1).mean(1), 1 - p, "kept weights")
    # Weight by weight, not row by row or column by column.
    correlations = torch.corrcoef(shares.flatten(1).T)[tuple(torch.triu_indices(24, 24, 1))]
    assert_z(correlations * math.sqrt(len(shares)), "correlations of kept weights")
    # One pass drops the same weights for every example.
    same = layer(torch.ones(3, 6))
    torch.testing.assert_close(same[1:], same[:1].expand(2, 4))
    layer.bias.data.fill_(3)
    layer.weight.data.zero_()
    assert torch.equal(layer(x), torch.full((6, 4), 3.0))


def kinds(method: Any, **options: float) -> list[tuple[type, float | None]]:
    layers = network(Config(method, units=5, **options))  # type: ignore[arg-type]
    return [(type(layer), getattr(layer, "p", None)) for layer in layers]


def test_layers_are_where_the_paper_puts_them() -> None:
    linear, relu = (nn.Linear, None), (nn.ReLU, None)
    plain = [linear, relu, linear, relu, linear]
    for method in mnist.METHODS:
        if method not in ("dropout", "dropconnect"):
            assert kinds(method) == plain
    for p in (0.5, 0.25):
        forgets = (nn.Dropout, p)
        assert kinds("dropout", dropout=p) == [forgets, linear, relu, forgets, linear, relu, forgets, linear]
    assert kinds("dropconnect") == [linear, relu, (DropConnect, 0.5), relu, (DropConnect, 0.5)]


@pytest.mark.parametrize("units", [5, 30])
def test_initial_weights_depend_on_the_seed_only(units: int) -> None:
    def weights(method: Any, seed: int) -> list[Tensor]:
        torch.manual_seed(torch.seed())
        return list(network(Config(method, units=units, seed=seed)).parameters())

    first = weights("sgd", 3)
    shapes = [(units, 784), (units,), (units, units), (units,), (10, units), (10,)]
    assert [tuple(w.shape) for w in first] == shapes
    for method in mnist.METHODS:
        assert all(torch.equal(*pair) for pair in zip(weights(method, 3), first, strict=True))
    other = weights("sgd", 4)
    for w, v in zip(first, other, strict=True):
        assert torch.equal(w, v) == (w.dim() == 1)
        assert w.dim() == 2 or not w.any()
    assert first[0].std().item() == pytest.approx(math.sqrt(2 / 784), rel=0.05)


def test_bad_configurations_are_refused() -> None:
    for name, value in {"method": "magic", "units": 0, "draws": 0, "sigma": 0, "prior_sigma": -1, "seed": -1}.items():
        with pytest.raises(ValueError, match=f"'{name}' parameter of Config"):
            Config(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'temperature'"):
        Config(temperature=-0.1)
    with pytest.raises(ValueError, match="'estimator' parameter of Config must be one of"):
        Config(estimator="other")  # type: ignore[arg-type]


@pytest.mark.parametrize("better", ["mean", "draws"])
def test_the_validation_set_chooses_how_to_predict(
    better: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = digits.images()
    right = {name: F.one_hot(split.labels, 10).double() for name, split in images._asdict().items()}
    wrong = {name: F.one_hot((split.labels + 1) % 10, 10).double() for name, split in images._asdict().items()}

    def by(way: str, inputs: Tensor) -> Tensor:
        """On the validation set the better way is right; on the test set, which must not choose, it is wrong."""
        name = "validation" if inputs is images.validation.images else "test"
        return (right if (way == better) == (name == "validation") else wrong)[name]

    monkeypatch.setattr(mnist, "_by_mean", lambda _, inputs: by("mean", inputs))
    monkeypatch.setattr(Bayesian, "predict", lambda _, inputs, draws: by("draws", inputs))
    result = mnist.run(digits.RECIPES["bbb-mixture"], images, tmp_path)
    assert (result.prediction, result.validation_error, result.test_error) == (better, 0.0, 100.0)


def test_the_model_of_a_run_is_the_selected_one(tmp_path: Path) -> None:
    images = digits.images()
    config = digits.recipe("bbb-mixture", averaging=0.9)
    result = mnist.run(config, images, tmp_path)
    found = digits.metrics(tmp_path)[result.selected_epoch - 1]["validation_error"]
    assert found == min(record["validation_error"] for record in digits.metrics(tmp_path))
    model = load(tmp_path / mnist.MODEL, network(config))
    assert error_percent(model.net, Examples(*images.validation)) == found
    wrong = (model.predict(images.test.images, draws=3).labels != images.test.labels).double()  # type: ignore[attr-defined]
    by_draws = 100 * float(wrong.mean())
    by_mean = error_percent(model.net, Examples(*images.test))
    assert result.test_error == pytest.approx({"mean": by_mean, "draws": by_draws}[result.prediction])


@pytest.mark.parametrize("method", ["sgd", "dropout", "dropconnect"])
def test_the_model_of_a_baseline_is_a_plain_network(method: Any, tmp_path: Path) -> None:
    images = digits.images()
    result = mnist.run(digits.RECIPES[method], images, tmp_path)
    plain = load_sparse(tmp_path / mnist.MODEL)
    assert result.test_error == pytest.approx(error_percent(plain, Examples(*images.test)))
    with pytest.raises(ValueError, match="must be that of a Bayesian network"):
        figures.bayesian_in(tmp_path)


def test_the_scores_of_a_run_are_those_of_its_model(tmp_path: Path) -> None:
    images = digits.images()
    result = mnist.run(digits.RECIPES["dropout"], images, tmp_path)
    logits = load_sparse(tmp_path / mnist.MODEL)(images.test.images)
    assert result.test_nll == pytest.approx(F.cross_entropy(logits, images.test.labels).item(), rel=1e-5)
    assert result.test_ece == pytest.approx(100 * calibration(logits.softmax(1), images.test.labels).ece, rel=1e-5)


@pytest.mark.parametrize("estimator", ["shared", "flipout"])
def test_the_estimator_of_a_configuration(estimator: Any, tmp_path: Path) -> None:
    run = mnist.prepare(Config(units=5, estimator=estimator), 1000, tmp_path)
    assert {entry.estimator for entry in run.objective.model.plan} == {estimator}


def test_a_run_can_start_from_the_weights_of_another(tmp_path: Path) -> None:
    config = digits.RECIPES["bbb-mixture-from-dropout"]
    assert config.start is not None
    mnist.run(config.start, digits.images(), tmp_path / "start")
    chosen = mnist.prepare(config.start, digits.N, tmp_path / "start")
    chosen.load_best()
    begun = mnist.prepare(config, digits.N, tmp_path / "own", tmp_path / "start")
    assert all(map(torch.equal, begun.net.parameters(), chosen.net.parameters()))
    assert not any(map(torch.equal, begun.net.parameters(), network(config).parameters()))
    with pytest.raises(ValueError, match="'start' parameter of prepare must be the folder of the run to start from"):
        mnist.prepare(config, digits.N, tmp_path / "other")
    result = mnist.run(config, digits.images(), tmp_path / "own", start=tmp_path / "start")
    assert (result.method, result.epochs) == ("bbb-mixture-from-dropout", 2 * digits.EPOCHS)
    assert digits.EPOCHS < result.selected_epoch <= 2 * digits.EPOCHS


@pytest.mark.identities
def test_the_noise_of_hidden_units_does_not_grow_with_the_width(tmp_path: Path) -> None:
    found = {}
    for units in (4, 16):
        config = mnist.Config(units=units, sigma=0.03, hidden_sigma=0.6)
        objective = mnist.prepare(config, 100, tmp_path).objective
        assert isinstance(objective, FreeEnergy)
        found[units] = [q.sigma.flatten()[0].item() for q in objective.model.posterior.values()]
    assert found[4] == pytest.approx([0.03, 0.03, 0.3, 0.3, 0.3, 0.3])
    assert found[16] == pytest.approx([0.03, 0.03, 0.15, 0.15, 0.15, 0.15])
    assert config.changed(sigma=0.1).hidden_sigma is None
    assert config.changed(pi=0.1).hidden_sigma == 0.6
