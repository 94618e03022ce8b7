"""The pages of docs: their examples run, and the results are those that were measured."""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bayesbackprop._cli import app
from bayesbackprop._version import __version__
from bayesbackprop_paper.experiments import defaults, mnist, page, table1, truth, truth_page
from repository import ROOT

pytestmark = pytest.mark.identities


def test_every_row_of_table_1_can_be_trained_again() -> None:
    entries = json.loads((ROOT / "results" / "table1.json").read_text())
    table = table1.read(ROOT / "results" / "table1.csv")
    rows = {(row.method, row.units, row.temperature, row.seed, row.epochs) for row in table}
    configs = {name: mnist.configuration(entry) for name, entry in entries.items()}
    assert {name: table1.name_of(config) for name, config in configs.items()} == {name: name for name in entries}
    assert {(each.row, each.units, each.temperature, each.seed, each.epochs) for each in configs.values()} == rows
    assert {entry["version"] for entry in entries.values()} == {__version__}


def test_the_results_page_is_what_was_measured(tmp_path: Path) -> None:
    written = page.write(ROOT / "results", tmp_path)
    assert written.read_text() == (ROOT / "docs" / "results.md").read_text(), "run bbb reproduce page"
    pictures = list((tmp_path / "results").iterdir())
    assert {picture.name for picture in pictures} == {path.name for path in (ROOT / "docs" / "results").iterdir()}
    for picture in pictures:
        assert picture.read_bytes() == (ROOT / "docs" / "results" / picture.name).read_bytes()


def test_the_benchmarks_page_is_what_was_measured(tmp_path: Path) -> None:
    """In the order of `make bench`."""
    (recipe,) = re.findall(r"bbb bench report \$\(foreach what,([a-z ]+),", (ROOT / "Makefile").read_text())
    files = [path for what in recipe.split() for path in sorted((ROOT / "results" / "bench").glob(f"{what}*.json"))]
    out = tmp_path / "benchmarks.md"
    result = CliRunner().invoke(app, ["bench", "report", *map(str, files), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_text() == (ROOT / "docs" / "benchmarks.md").read_text(), "run bbb bench report"
    pictures = {path.name for path in (tmp_path / "benchmarks").iterdir()}
    assert pictures == {path.name for path in (ROOT / "docs" / "benchmarks").iterdir()}


def test_the_page_of_truth_is_what_was_measured(tmp_path: Path) -> None:
    written = truth_page.write(ROOT / "results" / "truth", tmp_path)
    assert written.read_text() == (ROOT / "docs" / "truth.md").read_text(), "run bbb truth page"
    for picture in (tmp_path / "truth").iterdir():
        assert picture.read_bytes() == (ROOT / "docs" / "truth" / picture.name).read_bytes()


def test_the_recipe_says_what_was_measured_of_the_defaults() -> None:
    found = defaults.verdicts(truth.entries(ROOT / "results" / "truth" / "defaults.json"))
    measured = re.findall(r"on (\d of 8 tasks)", found)
    assert measured == re.findall(r"on (\d of 8 tasks)", (ROOT / "docs" / "choosing.md").read_text())


@pytest.mark.parametrize(
    ("method", "figure", "digits"),
    [
        ("conditional", "F", 1),
        ("diagonal", "F", 1),
        ("conditional", "sd gap", 3),
        ("diagonal", "sd gap", 3),
        ("conditional", "mean out", 3),
        ("refine (MCMC)", "mean out", 3),
    ],
)
def test_the_recipe_says_what_was_measured_of_families(method: str, figure: str, digits: int) -> None:
    rows = truth.entries(ROOT / "results" / "truth" / "nuts.json").values()
    figures = [row["figures"][figure] for row in rows if (row["task"], row["method"]) == ("regression", method)]
    shown = f"{fmean(figures):.{digits}f}".replace("-", "\N{MINUS SIGN}")
    assert re.search(rf" {shown} ", (ROOT / "docs" / "choosing.md").read_text()), shown


def test_the_comparison_says_what_was_measured() -> None:
    table = (ROOT / "docs" / "comparison.md").read_text().split("## Speed")[1]
    measured = (ROOT / "docs" / "benchmarks.md").read_text().split("### 784-400-400-10, batch 128")[1].split("###")[0]
    rows = dict(re.findall(r"^\| ([\w -]+) \| ([\d.]+) \|$", table, re.MULTILINE))
    assert rows == {name: re.findall(rf"^\| {name} \|[^|]+\| ([\d.]+) \|", measured, re.MULTILINE)[0] for name in rows}
    assert len(rows) == 7


def examples(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


# This one needs a service: test_serving.py runs it.
SERVED = "howto_web_service.md"
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if examples(path) and path.name != SERVED]


def test_pages_have_examples() -> None:
    assert len(PAGES) >= 4


def test_the_papers_agent_of_the_page_is_thompson_sampling_alone() -> None:
    """Its first decision is the best by the mean of two drawn networks; nothing is added to it."""
    (example,) = (each for each in examples(ROOT / "docs" / "bandits.md") if "optimism=None" in each)
    recipe = example.split("action = paper")[0]
    found: list[list[int]] = [[], []]
    for context in torch.randn(20, 3, generator=torch.Generator().manual_seed(0)):
        names: dict[str, Any] = {}
        exec(recipe, names)
        agent = names["paper"]
        rows = torch.cat([context.expand(2, -1), torch.eye(2)], 1)
        with torch.no_grad():
            drawn = sum(agent.model.draw(0, k)(rows) for k in range(2))
        found[0].append(agent.act(context))
        found[1].append(int(drawn.argmax()))
    assert found[0] == found[1]
    assert set(found[0]) == {0, 1}
    assert (agent.temperature, agent.alarm, agent.halving, agent.memory) == (1, None, None, 4096)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_examples_of_the_docs_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for example in examples(path):
        exec(example, {})
