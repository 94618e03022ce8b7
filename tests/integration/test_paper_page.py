"""The paper in code: each entry of docs/paper.md names a symbol, and quotes lines of its source.

An entry is a fenced block below the symbol, under the heading of its equation, or a row of a table. A symbol is a
dotted name: ``bayesbackprop.priors.Normal.log_density`` in a module of src, be it Python or C, or
``test_complexity.test_something`` in a test file, wherever in tests it stands.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from repository import ROOT

pytestmark = pytest.mark.identities

PAGE = ROOT / "docs" / "paper.md"


class Row(NamedTuple):
    """An entry: where in the paper, and the lines of a symbol, in which "..." stands for those that were left out."""

    paper: str
    symbol: str
    code: str


HEAD = "| in the paper | says | the code |"
ROW = re.compile(r"^\| (.+?) \| .+ \| `(\w+(?:\.\w+)+)`<br>`([^`|]+)` \|$", re.MULTILINE)
BLOCK = re.compile(r"^`(\w+(?:\.\w+)+)`\n\n```(?:py|c)\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def rows(text: str) -> list[Row]:
    found = []
    for section in re.split(r"^##+ ", text, flags=re.MULTILINE):
        heading = section.splitlines()[0]
        found += [Row(heading, symbol, code) for symbol, code in BLOCK.findall(section)]
        found += [Row(*cells) for cells in ROW.findall(section)]
    return found


# --- symbols ----------------------------------------------------------------------------------------------------------


def source_of(symbol: str, root: Path = ROOT) -> list[str]:
    """The lines of a symbol, without their indentation; none if there is no such symbol."""
    parts = symbol.split(".")
    found = []
    for length in range(1, len(parts)):
        module, names = "/".join(parts[:length]), parts[length:]
        for suffix in (".py", "/__init__.py", ".c", ".h"):
            for path in (root / "src" / f"{module}{suffix}", *(root / "tests").rglob(f"{module}{suffix}")):
                if path.is_file():
                    find = _in_python if path.suffix == ".py" else _in_c
                    found += find(path.read_text(), names)
    return [line.strip() for line in found]


def _in_python(text: str, names: list[str]) -> list[str]:
    """The lines of what has these names, one within the other: classes, functions and variables."""
    nodes: list[ast.AST] = [ast.parse(text)]
    for name in names:
        nodes = [child for node in nodes for child in getattr(node, "body", []) if name in _defined_by(child)]
    return [line for node in nodes for line in _lines(text, node)]


def _lines(text: str, node: ast.AST) -> list[str]:
    return text.splitlines()[node.lineno - 1 : node.end_lineno]  # type: ignore[attr-defined]


def _defined_by(node: ast.AST) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _in_c(text: str, names: list[str]) -> list[str]:
    """The lines of a function whose name may be made by the macro NAME."""
    (name,) = names
    function = rf"^\w[^;\n]*\b(?:NAME\({name}\)|{name})\([^;\n]*{{\n.*?^}}"
    return [line for found in re.findall(function, text, re.MULTILINE | re.DOTALL) for line in found.splitlines()]


def symbols_with(code: str, root: Path = ROOT) -> Iterator[str]:
    """The innermost Python symbols that have this line."""
    for path in sorted([*(root / "src").rglob("*.py"), *(root / "tests").rglob("test_*.py")]):
        text = path.read_text()
        if code in map(str.strip, text.splitlines()):
            inside = path.is_relative_to(root / "src")
            module = path.relative_to(root / "src").with_suffix("").parts if inside else (path.stem,)
            yield from _innermost(text, ast.parse(text), code, [part for part in module if part != "__init__"])


def _innermost(text: str, node: ast.AST, code: str, names: list[str]) -> Iterator[str]:
    for child in getattr(node, "body", []):
        for name in _defined_by(child):
            if code in map(str.strip, _lines(text, child)):
                within = list(_innermost(text, child, code, [*names, name])) if isinstance(child, ast.ClassDef) else []
                yield from within or [".".join([*names, name])]


def check(row: Row, root: Path = ROOT) -> None:
    lines = source_of(row.symbol, root)
    assert lines, f"docs/paper.md: there is no {row.symbol}. '{row.code}' {place_of(row.code, root)}"
    left = iter(lines)
    for code in map(str.strip, row.code.splitlines()):
        # Each line stands below the one before.
        if code != "...":
            assert code in lines, f"docs/paper.md: {row.symbol} has no line '{code}'. It {place_of(code, root)}"
            assert code in left, f"docs/paper.md: in {row.symbol} the line '{code}' is not below those before it."


def place_of(code: str, root: Path) -> str:
    """What to write into a row whose symbol does not have its line."""
    found = " or ".join(symbols_with(code, root))
    return f"stands in {found}" if found else "stands nowhere in Python: quote the line that computes it now"


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows(PAGE.read_text()), ids=lambda row: row.symbol)
def test_each_row_quotes_its_symbol(row: Row) -> None:
    check(row)


def test_every_quotation_is_checked() -> None:
    """And no line numbers are given, which are wrong soon."""
    text = PAGE.read_text()
    tables = [table.split("\n\n")[0].splitlines()[2:] for table in text.split(HEAD)[1:]]
    fences = re.findall(r"^```(\w+)$", text, re.MULTILINE)
    assert len(tables) == 2
    assert len(set(rows(text))) == sum(map(len, tables)) + fences.count("py") + fences.count("c")
    assert set(fences) == {"python", "py", "c", "math"}
    assert not re.search(r"\w\.\w+:\d", text)


@pytest.mark.parametrize("equation", range(1, 10))
def test_each_numbered_equation_is_typeset_beside_its_code(equation: int) -> None:
    text = PAGE.read_text()
    (section,) = re.findall(rf"^### ((?:\(\d\), )*\({equation}\).*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section.index("```math\n") < BLOCK.search(section).start()  # type: ignore[union-attr]


# --- the checks themselves --------------------------------------------------------------------------------------------

MODULE = """
RATES = {
    "sgd": 0.1,  # (5)
}

