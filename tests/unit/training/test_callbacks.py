"""Callbacks: when they are called, and what each of the library's does."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesbackprop as bbb
from bayesbackprop.callbacks import (
    Averaging,
    Best,
    Callback,
    Checkpoint,
    Diagnose,
    DiagnosisWarning,
    EarlyStopping,
    Records,
    TensorBoard,
    best,
)
from bayesbackprop.training import Batches, Run, fit

pytestmark = pytest.mark.identities


class Falling(nn.Module):
    """A cost whose gradient is 1, so that a parameter falls by the learning rate in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.w.sum()


def batches() -> Batches:
    return Batches(torch.zeros(4, 1), torch.zeros(4), 2)


def falling(epochs: int, *callbacks: Callback, validation: Any = None) -> tuple[Falling, list[dict[str, float]]]:
    """Two steps of -1 in each epoch."""
    objective = Falling()
    optimiser = torch.optim.SGD(objective.parameters(), lr=1.0)
    options = {"epochs": epochs, "optimiser": optimiser, "validation": validation, "callbacks": callbacks}
    return objective, fit(objective, batches(), **options)


class Diary(Callback):
    def __init__(self, name: str, events: list[str]) -> None:
        self._own, self._events = name, events

    def _note(self, what: str, run: Run) -> None:
        self._events.append(f"{self._own} {what} {run.epoch}.{run.step}")

    def restore(self, run: Run) -> None:
        self._note("restore", run)

    def on_start(self, run: Run) -> None:
        self._note("start", run)

    def on_step(self, run: Run) -> None:
        self._note("step", run)

    def on_epoch(self, run: Run) -> None:
        self._note("epoch", run)

    def on_end(self, run: Run) -> None:
        self._note(f"end {run.complete}", run)


def test_they_are_called_in_turn() -> None:
    events: list[str] = []
    falling(2, Diary("a", events), Diary("b", events))
    begun = ["a restore 0.0", "b restore 0.0", "a start 0.0", "b start 0.0"]
    first = ["a step 0.1", "b step 0.1", "a step 0.2", "b step 0.2", "a epoch 1.2", "b epoch 1.2"]
    second = ["a step 1.3", "b step 1.3", "a step 1.4", "b step 1.4", "a epoch 2.4", "b epoch 2.4"]
    assert events == [*begun, *first, *second, "b end True 2.4", "a end True 2.4"]


@pytest.mark.parametrize("when", ["on_start", "on_step", "on_epoch"])
def test_all_hear_of_the_end_however_it_comes(when: str) -> None:
    class Fails(Callback):
        pass

    def fail(*_: Any) -> None:
        raise RuntimeError("failed")

    setattr(Fails, when, fail)
    events: list[str] = []
    with pytest.raises(RuntimeError, match="failed"):
        falling(2, Diary("a", events), Fails(), Diary("b", events))
    assert [event.rsplit(" ", 1)[0] for event in events[-2:]] == ["b end False", "a end False"]


def test_a_callback_can_stop_a_run() -> None:
    class Stop(Callback):
        def on_step(self, run: Run) -> None:
            if run.step == 3:
                run.stop()

    objective, history = falling(5, Stop())
    assert len(history) == 2  # the epoch is finished
    assert objective.w.tolist() == [-4, -4]


# --- early stopping and the best -------------------------------------------------------------------------------------


def values(*of_epochs: float) -> Any:
    left = iter(of_epochs)
    return lambda: {"validation_nll": next(left)}


def test_early_stopping(tmp_path: Path) -> None:
    measured = (5.0, 3.0, 4.0, 3.0, 2.0, 9.0, 9.0, 9.0)
    _, history = falling(8, EarlyStopping(patience=2), validation=values(*measured))
    assert len(history) == 4  # of equals the first counts
    _, history = falling(8, EarlyStopping(patience=3), validation=values(*measured))
    assert len(history) == 8
    assert best(history, "validation_nll") == 5
    # A run that was stopped stays so when it is resumed.
    for _ in range(2):
        callbacks = (EarlyStopping(patience=2), Checkpoint(tmp_path / "run"))
        objective, history = falling(8, *callbacks, validation=values(*measured))
        assert len(history) == 4
        assert objective.w.tolist() == [-8, -8]


