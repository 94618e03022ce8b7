"""Draw the rooms of the source, from its imports: ``python docs/rooms.py`` writes rooms.svg and rooms.md.

The rooms and their layers are those of the import contracts in pyproject.toml. The arrows are imports. The sentences
are the first lines of the modules' docstrings.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import grimp

ROOT = Path(__file__).parents[1]
PICTURE, PAGE = ROOT / "docs" / "rooms.svg", ROOT / "docs" / "rooms.md"
PACKAGES = {"paper": "bayesbackprop_paper", "library": "bayesbackprop"}  # the ids of their contracts, from the top down

# Sizes in pixels. Letters are 6.6 wide: the mean of a sans-serif font of size 12, and a little more.
_LETTER, _LINE, _PADDING = 6.6, 16, 9
_GAP, _ROW_GAP, _MARGIN, _THREAD = 26, 34, 20, 8
# Letters of a line of a box that holds several modules.
_WRAP = 40
# The sweeps that order the rows and then straighten the arrows; more change nothing.
_SWEEPS = 40
_COLOURS = {"bayesbackprop_paper": ("#fdf0e1", "#d08a2e"), "bayesbackprop": ("#e8ebfa", "#3f51b5")}

_PAGE = """# Rooms and doors

Doors open one way: each room imports only from rooms below it. `make lint` checks it, with the contracts in
`pyproject.toml`. In the picture an arrow is an import; one that a longer way implies is left out. `make docs` writes
this page and the picture from the imports.

![The rooms of the source, and which imports which](rooms.svg)
"""


class Room(NamedTuple):
    """Modules that may import each other, in a package."""

    package: str
    modules: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The names, wrapped for a box."""
        lines = [""]
        for name in self.modules:
            joined = f"{lines[-1]}, {name}" if lines[-1] else name
            lines = [*lines[:-1], joined] if len(joined) <= _WRAP else [*lines, name]
        return lines


Layers = list[list[Room]]


