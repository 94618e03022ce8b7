"""Commands that are killed at random moments, and run again, end as if they had not been: see `kill_runs`."""

import random
from pathlib import Path

import pytest
import torch.distributed as dist

import kill_runs
from processes import run_script

pytestmark = pytest.mark.equivalence

KILLS = 3


@pytest.mark.parametrize("case", kill_runs.CASES)
def test_a_run_ends_as_if_it_had_not_been_killed(case: str, tmp_path: Path) -> None:
    if case == "search":
        pytest.importorskip("optuna")
    if case.startswith("torchrun") and not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("This torch was built without gloo.")
    seed = random.SystemRandom().randrange(10**6)
    said = run_script(kill_runs.__file__, "--seed", seed, "--kills", KILLS, "--folder", tmp_path, case, timeout=550)
    assert f"{case} (seed {seed}): {KILLS} kills" in said
