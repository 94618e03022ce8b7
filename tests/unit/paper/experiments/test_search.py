"""A search chooses on the validation set only, goes on wherever it was stopped, and gives up what is hopeless."""

import math
import platform
import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import digits
from bayesbackprop.callbacks import Callback
from bayesbackprop.training import DivergenceError, Run, TerminatedError
from bayesbackprop_paper.experiments import mnist, search, table1
from bayesbackprop_paper.experiments.mnist import Config
from bayesbackprop_paper.experiments.recipe import Experiment
from bayesbackprop_paper.experiments.records import locked
from searches import images, optuna, trials_in

pytestmark = pytest.mark.identities

MIXTURE = {"pi", "-log sigma1", "-log sigma2"}
SEARCHED = {
    ("paper", "bbb-mixture"): {"learning_rate", "draws", *MIXTURE},
    ("paper", "bbb-gaussian"): {"learning_rate", "draws"},
    ("ours", "bbb-mixture"): {"learning_rate", "rho_rate", "sigma", *MIXTURE},
    ("ours", "bbb-gaussian"): {"learning_rate", "rho_rate", "sigma", "prior_sigma"},
    ("ours", "dropout"): {"learning_rate", "dropout"},
    ("ours", "map-gaussian"): {"learning_rate", "prior_sigma"},
    ("ours", "map-laplace"): {"learning_rate", "prior_sigma"},
}


