"""Write docs/supported.md from the tests: ``python docs/supported.py``; with ``--check`` only compare.

Three kinds of rows, none of them written by hand: the networks of ``tests/architectures.py``, the layers of
``tests/layers.py``, and whatever tests are marked with ``@pytest.mark.supports("group", "what", "a note")``, which are
found without running them.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TESTS, PAGE = ROOT / "tests", ROOT / "docs" / "supported.md"

_START = """# What is supported

This page is written from the tests (`python docs/supported.py`): a row is here because a test runs it. Whatever is not
here may work as well. What cannot be done right is refused with an error that says so.
"""
_NETWORKS = """
## Networks

Each is wrapped unchanged by `Bayesian`, takes steps with one and with two draws, predicts in parallel over draws and
draw by draw with the same result, is kept as an ensemble, saved, and loaded.

| network | |
|---|---|
"""
_LAYERS = """
## Layers and estimators

Each runs under `shared`. Under `local` and `flipout` a parameter that has no rule for it falls back to `shared`, and
`model.report()` says so.

| layer | `local` and `flipout` |
|---|---|
"""


class Marked(NamedTuple):
    """A row that a mark on a test asks for."""

    group: str
    what: str
    note: str
    test: str


def marks(tests: Path = TESTS) -> Iterator[Marked]:
    """The marks ``pytest.mark.supports`` of all tests, also those of parameters (``pytest.param(..., marks=...)``)."""
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.supports":
                values = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                if node.keywords or len(values) != len(node.args) or not 2 <= len(values) <= 3:
                    raise ValueError(
                        f'{path}:{node.lineno}: supports("group", "what", "a note") takes two or three texts'
                    )
                group, what, note = map(str, (*values, "")[:3])
                yield Marked(group, what, note, path.relative_to(tests.parent).as_posix())


def page() -> str:
    """The page as the tests are now."""
    sys.path.insert(0, str(TESTS))
    from architectures import ARCHITECTURES
    from layers import ROWS

    text = _START + _NETWORKS
    for name, row in ARCHITECTURES.items():
        text += f"| {name} | {row.note} |\n"
    found = list(marks())
    for group in sorted({mark.group for mark in found}):
        text += f"\n## {group}\n\n| what | | test |\n|---|---|---|\n"
        for mark in sorted(mark for mark in found if mark.group == group):
            text += f"| {mark.what} | {mark.note} | `{mark.test}` |\n"
    text += _LAYERS
    for name, layer in ROWS.items():
        text += f"| {name} | {'some parameters fall back' if layer.fallback else 'yes'} |\n"
    return text


if __name__ == "__main__":
    made = page()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != made:
            sys.exit("docs/supported.md is not what the tests say: run python docs/supported.py")
    else:
        PAGE.write_text(made)
