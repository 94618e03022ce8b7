"""The page holds what the files hold; in a browser it is whole, works without a network, and its slider prunes."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.filesize
import torch
from typer.testing import CliRunner

import digits
from bayesbackprop import load_sparse, sparse
from bayesbackprop._cli import app, main
from bayesbackprop.pruning import prune, snr, threshold, weights_left
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import bandit, demo, figures, mnist, page, regression, report, table1
from bayesbackprop_paper.experiments.bandit import Point
from bayesbackprop_paper.experiments.recipe import Examples, error_percent

pytestmark = pytest.mark.identities

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

STEPS = 12
FIGURES = {"fig2", "fig3", "fig4", "fig5", "fig6"}


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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained network, curves and regrets, as a demonstration leaves them."""
    folder = tmp_path_factory.mktemp("runs")
    config = replace(digits.RECIPES["bbb-mixture"], units=30)
    mnist.run(config, digits.images(), folder / "network")
    regression.write_curves(folder / "curves" / report.CURVES, curves())
    bandit.write(folder / "bandit" / report.REGRET, points())
    return folder


@pytest.fixture(scope="module")
def results(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every table and figure, of networks that take no time."""
    folder = tmp_path_factory.mktemp("results")
    command = "bbb reproduce 'some' <b>"
    bandit.fig6(points(), folder, command)
    regression.fig5(curves(), folder, command)
    folders = {}
    for method in figures.STYLE:
        config = replace(digits.RECIPES[method], units=8)
        folders[config] = folder / "runs" / method
        mnist.run(config, digits.images(), folders[config], curve=True)
    bayesian = {config: path for config, path in folders.items() if config.is_bayesian}
    for name, line in (
        ("fig2", figures.fig2(folders, folder)),
        ("fig3", figures.fig3(folders, folder)),
        ("fig4", figures.fig4(bayesian, folder)),
    ):
        (folder / f"{name}.json").write_text(json.dumps({"line": line, "command": command}))
    table1.write(folder / "table1.csv", [mnist.Result("sgd", 800, 1.0, 0, 40, 7, 1.75, 1.77, 3.0, "mean")])
    return folder


@pytest.fixture(scope="module")
def html(runs: Path, results: Path) -> Path:
    path = runs / "page" / "index.html"
    report.write([runs / name for name in ("network", "curves", "bandit")], results, path, digits.images().test)
    return path


def text_of(path: Path) -> str:
    """The page without the library in it."""
    return re.sub(r"<script>.*?</script>", "", path.read_text(), flags=re.DOTALL)


# --- what it says ----------------------------------------------------------------------------------------------------


def test_the_least_certain_digits_and_how_they_are_split(runs: Path, html: Path) -> None:
    model, test = figures.bayesian_in(runs / "network"), digits.images().test
    worst = model.predict(test.images, draws=20).entropy.argsort(descending=True)[:12]
    predicted = model.predict(test.images[worst], draws=500)
    cards = re.findall(
        r"says (\d), is (\d): <b class=(right|wrong)>.*?noise ([\d.]+), ignorance ([\d.]+)", text_of(html)
    )
    assert [int(card[1]) for card in cards] == test.labels[worst].tolist()
    assert [int(card[0]) for card in cards] == predicted.labels.tolist()
    for (said, label, verdict, noise, ignorance), entropy in zip(cards, predicted.entropy.tolist(), strict=True):
        assert float(noise) + float(ignorance) == pytest.approx(entropy, abs=0.011)
        assert verdict == ("right" if said == label else "wrong")


def steps_of(path: Path) -> list[dict[str, float]]:
    found = re.search(r"data-steps='([^']*)'", path.read_text())
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_the_places_of_the_slider(runs: Path, html: Path) -> None:
    model, test = figures.bayesian_in(runs / "network"), Examples(*digits.images().test)
    steps = steps_of(html)
    assert [step["fraction"] for step in steps] == list(report.FRACTIONS)
    assert len({step["error"] for step in steps}) > 1
    for step in steps:
        pruned = prune(model, step["fraction"])
        assert step["left"] == weights_left(pruned)
        assert step["error"] == error_percent(sparse(pruned), test)
        removed = (snr(model).log10() <= step["threshold"] + 1e-6).sum()
        assert removed == pytest.approx(snr(model).numel() - step["left"], abs=2)
        assert 10 ** step["threshold"] == pytest.approx(max(threshold(model, step["fraction"]), 1e-12))
    sizes = [step["bytes"] for step in steps]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 5


def test_every_table_and_figure_of_the_paper(results: Path, html: Path) -> None:
    text = text_of(html)
    for caption in (*page.FIGURES.values(), "Table 1: MNIST"):
        assert f"<h2>{caption.replace(chr(39), '&#x27;')}</h2>" in text
    assert "<td>SGD<td>40<td>not run<td>1.83<td>1.77 (1)<td>1.84<td>not run<td>1.88" in text
    assert text.count("<code>bbb reproduce &#x27;some&#x27; &lt;b&gt;</code>") == len(FIGURES)
    for name in FIGURES:
        line = json.loads((results / f"{name}.json").read_text())["line"]
        assert line.replace("'", "&#x27;") in text


def test_ours_and_theirs_are_in_each_figure(html: Path) -> None:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html.read_text(), flags=re.DOTALL)
    assert found
    drawn = json.loads(found[1])
    assert set(re.findall(r"<div class=plot id=([\w-]+)>", html.read_text())) == set(drawn)
    for name, figure in drawn.items():
        names = [trace["name"] for trace in figure["data"]]
        theirs = [each for each in names if "paper" in each]
        assert len(theirs) < len(names)
        assert theirs or name.endswith("snr"), name


def test_a_page_without_results(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "page.html"
    report.write([runs / "curves"], tmp_path / "nothing", path, digits.images().test)
    assert re.findall("<h2>(.*?)</h2>", text_of(path)) == ["It is unsure where it has seen nothing"]


def test_a_folder_that_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "mnist", lambda folder=None: digits.images())
    out = tmp_path / "report.html"
    monkeypatch.setattr(sys, "argv", ["bbb", "report", str(tmp_path), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("Error: ")
    assert "model.safetensors (bbb train)" in said
    assert not out.exists()


def test_the_command(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "mnist", lambda folder=None: digits.images())
    out = tmp_path / "report.html"
    command = ["report", str(runs / "curves"), str(runs / "bandit"), "--out", str(out), "--results", str(tmp_path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.output == f"{out}\n"
    assert len(re.findall("<h2>", text_of(out))) == 2


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("No Chromium on this machine: apt-get install chromium.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module", params=[(1200, "light"), (390, "dark")], ids=["desktop", "phone"])
def tab(request: pytest.FixtureRequest, browser: Any, html: Path) -> Iterator[Any]:
    """The page as it is when it has drawn itself; it must ask for nothing and complain about nothing."""
    width, scheme = request.param
    found = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found.set_default_timeout(120_000)
    complaints: list[str] = []
    found.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    found.on("request", lambda request: asked.append(request.url))
    found.goto(html.as_uri(), wait_until="commit")
    found.wait_for_selector("body[data-ready]")
    yield found
    assert complaints == []
    assert [url for url in asked if not url.startswith("data:")] == [html.as_uri()]
    found.close()


def test_every_picture_is_there(tab: Any) -> None:
    assert tab.locator(".plot").count() == 2 + 2 + 1 + 6  # of the network, the curves, the bandit and the paper
    drawn = "[...document.querySelectorAll('.plot')].map(plot => plot.querySelectorAll('.trace path').length)"
    assert min(tab.evaluate(drawn)) > 0
    assert tab.evaluate("[...document.images].every(image => image.naturalWidth === 28)")
    assert tab.evaluate("document.images.length") == 12


def test_it_fits_the_screen(tab: Any) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    widths = tab.evaluate("[...document.querySelectorAll('.plot svg')].map(svg => svg.clientWidth)")
    assert 0 < max(widths) <= tab.viewport_size["width"]


def test_the_slider_moves_the_numbers(tab: Any, html: Path) -> None:
    steps = steps_of(html)
    slider = tab.locator(".prune input")
    assert steps[int(slider.input_value())]["fraction"] == 0.95
    grey = []
    for place in (0, 5, len(steps) - 1):
        slider.fill(str(place))
        step = steps[place]
        assert tab.inner_text(".error") == f"{step['error']:.2f} %"
        assert tab.inner_text(".left") == f"{step['left']:,}"
        assert float(tab.inner_text(".fraction").split()[0]) == pytest.approx(100 * step["fraction"])
        assert tab.inner_text(".bytes").split()[0] == f"{step['bytes'] / 1e3:.0f}"
        colours = tab.evaluate("document.getElementById('run0-snr').data[0].marker.color")
        grey.append(colours.count("#9aa0a6"))
        assert tab.evaluate("document.getElementById('run0-prune').data.at(-1).x") == [
            pytest.approx(100 * step["fraction"])
        ]
    assert grey[0] < grey[1] < grey[2]


def test_light_and_dark(tab: Any) -> None:
    def colours() -> tuple[str, str]:
        return (
            tab.evaluate("getComputedStyle(document.body).backgroundColor"),
            tab.evaluate("getComputedStyle(document.querySelector('.plot text')).fill"),
        )

    dark = tab.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    before = colours()
    tab.click("#theme")
    after = colours()
    light, night = (after, before) if dark else (before, after)
    assert light == ("rgb(246, 247, 251)", "rgb(27, 31, 42)")
    assert night == ("rgb(18, 20, 27)", "rgb(232, 234, 242)")


# --- the demonstration -----------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "mnist", lambda folder=None: digits.images())
    monkeypatch.setattr(data, "mushroom", lambda folder=None: None)
    monkeypatch.setitem(table1.RECIPES, "bbb-mixture", digits.RECIPES["bbb-mixture"])
    for name, value in {"_UNITS": 8, "_EPOCHS": 2, "_CURVE_STEPS": 3}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(bandit, "run_all", lambda *_: points())


@pytest.mark.usefixtures("small")
def test_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["demo", "--folder", str(tmp_path / "demo"), "--results", str(tmp_path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    for number in range(1, 7):
        assert f"{number}/6" in result.output
    small = load_sparse(tmp_path / "demo" / "network" / "sparse.safetensors")
    error, size = (
        error_percent(small, Examples(*digits.images().test)),
        (tmp_path / "demo/network/sparse.safetensors").stat().st_size,
    )
    assert f"Without 95% of them: test error {error:.2f} %, {rich.filesize.decimal(size)} on disk." in result.output
    assert "Regret: 5 % greedy 300, 1 % greedy 300, greedy 300, Bayes by Backprop 300." in result.output
    path = tmp_path / "demo" / "index.html"
    assert str(path) in result.output
    first = path.read_bytes()
    headings = re.findall("<h2>(.*?)</h2>", text_of(path))
    assert headings[:2] == ["The digits it is least sure about", "Most weights can go"]
    assert headings[2:] == ["It is unsure where it has seen nothing", "It explores by itself"]

    # Again: nothing is trained or fitted twice, and the page is the same.
    monkeypatch.setattr(torch.optim.Adam, "step", None)
    path.unlink()
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert path.read_bytes() == first


@pytest.mark.usefixtures("small")
def test_curves_that_are_there_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[regression.Config] = []
    fit = regression.fit

    def once(config: regression.Config) -> regression.Curve:
        if fitted:
            raise KeyboardInterrupt
        fitted.append(config)
        return fit(config)

    monkeypatch.setattr(regression, "fit", once)
    with pytest.raises(KeyboardInterrupt):
        demo.curves(tmp_path, 0, iter)
    monkeypatch.setattr(regression, "fit", lambda config: fitted.append(config) or fit(config))
    demo.curves(tmp_path, 0, iter)
    assert [config.method for config in fitted] == ["bbb", "standard"]
    assert len(regression.read_curves(tmp_path / "curves" / report.CURVES)) == 2


def test_curves_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "some" / "curves.json"
    regression.write_curves(path, curves())
    for (config, curve), (was, before) in zip(regression.read_curves(path).items(), curves().items(), strict=True):
        assert config == was
        np.testing.assert_array_equal(curve.quantiles, before.quantiles)
        np.testing.assert_array_equal(curve.drawn, before.drawn)
        assert (curve.coverage50, curve.coverage90) == (before.coverage50, before.coverage90)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "bayesbackprop_paper.experiments.report", None)
    monkeypatch.delattr("bayesbackprop_paper.experiments.report")
    monkeypatch.setattr(sys, "argv", ["bbb", "report", "somewhere"])
    with pytest.raises(SystemExit):
        main()
    assert 'pip install "bayesbackprop[experiments]"' in capsys.readouterr().err
