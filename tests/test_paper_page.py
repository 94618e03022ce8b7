"""The paper in code: each row of docs/paper.md names the line that it quotes.

Run as a script, this writes the line numbers anew.
"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.identities

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "paper.md"

# | in the paper | says | `file:line` | `code` |
ROW = re.compile(r"^(\| .* \| .* \| `)(src/[\w./]+):(\d+)(` \| `)(.+)(` \|)$", re.MULTILINE)


def place_of(file: str, code: str, near: int) -> int:
    """The number of the line that holds ``code``, of several the nearest one."""
    lines = (ROOT / file).read_text().splitlines()
    found = [number for number, line in enumerate(lines, start=1) if line.strip() == code]
    assert found, f"docs/paper.md: no line of {file} is\n  {code}"
    return min(found, key=lambda number: abs(number - near))


def refreshed(text: str) -> str:
    """The page with the numbers of today."""
    return ROW.sub(
        lambda row: f"{row[1]}{row[2]}:{place_of(row[2], row[5], int(row[3]))}{row[4]}{row[5]}{row[6]}", text
    )


@pytest.mark.parametrize("row", ROW.findall(PAGE.read_text()), ids=lambda row: f"{row[1]}:{row[2]}")
def test_each_row_quotes_its_line(row: tuple[str, ...]) -> None:
    _, file, number, _, code, _ = row
    expected = place_of(file, code, int(number))
    assert int(number) == expected, (
        f"docs/paper.md: {file}:{number} is now {file}:{expected}; run {Path(__file__).name}"
    )


def test_every_row_of_the_table_is_checked() -> None:
    text = PAGE.read_text()
    table = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| in the paper")]
    assert len(ROW.findall(text)) == len(table) > 15


def test_the_equations_are_there() -> None:
    text = PAGE.read_text()
    for equation in (1, 2, 3, 4, 7, 8, 9):
        assert f"({equation})" in text


def test_lines_that_moved_are_found() -> None:
    moved = ROW.sub(lambda row: f"{row[1]}{row[2]}:1{row[4]}{row[5]}{row[6]}", PAGE.read_text())
    assert moved != refreshed(moved) == PAGE.read_text()
    with pytest.raises(AssertionError, match="no line of"):
        place_of("src/bayesbackprop/objective.py", "this is not there", 1)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text()))