def test_the_best_parameters_are_kept(tmp_path: Path) -> None:
    keeper = Best(tmp_path / "best")
    objective, _ = falling(5, keeper, validation=values(5.0, 3.0, 4.0, 3.0, 3.5))
    assert objective.w.tolist() == [-10, -10]
    assert keeper.load(objective) == 2
    assert objective.w.tolist() == [-4, -4]


def test_the_best_parameters_of_a_bayesian(tmp_path: Path) -> None:
    x = torch.randn(20, 3)
    model, keeper = bbb.Bayesian(nn.Linear(3, 1), bbb.Gaussian(1.0), seed=0), Best(tmp_path / "best", "cost")
    kept: list[Tensor] = []

    class Keep(Callback):
        def on_epoch(self, run: Run) -> None:
            kept.append(model.net.weight.detach().clone())

    history = fit(model, Batches(x, x[:, :1], 5), epochs=4, callbacks=[keeper, Keep()])
    assert torch.equal(kept[-1], model.net.weight)
    selected = keeper.load(model)
    assert selected == best(history, "cost")
    assert torch.equal(kept[selected - 1], model.net.weight)


@pytest.mark.parametrize("callback", [EarlyStopping("validation_eror"), Best("nowhere", "validation_eror")])
def test_a_value_that_is_not_measured_is_refused(callback: Callback) -> None:
    with pytest.raises(
        ValueError, match=r"'monitor' parameter .* one of \['epoch', 'cost', 'validation_nll', 'seconds'\]"
    ):
        falling(2, callback, validation=values(1.0, 2.0))


# --- averages --------------------------------------------------------------------------------------------------------


def test_the_newest_parameters_count_less_and_less_in_their_average() -> None:
    averaging = Averaging(0.9)
    assert averaging.newest(1) == 1  # where it all began does not count
    assert [averaging.newest(step) for step in (2, 3, 28, 100)] == pytest.approx([3 / 4, 3 / 5, 0.1, 0.1])


def test_averages_are_evaluated_and_what_is_left() -> None:
    evaluated: list[float] = []
    objective, own = Falling(), []

    class Own(Callback):
        def on_step(self, run: Run) -> None:
            own.append(float(objective.w[0].detach()))

    def measure() -> dict[str, float]:
        evaluated.append(float(objective.w[0].detach()))
        return {}

    optimiser = torch.optim.SGD(objective.parameters(), lr=1.0)
    options: dict[str, Any] = {"optimiser": optimiser, "validation": measure}
    fit(objective, batches(), epochs=2, callbacks=[Averaging(0.5), Own()], **options)
    average, expected = 0.0, []
    for step in range(1, 5):
        weight = max(0.5, 3 / (2 + step))
        average = (1 - weight) * average - weight * step
        expected.append(average)
    assert own == [-1, -2, -3, -4]  # which the averages never entered
    assert evaluated == pytest.approx([expected[1], expected[3]])
    assert objective.w.tolist() == pytest.approx([expected[3]] * 2)


def test_averages_are_put_away_after_an_error() -> None:
    seen: list[list[float]] = []

    class Fails(Callback):
        def on_end(self, run: Run) -> None:
            seen.append(run.objective.w.tolist())

    objective = Falling()

    def measure() -> dict[str, float]:
        seen.append(objective.w.tolist())
        raise RuntimeError("failed")

    optimiser = torch.optim.SGD(objective.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match="failed"):
        fit(
            objective,
            batches(),
            epochs=1,
            optimiser=optimiser,
            validation=measure,
            callbacks=[Averaging(0.5), Fails()],
        )
    assert seen == [[-1.75, -1.75], [-2, -2]]
    assert objective.w.tolist() == [-2, -2]


