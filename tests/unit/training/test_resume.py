"""Checkpoints: a run goes on bit for bit, whatever its loader, optimiser, scheduler and callbacks."""

import pickle
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import bayesbackprop as bbb
from bayesbackprop._files import read_checkpoint
from bayesbackprop.callbacks import Averaging, Best, Callback, Checkpoint, EarlyStopping
from bayesbackprop.training import Batches, Run, fit, interrupt_deferred
from training_runs import ctrl_c_counts

pytestmark = [
    pytest.mark.equivalence,
    pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning"),  # torch 2.6 warns of its own SequentialLR
]

# 7 batches an epoch, the last of 2 examples; Ctrl-C comes in the fourth of the second.
N, BATCH, EPOCHS, STOP = 50, 8, 3, 11


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    with ctrl_c_counts():
        yield


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are never twice the same."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), float(index) / N) + 0.1 * torch.rand(3), torch.tensor(index % 2)


class Interrupt(Callback):
    """Presses Ctrl-C within a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run) -> None:
        if run.step == self.step:
            signal.raise_signal(signal.SIGINT)


class Killed(Callback):
    """Ends the process within a step, and nothing is written any more."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run) -> None:
        if run.step == self.step:
            raise SystemExit


class Count(Callback):
    """Has a state: numbers and a tensor."""

    name = "count"

    def __init__(self) -> None:
        self.steps, self.total = 0, torch.zeros(())

    def on_step(self, run: Run) -> None:
        self.steps += 1
        self.total += next(run.objective.parameters()).detach().sum()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.total = state["steps"], state["total"]


def model() -> bbb.Bayesian:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))
    return bbb.Bayesian(net, bbb.Categorical(), seed=0)


def warmed_up(optimiser: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    warm = torch.optim.lr_scheduler.LinearLR(optimiser, 0.1, total_iters=9)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 12)
    return torch.optim.lr_scheduler.SequentialLR(optimiser, [warm, fall], milestones=[9])


LOADERS: dict[str, Callable[[], Any]] = {
    "augmented": lambda: DataLoader(Augmented(), batch_size=BATCH, shuffle=True),
    "augmented by a worker": lambda: DataLoader(Augmented(), batch_size=BATCH, shuffle=True, num_workers=1),
    "tensors": lambda: Batches(torch.arange(3.0 * N).reshape(N, 3) / N, torch.arange(N) % 2, BATCH, seed=5),
}
OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "our adam": lambda parameters: bbb.Adam(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, weight_decay=0),
    "rate in a tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
}


def made(optimiser: str, network: bbb.Bayesian) -> torch.optim.Optimizer:
    if optimiser == "ivon":
        return bbb.IVON(bbb.FreeEnergy(network, N, complexity="closed"), lr=0.01, betas=(0.9, 0.99), hess_init=1.0)
    return OPTIMISERS[optimiser](network.parameters())


def run(
    folder: Path | None,
    *more: Callback,
    loader: str = "augmented",
    optimiser: str = "adam",
    scheduler: Callable[[Any], Any] | None = warmed_up,
    **options: Any,
) -> tuple[list[Tensor], list[dict[str, float]], Count]:
    network, count = model(), Count()
    used = made(optimiser, network)
    files = [] if folder is None else [Checkpoint(folder / "run")]
    torch.rand(len(more))  # whatever else was drawn from torch's generator
    history = fit(
        network,
        LOADERS[loader](),
        epochs=EPOCHS,
        optimiser=used,
        scheduler=None if scheduler is None else scheduler(used),
        callbacks=[Averaging(0.8), count, *files, *more],
        seed=4,
        **options,
    )
    for record in history:
        del record["seconds"]
    return [value.clone() for value in network.state_dict().values()], history, count


