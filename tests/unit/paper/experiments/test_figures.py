"""Figures 2, 3 and 4 of networks that take no time: what is drawn, what is said, and the page of both."""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import digits
from bayesbackprop._cli import app
from bayesbackprop.pruning import snr
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import figures, page, table1, table2
from bayesbackprop_paper.experiments.mnist import Config, Method
from bayesbackprop_paper.experiments.recipe import Schedule

pytestmark = pytest.mark.identities


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
            assert (": epoch" in result.stderr) == (name == "table1")  # the others show its networks
        yield folder, said


def test_what_is_quick_touches_no_result(quick: tuple[Path, dict[str, str]]) -> None:
    folder, said = quick
    assert [path.name for path in folder.iterdir()] == ["runs"]
    assert [path.name for path in (folder / "runs").iterdir()] == ["quick"]
    files = {path.name for path in (folder / "runs" / "quick").iterdir() if path.is_file()}
    assert files == {".lock", *(f"{name}.{suffix}" for name in QUICK for suffix in ("csv", "json", "png", "svg"))}
    for name in ("fig2", "fig3", "fig4"):
        about = json.loads((folder / "runs" / "quick" / f"{name}.json").read_text())
        assert about.keys() == {"line", "command", "commands", "version"}
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
        line = figures.fig2({config: tmp_path}, tmp_path / "results", config)
        expected = (
            f"Test error, 2x1200: Bayes by Backprop 2.00 % at epoch {epochs}, the paper's {theirs} and 1.32 % at 595"
        )
        assert line.startswith(expected)


def test_curves_of_methods_that_are_not_trained_again_stay(tmp_path: Path) -> None:
    def draw(method: Method, *errors: float) -> str:
        folder = tmp_path / method
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"test_error": error}) + "\n" for error in errors))
        recipe = Config("bbb-mixture", units=1200)
        return figures.fig2({Config(method, units=1200): folder}, tmp_path / "results", recipe)

    draw("bbb-mixture", 9.0, 8.0, 7.0)
    assert "SGD 5.00 % at epoch 2" in draw("sgd", 6.0, 5.0)
    said = draw("bbb-mixture", 4.0, 3.0, 2.0, 1.0)
    assert "SGD 5.00 % at epoch 2" in said
    assert "Bayes by Backprop 1.00 % at epoch 4" in said
    found = figures.read_csv(tmp_path / "results" / "fig2.csv")
    assert found["sgd"][:2].tolist() == [6, 5]
    assert found["bbb-mixture"].tolist() == found["bbb-mixture lowest"].tolist() == [4, 3, 2, 1]


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
    model = figures.bayesian_in(folder / "runs" / "quick" / "bbb-mixture-100-3epochs-seed0")
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
        picture, fold, line, command = (
            text.index(part)
            for part in (
                f"(results/{name}.png)\n\n",
                f'<details markdown="1">\n<summary>How it was made</summary>\n\n{said[name]}\n\n',
                f"\n\n{said[name]}\n\n",
                f"\n- `bbb reproduce {name} --quick`\n\n</details>\n",
            )
        )
        assert picture < fold < line < command
        assert "<details" not in text[line:command]
        assert (tmp_path / "results" / f"{name}.png").exists()
    for name in ("table1", "table2"):
        assert f"](results/{name}.png)\n" in text
        assert (tmp_path / "results" / f"{name}.png").exists()
    assert "| 2x100 | 98 % | 0 |" in text
    assert "|  | 2x100 | 2x400 | 2x800 | 2x1200 |\n" in text
    (tmp_path / "some").mkdir()
    for nothing in (tmp_path / "none", tmp_path / "some"):
        with pytest.raises(ValueError, match="'results' parameter of bbb reproduce page must be a folder that"):
            page.write(nothing, tmp_path)
    assert (tmp_path / "results.md").read_text() == text
    (tmp_path / "some" / "fig3.png").write_bytes(b"")
    text = page.write(tmp_path / "some", tmp_path).read_text()
    assert text.endswith("(results/fig3.png)\n")