def look(folder: Path, config: Config, space: Any = "ours", trials: int = 1) -> dict[str, Any]:
    return search.search(
        config,
        images(),
        space=space,
        trials=trials,
        storage=f"sqlite:///{folder / 'search.db'}",
        name="study",
        folder=folder / "search",
        progress=lambda _: Callback(),
    )


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What a search tries, none of which is trained."""
    configs: list[Config] = []

    def prepare(config: Config, *_: Any) -> Any:
        configs.append(config)
        return SimpleNamespace(train=lambda *_: [{"validation_error": 1.0}])

    monkeypatch.setattr(search, "prepare", prepare)
    return configs


# --- what is searched ------------------------------------------------------------------------------------------------


def test_the_grid_is_the_papers() -> None:
    assert search.GRID == {
        "learning_rate": [1e-3, 1e-4, 1e-5],
        "draws": [1, 2, 5, 10],
        "pi": [1 / 4, 1 / 2, 3 / 4],
        "-log sigma1": [0, 1, 2],
        "-log sigma2": [6, 7, 8],
    }


@pytest.mark.parametrize("method", ["sgd", "dropout"])
def test_the_rate_of_the_recipe_is_within_what_is_searched(method: Any, tried: list[Config], tmp_path: Path) -> None:
    recipe = table1.RECIPES[method]
    look(tmp_path, recipe)
    (trial,) = trials_in(tmp_path)
    rates = trial.distributions["learning_rate"]
    assert rates.low < recipe.schedule.learning_rate < rates.high


def flat(config: Config) -> dict[str, Any]:
    values = asdict(config)
    schedule = values.pop("schedule")
    return {**values, **schedule}


def named(trial: Any) -> dict[str, Any]:
    """What a trial tried, as a configuration names it."""
    logs = {name.removeprefix("-log "): math.exp(-v) for name, v in trial.params.items() if "log" in name}
    return {**{name: value for name, value in trial.params.items() if "log" not in name}, **logs}


@pytest.mark.parametrize("space", ["paper", "ours"])
@pytest.mark.parametrize("method", mnist.METHODS)
def test_what_has_a_meaning_is_searched_and_nothing_else(
    method: Any, space: str, tried: list[Config], tmp_path: Path
) -> None:
    recipe = flat(digits.RECIPES[method])
    look(tmp_path, digits.RECIPES[method], space, trials=2)
    for config, trial in zip(tried, trials_in(tmp_path), strict=True):
        assert set(trial.params) == SEARCHED.get((space, method), {"learning_rate"})
        if space == "paper":
            assert all(value in search.GRID[name] for name, value in trial.params.items())
        assert flat(config) == {**recipe, **named(trial)}


def test_each_point_of_the_grid_is_tried_once(tried: list[Config], tmp_path: Path) -> None:
    for trials in (2, 10):
        best = look(tmp_path, digits.RECIPES["sgd"], "paper", trials)
    assert sorted(config.schedule.learning_rate for config in tried) == [1e-5, 1e-4, 1e-3]
    assert best["trials"] == 3


# --- how it goes on --------------------------------------------------------------------------------------------------


def test_a_study_goes_on(tmp_path: Path) -> None:
    found = [look(tmp_path, digits.RECIPES["bbb-mixture"]) for _ in range(2)]
    assert [each["trials"] for each in found] == [1, 2]
    trials = trials_in(tmp_path)
    assert [trial.number for trial in trials] == [0, 1]
    assert found[0]["validation_error"] == trials[0].value
    assert found[1]["validation_error"] == min(trial.value for trial in trials)
    for each in found:
        params = {name: value for name, value in each.items() if name not in ("validation_error", "trials")}
        assert params in [named(trial) for trial in trials]
    for trial in trials:
        assert list(trial.intermediate_values) == list(range(1, digits.EPOCHS + 1))
        assert trial.value == min(trial.intermediate_values.values())
    assert list(tmp_path.glob("search/*")) == []


@pytest.mark.parametrize("space", ["paper", "ours"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, TerminatedError])
def test_a_trial_that_was_interrupted_goes_on(
    stop: type[BaseException], space: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = digits.RECIPES["sgd"]
    seen: list[list[int]] = []
    epoch = search._Watch.on_epoch

    def watch(self: Any, run: Run) -> None:
        epoch(self, run)
        seen[-1].append(run.epoch)
        if len(seen) < 3:
            raise stop

    monkeypatch.setattr(search._Watch, "on_epoch", watch)
    for _ in range(2):
        seen.append([])
        with pytest.raises(stop):
            look(tmp_path, config, space)
    seen.append([])
    look(tmp_path, config, space)
    assert seen == [[1], [2], [3]]  # no epoch twice
    trials = trials_in(tmp_path)
    assert [trial.state.name for trial in trials] == ["FAIL", "FAIL", "COMPLETE"]
    assert trials[0].params == trials[1].params == trials[2].params
    assert sorted(trials[-1].intermediate_values) == [1, 2, 3]
    assert list(tmp_path.glob("search/*")) == []


def unfinished(folder: Path, **attributes: str) -> None:
    """A trial that some process has begun."""
    study = optuna.create_study(storage=f"sqlite:///{folder / 'search.db'}", study_name="study")
    trial = study.ask()
    for name, value in attributes.items():
        trial.set_user_attr(name, value)


def states(folder: Path) -> list[str]:
    return [trial.state.name for trial in trials_in(folder)]


def test_a_trial_whose_process_lives_is_left_to_it(tmp_path: Path) -> None:
    other = tmp_path / "search" / "study.other"
    with locked(other):
        unfinished(tmp_path, place=f"{platform.node()}:{other}")
        look(tmp_path, digits.RECIPES["sgd"])
        assert states(tmp_path) == ["RUNNING", "COMPLETE"]
    look(tmp_path, digits.RECIPES["sgd"])
    assert states(tmp_path) == ["FAIL", "COMPLETE", "COMPLETE"]
    assert list(tmp_path.glob("search/*")) == []


def test_a_trial_that_was_killed_in_its_first_moment_is_tried_again(tmp_path: Path) -> None:
    unfinished(tmp_path)
    with locked(tmp_path / "search" / "study.other"):  # it may belong to this other process
        look(tmp_path, digits.RECIPES["sgd"])
    assert states(tmp_path) == ["RUNNING", "COMPLETE"]
    look(tmp_path, digits.RECIPES["sgd"])
    assert states(tmp_path) == ["FAIL", "COMPLETE", "COMPLETE"]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_trial_that_was_queued_before_its_process_died_is_queued_once(tmp_path: Path) -> None:
    unfinished(tmp_path, place=f"{platform.node()}:{tmp_path / 'gone'}")
    study = optuna.load_study(study_name="study", storage=f"sqlite:///{tmp_path / 'search.db'}")
    search._try_again(study, study.trials[0])
    look(tmp_path, digits.RECIPES["sgd"], trials=1)
    assert states(tmp_path) == ["FAIL", "COMPLETE"]


def test_a_grid_that_was_searched_is_not_searched_again(tried: list[Config], tmp_path: Path) -> None:
    found = [look(tmp_path, digits.RECIPES["sgd"], "paper", trials=3) for _ in range(2)]
    assert found[0] == found[1]
    assert len(tried) == 3


def test_a_signal_between_trials_is_not_lost(
    tried: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suggest = search._suggest

    def send(*arguments: Any) -> Config:
        signal.raise_signal(signal.SIGTERM)
        return suggest(*arguments)

    monkeypatch.setattr(search, "_suggest", send)
    with pytest.raises(TerminatedError):
        look(tmp_path, digits.RECIPES["sgd"], trials=3)
    assert states(tmp_path) == ["COMPLETE"]


def test_a_trial_that_diverges_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look(tmp_path, digits.RECIPES["sgd"])

    def diverge(*_: Any) -> None:
        raise DivergenceError("The cost is not a number.")

    monkeypatch.setattr(Experiment, "train", diverge)
    assert look(tmp_path, digits.RECIPES["sgd"])["trials"] == 2
    assert [trial.state.name for trial in trials_in(tmp_path)] == ["COMPLETE", "PRUNED"]
    assert list(tmp_path.glob("search/*")) == []


@pytest.mark.parametrize("storage", ["nonsense", "sqlite:////nowhere/at/all.db", "postgresql+none://here/there"])
def test_a_bad_storage_is_refused(storage: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'storage' parameter of search must be the address of a database"):
        search.search(
            digits.RECIPES["sgd"],
            images(),
            space="ours",
            trials=1,
            storage=storage,
            name="study",
            folder=tmp_path / "search",
            progress=lambda _: Callback(),
        )
    assert not list(tmp_path.iterdir())


def completed(errors: Mapping[int, float]) -> Any:
    rates = optuna.distributions.FloatDistribution(1e-2, 1, log=True)
    return optuna.trial.create_trial(
        params={"learning_rate": 0.1},
        distributions={"learning_rate": rates},
        intermediate_values=dict(errors),
        value=min(errors.values()),
    )


@pytest.mark.parametrize(("before", "pruned"), [(4, True), (3, False)])
def test_a_hopeless_trial_is_given_up(before: int, pruned: bool, tmp_path: Path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'search.db'}", study_name="study")
    study.add_trials([completed({1: 0.5, 2: 0.25, 3: 0.125})] * before)
    study.enqueue_trial({"learning_rate": 0.01})
    best = look(tmp_path, digits.RECIPES["sgd"])
    last = trials_in(tmp_path)[-1]
    assert last.params == {"learning_rate": 0.01}
    assert last.intermediate_values[1] > 0.5
    assert last.state.name == ("PRUNED" if pruned else "COMPLETE")
    assert len(last.intermediate_values) == (1 if pruned else digits.EPOCHS)
    assert best == {"validation_error": 0.125, "learning_rate": 0.1, "trials": before + 1}
    assert list(tmp_path.glob("search/*")) == []
