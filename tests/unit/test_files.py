"""The library's files: one format, and one error for whatever cannot be read."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import safetensors.torch
import torch

from bayesbackprop import _files
from bayesbackprop._files import (
    FORMAT,
    Kind,
    kind_of,
    read,
    read_checkpoint,
    reading,
    write,
    write_checkpoint,
)
from bayesbackprop._version import __version__
from rewriting import KEY, header_of, rewrite, sealed

pytestmark = pytest.mark.identities

KINDS: tuple[Kind, ...] = get_args(Kind)


# --- the format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_and_contents_come_back(kind: Kind, tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4).T,
        "b": torch.tensor(7),
        "c.d": torch.randn(2, dtype=torch.float64, requires_grad=True),
        "none": torch.zeros(0, 3),
    }
    contents = {"numbers": [0.1, 1e-300], "text": "é", "nested": {"none": None}, "format": 9, "kind": "own", "agent": 1}
    write(tmp_path / "file", kind, tensors, contents)
    file = read(str(tmp_path / "file"), kind, "load")
    assert file.contents == contents
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert file.tensors[name].dtype == tensor.dtype
        assert torch.equal(file.tensors[name], tensor)
    assert kind_of(tmp_path / "file", "load") == kind
    header = {"format": FORMAT, "kind": kind, "version": __version__, "contents": contents}
    found = header_of(tmp_path / "file")
    assert len(found.pop("checksum")) == 64
    assert found == header


def test_a_checkpoint_is_one_of_the_kinds(tmp_path: Path) -> None:
    tensors, metadata = {"a": torch.randn(3, 4)}, {"step": 3}
    write_checkpoint(tmp_path / "file", tensors, metadata)
    found, about = read_checkpoint(tmp_path / "file")
    assert about == metadata
    assert found.keys() == tensors.keys()
    assert torch.equal(found["a"], tensors["a"])
    assert kind_of(tmp_path / "file", "load") == "checkpoint"
    with pytest.raises(FileNotFoundError, match="nothing"):
        read_checkpoint(tmp_path / "nothing")


def test_the_kind_is_found_without_reading_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unread:
        def __init__(self, metadata: dict[str, str]) -> None:
            self.metadata = lambda: metadata

    @contextmanager
    def opened(path: Path, framework: str) -> Iterator[Unread]:
        with original(path, framework=framework) as file:
            yield Unread(file.metadata())

    write(tmp_path / "file", "agent", {"a": torch.zeros(3)}, {})
    original = _files.safetensors.safe_open
    monkeypatch.setattr(_files.safetensors, "safe_open", opened)
    assert kind_of(tmp_path / "file", "load") == "agent"


# --- in pieces -------------------------------------------------------------------------------------------------------

TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64),
]
NAMES = ["b", "a", "é", "名", 'quoted "\\', "\n\x01\x7f"]


def _some_tensors() -> dict[str, torch.Tensor]:
    shapes = [(), (0,), (3,), (5, 7), (2, 0, 3), (4, 1, 3)]
    return {
        f"{name}{number}": torch.randn(shapes[(number + place) % len(shapes)]).to(dtype)
        for number, dtype in enumerate(TYPES)
        for place, name in enumerate(NAMES)
    }


@pytest.mark.parametrize("size", [16, 48, 2**20])
@pytest.mark.parametrize("tensors", [_some_tensors, lambda: {"one": torch.randn(7)}, dict], ids=["many", "one", "none"])
def test_a_file_is_what_safetensors_would_write(
    tensors: Callable[[], dict[str, torch.Tensor]], size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, contents = tensors(), {"é": [1.5, "\n"]}
    text = json.dumps({"format": FORMAT, "kind": "agent", "version": __version__, "contents": contents})
    monkeypatch.setattr(_files, "_PIECE", size)
    write(tmp_path / "file", "agent", found, contents)
    metadata = {KEY: sealed(text[:-1], found)}
    assert (tmp_path / "file").read_bytes() == safetensors.torch.save(found, metadata=metadata)
    with reading(tmp_path / "file", "agent", "load") as file:
        assert {name: (each.dtype, each.shape) for name, each in file.tensors.items()} == {
            name: (each.dtype, each.shape) for name, each in found.items()
        }
        assert all(each.is_meta for each in file.tensors.values())
        for name, each in found.items():
            pieces = [bytes(piece) for piece in file.pieces(name)]
            assert b"".join(pieces) == each.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert all(len(piece) <= size for piece in pieces)


def test_a_pipe_receives_the_file_from_its_beginning(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(5), "b": torch.ones(3)}
    write(tmp_path / "file", "agent", tensors, {})
    os.mkfifo(tmp_path / "pipe")
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    thread.start()
    write(tmp_path / "pipe", "agent", tensors, {})
    thread.join()
    assert received == [(tmp_path / "file").read_bytes()]


def test_a_tensor_that_changes_while_it_is_written_leaves_a_file_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it changes before or after a piece is summed, as by a thread that knows of no lock."""
    tensor, sha256 = torch.zeros(100), _files.hashlib.sha256

    class Changing:
        def __init__(self, content: bytes) -> None:
            self.digest = sha256(content)

        def update(self, content: Any) -> None:
            tensor.add_(1)
            self.digest.update(content)
            tensor.add_(1)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    with monkeypatch.context() as patch:
        patch.setattr(_files, "_PIECE", 80)
        patch.setattr(_files.hashlib, "sha256", Changing)
        write(tmp_path / "file", "agent", {"a": tensor}, {})
    assert len(read(tmp_path / "file", "agent", "load").tensors["a"].unique()) == 5  # of 20 numbers each


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_numbers_that_are_not_finite_are_counted_over_all_pieces(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "_PIECE", 64)
    many = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)  # whose sum is infinite
    tensors = {"good": many, "numbers": many.clone(), "whole": torch.ones(9, dtype=torch.int64)}
    for bad in (torch.inf, torch.nan):
        tensors["numbers"][[3, 500, -1]] = torch.tensor(bad, dtype=dtype)
        write(tmp_path / "file", "agent", tensors, {})
        with reading(tmp_path / "file", "agent", "load") as file:
            with pytest.raises(
                ValueError, match=r"'numbers' parameter of load must be finite\. Got NaN or inf in 3 of 1000"
            ):
                file.check_finite("load")
            if bad == torch.inf:
                file.check_finite("load", ["numbers"])
    write(tmp_path / "file", "agent", {"good": many}, {})
    with reading(tmp_path / "file", "agent", "load") as file:
        file.check_finite("load")


