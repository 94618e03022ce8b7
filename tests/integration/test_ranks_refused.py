"""What several processes cannot do right is refused at once: gradients that nobody averages, parts of weights."""

import json
import os
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


class Lightning(nn.Module):
    """As Lightning has it: the objective is a part, and ``forward`` of the whole is for something else."""

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, x: Tensor) -> Tensor:
        return self.objective.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.objective(*batch)


def _lightning_step(wrapped: bool) -> None:
    """What wraps a module in DistributedDataParallel calls its step in the place of ``forward``, or beside it."""
    module = Lightning(_objective())
    parallel = DistributedDataParallel(module)
    if wrapped:
        module.forward = module.training_step  # type: ignore[method-assign]
        parallel((X, Y)).backward()
    else:
        module.training_step((X, Y)).backward()


def _accelerated(prepared: Callable[[bbb.FreeEnergy], nn.Module]) -> None:
    """As Accelerate has it: what is prepared is wrapped, and its ``forward`` exchanged for one that casts."""
    objective = _objective()
    module = prepared(objective)
    forward = module.forward
    module.forward = lambda *args: forward(*args)  # type: ignore[method-assign]
    parallel = DistributedDataParallel(module)
    (parallel if module is objective else objective)(X, Y).backward()


def _sharded(shard: Callable[[bbb.FreeEnergy], nn.Module]) -> bbb.FreeEnergy:
    objective = _objective(own_averaging=True)
    objective(X, Y)  # it has been found before where the parameters are
    shard(objective)
    return objective


def _fully_shard(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _wrap_sharded(gathered: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    _fully_shard(net[0])
    if gathered:
        net[0].unshard()
    bbb.Bayesian(net, bbb.Gaussian(0.5))


def _all_sharded(use: Callable[[bbb.FreeEnergy], Any]) -> Any:
    """After a step, which leaves an engine behind that knows whole parameters."""
    objective = _objective()
    _fully_shard(objective.model.net[0])
    _fully_shard(objective)
    objective(X, Y).backward()
    return use(objective)


def _gathered_by_hand() -> None:
    objective = _sharded(lambda objective: _fully_shard(objective.model.net[0]))
    objective.model.net[0].unshard()
    objective(X, Y).backward()


def _outer_sharded(also_the_objective: bool) -> None:
    objective = _objective()
    outer = Outer(objective)
    if also_the_objective:
        _fully_shard(objective)
    _fully_shard(outer)
    outer(X, Y).backward()
    if also_the_objective:
        assert all(parameter.grad is not None for parameter in outer.parameters())


def _train_gathered(objective: bbb.FreeEnergy) -> None:
    with bbb.unsharded(objective), torch.enable_grad():
        objective(X, Y).backward()


COPIES: dict[str, Callable[[bbb.Bayesian], object]] = {
    "an ensemble": lambda model: model.ensemble(3),
    "a pruned copy": lambda model: bbb.prune(model, 0.5),
    "the mean": bbb.mean_network,
    "a draw": bbb.DrawnNetwork,
}


def _copied(objective: bbb.FreeEnergy, copied: Callable[[bbb.Bayesian], object]) -> None:
    with bbb.unsharded(objective):
        copied(objective.model)


def _goes_on_after_a_bad_batch(objective: bbb.FreeEnergy) -> None:
    with pytest.raises(ValueError, match="finite"):
        objective(X / 0, Y)
    assert all(hasattr(parameter, "to_local") for parameter in objective.parameters())
    objective(X, Y).backward()


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
    "a step of Lightning": (lambda: _lightning_step(wrapped=True), ""),
    "a step beside that of Lightning": (
        lambda: _lightning_step(wrapped=False),
        "The 'own_averaging' parameter of FreeEnergy must be True",
    ),
    "one that Accelerate has prepared": (lambda: _accelerated(lambda objective: objective), ""),
    "one of which Accelerate has prepared the network": (
        lambda: _accelerated(lambda objective: objective.model.net),
        "The 'own_averaging' parameter of FreeEnergy must be True",
    ),
    "a sharded objective": (lambda: _sharded(_fully_shard)(X, Y).backward(), ""),
    "a sharded network": (
        lambda: _sharded(lambda objective: _fully_shard(objective.model.net))(X, Y),
        "The 'net' parameter of Bayesian must be whole on each rank",
    ),
    "a sharded model": (
        lambda: _sharded(lambda objective: _fully_shard(objective.model))(X, Y),
        "The 'net' parameter of Bayesian must be whole on each rank",
    ),
    "a sharded layer": (
        lambda: _sharded(lambda objective: _fully_shard(objective.model.net[0]))(X, Y),
        "The 'net' parameter of Bayesian must be whole on each rank",
    ),
    "a sharded layer that is whole for now": (
        _gathered_by_hand,
        "The 'model' parameter of FreeEnergy must be divided together with the objective",
    ),
    "a module that is sharded around an objective": (
        lambda: _outer_sharded(also_the_objective=False),
        "The 'own_averaging' parameter of FreeEnergy must be True",
    ),
    "a module that is sharded with an objective": (lambda: _outer_sharded(also_the_objective=True), ""),
    "a network sharded before it is wrapped": (
        lambda: _wrap_sharded(gathered=False),
        "The 'net' parameter of Bayesian must be whole",
    ),
    "one that is whole for now": (
        lambda: _wrap_sharded(gathered=True),
        "The 'net' parameter of Bayesian must be wrapped before it is divided",
    ),
    "forward alone of a sharded objective": (
        lambda: _all_sharded(lambda objective: objective.forward(X, Y)),
        "The 'model' parameter of FreeEnergy must be called as a module",
    ),
    "training of gathered parameters": (
        lambda: _all_sharded(_train_gathered),
        "The 'model' parameter of FreeEnergy must be called as a module",
    ),
    "a prediction of a sharded model": (
        lambda: _all_sharded(lambda objective: objective.model.predict(X)),
        "The 'net' parameter of Bayesian must be whole on each rank",
    ),
    "a draw of a sharded model": (
        lambda: _all_sharded(lambda objective: objective.model.draw()(X)),
        "The 'net' parameter of Bayesian must be whole on each rank",
    ),
    "saving a sharded model": (
        lambda: _all_sharded(lambda objective: bbb.save(objective.model, os.devnull)),
        "The 'model' parameter of save must be whole on each rank",
    ),
    **{
        f"{name} of a network with a divided layer": (
            lambda copied=copied: _all_sharded(lambda objective: _copied(objective, copied)),  # type: ignore[misc]
            "The 'net' parameter of a copy must be whole where it is copied: save the model inside unsharded",
        )
        for name, copied in COPIES.items()
    },
    "fitting a sharded objective": (
        lambda: _all_sharded(lambda objective: bbb.fit(objective, [(X, Y)], epochs=1)),
        "The 'model' parameter of fit must be whole on each rank",
    ),
    "fitting a sharded model": (
        lambda: _all_sharded(lambda objective: bbb.fit(objective.model, [(X, Y)], epochs=1, n=4)),
        "The 'model' parameter of fit must be whole on each rank",
    ),
    "minimising a sharded objective": (
        lambda: _all_sharded(lambda objective: bbb.Adam(objective.parameters()).minimise(objective, X, Y)),
        "",
    ),
    "a bad batch for a sharded objective": (lambda: _all_sharded(_goes_on_after_a_bad_batch), ""),
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
