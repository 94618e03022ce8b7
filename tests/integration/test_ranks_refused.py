"""What several processes cannot do right yet is refused at once: gradients that nobody averages, sharded weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bayesbackprop as bbb
from bayesbackprop.bandits import ThompsonSampling
from processes import be_rank, run_ranks

pytestmark = pytest.mark.identities

TIMEOUT = 120  # seconds: a rank that waits for one that died is ended

X, Y = torch.ones(4, 3), torch.ones(4, 1)


def _model() -> bbb.Bayesian:
    torch.manual_seed(0)
    return bbb.Bayesian(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), bbb.Gaussian(0.5), seed=0)


def _objective(**options: Any) -> bbb.FreeEnergy:
    return bbb.FreeEnergy(_model(), n=100, **options)


class Outer(nn.Module):
    """A module of a user's own that holds an objective."""

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * self.objective(x, y)


def _sharded(shard: Callable[[bbb.FreeEnergy], nn.Module]) -> None:
    objective = _objective(own_averaging=True)
    objective(X, Y)  # it has been found before where the parameters are
    shard(objective)
    objective(X, Y).backward()


def _fully_shard(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _wrap_sharded() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    _fully_shard(net[0])
    bbb.Bayesian(net, bbb.Gaussian(0.5))


def _evaluate() -> None:
    with torch.no_grad():
        _objective()(X, Y)
    _objective().eval()(X, Y)


def _learn() -> None:
    agent = ThompsonSampling(3, 2, hidden=[4], updates=1, memory=4)
    agent.observe([0.0, 1.0, 0.0], agent.act([0.0, 1.0, 0.0]), 1.0)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "an objective on its own": (
        lambda: _objective()(X, Y),
        "The 'own_averaging' parameter of FreeEnergy must be True where 2 ranks train outside of",
    ),
    "one that is averaged by hand": (lambda: _objective(own_averaging=True)(X, Y).backward(), ""),
    "one in DistributedDataParallel": (lambda: DistributedDataParallel(_objective())(X, Y).backward(), ""),
    "one inside another module": (lambda: DistributedDataParallel(Outer(_objective()))(X, Y).backward(), ""),
    "one beside DistributedDataParallel": (
        lambda: DistributedDataParallel(objective := _objective()) and objective(X, Y),
        "The 'own_averaging' parameter of FreeEnergy must be True",
    ),
    "an evaluation": (_evaluate, ""),
    "an agent": (_learn, ""),
    "a sharded objective": (lambda: _sharded(_fully_shard), "The 'model' parameter of FreeEnergy must be whole"),
    "a sharded network": (
        lambda: _sharded(lambda objective: _fully_shard(objective.model.net)),
        "The 'net' parameter of Bayesian must be whole on each rank",
    ),
    "a sharded layer": (
        lambda: _sharded(lambda objective: _fully_shard(objective.model.net[0])),
        "The 'net' parameter of Bayesian must be whole on each rank",
    ),
    "a network sharded before it is wrapped": (_wrap_sharded, "The 'net' parameter of Bayesian must be whole"),
}


def _rank(folder: str, rank: int) -> None:
    """One of two processes: what each case answers, in a file."""
    said = {}
    for name, (call, _) in CASES.items():
        try:
            call()
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    Path(folder, str(rank)).write_text(json.dumps(said))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The answers of two processes, each of which runs this file."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    run_ranks(__file__, folder, timeout=TIMEOUT)
    return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", list(CASES))
def test_each_rank_is_told_at_once(case: str, answers: list[dict[str, str]]) -> None:
    _, message = CASES[case]
    for said in answers:
        if message:
            assert said[case].startswith(f"ValueError: {message}"), said[case]
        else:
            assert said[case] == ""


if __name__ == "__main__":
    be_rank(_rank)