def test_a_file_that_is_replaced_while_it_is_opened_is_the_one_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, opened = _files.safetensors.safe_open, []

    def open_other(path: Path, framework: str) -> Any:
        if not opened:
            write(path, "agent", {"new": torch.ones(5)}, {})
        opened.append(path)
        return original(path, framework=framework)

    write(tmp_path / "file", "agent", {"old": torch.zeros(3)}, {})
    monkeypatch.setattr(_files.safetensors, "safe_open", open_other)
    assert read(tmp_path / "file", "agent", "load").tensors.keys() == {"new"}
    assert len(opened) == 2


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "agent", {"a": torch.zeros(10**6)}, {})
    with reading(path, "agent", "load") as file:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ValueError, match=r"'path' parameter of load .* it ends in 'a'"), file.understanding():
            file.check_finite("load")


# --- what cannot be read ---------------------------------------------------------------------------------------------

Reader = Callable[[Path], Any]
READERS: dict[str, tuple[Reader, str]] = {
    "read": (lambda path: read(path, "model", "load"), "a file of bayesbackprop that holds a model"),
    "kind_of": (lambda path: kind_of(path, "load"), "a file of bayesbackprop"),
}


def _rewritten(change: Callable[[dict[str, Any]], Any], text: str | None = None) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda header, _: change(header), text)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


