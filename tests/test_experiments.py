"""The methods of Table 1 compute what they are named after, and the table holds what was run, nothing else."""

import csv
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import digits
from bayesbackprop import Laplace, Normal, load, load_sparse
from bayesbackprop._cli import app, main
from bayesbackprop._files import locked
from bayesbackprop.callbacks import Callback
from bayesbackprop.pruning import prune, snr
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import figures, mnist, page, table1, table2
from bayesbackprop_paper.experiments.mnist import Config, DropConnect, Result, network
from bayesbackprop_paper.experiments.recipe import CHECKPOINT, METRICS, Examples, Schedule, error_percent
from ztests import assert_mean, assert_z

pytestmark = pytest.mark.identities

COLUMNS = "method,units,temperature,seed,epochs,selected_epoch,validation_error,test_error,seconds,prediction"

# --- methods ---------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="'pruned' parameter of Config must be 0 where there is no distribution"):
        Config("sgd", pruned=0.5)
    with pytest.raises(ValueError, match="'pruned'"):
        Config(pruned=1.5)


@pytest.mark.parametrize("better", ["mean", "draws"])
def test_the_validation_set_chooses_how_to_predict(
    better: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = digits.images()
    errors = {"mean": {"validation": 3.0, "test": 1.0}, "draws": {"validation": 4.0, "test": 2.0}}
    errors[better]["validation"], errors[better]["test"] = 2.5, 7.0

    def error(way: str, examples: Examples) -> float:
        return errors[way]["validation" if examples.inputs is images.validation.images else "test"]

    monkeypatch.setattr(mnist, "error_percent", lambda _, examples: error("mean", examples))
    monkeypatch.setattr(mnist, "_error_of_draws", lambda *arguments: error("draws", arguments[-1]))
    result = mnist.run(digits.RECIPES["bbb-mixture"], images, tmp_path)
    assert (result.prediction, result.validation_error, result.test_error) == (better, 2.5, 7.0)


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
    assert error_percent(plain, Examples(*images.test)) == result.test_error
    with pytest.raises(ValueError, match="must be that of a Bayesian network"):
        figures.bayesian_in(tmp_path)


def test_the_epoch_can_be_selected_by_the_error_without_most_weights(tmp_path: Path) -> None:
    images, config = digits.images(), replace(digits.RECIPES["bbb-mixture"], pruned=0.9)
    result = mnist.run(config, images, tmp_path)
    found = [record["validation_error"] for record in digits.metrics(tmp_path)]
    assert result.selected_epoch == found.index(min(found)) + 1
    model, validation = load(tmp_path / mnist.MODEL, network(config)), Examples(*images.validation)
    assert error_percent(prune(model, 0.9).net, validation) == min(found) != error_percent(model.net, validation)


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


# --- the table -------------------------------------------------------------------------------------------------------


def test_cells_are_in_order_and_the_seeds_last() -> None:
    found = [
        (config.seed, config.method, config.temperature, config.units)
        for config in table1.cells(["sgd", "bbb-mixture"], [400, 800], range(2), [1.0, 0.1])
    ]
    one = [
        ("sgd", 1.0, 400),
        ("sgd", 1.0, 800),
        *(("bbb-mixture", temperature, units) for temperature in (1.0, 0.1) for units in (400, 800)),
    ]
    assert found == [(seed, *cell) for seed in range(2) for cell in one]


def test_cells_follow_the_recipes() -> None:
    for method, recipe in table1.RECIPES.items():
        start = None if recipe.start is None else table1.cells([recipe.start.row], [77], [5])[0]
        (config,) = table1.cells([method], [77], [5])
        assert config == replace(recipe, units=77, seed=5, schedule=replace(recipe.schedule, seed=5), start=start)
        assert config.row == method
        for epochs in (3, 96):
            (config,) = table1.cells([method], [77], [5], epochs=epochs)
            assert config.epochs == epochs
            assert config.schedule == replace(recipe.schedule, seed=5, epochs=config.schedule.epochs)
            if config.start is not None:
                assert config.start == table1.cells([config.start.row], [77], [5], epochs=config.start.epochs)[0]
    (config,) = table1.cells(["bbb-mixture-from-dropout"], [77], [5], epochs=12)
    assert config.schedule.epochs == 2  # of 12, as 16 of 96
    with pytest.raises(ValueError, match="'epochs' parameter of bbb-mixture-from-dropout must be at least 2"):
        table1.cells(["bbb-mixture-from-dropout"], [77], [5], epochs=1)
    assert set(table1.RECIPES) == {*mnist.METHODS, "bbb-mixture-from-dropout"}


def test_names_of_runs_differ() -> None:
    configs = [
        *table1.cells(["sgd", "bbb-mixture"], [4, 8], range(3), [1.0, 0.5, 0.25]),
        *table1.cells(["sgd", "bbb-mixture"], [4, 8], range(3), epochs=7),
    ]
    assert len({table1.name_of(config) for config in configs}) == len(configs)
    assert table1.name_of(configs[0]) == f"sgd-4-{table1.RECIPES['sgd'].schedule.epochs}epochs-seed0"


def row(**changes: Any) -> Result:
    return replace(Result("sgd", 400, 1.0, 0, 40, 17, 1.25, 1.83, 12345.678, "mean"), **changes)


def test_tables_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    assert table1.read(path) == []
    rows = [row(units=1200), row(seed=1), row(), row(method="dropout", temperature=0.125)]
    table1.write(path, rows)
    lines = path.read_text().splitlines()
    assert lines[0] == COLUMNS
    assert lines[1:] == [
        "dropout,400,0.125,0,40,17,1.25,1.83,12345.7,mean",
        "sgd,400,1,0,40,17,1.25,1.83,12345.7,mean",
        "sgd,400,1,1,40,17,1.25,1.83,12345.7,mean",
        "sgd,1200,1,0,40,17,1.25,1.83,12345.7,mean",
    ]
    read = table1.read(path)
    assert read == sorted(
        (replace(each, seconds=12345.7) for each in rows), key=lambda each: (each.method, each.units, each.seed)
    )
    table1.write(path, [*read, row(test_error=9.0), row(epochs=41)])
    merged = table1.read(path)
    assert len(merged) == 5
    assert [each.test_error for each in merged] == [1.83, 9, 1.83, 1.83, 1.83]
    assert [each.epochs for each in merged] == [40, 40, 41, 40, 40]


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.csv"
    table1.write(path, [row()])
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        table1.write(path, [row(), row(seed=1)])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_summary_is_mean_and_spread_over_seeds() -> None:
    rows = [row(seed=seed, test_error=error) for seed, error in enumerate((1.0, 2.0, 4.0))]
    found = table1.summary([*rows, row(units=800), row(temperature=0.5), row(epochs=3, test_error=9.0)])
    assert list(found) == [("sgd", 0.5, 400, 40), ("sgd", 1.0, 400, 3), ("sgd", 1.0, 400, 40), ("sgd", 1.0, 800, 40)]
    assert found["sgd", 1.0, 400, 40] == (pytest.approx(7 / 3), pytest.approx(math.sqrt(7 / 3)), 3)
    error, spread, seeds = found["sgd", 1.0, 400, 3]
    assert (error, seeds) == (9, 1)
    assert math.isnan(spread)


def reproduce(folder: Path, configs: list[Config], command: str = "bbb test") -> tuple[list[Result], list[str]]:
    """The table, and the names of what was run for it."""
    ran: list[str] = []

    def progress(name: str) -> Callback:
        ran.append(name)
        return Callback()

    where = folder / "runs", folder / "results"
    return table1.reproduce(configs, digits.images(), *where, command, progress), ran


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "mnist", digits.images)
    monkeypatch.setattr(table1, "RECIPES", digits.RECIPES)


