"""The kernels in C under the compiler's sanitizers, and the same numbers from every instruction set."""

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kernel_edges
from kernel_builds import INSTRUCTION_SETS, SANITIZERS, SOURCES, build, runs_here, sanitizer_environment
from repository import ROOT

pytestmark = pytest.mark.equivalence

# Results that are not of the size of 1.
GRADIENTS = ("draw", "backward", "redraw", "again", "last", "layers")

EDGES = ROOT / "tests/kernel_edges.py"

# One element more than the arrays have.
WRONG = """
import sys
sys.path.insert(0, sys.argv[1])
import kernel_edges, numpy
cpu = kernel_edges.extension(sys.argv[2])
given = kernel_edges.parameter(33, numpy.float32, "NORMAL", False, "none")
cpu.variance(kernel_edges.table(cpu, [given | {"n": 34}]), 1, 0, 0, 0, 0.0)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return sanitizer_environment(tmp_path_factory.mktemp("sanitizers"))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds the kernels with sanitizers for an instruction set, once."""
    folder = tmp_path_factory.mktemp("builds")
    return functools.cache(lambda name: build(folder / f"{name}.so", *SANITIZERS, *INSTRUCTION_SETS[name][0]))


def execute(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


def test_the_kernels_keep_to_their_memory_and_every_instruction_set_gives_the_same(
    environment: dict[str, str], sanitized: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each set alone. The random words are the same bits; what is computed from them is the same to rounding."""
    found = {}
    for name in INSTRUCTION_SETS:
        if runs_here(name):
            done = execute([str(EDGES), str(sanitized(name)), str(tmp_path / f"{name}.npz")], environment)
            assert done.returncode == 0, f"{name}: {done.stderr}"
            found[name] = dict(np.load(tmp_path / f"{name}.npz"))
    wrong = execute(["-c", WRONG, str(EDGES.parent), str(sanitized("plain"))], environment)
    assert "AddressSanitizer: heap-buffer-overflow" in wrong.stderr, "the sanitizers see nothing"
    plain = found.pop("plain")
    sizes = sum(len(kernel_edges.sizes_of(kind)) + 1 for kind in kernel_edges.PRIORS)
    of_batches = 2 * 4 * len(kernel_edges.WIDTHS) + 2 * 3  # biases and functions; actions and likelihoods
    of_parameters = len(kernel_edges.FORMS) * sizes * 12
    assert len(plain) == len(kernel_edges.TYPES) * (of_parameters + len(kernel_edges.BATCHES) * of_batches)
    for name, results in found.items():
        assert results.keys() == plain.keys()
        for case, expected in plain.items():
            wide, kernel = case.startswith("float64"), case.split()[-1]
            if kernel == "signs":
                np.testing.assert_array_equal(results[case], expected, f"{name}, {case}")
            else:
                # One bit of a word would change a float64 by 1e-10.
                accuracy = 1e-12 if wide else 5e-4
                scale = 1 + np.abs(expected).max(initial=0) if kernel in GRADIENTS else 1
                np.testing.assert_allclose(
                    results[case], expected, accuracy, accuracy * scale, err_msg=f"{name}, {case}"
                )


def test_the_sanitized_kernels_pass_the_tests_of_the_kernels(
    environment: dict[str, str], sanitized: Callable[[str], Path], tmp_path: Path
) -> None:
    """A copy of the package with the sanitized extension in place of the installed one."""
    package = tmp_path / "src/bayesbackprop"
    shutil.copytree(SOURCES.parent, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    name = next(name for name in reversed(INSTRUCTION_SETS) if runs_here(name))
    module = shutil.copy(sanitized(name), package / "_engine/_cpu.abi3.so")
    program = (
        "import sys, pytest; from bayesbackprop._engine import cpu; print(cpu._cpu.__file__); sys.exit(pytest.main())"
    )
    # Neither the timing, nor the children, which have no sanitizers, nor the largest sizes, which take long.
    unfit = "not costs_no_multiple and not without_the_compiled and not 100003"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", unfit]
    done = execute(
        ["-c", program, *options, "tests/unit/engine/test_cpu.py"], environment | {"PYTHONPATH": str(package.parent)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(module)), done.stdout
