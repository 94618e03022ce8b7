"""The scripts of examples/ run as a user runs them, and what they print is what their page says of them."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from repository import ROOT

pytestmark = pytest.mark.learning

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "with_pytorch.md").read_text()


def run(folder: Path, name: str, *arguments: str, warnings: str = "error") -> str:
    """What a script prints, run in ``folder``, without a network and on one core."""
    command = [sys.executable, "-W", warnings, str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_twice(folder: Path, name: str) -> str:
    """What a script prints every time; it leaves nothing behind."""
    first, again = run(folder, name, "--seed", "0"), run(folder, name, "--seed", "0")
    assert first == again
    assert not list(folder.iterdir())
    return first


def numbers(pattern: str, output: str) -> list[float]:
    """The numbers that the groups of ``pattern`` match, in the order of the lines."""
    found = [float(number) for match in re.finditer(pattern, output) for number in match.groups()]
    assert found, f"no '{pattern}' in\n{output}"
    return found


def test_plain_pytorch(tmp_path: Path) -> None:
    outputs = run_twice(tmp_path, "plain_pytorch.py"), run(tmp_path, "plain_pytorch.py", "--seed", "1")
    assert outputs[0] != outputs[1]
    for output in outputs:
        assert "193 of 193 weights are Bayesian." in output
        (covered,) = numbers(r"5-95 % band: ([\d.]+)%", output)
        assert 80 < covered < 97
        assert numbers(r"noise ([\d.]+)", output) == [0.05] * 4  # on the data and off it
        unknown = numbers(r"not known ([\d.]+)", output)
        assert unknown == sorted(unknown)
        assert unknown[0] < 0.05  # on the data less than the noise
        assert unknown[-1] > 10 * unknown[0]


def test_lightning_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    def train(folder: str, *arguments: str) -> str:  # Lightning itself warns, of what torch will change
        return run(tmp_path, "lightning_module.py", "--folder", folder, *arguments, warnings="default")

    whole, stopped, resumed = train("whole"), train("parts", "--epochs", "10"), train("parts")
    accuracy, unknown = numbers(r"accuracy ([\d.]+)%, not known ([\d.]+)", whole)
    (of_torn,) = numbers(r"torn digits: not known ([\d.]+)", whole)
    assert accuracy > 88
    assert of_torn > 2 * unknown
    assert stopped != whole
    assert resumed == whole
    one, two = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "parts"))
    assert int(one["state_dict"]["free_energy.step"]) == one["global_step"] == 40 * 13
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(two[part], one[part], rtol=0, atol=0)


def test_hugging_face(tmp_path: Path) -> None:
    output = run_twice(tmp_path, "hugging_face.py")
    assert re.search(r"transformer\.classifier\.weight .* Normal", output)
    assert re.search(r"encoder\.layer\.0\.output\.dense\.weight .* deterministic .* not selected", output)
    assert "loaded: same posterior True, same mean True" in output
    assert numbers(r"accuracy ([\d.]+)%", output)[0] > 90
    good, bad, new = numbers(r"(\d+)% good", output)
    assert good > 90
    assert bad < 10
    assert bad < new < good
    *known, unknown = numbers(r"not known ([\d.]+)", output)
    assert unknown > 5 * max(known)


def test_pretrained(tmp_path: Path) -> None:
    output = run_twice(tmp_path, "pretrained.py")
    assert "\n645 of 5,445 weights are Bayesian." in output
    assert "\n5,445 of 5,445 weights are Bayesian." in output
    plain, head, around = re.findall(r"accuracy.*", output)
    accuracies, own, others = zip(*(numbers(r"([\d.]+)%", line) for line in (plain, head, around)), strict=True)
    assert min(accuracies) > 80
    assert others[0] > 50  # sure of what it cannot know
    assert max(others[1:]) < others[0] / 2
    assert own[1] > 3 * others[1]  # while it is of its own digits


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_every_script_whole() -> None:
    included = re.findall(r'^ *--8<-- "(.+)"$', PAGE, flags=re.MULTILINE)  # a formatter of Markdown may break it
    assert sorted(included) == [str(script.relative_to(ROOT)) for script in SCRIPTS]
    for script in SCRIPTS:
        assert f'"{script.name}"' in Path(__file__).read_text(), f"no test runs {script.name}"


def test_the_page_quotes_the_scripts() -> None:
    """Each short piece of code of the page is a run of lines of a script."""
    pieces = re.findall(r"^```py\n(.*?)\n```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(pieces) >= 4
    for piece in pieces:
        assert any(_quotes(piece, script.read_text()) for script in SCRIPTS), f"in no script of examples/:\n{piece}"


def _quotes(piece: str, script: str) -> bool:
    lines, many = script.splitlines(), len(piece.splitlines())
    runs = (lines[start : start + many] for start in range(len(lines)))
    return any(textwrap.dedent("\n".join(each)) == piece for each in runs)
