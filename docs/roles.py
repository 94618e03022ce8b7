"""Names in docstrings, such as ``:func:`~bayesbackprop.fit```, as the code that they name.

A Markdown extension (``markdown_extensions`` in mkdocs.yml). Editors understand these roles, Markdown does not.
"""

import re
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.util import AtomicString

# A tilde stands for the last part of the name alone.
_ROLE = r":(?:func|class|meth|mod|data|attr):`(?:~(?:\w+\.)*)?([^`]+)`"


class _Role(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> Any:  # noqa: N802, ARG002 - the name that Markdown calls
        code = Element("code")
        code.text = AtomicString(m[1])
        return code, m.start(0), m.end(0)


class Roles(Extension):
    """Roles in a line."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the name that Markdown calls
        """Before code (190), which would take the name without its role."""
        md.inlinePatterns.register(_Role(_ROLE, md), "role", 195)


def makeExtension(**options: Any) -> Roles:  # noqa: N802 - the name that Markdown calls
    """What Markdown calls."""
    return Roles(**options)
