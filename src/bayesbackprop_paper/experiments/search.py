"""Choosing hyperparameters, on the validation set only, with Optuna.

A study lives in a database: a file of SQLite's unless told otherwise, or any storage that Optuna can reach, so that
many machines can work on one study. It can be stopped at any time and goes on where it was, in the middle of a trial
too. Trials that are worse than the median of those before them at the same epoch are given up.

A trial whose process was killed stays RUNNING in the database. The next search on that machine tries it again at once,
for each search holds a lock that ends with its process; those of other machines when it has been silent for long.
"""

import copy
import math
import platform
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from bayesbackprop._errors import Described, invalid
from bayesbackprop.callbacks import Callback
from bayesbackprop.training import DivergenceError, Run, TerminatedError, interrupt_deferred
from bayesbackprop_paper.data import Images
from bayesbackprop_paper.experiments.mnist import Config, prepare
from bayesbackprop_paper.experiments.recipe import Examples
from bayesbackprop_paper.experiments.records import is_locked, locked

Space = Literal["paper", "ours"]
_Value = TypeVar("_Value")

# The grid that the paper searched. Of a method without a prior only the learning rate is used.
GRID: Mapping[str, Sequence[Any]] = {
    "learning_rate": [1e-3, 1e-4, 1e-5],
    "draws": [1, 2, 5, 10],
    "pi": [0.25, 0.5, 0.75],
    "-log sigma1": [0, 1, 2],
    "-log sigma2": [6, 7, 8],
}


# Seconds between signs of life, for processes on other machines.
_HEARTBEAT = 60
# How often a trial is tried again after its process was stopped: it goes on where it was, but may be what stops it.
_RETRIES = 20
# The attribute of a trial that says on which machine it runs, and which folder its process has locked.
_PLACE = "place"


