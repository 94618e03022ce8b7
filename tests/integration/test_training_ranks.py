"""Several processes train as one: they share each minibatch, stop together, and wait for each other."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typer.testing import CliRunner

import digits
from bayesbackprop import _runs, callbacks, training
from bayesbackprop._cli import app
from bayesbackprop._files import write_checkpoint
from bayesbackprop.training import Batches, TerminatedError, fit
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import mnist, table1
from bayesbackprop_paper.experiments.recipe import CHECKPOINT, Examples, Experiment, Schedule
from digits import EPOCHS, MIDDLE, checkpoint, metrics
from training_runs import OPTIONS, Recorder, assert_same_run, counted, parts, start

pytestmark = pytest.mark.equivalence

TIMEOUT = 300


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes, each of which runs :func:`_rank`, left behind."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("This torch was built without gloo.")
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    helpers = os.pathsep.join(filter(None, [str(Path(digits.__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": helpers}
    process = subprocess.Popen(
        [*torchrun, __file__, str(folder)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the ranks end with it
    )
    try:
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return folder


def _rank(folder: Path) -> None:
    """Everything in one group of processes, that of the command: to start torch takes longer than to train."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    data.mnist = digits.images  # type: ignore[assignment]
    table1.RECIPES.update(digits.RECIPES)
    destroy, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    command = ["train", *OPTIONS["mixture"], "--json", "--folder", str(folder / "command")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    rank = dist.get_rank()
    (folder / f"command-{rank}.txt").write_text(result.stdout)
    for method in ("bbb-mixture", "dropout"):
        _whole_and_stopped(folder / method, digits.RECIPES[method], rank)
    uneven = digits.BATCH + 1
    with pytest.raises(ValueError, match="2 ranks can share each minibatch evenly"):
        start(folder / "uneven").train(Examples(torch.zeros(uneven, 784), torch.zeros(uneven).long()), {})
    _of_ones_own(folder, rank)
    # A signal in the last step, when one of them gets it, ends both.
    hook = digits.send_in_step(signal.SIGTERM, EPOCHS * digits.BATCHES - 1) if rank == 1 else None
    with pytest.raises(TerminatedError):
        start(folder / "last").train(*parts())
    if hook is not None:
        hook.remove()
    # The first rank writes slowly, and the second waits for it.
    if rank == 0:
        _delay_writing()
    config = digits.RECIPES["bbb-mixture"]
    slow = mnist.run(replace(config, schedule=replace(config.schedule, epochs=1)), digits.images(), folder / "slow")
    (folder / f"slow-{rank}.json").write_text(json.dumps({**asdict(slow), "seconds": 0}))
    destroy()


def _whole_and_stopped(folder: Path, config: mnist.Config, rank: int) -> None:
    for name, number in (("whole", 0), ("stopped", signal.SIGINT), ("terminated", signal.SIGTERM)):
        run = start(folder / name, config)
        if number:
            hook = digits.send_in_step(number, MIDDLE) if rank == 1 else None  # the other rank must stop too
            with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else TerminatedError):
                run.train(*parts())
            if hook is not None:
                hook.remove()
            dist.barrier()
            assert checkpoint(folder / name)[1]["state"]["step"] == MIDDLE + 1
            run = start(folder / name, config)
        run.train(*parts())
        torch.save(run.objective.state_dict(), folder / f"{name}-{rank}")


class Own(nn.Module):
    """A plain network of a user's own, and 50 examples."""

    inputs = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.net(inputs) - targets).square().mean()


def _of_ones_own(folder: Path, rank: int) -> None:
    """Accumulating gradients over Batches, and over a DataLoader whose sampler shares the examples."""
    data_set = TensorDataset(Own.inputs, Own.targets)
    loader = DataLoader(data_set, batch_size=5, sampler=DistributedSampler(data_set, seed=1))
    for name, batches in (("batches", Batches(Own.inputs, Own.targets, 10)), ("loader", loader)):
        own = Own()
        history = fit(own, batches, epochs=3, accumulate=2)
        costs = torch.tensor([record["cost"] for record in history])
        torch.save({**own.state_dict(), "costs": costs}, folder / f"{name}-{rank}")


def _delay_writing() -> None:
    def write(*arguments: Any) -> None:
        time.sleep(0.3)
        write_checkpoint(*arguments)

    callbacks.write_checkpoint = write  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["bbb-mixture", "dropout"])
def test_ranks_end_with_equal_weights_and_resume_bit_for_bit(method: str, ranks: Path) -> None:
    folder = ranks / method
    first = torch.load(folder / "whole-0")
    for name in ("whole-1", "stopped-0", "stopped-1", "terminated-0", "terminated-1"):
        torch.testing.assert_close(torch.load(folder / name), first, rtol=0, atol=0)
    assert_same_run(folder / "whole", folder / "stopped")
    assert_same_run(folder / "whole", folder / "terminated")
    costs = [record["likelihood"] + record["complexity"] / digits.N for record in metrics(folder / "whole")]
    assert len(costs) == EPOCHS
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("name", ["batches", "loader"])
def test_ranks_train_a_module_of_ones_own_alike(name: str, ranks: Path) -> None:
    one, other = (torch.load(ranks / f"{name}-{rank}") for rank in range(2))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_ranks_train_as_one_process_does(ranks: Path) -> None:
    """Two ranks with half of each minibatch, two minibatches a step: as one process with minibatches twice the size."""
    alone = Own()
    history = fit(alone, Batches(Own.inputs, Own.targets, 20), epochs=3)
    costs = torch.tensor([record["cost"] for record in history])
    torch.testing.assert_close(torch.load(ranks / "batches-0"), {**alone.state_dict(), "costs": costs})


def test_ranks_wait_for_the_selected_weights(ranks: Path) -> None:
    assert (ranks / "slow-0.json").read_text() == (ranks / "slow-1.json").read_text()


@pytest.mark.supports("Training", "torchrun", "by `bbb train`")
def test_the_command_under_torchrun(ranks: Path) -> None:
    assert json.loads((ranks / "command-0.txt").read_text())["epochs"] == EPOCHS
    assert (ranks / "command-1.txt").read_text() == ""
    assert len(list((ranks / "command").glob("tensorboard/*"))) <= 1
    assert metrics(ranks / "command") == metrics(ranks / "bbb-mixture" / "whole")


def test_ranks_share_each_minibatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objectives = [Recorder(), Recorder()]
    monkeypatch.setattr(training, "DistributedDataParallel", lambda module, **_: module)
    for rank, objective in enumerate(objectives):
        for module in (training, _runs):
            monkeypatch.setattr(module, "rank_of_ranks", lambda rank=rank: (rank, 2))
        run = Experiment(objective, objective.net, Schedule(1, 8), tmp_path / str(rank))
        run.train(counted(20), {"validation": counted(4)})
    assert [len(seen) for objective in objectives for seen in objective.seen] == [4, 4, 2] * 2
    for one, other, whole in zip(
        *(each.seen for each in objectives),
        torch.randperm(20, generator=torch.Generator().manual_seed(0)).split(8),
        strict=True,
    ):
        assert sorted(one + other) == sorted(whole.tolist())
    assert not (tmp_path / "1" / CHECKPOINT).exists()


@pytest.fixture(autouse=True)
def _no_temporary_file_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("**/.*"))


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
