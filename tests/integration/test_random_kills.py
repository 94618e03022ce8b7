"""Commands that are killed at random moments, and run again, end as if they had not been: see `kill_runs`."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import kill_runs

pytestmark = pytest.mark.equivalence

# A start of torchrun takes longer than all kills of the others.
KILLS = {case: 2 if case.startswith("torchrun") else 3 for case in kill_runs.CASES}


@pytest.mark.parametrize("case", kill_runs.CASES)
def test_a_run_ends_as_if_it_had_not_been_killed(case: str) -> None:
    if case == "search":
        pytest.importorskip("optuna")
    if case.startswith("torchrun") and not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("This torch was built without gloo.")
    seed = random.SystemRandom().randrange(10**6)
    command = [sys.executable, kill_runs.__file__, "--seed", str(seed), "--kills", str(KILLS[case]), case]
    here = os.pathsep.join([str(Path(kill_runs.__file__).parent), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{case} (seed {seed}): {KILLS[case]} kills" in ended.stdout