def test_differences_from_the_paper() -> None:
    rows = [row(test_error=1.80), row(seed=1, test_error=1.90), row(units=1200, test_error=2.0), row(units=9)]
    warm = row(method="bbb-mixture-from-dropout", units=800, epochs=58, test_error=1.24)
    said = table1.difference([*rows, warm, row(method="bbb-mixture", temperature=0.5, test_error=1.5)])
    assert "SGD (40 epochs) +0.02 at 2x400, +0.12 at 2x1200. Ours" in said
    assert "from dropout's weights (58 epochs) -0.10 at 2x800; " in said
    assert "scale mixture, temperature 0.5 (40 epochs) +0.14 at 2x400; " in said
    assert "in points: none of its sizes. " in table1.difference([row(units=9)])
    pruned = [
        table2.Row(1200, seed, fraction, 1, error + 0.02 * seed, size, 100 / (1 + fraction))
        for seed in (0, 1)
        for fraction, error, size in ((0.0, 1.30, 1000), (0.95, 1.33, 100), (0.98, 1.4, 40))
    ]
    assert table2.difference(pruned) == (
        "Points lost without 95 / 98 % of the weights: 0.03 / 0.10; in the paper 0.05 / 0.15. At 98%, of the whole "
        "network's: file 1/25.0, time for one image 1/2.0. Ours begin at 1.31 %, the paper's at 1.24 %."
    )