KNOWN = f"bayesbackprop {__version__} reads up to format {FORMAT}"
NEWER = f"which bayesbackprop 9.0 wrote in format {FORMAT + 1} ({KNOWN}) instead."
FOREIGN = "which another program wrote "
WHOLE = "which is not a whole safetensors file ("
DAMAGED = "which is damaged or has metadata that cannot be understood ("
CAUSES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), WHOLE),
    "text": (lambda path: path.write_text("This is no model.\n" * 20), WHOLE),
    "cut": (_cut, WHOLE),
    "another program's": (lambda path: safetensors.torch.save_file({"a": torch.zeros(1)}, path), FOREIGN),
    "another program's, with metadata": (
        lambda path: safetensors.torch.save_file({"a": torch.zeros(1)}, path, metadata={"format": "pt"}),
        FOREIGN,
    ),
    "a newer format": (_rewritten(lambda header: header.update(format=FORMAT + 1, version="9.0")), NEWER),
    "a newer format of another shape": (
        _rewritten(lambda header: (header.clear(), header.update(format=FORMAT + 1, version="9.0"))),
        NEWER,
    ),
    "no JSON": (_rewritten(lambda header: None, "{"), DAMAGED + "JSONDecodeError: "),
    "JSON that never ends": (_rewritten(lambda header: None, "[" * 100_000), DAMAGED + "RecursionError: "),
    "a list": (_rewritten(lambda header: None, "[1]"), DAMAGED + "TypeError: "),
    "no format": (_rewritten(lambda header: header.pop("format")), DAMAGED + "KeyError: 'format')"),
    "a format that is text": (_rewritten(lambda header: header.update(format="2")), DAMAGED + "TypeError: format '2')"),
    "a format that is no number": (_rewritten(lambda header: header.update(format=True)), DAMAGED + "TypeError: "),
    "a format that never was": (_rewritten(lambda header: header.update(format=0)), DAMAGED + "ValueError: format 0)"),
    "no kind": (_rewritten(lambda header: header.pop("kind")), DAMAGED + "KeyError: 'kind')"),
    "an unknown kind": (_rewritten(lambda header: header.update(kind="bomb")), DAMAGED + "ValueError: kind 'bomb' "),
    "a kind that is a list": (_rewritten(lambda header: header.update(kind=["model"])), DAMAGED + "ValueError: "),
    "no contents": (_rewritten(lambda header: header.pop("contents")), DAMAGED + "KeyError: 'contents')"),
    "contents that are a list": (_rewritten(lambda header: header.update(contents=[])), DAMAGED + "ValueError: "),
    "a version that is a number": (_rewritten(lambda header: header.update(version=1)), DAMAGED + "TypeError: "),
    "deeply nested": (
        _rewritten(lambda header: header.update(contents={"a": json.loads("[" * 80 + "]" * 80)})),
        DAMAGED + "ValueError: metadata nested more than 64 deep)",
    ),
    "a long type": (lambda path: _spoil(path, b'"F32"', b'"' + b"F" * 10_000_000 + b'"'), WHOLE),
    "a long version": (_rewritten(lambda header: header.update(format=99, version="9" * 10**6)), "which bayesbackprop"),
}  # fmt: skip


