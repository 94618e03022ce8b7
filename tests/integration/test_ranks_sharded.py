"""Two ranks that ``fully_shard`` has given a part of each parameter are two ranks with all of them."""

import itertools
import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import bayesbackprop as bbb
from bayesbackprop import FreeEnergy
from processes import RANKS, be_rank, run_ranks
from small_runs import data, parts, small_free_energy

pytestmark = pytest.mark.equivalence

STEPS = 2

TIMEOUT = 180  # seconds: a rank that waits for one that died is ended


def shard(module: nn.Module, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=_mesh(), **options)


@cache
def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def root(objective: FreeEnergy, **options: Any) -> None:
    # Torch divides no number without dimensions.
    shard(objective, ignored_params=set(objective.model.likelihood.parameters()), **options)


def layers_and_root(objective: FreeEnergy) -> None:
    for layer in objective.model.net.children():
        if next(layer.parameters(), None) is not None:
            shard(layer)
    root(objective)


def network_and_root(objective: FreeEnergy) -> None:
    shard(objective.model.net)
    root(objective, reshard_after_forward=True)


WAYS: dict[str, Callable[[FreeEnergy], None]] = {
    "the objective": root,
    "layers and the objective": layers_and_root,
    "the network and the objective": network_and_root,
}


class Odd(nn.Module):
    """No fast path: layers of several kinds, of which one is computed a second time."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.recurrent = nn.LSTM(4, 3, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.last = nn.Linear(3, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.recurrent(self.norm(self.first(x)).unsqueeze(1))[0].squeeze(1)
        reentrant = self.use_reentrant
        return self.last(self.inner(h) if reentrant is None else checkpoint(self.inner, h, use_reentrant=reentrant))


NETS: dict[str, Callable[[], nn.Module | None]] = {
    "fully connected": lambda: None,
    "odd": Odd,
    "checkpointed": lambda: Odd(use_reentrant=False),
    "checkpointed, reentrant": lambda: Odd(use_reentrant=True),
}

OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "ours": lambda parameters: bbb.Adam(parameters, lr=0.1),
}

CASES: dict[str, dict[str, Any]] = {
    f"{way}, {net}, {estimator}, {complexity}": {
        "way": way,
        "net": net,
        "options": {"estimator": estimator, "complexity": complexity},
    }
    for way, net, (estimator, complexity) in itertools.product(
        WAYS, NETS, (("shared", "sampled"), ("local", "sampled"), ("flipout", "closed"))
    )
} | {
    f"{optimiser}, {way}": {
        "way": way,
        "net": "fully connected",
        "optimiser": optimiser,
        "options": {"estimator": "shared", "complexity": "sampled", "draws": 2},
    }
    for way, optimiser in itertools.product(WAYS, OPTIMISERS)
}


def _start(case: str) -> FreeEnergy:
    torch.manual_seed(1)
    options = {"estimator": "shared", "complexity": "sampled", **CASES[case]["options"]}
    return small_free_energy(net=NETS[CASES[case]["net"]](), **options)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _train(module: nn.Module, case: str, batch: Callable[[int], tuple[Tensor, Tensor]]) -> list[dict[str, Any]]:
    """The costs and gradients of some steps, and the parameters after each."""
    optimiser = OPTIMISERS[CASES[case].get("optimiser", "SGD")](module.parameters())
    records = []
    for step in range(STEPS):
        optimiser.zero_grad()
        cost = module(*batch(step))
        cost.backward()
        gradients = [_whole(parameter.grad) for parameter in module.parameters()]
        optimiser.step()
        with torch.no_grad():
            evaluated = parts(module(*data(7)))
        after = [_whole(parameter) for parameter in module.parameters()]
        records.append({"cost": parts(cost), "gradients": gradients, "evaluated": evaluated, "after": after})
    return records


def _rank(folder: str, rank: int) -> None:
    """One of two processes: every case with a batch of its own, sharded and in ``DistributedDataParallel``."""
    records: dict[str, Any] = {}
    for name, case in CASES.items():
        sharded = _start(name)
        WAYS[case["way"]](sharded)
        of = {"sharded": _train(sharded, name, lambda step: data(step + 100 * rank))}
        parallel = DistributedDataParallel(_start(name))
        of["parallel"] = _train(parallel, name, lambda step: data(step + 100 * rank))
        same = _start(name)
        WAYS[case["way"]](same)
        of["same"] = _train(same, name, data)
        records[name] = of
    torch.save(records, f"{folder}/{rank}")
    Path(folder, f"memory {rank}").write_text(json.dumps({way: _bytes(way) for way in WAYS}))
    torch.save(_kept(f"{folder}/model {rank}", rank), f"{folder}/kept {rank}")
    used = {f"{use}, {way}": _use(use, way, rank) for use, way in itertools.product(USES, WAYS)}
    torch.save(used, f"{folder}/used {rank}")


def _bytes(way: str) -> list[int]:
    """Of parameters, gradients and what Adam keeps, on this rank after a step, and on one that has all."""
    counts = []
    for divide in (WAYS[way], None):
        net = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 50))
        model = bbb.Bayesian(net, bbb.Gaussian(0.1), seed=0)
        objective = FreeEnergy(model, n=40, own_averaging=True)
        if divide is not None:
            divide(objective)
        optimiser = torch.optim.Adam(objective.parameters())
        objective(torch.ones(4, 100), torch.ones(4, 50)).backward()
        optimiser.step()
        tensors = [t for p in objective.parameters() for t in (p, p.grad, *optimiser.state[p].values()) if t.dim()]
        storages = [(t.to_local() if hasattr(t, "to_local") else t).untyped_storage() for t in tensors]
        counts.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
    return counts


def _in_place(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    cost = module(*batches[0])
    cost /= 4
    cost.backward()


def _two_at_once(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    sum(module(*batch) for batch in batches).backward()


def _accumulated(module: Any, batches: list[tuple[Tensor, Tensor]]) -> None:
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            module(*batches[0]).backward()
    else:
        module.set_requires_gradient_sync(False)
        module(*batches[0]).backward()
        module.set_requires_gradient_sync(True)
    module(*batches[1]).backward()


def _clipped(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    module(*batches[0]).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def _compiled(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    call = module if isinstance(module, DistributedDataParallel) else torch.compile(module, backend="aot_eager")
    call(*batches[0]).backward()


USES = {"in place": _in_place, "two at once": _two_at_once, "accumulated": _accumulated, "clipped": _clipped}
USES |= {"compiled": _compiled, "vary together": _two_at_once}


def _use(use: str, way: str, rank: int) -> list[list[Tensor]]:
    """Gradients of a sharded objective, and of one in ``DistributedDataParallel``."""
    gradients = []
    for divide in (WAYS[way], None):
        torch.manual_seed(4)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        family = bbb.LowRank(2) if use == "vary together" else bbb.Diagonal()
        objective = FreeEnergy(bbb.Bayesian(net, bbb.Gaussian(0.5), family=family, centre="net", seed=0), n=40).double()
        if divide is not None:
            divide(objective)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="FSDP2-wrapped module")  # which returned a view
            module = DistributedDataParallel(objective) if divide is None else objective
            USES[use](module, [data(1 + 10 * rank), data(2 + 10 * rank)])
        gradients.append([_whole(parameter.grad) for parameter in module.parameters()])
    return gradients


def _kept(path: str, rank: int) -> dict[str, Any]:
    """What a sharded model predicts and saves, and what one that is whole does."""
    found: dict[str, Any] = {}
    x, _ = data()
    for way in (*WAYS, None):
        objective = small_free_energy("shared", "sampled")
        if way is not None:
            WAYS[way](objective)
            with pytest.raises(ValueError, match="whole on each rank"):
                bbb.mean_network(objective.model)
        with bbb.unsharded(objective):
            predicted = objective.model.predict(x, draws=3, estimator="shared").mean
            mean = objective.model.predict_mean(x).mean
            report = objective.model.report()
            bbb.save(objective.model, path)
            assert not any(hasattr(parameter, "to_local") for parameter in objective.parameters())
        loaded = bbb.load(path, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
        state = {name: _whole(tensor) for name, tensor in objective.state_dict().items()}
        found[str(way)] = {"predicted": predicted, "mean": mean, "report": [*report.encode()], "state": state}
        found[str(way)]["loaded"] = dict(loaded.state_dict())
        if way is not None:
            cost = objective(x, data()[1])  # it goes on
            assert not cost.likelihood.requires_grad  # whose backward pass nobody would wait for
            cost.backward()
            assert all(p.grad is not None for p in objective.parameters()), rank
            whole = StateDictOptions(full_state_dict=True)
            found[way]["again"] = small_free_energy("local", "closed")
            WAYS[way](found[way]["again"])
            set_model_state_dict(found[way]["again"], get_model_state_dict(objective, options=whole), options=whole)
            found[way]["again"] = {n: _whole(tensor) for n, tensor in found[way]["again"].state_dict().items()}
        else:
            found["None"]["again"] = {**state, "step": state["step"] + 1}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The records of two processes, each of which runs this file."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    run_ranks(__file__, folder, timeout=TIMEOUT)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: str) -> list[dict[str, Any]]:
    return [torch.load(f"{folder}/{rank}") for rank in range(RANKS)]


@pytest.mark.supports("Training", "fully_shard (FSDP2)", "two ranks are two of DistributedDataParallel")
@pytest.mark.parametrize("case", list(CASES))
def test_sharded_ranks_are_ranks_in_parallel(case: str, ranks: list[dict[str, Any]]) -> None:
    """Costs, gradients and parameters of each step, where each rank has a batch of its own."""
    for rank in range(RANKS):
        torch.testing.assert_close(ranks[rank][case]["sharded"], ranks[rank][case]["parallel"])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluation, by torch
@pytest.mark.parametrize("case", list(CASES))
def test_two_sharded_ranks_are_one_process_with_twice_the_draws(case: str, ranks: list[dict[str, Any]]) -> None:
    objective = _start(case)
    objective.draws *= RANKS
    for step, one in enumerate(_train(objective, case, data)):
        several = [ranks[rank][case]["same"][step] for rank in range(RANKS)]
        for record in several:
            torch.testing.assert_close([record["gradients"], record["after"]], [one["gradients"], one["after"]])
        costs = [torch.stack([record["cost"][part] for record in several]).mean(0) for part in range(4)]
        torch.testing.assert_close(costs, one["cost"])


@pytest.mark.supports("Large networks", "fully_shard (FSDP2)", "a rank keeps half")
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_keeps_half(way: str, folder: str) -> None:
    for rank in range(RANKS):
        part, whole = json.loads(Path(folder, f"memory {rank}").read_text())[way]
        assert part < 0.51 * whole


@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_model_predicts_and_is_saved_as_a_whole_one(way: str, folder: str) -> None:
    for rank in range(RANKS):
        kept = torch.load(f"{folder}/kept {rank}")
        torch.testing.assert_close(kept[way], kept["None"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use", USES)
def test_sharded_objectives_are_used_as_others(use: str, way: str, folder: str) -> None:
    for rank in range(RANKS):
        torch.testing.assert_close(*torch.load(f"{folder}/used {rank}")[f"{use}, {way}"])


if __name__ == "__main__":
    be_rank(_rank)
