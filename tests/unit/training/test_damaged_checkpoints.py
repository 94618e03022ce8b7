"""Damaged checkpoints are refused with the one error before anything of the run has changed."""

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesbackprop as bbb
from bayesbackprop.callbacks import Averaging, Best, Callback, Checkpoint
from bayesbackprop.training import Batches, Run, fit
from rewriting import rewrite

pytestmark = pytest.mark.identities

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
REFUSED = (
    r"^The 'path' parameter of {} must be a file of bayesbackprop that holds a checkpoint\. Got .+, which is damaged "
)


class Count(Callback):
    """Has a state, and is choosy."""

    name = "count"

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, run: Run) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        if self.steps < 0:
            raise ArithmeticError("negative")


class Tries:
    """What a run consists of."""

    def __init__(self, amsgrad: bool = False, ours: bool = False, decay: float = 0.0) -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.model = bbb.Bayesian(net, bbb.Gaussian(0.5), seed=0)
        trained: Any = self.model.param_groups(weight_decay=decay) if decay else self.model.parameters()
        self.optimiser: torch.optim.Optimizer = (
            bbb.Adam(trained, lr=0.01, fused=True)
            if ours
            else torch.optim.Adam(trained, lr=0.01, fused=True, amsgrad=amsgrad)
        )
        warm = torch.optim.lr_scheduler.LinearLR(self.optimiser, 0.1, total_iters=3)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimiser, 12)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimiser, [warm, fall], milestones=[3])
        self.count, self.average = Count(), Averaging(0.8)

    def fit(self, path: Path, epochs: int) -> None:
        fit(
            self.model,
            Batches(X, X[:, :1], batch_size=10),
            epochs=epochs,
            optimiser=self.optimiser,
            scheduler=self.scheduler,
            callbacks=[self.average, self.count, Checkpoint(path)],
        )

    def state(self) -> Any:
        parts = (self.model, self.optimiser, self.scheduler, self.count, self.average)
        return copy.deepcopy([part.state_dict() for part in parts])  # type: ignore[attr-defined]


def _state(**values: Any) -> Change:
    return lambda contents, _: contents["state"].update(values)


def _group(**values: Any) -> Change:
    return lambda contents, _: contents["optimiser"]["groups"][0].update(values)


def _schedule(**values: Any) -> Change:
    return lambda contents, _: contents["scheduler"].update(values)


