"""Ctrl-C and SIGTERM: what is being done is finished, and the process ends with the code that shells count."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bayesbackprop as bbb
from bayesbackprop import _signals
from bayesbackprop._files import read_checkpoint
from bayesbackprop.callbacks import Callback, Checkpoint
from bayesbackprop.training import (
    Batches,
    Run,
    TerminatedError,
    distributed,
    fit,
    interrupt_deferred,
    terminate,
)
from training_runs import ctrl_c_counts

pytestmark = pytest.mark.identities

ENDINGS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: TerminatedError}
EPOCHS, STEPS, STOP = 3, 6, 4


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    with ctrl_c_counts():
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, before)


class Send(Callback):
    """Sends signals to this process in a step, and looks at the run at its end."""

    def __init__(self, *numbers: int, step: int = STOP) -> None:
        self.numbers, self.step = numbers, step
        self.ends: list[tuple[int, bool, bool]] = []

    def on_step(self, run: Run) -> None:
        if run.step == self.step:
            for number in self.numbers:
                signal.raise_signal(signal.Signals(number))

    def on_end(self, run: Run) -> None:
        self.ends.append((run.step, run.interrupted, run.complete))


def train(*callbacks: Callback) -> list[torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = bbb.Bayesian(nn.Linear(3, 2), bbb.Categorical(), seed=0)
    fit(model, Batches(torch.arange(12.0).reshape(4, 3), torch.arange(4) % 2, 2), epochs=EPOCHS, callbacks=callbacks)
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_ends_a_run_after_its_step(number: int, tmp_path: Path) -> None:
    send = Send(number)
    with pytest.raises(ENDINGS[number]) as ended:
        train(Checkpoint(tmp_path / "run"), send)
    assert send.ends == [(STOP, True, False)]
    assert read_checkpoint(tmp_path / "run")[1]["state"]["step"] == STOP
    assert getattr(ended.value, "code", 143) == 143
    torch.testing.assert_close(train(Checkpoint(tmp_path / "run")), train(), rtol=0, atol=0)


def test_a_signal_in_the_last_step_counts_after_the_run(tmp_path: Path) -> None:
    send = Send(signal.SIGTERM, step=STEPS)
    with pytest.raises(TerminatedError):
        train(Checkpoint(tmp_path / "run"), send)
    assert send.ends == [(STEPS, False, True)]


def test_a_handler_of_the_users_is_left_alone() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        send = Send(signal.SIGTERM)
        train(send)
        assert heard == [signal.SIGTERM]
        assert send.ends == [(STEPS, False, True)]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_in_another_thread_handlers_stay_as_they_are() -> None:
    seen: list[object] = []

    class Look(Callback):
        def on_step(self, run: Run) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train, args=(Look(),))
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL] * STEPS


@pytest.mark.parametrize("first", ENDINGS)
@pytest.mark.parametrize("second", ENDINGS)
def test_a_second_signal_ends_it_at_once(first: int, second: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_signals, "_TOGETHER", 0.0)
    send = Send(first, second)
    with pytest.raises(ENDINGS[second]):
        train(send)
    assert send.ends == [(STOP, False, False)]


@pytest.mark.parametrize("first", ENDINGS)
def test_what_a_launcher_passes_on_is_no_second_signal(first: int) -> None:
    send = Send(first, signal.SIGTERM)
    with pytest.raises(ENDINGS[first]):
        train(send)
    assert send.ends == [(STOP, True, False)]


@pytest.mark.parametrize("number", ENDINGS)
def test_one_within_another_ends_by_the_same_signal(number: int) -> None:
    done: list[str] = []

    def inner() -> None:
        with interrupt_deferred() as interrupted:
            signal.raise_signal(signal.Signals(number))
            assert interrupted() == number
            done.append("inner")

    def outer() -> None:
        with interrupt_deferred() as interrupted:
            with pytest.raises(ENDINGS[number]):
                inner()
            assert interrupted() == number
            done.append("outer")

    with pytest.raises(ENDINGS[number]):
        outer()
    assert done == ["inner", "outer"]


def test_a_forked_child_is_not_told_to_finish() -> None:
    with interrupt_deferred() as interrupted:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert interrupted() == 0


def test_a_signal_that_a_finaliser_swallowed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminate, "came", False)
    signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(TerminatedError):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(TerminatedError), interrupt_deferred() as interrupted:
            assert interrupted() == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_it_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(TerminatedError())).code == 143


@pytest.mark.skipif(not dist.is_available(), reason="This torch was built without torch.distributed.")
@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_that_are_started_again_forget_the_addresses_of_those_that_are_gone(
    machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stores = dist.HashStore(), []
    monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda _, *, store, rank, world_size: stores.append(store))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(machines))
    for count in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        with distributed():
            stores[-1].set(f"address {count}", "here")
    assert stores[1].check(["address 1"])
    assert stores[1].check(["address 0"]) == (machines > 1)  # whose counts differ
