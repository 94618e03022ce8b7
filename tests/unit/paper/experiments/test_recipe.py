"""The loop does what a schedule says, in a folder that keeps the best epoch and looks at no test set."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import digits
from bayesbackprop import Bayesian, Categorical, FreeEnergy
from bayesbackprop._files import read_checkpoint
from bayesbackprop.objective import Cost
from bayesbackprop.training import Batches
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import mnist, recipe
from bayesbackprop_paper.experiments.recipe import BEST, METRICS, Examples, Experiment, Schedule, error_percent
from digits import BATCHES, EPOCHS, metrics
from rewriting import rewrite
from training_runs import Recorder, counted, parts, record, start

pytestmark = pytest.mark.equivalence


def test_every_epoch_visits_every_example_once(tmp_path: Path) -> None:
    orders = {}
    for seed in (0, 1):
        objective, history = record(tmp_path / str(seed), Schedule(epochs=3, batch_size=8, seed=seed), n=50)
        assert [len(batch) for batch in objective.seen] == [8, 8, 8, 8, 8, 8, 2] * 3
        for epoch in range(3):
            order = list(chain(*objective.seen[7 * epoch : 7 * (epoch + 1)]))
            assert sorted(order) == list(range(50))
            orders[seed, epoch] = order
        assert digits.checkpoint(tmp_path / str(seed))[1]["state"]["step"] == 21
        assert len(history) == 3
    assert len(set(map(tuple, [list(range(50)), *orders.values()]))) == 7
    again, _ = record(tmp_path / "again", Schedule(epochs=3, batch_size=8, seed=1), n=50)
    assert list(chain(*again.seen)) == orders[1, 0] + orders[1, 1] + orders[1, 2]


def test_records_are_the_means_over_the_examples_of_the_epoch(tmp_path: Path) -> None:
    objective, history = record(tmp_path, Schedule(epochs=2, batch_size=4))
    for epoch, found in enumerate(history):
        batches = slice(3 * epoch, 3 * (epoch + 1))
        costs = [sum(float(value.sum()) for value in values) for values in objective.asked[batches]]
        assert found["epoch"] == epoch + 1
        assert found["likelihood"] == pytest.approx((4 * costs[0] + 4 * costs[1] + 2 * costs[2]) / 10)
        assert found["complexity"] == pytest.approx(sum(map(sum, objective.seen[batches])) / 10)
        assert found["seconds"] > 0
    assert [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()] == history


def test_rates() -> None:
    cosine, constant = Schedule(decay="cosine"), Schedule(decay="constant")
    found = [cosine.rate(step, 8) for step in range(9)]
    assert found == pytest.approx([math.cos(math.pi * step / 16) ** 2 for step in range(9)])
    assert (found[0], found[4]) == (1, pytest.approx(0.5))
    assert [constant.rate(step, 8) for step in range(9)] == [1] * 9


@pytest.mark.parametrize("decay", ["cosine", "constant"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_by_hand(momentum: float, decay: Any, tmp_path: Path) -> None:
    schedule = Schedule(2, 3, "sgd", learning_rate=0.1, rho_rate=0.25, momentum=momentum, decay=decay)
    objective, _ = record(tmp_path, schedule)
    steps, speed = [*objective.asked, objective.values()], 0.0
    assert len(steps) == 9
    for step in range(8):
        speed = momentum * speed + 1
        change = -0.1 * speed * (1 if decay == "constant" else (1 + math.cos(math.pi * step / 8)) / 2)
        for number, (before, after) in enumerate(zip(steps[step], steps[step + 1], strict=True)):
            factor = 0.25 if number == 2 else 1  # weight, bias, rho
            torch.testing.assert_close(after - before, torch.full_like(before, factor * change), rtol=1e-3, atol=1e-6)


def test_adam_is_torchs(tmp_path: Path) -> None:
    config = digits.recipe("bbb-mixture", learning_rate=0.01, rho_rate=3.0)
    run, twin = start(tmp_path / "run", config), start(tmp_path / "twin", config)
    training, watched = parts()
    assert isinstance(twin.objective, FreeEnergy)
    spread = list(twin.objective.model.rho.parameters())
    others = [each for each in twin.objective.parameters() if all(each is not rho for rho in spread)]
    assert len(spread) == len(others) == 6
    optimiser = torch.optim.Adam([{"params": others, "lr": 0.01}, {"params": spread, "lr": 0.03}], foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS * BATCHES)
    initial = [parameter.detach().clone() for parameter in twin.objective.parameters()]
    run.train(training, watched)
    batches = Batches(*training, digits.BATCH)
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        for inputs, targets in batches:
            optimiser.zero_grad()
            twin.objective(inputs, targets).backward()
            optimiser.step()
            scheduler.step()
    found = list(run.objective.parameters())
    torch.testing.assert_close(found, list(twin.objective.parameters()), rtol=1e-4, atol=1e-5)
    assert not any(torch.allclose(one, other) for one, other in zip(found, initial, strict=True))


def test_averages_are_evaluated_and_selected(tmp_path: Path) -> None:
    objective = Recorder()
    schedule = Schedule(2, 4, "sgd", learning_rate=0.5, decay="constant", averaging=0.5)
    run = Experiment(objective, objective.net, schedule, tmp_path)
    evaluated, stepped = [], []
    objective.net.register_forward_hook(lambda net, *_: evaluated.append(net.weight.detach().clone()))
    steps = register_optimizer_step_post_hook(lambda *_: stepped.append(objective.values()))
    history = run.train(counted(10), {"validation": counted(4)})
    steps.remove()
    average, expected = objective.asked[0], []
    weights = (1, 3 / 4, 3 / 5, 1 / 2, 1 / 2, 1 / 2)  # the first step counts whole: where it all began does not
    for weight, values in zip(weights, stepped, strict=True):
        average = [(1 - weight) * old + weight * new for old, new in zip(average, values, strict=True)]
        expected.append(average)
    torch.testing.assert_close(evaluated, [expected[2][0], expected[5][0]])
    torch.testing.assert_close(objective.values(), expected[-1])
    own = [value - 0.5 * 6 for value in objective.asked[0]]
    torch.testing.assert_close(stepped[-1], own)  # which the averages never entered
    kept, _ = digits.checkpoint(tmp_path)
    torch.testing.assert_close(kept["objective.net.weight"], own[0])
    selected = int(schedule.selected(history)["epoch"])
    tensors, metadata = read_checkpoint(tmp_path / BEST)
    assert metadata == {"epoch": selected}
    run.load_best()
    torch.testing.assert_close(objective.values(), expected[3 * selected - 1])
    torch.testing.assert_close(tensors["objective.net.weight"], expected[3 * selected - 1][0])


def test_an_average_that_would_never_move_is_refused() -> None:
    with pytest.raises(ValueError, match="'averaging' parameter of Schedule must be below 1"):
        Schedule(averaging=1)


def test_a_selection_from_no_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="'settling' parameter of Schedule must be below 1"):
        Schedule(settling=1)


@pytest.mark.parametrize(("settling", "selected"), [(0.0, 2), (0.4, 4), (0.9, 5)])
@pytest.mark.parametrize("averaging", [0.0, 0.5])
def test_the_first_of_the_best_epochs_is_selected(
    averaging: float, settling: float, selected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, kept = Recorder(), []
    errors = iter([5.0, 3.0, 4.0, 3.0, 3.5])

    def evaluate(*_: Any) -> float:
        kept.append(objective.values())
        return next(errors)

    monkeypatch.setattr(recipe, "error_percent", evaluate)
    schedule = Schedule(5, 4, averaging=averaging, settling=settling)
    run = Experiment(objective, objective.net, schedule, tmp_path)
    history = run.train(counted(10), {"validation": counted(4)})
    assert [record["validation_error"] for record in history] == [5, 3, 4, 3, 3.5]
    assert schedule.selected(history)["epoch"] == selected
    assert read_checkpoint(tmp_path / BEST)[1] == {"epoch": selected}
    run.load_best()
    torch.testing.assert_close(objective.values(), kept[selected - 1], rtol=0, atol=0)


def test_error_is_the_percentage_of_wrong_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "EVALUATED", 7)
    net = nn.Sequential(nn.Dropout(0.99), nn.Identity())
    logits = torch.nn.functional.one_hot(torch.arange(20) % 4).float()
    targets = torch.arange(20) % 4
    targets[[0, 8, 19]] = torch.tensor([1, 3, 0])
    for mode in (True, False):
        net.train(mode)
        assert error_percent(net, Examples(logits, targets)) == 15.0
        assert net.training is net[0].training is mode


def test_dropout_is_anew_at_every_step_and_by_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    forward = Recorder.forward

    def draws(objective: Recorder, *arguments: Tensor) -> Cost:
        drawn.append(float(torch.rand(())))
        return forward(objective, *arguments)

    monkeypatch.setattr(Recorder, "forward", draws)
    for seed in (0, 1, 1):
        record(tmp_path / f"{len(drawn)}", Schedule(epochs=2, batch_size=4, seed=seed))
    assert len(drawn) == 18
    assert len(set(drawn[:12])) == 12
    assert drawn[12:] == drawn[6:12]


def test_bad_schedules_are_refused() -> None:
    for name, value in {
        "epochs": 0,
        "batch_size": 2.0,
        "optimiser": "lbfgs",
        "learning_rate": 0,
        "rho_rate": -1,
        "momentum": -0.1,
        "decay": "linear",
        "averaging": 1.5,
        "seed": -1,
    }.items():
        with pytest.raises(ValueError, match=f"'{name}' parameter of Schedule"):
            Schedule(**{name: value})  # type: ignore[arg-type]


def test_refusing_to_resume_changes_nothing_and_names_what_differs(tmp_path: Path) -> None:
    config = digits.RECIPES["bbb-mixture"]
    start(tmp_path).train(*parts())
    net = mnist.network(config)
    free_energy = FreeEnergy(Bayesian(net, Categorical(), seed=0), digits.N)
    before = {name: value.clone() for name, value in free_energy.state_dict().items()}
    other = Experiment(free_energy, net, replace(config.schedule, seed=8, decay="constant"), tmp_path)
    with pytest.raises(ValueError, match="began with") as error:
        other.train(*parts())
    for text in (str(tmp_path), "'schedule.seed': 0", "'schedule.seed': 8", "'schedule.decay': 'cosine'", "'n': 200"):
        assert text in str(error.value)
    assert "schedule.epochs" not in str(error.value)
    torch.testing.assert_close(free_energy.state_dict(), before, rtol=0, atol=0)


def test_a_configuration_is_read_from_its_checkpoint(tmp_path: Path) -> None:
    first = digits.RECIPES["dropout"]
    second = replace(digits.RECIPES["bbb-mixture"], start=first, pi=1 / 3, seed=5)
    start(tmp_path / "first", first).train(*parts())
    mnist.prepare(second, digits.N, tmp_path / "second", tmp_path / "first").train(*parts())
    assert mnist.began(tmp_path / "first") == first
    assert mnist.began(tmp_path / "second") == second


@pytest.mark.parametrize(
    "about",
    [
        {"method": "bbb-mixture"},
        {"method": "dropout", "schedule.odd": 1},
        [1],
        "x",
        {"method": 1, "schedule.epochs": "x"},
    ],
)
def test_a_configuration_that_is_damaged_is_refused(about: Any, tmp_path: Path) -> None:
    start(tmp_path).train(*parts())
    rewrite(tmp_path / mnist.CHECKPOINT, lambda header, _: header["contents"].update(about=about))
    with pytest.raises(ValueError, match=r"^The 'path' parameter of resume must be .* damaged"):
        mnist.began(tmp_path)


# --- the test set ----------------------------------------------------------------------------------------------------


class Watched(Tensor):
    """A tensor that writes down each time it is looked at."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for value in args:
                if isinstance(value, Watched):
                    value.__dict__["events"].append(value.__dict__["name"])
            plain = [value.as_subclass(Tensor) if isinstance(value, Watched) else value for value in args]
            return func(*plain, **(kwargs or {}))


def watch(tensor: Tensor, name: str, events: list[str]) -> Tensor:
    watched = tensor.as_subclass(Watched)
    watched.__dict__.update(name=name, events=events)
    return watched


@pytest.mark.parametrize("method", ["bbb-mixture", "sgd"])
def test_the_test_set_is_not_looked_at_before_the_end(method: str, tmp_path: Path) -> None:
    results = {}
    for curve in (False, True):
        events: list[str] = []
        named = zip(data.Images._fields, digits.images(), strict=True)
        images = data.Images(*(data.Split(*(watch(value, name, events) for value in split)) for name, split in named))
        config = digits.RECIPES[method]
        results[curve] = mnist.run(config, images, tmp_path / str(curve), curve=curve)
        last = max(number for number, name in enumerate(events) if name == "validation")
        first = events.index("test")
        assert (first > last) == (not curve)
        assert "train" in events[:first]
    one, other = (replace(result, seconds=0) for result in results.values())
    assert one == other
    with_curve = metrics(tmp_path / "True")
    assert all(0 <= record.pop("test_error") <= 100 for record in with_curve)
    assert with_curve == metrics(tmp_path / "False")


@pytest.fixture(autouse=True)
def _no_temporary_file_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("**/.*"))