class Prior:
    scale: float = 1.0

    def log_density(self, w):
        return -w

def log_density(w):
    return w
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of one module, one test and one C header."""
    files = {
        "src/package/priors.py": MODULE,
        "src/package/fused.h": "INLINE int NAME(draw)(int n) {\n    return n;\n}\n\nint NAME(other)(void) {\n}\n",
        "tests/unit/test_priors.py": "def test_density():\n    assert True\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_symbols_of_every_kind_are_found_wherever_they_move(root: Path) -> None:
    quoted = {
        "package.priors.RATES": '"sgd": 0.1,  # (5)',
        "package.priors.Prior.scale": "scale: float = 1.0",
        "package.priors.Prior.log_density": "return -w",
        "package.priors.log_density": "return w",
        "package.fused.draw": "return n;",
        "test_priors.test_density": "assert True",
    }
    for symbol, code in quoted.items():
        check(Row("", symbol, code), root)
    path = root / "src" / "package" / "priors.py"
    path.write_text("import math\n\n\n" + MODULE)
    (root / "tests" / "unit" / "test_priors.py").rename(root / "tests" / "test_priors.py")
    for symbol, code in quoted.items():
        check(Row("", symbol, code), root)


@pytest.mark.parametrize(
    "symbol", ["package.priors.Posterior", "package.posterior.Prior.log_density", "package.fused.x"]
)
def test_a_symbol_that_is_gone_is_said_to_be(symbol: str, root: Path) -> None:
    with pytest.raises(AssertionError) as error:
        check(Row("", symbol, "return -w"), root)
    assert f"there is no {symbol}." in str(error.value)
    assert "stands in package.priors.Prior.log_density" in str(error.value)


def test_lines_are_in_order(root: Path) -> None:
    symbol = "package.priors.Prior"
    check(Row("", symbol, "class Prior:\n    scale: float = 1.0\n...\nreturn -w"), root)
    with pytest.raises(AssertionError, match=r"the line 'scale: float = 1\.0' is not below those before it"):
        check(Row("", symbol, "return -w\nscale: float = 1.0"), root)
    with pytest.raises(AssertionError, match="has no line 'return w'"):
        check(Row("", symbol, "class Prior:\nreturn w"), root)


def test_the_line_of_another_symbol_does_not_count(root: Path) -> None:
    with pytest.raises(AssertionError, match=r"has no line 'return w'\. It stands in package\.priors\.log_density"):
        check(Row("", "package.priors.Prior.log_density", "return w"), root)
    with pytest.raises(AssertionError, match="has no line 'return n;'"):
        check(Row("", "package.fused.other", "return n;"), root)
    with pytest.raises(AssertionError, match="stands nowhere in Python: quote the line that computes it now"):
        check(Row("", "package.priors.log_density", "return 2 * w"), root)
