"""The same step three ways: eager, compiled, and spread over two ranks; and again after it was interrupted."""

import copy
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from bayesbackprop import Bayesian, Cost, FreeEnergy, Gaussian, Normal, ScaleMixture

pytestmark = pytest.mark.equivalence

each_estimator = pytest.mark.parametrize("estimator", ["shared", "local", "flipout"])
each_complexity = pytest.mark.parametrize("complexity", ["sampled", "closed"])

N, EXAMPLES, SEED = 40, 5, 11
PRIORS = {"sampled": ScaleMixture(), "closed": Normal(0.5)}


def _free_energy(estimator: Any, complexity: str, net: nn.Module | None = None, **options: Any) -> FreeEnergy:
    torch.manual_seed(4)
    net = net or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    likelihood = Gaussian("learnt")
    model = Bayesian(net, likelihood, PRIORS[complexity], sigma=0.3, estimator=estimator, seed=SEED)
    return FreeEnergy(model, n=N, complexity=complexity, **options).double()


def _data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(EXAMPLES, size, generator=generator, dtype=torch.float64) for size in (3, 2))
    return x, y


def _parts(cost: Cost) -> list[Tensor]:
    parts = (cost.total, cost.likelihood, cost.complexity, cost.complexity_weight)
    return [part.detach() for part in parts]


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        gradients[name.removeprefix("module.")] = parameter.grad.clone()
    return gradients


# --- compiled = eager ------------------------------------------------------------------------------------------------


def _assert_same_steps(eager: FreeEnergy, backend: str, **tolerance: float) -> None:
    """Three steps of training, the same compiled as eager; one graph for all; and no step on numbers that are none."""
    x, y = (value.to(eager.model.likelihood.log_noise.dtype) for value in _data())
    twin = copy.deepcopy(eager)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    pairs = [(each, torch.optim.Adam(each.parameters(), lr=0.01)) for each in (eager, twin)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            for _, optimiser in pairs:
                optimiser.zero_grad()
            expected, got = eager(x, y), compiled(x, y)
            assert isinstance(got, Cost)
            torch.testing.assert_close(_parts(got), _parts(expected), **tolerance)
            expected.backward()
            got.backward()
            torch.testing.assert_close(_gradients(twin), _gradients(eager), **tolerance)
            for _, optimiser in pairs:
                optimiser.step()
        first, second = compiled(x, y).total, compiled(x, y).total  # of one posterior: noise alone tells them apart
        assert not torch.isclose(first, second, **tolerance)
        assert int(twin.step) == 5

        for spoilt in ((torch.full_like(x, torch.nan), y), (x, torch.full_like(y, torch.inf))):
            with pytest.raises(RuntimeError, match="must be finite"):
                compiled(*spoilt)
            assert int(twin.step) == 5
        eager.load_state_dict(twin.state_dict())
        torch.testing.assert_close(compiled(x, y).total, eager(x, y).total, **tolerance)  # it goes on as if nothing was
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@each_estimator
@each_complexity
def test_a_compiled_step_is_the_eager_step(estimator: str, complexity: str) -> None:
    net = nn.Linear(3, 2, bias=complexity == "closed")  # tracing noise is slow: with a bias where there is less of it
    _assert_same_steps(_free_energy(estimator, complexity, net), backend="aot_eager")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own imports
def test_generated_code_computes_the_eager_step() -> None:
    """Inductor's code, for one small network in the type of everyday use, since a compiler takes its time."""
    eager = _free_energy("shared", "sampled", nn.Linear(3, 2, bias=False)).float()
    _assert_same_steps(eager, backend="inductor", rtol=1e-4, atol=1e-5)


# --- two ranks = one -------------------------------------------------------------------------------------------------

RANKS, STEPS = 2, 2
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
    return _data(step if CASES[case]["same"] else step + 100 * rank)


def _run(free_energy: Callable[..., Cost], module: nn.Module, case: str, rank: int) -> list[dict[str, Any]]:
    """What some steps of training cost, and their gradients."""
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    records = []
    for step in range(STEPS):
        optimiser.zero_grad()
        which = {"batch": step} if "minibatch_weights" in CASES[case]["options"] else {}
        cost = free_energy(*_batch(case, rank, step), **which)
        cost.backward()
        records.append({"cost": _parts(cost), "gradients": _gradients(module)})
        optimiser.step()
    return records


def _rank(rank: int, folder: str) -> None:
    """One of two processes: every case, and its records in a file."""
    torch.set_num_threads(1)
    limit, at = timedelta(seconds=TIMEOUT), f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=RANKS, timeout=limit)
    records = {}
    for name, case in CASES.items():
        free_energy = _free_energy(**case["options"])
        parallel = DistributedDataParallel(free_energy)
        records[name] = _run(parallel, parallel, name, rank)
        records[name].append({"step": free_energy.state_dict()["step"]})
    torch.save(records, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of two processes, each of which runs this file."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, __file__, str(rank), folder] for rank in range(RANKS)]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
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
    free_energy = _free_energy(**CASES[case]["options"])
    optimiser = torch.optim.SGD(free_energy.parameters(), lr=0.1)
    for step in range(STEPS):
        optimiser.zero_grad()
        costs = [_cost_by_hand(free_energy, case, rank, step) for rank in range(RANKS)]
        torch.stack(costs).mean().backward()
        for rank in range(RANKS):
            record = ranks[rank][case][step]
            torch.testing.assert_close(record["cost"][0], costs[rank].detach())
            torch.testing.assert_close(record["gradients"], _gradients(free_energy))
        optimiser.step()
    assert [int(ranks[rank][case][STEPS]["step"]) for rank in range(RANKS)] == [STEPS] * RANKS


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case["same"]])
def test_two_ranks_are_one_process_with_twice_the_draws(case: str, ranks: list[dict[str, Any]]) -> None:
    options = CASES[case]["options"]
    free_energy = _free_energy(**{**options, "draws": RANKS * options.get("draws", 1)})
    for step, one in enumerate(_run(free_energy, free_energy, case, rank=0)):
        several = [ranks[rank][case][step] for rank in range(RANKS)]
        torch.testing.assert_close(several[0]["gradients"], one["gradients"])
        parts = [torch.stack([record["cost"][part] for record in several]) for part in range(4)]
        torch.testing.assert_close([part.mean(0) for part in parts], one["cost"])
        # Each rank has noise of its own: on the same batch their likelihoods differ, and their complexities if sampled.
        assert not torch.isclose(*parts[1])
        assert torch.equal(*parts[2]) == (options["complexity"] == "closed")


