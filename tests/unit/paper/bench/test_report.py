"""The rows of a benchmark survive their file."""

from dataclasses import replace
from pathlib import Path

import pytest

from bayesbackprop_paper.bench import report

pytestmark = pytest.mark.identities


def test_a_row_that_was_left_out_survives_too_and_is_shown_with_its_reason(tmp_path: Path) -> None:
    run = report.this_run("networks", "bbb bench networks", threads=1, rounds=2, seed=0)
    rows = [
        report.Row(run, "plain", "plain loss", "LSTM", None, 4, 2.0, (1.0, 3.0)),
        report.Row(run, "other", "left out: it has no LSTM", "LSTM", None, 4, against="plain"),
    ]
    report.write_json(rows, tmp_path / "rows.json")
    assert report.read_json(tmp_path / "rows.json") == rows
    text = report.page([report.section(rows, [report.Picture("what it shows", "page/rows.png")])])
    assert "### LSTM, batch 4\n\n| what | how | ms | middle half | to |" in text
    assert "| other | left out: it has no LSTM |  |  | plain |" in text
    assert "![what it shows](page/rows.png)" in text


def test_each_table_has_the_columns_that_say_something_about_it() -> None:
    run = report.this_run("paths", "bbb bench paths", threads=1, rounds=2, seed=0)
    timed = report.Row(run, "plain", "", "1-1", 1, 1, 2.0, (1.0, 3.0))
    rows = [
        replace(timed, table="first", memory=1.25),
        replace(timed, table="second", limit=0.5, gigaflops=90.0, gigabytes=8.0),
        replace(timed, table="second", limit=0.75, gigaflops=110.0, gigabytes=8.0),
        replace(timed, table="third", megabytes=300.0),
    ]
    text = report.page([report.section(rows, [])])
    assert "### first\n\n| what | how | ms | middle half | memory |" in text
    assert "### second\n\n| what | how | ms | middle half | limit, ms |" in text
    assert "### third\n\n| what | how | ms | middle half | peak, MB |" in text
    assert "90.0 to 110 GFLOP/s in a matrix product, and 8.00 GB/s" in text


def test_json_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    run = report.this_run("step", "bbb bench step", threads=1, rounds=2, seed=0)
    row = report.Row(run, "sgd", "", "1-1-1", 1, 1, 1.0, (1.0, 1.0))
    report.write_json([row], path)
    before = path.read_text()
    assert report.read_json(path) == [row]

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(report.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        report.write_json([row, row], path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
