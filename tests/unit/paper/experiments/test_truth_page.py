"""The page of truth: whatever rows there are, and nothing else."""

import json
from pathlib import Path

import pytest

from bayesbackprop_paper.experiments import nuts, truth_page
from commands import bbb

pytestmark = pytest.mark.identities


def rows(*given: tuple[str, str, int, dict[str, float]]) -> str:
    about = {"seconds": 1, "command": "bbb truth this", "version": "0"}
    entries = [
        {"task": task, "method": method, "seed": seed, "figures": of, **about} for task, method, seed, of in given
    ]
    return json.dumps({str(number): entry for number, entry in enumerate(entries)})


def test_means_spreads_and_the_best_of_each_row(tmp_path: Path) -> None:
    (tmp_path / "ood.json").write_text(
        rows(
            ("clothes", "a", 0, {"AUROC": 0.5, "NLL": 1.0, "in 90 %": 0.9}),
            ("clothes", "a", 1, {"AUROC": 0.7, "NLL": 2.0, "in 90 %": 0.8}),
            ("clothes", "b", 0, {"AUROC": 0.55, "NLL": 12.345}),
        )
    )
    text = truth_page.write(tmp_path, tmp_path / "docs").read_text()
    assert "## Inputs unlike the training data\n" in text
    assert "Best mean: a in 2 of 2 rows." in text
    expected = """\
| task | figure | runs | a | b |
|---|---|---|---|---|
| clothes | AUROC | 1 to 2 | **0.6** ± 0.14 | 0.55 |
| clothes | NLL | 1 to 2 | **1.5** ± 0.71 | 12.35 |
| clothes | in 90 % | 2 | 0.85 ± 0.071 |  |

Commands:

- `bbb truth this`
"""
    assert text.endswith(expected.replace("12.35", f"{12.345:.2f}"))


def test_sections_come_in_their_order_and_unknown_ones_last(tmp_path: Path) -> None:
    for name in ("aaa", "uci", "defaults"):
        (tmp_path / f"{name}.json").write_text(rows(("t", "m", 0, {"NLL": 1.0})))
    text = truth_page.write(tmp_path, tmp_path).read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## All defaults beside plain training", "## Tables of numbers, beside other methods", "## aaa"]
    assert "Best mean" not in text  # of one method
    assert "0 of 0 " not in text


def test_networks_have_a_section_with_what_their_rows_say(tmp_path: Path) -> None:
    figures = {"error %": 1.0, "NLL": 0.1, "ECE %": 0.5}
    better = {**figures, "NLL": 0.05}
    (tmp_path / "networks.json").write_text(
        rows(("MNIST", "plain", 0, figures), ("MNIST", "ours, diagonal", 0, better))
    )
    (tmp_path / "compression.json").write_text(rows(("MNIST", "pruned", 0, {"error % at 100x": 0.9})))
    text = truth_page.write(tmp_path, tmp_path).read_text()
    assert "MNIST: of the single networks, ours, diagonal has the lowest NLL and plain the lowest ECE;" in text
    assert "| MNIST | NLL | 1 | 0.1 | **0.05** |" in text
    assert "MNIST, pruned, the smallest network with 1 % error or less: 100x." in text


def test_of_nothing_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'results' parameter of bbb truth page"):
        truth_page.write(tmp_path, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_a_picture_keeps_its_curves_and_fits_each_method_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fitted = []

    def exact(problem: nuts.Problem, seed: int) -> nuts.Found:
        fitted.append(seed)
        return nuts.Found(problem.exact)

    monkeypatch.setitem(nuts.METHODS, "exact", exact)
    for _ in range(2):
        result = bbb("truth", "picture", "--method", "exact", "--results", tmp_path)
        assert result.exit_code == 0, result.output
    assert fitted == [0]
    curve = json.loads((tmp_path / "curves" / "nuts.json").read_text())["methods"]["exact"]
    assert curve["sd"] == pytest.approx(nuts.regression().exact["sd"].tolist(), abs=1e-4)
    result = bbb("truth", "page", "--results", tmp_path, "--docs", tmp_path / "docs")
    assert result.exit_code == 0, result.output
    assert "![The exact posterior](truth/nuts.png)" in (tmp_path / "docs" / "truth.md").read_text()
    assert (tmp_path / "docs" / "truth" / "nuts.png").read_bytes() == (tmp_path / "nuts.png").read_bytes()
