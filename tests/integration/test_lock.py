"""The lock of the environment agrees with pyproject.toml, constraints.txt and the Makefile."""

import re
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from repository import ROOT

pytestmark = pytest.mark.identities

FILES = [ROOT / "requirements/torch.txt", ROOT / "requirements/environment.txt"]
EXTRAS = ["dev", "docs", "hub", "onnx", "paper", "postgres", "serve", "sklearn", "tables"]


def locked() -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package."""
    found = {}
    for path in FILES:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if not line.startswith(("#", "--")):
                pin, *_ = line.split()
                name, version = pin.split("==")
                found[name] = version, re.findall(r"--hash=sha256:([0-9a-f]{64})(?=\s|$)", line)
    return found


def pinned() -> dict[str, str]:
    """The versions in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def missing(requirements: list[str], environment: dict[str, str]) -> list[str]:
    """Those of the requirements that the lock has not, or in a version that does not satisfy them."""
    lock, failed = locked(), []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            version, _ = lock.get(canonicalize_name(requirement.name), (None, []))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                failed.append(text)
    return failed


def declared() -> dict[str, list[str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        content = tomllib.load(file)
    project = content["project"]
    return {"": [*project["dependencies"], *content["build-system"]["requires"]], **project["optional-dependencies"]}


def peers() -> set[str]:
    """The libraries to compare with."""
    asked = declared()
    names = {canonicalize_name(Requirement(text).name) for extra in ("peers", "compare") for text in asked[extra]}
    return names - {"bayesbackprop"}


def test_every_package_has_a_hash_and_stands_in_its_file() -> None:
    lock = locked()
    assert len(lock) > 100
    assert [name for name, (_, hashes) in lock.items() if not hashes] == []
    assert "torch==" not in FILES[1].read_text()
    assert re.findall(r"^[\w-]+==", FILES[0].read_text(), re.MULTILINE) == ["torch=="]


def test_all_that_make_installs_is_locked() -> None:
    """As pyproject.toml asks for it. The libraries to compare with are not: `make bench-peers` installs its own."""
    asked = declared()
    assert missing([text for extra in ["", *EXTRAS] for text in asked[extra]], {"extra": ""}) == []
    assert peers().isdisjoint(locked())


def test_the_versions_are_those_of_the_constraints() -> None:
    lock, constraints = locked(), pinned()
    both = lock.keys() & constraints.keys()
    assert {name: lock[name][0] for name in both} == {name: constraints[name] for name in both}
    others = constraints.keys() - both
    assert others <= peers() | {"torchvision"}, "the lock is old: run `make lock`"


def test_what_locked_packages_need_is_locked() -> None:
    """As far as they are installed here in that version."""
    needed = []
    for name, (version, _) in locked().items():
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if distribution.version.partition("+")[0] == version:
            # What torch needs for CUDA stands in none of our files: see the Makefile.
            needed += [text for text in distribution.requires or [] if not re.match("nvidia|cuda", text)]
    assert missing(needed, {"extra": ""}) == []


def test_make_installs_by_the_lock_alone() -> None:
    """But for torch's own packages for CUDA, and the project itself."""
    text = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^\.venv/ready:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    installed = [line.split(" install ")[1] for line in recipe.splitlines() if " install " in line]
    by_hash = "--require-hashes --no-deps"
    assert installed == [
        f"{by_hash} --no-index --find-links .venv/wheels -r requirements/torch.txt",
        f"{by_hash} -r requirements/environment.txt",
        "-c constraints.txt torch",
        "--no-deps --no-build-isolation -e .",
    ]
