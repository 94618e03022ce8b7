"""Every path of a training step: optimisers, priors, estimators, compiled code, ranks, and networks of other shapes."""

import math
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bayesbackprop.objective import FreeEnergy
from bayesbackprop.priors import Laplace, LogDensity, Normal
from bayesbackprop_paper.bench.apart import call_apart
from bayesbackprop_paper.bench.contenders import (
    OURS,
    OURS_BY_ADAM,
    OWN,
    SGD,
    Contender,
    N,
    Part,
    Task,
    Trainee,
    UnsupportedError,
    bayesian,
    fully_connected,
    ours,
    plain,
    plain_compiled,
)
from bayesbackprop_paper.bench.measuring import Config, memory, predictions, rows, settings, steps
from bayesbackprop_paper.bench.report import Row, Run

_RANKS = 2
_DRAWS = 4
_LIMIT = timedelta(minutes=5)  # after which a rank no longer waits for one that died

_MIXTURE = "shared; scale mixture, sampled"
_BASE = "plain Adam"


@dataclass(frozen=True)
class Sizes:
    """How large all is, and what compiles."""

    sizes: tuple[int, ...] = (784, 1200, 1200, 10)
    batch: int = 128
    small: tuple[int, ...] = (119, 100, 100, 1)
    small_batch: int = 64
    draws: int = 100
    deep: tuple[int, ...] = (20, 200)
    deep_units: int = 32
    backend: str = "inductor"
    warm_up: int = 5


# Without a compiler behind it, tracing is quick.
QUICK = Sizes((5, 4, 4, 3), 2, (3, 4, 4, 1), 2, draws=3, deep=(2, 3), deep_units=2, backend="eager", warm_up=1)


def paths(config: Config, sizes: Sizes) -> list[Row]:
    """A step by every path beside a plain one, with its peak memory; and a prediction for one image."""
    task = fully_connected(sizes.sizes)
    made: list[Row] = []
    with settings(config):
        made += _with_memory(config, task, sizes.batch, _contenders(sizes, config.peers), sizes.warm_up)
        made += two_ranks(config, sizes)
        made += predictions(
            replace(config, peers=()), task, 1, sizes.draws
        )  # they are beside it in `bbb bench predict`
        for layers in sizes.deep:
            made += _deep(config, layers, sizes)
    with settings(config, threads=1):
        small = fully_connected(sizes.small)
        table = f"{small.name}, batch {sizes.small_batch}, one thread"
        contenders = [SGD, OURS, SGD._replace(name="plain Adam", optimiser="Adam"), OURS_BY_ADAM, *config.peers]
        made += _with_memory(config, small, sizes.small_batch, contenders, 10 * sizes.warm_up, table)
    torch.compiler.reset()  # what was compiled holds the networks
    return made


def _with_memory(
    config: Config, task: Task, batch: int, contenders: Sequence[Contender], warm_up: int, table: str | None = None
) -> list[Row]:
    extra = memory(config, task, batch, contenders)
    return steps(config, task, batch, contenders, warm_up, extra=extra, table=table)


def _contenders(sizes: Sizes, peers: Sequence[Contender]) -> list[Contender]:
    adam: dict[str, Any] = {"optimiser": "Adam", "against": _BASE}
    own = LogDensity(_log_cauchy, name="Cauchy")
    single = ours("bayesbackprop Adam", _MIXTURE, **adam)
    return [
        Contender(_BASE, "plain loss", plain, "Adam"),
        Contender("plain fused Adam", "plain loss", plain, "fused Adam", _BASE),
        Contender("plain SGD", "plain loss", plain, "SGD", _BASE),
        Contender("plain compiled", "plain loss", lambda task: plain_compiled(sizes.backend, task), **adam),
        single,
        ours("bayesbackprop its own Adam", _MIXTURE, optimiser=OWN, against=_BASE),
        ours("bayesbackprop fused Adam", _MIXTURE, optimiser="fused Adam", against="plain fused Adam"),
        ours("bayesbackprop SGD", _MIXTURE, optimiser="SGD", against="plain SGD"),
        ours(
            "bayesbackprop Normal", "shared; Normal, closed", prior=Normal(0.1), energy={"complexity": "closed"}, **adam
        ),
        ours(
            "bayesbackprop Laplace",
            "shared; Laplace, closed",
            prior=Laplace(0.1),
            energy={"complexity": "closed"},
            **adam,
        ),
        ours("bayesbackprop own prior", "shared; LogDensity, sampled", prior=own, **adam),
        ours("bayesbackprop flipout", "scale mixture, sampled", estimator="flipout", **adam),
        ours("bayesbackprop local", "scale mixture, sampled", estimator="local", **adam),
        ours("bayesbackprop compiled", f"{_MIXTURE}; {sizes.backend}", backend=sizes.backend, **adam),
        single._replace(name=f"{_DRAWS} single steps", against=None, repeat=_DRAWS),
        ours(
            f"bayesbackprop {_DRAWS} draws",
            _MIXTURE,
            energy={"draws": _DRAWS},
            optimiser="Adam",
            against=f"{_DRAWS} single steps",
        ),
        *(peer._replace(**adam) for peer in peers),
    ]