@pytest.mark.usefixtures("small")
def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    configs = table1.cells(["sgd", "bbb-mixture"], [8], range(2))
    rows, ran = reproduce(tmp_path, configs[:3], "bbb first")
    assert ran == [table1.name_of(config) for config in configs[:3]]
    assert len(rows) == 3
    for name in ran:
        assert not (tmp_path / "runs" / name / CHECKPOINT).exists()
    again, ran = reproduce(tmp_path, configs, "bbb second")
    assert ran == [table1.name_of(configs[3])]
    assert set(rows) < set(again)
    assert len(again) == 4
    # The results alone are lost: they come back without training.
    text = (tmp_path / "results" / "table1.csv").read_text()
    how = (tmp_path / "results" / "table1.json").read_text()
    (tmp_path / "results" / "table1.csv").unlink()
    (tmp_path / "results" / "table1.json").unlink()
    _, ran = reproduce(tmp_path, configs, "bbb third")
    assert ran == []
    assert (tmp_path / "results" / "table1.csv").read_text() == text
    assert (tmp_path / "results" / "table1.json").read_text() == how
    commands = {name: entry["command"] for name, entry in json.loads(how).items()}
    assert commands == {
        table1.name_of(config): "bbb second" if config is configs[3] else "bbb first" for config in configs
    }
    for config in configs:
        entry = json.loads(how)[table1.name_of(config)]
        assert {name: entry[name] for name in asdict(config)} == asdict(config)
        assert entry["version"]


@pytest.mark.usefixtures("small")
def test_what_a_run_starts_from_is_run_first_and_once(tmp_path: Path) -> None:
    dropout, warm = table1.cells(["dropout", "bbb-mixture-from-dropout"], [8], [0])
    rows, ran = reproduce(tmp_path, [warm])
    assert ran == [table1.name_of(dropout), table1.name_of(warm)]
    assert [each.method for each in rows] == ["bbb-mixture-from-dropout"]
    rows, ran = reproduce(tmp_path, [dropout, warm])
    assert ran == []
    assert [each.method for each in rows] == ["bbb-mixture-from-dropout", "dropout"]
    folder = tmp_path / "runs" / table1.name_of(warm)
    own = sum(json.loads(line)["seconds"] for line in (folder / METRICS).read_text().splitlines())
    assert rows[0].seconds == pytest.approx(rows[1].seconds + own, rel=1e-4)  # of all its epochs, as the table says


