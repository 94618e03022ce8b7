"""Two ranks are one process with twice the draws, and average what each alone would give."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bayesbackprop import Cost, FreeEnergy
from processes import RANKS, be_rank, run_ranks
from small_runs import EXAMPLES, N, data, gradients, parts, small_free_energy

pytestmark = pytest.mark.equivalence

STEPS = 2

TIMEOUT = 120  # seconds: a rank that waits for one that died is ended

CASES: dict[str, dict[str, Any]] = {
    f"{estimator}, {complexity}, {batches}": {
        "options": {"estimator": estimator, "complexity": complexity},
        "same": batches == "one batch",
    }
    for estimator, complexity, batches in itertools.product(
        ("shared", "local", "flipout"), ("sampled", "closed"), ("one batch", "a batch each")
    )
} | {
    "two draws each": {"options": {"estimator": "shared", "complexity": "sampled", "draws": 2}, "same": True},
    "geometric": {
        "options": {
            "estimator": "shared",
            "complexity": "sampled",
            "minibatch_weights": "geometric",
            "batch_size": RANKS * EXAMPLES,
        },
        "same": False,
    },
}


def _batch(case: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    return data(step if CASES[case]["same"] else step + 100 * rank)


def _run(free_energy: Callable[..., Cost], module: nn.Module, case: str, rank: int) -> list[dict[str, Any]]:
    """What some steps of training cost, and their gradients."""
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    records = []
    for step in range(STEPS):
        optimiser.zero_grad()
        which = {"batch": step} if "minibatch_weights" in CASES[case]["options"] else {}
        cost = free_energy(*_batch(case, rank, step), **which)
        cost.backward()
        records.append({"cost": parts(cost), "gradients": gradients(module)})
        optimiser.step()
    return records


def _rank(folder: str, rank: int) -> None:
    """One of two processes: every case, and its records in a file."""
    records = {}
    for name, case in CASES.items():
        free_energy = small_free_energy(**case["options"])
        parallel = DistributedDataParallel(free_energy)
        records[name] = _run(parallel, parallel, name, rank)
        records[name].append({"step": free_energy.state_dict()["step"]})
    torch.save(records, f"{folder}/{rank}")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of two processes, each of which runs this file."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    run_ranks(__file__, folder, timeout=TIMEOUT)
    return [torch.load(f"{folder}/{rank}") for rank in range(RANKS)]


def _cost_by_hand(free_energy: FreeEnergy, case: str, rank: int, step: int) -> Tensor:
    """What a rank's cost is: its own draws, its own batch, and the complexity's share of an example of all ranks."""
    options, model = CASES[case]["options"], free_energy.model
    x, y = _batch(case, rank, step)
    draws = options.get("draws", 1)
    pi = {0: 8 / 15, 1: 4 / 15}[step] / (RANKS * EXAMPLES) if "minibatch_weights" in options else 1 / N
    costs = []
    for index in range(rank * draws, (rank + 1) * draws):
        draw = model.draw(step=step + 1, index=index)
        log_prob = torch.distributions.Normal(draw(x), model.likelihood.log_noise.exp()).log_prob(y).sum(1).mean()
        complexity = draw.complexity() if options["complexity"] == "sampled" else model.complexity_closed()
        costs.append(pi * complexity - log_prob)
    return torch.stack(costs).mean()


@pytest.mark.parametrize("case", list(CASES))
def test_ranks_average_what_each_alone_would_give(case: str, ranks: list[dict[str, Any]]) -> None:
    free_energy = small_free_energy(**CASES[case]["options"])
    optimiser = torch.optim.SGD(free_energy.parameters(), lr=0.1)
    for step in range(STEPS):
        optimiser.zero_grad()
        costs = [_cost_by_hand(free_energy, case, rank, step) for rank in range(RANKS)]
        torch.stack(costs).mean().backward()
        for rank in range(RANKS):
            record = ranks[rank][case][step]
            torch.testing.assert_close(record["cost"][0], costs[rank].detach())
            torch.testing.assert_close(record["gradients"], gradients(free_energy))
        optimiser.step()
    assert [int(ranks[rank][case][STEPS]["step"]) for rank in range(RANKS)] == [STEPS] * RANKS


@pytest.mark.supports("Training", "DistributedDataParallel", "two ranks are one process")
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case["same"]])
def test_two_ranks_are_one_process_with_twice_the_draws(case: str, ranks: list[dict[str, Any]]) -> None:
    options = CASES[case]["options"]
    free_energy = small_free_energy(**{**options, "draws": RANKS * options.get("draws", 1)})
    for step, one in enumerate(_run(free_energy, free_energy, case, rank=0)):
        several = [ranks[rank][case][step] for rank in range(RANKS)]
        torch.testing.assert_close(several[0]["gradients"], one["gradients"])
        parts = [torch.stack([record["cost"][part] for record in several]) for part in range(4)]
        torch.testing.assert_close([part.mean(0) for part in parts], one["cost"])
        # Each rank has noise of its own: on the same batch their likelihoods differ, and their complexities if sampled.
        assert not torch.isclose(*parts[1])
        assert torch.equal(*parts[2]) == (options["complexity"] == "closed")


if __name__ == "__main__":
    be_rank(_rank)
