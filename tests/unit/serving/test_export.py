"""The log as a table."""

import csv
from pathlib import Path

import pytest

from commands import bbb
from services import decided, rewarded, serving, settings_in

pytestmark = pytest.mark.identities


def test_the_table_has_what_off_policy_evaluation_needs(tmp_path: Path) -> None:
    settings, output = settings_in(tmp_path), tmp_path / "log.csv"
    with serving(settings) as client:
        rewards = rewarded(client, 5)
        masked = decided(client, mask=[False, True])
        done = bbb("serve", "export", output, "--log", settings.log)
        assert done.exit_code == 0, done.output
        assert "5 decisions" in done.output
        with output.open() as stream:
            rows = list(csv.DictReader(stream))
        assert [(row["id"], float(row["reward"])) for row in rows] == rewards
        contexts, arms = [f"context_{n}" for n in range(3)], range(2)
        assert [*rows[0]] == [
            *("id", "time", *contexts, "action", "reward", "propensity"),
            *(f"probability_{n}" for n in arms),
            *(f"allowed_{n}" for n in arms),
        ]
        for row in rows:
            assert float(row["propensity"]) == float(row[f"probability_{row['action']}"]) > 0
            assert (row["allowed_0"], row["allowed_1"]) == ("1", "1")
        assert bbb("serve", "export", output, "--log", settings.log, "--waiting").exit_code == 0
        with output.open() as stream:
            *_, last = csv.DictReader(stream)
        assert (last["id"], last["reward"], last["allowed_0"], last["action"]) == (masked["id"], "", "0", "1")


def test_a_log_that_there_is_not_is_refused(tmp_path: Path) -> None:
    done = bbb("serve", "export", tmp_path / "a.csv", "--log", tmp_path / "none.sqlite")
    assert done.exit_code == 1
    assert "a log that bbb serve wrote" in str(done.exception)
    assert not (tmp_path / "none.sqlite").exists()
