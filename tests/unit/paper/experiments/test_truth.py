"""Rows of figures that are kept as soon as they are there."""

import json
from pathlib import Path
from typing import Any

import pytest

from bayesbackprop_paper.experiments.truth import Run, collect, entries, table, write_table

pytestmark = pytest.mark.identities

RUNS = [Run("moons", method, seed) for method in ("a", "b") for seed in (0, 1)]


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    path, measured = tmp_path / "nuts.json", []

    def measure(run: Run) -> dict[str, float]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(run)
        return {"error": len(measured) / 4}

    with pytest.raises(KeyboardInterrupt):
        collect(path, RUNS, measure, "bbb truth nuts")
    assert list(entries(path)) == ["moons/a/0", "moons/a/1", "moons/b/0"]
    found = collect(path, RUNS, lambda run: {"error": 9.0, "new": 1.0}, "bbb truth nuts again")
    assert [entry["figures"]["error"] for entry in found.values()] == [0.25, 0.5, 0.75, 9.0]
    assert found["moons/b/1"]["command"] == "bbb truth nuts again"


def test_the_table_has_means_and_spreads(tmp_path: Path) -> None:
    assert entries(tmp_path / "none.json") == {}
    found = {
        str(number): {"task": "moons", "method": "a", "figures": {"error": number}, "seconds": 3} for number in (1, 2)
    }
    expected = "| moons | seeds | error | seconds |\n|---|---|---|---|\n| a | 2 | 1.5 (1 to 2) | 3 |\n"
    assert write_table(tmp_path / "x.json", found) == table(found) == expected
    assert (tmp_path / "x.md").read_text() == expected


GOOD = {
    "task": "moons",
    "method": "a",
    "seed": 0,
    "figures": {"error": 0.5},
    "seconds": 1.5,
    "command": "bbb truth nuts",
    "version": "0",
}


@pytest.mark.parametrize("field", GOOD)
def test_an_entry_without_one_of_its_fields_is_refused(field: str, tmp_path: Path) -> None:
    path = tmp_path / "nuts.json"
    path.write_text(json.dumps({"moons/a/0": GOOD}))
    assert entries(path) == {"moons/a/0": GOOD}
    path.write_text(json.dumps({"moons/a/0": {name: value for name, value in GOOD.items() if name != field}}))
    with pytest.raises(ValueError, match=f"whose entry 'moons/a/0' has no such {field}"):
        collect(path, RUNS, lambda _: {}, "bbb truth nuts")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", "must be a file of JSON"),
        ("[]", "with an entry for each run"),
        (json.dumps({"moons/a/0": 1}), "no such fields"),
        (json.dumps({"moons/a/0": {**GOOD, "figures": {"error": "none"}}}), "no such figures"),
        (json.dumps({"moons/a/0": {**GOOD, "seed": "0"}}), "no such seed"),
    ],
)
def test_a_file_that_was_not_written_here_is_refused_and_left_alone(content: Any, error: str, tmp_path: Path) -> None:
    path = tmp_path / "nuts.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=error):
        collect(path, RUNS, lambda _: {}, "bbb truth nuts")
    assert path.read_text() == content
