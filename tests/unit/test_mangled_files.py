"""Mangled files of every kind are refused with the one error or load what was written (tests/file_fuzzing.py)."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from file_fuzzing import SUBJECTS, Fuzzer, attack, mangle

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("kind", SUBJECTS)
def test_mangled_files_are_refused_or_equal(kind: str, tmp_path: Path) -> None:
    fuzzer, ends = Fuzzer(kind, tmp_path), set()

    @settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def tried(choices: random.Random) -> None:
        outcome, what = fuzzer.classify(mangle(fuzzer.data, choices))
        ends.add(outcome)
        assert outcome in ("refused", "equal", "as written"), what

    tried()
    assert "refused" in ends


def test_a_child_with_little_memory_reports_each_file() -> None:
    ends, bad = attack("sparse network", 5)
    assert sum(ends.values()) == 5
    assert bad == []
