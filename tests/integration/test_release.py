"""What a release needs: the citation, the wheels, the checklist and the forms for issues fit the repository."""

import re
import tomllib
from typing import Any

import pytest
import yaml

from bayesbackprop import __version__
from repository import ROOT

pytestmark = pytest.mark.identities

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def content(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_citation_is_of_this_version() -> None:
    citation = content("CITATION.cff")
    assert str(citation["version"]) == __version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["keywords"] == PROJECT["project"]["keywords"]
    assert {"cff-version", "title", "message", "authors"} <= citation.keys()


def test_wheels_are_for_the_stable_abi_and_three_systems() -> None:
    oldest = PROJECT["tool"]["distutils"]["bdist_wheel"]["py-limited-api"]
    assert PROJECT["tool"]["cibuildwheel"]["build"] == f"{oldest}-*"
    assert PROJECT["project"]["requires-python"] == f">=3.{oldest.removeprefix('cp3')}"
    systems = content(".github/workflows/wheels.yml")["jobs"]["wheels"]["strategy"]["matrix"]["os"]
    assert {system.split("-")[0] for system in systems} == {"ubuntu", "macos", "windows"}


@pytest.mark.parametrize("page", ["releasing.md", "extending.md"])
def test_files_and_rules_that_contributors_are_told_of_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    paths = re.findall(r"`((?:src|tests|docs|\.github)/[\w/.]+|[A-Z]+\.\w+)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    rules = (ROOT / "Makefile").read_text()
    for rule in re.findall(r"(?:`|^|&& )make ([\w-]+)", text, re.MULTILINE):
        assert f"\n{rule}:" in rules, rule


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_forms_have_what_github_needs(path: Any) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    assert len({each["id"] for each in form["body"]}) == len(form["body"])
    assert all(each["attributes"]["label"] for each in form["body"])