def read_layers(root: Path = ROOT) -> tuple[Layers, set[tuple[str, str]]]:
    """The rooms of the contracts, from the top down, and the imports that these ignore."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    by_id = {contract["id"]: contract for contract in contracts}
    layers: Layers = []
    ignored: set[tuple[str, str]] = set()
    for identifier, package in PACKAGES.items():
        for layer in by_id[identifier]["layers"]:
            rooms = [_present(root, package, room) for room in layer.split("|")]
            layers += [[room for room in rooms if room.modules]]
        for line in by_id[identifier].get("ignore_imports", []):
            importer, imported = re.split(r"\s*->\s*", line)
            ignored.add((importer, imported))
    return layers, ignored


def _present(root: Path, package: str, room: str) -> Room:
    """The modules of a room that there are: names in parentheses may be missing."""
    names = [name.strip(" ()") for name in room.split(":")]
    return Room(package, tuple(name for name in names if _source(root, package, name) is not None))


def _source(root: Path, package: str, name: str) -> Path | None:
    base = root / "src" / package
    return next((path for path in (base / f"{name}.py", base / name / "__init__.py") if path.exists()), None)


def read_doors(layers: Layers, ignored: set[tuple[str, str]]) -> dict[Room, set[Room]]:
    """Which rooms each room imports."""
    graph = grimp.build_graph(*PACKAGES.values(), cache_dir=None)
    home = {f"{room.package}.{name}": room for layer in layers for room in layer for name in room.modules}
    doors: dict[Room, set[Room]] = {room: set() for room in home.values()}
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            here, there = (home.get(".".join(name.split(".")[:2])) for name in (importer, imported))
            if here is not None and there is not None and here != there and (importer, imported) not in ignored:
                doors[here].add(there)
    return doors


def shortest(doors: Mapping[Room, set[Room]]) -> dict[Room, set[Room]]:
    """The doors without those that a longer way implies."""
    below: dict[Room, set[Room]] = {}

    def reach(room: Room) -> set[Room]:
        if room not in below:
            below[room] = doors[room].union(*map(reach, doors[room]))
        return below[room]

    return {
        room: {each for each in next_ if not any(each in reach(way) for way in next_)} for room, next_ in doors.items()
    }


# --- the picture -----------------------------------------------------------------------------------------------------


class Spot:
    """A place in a row: of a room, or (None) of an arrow that passes through the row."""

    def __init__(self, row: int, room: Room | None) -> None:
        self.row, self.room = row, room
        self.above: list[Spot] = []
        self.below: list[Spot] = []
        self.x = 0.0
        widest = max(map(len, room.lines)) if room else 0
        self.width = _LETTER * widest + 2 * _PADDING if room else _THREAD
        self.height = _LINE * len(room.lines) + 2 * _PADDING - 4 if room else 0

    def pull(self, neighbours: Sequence["Spot"]) -> float:
        """Where its neighbours would have it."""
        return sum(spot.x for spot in neighbours) / len(neighbours) if neighbours else self.x


Arrow = list[Spot]


def arrange(layers: Layers, doors: Mapping[Room, set[Room]]) -> tuple[list[list[Spot]], list[Arrow]]:
    """Rows of spots with their x, and each arrow as the spots that it passes through."""
    rows: list[list[Spot]] = [[Spot(row, room) for room in layer] for row, layer in enumerate(layers)]
    at = {spot.room: spot for row in rows for spot in row if spot.room}
    arrows: list[Arrow] = []
    for room, imported in doors.items():
        for other in sorted(imported):
            start, end = at[room], at[other]
            if start.row >= end.row:
                raise ValueError(f"{room.modules} may not import {other.modules}: run lint-imports")
            passed = [Spot(row, None) for row in range(start.row + 1, end.row)]
            for spot in passed:
                rows[spot.row].append(spot)
            arrows.append([start, *passed, end])
            for upper, lower in pairwise(arrows[-1]):
                upper.below.append(lower)
                lower.above.append(upper)
    for row in rows:
        _spread(row)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            wanted = {id(spot): spot.pull(spot.above if down else spot.below) for spot in row}
            row.sort(key=lambda spot, wanted=wanted: wanted[id(spot)])  # type: ignore[misc]
            _spread(row)
    for _ in range(_SWEEPS):
        for row in rows:
            _settle(row)
    return rows, arrows


def _gap(left: Spot, right: Spot) -> float:
    return _GAP if left.room and right.room else _GAP / 2


def _spread(row: Sequence[Spot]) -> None:
    """Place a row side by side around 0."""
    x = 0.0
    for left, right in pairwise([None, *row]):
        assert right is not None
        x += right.width / 2 if left is None else (left.width + right.width) / 2 + _gap(left, right)
        right.x = x
    middle = (row[0].x - row[0].width / 2 + row[-1].x + row[-1].width / 2) / 2
    for spot in row:
        spot.x -= middle


def _settle(row: Sequence[Spot]) -> None:
    """Move each spot of a row towards its neighbours, as far as the spots beside it let it."""
    for number, spot in enumerate(row):
        wanted = spot.pull([*spot.above, *spot.below])
        if number:
            left = row[number - 1]
            wanted = max(wanted, left.x + (left.width + spot.width) / 2 + _gap(left, spot))
        if number + 1 < len(row):
            right = row[number + 1]
            wanted = min(wanted, right.x - (right.width + spot.width) / 2 - _gap(spot, right))
        spot.x = wanted


def draw(layers: Layers, doors: Mapping[Room, set[Room]]) -> str:
    """The picture, as SVG."""
    rows, arrows = arrange(layers, shortest(doors))
    heights = [max(spot.height for spot in row) for row in rows]
    tops = [_MARGIN + sum(heights[:row]) + _ROW_GAP * row for row in range(len(rows))]
    left = min(spot.x - spot.width / 2 for row in rows for spot in row) - _MARGIN
    width = max(spot.x + spot.width / 2 for row in rows for spot in row) + _MARGIN - left
    height = tops[-1] + heights[-1] + _MARGIN

    def edge(spot: Spot, bottom: bool) -> str:
        y = tops[spot.row] + heights[spot.row] / 2 + (spot.height / 2 if bottom else -spot.height / 2)
        return f"{spot.x - left:.1f} {y:.1f}"

    def curve(arrow: Arrow) -> Iterator[str]:
        yield f"M {edge(arrow[0], True)}"
        for upper, lower in pairwise(arrow):
            (x0, y0), (x1, y1) = edge(upper, True).split(), edge(lower, False).split()
            middle = f"{(float(y0) + float(y1)) / 2:.1f}"
            yield f"C {x0} {middle} {x1} {middle} {x1} {y1}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" '
        'font-size="12" text-anchor="middle">',
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M 0 0 L 8 4 L 0 8 z" fill="#667"/></marker>',
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#fff"/>',
    ]
    for number, package in enumerate(PACKAGES.values()):  # the legend
        fill, stroke = _COLOURS[package]
        top = _MARGIN + _LINE * number
        parts.append(f'<rect x="{_MARGIN}" y="{top}" width="11" height="11" rx="2" fill="{fill}" stroke="{stroke}"/>')
        parts.append(f'<text x="{_MARGIN + 17}" y="{top + 10}" text-anchor="start">{package}</text>')
    for arrow in sorted(arrows, key=lambda arrow: (arrow[0].row, arrow[0].x, arrow[-1].row, arrow[-1].x)):
        parts.append(f'<path d="{" ".join(curve(arrow))}" fill="none" stroke="#667" marker-end="url(#head)"/>')
    for spot in (spot for row in rows for spot in row if spot.room):
        assert spot.room is not None
        fill, stroke = _COLOURS[spot.room.package]
        x, y = spot.x - left, tops[spot.row] + heights[spot.row] / 2
        parts.append(
            f'<rect x="{x - spot.width / 2:.1f}" y="{y - spot.height / 2:.1f}" width="{spot.width:.1f}" '
            f'height="{spot.height}" rx="5" fill="{fill}" stroke="{stroke}"/>'
        )
        for number, line in enumerate(spot.room.lines):
            down = y + _LINE * (number - (len(spot.room.lines) - 1) / 2) + 4  # 4 brings the middle of letters to y
            parts.append(f'<text x="{x:.1f}" y="{down:.1f}">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>", ""])


# --- the page --------------------------------------------------------------------------------------------------------


def describe(layers: Layers, root: Path = ROOT) -> str:
    """The page: one sentence for each module, from the top down."""
    lines = [_PAGE]
    for package in PACKAGES.values():
        lines += [f"## {package}", "", "| room | what it is |", "|---|---|"]
        for name in (name for layer in layers for room in layer if room.package == package for name in room.modules):
            lines.append(f"| `{name}` | {_sentence(root, package, name)} |")
        lines.append("")
    return "\n".join(lines)


def _sentence(root: Path, package: str, name: str) -> str:
    path = _source(root, package, name)
    assert path is not None
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "`").replace("|", "\\|")


def made() -> Iterable[tuple[Path, str]]:
    """The files and what belongs in them."""
    layers, ignored = read_layers()
    yield PICTURE, draw(layers, read_doors(layers, ignored))
    yield PAGE, describe(layers)


if __name__ == "__main__":
    for path, text in made():
        path.write_text(text)
