"""The README's examples run as printed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from repository import ROOT

pytestmark = pytest.mark.learning

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_first_example_is_short_and_does_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 15
    names: dict[str, Any] = {}
    exec(EXAMPLES[0], names)
    on, off = names["model"].predict(torch.tensor([[0.25], [2.0]]), draws=100).stddev.flatten().tolist()
    assert capsys.readouterr().out.startswith("tensor")
    assert 0.05 <= on < 0.1
    assert off > 3 * on


def test_the_other_examples_run_after_it() -> None:
    names: dict[str, Any] = {}
    exec(EXAMPLES[0].replace("1000", "2"), names)
    for example in EXAMPLES[1:]:
        exec(example, names)
    assert names["p"].mean.shape == names["y"].shape


def test_every_link_of_the_readme_leads_somewhere() -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_the_examples_of_the_docs_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(example, {})
