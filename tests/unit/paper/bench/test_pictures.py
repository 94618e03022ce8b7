"""A picture for a run shows its rows: bars of ratios, or curves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bayesbackprop_paper.bench import pictures, report

pytestmark = pytest.mark.identities

RUN = report.this_run("paths", "bbb bench paths", threads=1, rounds=2, seed=0)
ROW = report.Row(RUN, "plain", "", "2-2-2", 2, 2, 2.0, (1.0, 3.0), table="first")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures, before they are closed."""
    kept: list[Any] = []

    def finish(figure: Any, *arguments: Any, **options: Any) -> str:
        kept.append(figure)
        return real(figure, *arguments, **options)

    real = pictures.finish
    monkeypatch.setattr(pictures, "finish", finish)
    return kept


def test_a_bar_for_each_row_that_has_a_ratio(shown: list[Any], tmp_path: Path) -> None:
    rows = [
        ROW,
        replace(ROW, name="bayesbackprop", ratio=1.5, against="plain"),
        replace(ROW, name="IVON", ratio=2.5, against="plain"),
        replace(ROW, name="torchbnn", note="left out: it has no LSTM", milliseconds=None, quartiles=None),
        replace(ROW, name="passes", ratio_passes=1.0, table="second"),
        replace(ROW, name="bayesbackprop", ratio_passes=0.25, table="second"),
        replace(ROW, table="third, which has no ratios"),
    ]
    (picture,) = pictures.draw(rows, tmp_path / "page", "paths")
    assert picture.file == "page/paths.png"
    assert (tmp_path / picture.file).read_bytes().startswith(b"\x89PNG")
    (axes,) = shown[0].axes
    assert [bar.get_x() + bar.get_width() for bar in axes.patches] == pytest.approx([1.5, 2.5, 0.25])
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["first", "bayesbackprop", "IVON", "second", "bayesbackprop"]
    assert {text.get_text() for text in axes.texts} == {"1.50", "2.50", "0.25"}
    assert [text.get_text() for text in shown[0].legends[0].get_texts()] == ["bayesbackprop", "other libraries"]


def test_curves_of_times_limits_and_ratios_for_each_axis(shown: list[Any], tmp_path: Path) -> None:
    rows: list[report.Row] = []
    for axis, field in (("units", "units"), ("draws", "draws")):
        for place in (10, 100):
            shared: dict[str, Any] = {"axis": axis, field: place, "milliseconds": 0.2 * place}
            rows.append(replace(ROW, **shared, limit=0.1 * place))
            rows.append(replace(ROW, **shared, name="bayesbackprop", limit=0.15 * place, ratio=1.0, against="plain"))
    found = pictures.draw(rows, tmp_path, "growth")
    assert [picture.file for picture in found] == [f"{tmp_path.name}/growth-{axis}.png" for axis in ("units", "draws")]
    assert {path.name for path in tmp_path.iterdir()} == {"growth-units.png", "growth-draws.png"}
    left, right = shown[0].axes
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in left.lines}
    assert curves == {
        "plain PyTorch": ([10, 100], [2.0, 20.0]),
        "plain PyTorch, this machine's limit": ([10, 100], [1.0, 10.0]),
        "bayesbackprop": ([10, 100], [2.0, 20.0]),
        "bayesbackprop, this machine's limit": ([10, 100], [1.5, 15.0]),
    }
    assert [list(line.get_ydata()) for line in right.lines[:2]] == [[1.0, 1.0], pytest.approx([1.5, 1.5])]
