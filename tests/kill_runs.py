"""Random kills: long commands get SIGKILL or SIGTERM at a random moment, and the very same command is run again.

However often that happens, a run ends with the result of one that was never disturbed. `survive` does it for one of
`CASES`, in children that are forked from one process, because starting torch takes longer than the runs. By hand:

    python tests/kill_runs.py --seed 1 --kills 40 train search
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

import bayesbackprop as bbb
import digits
from bandit_worlds import KINDS, PLACES
from bayesbackprop import _cli as cli
from bayesbackprop._files import read_checkpoint
from bayesbackprop.bandits import simulate, simulation
from bayesbackprop.callbacks import Averaging, Checkpoint
from bayesbackprop.training import Batches, distributed, fit
from bayesbackprop_paper import data
from bayesbackprop_paper.experiments import mnist, table1
from bayesbackprop_paper.experiments.recipe import BEST, CHECKPOINT

# Seconds that an attempt may take, after which it counts as hung.
LIMIT = 60.0
# Seconds that torchrun leaves the other rank to end by itself, and then to end by SIGTERM.
PATIENCE = 1.0
# Of one run; then it may finish, and the next begins. It is also how often torchrun may start its ranks again.
KILLS_OF_A_RUN = 3

SIGNALS = (signal.SIGKILL, signal.SIGTERM)
# How a process ends by a signal: killed by it, or as shells count SIGTERM.
ENDS = {-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM}
# The last characters of what a process said, for a report.
SAID = 3000


@dataclass
class Outcome:
    """What became of the runs of a case."""

    case: str
    seed: int
    kills: int = 0
    equal: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        found = f"{self.kills} kills, {self.equal} runs equal, {len(self.problems)} problems, {self.seconds:.0f} s"
        return "\n  ".join([f"{self.case} (seed {self.seed}): {found}", *self.problems])


class Moment(NamedTuple):
    """When to send which signal, and under torchrun to which rank."""

    seconds: float
    number: signal.Signals
    rank: int


class End(NamedTuple):
    """How an attempt ended: its exit code, None if it hung; the signals that were sent; and what it said."""

    code: int | None
    sent: list[Moment]
    said: str


class Case(NamedTuple):
    """A command that works in a folder and gets signals at some moments, and the hash of what it leaves there."""

    attempt: Callable[[list[Moment], Path], End]
    fingerprint: Callable[[Path], str]


def survive(name: str, folder: Path, *, seed: int, kills: int) -> Outcome:
    """Kill the runs of a case so often, and compare each with one that was not disturbed."""
    case, chance, outcome = CASES[name], random.Random(f"{name} {seed}"), Outcome(name, seed)
    began = time.monotonic()
    if (end := case.attempt([], folder / "whole")).code != 0:
        outcome.problems.append(f"undisturbed: ended with {end.code}: {end.said[-SAID:]}")
        return outcome
    length, expected = time.monotonic() - began, case.fingerprint(folder / "whole")
    for number in range(10 * kills):
        if outcome.kills >= kills or outcome.problems:
            break
        place, left, code = folder / str(number), min(KILLS_OF_A_RUN, kills - outcome.kills), None
        sent = list[Moment]()
        while code != 0:
            moments = [
                Moment(chance.uniform(0, length), chance.choice(SIGNALS), chance.randrange(2)) for _ in range(left)
            ]
            started = time.monotonic()
            end = case.attempt(moments, place)
            left, code = left - len(end.sent), end.code
            outcome.kills += len(end.sent)
            sent += end.sent
            if code is None or code not in ENDS | {0} or (code and not end.sent) or "Traceback" in end.said:
                outcome.problems.append(f"run {number}: {end.sent}: ended with {code}: {end.said[-SAID:]}")
                break
            if not end.sent:  # those that come later take no longer
                length = min(length, time.monotonic() - started)
        else:
            if case.fingerprint(place) == expected:
                outcome.equal += 1
            else:
                outcome.problems.append(f"run {number}: {sent}: another result than undisturbed")
        shutil.rmtree(place, ignore_errors=True)
    outcome.seconds = time.monotonic() - began
    return outcome


# --- children --------------------------------------------------------------------------------------------------------


def itself(child: int) -> list[int]:
    return [child]


def forked(
    run: Callable[[Path], None], moments: list[Moment], folder: Path, victims: Callable[[int], list[int]] = itself
) -> End:
    """An attempt in a child that is forked from this process.

    Whenever its ``victims`` are new ones, one of them gets a signal: the child itself, which ends by it, or of its two
    ranks, which it starts again, one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = folder.parent / "said.txt"
    child = os.fork()
    if child == 0:
        _be(run, folder, said)
    alive, known, sent, began, since = list[int](), set[int](), list[Moment](), time.monotonic(), 0.0
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            now, left = time.monotonic() - began, moments[len(sent) :]
            if ended:
                return End(os.waitstatus_to_exitcode(status), sent, said.read_text() if said.exists() else "")
            if now > (1 + len(sent)) * LIMIT:
                return End(None, sent, f"hung. {said.read_text()}")
            found = victims(child)
            if found and not known & set(found):  # their time begins
                alive, since = sorted(found), now
                known |= set(found)
            if left and alive and now - since > left[0].seconds:
                victim = alive[left[0].rank % len(alive)]
                with contextlib.suppress(ProcessLookupError):
                    if not has_ended(folder, victim).exists():
                        os.kill(victim, left[0].number)
                        sent.append(left[0])
                alive = []
            time.sleep(0.002)
    finally:
        with contextlib.suppress(ProcessLookupError):  # ranks may survive who started them
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _be(run: Callable[[Path], None], folder: Path, said: Path) -> NoReturn:
    """What the child does: it runs in a group of its own, and what it says goes to a file."""
    code = 1
    try:
        os.setpgid(0, 0)
        _default_signals()
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        run(folder)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _default_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def command(*options: str, folder: str) -> Callable[[Path], None]:
    """``bbb`` with these options, on the small data."""

    def run(place: Path) -> None:
        sys.argv = ["bbb", *options, folder, str(place)]
        cli.main()

    return run


