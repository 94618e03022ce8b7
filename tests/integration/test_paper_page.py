"""The paper in code: each row of docs/paper.md names the line that it quotes.

Run as a script, this writes the line numbers anew.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from repository import ROOT

pytestmark = pytest.mark.identities

PAGE = ROOT / "docs" / "paper.md"


class Row(NamedTuple):
    """| in the paper | says | `file:line` | `code` |"""

    paper: str
    says: str
    file: str
    line: str
    code: str

    def __str__(self) -> str:
        return f"| {self.paper} | {self.says} | `{self.file}:{self.line}` | `{self.code}` |"


ROW = re.compile(r"^\| (.+?) \| (.+) \| `((?:src|tests)/[\w./]+):(\d+)` \| `([^`|]+)` \|$", re.MULTILINE)


def rows(text: str) -> list[Row]:
    return [Row(*found) for found in ROW.findall(text)]


def refreshed(row: Row, root: Path = ROOT) -> Row:
    """The row with the number that its line has now; of several such lines the nearest."""
    path = root / row.file
    assert path.exists(), f"docs/paper.md: there is no {row.file} any more. It has\n  {row}"
    lines = path.read_text().splitlines()
    found = [number for number, line in enumerate(lines, start=1) if line.strip() == row.code]
    assert found, f"docs/paper.md: no line of {row.file} is this any more; quote the one that computes it now:\n  {row}"
    return row._replace(line=str(min(found, key=lambda number: abs(number - int(row.line)))))


def check(row: Row, root: Path = ROOT) -> None:
    now = refreshed(row, root)
    how = f"run python {Path(__file__).relative_to(ROOT)}, or write\n  {now}"
    assert row == now, f"docs/paper.md: {row.file}:{row.line} is now {now.file}:{now.line}; {how}"


def rewrite(page: Path) -> None:
    """Write the numbers of today."""
    page.write_text(ROW.sub(lambda found: str(refreshed(Row(*found.groups()))), page.read_text()))


@pytest.mark.parametrize("row", rows(PAGE.read_text()), ids=lambda row: f"{row.file}:{row.line}")
def test_each_row_quotes_its_line(row: Row) -> None:
    check(row)


def test_every_row_of_the_tables_is_checked() -> None:
    """And every place that is named, in a table or not, is in a row."""
    text = PAGE.read_text()
    table = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| in the paper")]
    assert len(rows(text)) == len(table) == len(re.findall(r"\w\.\w+:\d", text))
    assert len(set(rows(text))) == len(table)


@pytest.mark.parametrize("equation", range(1, 10))
def test_each_numbered_equation_has_a_row(equation: int) -> None:
    assert any(f"({equation})" in re.split("section", row.paper)[0] for row in rows(PAGE.read_text()))


# --- the checks themselves --------------------------------------------------------------------------------------------


@pytest.fixture
def moved(tmp_path: Path) -> Row:
    """A row whose code stands three lines further down in ``tmp_path``."""
    row = rows(PAGE.read_text())[0]
    path = tmp_path / row.file
    path.parent.mkdir(parents=True)
    path.write_text("\n\n\n" + (ROOT / row.file).read_text())
    return row


def test_what_has_moved_is_found(moved: Row, tmp_path: Path) -> None:
    check(moved)
    with pytest.raises(AssertionError) as error:
        check(moved, tmp_path)
    now = moved._replace(line=str(int(moved.line) + 3))
    assert f"is now {now.file}:{now.line}" in str(error.value)
    assert str(now) in str(error.value)
    check(now, tmp_path)


def test_what_is_gone_is_said_to_be(moved: Row, tmp_path: Path) -> None:
    path = tmp_path / moved.file
    path.write_text(path.read_text().replace(moved.code, "pass"))
    with pytest.raises(AssertionError, match="no line of"):
        check(moved, tmp_path)
    path.unlink()
    with pytest.raises(AssertionError, match="there is no"):
        check(moved, tmp_path)


def test_the_numbers_can_be_written_anew(tmp_path: Path) -> None:
    page = tmp_path / PAGE.name
    page.write_text(re.sub(r"(\w\.\w+):\d+`", r"\1:1`", PAGE.read_text()))
    assert page.read_text() != PAGE.read_text()
    rewrite(page)
    assert page.read_text() == PAGE.read_text()


if __name__ == "__main__":
    rewrite(PAGE)
