"""Writes torch.txt and environment.txt: what `make` installs, with the hashes of the wheels.

`make lock` runs it. pip resolves the extras that `make` installs under constraints.txt. The hashes are those of all
wheels of these versions on pip's index for Linux and macOS, Python 3.11 to 3.13, and of those that pip found elsewhere,
such as a build of torch without CUDA. Hashes of a version that is locked already are kept.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
TORCH, ENVIRONMENT = (Path(__file__).with_name(name) for name in ("torch.txt", "environment.txt"))
EXTRAS = ("dev", "docs", "hub", "onnx", "paper", "postgres", "serve", "sklearn", "tables")
PYTHONS = [(3, 11), (3, 12), (3, 13)]
HEADER = """\
# Made by `make lock` from pyproject.toml and constraints.txt: wheels for Linux and macOS, Python 3.11 to 3.13.
--only-binary :all:
"""


def requirements() -> list[str]:
    """What `make` installs."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)
    project = declared["project"]
    extras = (requirement for extra in EXTRAS for requirement in project["optional-dependencies"][extra])
    return [*project["dependencies"], *extras, *declared["build-system"]["requires"]]


def resolved() -> Iterator[tuple[str, str, str]]:
    """Name, version and hash of every package that pip would install here."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--quiet", "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--report", str(report)]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *constraints, *requirements()], check=True)
        for package in json.loads(report.read_text())["install"]:
            digest = package["download_info"]["archive_info"]["hash"].removeprefix("sha256=")
            yield canonicalize_name(package["metadata"]["name"]), package["metadata"]["version"], digest


def supported() -> set[Tag]:
    """The wheels that fit the machines the environment is for."""
    linux = [f"manylinux_2_{minor}_{machine}" for minor in range(5, 40) for machine in ("x86_64", "aarch64")]
    linux += [f"manylinux{year}_{machine}" for year in (1, 2010, 2014) for machine in ("x86_64", "aarch64")]
    platforms = [*linux, *mac_platforms((15, 0), "arm64"), *mac_platforms((15, 0), "x86_64")]
    return {
        tag
        for python in PYTHONS
        for tags in (cpython_tags, compatible_tags)
        for tag in tags(python, platforms=platforms)
    } | {*compatible_tags(PYTHONS[-1], platforms=["any"])}


class Links(HTMLParser):
    """The links of one page of the index."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def index() -> str:
    """The address of pip's index: as configured, or pip's own."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    from pip._internal.models.index import PyPI

    return os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or str(PyPI.simple_url)


def wheels(page: str, name: str, version: str, tags: set[Tag]) -> Iterator[tuple[str, str]]:
    """File name and hash of the wheels of one version that fit."""
    request = urllib.request.Request(f"{page.rstrip('/')}/{name}/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        links = Links()
        links.feed(answer.read().decode())
    for link in links.found:
        address = urllib.parse.urlsplit(link)
        file = urllib.parse.unquote(address.path.rsplit("/", 1)[-1])
        with contextlib.suppress(InvalidWheelFilename):  # an archive of the source, or an old name
            _, found, _, fits = parse_wheel_filename(file)
            if found == Version(version) and fits & tags:
                yield file, address.fragment.removeprefix("sha256=")


def known() -> dict[str, set[str]]:
    """The hashes that are locked already, by pinned requirement."""
    text = "".join(path.read_text() for path in (TORCH, ENVIRONMENT) if path.exists()).replace("\\\n", " ")
    return {
        line.split()[0]: set(re.findall(r"--hash=sha256:(\w+)", line)) for line in text.splitlines() if "==" in line
    }


def main() -> None:
    """Write both files."""
    page, tags, before = index(), supported(), known()
    lines: dict[Path, list[str]] = {TORCH: [], ENVIRONMENT: []}
    for name, version, digest in sorted(resolved()):
        public = version.partition("+")[0]  # a local build, such as 2.13.0+cpu, is one of the builds of 2.13.0
        found = dict(wheels(page, name, public, tags))
        pin = f"{name}=={public}"
        only_linux = found and not any("macosx" in file or file.endswith("-any.whl") for file in found)
        digests = sorted({digest, *found.values()} | before.get(pin, set()))
        elsewhere = "" if digest in found.values() else f", one of them not on the index ({version})"
        print(f"{pin}: {len(digests)} wheels{elsewhere}", file=sys.stderr)
        marker = " ; platform_system == 'Linux'" if only_linux else ""
        lines[TORCH if name == "torch" else ENVIRONMENT].append(
            " \\\n".join([pin + marker, *(f"    --hash=sha256:{each}" for each in digests)])
        )
    for path, each in lines.items():
        path.write_text(HEADER + "\n".join(each) + "\n")


if __name__ == "__main__":
    main()