def assert_goes_on(folder: Path, stop: int = STOP, **options: Any) -> None:
    expected, history, count = run(None, **options)
    with pytest.raises(KeyboardInterrupt):
        run(folder, Interrupt(stop), **options)
    assert read_checkpoint(folder / "run")[1]["state"]["step"] == stop
    found, again, counted = run(folder, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert again == history
    assert (counted.steps, counted.total) == (count.steps, count.total)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_run_goes_on_with_any_loader(loader: str, tmp_path: Path) -> None:
    assert_goes_on(tmp_path, loader=loader)


@pytest.mark.parametrize("optimiser", [*OPTIMISERS, "ivon"])
def test_a_run_goes_on_with_any_optimiser(optimiser: str, tmp_path: Path) -> None:
    assert_goes_on(tmp_path, optimiser=optimiser, scheduler=None)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimiser: torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.02, total_steps=21),
        lambda optimiser: torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 / (1 + step)),
        lambda optimiser: torch.optim.lr_scheduler.MultiStepLR(optimiser, [5, 14]),
        lambda optimiser: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimiser, 4),
    ],
)
def test_a_run_goes_on_with_any_scheduler(scheduler: Any, tmp_path: Path) -> None:
    assert_goes_on(tmp_path, scheduler=scheduler)


def test_a_run_goes_on_with_a_rate_in_a_tensor(tmp_path: Path) -> None:
    assert_goes_on(tmp_path, optimiser="rate in a tensor")


@pytest.mark.parametrize(("accumulate", "stop"), [(3, 5), (2, 6)])
def test_a_run_that_accumulates_goes_on(accumulate: int, stop: int, tmp_path: Path) -> None:
    assert_goes_on(tmp_path, stop, accumulate=accumulate, scheduler=None)


@pytest.mark.parametrize("stop", [1, 6, 7, 8])
def test_a_run_goes_on_from_any_step(stop: int, tmp_path: Path) -> None:
    assert_goes_on(tmp_path, stop)


@pytest.mark.parametrize("step", [4, 7, 10])
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(step: int, tmp_path: Path) -> None:
    """Within an epoch, in the last step of one, and where the last group of an epoch is short."""

    for every in (3, 7):
        expected, history, _ = run(None, accumulate=2, scheduler=None)
        folder = tmp_path / str(every)

        def again(*more: Callback, folder: Path = folder, every: int = every) -> Any:
            network = model()
            optimiser = OPTIMISERS["adam"](network.parameters())
            callbacks = [Averaging(0.8), Checkpoint(folder / "run", every=every), *more]
            found = fit(
                network,
                LOADERS["augmented"](),
                epochs=EPOCHS,
                optimiser=optimiser,
                accumulate=2,
                callbacks=callbacks,
                seed=4,
            )
            return list(network.state_dict().values()), [{**record, "seconds": 0} for record in found]

        with pytest.raises(SystemExit):
            again(Killed(step))
        found, records = again()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert records == [{**record, "seconds": 0} for record in history]


@pytest.mark.parametrize("step", [1, 13, 14])
def test_a_run_that_goes_on_has_the_estimator_that_was_chosen(step: int, tmp_path: Path) -> None:
    """Also when the last step was taken and only the end of the epoch is left, with no batch to choose by."""

    def trained(*callbacks: Callback) -> list[Any]:
        network = bbb.Bayesian(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), bbb.Categorical(), seed=0)
        fit(network, LOADERS["tensors"](), epochs=2, callbacks=callbacks, seed=4)
        return [entry.estimator for entry in network.plan]

    with pytest.raises(SystemExit):
        trained(Checkpoint(tmp_path / "run", every=1), Killed(step))
    assert trained(Checkpoint(tmp_path / "run")) == trained() == 4 * ["local"]


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    expected, history, count = run(tmp_path)
    before = (tmp_path / "run").read_bytes()
    found, again, counted = run(tmp_path)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert counted.steps == count.steps == 7 * EPOCHS
    assert [record["cost"] for record in again] == [record["cost"] for record in history]
    assert (tmp_path / "run").read_bytes() == before


