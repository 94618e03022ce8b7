"""Builds of the kernels in C for one instruction set, or with the compiler's sanitizers."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from repository import ROOT

SOURCES = ROOT / "src/bayesbackprop/_engine"
SANITIZERS = ["-O1", "-g1", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]

# The macro VECTORS and the option of the compiler that make each instruction set, and what a processor calls it.
INSTRUCTION_SETS = {
    "plain": (["-DVECTORS=0"], set[str]()),
    "AVX2": (["-DVECTORS=8", "-march=x86-64-v3"], {"avx2", "fma", "bmi2"}),
    "AVX-512": (["-DVECTORS=16", "-march=x86-64-v4"], {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}


def compiler() -> str:
    """gcc or what takes its options; without one the test is skipped."""
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        pytest.skip("there is no C compiler here")
    return found


def build(module: Path, *options: str) -> Path:
    """Compile the kernels as the package does, with ``options`` besides, as the extension ``module``."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        (extension,) = tomllib.load(file)["tool"]["setuptools"]["ext-modules"]
    command = [compiler(), "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", *extension["extra-compile-args"]]
    done = subprocess.run(
        [*command, *options, str(SOURCES / "cpu.c"), "-o", str(module)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return module


def runs_here(name: str) -> bool:
    """Whether this processor has the instruction set."""
    needed = INSTRUCTION_SETS[name][1]
    known = Path("/proc/cpuinfo")
    return not needed or (known.exists() and needed <= set(known.read_text().split()))


def sanitizer_environment(folder: Path) -> dict[str, str]:
    """What a process needs to load sanitized code; without sanitizers the test is skipped.

    They are there if a small program that misuses its memory is stopped.
    """
    wrong = "#include <stdlib.h>\nint main(int n, char **a) { char *p = malloc(n); p[n] = 0; return p[n]; }\n"
    source, program = folder / "wrong.c", folder / "wrong"
    source.write_text(wrong)
    compiled = subprocess.run(
        [compiler(), *SANITIZERS, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    if compiled.returncode or sys.platform != "linux":
        pytest.skip(f"the compiler has no sanitizers here: {compiled.stderr.strip()[:200]}")
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16", "OMP_NUM_THREADS": "1"}
    environment.pop("LD_PRELOAD", None)
    stopped = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=False)
    if "AddressSanitizer" not in stopped.stderr:
        pytest.skip("the sanitizers of the compiler do not work here")
    # Python itself is not sanitized. The library of C++ must be there first, for exceptions in torch.
    libraries = [
        subprocess.run(
            [compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    return {**environment, "LD_PRELOAD": " ".join(libraries)}