# --- resumed = uninterrupted -----------------------------------------------------------------------------------------


@each_estimator
@pytest.mark.parametrize("seed", [SEED, None], ids=["seed given", "seed left out"])
def test_a_resumed_run_is_the_uninterrupted_run(estimator: str, seed: int | None, tmp_path: Path) -> None:
    def start() -> tuple[FreeEnergy, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        model = Bayesian(net, Gaussian("learnt"), sigma=0.3, estimator=estimator, centre="net", seed=seed)
        free_energy = FreeEnergy(model, n=N, draws=2, warmup=5)
        return free_energy, torch.optim.Adam(free_energy.parameters(), lr=0.05)

    def train(free_energy: FreeEnergy, optimiser: torch.optim.Optimizer, steps: int) -> list[Tensor]:
        totals = []
        for _ in range(steps):
            optimiser.zero_grad()
            cost = free_energy(*_data())
            cost.backward()
            optimiser.step()
            totals.append(cost.total.detach())
        return totals

    run = start()
    assert int(run[0].state_dict()["step"]) == 0
    train(*run, 3)
    assert int(run[0].state_dict()["step"]) == 3
    torch.save([part.state_dict() for part in run], tmp_path / "checkpoint")
    torch.manual_seed(777)  # another process: nothing is left but the file
    resumed = start()
    for part, state in zip(resumed, torch.load(tmp_path / "checkpoint"), strict=True):
        part.load_state_dict(state)
    expected, got = train(*run, 3), train(*resumed, 3)
    assert torch.equal(torch.stack(got), torch.stack(expected))
    assert len({float(total) for total in got}) == 3


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2])
