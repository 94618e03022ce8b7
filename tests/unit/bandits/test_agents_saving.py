"""A loaded agent goes on bit for bit, and no other file is taken for one."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from bandit_worlds import KINDS, LEARNING, assert_same, live, neighbours, snapshot
from bayesbackprop import Bayesian, Gaussian, Normal, save
from bayesbackprop._files import write_checkpoint
from bayesbackprop._networks import mlp
from bayesbackprop.bandits import load

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_agent_goes_on_bit_for_bit(kind: str, replicas: int, tmp_path: Path) -> None:
    agent, unsaved = (KINDS[kind](replicas=replicas, seed=4) for _ in range(2))
    for start in (0, 3, 11):  # new, with memory to spare, and with the oldest forgotten
        for each in (agent, unsaved):
            each.act_all(neighbours(each, start)[0])  # and never hears of it
        agent.save(tmp_path / "agent")
        copy = load(str(tmp_path / "agent"))
        assert type(copy) is type(agent)
        assert copy.described() == agent.described()
        assert_same(snapshot(copy), snapshot(agent))
        steps = range(start, start + 8)
        assert live(copy, steps) == live(agent, steps) == live(unsaved, steps)
        assert_same(snapshot(copy), snapshot(agent))
        assert_same(snapshot(agent), snapshot(unsaved))


class Own(Normal):
    pass


def test_a_prior_of_the_users_own_is_asked_for(tmp_path: Path) -> None:
    agent = KINDS["thompson, input"](prior=Own(0.3))
    agent.save(tmp_path / "agent")
    with pytest.raises(ValueError, match=r"'prior' parameter of bandits.load must be given"):
        load(tmp_path / "agent")
    copy = load(tmp_path / "agent", prior=Own(0.3))
    assert live(copy, range(5)) == live(agent, range(5))
    assert_same(snapshot(copy), snapshot(agent))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_loading_runs_no_code_and_refuses_other_files(tmp_path: Path) -> None:
    torch.save({"agent": Evil(tmp_path / "ran")}, tmp_path / "torch")
    (tmp_path / "pickle").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    (tmp_path / "text").write_text('{"agent": "Uniform"}')
    (tmp_path / "empty").touch()
    safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / "tensors")
    save(Bayesian(mlp((2, 1)), Gaussian(1.0)), tmp_path / "model")
    write_checkpoint(tmp_path / "checkpoint", {"w": torch.zeros(1)}, {"step": 3})
    write_checkpoint(tmp_path / "stranger", {}, {"agent": "Popen", "arguments": {"args": ["ls"]}})
    KINDS["linear"]().save(tmp_path / "agent")
    (tmp_path / "half").write_bytes((tmp_path / "agent").read_bytes()[:-8])
    for path in sorted(tmp_path.iterdir()):
        if path.name != "agent":
            with pytest.raises(ValueError, match="'path' parameter of"):
                load(path)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", LEARNING)
def test_tensors_of_another_agent_are_refused(kind: str) -> None:
    agent, larger = KINDS[kind](), KINDS[kind](replicas=2)
    before = snapshot(agent)
    for tensors in (larger.tensors(), {}, {**agent.tensors(), "more": torch.zeros(1)}):
        with pytest.raises(
            ValueError, match=r"'tensors' parameter of .* must be of the names, shapes and types that it has"
        ):
            agent.restore(tensors, 1, 1)
        assert_same(snapshot(agent), before)