def _spoil(path: Path, old: bytes, new: bytes) -> None:
    """Replace a part of the header of a safetensors file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    assert old in content[8:end]
    header = content[8:end].replace(old, new)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


@pytest.mark.parametrize(("reader", "expected"), READERS.values(), ids=list(READERS))
@pytest.mark.parametrize(("spoil", "reason"), CAUSES.values(), ids=list(CAUSES))
def test_every_cause_has_one_text(
    spoil: Callable[[Path], Any], reason: str, reader: Reader, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    write(path, "model", {"a": torch.zeros(3)}, {"seed": 1})
    spoil(path)
    with pytest.raises(ValueError, match=r" instead\.$") as refused:
        reader(path)
    assert str(refused.value).startswith(f"The 'path' parameter of load must be {expected}. Got {path}, {reason}")
    assert len(str(refused.value)) < 1500


# --- the checksum ----------------------------------------------------------------------------------------------------


def _typed(path: Path) -> None:
    _spoil(path, b'"F32"', b'"I32"')


CHECKED: dict[str, Callable[[Path], Any]] = {
    "a type": _typed,
    "a shape": lambda path: _spoil(path, b"[2,3]", b"[3,2]"),
    "a name": lambda path: _spoil(path, b'"a"', b'"b"'),
    "a number in the contents": lambda path: _spoil(path, b'\\"seed\\": 1', b'\\"seed\\": 2'),
    "the version": lambda path: _spoil(path, __version__.encode(), b"0.0.1"),
    "a format without a checksum": lambda path: _spoil(path, b'\\"format\\": 3', b'\\"format\\": 2'),
    "no checksum": lambda path: _spoil(path, b'\\"checksum\\"', b'\\"checksun\\"'),
    "the checksum": lambda path: rewrite(path, lambda header, _: None, json.dumps(header_of(path))[:-2] + 'f"}'),
}


@pytest.mark.parametrize("spoil", CHECKED.values(), ids=list(CHECKED))
def test_every_change_is_seen(spoil: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "model", {"a": torch.arange(6.0).reshape(2, 3)}, {"seed": 1})
    while header_of(path)["checksum"].endswith("f"):
        write(path, "model", {"a": torch.randn(2, 3)}, {"seed": 1})
    spoil(path)
    with pytest.raises(ValueError, match=r"'path' parameter of load must be .* its checksum is missing, or that of"):
        read(path, "model", "load")


def test_every_bit_counts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "agent", {"a": torch.tensor([1.5, -2.0]), "b": torch.tensor(True)}, {"x": 0.25})
    content, before = path.read_bytes(), read(path, "agent", "load")
    for place in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            try:
                found = read(path, "agent", "load")
            except ValueError as error:
                assert str(error).startswith("The 'path' parameter of load must be a file of bayesbackprop")  # noqa: PT017
            else:  # blanks between the entries of the header
                assert (found.version, found.contents, found.format) == (before.version, before.contents, before.format)
                assert all(torch.equal(found.tensors[name], tensor) for name, tensor in before.tensors.items())


def test_tensors_of_every_type_are_summed(tmp_path: Path) -> None:
    types = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64]
    tensors = {str(dtype): torch.ones(2, 2).to(dtype) for dtype in types} | {"scalar": torch.tensor(1j)}
    write(tmp_path / "file", "agent", tensors, {})
    found = read(tmp_path / "file", "agent", "load").tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_contents_that_could_not_be_read_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'contents' parameter of the file of a model must be .* nested at most 64"):
        write(tmp_path / "file", "model", {}, {"a": json.loads("[" * 80 + "]" * 80)})
    monkeypatch.setattr(_files, "_LONGEST", 1000)
    with pytest.raises(ValueError, match="must be at most 1,000 characters of JSON"):
        write(tmp_path / "file", "model", {}, {"a": "b" * 1000})
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    write(tmp_path / "file", "model", {}, {"a": "b" * 1000})
    monkeypatch.setattr(_files, "_LONGEST", 1000)
    with pytest.raises(ValueError, match=r"'path' parameter of load .* metadata of 1,\d+ characters"):
        read(tmp_path / "file", "model", "load")


def test_a_shape_that_torch_cannot_hold_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "file", "model", {"a": torch.zeros(0, 3)}, {})
    _spoil(tmp_path / "file", b"[0,3]", b"[0,%d]" % 2**63)
    with pytest.raises(ValueError, match=r"'path' parameter of load .* damaged"):
        read(tmp_path / "file", "model", "load")


def test_what_is_neither_file_nor_folder_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # whoever opens it waits for a writer
    with pytest.raises(ValueError, match="'path' parameter of load must be the path of a file"):
        read(tmp_path / "pipe", "model", "load")


@pytest.mark.parametrize("found", KINDS)
@pytest.mark.parametrize("expected", KINDS)
def test_a_file_of_another_kind_is_refused(found: Kind, expected: Kind, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, found, {}, {})
    if found == expected:
        assert read(path, expected, "load").contents == {}
        return
    article = {"agent": "an", "estimator": "an"}
    with pytest.raises(ValueError, match="which holds") as refused:
        read(path, expected, "load")
    holds = [f"{article.get(kind, 'a')} {kind}" for kind in (expected, found)]
    assert str(refused.value) == (
        f"The 'path' parameter of load must be a file of bayesbackprop that holds {holds[0]}. "
        f"Got {path}, which holds {holds[1]} instead."
    )


@pytest.mark.parametrize("reader", [reader for reader, _ in READERS.values()], ids=list(READERS))
def test_what_is_no_file(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        reader(tmp_path / "nowhere")
    for path in (tmp_path, None, 3, b"file"):
        with pytest.raises(ValueError, match="'path' parameter of load must be the path of a file"):
            reader(path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind", [AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError]
)
def test_misunderstandings_become_the_one_error(kind: type[Exception], tmp_path: Path) -> None:
    error = kind("x\nin further lines" if kind is RuntimeError else "x")
    write(tmp_path / "file", "agent", {}, {})
    file = read(tmp_path / "file", "agent", "bandits.load")
    with pytest.raises(ValueError, match=r" instead\.$") as refused, file.understanding():
        raise error
    reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert str(refused.value) == (
        "The 'path' parameter of bandits.load must be a file of bayesbackprop that holds an agent. "
        f"Got {tmp_path / 'file'}, {DAMAGED}{reason}) instead."
    )
    assert refused.value.__cause__ is error


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt("now"), MemoryError("full")])
def test_what_is_not_the_files_fault_is_left_alone(error: BaseException, tmp_path: Path) -> None:
    write(tmp_path / "file", "agent", {}, {})
    file = read(tmp_path / "file", "agent", "load")
    with pytest.raises(type(error), match=str(error)), file.understanding():
        raise error


def test_contents_that_json_cannot_say_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="JSON"):
        write(tmp_path / "file", "model", {}, {"set": {1}})
    assert os.listdir(tmp_path) == []