def _tensor(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, tensors: tensors.update({name: change(tensors[name]).contiguous()})


def _spoilt(name: str, value: float) -> Change:
    return lambda _, tensors: tensors[name].view(-1)[:1].fill_(value)


MU, MOMENT, SQUARE, STEP = (
    "objective.model.net.0.weight",
    "optimiser.0.exp_avg",
    "optimiser.0.exp_avg_sq",
    "optimiser.0.step",
)
CHANGES: dict[str, Change] = {
    **{f"no {name}": lambda contents, _, name=name: contents["state"].pop(name)
       for name in ("step", "taken", "examples", "sums", "seconds", "records")},
    "a state that is a list": lambda contents, _: contents.update(state=[1]),
    "a step that is text": _state(step="4"),
    "a negative step": _state(step=-4),
    "an absurd step": _state(step=10**400),
    "fewer steps than epochs": _state(step=0),
    "a step that is true": _state(step=True),
    "batches without examples": _state(taken=3),
    "sums without examples": _state(sums={"cost": 1.0}),
    "sums that are text": _state(sums={"cost": "1"}, taken=1, examples=10),
    "seconds that are not a number": _state(seconds=math.nan),
    "records that are text": _state(records="a"),
    "a record without an epoch": lambda contents, _: contents["state"]["records"][0].pop("epoch"),
    "a record of another epoch": lambda contents, _: contents["state"]["records"][0].update(epoch=7),
    "an infinite cost": lambda contents, _: contents["state"]["records"][0].update(cost=math.inf),
    "about is a list": lambda contents, _: contents.update(about=[1]),
    "a parameter is missing": lambda _, tensors: tensors.pop(MU),
    "a parameter too many": lambda _, tensors: tensors.update({"objective.more": torch.zeros(1)}),
    "a parameter of another shape": _tensor(MU, lambda t: t.T),
    "a parameter of another type": _tensor(MU, Tensor.double),
    "NaN in a parameter": _spoilt(MU, math.nan),
    "infinity in a parameter": _spoilt(MU, math.inf),
    "NaN in a buffer": _spoilt("objective.model.net.1.running_var", math.nan),
    "a negative step of the objective": _tensor("objective.step", lambda t: t - 100),
    "an absurd step of the objective": _tensor("objective.step", lambda t: t + 2**62),
    "a negative seed": _tensor("objective.model._seed", lambda t: t - 1),
    "a moment of another shape": _tensor(MOMENT, lambda t: t.view(-1)[:1]),
    "a moment of another type": _tensor(MOMENT, Tensor.double),
    "a moment that is missing": lambda _, tensors: tensors.pop(MOMENT),
    "all moments are missing": lambda _, tensors: [tensors.pop(name) for name in [*tensors] if "exp_avg" in name],
    "a moment that is text": lambda contents, tensors: (
        tensors.pop(MOMENT), contents["optimiser"]["slots"].update({"0.exp_avg": "x"})),
    "a moment of no parameter": lambda _, tensors: tensors.update({"optimiser.99.exp_avg": torch.zeros(1)}),
    "a moment of a negative parameter": lambda _, tensors: tensors.update({"optimiser.-1.exp_avg": torch.zeros(1)}),
    "a moment of a name": lambda _, tensors: tensors.update({"optimiser.a.exp_avg": torch.zeros(1)}),
    "a moment of an unknown name": lambda _, tensors: tensors.update({"optimiser.0.more": torch.zeros(1)}),
    "NaN in a moment": _spoilt(MOMENT, math.nan),
    "NaN in a square": _spoilt(SQUARE, math.nan),
    "a negative square": _spoilt(SQUARE, -1.0),
    "a step of another shape": _tensor(STEP, lambda t: t.expand(3)),
    "a step of integers": _tensor(STEP, Tensor.long),
    "a negative step of Adam": _tensor(STEP, lambda t: -t),
    "half a step": _tensor(STEP, lambda t: t + 0.5),
    "an infinite step": _tensor(STEP, lambda t: t / 0),
    "no groups": lambda contents, _: contents["optimiser"].pop("groups"),
    "a group too few": lambda contents, _: contents["optimiser"].update(groups=[]),
    "a group without a rate": lambda contents, _: contents["optimiser"]["groups"][0].pop("lr"),
    "a group with more": _group(more=1),
    "a group of other parameters": _group(params=[0]),
    "a rate that is no number": _group(lr=math.nan),
    "an infinite rate": _group(lr=math.inf),
    "a negative rate": _group(lr=-0.1),
    "a rate that is text": _group(lr="0.1"),
    "an absurd rate": _group(lr=10**400),
    "betas that are one": _group(betas=[0.9, 1.0]),
    "betas that are too many": _group(betas=[0.9, 0.9, 0.9]),
    "another algorithm": _group(amsgrad=True),
    "no schedule": lambda contents, _: contents.update(scheduler=None),
    "a schedule that is text": lambda contents, _: contents.update(scheduler="x"),
    "a schedule with more": _schedule(more=1),
    "an absurd schedule": _schedule(last_epoch=10**400),
    "a negative schedule": _schedule(last_epoch=-7),
    "a schedule of too many rates": _schedule(_last_lr=[0.1, 0.1]),
    "a schedule of no number": _schedule(_last_lr=[math.nan]),
    "a schedule within that is damaged": lambda contents, _: contents["scheduler"]["_schedulers"][1].update(T_max="x"),
    "callbacks that are a list": lambda contents, _: contents.update(callbacks=[1]),
    "a callback without its state": lambda contents, _: contents["callbacks"].pop("count"),
    "a callback that does not want it": lambda contents, _: contents["callbacks"]["count"].update(steps=-1),
    "an average is missing": lambda _, tensors: tensors.pop("average.0"),
    "an average too many": lambda _, tensors: tensors.update({"average.99": torch.zeros(1)}),
    "an average of another shape": _tensor("average.0", lambda t: t.view(-1)),
    "NaN in an average": _spoilt("average.0", math.nan),
}  # fmt: skip


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_it_is_refused_and_changes_nothing(change: Change, ours: bool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    Tries(ours=ours).fit(path, epochs=2)
    rewrite(path, lambda header, tensors: change(header["contents"], tensors))
    damaged, tries = path.read_bytes(), Tries(ours=ours)
    before = tries.state()
    with pytest.raises(ValueError, match=REFUSED.format("Checkpoint")):
        tries.fit(path, epochs=3)
    torch.testing.assert_close(tries.state(), before, rtol=0, atol=0)
    assert path.read_bytes() == damaged


def test_the_good_file_of_these_tests_is_good(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Tries().fit(path, epochs=2)
    rewrite(path, lambda header, tensors: None)
    tries = Tries()
    tries.fit(path, epochs=3)
    assert tries.count.steps == 12


def test_how_an_optimiser_computes_may_change(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Tries().fit(path, epochs=1)
    tries = Tries()
    tries.optimiser.param_groups[0].update(fused=None, foreach=False)
    tries.fit(path, epochs=2)
    assert tries.optimiser.param_groups[0]["fused"] is None
    assert tries.count.steps == 8


@pytest.mark.parametrize("ours", [False, True])
def test_a_run_can_go_over_to_the_other_adam(ours: bool, tmp_path: Path) -> None:
    """As one does that was begun before this Adam was the one that is taken unless another is given."""
    path, tries = tmp_path / "run", Tries(ours=not ours)
    torch.manual_seed(1)
    Tries(ours=ours).fit(path, epochs=1)
    tries.fit(path, epochs=3)
    torch.manual_seed(1)
    never_stopped = Tries()
    never_stopped.fit(tmp_path / "other", epochs=3)
    assert tries.count.steps == 12
    torch.testing.assert_close(tries.model.state_dict(), never_stopped.model.state_dict())


def test_another_kind_of_weight_decay_is_another_algorithm(tmp_path: Path) -> None:
    path, tries = tmp_path / "run", Tries(ours=True, decay=0.1)
    Tries(decay=0.1).fit(path, epochs=1)
    with pytest.raises(ValueError, match=REFUSED.format("Checkpoint")):
        tries.fit(path, epochs=2)


def test_flags_of_another_version_of_torch_may_be_missing(tmp_path: Path) -> None:
    def change(header: dict[str, Any], _: Any) -> None:
        contents = header["contents"]
        assert contents["optimiser"]["groups"][0].pop("maximize") is False
        assert contents["scheduler"]["_schedulers"][0].pop("_get_lr_called_within_step") is False

    path, tries = tmp_path / "run", Tries()
    Tries().fit(path, epochs=1)
    rewrite(path, change)
    tries.fit(path, epochs=2)
    assert tries.count.steps == 8


def test_squares_may_overflow(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Tries().fit(path, epochs=1)
    rewrite(path, lambda _, tensors: _spoilt(SQUARE, math.inf)({}, tensors))
    tries = Tries()
    tries.fit(path, epochs=2)
    assert tries.count.steps == 8


def test_other_settings_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Tries().fit(path, epochs=1)
    rewrite(path, lambda header, _: header["contents"]["state"].update(seed=5))
    tries = Tries()
    before = tries.state()
    with pytest.raises(ValueError, match="'seed' parameter of fit must be 5, as in the run"):
        tries.fit(path, epochs=2)
    torch.testing.assert_close(tries.state(), before, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_that_is_not_finite_does_not_replace_its_checkpoint(bad: float, tmp_path: Path) -> None:
    class Break(Callback):
        def on_step(self, run: Run) -> None:
            next(run.objective.parameters()).detach().view(-1)[0] = bad

    path, tries = tmp_path / "run", Tries()
    tries.fit(path, epochs=1)
    before = path.read_bytes()
    again = Tries()
    model, optimiser = again.model, again.optimiser
    callbacks = [Averaging(0.8), Count(), Break(), Checkpoint(path, every=1)]
    with pytest.raises(ValueError, match=r"'model.net.0.weight' parameter of Checkpoint must be finite"):
        fit(model, Batches(X, X[:, :1], 10), epochs=2, optimiser=optimiser, callbacks=callbacks)
    assert path.read_bytes() == before


BEST: dict[str, Change] = {
    "no epoch": lambda contents, _: contents.pop("epoch"),
    "an epoch that is text": lambda contents, _: contents.update(epoch="1"),
    "an absurd epoch": lambda contents, _: contents.update(epoch=10**400),
    "a parameter is missing": lambda _, tensors: tensors.pop(MU),
    "a parameter of another shape": _tensor(MU, lambda t: t.T),
    "NaN": _spoilt(MU, math.nan),
}


@pytest.mark.parametrize("change", BEST.values(), ids=list(BEST))
def test_the_best_parameters_are_checked(change: Change, tmp_path: Path) -> None:
    keeper, tries = Best(tmp_path / "best", "cost"), Tries()
    fit(tries.model, Batches(X, X[:, :1], 10), epochs=1, callbacks=[keeper])
    assert keeper.load(tries.model) == 1
    rewrite(tmp_path / "best", lambda header, tensors: change(header["contents"], tensors))
    before = tries.state()
    with pytest.raises(ValueError, match=REFUSED.format(r"Best\.load")):
        keeper.load(tries.model)
    torch.testing.assert_close(tries.state(), before, rtol=0, atol=0)
