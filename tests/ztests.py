"""The one false-alarm rate of the suite, and the tests that keep to it.

A statistical test here fails a correct library with probability FALSE_ALARM if its seed were drawn afresh. Seeds are
fixed, so a test that passes keeps passing.
"""

import math

from scipy import stats
from torch import Tensor

FALSE_ALARM = 1e-4


def assert_z(z: Tensor, what: str) -> None:
    """Each element of ``z`` is standard normal under the hypothesis; the rate is shared among them (Bonferroni)."""
    limit = stats.norm.isf(FALSE_ALARM / (2 * z.numel()))
    worst = float(z.abs().max())
    assert worst < limit, f"{what}: |z| = {worst:.2f} exceeds {limit:.2f}"


def assert_mean(samples: Tensor, expected: Tensor | float, what: str) -> None:
    """The mean over dimension 0 of independent ``samples`` is ``expected``."""
    samples = samples.double()
    error = samples.std(0) / math.sqrt(len(samples))
    assert_z(((samples.mean(0) - expected) / error).flatten(), what)


def assert_variance(samples: Tensor, expected: Tensor | float, what: str) -> None:
    """The variance over dimension 0 of independent ``samples`` is ``expected``."""
    samples = samples.double()
    assert_mean((samples - samples.mean(0)).square() * (len(samples) / (len(samples) - 1)), expected, what)


def assert_p_value(p_value: float, what: str) -> None:
    """A p-value is not below the false-alarm rate."""
    assert p_value > FALSE_ALARM, f"{what}: p = {p_value:.2g}"
