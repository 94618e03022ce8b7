"""The report holds what the files hold."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import digits
from bayesbackprop import sparse
from bayesbackprop._cli import app, main
from bayesbackprop.pruning import prune, snr, threshold, weights_left
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import figures, report
from bayesbackprop_paper.experiments.findings import TITLES
from bayesbackprop_paper.experiments.recipe import Examples, error_percent
from report_runs import steps_of, text_of, write_page, write_results, write_runs

pytestmark = pytest.mark.identities

FIGURES = {"fig2", "fig3", "fig4", "fig5", "fig6"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_results(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def html(runs: Path, results: Path) -> Path:
    return write_page(runs, results)


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
    assert re.findall("<h2>(.*?)</h2>", text)[-len(TITLES) :] == list(TITLES.values())
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    assert "<td>SGD<br>40 epochs<td>not run<br>paper 1.83<td>1.77<br>paper 1.84<td>not run<br>paper 1.88" in text
    assert "<td>SGD<br>40 epochs<td>not run<td>0.0600<br>0.50 %<td>not run" in text
    assert text.count("<code>bbb reproduce &#x27;some&#x27; &lt;b&gt;</code>") == len(TITLES)
    for name in FIGURES:
        line = json.loads((results / f"{name}.json").read_text())["line"]
        assert line.replace("'", "&#x27;") in text


def test_the_picture_is_before_the_words_and_provenance_is_under_a_fold(html: Path) -> None:
    sections = re.findall(r"<section .*?</section>", text_of(html), flags=re.DOTALL)
    assert len(sections) == 4 + len(TITLES)
    for section in sections:
        assert re.search("class=(plot|cards|prune)", section).start() < section.index("<p>")  # type: ignore[union-attr]
        running = re.sub("<details>.*?</details>", "", section, flags=re.DOTALL)
        assert not re.search(r"epochs-seed|\d+epochs|bbb reproduce|[Vv]ersion", running)


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


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "bayesbackprop_paper.experiments.report", None)
    monkeypatch.delattr("bayesbackprop_paper.experiments.report")
    monkeypatch.setattr(sys, "argv", ["bbb", "report", "somewhere"])
    with pytest.raises(SystemExit):
        main()
    assert 'pip install "bayesbackprop[paper]"' in capsys.readouterr().err