@pytest.mark.usefixtures("small")
def test_the_time_to_an_error_counts_that_of_the_start(tmp_path: Path) -> None:
    dropout, warm = table1.cells(["dropout", "bbb-mixture-from-dropout"], [8], [0])
    for config, records in ((dropout, [(9.0, 10.0), (1.3, 20.0)]), (warm, [(1.5, 1.0), (1.4, 2.0), (1.2, 4.0)])):
        folder = tmp_path / table1.name_of(config)
        folder.mkdir()
        lines = [json.dumps({"test_error": error, "seconds": seconds}) for error, seconds in records]
        (folder / METRICS).write_text("\n".join(lines) + "\n")
    assert [table1.seconds_to(error, dropout, tmp_path) for error in (9, 1.4, 1)] == [10, 30, None]
    assert [table1.seconds_to(error, warm, tmp_path) for error in (9, 1.4, 1.2, 1)] == [31, 33, 37, None]
    made = {"seconds_to_target": 66.0, "command": "bbb this"}
    (tmp_path / "table1.json").write_text(json.dumps({"a-seed0": made, "a-seed1": made, "b-seed0": {"command": "b"}}))
    says = page.write(tmp_path, tmp_path / "docs").read_text()
    assert "\nMinutes of training until the test error was 1.4 %, by seed, with the threads" in says
    assert " beside other programs: `a` 1.1, 1.1.\n" in says
    made = {"a-seed0": "0.1.0", "a-seed1": "0.1.0", "a-seed2": "0.2.0", "b-seed0": "0.2.0"}
    entries = {name: {"command": "bbb this", "version": version} for name, version in made.items()}
    (tmp_path / "table1.json").write_text(json.dumps(entries))
    says = page.write(tmp_path, tmp_path / "docs").read_text()
    assert "\nRuns of versions before 0.2.0: `a` 0.1.0, seeds 0, 1.\n" in says


@pytest.mark.usefixtures("small")
def test_results_from_before_an_option_was_there_still_count(tmp_path: Path) -> None:
    (config,) = table1.cells(["bbb-mixture"], [8], [0])
    reproduce(tmp_path, [config])
    path = tmp_path / "runs" / table1.name_of(config) / "result.json"
    written = json.loads(path.read_text())
    for name in ("pruned", "start"):
        del written["made"][name]
    path.write_text(json.dumps(written))
    assert reproduce(tmp_path, [config])[1] == []
    with pytest.raises(ValueError, match="another recipe"):
        reproduce(tmp_path, [replace(config, pruned=0.5)])


@pytest.mark.usefixtures("small")
def test_the_table_is_there_after_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = table1.cells(["sgd"], [8], range(3))
    run = table1.run

    def stop_at_last(config: Config, *arguments: Any, **options: Any) -> Result:
        if config is configs[-1]:
            raise KeyboardInterrupt
        return run(config, *arguments, **options)

    monkeypatch.setattr(table1, "run", stop_at_last)
    with pytest.raises(KeyboardInterrupt):
        reproduce(tmp_path, configs)
    assert [each.seed for each in table1.read(tmp_path / "results" / "table1.csv")] == [0, 1]


@pytest.mark.usefixtures("small")
def test_results_of_another_recipe_are_refused(tmp_path: Path) -> None:
    (config,) = table1.cells(["sgd"], [8], [0])
    reproduce(tmp_path, [config])
    before = (tmp_path / "results" / "table1.csv").read_bytes()
    for other in (
        replace(config, schedule=replace(config.schedule, learning_rate=0.2)),
        replace(config, prediction_draws=9),
    ):
        with pytest.raises(ValueError, match="another recipe"):
            reproduce(tmp_path, [other])
    assert (tmp_path / "results" / "table1.csv").read_bytes() == before


@pytest.mark.usefixtures("small")
def test_test_errors_by_epoch_are_those_of_the_figures_only(tmp_path: Path) -> None:
    small, large = table1.cells(["sgd"], [8, 16], [0])
    reproduce(tmp_path, [small, large])
    for config in (small, large):
        records = digits.metrics(tmp_path / "runs" / table1.name_of(config))
        assert all(("test_error" in record) == (config is large) for record in records)


