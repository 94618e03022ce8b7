"""Doors open one way: what importing loads, and what moved away."""

import json
import subprocess
import sys

import pytest
import torch

from bayesbackprop import bandits
from bayesbackprop_paper import environments

pytestmark = pytest.mark.identities

_LOADED = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def packages_after(statement: str) -> set[str]:
    """The packages that a fresh interpreter has loaded after ``statement``, without Python's own."""
    command = [sys.executable, "-c", f"{statement}\n{_LOADED}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout)) - sys.stdlib_module_names


def test_the_library_loads_torch_numpy_and_safetensors_alone() -> None:
    allowed = packages_after("import numpy, torch, safetensors.torch, torch.nn.parallel, torch.distributed")
    if torch.__version__.startswith("2.6."):
        allowed |= {"mpmath", "sympy"}  # which that version loads when operators are registered
    assert packages_after("import bayesbackprop") - allowed == {"bayesbackprop"}


@pytest.mark.parametrize("module", ["bandits", "evaluation", "export", "pruning", "saving", "_networks"])
def test_no_module_of_the_library_loads_the_paper(module: str) -> None:
    loaded = packages_after(f"import bayesbackprop.{module}")
    assert not loaded & {"bayesbackprop_paper", "matplotlib", "pooch", "sklearn", "typer"}


def test_help_loads_no_command() -> None:
    statement = "import typer.main; from bayesbackprop._cli import app; typer.main.get_command(app)"
    assert not packages_after(statement) & {"bayesbackprop_paper", "matplotlib", "optuna", "plotly", "pooch"}


@pytest.mark.parametrize("name", ["Wheel", "adult", "covertype", "mushroom"])
def test_what_moved_says_where_it_is(name: str) -> None:
    with pytest.raises(AttributeError, match=f"it is bayesbackprop_paper.environments.{name} now"):
        getattr(bandits, name)
    assert callable(getattr(environments, name))


def test_what_never_was_says_only_that() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        bandits.nonsense  # noqa: B018
