"""A resumed run is the uninterrupted run: the objective's state_dict has all that its noise depends on."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bayesbackprop import Bayesian, FreeEnergy, Gaussian
from layers import each_estimator
from small_runs import SEED, N, data

pytestmark = pytest.mark.equivalence


@pytest.mark.supports("Training", "state_dict and load_state_dict", "a resumed run is the uninterrupted one")
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
            cost = free_energy(*data())
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
