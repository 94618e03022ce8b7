"""The README: its examples run as printed, its table is what was measured, and its links lead somewhere."""

import re
from typing import Any

import pytest
import torch

from bayesbackprop_paper.experiments import page, table1
from repository import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.learning
def test_the_first_example_is_short_and_does_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 15
    names: dict[str, Any] = {}
    exec(EXAMPLES[0], names)
    on, off = names["model"].predict(torch.tensor([[0.25], [2.0]]), draws=100).stddev.flatten().tolist()
    assert capsys.readouterr().out.startswith("tensor")
    assert 0.05 <= on < 0.1
    assert off > 3 * on


@pytest.mark.learning
def test_the_other_examples_run_after_it() -> None:
    names: dict[str, Any] = {}
    exec(EXAMPLES[0].replace("1000", "2"), names)
    for example in EXAMPLES[1:]:
        exec(example, names)
    assert names["p"].mean.shape == names["y"].shape


@pytest.mark.identities
def test_every_link_of_the_readme_leads_somewhere() -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


@pytest.mark.identities
def test_the_table_of_the_readme_is_what_was_measured() -> None:
    _, table = README.split("<!-- results: written by bbb reproduce page -->\n")
    table, _ = table.split("<!-- end of results -->")
    assert table == page.summary(ROOT / "results"), "run bbb reproduce page --readme README.md"


@pytest.mark.identities
def test_the_limit_on_mnist_is_what_was_measured() -> None:
    """How far the scale mixture from random weights is from the paper at temperature 1, at every size."""
    (claimed,) = re.findall(
        r"our errors are the paper's (\S+), (\S+) and (\S+) points \(2x400, 2x800, 2x1200\)\.", README
    )
    cells = table1.summary(table1.read(ROOT / "results" / "table1.csv"))
    differences = {
        units: f"{error - table1.PUBLISHED[method][units]:+.2f}"
        for (method, temperature, units, _), (error, _, _) in cells.items()
        if method == "bbb-mixture" and temperature == 1
    }
    assert claimed == tuple(differences[units] for units in (400, 800, 1200))


@pytest.mark.identities
def test_the_limits_are_five_lines() -> None:
    limits = README.split("## Limits\n\n")[1].split("\n\n")[0].splitlines()
    assert len(limits) == 5
    assert all(line.startswith("- ") for line in limits)


@pytest.mark.identities
def test_the_readme_begins_with_the_picture_and_the_two_commands() -> None:
    assert README.index("![") < README.index("## ")
    assert README.index("make demo") < README.index("make test") < README.index("```python")
    rules = (ROOT / "Makefile").read_text()
    assert "\ndemo: environment" in rules
    assert "\ntest: " in rules
