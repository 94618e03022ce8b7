"""A run that was killed at any moment goes on bit for bit, and the loop does what its schedule says."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import digits
from bayesbackprop import Bayesian, Categorical, FreeEnergy
from bayesbackprop import training as train
from bayesbackprop._cli import app
from bayesbackprop._files import read_checkpoint, write_atomically, write_checkpoint
from bayesbackprop._progress import Progress
from bayesbackprop.objective import Cost
from bayesbackprop.training import BEST, CHECKPOINT, METRICS, DivergenceError, Examples, Run, Schedule, State, error_of
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import mnist, table1
from digits import BATCHES, EPOCHS, MIDDLE, checkpoint, metrics

pytestmark = pytest.mark.equivalence

QUIET = Progress(quiet=True)
TIMEOUT = 300

OPTIONS = {
    "mixture": ["--method", "bbb-mixture", "--units", "8"],
    "averaged": ["--method", "bbb-mixture", "--units", "8", "--averaging", "0.9"],
    "dropout": ["--method", "dropout", "--units", "8"],
    "momentum": ["--method", "sgd", "--units", "8"],
}
SIGNALS = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C counts, also where the tests run in the background, whose processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands train on the small data set, by small recipes."""
    monkeypatch.setattr(data, "mnist", digits.images)
    monkeypatch.setattr(table1, "RECIPES", digits.RECIPES)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # which takes long to start


def bbb(*command: object) -> Result:
    return CliRunner().invoke(app, list(map(str, command)))


def succeed(*command: object) -> dict[str, Any]:
    """The result that a command prints as JSON, but for the seconds."""
    result = bbb(*command, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    del found["seconds"]
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, averages and the optimiser's memory, bit for bit; all metrics; and the selected weights."""
    for name in (CHECKPOINT, BEST):
        (mine, about), (others, about_others) = read_checkpoint(one / name), read_checkpoint(other / name)
        assert mine.keys() == others.keys()
        different = [key for key, value in mine.items() if not torch.equal(value, others[key])]
        assert not different, (name, different)
        assert about.get("epoch") == about_others.get("epoch")
    assert metrics(one) == metrics(other)


@pytest.mark.usefixtures("small")
def test_what_a_search_found_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[mnist.Config] = []
    run = mnist.run

    def spy(config: mnist.Config, *arguments: Any) -> mnist.Result:
        configs.append(config)
        return run(config, *arguments)

    monkeypatch.setattr(mnist, "run", spy)
    found = {"pi": 0.75, "sigma1": 0.5, "sigma2": 0.25, "sigma": 0.0625}
    rates = {"learning_rate": 0.01, "rho_rate": 0.5}
    options = chain.from_iterable((f"--{name.replace('_', '-')}", value) for name, value in {**found, **rates}.items())
    succeed("train", *OPTIONS["mixture"], *options, "--folder", tmp_path)
    (config,) = configs
    assert {name: getattr(config, name) for name in found} == found
    assert {name: getattr(config.schedule, name) for name in rates} == rates


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("sgd", "--pi"),
        ("sgd", "--temperature"),
        ("bbb-gaussian", "--sigma1"),
        ("bbb-mixture", "--prior-sigma"),
        ("dropout", "--draws"),
        ("dropout", "--rho-rate"),
        ("sgd", "--dropout"),
        ("map-gaussian", "--sigma"),
    ],
)
def test_options_without_a_meaning_are_refused(method: str, option: str, tmp_path: Path) -> None:
    value = 2 if option == "--draws" else 0.5
    result = bbb("train", "--method", method, "--units", 8, option, value, "--folder", tmp_path / "run")
    assert result.exit_code == 2
    assert f"no meaning for {method}" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
def test_resuming_where_there_is_no_run_is_refused(tmp_path: Path) -> None:
    result = bbb("train", *OPTIONS["momentum"], "--folder", tmp_path / "none", "--resume")
    assert result.exit_code == 2
    assert "There is no run in" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", OPTIONS)