def test_one_at_a_time_in_a_folder(tmp_path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with locked(tmp_path / "new"):
            entered.set()

    other = threading.Thread(target=enter)
    with locked(tmp_path / "new"):
        other.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    other.join()


@pytest.mark.usefixtures("small")
def test_two_at_once_lose_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = table1.cells(["sgd"], [8], range(2))
    reproduce(tmp_path, configs)
    for name in ("table1.csv", "table1.json"):
        (tmp_path / "results" / name).unlink()
    both_have_read, read = threading.Barrier(2, timeout=0.5), table1.read

    def read_and_wait(path: Path) -> list[Result]:
        rows = read(path)
        with suppress(threading.BrokenBarrierError):
            both_have_read.wait()
        return rows

    monkeypatch.setattr(table1, "read", read_and_wait)
    threads = [threading.Thread(target=reproduce, args=(tmp_path, [config])) for config in configs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.seed for each in read(tmp_path / "results" / "table1.csv")] == [0, 1]
    how = json.loads((tmp_path / "results" / "table1.json").read_text())
    assert how.keys() == {table1.name_of(config) for config in configs}


@pytest.mark.usefixtures("small")
def test_two_at_once_train_a_run_once(tmp_path: Path) -> None:
    (config,) = table1.cells(["sgd"], [8], [0])
    ran: list[list[str]] = []
    threads = [threading.Thread(target=lambda: ran.append(reproduce(tmp_path, [config])[1])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ran) == [[], [table1.name_of(config)]]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_the_quick_table(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "table1", "--quick", "--runs", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    assert f"Wrote {tmp_path / 'runs' / 'quick' / 'table1'}: csv, png, svg." in result.stderr
    with (tmp_path / "runs" / "quick" / "table1.csv").open() as file:
        assert file.readline() == COLUMNS + "\n"
        rows = list(csv.DictReader(file, COLUMNS.split(",")))
    assert [(each["method"], each["units"], each["epochs"], each["seed"]) for each in rows] == [
        (method, "100", "3", "0") for method in sorted(table1.PUBLISHED)
    ]
    for each in rows:
        assert each["method"] in result.stdout
        assert 0 <= float(each["test_error"]) <= 100
        assert 1 <= int(each["selected_epoch"]) <= 3
        assert each["prediction"] in ("mean", "draws")


@pytest.mark.usefixtures("small")
def test_what_is_quick_is_otherwise_what_was_asked_for(tmp_path: Path) -> None:
    options = ["--method", "sgd", "--units", "8", "--seeds", "2", "--epochs", "1", "--results", str(tmp_path / "here")]
    command = ["reproduce", "table1", "--quick", *options, "--runs", str(tmp_path / "runs")]
    assert CliRunner().invoke(app, command).exit_code == 0
    rows = table1.read(tmp_path / "here" / "table1.csv")
    assert [(each.method, each.units, each.epochs, each.seed) for each in rows] == [("sgd", 8, 1, 0), ("sgd", 8, 1, 1)]
    assert {path.name for path in (tmp_path / "runs" / "quick").iterdir()} == {
        "sgd-8-1epochs-seed0",
        "sgd-8-1epochs-seed1",
    }


@pytest.mark.usefixtures("small")
def test_figures_of_several_seeds(tmp_path: Path) -> None:
    options = ["--quick", "--units", "8", "--seeds", "2", "--runs", str(tmp_path)]
    for name in ("fig2", "fig3", "fig4"):
        result = CliRunner().invoke(app, ["reproduce", name, *options])
        assert result.exit_code == 0, result.output
        assert "2x8 (the paper's 2x1200), 2 seeds" in " ".join(result.stdout.split())
    folder = tmp_path / "quick"
    runs = [[each["test_error"] for each in digits.metrics(folder / f"sgd-8-3epochs-seed{seed}")] for seed in (0, 1)]
    assert runs[0] != runs[1]
    assert figures.read_csv(folder / "fig2.csv")["sgd"] == pytest.approx(np.mean(runs, 0))
    weights = [figures.trained_weights(folder / f"sgd-8-3epochs-seed{seed}") for seed in (0, 1)]
    inside = np.mean(np.abs(np.concatenate(weights)) < 0.405)
    assert figures.read_csv(folder / "fig3.csv")["sgd"].sum() * 0.01 == pytest.approx(inside, rel=1e-4)
    models = [figures.bayesian_in(folder / "table2" / f"bbb-mixture-8-t0.1-3epochs-seed{seed}") for seed in (0, 1)]
    below = (torch.cat(list(map(snr, models))).log10() < 1.9).double().mean()
    assert figures.read_csv(folder / "fig4.csv")["cdf"][-1] == pytest.approx(float(below), rel=1e-5)
    # A run that was made without test errors has none to show.
    path = folder / "sgd-8-3epochs-seed0" / METRICS
    path.write_text(path.read_text().replace("test_error", "other"))
    result = CliRunner().invoke(app, ["reproduce", "fig2", *options])
    assert "sgd-8-3epochs-seed0 has no test errors by epoch: remove it" in str(result.exception)


@pytest.mark.usefixtures("small")
def test_rows_of_table_2_are_kept(tmp_path: Path) -> None:
    for units, seeds in ((8, 2), (9, 1), (8, 1)):
        command = ["reproduce", "table2", "--quick", "--units", units, "--seeds", seeds, "--runs", tmp_path]
        assert CliRunner().invoke(app, list(map(str, command))).exit_code == 0
    rows = table2.read(tmp_path / "quick" / "table2.csv")
    networks = [(8, 0), (8, 1), (9, 0)]
    assert [(each.units, each.seed, each.fraction) for each in rows] == [
        (*network, fraction) for network in networks for fraction in table2.PUBLISHED
    ]
    assert json.loads((tmp_path / "quick" / "table2.json").read_text()).keys() == {"8 units", "9 units"}
    assert table2.largest(rows) == rows[-len(table2.PUBLISHED) :]


@pytest.mark.usefixtures("small")
def test_the_shown_table_has_the_paper_beside_it(tmp_path: Path) -> None:
    table1.write(tmp_path / "table1.csv", [row(), row(seed=1, test_error=1.97)])
    options = ["--method", "sgd", "--units", "8", "--seeds", "1", "--runs", str(tmp_path), "--results", str(tmp_path)]
    result = CliRunner().invoke(app, ["reproduce", "table1", *options])
    assert result.exit_code == 0, result.output
    assert re.search(r"sgd\W+1\W+400\W+40\W+2\W+1\.90 ± 0\.10\W+1\.83", result.stdout)
    assert re.search(r"sgd\W+1\W+8\W+3\W+1\W+\d+\.\d\d\s", result.stdout)


@pytest.mark.parametrize("command", [["reproduce", "table1", "--quick"], ["train"]])
def test_a_bad_method_is_a_line(command: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*command, "--method", "magic"])
    assert done.exit_code == 2
    assert "'magic' is none of bbb-mixture" in re.sub(r"[\s│]+", " ", done.output)
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("options", "status", "says"),
    [(["--method", "magic"], 2, "magic"), (["--folder", "{}", "--resume"], 1, "whole safetensors file")],
)
def test_a_mistake_has_no_traceback(
    options: list[str],
    status: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / CHECKPOINT).write_text("nonsense")
    monkeypatch.setattr(sys, "argv", ["bbb", "train", *(option.format(tmp_path) for option in options)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == status
    assert says in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


# --- figures and the rest, quickly ------------------------------------------------------------------------------------

QUICK = ("table1", "fig2", "fig3", "fig4", "table2")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder that the quick commands leave behind, and what each said."""
    folder = tmp_path_factory.mktemp("quick")
    options = ["--quick", "--runs", str(folder / "runs")]
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "mnist", digits.images)
        patch.setattr(table1, "RECIPES", digits.RECIPES)
        for name in QUICK:
            patch.setattr(sys, "argv", ["bbb", "reproduce", name, "--quick"])
            result = CliRunner().invoke(app, ["reproduce", name, *options])
            assert result.exit_code == 0, result.output
            said[name] = " ".join(result.stdout.split())
            trains = name in ("table1", "fig4")  # fig2 and fig3 show the networks of table1, table2 that of fig4
            assert (": epoch" in result.stderr) == trains
        yield folder, said


def test_what_is_quick_touches_no_result(quick: tuple[Path, dict[str, str]]) -> None:
    folder, said = quick
    assert [path.name for path in folder.iterdir()] == ["runs"]
    assert [path.name for path in (folder / "runs").iterdir()] == ["quick"]
    files = {path.name for path in (folder / "runs" / "quick").iterdir() if path.is_file()}
    assert files == {".lock", *(f"{name}.{suffix}" for name in QUICK for suffix in ("csv", "json", "png", "svg"))}
    for name in ("fig2", "fig3", "fig4"):
        about = json.loads((folder / "runs" / "quick" / f"{name}.json").read_text())
        assert about.keys() == {"line", "command", "version"}
        assert about["line"] == said[name]
        assert about["command"] == f"bbb reproduce {name} --quick"
        assert "2x100 (the paper's 2x1200): " in said[name]
        assert "2x100 (the paper's 2x1200)" in (folder / "runs" / "quick" / f"{name}.svg").read_text()
    with (folder / "runs" / "quick" / "table2.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(each["units"], each["seed"], float(each["fraction"])) for each in rows] == [
        ("100", "0", fraction) for fraction in table2.PUBLISHED
    ]
    assert "2x100; the paper's: 2x1200" in said["table2"]


def shown(folder: Path, name: str) -> dict[str, np.ndarray[Any, Any]]:
    with (folder / "runs" / "quick" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {column: np.array([float(row[column]) for row in rows]) for column in rows[0]}


def test_the_line_of_figure_2(quick: tuple[Path, dict[str, str]]) -> None:
    folder, said = quick
    ours = shown(folder, "fig2")
    for method, label, theirs in (
        ("bbb-mixture", "Bayes by Backprop", "2.26 % at epoch 15 and 1.32 % at 595"),
        ("dropout", "dropout", "2.06 % at epoch 15 and 1.39 % at 595"),
        ("sgd", "SGD", "1.94 % at epoch 15 and 1.86 % at 595"),
    ):
        records = digits.metrics(folder / "runs" / "quick" / f"{method}-100-3epochs-seed0")
        assert ours[method] == pytest.approx([record["test_error"] for record in records])
        assert f"{label} {records[-1]['test_error']:.2f} % at epoch 3, the paper's {theirs}" in said["fig2"]
    assert "(Bayes by Backprop: Adam, 3 epochs); the paper's had plain SGD and 600 epochs." in said["fig2"]


def test_the_paper_is_read_at_our_last_epoch(tmp_path: Path) -> None:
    for epochs, theirs in ((20, "2.16 % at epoch 20"), (700, "1.32 % at epoch 595")):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"test_error": 2.0}) + "\n" for _ in range(epochs)))
        config = Config("bbb-mixture", units=1200, schedule=Schedule(epochs=epochs))
        line = figures.fig2({config: tmp_path}, tmp_path / "results")
        expected = (
            f"Test error, 2x1200: Bayes by Backprop 2.00 % at epoch {epochs}, the paper's {theirs} and 1.32 % at 595"
        )
        assert line.startswith(expected)


def test_the_line_of_figure_3(quick: tuple[Path, dict[str, str]]) -> None:
    folder, said = quick
    ours = shown(folder, "fig3")
    for method, label, theirs in (
        ("bbb-mixture", "Bayes by Backprop", 0.097),
        ("dropout", "dropout", 0.058),
        ("sgd", "SGD", 0.026),
    ):
        weights = figures.trained_weights(folder / "runs" / "quick" / f"{method}-100-3epochs-seed0")
        found = re.search(rf"{label} (\d\.\d+), (wider|narrower) than the paper's (\d\.\d+)", said["fig3"])
        assert found
        assert float(found[1]) == pytest.approx(weights[abs(weights) < 0.405].std(), abs=6e-4)
        assert float(found[3]) == theirs
        assert found[2] == ("wider" if float(found[1]) > theirs else "narrower")
        assert ours[method].sum() * 0.01 == pytest.approx((abs(weights) < 0.405).mean(), rel=1e-4)
    assert "starts at 0.01 in ours and has 3 epochs to change; in the paper's it had 600" in said["fig3"]


def test_the_line_of_figure_4(quick: tuple[Path, dict[str, str]]) -> None:
    folder, said = quick
    model = figures.bayesian_in(folder / "runs" / "quick" / "table2" / "bbb-mixture-100-t0.1-3epochs-seed0")
    logs = snr(model).log10()
    middle, upper = (float(logs.quantile(share)) for share in (0.5, 0.75))
    assert f"median {middle:.2f}, the paper's -1.76; three quarters of the weights below {upper:.2f}" in said["fig4"]
    assert "the paper's -0.94; humps at " in said["fig4"]
    assert "the paper's at -1.8 and -0.7. " in said["fig4"]
    assert shown(folder, "fig4")["cdf"][-1] == pytest.approx(float((logs < 1.9).double().mean()))


def test_spread_and_humps_of_densities() -> None:
    grid = np.arange(-5, 5, 0.1)

    def bell(middle: float, sigma: float) -> np.ndarray[Any, Any]:
        return np.exp(-0.5 * ((grid - middle) / sigma) ** 2) / sigma

    assert figures.spread(grid, 7 * bell(0.3, 0.5)) == pytest.approx(0.5)
    for bells, expected in (
        ([(0, 1)], [0]),
        ([(-2, 0.5), (2, 0.5)], [-2, 2]),
        ([(-2, 0.5), (0, 0.3), (3, 0.5)], [-2, 0, 3]),
        ([(-0.7, 1), (0.7, 1)], [0]),  # they merge
        ([(-9, 2)], [-5]),  # it falls from the first
    ):
        density = sum(bell(*each) for each in bells)
        assert figures.humps(grid, density) == pytest.approx(expected, abs=0.11)
    steps = np.array([0.0, 1, 1, 0.5, 0.52, 0, 3, 3, 3, 0, 0.1, 0])
    assert figures.humps(np.arange(12.0), steps) == [1, 6]


def test_the_page_shows_the_lines(quick: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, said = quick
    text = page.write(folder / "runs" / "quick", tmp_path).read_text()
    for name in ("fig2", "fig3", "fig4"):
        assert f"(results/{name}.png)\n\n{said[name]}\n\nCommand: `bbb reproduce {name} --quick`\n" in text
        assert (tmp_path / "results" / f"{name}.png").exists()
    for name in ("table1", "table2"):
        assert f"](results/{name}.png)\n" in text
        assert (tmp_path / "results" / f"{name}.png").exists()
    assert "| 2x100 | 98% | 0 |" in text
    assert "| method | epochs | 2x100 | paper | 2x400 | paper | 2x800 |" in text
    (tmp_path / "some").mkdir()
    for nothing in (tmp_path / "none", tmp_path / "some"):
        with pytest.raises(ValueError, match="'results' parameter of bbb reproduce page must be a folder that"):
            page.write(nothing, tmp_path)
    assert (tmp_path / "results.md").read_text() == text
    (tmp_path / "some" / "fig3.png").write_bytes(b"")
    text = page.write(tmp_path / "some", tmp_path).read_text()
    assert text.endswith("(results/fig3.png)\n")
