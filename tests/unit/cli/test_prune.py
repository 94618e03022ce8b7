"""``bbb prune`` writes the networks that it is asked for."""

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bayesbackprop as bbb
from bayesbackprop import Bayesian, Categorical, Gaussian, load, load_sparse, prune, save
from bayesbackprop._cli import app
from bayesbackprop._networks import mlp
from bayesbackprop.pruning import weights_left

pytestmark = pytest.mark.identities


def test_prune_writes_both_networks(tmp_path: Path) -> None:
    model = Bayesian(mlp((200, 300, 10)), Categorical(), sigma=0.02, seed=1)
    save(model, tmp_path / "model.safetensors")
    command = ["prune", str(tmp_path / "model.safetensors"), "--fraction", ".95", "--time", "2"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert f"{weights_left(prune(model, 0.95)):,} of" in result.stdout
    pruned = load(tmp_path / "model-95.safetensors", mlp((200, 300, 10)))
    small = load_sparse(tmp_path / "model-95-sparse.safetensors")
    x = torch.rand(3, 200)
    assert torch.allclose(small(x), pruned.net(x), atol=1e-6)
    torch.testing.assert_close(pruned.state_dict(), prune(model, 0.95).state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="a plain network, which has no sigma"):
        CliRunner().invoke(app, ["prune", str(tmp_path / "model-95-sparse.safetensors")], catch_exceptions=False)


def test_prune_says_the_whole_names_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    save(Bayesian(mlp((5, 7, 3)), Gaussian(0.5)), folder / "model.safetensors")
    said = CliRunner().invoke(app, ["prune", str(folder / "model.safetensors")], catch_exceptions=False).stdout
    for name in ("model-95.safetensors", "model-95-sparse.safetensors"):
        assert f"{folder / name}, " in said


def test_prune_writes_only_what_is_asked_for(tmp_path: Path) -> None:
    save(Bayesian(mlp((5, 7, 3)), Gaussian(0.5)), tmp_path / "model")
    CliRunner().invoke(
        app, ["prune", str(tmp_path / "model"), "--sparse", str(tmp_path / "small")], catch_exceptions=False
    )
    assert sorted(os.listdir(tmp_path)) == ["model", "small"]


def test_prune_says_it_to_programs(tmp_path: Path) -> None:
    model = Bayesian(mlp([4, 8, 3]), Categorical())
    save(model, tmp_path / "model.safetensors")
    command = ["prune", str(tmp_path / "model.safetensors"), "--fraction", "0.5", "--time", "2", "--json"]
    found = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).output)
    assert (found["weights"], found["weights_left"]) == (67, 33)
    for kind in ("bayesian", "sparse"):
        assert Path(found[f"{kind}_file"]).stat().st_size == found[f"{kind}_bytes"]
    assert found["dense_us"] > 0
    assert found["sparse_us"] > 0


def test_prune_writes_onnx_in_32_and_8_bits(tmp_path: Path) -> None:
    save(Bayesian(mlp([100, 60, 50, 3]), Categorical(), seed=1), tmp_path / "model.safetensors")
    files = ["--onnx", str(tmp_path / "a.onnx"), "--int8", str(tmp_path / "b.onnx")]
    command = ["prune", str(tmp_path / "model.safetensors"), "--fraction", ".5", *files, "--time", "2"]
    found = json.loads(CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False).stdout)
    assert sorted(os.listdir(tmp_path)) == ["a.onnx", "b.onnx", "model.safetensors"]
    assert found["int8_bytes"] < 0.5 * found["onnx_bytes"]
    assert found["onnx_difference"] < 1e-5 < found["int8_difference"] < 0.1
    assert min(found[f"{name}_us"] for name in ("dense", "sparse", "onnx", "int8")) > 0
    output = CliRunner().invoke(app, command, catch_exceptions=False).output
    assert "ONNX, 8 bits" in output
    assert "one input, int8" in output


@pytest.mark.parametrize("option", ["--out", "--sparse"])
def test_prune_does_not_write_over_what_it_reads(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save(Bayesian(mlp([4, 8, 3]), Categorical()), path)
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    both = ["--out", "new", "--sparse", "new"]
    for command, says in (
        ([option, path.name], "another file than the checkpoint"),
        (both, "another file than --out"),
        (["--time", "1"], "at least 2"),
    ):
        with pytest.raises(ValueError, match=says):
            CliRunner().invoke(app, ["prune", str(path), *command], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_prune_names_itself_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    bbb.save(bbb.Bayesian(torch.nn.Conv2d(1, 1, 1), bbb.Gaussian(1.0)), path)
    with pytest.raises(ValueError, match="The 'path' parameter of bbb prune must be a checkpoint of a fully connected"):
        CliRunner().invoke(app, ["prune", str(path)], catch_exceptions=False)
