"""``bbb predict`` adds columns to a table, on the screen or in a file."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bayesbackprop.tables import fit_table
from commands import bbb

pytestmark = [pytest.mark.identities, pytest.mark.filterwarnings("default", "ignore:The free energy may")]

FRAME = pd.DataFrame({"size": np.arange(40) / 3, "price": np.arange(40) * 1.5})
ADDED = ["mean", "sd", "q05", "q50", "q95", "epistemic"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.bbb"
    fit_table(FRAME, "price", epochs=2, draws=3).save(path)
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "new.csv").write_text("id,size\n007,1.50\n008,\n")
    return tmp_path / "new.csv"


def test_the_table_goes_on_as_it_was(model: Path, table: Path) -> None:
    result = bbb("predict", model, table)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == ",".join(["id", "size", *ADDED])
    assert lines[1].startswith("007,1.50,")
    assert result.stderr == "Warning: Columns that training had not are ignored: ['id'].\n"


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.parquet"])
def test_every_kind_of_file_is_written(name: str, model: Path, table: Path) -> None:
    out = table.parent / name
    assert bbb("predict", model, table, "--output", out).exit_code == 0
    separator = "\t" if name.endswith("tsv") else ","
    found = pd.read_parquet(out) if name.endswith("parquet") else pd.read_csv(out, sep=separator)
    expected = pd.read_csv(io.StringIO(bbb("predict", model, table).stdout))
    pd.testing.assert_frame_equal(found[ADDED], expected[ADDED])


def test_mistakes_are_said_and_nothing_is_written(model: Path, table: Path) -> None:
    (table.parent / "other.csv").write_text("width\n3\n")
    before = sorted(table.parent.iterdir())
    for command, says in (
        ([model, table, "--output", table.parent / "out.xlsx"], "ends in .csv, .tsv or .parquet"),
        ([model, table, "--output", table], "another file than the model and the table"),
        ([model, table.parent / "other.csv"], "Got one without ['size']"),
        ([table, table], "must be a file of bayesbackprop"),
        ([model, table.parent / "nowhere.csv"], "No such file"),
    ):
        result = bbb("predict", *command)
        assert result.exit_code == 1
        assert says in str(result.exception)
    assert sorted(table.parent.iterdir()) == before
