"""What a demonstration leaves behind, of networks that take no time, and the page that is made of it."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

import digits
from bayesbackprop_paper.experiments import bandit, figures, mnist, regression, report, table1, table2
from bayesbackprop_paper.experiments.bandit import Point

STEPS = 12


def curves() -> dict[regression.Config, regression.Curve]:
    grid = regression.GRID
    found = {}
    for method, drawn in (("bbb", 20), ("standard", 1)):
        config = regression.Config(method, points=50, steps=STEPS)  # type: ignore[arg-type]
        bands = np.linspace(-1, 1, 5)[:, None] * np.abs(grid)
        found[config] = regression.Curve(bands, np.tile(grid, (drawn, 1)), 0.5, 0.9)
    return found


def points() -> list[Point]:
    return [
        Point(agent, seed, step, step * (1.0 + seed))
        for agent in bandit.STYLE
        for seed in (0, 1)
        for step in (100, 200)
    ]


def write_runs(folder: Path) -> Path:
    """A trained network, curves and regrets, as a demonstration leaves them."""
    config = replace(digits.RECIPES["bbb-mixture"], units=30)
    mnist.run(config, digits.images(), folder / "network")
    regression.write_curves(folder / "curves" / report.CURVES, curves())
    bandit.write(folder / "bandit" / report.REGRET, points())
    return folder


def write_results(folder: Path) -> Path:
    """Every table and figure, of networks that take no time."""
    command = "bbb reproduce 'some' <b>"
    bandit.fig6(points(), folder, command)
    regression.fig5(curves(), folder, command)
    folders = {}
    for method in figures.STYLE:
        config = replace(digits.RECIPES[method], units=8)
        folders[config] = folder / "runs" / method
        mnist.run(config, digits.images(), folders[config], curve=True)
    bayesian = {config: path for config, path in folders.items() if config.is_bayesian}
    (recipe,) = bayesian
    for name, line in (
        ("fig2", figures.fig2(folders, folder, recipe)),
        ("fig3", figures.fig3(folders, folder, recipe)),
        ("fig4", figures.fig4(bayesian, folder, recipe)),
    ):
        (folder / f"{name}.json").write_text(json.dumps({"line": line, "command": command}))
    sgd = mnist.Result("sgd", 800, 1.0, 0, 40, 7, 1.75, 1.77, 0.06, 0.5, 3.0, "mean")
    warm = [replace(sgd, method="bbb-mixture-from-dropout", units=units) for units in (400, 800, 1200)]
    table1.write(folder / "table1.csv", [sgd, *warm])
    made = {"command": command, "version": "0.1.0", "seconds_to_target": 66.0}
    names = [f"bbb-mixture-from-dropout-{units}-40epochs-seed0" for units in (400, 800, 1200)]
    (folder / "table1.json").write_text(json.dumps(dict.fromkeys(names, made)))
    pruned = [(0.0, 2395210, 9581472, 573.9), (0.95, 119760, 574444, 115.6), (0.98, 47904, 226826, 75.0)]
    table2.write(
        folder / "table2.csv", [table2.Row(1200, 0, removed, left, 1.35, *costs) for removed, left, *costs in pruned]
    )
    recipe = {**asdict(table1.RECIPES["bbb-mixture"]), "command": command}
    (folder / "table2.json").write_text(json.dumps({"1200 units": recipe}))
    return folder


def write_page(runs: Path, results: Path) -> Path:
    """The report of both."""
    path = runs / "page" / "index.html"
    report.write([runs / name for name in ("network", "curves", "bandit")], results, path, digits.images().test)
    return path


def text_of(path: Path) -> str:
    """The page without the library in it."""
    return re.sub(r"<script>.*?</script>", "", path.read_text(), flags=re.DOTALL)


def steps_of(path: Path) -> list[dict[str, float]]:
    found = re.search(r"data-steps='([^']*)'", path.read_text())
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]
