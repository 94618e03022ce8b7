"""The scripts in examples/ run as they are, warnings are errors, and what they print is what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.learning

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, folder: Path, *options: str) -> str:
    """What a script prints, in an empty folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # Not ours: what torch and Lightning say of each other.
    command = [sys.executable, "-W", "error::UserWarning:bayesbackprop", str(EXAMPLES / name), *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, text
    return found


def test_every_script_is_tested_and_on_the_page() -> None:
    page = (EXAMPLES.parent / "docs" / "with_pytorch.md").read_text()
    for script in EXAMPLES.glob("*.py"):
        assert script.name in Path(__file__).read_text()
        assert f'--8<-- "examples/{script.name}"' in page
        assert '"--seed"' in script.read_text()


def test_plain_pytorch(tmp_path: Path) -> None:
    said = run("plain_pytorch.py", tmp_path)
    (band,) = numbers(r"5-95 % band: ([\d.]+)%", said)
    assert 85 < band < 97
    noise, unknown = numbers(r"noise ([\d.]+)", said), numbers(r"not known ([\d.]+)", said)
    assert noise == [0.05] * 4
    assert unknown == sorted(unknown)
    assert unknown[-1] > 10 * unknown[0]
    assert run("plain_pytorch.py", tmp_path, "--epochs", "3") == run("plain_pytorch.py", tmp_path, "--epochs", "3")


def test_lightning_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    script = "lightning_module.py"
    run(script, tmp_path, "--epochs", "4", "--folder", "stopped")
    stopped = run(script, tmp_path, "--epochs", "12", "--folder", "stopped")
    assert stopped == run(script, tmp_path, "--epochs", "12", "--folder", "whole")
    (accuracy,) = numbers(r"accuracy ([\d.]+)%", stopped)
    assert accuracy > 75
    digits, torn = numbers(r"not known ([\d.]+) nats", stopped)
    assert torn > digits


def test_hugging_face(tmp_path: Path) -> None:
    said = run("hugging_face.py", tmp_path)
    (accuracy,) = numbers(r"accuracy ([\d.]+)%", said)
    assert accuracy > 90
    good, bad, never_seen = numbers(r"not known ([\d.]+) nats", said)
    assert never_seen > 3 * max(good, bad)
    assert "same posterior True, same mean True" in said


def test_pretrained(tmp_path: Path) -> None:
    said = run("pretrained.py", tmp_path)
    accuracy = numbers(r"accuracy ([\d.]+)%", said)
    assert min(accuracy) > 70
    plain, last, whole = numbers(r"of ([\d.]+)% of the others", said)
    assert max(last, whole) < plain
