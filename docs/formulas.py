"""Formulas of the site, typeset when it is built: LaTeX in, MathML out, so that a page needs no script and no network.

A Markdown extension (``markdown_extensions`` in mkdocs.yml). ``$...$`` is a formula in a line. A block that is fenced
as ``math`` has a line of its own. GitHub takes both for formulas too.
"""

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

# Not after or before a character of a word or another dollar, and no space inside at either end: "$5 and $6" is text.
_FORMULA = r"(?<![\\$\w])\$(?![\s$])((?:\\.|[^$\\])+?)(?<!\s)\$(?![\w$])"


def mathml(latex: str, display: str = "inline") -> str:
    """A formula as MathML. ``display`` is "inline" or "block"."""
    made = convert(latex, display=display)
    # KL is one word, not the product of K and L.
    words = r'<mrow>((?:<mi mathvariant="normal">\w</mi>)+)</mrow>'
    made = re.sub(words, lambda found: f"<mi>{''.join(re.findall(r'>(.)<', found[1]))}</mi>", made)
    # log q, not logq; a bracket needs no space.
    made = re.sub(r"<mi>log</mi>(?=<m(?!o))", r'\g<0><mspace width="0.17em" />', made)
    # Browsers ignore every other style of letters, and an unknown command is there as it was written.
    if "mathvariant" in made.replace('mathvariant="normal"', "") or "<mo />" in made or "\\" in made:
        raise ValueError(f"browsers would not show this formula as it is written: {latex}")
    return made


def fenced(source: str, *_: Any, **__: Any) -> str:
    """For ``pymdownx.superfences``: a block fenced as ``math``."""
    return f'<p class="formula">{mathml(source.strip(), "block")}</p>'


class _InLine(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> Any:  # noqa: N802, ARG002 - the name that Markdown calls
        return self.md.htmlStash.store(mathml(m[1])), m.start(0), m.end(0)


class Formulas(Extension):
    """``$...$`` in a line."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the name that Markdown calls
        """Before escapes (180), after code (190)."""
        md.inlinePatterns.register(_InLine(_FORMULA, md), "formula", 185)


def makeExtension(**options: Any) -> Formulas:  # noqa: N802 - the name that Markdown calls
    """What Markdown calls."""
    return Formulas(**options)
