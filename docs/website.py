"""Build the site and check it: ``python docs/website.py``. Any warning is an error.

Zensical checks the links between the sources. What it does not see is checked in the pages that it wrote: links of the
API reference and of HTML, anchors, pictures, formulas, and that nothing is loaded from another host.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import notebooks

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
# What a browser loads by itself, as against a link that a reader follows.
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "srcset")}


class Page(HTMLParser):
    """The anchors of a page, where it leads, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: list[tuple[str, bool]] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := values.get(name)))
        is_hint = tag == "link" and values.get("rel") in {"canonical", "prev", "next"}
        for name in ("href", "src", "srcset"):
            if address := values.get(name):
                self.addresses.append((address, (tag, name) in LOADED and not is_hint))


def faults(site: Path) -> Iterator[str]:
    """What is wrong with the pages in a folder, each in a line."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        # What the extension refuses, Markdown shows as code.
        for formula in re.findall(r"<code>math\s+(.*?)</code>", path.read_text(), re.DOTALL):
            yield f"{path.relative_to(site)}: this formula could not be typeset: {formula}"
        for role in re.findall(r":(?:func|class|meth|mod|data|attr):<code>.*?</code>", path.read_text()):
            yield f"{path.relative_to(site)}: this name shows its markup: {role}"
        for address, is_loaded in page.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if is_loaded and parts.scheme != "data":
                    yield f"{path.relative_to(site)}: loads {address} from elsewhere"
                continue
            # The page for unknown addresses is shown anywhere, so its links start at the root.
            start = site if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{path.relative_to(site)}: {address} leads nowhere"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)}: {address} has no such anchor"


def build() -> None:
    """Write the site, or exit with what is wrong."""
    notebooks.write_pages()
    done = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "docs", ROOT / "src"))), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode or "griffe:" in done.stdout:  # a docstring, which strict mode lets pass
        sys.exit(done.stdout)
    if found := list(faults(SITE)):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    build()
