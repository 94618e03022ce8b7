"""Processes of their own."""

import math
import os

import pytest

from bayesbackprop_paper.bench.apart import call_apart

pytestmark = pytest.mark.identities


def test_each_call_has_a_fresh_process() -> None:
    processes = call_apart(os.getpid, [(), ()]) + call_apart(os.getpid, [()])
    assert len({os.getpid(), *processes}) == 4


def test_results_come_back_in_order_and_errors_too() -> None:
    assert call_apart(math.sqrt, [(4.0,), (9.0,)]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="math domain error"):
        call_apart(math.sqrt, [(-1.0,)])
