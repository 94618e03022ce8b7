"""The page of what is supported is what the tests say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from repository import ROOT

pytestmark = pytest.mark.identities


@pytest.fixture(scope="module")
def supported() -> ModuleType:
    specification = importlib.util.spec_from_file_location("supported", ROOT / "docs" / "supported.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tests_say(supported: ModuleType) -> None:
    assert supported.PAGE.read_text() == supported.page(), "run python docs/supported.py"


def test_marks_are_found_on_tests_and_on_parameters(supported: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        '@pytest.mark.supports("Training", "DDP", "two ranks")\ndef test(): ...\n'
        'rows = [pytest.param(1, marks=pytest.mark.supports("Files", "ONNX"))]\n'
    )
    found = {(mark.group, mark.what, mark.note) for mark in supported.marks(tmp_path)}
    assert found == {("Training", "DDP", "two ranks"), ("Files", "ONNX", "")}
    (tmp_path / "test_some.py").write_text('pytest.mark.supports(name, "ONNX")')
    with pytest.raises(ValueError, match="takes two or three texts"):
        list(supported.marks(tmp_path))
