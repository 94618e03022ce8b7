"""Files of older formats load, and give what they gave when they were written (tests/files/format*/README.md)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from bayesbackprop import Bayesian, Categorical, FreeEnergy, Gaussian, Normal, load, load_sparse, save, save_sparse
from bayesbackprop._files import Kind, kind_of, read, read_checkpoint, write
from bayesbackprop.bandits import Agent, LinearThompson, simulate
from bayesbackprop.bandits import load as load_agent
from bayesbackprop.callbacks import Averaging, Checkpoint
from bayesbackprop.pruning import weights_left
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesbackprop.training import Batches, fit
from bayesbackprop_paper.environments import Wheel
from rewriting import header_of

pytestmark = [pytest.mark.identities, pytest.mark.parametrize("old", [1, 2])]

FOLDERS = {number: Path(__file__).parents[1] / "files" / f"format{number}" for number in (1, 2)}
EXPECTED: dict[int, dict[str, dict[str, Any]]] = {
    number: json.loads((folder / "expected.json").read_text()) for number, folder in FOLDERS.items()
}
KINDS: dict[str, Kind] = {
    "model-mixture": "model",
    "model-centred": "model",
    "model-pruned": "model",
    "sparse": "sparse network",
    "classifier": "estimator",
    "regressor": "estimator",
    "thompson": "agent",
    "linear": "agent",
    "epsilon-greedy": "agent",
    "uniform": "agent",
    "simulation": "checkpoint",
    "training": "checkpoint",
    "best": "checkpoint",
}
MODELS, AGENTS = ([name for name, kind in KINDS.items() if kind == one] for one in ("model", "agent"))


def _path(old: int, name: str) -> Path:
    return FOLDERS[old] / f"{name}.safetensors"


def _close(found: ArrayLike | Tensor, expected: ArrayLike) -> None:
    """Equal but for the rounding of other processors: single precision has 7 digits."""
    found = found.detach().numpy() if isinstance(found, Tensor) else found
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_every_file_is_expected_and_has_its_kind(old: int) -> None:
    assert {path.stem for path in FOLDERS[old].glob("*.safetensors")} == KINDS.keys() == EXPECTED[old].keys()
    assert {name: kind_of(_path(old, name), "load") for name in KINDS} == KINDS


@pytest.mark.parametrize("name", KINDS)
def test_a_file_keeps_its_contents_in_the_format_of_today(old: int, name: str, tmp_path: Path) -> None:
    before = read(_path(old, name), KINDS[name], "load")
    assert before.format == old
    assert before.contents.keys().isdisjoint({"format", "version"})
    write(tmp_path / "file", KINDS[name], before.tensors, before.contents)
    after = read(tmp_path / "file", KINDS[name], "load")
    assert after.contents == before.contents
    assert after.tensors.keys() == before.tensors.keys()
    assert all(torch.equal(after.tensors[key], value) for key, value in before.tensors.items())
    assert header_of(tmp_path / "file")["format"] == after.format == 3


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_another_kind_is_refused(old: int, name: str) -> None:
    other: Kind = "agent" if KINDS[name] == "checkpoint" else "checkpoint"
    with pytest.raises(ValueError, match=rf"of load must be .* that holds an? {other}\. Got .*, which holds"):
        read(_path(old, name), other, "load")


@pytest.mark.parametrize("name", MODELS)
def test_a_model(old: int, name: str, tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    expected, model = EXPECTED[old][name], load(_path(old, name), network())
    x = torch.tensor(expected["inputs"], dtype=torch.float64)
    save(model, tmp_path / "model")
    for loaded in (model, load(tmp_path / "model", network())):
        assert isinstance(loaded.likelihood, Gaussian)
        assert (loaded.seed, loaded.likelihood.noise) == (expected["seed"], expected["noise"])
        assert weights_left(loaded) == expected.get("weights_left", 26)
        _close(loaded.net(x), expected["means"])
        _close(sum(float(q.sigma.detach().sum()) for q in loaded.posterior.values()), expected["sigmas"])
        _close(loaded.draw(3).complexity(), expected["complexity"])
        prediction = loaded.predict(x, draws=5, estimator="shared")
        _close(prediction.mean, expected["predicted"])
        _close(prediction.stddev, expected["stddev"])  # type: ignore[attr-defined]
    if "learnt_noise" in expected:
        _close(torch.stack([each.detach() for each in model.likelihood.parameters()]), expected["learnt_noise"])


def test_a_sparse_network(old: int, tmp_path: Path) -> None:
    expected, net = EXPECTED[old]["sparse"], load_sparse(_path(old, "sparse"))
    save_sparse(net, tmp_path / "sparse")
    for loaded in (net, load_sparse(tmp_path / "sparse")):
        _close(loaded(torch.tensor(expected["inputs"])), expected["outputs"])


@pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])
def test_an_estimator_in_the_middle_of_a_stream(old: int, kind: type[Any], tmp_path: Path) -> None:
    name = "classifier" if kind is BayesianMLPClassifier else "regressor"
    expected, estimator = EXPECTED[old][name], kind.load(_path(old, name))
    estimator.save(tmp_path / "estimator")
    for loaded in (estimator, kind.load(tmp_path / "estimator")):
        if kind is BayesianMLPClassifier:
            assert loaded.classes_.tolist() == expected["classes"]
            _close(loaded.predict_proba(expected["inputs"]), expected["probabilities"])
        else:
            mean, stddev = loaded.predict(expected["inputs"], return_std=True)
            _close(mean, expected["mean"])
            _close(stddev, expected["stddev"])
        assert (loaded.n_iter_, loaded.n_samples_seen_) == (expected["n_iter"], expected["n_samples_seen"])
        assert loaded.loss_curve_ == expected["loss_curve"]
    moments = read(tmp_path / "estimator", "estimator", "load").tensors
    for key, total in expected["moments"].items():
        _close(sum(float(value.sum()) for name, value in moments.items() if name.startswith(f"adam.{key}.")), total)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent(old: int, name: str, tmp_path: Path) -> None:
    expected, agent = EXPECTED[old][name], load_agent(_path(old, name))
    agent.save(tmp_path / "agent")
    for loaded in (agent, load_agent(tmp_path / "agent")):
        assert type(loaded).__name__ == expected["class"]
        assert (loaded.acted, loaded.observed) == (expected["acted"], expected["observed"])
        sums = {key: float(value.double().sum()) for key, value in loaded.tensors().items()}
        assert sums == pytest.approx(expected["sums"], rel=1e-12)
        assert [_act(loaded, context) for context in expected["contexts"]] == expected["actions"]


def _act(agent: Agent, context: list[float]) -> int | list[int]:
    return agent.act_all([context] * 2) if agent.replicas == 2 else agent.act(context)


def test_a_simulation_goes_on(old: int, tmp_path: Path) -> None:
    expected, path = EXPECTED[old]["simulation"], tmp_path / "run"
    path.write_bytes(_path(old, "simulation").read_bytes())
    steps: list[int] = []
    regret = simulate([Wheel(0.5, 1)], LinearThompson(2, 5, seed=2), 9, path, lambda step, _: steps.append(step))
    assert steps == [expected["done"] + 1, 8, 9]
    _close(regret, expected["regret"])
    assert header_of(path)["kind"] == "checkpoint"


@pytest.mark.parametrize("name", ["training", "best"])
def test_the_checkpoint_of_a_training_run(old: int, name: str) -> None:
    expected = EXPECTED[old][name]
    tensors, contents = read_checkpoint(_path(old, name))
    assert contents == expected["contents"]
    for key, total in expected.get("sums", {}).items():
        assert float(tensors[key].double().sum()) == pytest.approx(total, rel=1e-12)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    objective = FreeEnergy(Bayesian(net, Categorical(), Normal(0.5)), n=20)
    start = "objective."
    objective.load_state_dict({k.removeprefix(start): value for k, value in tensors.items() if k.startswith(start)})
    x = torch.tensor(expected["inputs"])
    _close(net(x), expected["outputs"])
    if "predicted" in expected:
        _close(objective.model.predict(x, draws=5, estimator="shared").mean, expected["predicted"])


def test_a_training_run_goes_on(old: int, tmp_path: Path) -> None:
    """In format 1 it was another loop that wrote checkpoints; tests of the paper's recipe resume those."""
    if old == 1:
        return
    expected, path = EXPECTED[old]["training"], tmp_path / "run"
    path.write_bytes(_path(old, "training").read_bytes())
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    objective = FreeEnergy(Bayesian(net, Categorical(), Normal(0.5)), n=20)
    optimiser = torch.optim.Adam(objective.parameters(), lr=0.01, fused=True)
    history = fit(
        objective,
        Batches(torch.linspace(-1, 1, 60).reshape(20, 3), torch.arange(20) % 2, 5, seed=1),
        epochs=3,
        optimiser=optimiser,
        scheduler=torch.optim.lr_scheduler.StepLR(optimiser, 6),
        callbacks=[Averaging(0.8), Checkpoint(path, about={"name": "run"})],
        seed=4,
    )
    assert [record["epoch"] for record in history] == [1, 2, 3]
    _close(history[-1]["cost"], expected["end"]["cost"])
    _close(net(torch.tensor(expected["inputs"])), expected["end"]["outputs"])