def _log_cauchy(w: Tensor) -> Tensor:
    return -torch.log1p((w / 0.1).square()) - math.log(0.1 * math.pi)


# --- networks of many layers -----------------------------------------------------------------------------------------


_PARTS: Mapping[Part, str] = {"step": "", "gradients": ", gradients alone", "update": ", update alone"}


def _deep(config: Config, layers: int, sizes: Sizes) -> list[Row]:
    """Many narrow layers: what each tensor costs in the gradients and in the update."""
    units = sizes.deep_units
    task = replace(fully_connected((units,) * (layers + 1)), name=f"{layers} layers of {units} units")
    contenders: list[Contender] = []
    for each in (SGD._replace(name="plain"), OURS):
        for part, suffix in _PARTS.items():
            against = None if each.name == "plain" else f"plain{suffix}"
            contenders.append(
                each._replace(name=f"{each.name}{suffix}", optimiser="foreach Adam", against=against, part=part)
            )
    return steps(config, task, sizes.small_batch, contenders, sizes.warm_up)


# --- two ranks -------------------------------------------------------------------------------------------------------


def two_ranks(config: Config, sizes: Sizes) -> list[Row]:
    """Two processes of one thread each, which average their gradients over gloo."""
    task = fully_connected(sizes.sizes)
    table = f"{task.name}, batch {sizes.batch} on each of {_RANKS} ranks of one thread"
    for _ in config.track(range(1), table):
        try:
            with tempfile.TemporaryDirectory() as folder:
                calls = [(rank, folder, config.run, sizes, table) for rank in range(_RANKS)]
                made = call_apart(_rank, calls)[0]
        except UnsupportedError as error:
            notes = {each.name: f"left out: {error}" for each in _parallel()}
            made = rows(config.run, task, sizes.batch, {}, notes, {}, table)
    return made


def _rank(rank: int, folder: str, run: Run, sizes: Sizes, table: str) -> list[Row]:
    """One of the processes; both time the same steps in the same order, since one waits for the other."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise UnsupportedError("this torch has no gloo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if platform.system() == "Darwin" else "lo")
    at = f"file://{folder}/rendezvous"
    try:
        dist.init_process_group("gloo", init_method=at, rank=rank, world_size=_RANKS, timeout=_LIMIT)
    except RuntimeError as error:
        raise UnsupportedError(f"gloo does not start here ({error})") from error
    config = Config(run)
    try:
        with settings(config, threads=1):
            return _with_memory(config, fully_connected(sizes.sizes), sizes.batch, _parallel(), sizes.warm_up, table)
    finally:
        dist.destroy_process_group()


def _parallel() -> list[Contender]:
    base = Contender("plain SGD", "plain loss, DistributedDataParallel", _parallel_plain)
    return [
        base,
        Contender("bayesbackprop SGD", f"{_MIXTURE}, DistributedDataParallel", _parallel_ours, "SGD", base.name),
        Contender("bayesbackprop own averaging SGD", f"{_MIXTURE}, all_reduce", _averaging_ours, "SGD", base.name),
    ]


def _parallel_plain(task: Task) -> Trainee:
    net = DistributedDataParallel(task.net())
    return Trainee(net, lambda x, y: task.loss(net(x), y), net)


def _parallel_ours(task: Task) -> Trainee:
    objective = DistributedDataParallel(FreeEnergy(bayesian(task), n=N))
    return Trainee(objective, objective, objective.module.model)


def _averaging_ours(task: Task) -> Trainee:
    """Gradients are averaged where they are, after the backward pass: no second copy of them in buckets."""
    objective = FreeEnergy(bayesian(task), n=N, own_averaging=True)
    return Trainee(objective, lambda x, y: _Averaged(objective, objective(x, y)), objective.model)


class _Averaged(NamedTuple):
    """A cost whose gradients are those of the mean over ranks."""

    module: nn.Module
    cost: Tensor

    def backward(self) -> None:
        self.cost.backward()
        given = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        for work in [dist.all_reduce(gradient.div_(_RANKS), async_op=True) for gradient in given]:
            work.wait()
