"""What a measured training step holds and how long it takes, within coarse bounds; nothing else changes meanwhile."""

import pytest
import torch

from bayesbackprop._engine import cpu as fused
from bayesbackprop_paper.bench import cases, report
from bayesbackprop_paper.bench.contenders import OURS, SGD
from bayesbackprop_paper.bench.measuring import Config

pytestmark = pytest.mark.identities


@pytest.fixture(scope="module")
def moderate() -> dict[str, report.Row]:
    """Of 784-400-400-10."""
    run = report.this_run("step", "bbb bench step", threads=1, rounds=15, seed=0)
    return {row.name: row for row in cases.step(Config(run), units=[400])}


def test_a_step_holds_no_tensor_of_weights_beside_its_parameters_and_gradients(
    moderate: dict[str, report.Row],
) -> None:
    """The gradients by mu and rho take the places of those by the drawn weights, and of these."""
    ours, plain = moderate[OURS.name], moderate[SGD.name]
    assert plain.memory is not None
    assert ours.memory is not None
    assert 0 < plain.memory < 0.5  # activations of 128 images alone
    assert ours.memory_activations == plain.memory
    if fused.available():
        assert plain.memory <= ours.memory < 0.5


def test_a_measurement_leaves_threads_and_random_numbers_as_they_were() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    config = Config(report.this_run("predict", "", threads=threads + 1, rounds=2, seed=3))
    cases.predict(config, units=2, images=[1], draws=2)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(not fused.available(), reason="without a C compiler the plain equations are slower")
def test_a_step_is_not_absurdly_slow(moderate: dict[str, report.Row]) -> None:
    ratio = moderate[OURS.name].ratio_sgd
    assert ratio is not None
    assert ratio < 4
