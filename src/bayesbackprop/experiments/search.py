"""Choosing hyperparameters, on the validation set only, with Optuna.

A study lives in a database: a file of SQLite's unless told otherwise, or any storage that Optuna can reach, so that
many machines can work on one study. It can be stopped at any time and goes on where it was; a trial whose process died
is tried again. Trials that are worse than the median of those before them at the same epoch are given up.
"""

import math
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from bayesbackprop.data import Images
from bayesbackprop.experiments.mnist import Config, prepare
from bayesbackprop.progress import Progress
from bayesbackprop.train import Examples

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


def search(
    config: Config,
    images: Images,
    *,
    space: Space,
    trials: int,
    storage: str,
    name: str,
    folder: Path,
    progress: Callable[[str], Progress],
) -> dict[str, Any]:
    """Try ``trials`` more configurations; the best so far, with its validation error."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    again = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=3)
    database = optuna.storages.RDBStorage(storage, heartbeat_interval=60, heartbeat_stale_trial_callback=again)
    sampler = (
        optuna.samplers.GridSampler(_relevant(config, GRID), seed=config.seed)
        if space == "paper"
        else optuna.samplers.TPESampler(seed=None, multivariate=True)
    )
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=config.schedule.epochs // 5)
    study = optuna.create_study(
        storage=database, sampler=sampler, pruner=pruner, study_name=name, load_if_exists=True, direction="minimize"
    )
    training, validation = (Examples(*split) for split in images[:2])

    def objective(trial: Any) -> float:
        chosen = _suggest(trial, config, space)
        own = folder / f"{name}-{trial.number}"
        try:
            run = prepare(chosen, len(training.inputs), own)
            watch = _Watch(trial, progress(f"trial {trial.number}"))
            return run.train(training, {"validation": validation}, watch).selected["validation_error"]
        finally:
            shutil.rmtree(own, ignore_errors=True)

    study.optimize(objective, n_trials=trials)
    return {"validation_error": study.best_value, **study.best_params, "trials": len(study.trials)}


class _Watch(Progress):
    """Shows a trial, tells Optuna how it goes, and gives it up if Optuna says so."""

    def __init__(self, trial: Any, shown: Progress) -> None:
        self.__dict__.update(shown.__dict__)
        self._trial = trial

    def epoch(self, record: Mapping[str, float]) -> None:
        import optuna

        super().epoch(record)
        self._trial.report(record["validation_error"], int(record["epoch"]))
        if self._trial.should_prune():
            raise optuna.TrialPruned


def _suggest(trial: Any, config: Config, space: Space) -> Config:
    if space == "paper":
        chosen = {name: trial.suggest_categorical(name, values) for name, values in _relevant(config, GRID).items()}
    else:
        ranges: dict[str, tuple[float, float, bool]] = {
            "learning_rate": (1e-4, 1e-2, True),
            "rho_rate": (0.01, 3.0, True),
            "sigma": (1e-3, 0.1, True),
            "pi": (0.1, 0.9, False),
            "-log sigma1": (0.0, 2.0, False),
            "-log sigma2": (5.0, 8.0, False),
            "prior_sigma": (0.02, 2.0, True),
        }
        chosen = {
            name: trial.suggest_float(name, low, high, log=log)
            for name, (low, high, log) in _relevant(config, ranges).items()
        }
    changes: dict[str, Any] = {name: chosen[name] for name in ("draws", "pi", "sigma", "prior_sigma") if name in chosen}
    for name in ("sigma1", "sigma2"):
        if f"-log {name}" in chosen:
            changes[name] = math.exp(-chosen[f"-log {name}"])
    rates = {name: chosen[name] for name in ("learning_rate", "rho_rate") if name in chosen}
    return replace(config, schedule=replace(config.schedule, **rates), **changes)


def _relevant(config: Config, space: Mapping[str, _Value]) -> dict[str, _Value]:
    """What of a search space has a meaning for this method."""
    names = {"learning_rate"}
    if config.is_bayesian:
        names |= {"draws", "rho_rate", "sigma"}
    names |= {"pi", "-log sigma1", "-log sigma2"} if config.method == "bbb-mixture" else set()
    names |= {"prior_sigma"} if config.method in ("bbb-gaussian", "map-gaussian", "map-laplace") else set()
    return {name: value for name, value in space.items() if name in names}