@pytest.mark.parametrize("factor", [1, 1.5, -0.1])
def test_an_average_that_makes_no_sense_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="'factor' parameter of Averaging"):
        Averaging(factor)


# --- records and TensorBoard -----------------------------------------------------------------------------------------


def test_records_are_lines_of_json(tmp_path: Path) -> None:
    _, history = falling(3, Records(tmp_path / "deep" / "records.jsonl"), validation=values(1.0, 2.0, 3.0))
    lines = (tmp_path / "deep" / "records.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == history


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    _, history = falling(3, TensorBoard(tmp_path), validation=values(1.0, 2.0, 3.0))
    for name in ("cost", "validation_nll", "seconds"):
        expected = [(epoch, pytest.approx(record[name])) for epoch, record in enumerate(history, 1)]
        assert scalars(tmp_path, name) == expected


def test_tensorboard_of_a_run_that_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    class Killed(Callback):
        """When the second epoch is shown, and not kept."""

        def on_epoch(self, run: Run) -> None:
            if run.epoch == 2:
                raise SystemExit

    run, board = tmp_path / "run", tmp_path / "board"
    with pytest.raises(SystemExit):
        falling(3, TensorBoard(board), Killed(), Checkpoint(run), validation=values(5.0, 5.0))
    falling(3, TensorBoard(board), Checkpoint(run), validation=values(6.0, 6.0))
    assert scalars(board, "validation_nll") == [(1, 5), (2, 6), (3, 6)]


def test_without_tensorboard_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="TensorBoard is not installed: pip install tensorboard"):
        TensorBoard(tmp_path / "board")
    assert not (tmp_path / "board").exists()


# --- Diagnose --------------------------------------------------------------------------------------------------------


def diagnosed(sigma: float, *others: Callback, epochs: int = 3, every: int | None = None) -> tuple[Diagnose, Any]:
    x = torch.linspace(-1, 1, 20)[:, None]
    net = nn.Linear(1, 1)
    nn.init.constant_(net.weight, 2.0)
    nn.init.zeros_(net.bias)
    model = bbb.Bayesian(net, bbb.Gaussian(0.5), bbb.Normal(1.0), sigma=sigma, seed=0)
    callback = Diagnose((x, 2 * x), every)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    history = fit(model, Batches(x, 2 * x, 10), epochs=epochs, optimiser=optimiser, callbacks=[callback, *others])
    expected = bbb.diagnose(model, (x, 2 * x), draws=25)
    assert callback.diagnosis == expected
    assert history[-1]["free_energy"] == expected.free_energy.mean / 20
    assert history[-1]["free_energy_error"] == expected.free_energy.standard_error / 20
    assert history[-1]["median_sigma"] == expected.spread.median
    return callback, history


@pytest.mark.parametrize(("every", "epochs"), [(None, [3]), (2, [2, 3]), (1, [1, 2, 3])])
def test_a_run_is_diagnosed_at_its_end_and_now_and_then(every: int | None, epochs: list[int]) -> None:
    _, history = diagnosed(0.1, every=every)
    assert [record["epoch"] for record in history if "free_energy" in record] == epochs


def test_a_run_that_a_later_callback_ends_is_diagnosed_too(tmp_path: Path) -> None:
    _, history = diagnosed(0.1, EarlyStopping("likelihood", patience=1), epochs=50)
    assert len(history) < 50


def test_it_warns_where_nothing_learnt_is_better(recwarn: pytest.WarningsRecorder) -> None:
    diagnosed(0.1)
    assert not recwarn.list
    with pytest.warns(DiagnosisWarning, match="a posterior that has learnt nothing"):
        diagnosed(1e-20)


def test_what_has_no_posterior_cannot_be_diagnosed() -> None:
    with pytest.raises(ValueError, match=r"'callbacks' parameter of fit .* no FreeEnergy"):
        falling(1, Diagnose((torch.zeros(4, 1), torch.zeros(4, 1))))
