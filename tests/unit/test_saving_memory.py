"""Saving and loading take the memory of the model, and a file that is written to meanwhile changes nothing."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bayesbackprop import Bayesian, Gaussian, load, save
from bayesbackprop._engine import lock
from bayesbackprop._files import OpenFile, writing
from bayesbackprop_paper.bench import size
from bayesbackprop_paper.bench.apart import call_apart
from saved_models import bits_of, good_file, normalised

pytestmark = pytest.mark.identities


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from Linux's /proc")
def test_neither_saving_nor_loading_copies_the_model(tmp_path: Path) -> None:
    sizes = size.Sizes((1000, 5000, 1000))
    mu_and_rho = 2 * 4 * 10_006_000
    peaks = []
    for phase in ("construction", "saving", "loading"):
        (taken,) = call_apart(size.take, [(size.Asked(phase, "bayesbackprop", sizes, 1, 0, tmp_path / "model"),)])
        assert taken.peak is not None
        peaks.append(taken.peak)
    made, saved, loaded = peaks
    assert made > mu_and_rho
    # A copy of mu or of rho alone would be half of both.
    assert saved - made < 0.2 * mu_and_rho
    assert loaded - made < 0.2 * mu_and_rho


# --- what is loaded into ---------------------------------------------------------------------------------------------


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))


def test_a_network_of_another_memory_format_receives_its_means(tmp_path: Path) -> None:
    model = Bayesian(_convolutions().to(memory_format=torch.channels_last), Gaussian(1.0))
    save(model, tmp_path / "model")
    for net in (_convolutions(), _convolutions().to(memory_format=torch.channels_last)):
        strides = [parameter.stride() for parameter in net.parameters()]
        assert bits_of(load(tmp_path / "model", net)) == bits_of(model)
        assert [parameter.stride() for parameter in net.parameters()] == strides


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_torch_knows_that_the_means_have_changed(layout: torch.memory_format, tmp_path: Path) -> None:
    save(Bayesian(_convolutions(), Gaussian(1.0)), tmp_path / "model")
    net = _convolutions().to(memory_format=layout)
    loss = net(torch.randn(1, 2, 5, 5)).sum()
    load(tmp_path / "model", net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_is_loaded_in_inference_mode(tmp_path: Path) -> None:
    model = Bayesian(normalised(), Gaussian(1.0))
    save(model, tmp_path / "model")
    with torch.inference_mode():
        assert bits_of(load(tmp_path / "model", normalised())) == bits_of(model)


# --- a file that is written to while it is read ----------------------------------------------------------------------

Write = Callable[[Path], Any]


def _overwrite(path: Path) -> None:
    """In place, after the clock of the file system has moved on."""
    before = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    os.utime(path, ns=(before, before + 10**9))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [_overwrite, _cut])
def test_a_file_that_changes_after_it_was_checked_is_refused_and_changes_nothing(
    change: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, check = tmp_path / "model", OpenFile.check_finite

    def checked(file: OpenFile, *arguments: Any) -> None:
        check(file, *arguments)
        change(path)

    good_file(path)
    torch.manual_seed(99)
    net = normalised()
    before = bits_of(net)
    monkeypatch.setattr(OpenFile, "check_finite", checked)
    with pytest.raises(ValueError, match=r"'path' parameter of load must be .* another program wrote to it while"):
        load(path, net)
    assert bits_of(net) == before


def test_a_file_that_is_replaced_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a save does it: the old file stays for those who have opened it."""
    path, check = tmp_path / "model", OpenFile.check_finite
    old, new = (Bayesian(normalised(), Gaussian(1.0)) for _ in range(2))

    def checked(file: OpenFile, *arguments: Any) -> None:
        check(file, *arguments)
        save(new, path)

    save(old, path)
    with monkeypatch.context() as patch:
        patch.setattr(OpenFile, "check_finite", checked)
        assert bits_of(load(path, normalised())) == bits_of(old)
    assert bits_of(load(path, normalised())) == bits_of(new)


# --- other threads ---------------------------------------------------------------------------------------------------


def test_other_threads_wait_while_the_model_is_read_and_not_until_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, free = Bayesian(normalised(), Gaussian(1.0)), {}

    def ask(when: str) -> None:
        def work() -> None:
            guard = lock(model.net)
            if taken := guard.acquire(blocking=False):
                guard.release()
            free[when] = taken

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    fsync, copied = os.fsync, torch.Tensor.contiguous
    monkeypatch.setattr(os, "fsync", lambda number: (ask("sync"), fsync(number)))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda tensor: (ask("read"), copied(tensor))[1])
    save(model, tmp_path / "model")
    assert free == {"read": False, "sync": True}


def test_a_network_that_is_not_finite_leaves_no_file(tmp_path: Path) -> None:
    model = Bayesian(normalised(), Gaussian(1.0))
    with torch.no_grad():
        model.net[3].bias.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"'net.3.bias' parameter of save must be finite"):
        save(model, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_what_fails_before_the_tensors_are_given_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), writing(tmp_path / "file", "model", {}):
        raise KeyError("mine")
    assert os.listdir(tmp_path) == []
