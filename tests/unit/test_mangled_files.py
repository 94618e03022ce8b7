"""Mangled files of every kind are refused with the one error or load what was written (tests/file_fuzzing.py)."""

from pathlib import Path

import pytest

from file_fuzzing import SUBJECTS, Fuzzer, attack, mutations

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("kind", SUBJECTS)
def test_mangled_files_are_refused_or_equal(kind: str, tmp_path: Path) -> None:
    fuzzer, ends = Fuzzer(kind, tmp_path), set()
    for mangled in mutations(fuzzer.data, seed=0, count=200):
        outcome, what = fuzzer.classify(mangled)
        ends.add(outcome)
        assert outcome in ("refused", "equal", "as written"), what
    assert "refused" in ends


def test_a_child_with_little_memory_reports_each_file() -> None:
    ends, bad = attack("sparse network", 5)
    assert sum(ends.values()) == 5
    assert bad == []