def test_a_checkpoint_is_there_from_the_first_step_on(tmp_path: Path) -> None:
    class First(Callback):
        def on_start(self, run: Run) -> None:
            assert read_checkpoint(tmp_path / "run")[1]["state"]["step"] == 0
            raise SystemExit

    with pytest.raises(SystemExit):
        run(tmp_path, First())


def test_tied_weights_are_kept_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
            self.other.weight = self.one.weight

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return (self.other(self.one(inputs)) - targets).square().mean()

    x = torch.randn(10, 3)
    objective = Tied()
    keeper = Best(tmp_path / "best", "cost")
    fit(objective, Batches(x, x, 5), epochs=2, callbacks=[keeper, Checkpoint(tmp_path / "run")])
    again = Tied()
    fit(again, Batches(x, x, 5), epochs=2, callbacks=[Checkpoint(tmp_path / "run")])
    assert all(map(torch.equal, objective.parameters(), again.parameters()))
    assert again.one.weight is again.other.weight
    keeper.load(again)


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("pickled")

    for owner, name in ((pickle, "dumps"), (pickle, "loads"), (torch, "save"), (torch, "load")):
        monkeypatch.setattr(owner, name, never)
    assert_goes_on(tmp_path)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_another_run_is_refused(tmp_path: Path) -> None:
    x = torch.zeros(4, 3)
    batches = Batches(x, torch.zeros(4).long(), 2)
    fit(model(), batches, epochs=1, callbacks=[Checkpoint(tmp_path / "run", about={"size": 5, "name": "a"})])
    other = model()
    before = [parameter.detach().clone() for parameter in other.parameters()]
    with pytest.raises(ValueError, match=r"began with, {'size': 5}; or choose another folder. Got {'size': 6} instead"):
        fit(other, batches, epochs=1, callbacks=[Checkpoint(tmp_path / "run", about={"size": 6, "name": "a"})])
    torch.testing.assert_close(list(other.parameters()), before, rtol=0, atol=0)
    bbb.save(model(), tmp_path / "model")
    fit(other, batches, epochs=1, callbacks=[Best(tmp_path / "best", "cost")])
    for name in ("model", "best"):
        with pytest.raises(ValueError, match="must be a"):
            fit(other, batches, epochs=1, callbacks=[Checkpoint(tmp_path / name)])


def test_callbacks_with_a_state_come_before_the_checkpoint(tmp_path: Path) -> None:
    batches = Batches(torch.zeros(4, 3), torch.zeros(4).long(), 2)
    for after in (Count(), Averaging(0.5)):
        with pytest.raises(ValueError, match="in an order in which Checkpoint comes after all that have a state"):
            fit(model(), batches, epochs=1, callbacks=[Checkpoint(tmp_path / "run"), after])
    with pytest.raises(ValueError, match="of different names"):
        fit(model(), batches, epochs=1, callbacks=[Count(), Count(), Checkpoint(tmp_path / "run")])
    stopping = EarlyStopping("cost", 5)
    fit(model(), batches, epochs=1, callbacks=[Checkpoint(tmp_path / "run"), stopping])  # needs no state


def test_a_state_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Odd(Callback):
        name = "odd"

        def state_dict(self) -> dict[str, Any]:
            return {"value": {1, 2}}

    batches = Batches(torch.zeros(4, 3), torch.zeros(4).long(), 2)
    with pytest.raises(
        ValueError, match=r"'run' parameter of Checkpoint must be one whose .* hold tensors and what JSON"
    ):
        fit(model(), batches, epochs=1, callbacks=[Odd(), Checkpoint(tmp_path / "run")])
    assert not list(tmp_path.iterdir())


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def press(times: int, done: list[str]) -> None:
    with interrupt_deferred() as interrupted:
        assert not interrupted()
        for number in range(times):
            signal.raise_signal(signal.SIGINT)
            assert interrupted()
            done.append(f"after press {number + 1}")


def test_ctrl_c_waits_and_a_second_one_does_not() -> None:
    for times in (1, 2):
        done: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            press(times, done)
        assert done == ["after press 1"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