def under_torchrun(run: Callable[[Path], None], moments: list[Moment], folder: Path) -> End:
    """An attempt with two ranks. After each signal to one of them torchrun starts both again, with the same command.

    It is what ``torchrun --standalone --nproc-per-node 2 --max-restarts`` calls, but for ranks that are forked.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # not every torch has it

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=f"{os.getpid()}-{time.monotonic()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=KILLS_OF_A_RUN,
        start_method="fork",
    )

    def launch(place: Path) -> None:
        os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # A rank that waits for one that is gone, in code that hears no signal, would be killed after half a minute.
        context: Any = torch.multiprocessing.ProcessContext
        context.join = functools.partialmethod(context.join, grace_period=PATIENCE)
        elastic_launch(config, _be_rank)(run, place)

    end = forked(launch, moments, folder, ranks_of)
    # torchrun reports ranks that it started again with tracebacks of its own.
    return end._replace(said="") if end.code == 0 else end


def _be_rank(run: Callable[[Path], None], folder: Path) -> None:
    _default_signals()
    try:
        run(folder)
    except SystemExit as error:
        if error.code:  # else the launcher would wait for what this returns
            raise
    has_ended(folder, os.getpid()).touch()


def has_ended(folder: Path, process: int) -> Path:
    """Where a rank leaves word that it has done all of its work.

    What follows is torch's: ranks that are functions wait for each other at an event, and one that is killed there
    hangs the launcher for ever. The ranks of the command ``torchrun`` are programs, which have no such event.
    """
    return folder.parent / f"{process}.ended"


def ranks_of(process: int) -> list[int]:
    """The ranks that a launcher has started, when there are both."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
        return found if len(found) == 2 else []
    return []


# --- what is run -----------------------------------------------------------------------------------------------------

TRAIN = ("train", "--method", "bbb-mixture", "--units", "8", "--averaging", "0.9", "--epochs", "12")


def fit_with_checkpoint(folder: Path) -> None:
    """A user's program: a network of their own, with a checkpoint after each epoch and every 5 steps."""
    random_numbers = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(60, 4, generator=random_numbers), torch.arange(60) % 3
    with distributed():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        model = bbb.Bayesian(net, bbb.Categorical(), seed=0)
        callbacks = [Averaging(0.9), Checkpoint(folder / "run", every=5)]
        fit(model, Batches(inputs, targets, 8), epochs=10, callbacks=callbacks, seed=1)
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            bbb.save(model, folder / "model")


