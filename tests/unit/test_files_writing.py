"""Writes are atomic: a file is whole or as it was, whatever fails, and whoever writes at the same time."""

import errno
import os
import re
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bayesbackprop import _files
from bayesbackprop._files import (
    write_atomically,
)

pytestmark = pytest.mark.identities


def _no_space(*_: Any) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize("function", ["fsync", "replace", "chmod"])
def test_a_file_is_written_whole_or_not_at_all(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"before")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, _no_space)
        with pytest.raises(OSError, match="no space"):
            write_atomically(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"after")
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [(errno.ENOSPC, OSError, "free some space"), (errno.EACCES, PermissionError, "choose a folder that you may")],
)
@pytest.mark.parametrize("function", ["open", "fsync", "replace"])
def test_a_full_disk_names_the_file_and_what_to_do(
    function: str, number: int, kind: type[OSError], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"before")

    def fails(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fails)
        with pytest.raises(kind, match=re.escape(os.strerror(number))) as refused:
            write_atomically(path, b"after")
    assert refused.value.filename == str(path)
    assert refused.value.errno == number
    assert advice in str(refused.value)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_device_that_is_full_is_named() -> None:
    with pytest.raises(OSError, match=r"No space left on device \(free some space.*/dev/full"):
        write_atomically(Path("/dev/full"), b"content")


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"make its folder first\): '.*/nowhere/file'"):
        write_atomically(tmp_path / "nowhere" / "file", b"content")


def test_the_file_is_on_the_disk_before_it_takes_its_place_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events, fsync, replace = tmp_path / "file", [], os.fsync, os.replace

    def synced(number: int) -> None:
        status = os.fstat(number)
        folder = stat.S_ISDIR(status.st_mode)
        assert not folder or os.path.samestat(status, tmp_path.stat())
        events.append(("fsync", "folder" if folder else status.st_size, path.exists()))
        fsync(number)

    def replaced(source: Path, target: Path) -> None:
        events.append(("replace", source.stat().st_size, path.exists()))
        assert source.parent == target.parent
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_atomically(path, b"12345")
    assert events == [("fsync", 5, False), ("replace", 5, False), ("fsync", "folder", True)]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_a_folder_that_cannot_be_synced_is_written_to(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_for_folders(monkeypatch, number)
    write_atomically(tmp_path / "file", b"12345")
    assert (tmp_path / "file").read_bytes() == b"12345"


def test_a_disk_that_fails_to_sync_a_folder_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_for_folders(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="the folder"):
        write_atomically(tmp_path / "file", b"12345")
    assert os.listdir(tmp_path) == ["file"]


def _fail_for_folders(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "the folder")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)


def test_threads_that_write_the_same_path_do_not_tear_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "file", os.fsync
    contents = [bytes([65 + number]) * (number + 1) * 1000 for number in range(4)]
    together = threading.Barrier(len(contents), timeout=60)
    seen: list[bytes] = []
    errors: list[BaseException] = []

    def synced(number: int) -> None:
        if stat.S_ISREG(os.fstat(number).st_mode):
            together.wait()  # all have written, and none has put its file in place
        fsync(number)

    def work(content: bytes) -> None:
        try:
            write_atomically(path, content)
            seen.append(path.read_bytes())
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(os, "fsync", synced)
    threads = [threading.Thread(target=work, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert set(seen) <= set(contents)
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    folder.mkdir()
    (folder / f".file.{os.getpid()}").symlink_to(victim)  # a name that can be guessed
    write_atomically(folder / "file", b"content")
    assert victim.read_text() == "precious"
    assert not (folder / "file").is_symlink()

    names: list[Path] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (names.append(source), replace(source, target)))
    monkeypatch.setattr(_files.secrets, "token_hex", lambda count: "0" * 2 * count)
    write_atomically(folder / "file", b"content")
    names[0].symlink_to(victim)  # and the name itself
    with pytest.raises(FileExistsError):
        write_atomically(folder / "file", b"other")
    assert victim.read_text() == "precious"
    assert (folder / "file").read_bytes() == b"content"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_new_file_has_the_permissions_that_the_umask_allows(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert oct(stat.S_IMODE((tmp_path / "file").stat().st_mode)) == oct(0o666 & ~umask)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444])
def test_a_file_that_exists_keeps_its_permissions(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, chmod, before = tmp_path / "file", os.chmod, []
    path.touch()
    path.chmod(mode)

    def changed(name: Path, mode: int) -> None:
        before.append(oct(stat.S_IMODE(name.stat().st_mode)))
        chmod(name, mode)

    monkeypatch.setattr(os, "chmod", changed)
    write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(mode)
    assert before == [oct(0o600)]  # never open to more than it was


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link", tmp_path / "folder" / "file"
    link.symlink_to(target)
    for content in (b"new", b"old"):
        write_atomically(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content
    assert os.listdir(tmp_path / "folder") == ["file"]


def test_a_device_is_written_to() -> None:
    write_atomically(Path(os.devnull), b"content")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("name", ["n" * 255, "ñ" * 127, "名" * 85], ids=["ascii", "two bytes", "three bytes"])
def test_names_may_be_as_long_as_names_can_be(name: str, tmp_path: Path) -> None:
    write_atomically(tmp_path / name, b"content")
    assert os.listdir(tmp_path) == [name]


# --- what processes that were killed leave ---------------------------------------------------------------------------

KILLED = """
import os, pathlib, signal, sys
from bayesbackprop._files import write_atomically
os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)
write_atomically(pathlib.Path(sys.argv[1]), b"half of it")
"""


def _age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"before")
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert path.read_bytes() == b"before"
    (left,) = (each for each in tmp_path.iterdir() if each != path)
    assert left.read_bytes() == b"half of it"

    write_atomically(path, b"after")
    assert left.exists()  # it might still be being written
    _age(left, 25 * 3600)
    write_atomically(tmp_path / "another", b"after")
    assert left.exists()
    write_atomically(path, b"at last")
    assert sorted(os.listdir(tmp_path)) == ["another", "file"]


def test_nothing_else_is_cleaned(tmp_path: Path) -> None:
    end = ".bayesbackprop-unfinished"
    others = [
        ".file.swp",
        ".file.0123456789abcdef",
        f"file.0123456789abcdef{end}",
        f".file.0123456789abcdeg{end}",
        f".file.0123456789abcdef{end}.txt",
        f".filed.0123456789abcdef{end}",
        f".file.more.0123456789abcdef{end}",
        f".file.0123456789abcdef{end}".replace(".file", "xfile"),
    ]
    for name in others:
        (tmp_path / name).touch()
        _age(tmp_path / name, 1e7)
    (tmp_path / f".file.{'0' * 16}{end}").mkdir()  # a folder of that name is nobody's leftover
    _age(tmp_path / f".file.{'0' * 16}{end}", 1e7)
    write_atomically(tmp_path / "file", b"content")
    assert set(os.listdir(tmp_path)) == {*others, "file", f".file.{'0' * 16}{end}"}