@interrupt_deferred()  # a signal within Optuna would leave it in pieces
def search(
    config: Config,
    images: Images,
    *,
    space: Space,
    trials: int,
    storage: str,
    name: str,
    folder: Path,
    progress: Callable[[str], Callback],
) -> dict[str, Any]:
    """Try ``trials`` more configurations; the best so far, with its validation error."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # no traceback of a Ctrl-C
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    database = _database(storage)
    sampler = (
        optuna.samplers.GridSampler(_relevant(config, GRID), seed=config.seed)
        if space == "paper"
        else optuna.samplers.TPESampler(seed=None, multivariate=True)
    )
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=config.schedule.epochs // 5)
    study = optuna.create_study(
        storage=database, sampler=sampler, pruner=pruner, study_name=name, load_if_exists=True, direction="minimize"
    )
    # For trials that end elsewhere: a sampler of the grid would end the search with them.
    notes = optuna.load_study(storage=database, study_name=name, sampler=optuna.samplers.RandomSampler())
    training, validation = (Examples(*split) for split in images[:2])

    def objective(trial: Any) -> float:
        trial.set_user_attr(_PLACE, place)
        chosen = _suggest(trial, config, space)
        # One that was stopped is tried again under another number, and goes on in the folder of the first.
        first = _retry().retried_trial_number(study.trials[trial.number])
        own = folder / f"{name}-{trial.number if first is None else first}"
        goes_on = False
        try:
            run = prepare(chosen, len(training.inputs), own)
            shown = progress(f"trial {trial.number}")
            history = run.train(training, {"validation": validation}, shown, _Watch(trial))
            return chosen.schedule.selected(history)["validation_error"]
        except DivergenceError:
            print(f"trial {trial.number}: given up, its cost is no number", file=sys.stderr, flush=True)
            raise optuna.TrialPruned from None
        except (KeyboardInterrupt, TerminatedError) as stop:
            goes_on = True
            _try_again(study, study.trials[trial.number])
            if isinstance(stop, TerminatedError):  # of which Optuna knows nothing
                notes.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            raise
        finally:
            if not goes_on:
                shutil.rmtree(own, ignore_errors=True)

    def stop_if_interrupted(*_: Any) -> None:
        if interrupted():
            study.stop()

    with interrupt_deferred() as interrupted, _alive(notes, storage, folder, name) as place:
        # Optuna counts a point of the grid as tried even if its trial is in the queue again.
        waits = any(trial.state.name == "WAITING" for trial in study.trials)
        if waits or not isinstance(sampler, optuna.samplers.GridSampler) or not sampler.is_exhausted(study):
            study.optimize(objective, n_trials=trials, callbacks=[stop_if_interrupted])
    over = [trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]  # and not stopped
    return {"validation_error": study.best_value, **_named(study.best_params), "trials": len(over)}


def _database(storage: str) -> Any:
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return optuna.storages.RDBStorage(
            storage, heartbeat_interval=_HEARTBEAT, heartbeat_stale_trial_callback=_try_again
        )
    except (SQLAlchemyError, ImportError, ValueError) as error:
        got = Described(f"{storage} ({str(error).splitlines()[0]})")
        raise invalid("storage", "search", "the address of a database, as sqlite:///file.db", got) from None


def _retry() -> Any:
    """Puts a trial that was stopped into the queue again."""
    import optuna

    return optuna.storages.RetryHeartbeatStaleTrialCallback(_RETRIES, inherit_intermediate_values=True)


def _try_again(study: Any, trial: Any) -> None:
    """Put a trial that was stopped into the queue, without the place where it was."""
    queued = copy.deepcopy(trial)
    queued.user_attrs = {name: value for name, value in trial.user_attrs.items() if name != _PLACE}
    _retry()(study, queued)


@contextmanager
def _alive(study: Any, storage: str, folder: Path, name: str) -> Iterator[str]:
    """Within it this process holds a lock, whose place is given. Before it, what killed processes left is queued."""
    own = folder / f"{name}.{uuid.uuid4().hex}"
    with ExitStack() as held:
        with locked(folder.parent):  # no other search looks while a lock is being made
            others = [each for each in folder.glob(f"{name}.*") if is_locked(each)]
            for left in {*folder.glob(f"{name}.*")} - {*others}:
                shutil.rmtree(left, ignore_errors=True)
            _free(study, alone=not others and storage.startswith("sqlite"))
            held.callback(shutil.rmtree, own, ignore_errors=True)
            held.enter_context(locked(own))
        yield f"{platform.node()}:{own.resolve()}"


def _free(study: Any, *, alone: bool) -> None:
    """Try again the trials that killed processes of this machine have left; ``alone`` no other process is searching."""
    import optuna

    known = study.trials
    again = {number for trial in known for number in _retry().retry_history(trial)}
    long_ago = datetime.now() - timedelta(seconds=_HEARTBEAT)
    for trial in known:
        if trial.state.name != "RUNNING":
            continue
        if _PLACE in trial.user_attrs:
            machine, _, place = trial.user_attrs[_PLACE].partition(":")
            is_dead = machine == platform.node() and not is_locked(Path(place))
        else:  # killed in its first moment, before it could say where it is
            is_dead = alone or trial.datetime_start < long_ago
        if is_dead:
            if trial.number not in again:
                _try_again(study, trial)
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)


class _Watch(Callback):
    """Tells Optuna how a trial goes, and gives it up if Optuna says so."""

    def __init__(self, trial: Any) -> None:
        self._trial = trial

    def on_epoch(self, run: Run) -> None:
        import optuna

        self._trial.report(run.history[-1]["validation_error"], run.epoch)
        if self._trial.should_prune():
            raise optuna.TrialPruned


def _suggest(trial: Any, config: Config, space: Space) -> Config:
    if space == "paper":
        chosen = {name: trial.suggest_categorical(name, values) for name, values in _relevant(config, GRID).items()}
    else:
        ranges: dict[str, tuple[float, float, bool]] = {
            "learning_rate": (1e-4, 1e-2, True) if config.schedule.optimiser == "adam" else (1e-2, 1.0, True),
            "rho_rate": (0.01, 3.0, True),
            "sigma": (1e-3, 0.1, True),
            "pi": (0.1, 0.9, False),
            "-log sigma1": (0.0, 2.0, False),
            "-log sigma2": (5.0, 8.0, False),
            "prior_sigma": (0.02, 2.0, True),
            "dropout": (0.1, 0.6, False),
        }
        chosen = {
            name: trial.suggest_float(name, low, high, log=log)
            for name, (low, high, log) in _relevant(config, ranges).items()
        }
    named = _named(chosen)
    rates = {name: named.pop(name) for name in ("learning_rate", "rho_rate") if name in named}
    return config.changed(schedule=replace(config.schedule, **rates), **named)


def _named(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen, by the names that configurations and ``bbb train`` have: sigma1 for -log sigma1."""
    return {
        name.removeprefix("-log "): math.exp(-value) if name.startswith("-log ") else value
        for name, value in chosen.items()
    }


def _relevant(config: Config, space: Mapping[str, _Value]) -> dict[str, _Value]:
    """What of a search space has a meaning for this method."""
    return {name: value for name, value in space.items() if name.removeprefix("-log ") in config.matters}
