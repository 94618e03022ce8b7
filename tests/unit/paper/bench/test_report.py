"""The rows of a benchmark survive their file."""

from pathlib import Path

import pytest

from bayesbackprop_paper.bench import report

pytestmark = pytest.mark.identities


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
