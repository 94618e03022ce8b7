"""The site: formulas are typeset, and broken pages are noticed. `make docs` builds it."""

import html
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from repository import ROOT

pytestmark = pytest.mark.identities

NAVIGATION = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\nvalidation:")[0]


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of docs, which imports its neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    specification = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    found = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(found)
    monkeypatch.delitem(sys.modules, "notebooks", raising=False)
    return found


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("latex2mathml")
    return module("formulas", monkeypatch)


@pytest.fixture
def website(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("website", monkeypatch)


# --- the navigation ---------------------------------------------------------------------------------------------------


def test_pages_are_of_four_kinds() -> None:
    assert re.findall(r"^  - ([\w-]+):$", NAVIGATION, re.MULTILINE) == [
        "Tutorials",
        "How-to",
        "Reference",
        "Explanation",
    ]
    explained = NAVIGATION.split("  - Explanation:")[1]
    for page in ["design.md", "rooms.md", *re.findall(r"decisions/\w+\.md", NAVIGATION)]:
        assert page in explained


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"([\w/]+\.md)$", NAVIGATION, re.MULTILINE)
    sources = {*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "notebooks").glob("*.ipynb")}
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".md")) for path in sources}
    assert len(listed) == len(set(listed))
    assert set(listed) == pages


# --- formulas ---------------------------------------------------------------------------------------------------------


def rendered(formulas: ModuleType, text: str) -> str:
    from markdown import markdown

    fence: dict[str, Any] = {"name": "math", "class": "formula", "format": formulas.fenced}
    options = {"pymdownx.superfences": {"custom_fences": [fence]}}
    return markdown(text, extensions=[formulas.makeExtension(), "pymdownx.superfences"], extension_configs=options)


def test_a_formula_in_a_line_is_mathml(formulas: ModuleType) -> None:
    page = rendered(formulas, r"The spread $\sigma = 1$ of a weight.")
    assert re.fullmatch(r"<p>The spread <math [^>]*display=\"inline\".*</math> of a weight\.</p>", page, re.DOTALL)
    assert "<mi>&#x003C3;</mi>" in page


def test_a_fenced_formula_has_its_own_line(formulas: ModuleType) -> None:
    page = rendered(formulas, "```math\n\\mathrm{KL}[q]\n```")
    assert page.startswith('<p class="formula"><math ')
    assert 'display="block"' in page
    assert "<mi>KL</mi>" in page  # one word


@pytest.mark.parametrize("text", ["from $5 to $6", "`$HOME and $PATH`", r"\$x$", "US$x$"])
def test_a_dollar_is_no_formula(formulas: ModuleType, text: str) -> None:
    assert "<math" not in rendered(formulas, text)


def test_a_logarithm_stands_apart_from_a_name_and_beside_a_bracket(formulas: ModuleType) -> None:
    assert '<mi>log</mi><mspace width="0.17em" /><mi>q</mi>' in formulas.mathml(r"\log q")
    assert "<mspace" not in formulas.mathml(r"\log(1 + x)")


def test_letters_that_browsers_would_not_show_are_refused(formulas: ModuleType) -> None:
    assert "\N{MATHEMATICAL SCRIPT CAPITAL N}" in html.unescape(formulas.mathml(r"\mathcal{N}"))
    for latex in (r"\boldsymbol{\theta}", r"\unknown{x}"):
        with pytest.raises(ValueError, match="browsers would not show"):
            formulas.mathml(latex)


# --- names in docstrings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (":func:`fit` trains.", "<code>fit</code> trains."),
        ("See :class:`~bayesbackprop.optim.Adam`.", "See <code>Adam</code>."),
        (":meth:`Agent.decide`", "<code>Agent.decide</code>"),
        ("`:func:`", "<code>:func:</code>"),
    ],
)
def test_a_name_is_shown_without_its_role(monkeypatch: pytest.MonkeyPatch, text: str, shown: str) -> None:
    markdown = pytest.importorskip("markdown")
    roles = module("roles", monkeypatch)
    assert markdown.markdown(text, extensions=[roles.makeExtension()]) == f"<p>{shown}</p>"


# --- the pages as they were written -----------------------------------------------------------------------------------


def test_what_is_wrong_with_pages_is_found(website: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text(
        '<h2 id="there">x</h2><a href="../a.html#here">x</a><a href="/a.html">x</a>'
    )
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="sub/b.html#there"></a><a href="https://example.org"></a>'
        '<img src="data:image/png;base64,">'
        '<link rel="canonical" href="https://example.org/a.html">'
    )
    assert list(website.faults(tmp_path)) == []
    (tmp_path / "c.html").write_text(
        '<a href="gone.html"></a><a href="a.html#gone"></a><img src="gone.png"><script src="https://example.org/x.js"></script>'
        "<p><code>math\n\\unknown</code></p><p>:func:<code>fit</code></p>"
    )
    assert list(website.faults(tmp_path)) == [
        "c.html: this formula could not be typeset: \\unknown",
        "c.html: this name shows its markup: :func:<code>fit</code>",
        "c.html: gone.html leads nowhere",
        "c.html: a.html#gone has no such anchor",
        "c.html: gone.png leads nowhere",
        "c.html: loads https://example.org/x.js from elsewhere",
    ]
