"""Doors open one way: what importing loads, and what moved away."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from bayesbackprop import bandits
from bayesbackprop_paper import environments

pytestmark = pytest.mark.identities

MODULES = [
    "bandits",
    "calibration",
    "comparison",
    "diagnostics",
    "evaluation",
    "verdict",
    "export",
    "pruning",
    "saving",
    "_networks",
    "training",
]

# Torch takes seconds to import: one interpreter answers all questions, the ones that load most last.
PROGRAM = f"""
import importlib, json, sys

def loaded():
    return sorted({{name.partition(".")[0] for name in sys.modules}} - sys.stdlib_module_names)

import numpy, torch, safetensors.torch, torch.nn.parallel, torch.distributed
found = {{"what it needs": loaded()}}
before = torch.get_rng_state()
import bayesbackprop
found["bayesbackprop"] = loaded()
for module in {MODULES}:
    importlib.import_module(f"bayesbackprop.{{module}}")
    found[module] = loaded()
found["the generator is as it was"] = torch.equal(torch.get_rng_state(), before)
sys.modules["sklearn"] = None  # as if it were not installed
try:
    import bayesbackprop.sklearn
except ImportError as error:
    found["without scikit-learn"] = str(error)
sys.modules["pandas"] = None
try:
    import bayesbackprop.tables
except ImportError as error:
    found["without pandas"] = str(error)
del sys.modules["pandas"]
import typer.main
from bayesbackprop._cli import app
typer.main.get_command(app)
found["help"] = loaded()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The packages that a fresh interpreter has loaded after each import, without Python's own, and what else it saw.

    An import that loads what it should not fails the tests of those after it too.
    """
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def test_the_library_loads_torch_numpy_and_safetensors_alone(found: dict[str, Any]) -> None:
    allowed = set(found["what it needs"])
    if torch.__version__.startswith("2.6."):
        allowed |= {"mpmath", "sympy"}  # which that version loads when operators are registered
    assert set(found["bayesbackprop"]) - allowed == {"bayesbackprop"}
    assert not {"rich", "sklearn", "tensorboard", "triton", "typer"} & set(found["bayesbackprop"])


@pytest.mark.parametrize("module", MODULES)
def test_no_module_of_the_library_loads_the_paper(module: str, found: dict[str, Any]) -> None:
    assert not {"bayesbackprop_paper", "matplotlib", "pooch", "sklearn", "typer"} & set(found[module])


def test_help_loads_no_command(found: dict[str, Any]) -> None:
    assert not {"bayesbackprop_paper", "matplotlib", "optuna", "plotly", "pooch"} & set(found["help"])


def test_importing_leaves_torchs_generator_alone(found: dict[str, Any]) -> None:
    assert found["the generator is as it was"]


def test_the_library_does_not_need_scikit_learn(found: dict[str, Any]) -> None:
    needs = 'bayesbackprop.sklearn needs scikit-learn 1.6 or newer: pip install "bayesbackprop[sklearn]"'
    assert found["without scikit-learn"] == needs


def test_the_library_does_not_need_pandas(found: dict[str, Any]) -> None:
    needs = 'bayesbackprop.tables needs pandas and scikit-learn: pip install "bayesbackprop[tables]"'
    assert found["without pandas"] == needs
    assert not {"pandas", "polars", "pyarrow"} & set(found["help"])


@pytest.mark.parametrize("name", ["Wheel", "adult", "covertype", "mushroom"])
def test_what_moved_says_where_it_is(name: str) -> None:
    with pytest.raises(AttributeError, match=f"it is bayesbackprop_paper.environments.{name} now"):
        getattr(bandits, name)
    assert callable(getattr(environments, name))


def test_what_never_was_says_only_that() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        bandits.nonsense  # noqa: B018