def test_a_run_killed_in_its_first_epoch_begins_again_as_it_began(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = succeed("train", *OPTIONS[method], "--folder", tmp_path / "whole")

    def die(*_: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_step", die)
        bbb("train", *OPTIONS[method], "--folder", tmp_path / "run")
    assert checkpoint(tmp_path / "run")[1]["state"]["step"] == 0
    assert succeed("train", "--folder", tmp_path / "run", "--resume") == expected
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# --- killed and resumed ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, one for each method and signal, whose process got the signal within a step."""
    folder = tmp_path_factory.mktemp("stopped")
    cases = {
        f"{method}-{way}": (number, ["train", *options, "--folder", str(folder / f"{method}-{way}")])
        for method, options in OPTIONS.items()
        for way, number in SIGNALS.items()
    }
    command = [sys.executable, digits.__file__, json.dumps(cases), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run(command, env=environment, check=True, timeout=TIMEOUT)
    return folder


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", OPTIONS)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(method: str, stopped: Path, tmp_path: Path) -> None:
    ends = json.loads((stopped / "ends.json").read_text())
    expected = succeed("train", *OPTIONS[method], "--folder", tmp_path)
    assert expected["epochs"] == EPOCHS
    assert len(metrics(tmp_path)) == EPOCHS
    for way in SIGNALS:
        folder, said = stopped / f"{method}-{way}", (stopped / f"{method}-{way}.txt").read_text()
        if way == "kill":
            assert ends[f"{method}-{way}"] == -signal.SIGKILL
        else:
            assert ends[f"{method}-{way}"] > 0
            assert "Traceback" not in said
            assert "Error" not in said
            assert said.splitlines()[-1] == "Stopped."
        _, metadata = checkpoint(folder)
        assert metadata["state"]["step"] == (BATCHES if way == "kill" else MIDDLE + 1)
        assert bool(metadata["state"]["sums"]) == bool(metadata["state"]["seconds"]) == (way == "interrupt")
        assert metrics(folder) == metrics(tmp_path)[:1]
        if way == "interrupt":
            assert f"bbb train --folder {folder} --resume" in said
        options = OPTIONS[method] if way == "kill" else []  # what it began with need not be said again
        assert succeed("train", *options, "--folder", folder, "--resume") == expected
        assert_same_run(folder, tmp_path)
        if "bbb" in OPTIONS[method][1]:
            assert (folder / mnist.MODEL).read_bytes() == (tmp_path / mnist.MODEL).read_bytes()


@pytest.mark.usefixtures("small")
def test_a_finished_run_resumed_does_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("train", *OPTIONS["averaged"], "--folder", tmp_path)
    expected = succeed(*command)
    before = {name: (tmp_path / name).read_bytes() for name in (CHECKPOINT, BEST, METRICS, mnist.MODEL)}
    monkeypatch.setattr(Run, "_step", None)
    monkeypatch.setattr(Run, "_end_epoch", None)
    assert succeed(*command, "--resume") == expected
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def start(folder: Path, config: mnist.Config = digits.RECIPES["bbb-mixture"]) -> Run:
    return mnist.prepare(config, digits.N, folder)


def parts() -> tuple[Examples, dict[str, Examples]]:
    training, validation, _ = digits.images()
    return Examples(*training), {"validation": Examples(*validation)}


def assert_resumes(folder: Path, whole: Path, config: mnist.Config = digits.RECIPES["bbb-mixture"]) -> None:
    start(folder, config).train(*parts(), QUIET)
    start(whole, config).train(*parts(), QUIET)
    assert_same_run(folder, whole)


def interrupt(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("epoch", [1, EPOCHS])
def test_ctrl_c_during_an_evaluation_waits_for_its_end(
    epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = start(tmp_path / "run"), []

    def evaluate(*arguments: Any) -> float:
        calls.append(0)
        if len(calls) == epoch:
            interrupt()
        return error_of(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train, "error_of", evaluate)
        with pytest.raises(KeyboardInterrupt):
            run.train(*parts(), QUIET)
    assert len(run.state.records) == len(calls) == epoch
    assert checkpoint(tmp_path / "run")[1]["state"]["step"] == run.state.step == epoch * BATCHES
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_resumes(tmp_path / "run", tmp_path / "whole")


def test_ctrl_c_again_and_again(tmp_path: Path) -> None:
    config = replace(digits.RECIPES["dropout"], schedule=Schedule(EPOCHS, digits.BATCH, averaging=0.8))
    stops = 0
    while True:
        hook = digits.send_in_step(signal.SIGINT, 4)
        try:
            start(tmp_path / "run", config).train(*parts(), QUIET)
        except KeyboardInterrupt:
            stops += 1
            assert checkpoint(tmp_path / "run")[1]["state"]["step"] == 5 * stops
        else:
            break
        finally:
            hook.remove()
    assert stops == EPOCHS * BATCHES // 5
    assert_resumes(tmp_path / "run", tmp_path / "whole", config)


def test_ctrl_c_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    hook = digits.send_in_step(signal.SIGINT, 2)
    try:
        assert start(tmp_path).train(*parts(), QUIET).step == EPOCHS * BATCHES
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        hook.remove()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", [CHECKPOINT, BEST, METRICS])
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_an_error_in_any_write_of_an_epoch_leaves_a_run_that_goes_on(
    function: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, epochs = write_atomically, []
    second = 2 if name == BEST else 3  # the others are written before the first epoch as well

    def write(path: Path, content: bytes) -> None:
        epochs.append(path.name)
        with monkeypatch.context() as patch:
            if epochs.count(name) == second and path.name == name:
                patch.setattr(os, function, _no_space)
            original(path, content)

    errors = iter([3.0, 2.0])  # every epoch is the best so far, so that the best is written each time
    run = start(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(train, "error_of", lambda *_: next(errors))
        patch.setattr(train, "write_atomically", write)
        patch.setattr("bayesbackprop._files.write_atomically", write)
        with pytest.raises(OSError, match="no space"):
            run.train(*parts(), QUIET)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {CHECKPOINT, BEST, METRICS}
    assert checkpoint(tmp_path / "run")[1]["state"]["step"] == BATCHES
    for folder, errors in (("run", iter([2.0, 1.0])), ("whole", iter([3.0, 2.0, 1.0]))):
        with monkeypatch.context() as patch:
            patch.setattr(train, "error_of", lambda *_, left=errors: next(left))
            start(tmp_path / folder).train(*parts(), QUIET)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# --- checkpoints -----------------------------------------------------------------------------------------------------


def _no_space(*_: Any) -> None:
    raise OSError("no space left")


def spoil(folder: Path, how: str) -> None:
    path = folder / CHECKPOINT
    whole = path.read_bytes()
    if how == "foreign":
        path.write_bytes((folder / mnist.MODEL).read_bytes())
    elif how == "best":
        path.write_bytes((folder / BEST).read_bytes())
    else:
        content = {"truncated": whole[:-1], "header only": whole[:9], "empty": b"", "text": b"not a checkpoint at all"}
        path.write_bytes(content[how])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", ["truncated", "header only", "empty", "text", "foreign", "best"])
def test_a_file_that_is_no_checkpoint_is_refused(how: str, tmp_path: Path) -> None:
    command = ("train", *OPTIONS["mixture"], "--folder", tmp_path)
    succeed(*command)
    spoil(tmp_path, how)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    result = bbb(*command, "--resume")
    assert isinstance(result.exception, ValueError)
    assert str(tmp_path) in str(result.exception)
    assert ("whole safetensors file" in str(result.exception)) == (how not in ("foreign", "best"))
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


CHANGES = {
    "schedule.epochs": ["--epochs", 5],
    "schedule.learning_rate": ["--learning-rate", 0.5],
    "schedule.averaging": ["--averaging", 0.5],
    "units": ["--units", 9],
    "temperature": ["--temperature", 0.5],
    "draws": ["--draws", 2],
    "seed": ["--seed", 3],
    "method": ["--method", "bbb-gaussian"],
}


@pytest.mark.usefixtures("small")
def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    options = ["train", *OPTIONS["mixture"], "--folder", tmp_path]
    succeed(*options)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for name, change in CHANGES.items():
        result = bbb(*options, "--resume", *change)
        assert isinstance(result.exception, ValueError)
        assert f"'{name}': {change[1]!r}" in str(result.exception)
        assert "'pi'" not in str(result.exception)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    result = bbb(*options)
    assert result.exit_code == 2
    assert "--resume" in result.output
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


def test_refusing_to_resume_changes_nothing_and_names_what_differs(tmp_path: Path) -> None:
    config = digits.RECIPES["bbb-mixture"]
    start(tmp_path).train(*parts(), QUIET)
    net = mnist.network(config)
    free_energy = FreeEnergy(Bayesian(net, Categorical(), seed=0), digits.N)
    before = {name: value.clone() for name, value in free_energy.state_dict().items()}
    with pytest.raises(ValueError, match="began with") as error:
        Run(free_energy, net, replace(config.schedule, seed=8, decay="constant"), tmp_path)
    for text in (str(tmp_path), "'schedule.seed': 0", "'schedule.seed': 8", "'schedule.decay': 'cosine'", "'n': 200"):
        assert text in str(error.value)
    assert "schedule.epochs" not in str(error.value)
    torch.testing.assert_close(free_energy.state_dict(), before, rtol=0, atol=0)


def test_a_configuration_is_read_from_its_checkpoint(tmp_path: Path) -> None:
    first = digits.RECIPES["dropout"]
    second = replace(digits.RECIPES["bbb-mixture"], start=first, pi=1 / 3, seed=5)
    start(tmp_path / "first", first).train(*parts(), QUIET)
    mnist.prepare(second, digits.N, tmp_path / "second", tmp_path / "first").train(*parts(), QUIET)
    assert mnist.began(tmp_path / "first") == first
    assert mnist.began(tmp_path / "second") == second


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("error")
def test_a_run_that_diverges_says_so_and_keeps_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Run._step

    def overflow(run: Run, *arguments: Any) -> None:
        step(run, *arguments)
        if run.state.records:
            run.state.sums["likelihood"] = math.nan

    monkeypatch.setattr(Run, "_step", overflow)
    result = bbb("train", *OPTIONS["mixture"], "--learning-rate", 0.25, "--folder", tmp_path)
    assert isinstance(result.exception, DivergenceError)
    assert "epoch 2" in str(result.exception)
    assert "below 0.25" in str(result.exception)
    assert checkpoint(tmp_path)[1]["state"]["step"] == BATCHES
    assert len(metrics(tmp_path)) == 1


# --- the loop --------------------------------------------------------------------------------------------------------


class Recorder(nn.Module):
    """A cost whose gradient is 1 for every parameter; remembers what it saw, and the parameters it was asked with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 2)
        self.rho = nn.ParameterList([torch.full((2,), 5.0)])
        self.seen: list[list[int]] = []
        self.asked: list[list[Tensor]] = []

    def forward(self, inputs: Tensor, targets: Tensor) -> Cost:
        assert torch.equal(inputs[:, 0].long(), targets)
        self.seen.append(targets.tolist())
        self.asked.append(self.values())
        likelihood = sum((parameter.sum() for parameter in self.parameters()), torch.zeros(()))
        return Cost((likelihood, targets.double().mean()), 0.0)

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]


def counted(n: int) -> Examples:
    return Examples(torch.arange(n)[:, None].float(), torch.arange(n))


def record(folder: Path, schedule: Schedule, n: int = 10) -> tuple[Recorder, State]:
    objective = Recorder()
    run = Run(objective, objective.net, schedule, folder, objective.rho)
    return objective, run.train(counted(n), {"validation": counted(4)}, QUIET)


def test_every_epoch_visits_every_example_once(tmp_path: Path) -> None:
    orders = {}
    for seed in (0, 1):
        objective, state = record(tmp_path / str(seed), Schedule(epochs=3, batch_size=8, seed=seed), n=50)
        assert [len(batch) for batch in objective.seen] == [8, 8, 8, 8, 8, 8, 2] * 3
        for epoch in range(3):
            order = list(chain(*objective.seen[7 * epoch : 7 * (epoch + 1)]))
            assert sorted(order) == list(range(50))
            orders[seed, epoch] = order
        assert state.step == 21
    assert len(set(map(tuple, [list(range(50)), *orders.values()]))) == 7
    again, _ = record(tmp_path / "again", Schedule(epochs=3, batch_size=8, seed=1), n=50)
    assert list(chain(*again.seen)) == orders[1, 0] + orders[1, 1] + orders[1, 2]


def test_records_are_the_means_of_the_epoch(tmp_path: Path) -> None:
    objective, state = record(tmp_path, Schedule(epochs=2, batch_size=4))
    for epoch, found in enumerate(state.records):
        batches = slice(3 * epoch, 3 * (epoch + 1))
        costs = [sum(float(value.sum()) for value in values) for values in objective.asked[batches]]
        assert found["epoch"] == epoch + 1
        assert found["likelihood"] == pytest.approx(sum(costs) / 3)
        assert found["complexity"] == pytest.approx(sum(sum(seen) / len(seen) for seen in objective.seen[batches]) / 3)
        assert found["seconds"] > 0
    assert [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()] == state.records


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
    run.train(training, watched, QUIET)
    for epoch in range(EPOCHS):
        for batch in train._order(0, epoch, digits.N).split(digits.BATCH):
            optimiser.zero_grad()
            twin.objective(training.inputs[batch], training.targets[batch]).backward()
            optimiser.step()
            scheduler.step()
    found = list(run.objective.parameters())
    torch.testing.assert_close(found, list(twin.objective.parameters()), rtol=1e-4, atol=1e-5)
    assert not any(torch.allclose(one, other) for one, other in zip(found, initial, strict=True))


def test_averages_are_evaluated_and_selected(tmp_path: Path) -> None:
    objective = Recorder()
    schedule = Schedule(2, 4, "sgd", learning_rate=0.5, decay="constant", averaging=0.5)
    run = Run(objective, objective.net, schedule, tmp_path, objective.rho)
    evaluated = []
    objective.net.register_forward_hook(lambda net, *_: evaluated.append(net.weight.detach().clone()))
    run.train(counted(10), {"validation": counted(4)}, QUIET)
    average, expected = objective.asked[0], []
    weights = (1, 3 / 4, 3 / 5, 1 / 2, 1 / 2, 1 / 2)  # the first step counts whole: where it all began does not
    for weight, values in zip(weights, [*objective.asked[1:], objective.values()], strict=True):
        average = [(1 - weight) * old + weight * new for old, new in zip(average, values, strict=True)]
        expected.append(average)
    torch.testing.assert_close(evaluated, [expected[2][0], expected[5][0]])
    with run.averaged():
        torch.testing.assert_close(objective.values(), expected[-1])
    own = [value - 0.5 * 6 for value in objective.asked[0]]
    torch.testing.assert_close(objective.values(), own)  # which the averages never entered
    selected = int(run.state.selected["epoch"])
    tensors, metadata = read_checkpoint(tmp_path / BEST)
    assert metadata == {"epoch": selected}
    run.load_best()
    torch.testing.assert_close(objective.values(), expected[3 * selected - 1])
    torch.testing.assert_close(tensors["objective.net.weight"], expected[3 * selected - 1][0])


def _refuse(values: list[Tensor]) -> None:
    assert all(bool((value == 9).all()) for value in values)
    raise RuntimeError


def test_averages_are_put_away_after_an_error(tmp_path: Path) -> None:
    objective = Recorder()
    run = Run(objective, objective.net, Schedule(averaging=0.5), tmp_path)
    for value in run._average:
        value.fill_(9)
    before = objective.values()
    with pytest.raises(RuntimeError), run.averaged():
        _refuse(objective.values())
    torch.testing.assert_close(objective.values(), before, rtol=0, atol=0)


def test_an_average_that_would_never_move_is_refused() -> None:
    with pytest.raises(ValueError, match="'averaging' parameter of Schedule must be below 1"):
        Schedule(averaging=1)


@pytest.mark.parametrize("averaging", [0.0, 0.5])
def test_the_first_of_the_best_epochs_is_selected(
    averaging: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, kept = Recorder(), []
    errors = iter([5.0, 3.0, 4.0, 3.0, 3.5])

    def evaluate(*_: Any) -> float:
        kept.append(objective.values())
        return next(errors)

    monkeypatch.setattr(train, "error_of", evaluate)
    run = Run(objective, objective.net, Schedule(5, 4, averaging=averaging), tmp_path)
    state = run.train(counted(10), {"validation": counted(4)}, QUIET)
    assert [record["validation_error"] for record in state.records] == [5, 3, 4, 3, 3.5]
    assert state.selected["epoch"] == 2
    assert read_checkpoint(tmp_path / BEST)[1] == {"epoch": 2}
    run.load_best()
    torch.testing.assert_close(objective.values(), kept[1], rtol=0, atol=0)


def test_error_is_the_percentage_of_wrong_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_EVALUATED", 7)
    net = nn.Sequential(nn.Dropout(0.99), nn.Identity())
    logits = torch.nn.functional.one_hot(torch.arange(20) % 4).float()
    targets = torch.arange(20) % 4
    targets[[0, 8, 19]] = torch.tensor([1, 3, 0])
    for mode in (True, False):
        net.train(mode)
        assert error_of(net, Examples(logits, targets)) == 15.0
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


# --- several processes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes, each of which runs :func:`_rank`, left behind."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("This torch was built without gloo.")
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
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
        start(folder / "uneven").train(Examples(torch.zeros(uneven, 784), torch.zeros(uneven).long()), {}, QUIET)
    # The first rank writes slowly, and the second waits for it.
    if rank == 0:
        _delay_writing()
    config = digits.RECIPES["bbb-mixture"]
    slow = mnist.run(replace(config, schedule=replace(config.schedule, epochs=1)), digits.images(), folder / "slow")
    (folder / f"slow-{rank}.json").write_text(json.dumps({**asdict(slow), "seconds": 0}))
    destroy()


def _whole_and_stopped(folder: Path, config: mnist.Config, rank: int) -> None:
    for name in ("whole", "stopped"):
        run = start(folder / name, config)
        if name == "stopped":
            hook = digits.send_in_step(signal.SIGINT, MIDDLE) if rank == 1 else None  # the other rank must stop too
            with pytest.raises(KeyboardInterrupt):
                run.train(*parts(), QUIET)
            if hook is not None:
                hook.remove()
            assert run.state.step == MIDDLE + 1
            dist.barrier()
            run = start(folder / name, config)
            assert run.state.step == MIDDLE + 1
        run.train(*parts(), QUIET)
        torch.save(run.objective.state_dict(), folder / f"{name}-{rank}")


def _delay_writing() -> None:
    def write(*arguments: Any) -> None:
        time.sleep(0.3)
        write_checkpoint(*arguments)

    train.write_checkpoint = write  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["bbb-mixture", "dropout"])
def test_ranks_end_with_equal_weights_and_resume_bit_for_bit(method: str, ranks: Path) -> None:
    folder = ranks / method
    first = torch.load(folder / "whole-0")
    for name in ("whole-1", "stopped-0", "stopped-1"):
        torch.testing.assert_close(torch.load(folder / name), first, rtol=0, atol=0)
    assert_same_run(folder / "whole", folder / "stopped")
    costs = [record["likelihood"] + record["complexity"] / digits.N for record in metrics(folder / "whole")]
    assert len(costs) == EPOCHS
    assert costs == sorted(costs, reverse=True)


def test_ranks_wait_for_the_selected_weights(ranks: Path) -> None:
    assert (ranks / "slow-0.json").read_text() == (ranks / "slow-1.json").read_text()


def test_the_command_under_torchrun(ranks: Path) -> None:
    assert json.loads((ranks / "command-0.txt").read_text())["epochs"] == EPOCHS
    assert (ranks / "command-1.txt").read_text() == ""
    assert len(list((ranks / "command").glob("tensorboard/*"))) <= 1
    assert metrics(ranks / "command") == metrics(ranks / "bbb-mixture" / "whole")


def test_ranks_share_each_minibatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objectives = [Recorder(), Recorder()]
    monkeypatch.setattr(train, "DistributedDataParallel", lambda module: module)
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    for rank, objective in enumerate(objectives):
        run = Run(objective, objective.net, Schedule(1, 8), tmp_path / str(rank))
        run.rank, run.ranks = rank, 2
        run.train(counted(20), {"validation": counted(4)}, QUIET)
    assert [len(seen) for objective in objectives for seen in objective.seen] == [4, 4, 2] * 2
    for one, other, whole in zip(*(each.seen for each in objectives), train._order(0, 0, 20).split(8), strict=True):
        assert sorted(one + other) == sorted(whole.tolist())
    assert not (tmp_path / "1" / CHECKPOINT).exists()


@pytest.fixture(autouse=True)
def _no_temporary_file_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("**/.*"))


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
