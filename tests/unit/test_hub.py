"""Folders and repositories of models: what is put there is what is loaded; the hub itself is a stub."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from torch import nn

import bayesbackprop as bbb

pytestmark = pytest.mark.identities


def make_net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 2))
    net[0].requires_grad_(False)
    return net


def make_model() -> bbb.Bayesian:
    return bbb.Bayesian(make_net(), bbb.Categorical(), sigma=0.2, seed=5)


def same(one: bbb.Bayesian, two: bbb.Bayesian) -> bool:
    x = torch.randn(4, 3)
    return torch.equal(one.predict(x, draws=5).probs, two.predict(x, draws=5).probs)


class Hub:
    """What huggingface_hub does, in a folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, list[Any]()

    def __call__(self, token: str | None = None) -> "Hub":
        self.calls.append(("token", token))
        return self

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create", name, private))
        (self.root / name).mkdir(parents=True, exist_ok=exist_ok)

    def file_exists(self, name: str, file: str) -> bool:
        return (self.root / name / file).exists()

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> SimpleNamespace:
        self.calls.append(("upload", sorted(path.name for path in folder_path.iterdir()), commit_message))
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    def download(self, name: str, file: str, *, revision: str | None, token: str | None) -> str:
        self.calls.append(("download", name, file, revision, token))
        return str(self.root / name / file)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    return hub


def test_the_stub_takes_what_the_hub_takes() -> None:
    """Without a network nothing is put anywhere: but each call has arguments that the real functions have."""
    from inspect import signature

    api = huggingface_hub.HfApi
    signature(api).bind(token=None)
    signature(api.create_repo).bind(None, "a/b", private=True, exist_ok=True)
    signature(api.file_exists).bind(None, "a/b", "README.md")
    signature(api.upload_folder).bind(None, repo_id="a/b", folder_path=Path("x"), commit_message="")
    signature(huggingface_hub.hf_hub_download).bind("a/b", "file", revision=None, token=None)
    assert "commit_url" in huggingface_hub.CommitInfo.__dataclass_fields__


@pytest.mark.supports("Files and formats", "save_pretrained, from_pretrained", "a folder")
def test_a_folder_gives_back_what_was_written(tmp_path: Path) -> None:
    model = make_model()
    bbb.save_pretrained(model, tmp_path / "new" / "folder")
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "README.md",
        "posterior.safetensors",
    ]
    page = (tmp_path / "new" / "folder" / "README.md").read_text()
    assert page.startswith("---\nlibrary_name: bayesbackprop\n")
    assert "102 weights" in page
    assert "2.weight" in page
    assert same(bbb.from_pretrained(tmp_path / "new" / "folder", make_net()), model)


def test_files_of_others_stay(tmp_path: Path) -> None:
    for name in ("README.md", "adapter_config.json"):
        (tmp_path / name).write_text("mine")
    bbb.save_pretrained(make_model(), tmp_path)
    assert {(tmp_path / name).read_text() for name in ("README.md", "adapter_config.json")} == {"mine"}


def test_without_what_is_frozen_the_network_must_have_it(tmp_path: Path) -> None:
    model = make_model()
    bbb.save_pretrained(model, tmp_path / "whole")
    bbb.save_pretrained(model, tmp_path / "part", frozen=False)
    size = {name: (tmp_path / name / "posterior.safetensors").stat().st_size for name in ("whole", "part")}
    assert size["whole"] - size["part"] > 4 * 150  # the weights of the first layer, beside a longer header
    other, net = make_net(), make_net()
    net[0].load_state_dict(model.net[0].state_dict())
    assert same(bbb.from_pretrained(tmp_path / "part", net), model)
    again = bbb.from_pretrained(tmp_path / "part", other)
    assert not same(again, model)
    assert torch.equal(again.posterior["2.weight"].rho, model.posterior["2.weight"].rho)
    wider = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 2))
    with pytest.raises(ValueError, match=r"without 'net\.0\.weight' of shape \[50, 3\]"):
        bbb.from_pretrained(tmp_path / "part", wider)


def test_what_was_left_out_is_not_taken_from_the_meta_device(tmp_path: Path) -> None:
    bbb.save_pretrained(make_model(), tmp_path, frozen=False)
    with torch.device("meta"):
        empty = make_net()
    with pytest.raises(ValueError, match="it on the meta device"):
        bbb.from_pretrained(tmp_path, empty)


@pytest.mark.supports("Files and formats", "push_to_hub, from_pretrained", "with a stub in place of the hub")
def test_the_hub_gives_back_what_was_put_there(hub: Hub) -> None:
    model = make_model()
    assert bbb.push_to_hub(model, "me/it", private=True, token="t", message="one") == "https://hub/me/it/commit/1"
    assert hub.calls == [
        ("token", "t"),
        ("create", "me/it", True),
        ("upload", ["README.md", "posterior.safetensors"], "one"),
    ]
    assert 'from_pretrained("me/it", net)' in (hub.root / "me" / "it" / "README.md").read_text()
    assert same(bbb.from_pretrained("me/it", make_net(), revision="v1", token="t"), model)
    assert hub.calls[-1] == ("download", "me/it", "posterior.safetensors", "v1", "t")
    bbb.push_to_hub(model, "me/it")
    assert hub.calls[-1] == ("upload", ["posterior.safetensors"], "Upload a posterior")  # the page is kept


def test_bad_calls_are_refused(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a folder"):
        bbb.save_pretrained(make_model(), tmp_path / "file")
    for call in (bbb.save_pretrained, bbb.push_to_hub):
        with pytest.raises(ValueError, match="must be a Bayesian"):
            call(make_net(), "a/b")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'frozen' parameter"):
            call(make_model(), "a/b", frozen=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'net' parameter of from_pretrained must be"):
        bbb.from_pretrained("a/b", None)  # type: ignore[arg-type]
    assert not hub.calls


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'from_pretrained needs huggingface_hub: pip install "bayesbackprop\[hub\]"'):
        bbb.from_pretrained("me/it", make_net())


@pytest.mark.parametrize("source", ["./nothing", "/nothing/here", "a/b/c", "a b"])
def test_a_folder_that_is_missing_is_no_repository(source: str, hub: Hub) -> None:
    with pytest.raises(ValueError, match="'source' parameter of from_pretrained must be a folder that is there"):
        bbb.from_pretrained(source, make_net())
    assert not hub.calls


def test_a_hub_that_does_not_answer_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class UnreachableError(Exception):
        """As those of the client that the hub's library uses."""

    def fail(*_: Any, **__: Any) -> None:
        raise UnreachableError("[Errno -2] Name or service not known")

    monkeypatch.setattr(hub, "create_repo", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    for call in (lambda: bbb.push_to_hub(make_model(), "me/it"), lambda: bbb.from_pretrained("me/it", make_net())):
        with pytest.raises(ConnectionError, match=r"hub of Hugging Face could not be reached: .*Name or service"):
            call()
