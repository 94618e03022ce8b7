"""The notebooks: ``python docs/notebooks.py`` runs them all and keeps what they show.

With ``--pages`` nothing is run, and a page for the site is written beside each notebook, with its pictures. Git ignores
these pages: the notebooks are the only copy.
"""

import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

HERE = Path(__file__).parent / "notebooks"
# Of an output that has several forms, the first of these is shown.
FORMS = ("image/png", "text/html", "text/plain")
# Seconds that a cell may take.
PATIENCE = 300


def run(path: Path, *more: str) -> Any:
    """A notebook with what its cells show now. ``more`` are cells to run after its own."""
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in more]
    files = Config({"ConnectionFileMixin": {"transport": "ipc"}})  # instead of ports, which others could read
    NotebookClient(notebook, kernel_name="python3", timeout=PATIENCE, record_timing=False, config=files).execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return notebook


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    pictures: dict[str, bytes] = {}
    parts: list[str] = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```py\n{cell.source}\n```")
        for form, content in _shown(cell):
            if form == "image/png":
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(content)
                parts.append(f"![{_alternative(parts)}]({name})")
            else:
                parts.append(content if form == "text/html" else f"```text\n{content.rstrip()}\n```")
    parts.append(f"[This notebook]({path.name})")
    return "\n\n".join(parts) + "\n", pictures


def _shown(cell: Any) -> Iterator[tuple[str, str]]:
    """The outputs of a cell, each in one form."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield "text/plain", output.text
        else:
            form = next(form for form in FORMS if form in output.data)
            yield form, output.data[form]


def _alternative(parts: list[str]) -> str:
    """What stands for a picture where it cannot be seen: the last heading before it."""
    return next(part.splitlines()[0].lstrip("# ") for part in reversed(parts) if part.startswith("#"))


def write_pages(folder: Path = HERE) -> None:
    """Write the page of each notebook and its pictures, and remove those of notebooks that are gone."""
    for old in [*folder.glob("*.md"), *folder.glob("*.png")]:
        old.unlink()
    for path in sorted(folder.glob("*.ipynb")):
        text, pictures = page(path)
        path.with_suffix(".md").write_text(text)
        for name, content in pictures.items():
            (folder / name).write_bytes(content)


if __name__ == "__main__":
    if sys.argv[1:] == ["--pages"]:
        write_pages()
    else:
        for each in [HERE / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
            nbformat.write(run(each), each)
