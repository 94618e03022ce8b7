"""Every bad call of the public API is answered clearly."""

import pytest
import torch

import bayesbackprop
from bad_call_table import TABLE
from bad_calls import answers, table
from bayesbackprop import bandits, callbacks

pytestmark = pytest.mark.identities

# Those without a call of their own: what is abstract, what takes nothing, what others make, and modules.
WITHOUT = {"Agent", "Bernoulli", "Callback", "Environment", "Estimate", "Likelihood", "Poisson", "Predictive", "Prior"}
WITHOUT |= {
    "ConvergenceWarning",
    "Decision",
    "Diagonal",
    "DiagnosisWarning",
    "Draw",
    "Explanation",
    "FullCovariance",
    "__version__",
}
WITHOUT |= {"callbacks", "distributed", "plain_kernels", "pruning"}
# A right call of these takes seconds, or a network: test_portable.py and test_hub.py have their bad ones.
WITHOUT |= {"from_pretrained", "push_to_hub", "save_onnx"}


def test_every_bad_call_is_answered_clearly() -> None:
    torch.distributions.Distribution.set_default_validate_args(False)  # as torch.compile leaves it
    try:
        found = answers()
    finally:
        torch.distributions.Distribution.set_default_validate_args(True)
    wrong = [each for each in found if each.verdict in ("silent", "obscure")]
    assert not wrong, "\n".join([*(f"{each.verdict} {each.call}: {each.said[:200]}" for each in wrong), table(found)])
    assert len(found) > 5000


def test_every_public_name_is_in_the_table() -> None:
    names = {*bayesbackprop.__all__, *callbacks.__all__, *bandits.__all__} - WITHOUT
    called = {name.partition(",")[0].rpartition(".")[2] for name in TABLE}
    assert names <= called
