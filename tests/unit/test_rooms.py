"""The picture of the rooms is what the imports give now."""

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import grimp
import pytest

pytestmark = pytest.mark.identities

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    specification = importlib.util.spec_from_file_location("rooms", DOCS / "rooms.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["rooms"] = module
    specification.loader.exec_module(module)
    return module


def test_the_picture_and_the_page_are_what_the_imports_give(rooms: ModuleType) -> None:
    for path, text in rooms.made():
        assert path.read_text() == text, f"{path.name} is of older imports: run python docs/rooms.py"


def test_every_module_has_a_box_and_a_sentence(rooms: ModuleType) -> None:
    graph = grimp.build_graph("bayesbackprop", "bayesbackprop_paper", cache_dir=None)
    drawn = " ".join(ElementTree.parse(rooms.PICTURE).getroot().itertext()).replace(",", " ").split()
    page = rooms.PAGE.read_text()
    for module in (name for name in graph.modules if name.count(".") == 1):
        _, name = module.split(".")
        assert name in drawn
        assert f"| `{name}` | " in page
    assert " |  |" not in page


def test_no_module_of_the_library_imports_its_front_door() -> None:
    graph = grimp.build_graph("bayesbackprop", "bayesbackprop_paper", cache_dir=None)
    importers = graph.find_modules_that_directly_import("bayesbackprop")
    assert not {name for name in importers if name.startswith("bayesbackprop.")}


def test_an_arrow_that_a_longer_way_implies_is_left_out(rooms: ModuleType) -> None:
    a, b, c, d = (rooms.Room("bayesbackprop", (name,)) for name in "abcd")
    assert rooms.shortest({a: {b, c, d}, b: {c}, c: {d}, d: set()}) == {a: {b}, b: {c}, c: {d}, d: set()}
    assert rooms.shortest({a: {b, c}, b: {d}, c: {d}, d: set()}) == {a: {b, c}, b: {d}, c: {d}, d: set()}


def test_arrows_point_down_and_boxes_stand_apart(rooms: ModuleType) -> None:
    layers, ignored = rooms.read_layers()
    rows, arrows = rooms.arrange(layers, rooms.shortest(rooms.read_doors(layers, ignored)))
    for row in rows:
        for left, right in pairwise(row):
            assert left.x + left.width / 2 < right.x - right.width / 2
    assert all(upper.row + 1 == lower.row for arrow in arrows for upper, lower in pairwise(arrow))


def test_a_door_that_opens_upwards_is_no_picture(rooms: ModuleType) -> None:
    a, b = (rooms.Room("bayesbackprop", (name,)) for name in "ab")
    with pytest.raises(ValueError, match="may not import"):
        rooms.arrange([[a], [b]], {a: {b}, b: {a}})
