"""``bbb show`` shows what is in every kind of file, and runs nothing of it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from typer.testing import CliRunner

import bayesbackprop as bbb
from bayesbackprop import bandits
from bayesbackprop._cli import app
from bayesbackprop._files import write_checkpoint
from bayesbackprop.sklearn import BayesianMLPRegressor

pytestmark = pytest.mark.identities


def show(path: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["show", str(path), *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def described(path: Path) -> dict[str, Any]:
    found = json.loads(show(path, "--json"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (found["file"], found["bytes"]) == (str(path), path.stat().st_size)
    return dict(found)


def model() -> bbb.Bayesian:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    own = bbb.LogDensity(lambda w: -w.square())
    estimator: Any = {"0.*": "local", "*": "shared"}
    return bbb.Bayesian(net, bbb.Categorical(), {"0.*": bbb.Normal(0.5), "*": own}, sigma=0.25, estimator=estimator)


def write_agent(path: Path) -> None:
    bandits.LinearThompson(3, 2).save(path)


def write_estimator(path: Path) -> None:
    BayesianMLPRegressor(max_iter=1).fit([[0.0], [1.0]], [0.0, 1.0]).save(path)


def write_sparse(path: Path) -> None:
    bbb.save_sparse(bbb.sparse(nn.Linear(4, 2)), path)


def write_state(path: Path) -> None:
    write_checkpoint(path, {"objective.step": torch.zeros(())}, {"epoch": 3})


WRITERS: dict[str, Callable[[Path], None]] = {
    "model": lambda path: bbb.save(model(), path),
    "sparse network": write_sparse,
    "checkpoint": write_state,
    "agent": write_agent,
    "estimator": write_estimator,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file_is_shown(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    WRITERS[kind](path)
    assert described(path)["kind"] == kind
    assert f"{path}: {kind}, " in show(path)


def test_a_bayesian_network_is_a_table_of_its_parameters(tmp_path: Path) -> None:
    path, made = tmp_path / "model.safetensors", model()
    bbb.save(made, path)
    found = described(path)
    assert found["version"] == bbb.__version__
    assert found["likelihood"] == {"kind": "Categorical"}
    assert found["seed"] == made.seed
    rows = {row["name"]: row for row in found["parameters"]}
    assert list(rows)[:4] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert rows["0.weight"]["prior"] == {"kind": "Normal", "sigma": 0.5}
    assert (rows["0.weight"]["shape"], rows["0.weight"]["numbers"]) == ([8, 4], 32)
    assert rows["3.bias"]["prior"]["kind"] == "own"
    for name, q in made.posterior.items():
        assert rows[name]["median_sigma"] == pytest.approx(0.25)
        assert rows[name]["median_snr"] == pytest.approx(q.snr.median().item())
        assert rows[name]["estimator"] == ("local" if name.startswith("0.") else "shared")
    assert "prior" not in rows["1.weight"]
    lines = show(path).splitlines()
    (line,) = [line for line in lines if line.strip().startswith("0.weight")]
    assert re.split(r"\s{2,}", line.strip())[:5] == [*("0.weight", "8x4", "32", "Normal(sigma=0.5)", "Diagonal()")]
    assert " local " in line
    (line,) = [line for line in lines if line.strip().startswith("1.weight")]
    assert re.split(r"\s{2,}", line.strip()) == ["1.weight", "8", "8", "deterministic", "-", "-", "-", "-"]
    assert "likelihood Categorical(); 67 of 100 numbers are Bayesian weights" in lines[-1]


def test_the_table_is_that_of_the_report(tmp_path: Path) -> None:
    path, made = tmp_path / "model.safetensors", model()
    bbb.save(made, path)
    reported = {row.split()[0]: row.split() for row in made.report().splitlines()[1:-1]}
    for row in described(path)["parameters"]:
        if "prior" in row:
            assert f"{row['median_sigma']:.3g}" in reported[row["name"]]
            assert f"{row['median_snr']:.3g}" in reported[row["name"]]


def test_each_parameter_is_shown_with_its_family(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    family = {"2.*": bbb.LowRank(2), "*": bbb.Diagonal()}
    bbb.save(bbb.Bayesian(net, bbb.Gaussian(1.0), family=family), tmp_path / "model")
    rows = {row["name"]: row["family"] for row in described(tmp_path / "model")["parameters"]}
    assert rows["0.weight"] == {"kind": "Diagonal"}
    assert rows["2.bias"] == {"kind": "LowRank", "rank": 2}
    lines = [line.split() for line in show(tmp_path / "model").splitlines() if line.split()]
    shown = {cells[0]: cells for cells in lines}
    assert "Diagonal()" in shown["0.weight"]
    assert "LowRank(rank=2)" in shown["2.weight"]


def test_constants_are_shown_without_infinities(tmp_path: Path) -> None:
    net = nn.Embedding(2, 3, padding_idx=0)
    nn.init.ones_(net.weight)
    made = bbb.Bayesian(net, bbb.Categorical())
    nn.init.constant_(made.rho.get_parameter("weight"), -1e30)
    bbb.save(made, tmp_path / "model.safetensors")
    (row,) = described(tmp_path / "model.safetensors")["parameters"]
    assert (row["median_sigma"], row["median_snr"]) == (0.0, None)


def test_a_pruned_network_and_its_noise(tmp_path: Path) -> None:
    pruned = bbb.prune(bbb.Bayesian(nn.Linear(40, 2), bbb.Gaussian(noise=0.5)), 0.75)
    bbb.save(pruned, tmp_path / "model.safetensors")
    found = described(tmp_path / "model.safetensors")
    assert found["likelihood"] == {"kind": "Gaussian", "noise": 0.5}
    assert found["parameters"][0]["median_snr"] == 0
    assert "likelihood Gaussian(noise=0.5)" in show(tmp_path / "model.safetensors")


def test_likelihoods_are_shown_as_they_are_called(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

    heads = {
        "price": bbb.StudentT(0.25, 3),
        "kind": bbb.Categorical(weight=[1, 1 / 3]),
        "both": bbb.Joint([bbb.Poisson()]),
    }
    bbb.save(bbb.Bayesian(Two(), bbb.Joint(heads)), tmp_path / "model")
    price, kind = "price: StudentT(scale=0.25, df=3)", "kind: Categorical(weight=[1, 0.3333])"
    shown = f"likelihood Joint(heads={{{price}, {kind}, both: Joint(heads=[Poisson()])}})"
    assert shown in " ".join(show(tmp_path / "model").split())


def test_names_in_a_file_are_text(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_checkpoint(path, {}, {"[red]name[/red]": "[/]value"})
    assert "[red]name[/red]" in show(path)
    assert "[/]value" in show(path)


@pytest.mark.parametrize(
    "metadata",
    [
        {"bayesbackprop": "not JSON"},
        {"bayesbackprop": "[1]"},
        {"bayesbackprop": "{}"},
        {
            "bayesbackprop": json.dumps(
                {"format": 1, "version": "0", "seed": 0, "likelihood": 3, "parameters": {"a": {}}}
            )
        },
        {"bayesbackprop": json.dumps({"format": 1, "version": "0", "seed": 0, "likelihood": 3, "parameters": {}})},
        {"of": "another program"},
        {},
    ],
)
def test_what_is_no_file_of_the_library_is_said(metadata: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(safetensors.torch.save({"net.a": torch.zeros(2)}, metadata=metadata))
    with pytest.raises(ValueError, match="parameter of bbb show must be a file of bayesbackprop"):
        show(path)


def test_what_is_no_file_at_all_is_said(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    for path in (tmp_path, tmp_path / "text"):
        with pytest.raises(ValueError, match="parameter of bbb show"):
            show(path)
    with pytest.raises(FileNotFoundError):
        show(tmp_path / "nowhere")