def simulate_with_checkpoint(folder: Path) -> None:
    simulation._SECONDS = 0.02
    agent = KINDS["thompson, input"](replicas=2, seed=6)
    simulate([PLACES["outcomes"](seed) for seed in (5, 6)], agent, 60, folder / "run")


def hashed(tensors: dict[str, Tensor], *others: object) -> str:
    digest = hashlib.sha256(json.dumps(others, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def hash_of_training(folder: Path) -> str:
    """Weights, averages, the optimiser's memory, the selected weights, the model and all records."""
    (last, _), (best, about) = read_checkpoint(folder / CHECKPOINT), read_checkpoint(folder / BEST)
    model = hashlib.sha256((folder / mnist.MODEL).read_bytes()).hexdigest()
    tensors = {
        f"{which}.{name}": value for which, all_ in (("last", last), ("best", best)) for name, value in all_.items()
    }
    return hashed(tensors, about["epoch"], digits.metrics(folder), model)


def hash_of_fit(folder: Path) -> str:
    tensors, _ = read_checkpoint(folder / "run")
    return hashed(tensors, hashlib.sha256((folder / "model").read_bytes()).hexdigest())


def hash_of_simulation(folder: Path) -> str:
    tensors, about = read_checkpoint(folder / "run")
    return hashed(tensors, about)


def hash_of_search(folder: Path) -> str:
    """Each point of the grid with its error, and what is left: no trial that runs, and no folder."""
    with contextlib.closing(sqlite3.connect(folder / "search.db")) as database:
        tables = "trials JOIN trial_params USING (trial_id) JOIN trial_values USING (trial_id)"
        found = set(database.execute(f"SELECT param_value, value FROM {tables} WHERE state = 'COMPLETE'"))
        left = list(database.execute("SELECT number, state FROM trials WHERE state IN ('RUNNING', 'WAITING')"))
    return hashed({}, sorted(found), left, [path.name for path in folder.glob("search/*")])


RANKS: dict[str, Callable[[Path], None]] = {
    "train": command(*TRAIN, folder="--folder"),
    "fit": fit_with_checkpoint,
}
SEARCH = ("search", "--method", "sgd", "--units", "8", "--space", "paper", "--trials", "9")
CASES: dict[str, Case] = {
    "train": Case(functools.partial(forked, RANKS["train"]), hash_of_training),
    "fit": Case(functools.partial(forked, RANKS["fit"]), hash_of_fit),
    "simulate": Case(functools.partial(forked, simulate_with_checkpoint), hash_of_simulation),
    "search": Case(functools.partial(forked, command(*SEARCH, folder="--runs")), hash_of_search),
    "torchrun train": Case(functools.partial(under_torchrun, RANKS["train"]), hash_of_training),
    "torchrun fit": Case(functools.partial(under_torchrun, RANKS["fit"]), hash_of_fit),
}


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Commands train on the small data, by small recipes."""
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]  # which takes long to start
    before: Any = data.mnist
    data.mnist = digits.images  # type: ignore[assignment]
    recipes = dict(table1.RECIPES)
    table1.RECIPES.update(digits.RECIPES)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        data.mnist = before
        table1.RECIPES.update(recipes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"Of {', '.join(CASES)}; all unless given.")
    parser.add_argument("--kills", type=int, default=10, help="Of each case.")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="Of the moments and signals.")
    parser.add_argument("--folder", help="Where the runs are.")
    options = parser.parse_args()
    with small():
        # What the children would import, slowly: here once for all.
        import torch._dynamo  # noqa: F401

        import bayesbackprop_paper.cli.reproduce  # noqa: F401

        if "search" in options.cases:
            import optuna.storages._rdb.storage  # noqa: F401
        failed = False
        for name in options.cases or CASES:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                outcome = survive(name, Path(folder), seed=options.seed, kills=options.kills)
            print(outcome, flush=True)
            failed |= bool(outcome.problems)
    sys.exit(failed)


if __name__ == "__main__":
    main()
