"""How results say what made them."""

import json
import sys
from pathlib import Path

import pytest
import torch

from bayesbackprop_paper.experiments import records

pytestmark = pytest.mark.identities


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("reproduce table1 --seeds 3 --threads 1", "bbb reproduce table1 --seeds 3 --threads 1"),
        ("reproduce table1 --runs /a/b --seeds 3 --results c", "bbb reproduce table1 --seeds 3"),
        ("reproduce table1 --runs=/a/b --seeds=3", "bbb reproduce table1 --seeds=3"),
        ("truth ood --results --method", "bbb truth ood"),  # a folder of an odd name
    ],
)
def test_a_command_is_kept_without_the_folders_of_this_machine(
    said: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bbb", *said.split()])
    assert records.command() == kept


def test_a_figure_keeps_the_commands_of_curves_that_were_not_drawn_again(tmp_path: Path) -> None:
    path = tmp_path / "fig2.json"
    records.write_line(path, "one", "bbb one", ["sgd", "dropout"])
    records.write_line(path, "two", "bbb two", ["sgd"])
    found = json.loads(path.read_text())
    assert (found["line"], found["command"]) == ("two", "bbb two")
    assert found["commands"] == {"sgd": "bbb two", "dropout": "bbb one"}


def test_words_with_spaces_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bbb", "truth", "ood", "--method", "MC dropout"])
    assert records.command() == "bbb truth ood --method 'MC dropout'"


def test_arithmetic_is_that_of_this_process() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert records.arithmetic() == {
            "threads": 1,
            "torch": torch.__version__,
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
    finally:
        torch.set_num_threads(before)
