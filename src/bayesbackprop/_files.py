"""The library's files: one format for all of them, atomic writes, and one error for whatever cannot be read.

A file is a safetensors file. Its metadata has one entry, whose JSON says the number of the format, the kind of the
file, the version of the library that wrote it, the contents (what the writer of that kind needs besides tensors), and a
checksum of all that and of the tensors. Reading a file never runs code.

safetensors itself checks, before anything is allocated, that the header and every tensor lie within the file and that
shapes and types agree with their bytes. What JSON claims is checked here and by the readers of each kind.

Tensors are written and read in pieces, so that a file of any size needs one small buffer. The file is not mapped into
memory: one that somebody cuts short would end the process.
"""

import errno
import hashlib
import io
import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from bayesbackprop._errors import Described, check_finite, invalid, is_finite
from bayesbackprop._version import __version__

StrPath = str | os.PathLike[str]
Kind = Literal["model", "checkpoint", "sparse network", "agent", "estimator"]

# The layout of the files. It rises when an older version of the library could not read them.
FORMAT = 3
# It was the key of models in format 1, so that an older version refuses a newer model by its format.
_KEY = "bayesbackprop"
# What precedes the checksum in the JSON; it is the last entry, from format 3 on.
_CHECKSUM = ', "checksum": '
# What safetensors calls the metadata in its header, whose length is a multiple of so many bytes.
_METADATA, _ALIGNED = "__metadata__", 8

# Bytes that are written or read at a time: they stay in the processor's cache, and are whole numbers of every type.
_PIECE = 2**20
_OF_NUMPY = (torch.float16, torch.float32, torch.float64)

# The longest JSON in characters, its deepest nesting, and the largest counter: above it a float skips integers.
_LONGEST, _DEEPEST, _LARGEST = 2**26, 64, 2**53
# Characters of a file's own words that an error repeats.
_REPEATED = 300

# Format 1 was four layouts, each with a key of its own. Its checkpoints, alone, did not say their format.
_CHECKPOINT_1 = "bayesbackprop.checkpoint"
_KEYS_1: Mapping[str, Kind] = {
    _KEY: "model",
    "bayesbackprop.sparse": "sparse network",
    "bayesbackprop.sklearn": "estimator",
    _CHECKPOINT_1: "checkpoint",
}

# What code that interprets a damaged file raises: a missing name, a wrong type, a number out of range, and what torch
# says of tensors that do not fit.
MISUNDERSTANDINGS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# The end of the name of a file that is being written. It is long so that nobody else's file has it: see _clean.
_UNFINISHED = ".bayesbackprop-unfinished"
# Characters of the final name in that of the unfinished file: names have at most 255 bytes, and a character up to 4.
_NAME = 40
# What to do where a file cannot be written.
_ADVICE = {
    errno.ENOSPC: " (free some space, or choose another disk)",
    errno.EDQUOT: " (free some space, or choose another disk)",
    errno.EACCES: " (choose a folder that you may write to)",
    errno.EPERM: " (choose a folder that you may write to)",
    errno.EROFS: " (choose a folder that you may write to)",
    errno.ENOENT: " (make its folder first)",
}
# Seconds, a day: a file that has been unfinished for longer was left by a process that was killed.
_ABANDONED = 24 * 60 * 60.0


# --- the format ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """What a file holds.

    Attributes:
        format: The number of its format.
        kind: What it is a file of.
        version: The library that wrote it; None where a checkpoint of format 1 does not say.
        tensors: The tensors by name.
        contents: What the writer said in JSON.
        understanding: ``with file.understanding():`` turns what goes wrong while the file is interpreted into the error
            for a file that cannot be read; with an argument, this is what the error says of the file.
    """

    format: int
    kind: Kind
    version: str | None
    tensors: dict[str, Tensor]
    contents: dict[str, Any]
    understanding: Callable[..., AbstractContextManager[None]]


@dataclass(frozen=True)
class OpenFile(File):
    """A file whose tensors are still on the disk: in ``tensors`` they have shapes and types, and no values.

    Attributes:
        stream: The file.
        places: The first byte of each tensor.
        written: How long the file was when it was opened, and when it had last been written to, in nanoseconds.
    """

    stream: io.BufferedReader
    places: dict[str, int]
    written: tuple[int, int]

    def pieces(self, name: str) -> Iterator[memoryview]:
        """The bytes of a tensor; each piece overwrites the one before."""
        left = self.tensors[name].nbytes
        buffer = memoryview(bytearray(min(left, _PIECE)))
        self.stream.seek(self.places[name])
        while left:
            piece = buffer[:left]
            self._read(piece, name)
            left -= len(piece)
            yield piece

    def check_finite(self, owner: str, infinite: Container[str] = ()) -> None:
        """Refuse numbers that are not finite, as :func:`check_same` does."""
        floats = {name: tensor.dtype for name, tensor in self.tensors.items() if tensor.is_floating_point()}
        for name, dtype in floats.items():
            if not all(_is_finite(torch.frombuffer(piece, dtype=dtype)) for piece in self.pieces(name)):
                found = {name: _empty(self.tensors[name])}
                self.copy_to(found)
                check_same(owner, found, found, infinite)

    def copy_to(self, targets: Mapping[str, Tensor]) -> None:
        """Give ``targets`` the values; shapes and types must agree.

        A file that another program has written to since it was opened is refused, and ``targets`` stay as they are.
        One that is written to at this very moment is refused as well, but too late for them. It takes a program that
        writes in place, as this library never does.
        """
        self._check_unwritten()
        for name, target in targets.items():
            inside = target.device.type == "cpu" and target.is_contiguous()
            memory = target.detach() if inside else _empty(target)
            self.stream.seek(self.places[name])
            self._read(_bytes_of(memory), name)
            if inside:
                increment_version(target)  # as every operation of torch does
            else:
                target.detach().copy_(memory)
        self._check_unwritten()

    def _read(self, memory: memoryview, name: str) -> None:
        if self.stream.readinto(memory) < len(memory):
            raise ValueError(f"it ends in '{name}'")  # it was whole when it was opened

    def _check_unwritten(self) -> None:
        if _written(self.stream) != self.written:
            raise ValueError("another program wrote to it while it was read")


def write(path: StrPath, kind: Kind, tensors: Mapping[str, Tensor], contents: Mapping[str, Any]) -> None:
    """Write a file of this kind, atomically, into a folder that exists; JSON must be able to say ``contents``."""
    with writing(path, kind, contents) as put:
        put(tensors)


Put = Callable[[Mapping[str, Tensor]], None]


@contextmanager
def writing(path: StrPath, kind: Kind, contents: Mapping[str, Any]) -> Iterator[Put]:
    """As :func:`write`, for tensors that must be locked: they are read while the function that it yields runs.

    What is left to do then, to bring the file onto the disk and into its place, may take longer, and needs no tensors.
    """
    header = {"format": FORMAT, "kind": kind, "version": __version__, "contents": dict(contents)}
    text = json.dumps(header)
    if len(text) > _LONGEST or _is_deep(header):
        constraint = f"at most {_LONGEST:,} characters of JSON, nested at most {_DEEPEST} deep"
        raise invalid("contents", f"the file of {_article(kind)}", constraint, Described(f"{len(text):,} characters"))
    with written_atomically(Path(path)) as stream:
        yield partial(_put, stream, text[:-1])


def read(path: StrPath, kind: Kind | None, owner: str) -> File:
    """The file of this kind, or (None) of any, at ``path``, of this format or an older one. Errors name ``owner``."""
    with _unchecked(path, kind, owner) as (file, seal), file.understanding():
        tensors = {name: _empty(tensor) for name, tensor in file.tensors.items()}
        file.copy_to(tensors)
        _check_seal(seal, tensors, lambda name: [_bytes_of(tensors[name])])
        return File(file.format, file.kind, file.version, tensors, file.contents, file.understanding)


@contextmanager
def reading(path: StrPath, kind: Kind | None, owner: str) -> Iterator[OpenFile]:
    """As :func:`read`, without its own copy of the tensors: the checksum is right, and the values can be read again."""
    with _unchecked(path, kind, owner) as (file, seal):
        with file.understanding():
            _check_seal(seal, file.tensors, file.pieces)
        yield file


def kind_of(path: StrPath, owner: str) -> Kind:
    """The kind of the file at ``path``, without reading its tensors; ``owner`` is whom errors name."""
    with _opened(path, owner, partial(_refusal, path, owner, None)) as (_, _, header):
        kind: Kind = header["kind"]
        return kind


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors, and what JSON can say, as a checkpoint; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, "checkpoint", tensors, metadata)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`write_checkpoint` wrote."""
    file = read(path, "checkpoint", "read_checkpoint")
    return file.tensors, file.contents


@contextmanager
def _unchecked(path: StrPath, kind: Kind | None, owner: str) -> Iterator[tuple[OpenFile, str | None]]:
    """A file whose checksum has not been compared, and the text that has it; None where an old file has none."""
    refusal = partial(_refusal, path, owner, kind)
    with _opened(path, owner, refusal) as (stream, known, header):
        written = _written(stream)
        if kind is not None and header["kind"] != kind:
            raise refusal(f"which holds {_article(header['kind'])}")
        understanding, text = partial(_understanding, refusal), header.pop("text")
        with understanding():
            # What safetensors gives is the mapped file, of which nothing is read here.
            tensors = {name: torch.empty_like(known.get_tensor(name), device="meta") for name in known.keys()}  # noqa: SIM118
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length).decode())
            places = {name: 8 + length + entries[name]["data_offsets"][0] for name in tensors}
        seal = text if header["format"] >= 3 or _CHECKSUM in text else None
        found = File(**header, tensors=tensors, understanding=understanding)
        yield OpenFile(**vars(found), stream=stream, places=places, written=written), seal


@contextmanager
def _opened(
    path: StrPath, owner: str, refusal: Callable[[str], ValueError]
) -> Iterator[tuple[io.BufferedReader, Any, dict[str, Any]]]:
    """A file to read, the same as safetensors knows it, and its header in the format of today."""
    if not isinstance(path, (str, os.PathLike)) or (Path(path).exists() and not Path(path).is_file()):
        raise invalid("path", owner, "the path of a file", path)
    try:
        while True:
            with open(path, "rb") as stream, safetensors.safe_open(path, framework="pt") as file:
                # Both are the same file, unless another has taken its place in between.
                if os.path.samestat(os.fstat(stream.fileno()), os.stat(path)):
                    yield stream, file, _header(file.metadata() or {}, refusal)
                    return
    except safetensors.SafetensorError as error:
        raise refusal(f"which is not a whole safetensors file ({error})") from error


def _header(metadata: Mapping[str, str], refusal: Callable[[str], ValueError]) -> dict[str, Any]:
    """What the metadata of a safetensors file say, in the format of today: kind, version and contents."""
    key = next((key for key in _KEYS_1 if key in metadata), None)
    if key is None:
        raise refusal("which another program wrote")
    with _understanding(refusal):
        if len(metadata[key]) > _LONGEST:
            raise ValueError(f"metadata of {len(metadata[key]):,} characters")
        header: dict[str, Any] = json.loads(metadata[key])
        number = 1 if key == _CHECKPOINT_1 else header["format"]
        if type(number) is not int:
            raise TypeError(f"format {number!r}")
        if _is_deep(header):
            raise ValueError(f"metadata nested more than {_DEEPEST} deep")
    if number > FORMAT:
        known = f"bayesbackprop {__version__} reads up to format {FORMAT}"
        raise refusal(f"which bayesbackprop {header.get('version')} wrote in format {number} ({known})")
    with _understanding(refusal):
        if number == 1:  # agents were written as checkpoints
            kind = "agent" if key == _CHECKPOINT_1 and "agent" in header else _KEYS_1[key]
            contents = {name: value for name, value in header.items() if name not in ("format", "version")}
            header = {"kind": kind, "version": header.get("version"), "contents": contents}
        elif number < 1:
            raise ValueError(f"format {number}")
        found = {name: header[name] for name in ("kind", "version", "contents")}
        if found["kind"] not in get_args(Kind) or not isinstance(found["contents"], dict):
            raise ValueError(f"kind {found['kind']!r} with {type(found['contents']).__name__}")
        if not isinstance(found["version"], str | None):
            raise TypeError(f"version {found['version']!r}")
        return {"format": number, "text": metadata[key], **found}


def _put(stream: BinaryIO, text: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a whole safetensors file with the JSON ``text``, whose last brace is missing, and a checksum in it.

    Each piece is copied before it is summed and written: whatever happens to a tensor meanwhile, the checksum is that
    of the file. The header is written last, since it has the checksum; its length is known before.
    """
    header, places = _layout(tensors, _sealed(text, {}, lambda _: ()))

    def write(name: str) -> Iterator[memoryview]:
        stream.seek(start + places[name])
        for piece in tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).split(_PIECE):
            # Not numpy's view of the tensor itself, whose memory torch could never free by itself again.
            content: memoryview = piece.to("cpu", copy=True).numpy().data
            stream.write(content)
            yield content

    start = len(_encoded(header))
    header[_METADATA] = {_KEY: _sealed(text, tensors, write)}
    stream.seek(0)
    stream.write(_encoded(header))


def _layout(tensors: Mapping[str, Tensor], text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The header of a safetensors file, and where each tensor begins behind it, in the order of safetensors."""
    empty = {name: torch.empty(0, dtype=tensor.dtype, device="cpu") for name, tensor in tensors.items()}
    header: dict[str, Any] = json.loads(safetensors.torch.save(empty, metadata={_KEY: text})[8:])
    places: dict[str, int] = {}
    end = 0
    for name in (name for name in header if name != _METADATA):
        places[name], end = end, end + tensors[name].nbytes
        header[name] |= {"shape": list(tensors[name].shape), "data_offsets": [places[name], end]}
    return header, places


def _encoded(header: Mapping[str, Any]) -> bytes:
    """A header as safetensors writes it, with its length in front."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _sealed(text: str, tensors: Mapping[str, Tensor], contents: Callable[[str], Iterable[bytes | memoryview]]) -> str:
    """The JSON ``text`` of a mapping, whose last brace is missing, with a checksum as its last entry.

    It is that of the text, and of the names, types and shapes of the tensors and their ``contents``.
    """
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        for content in contents(name):
            digest.update(content)
    return f'{text}{_CHECKSUM}"{digest.hexdigest()}"}}'


def _check_seal(
    seal: str | None, tensors: Mapping[str, Tensor], contents: Callable[[str], Iterable[bytes | memoryview]]
) -> None:
    """Refuse a JSON text whose checksum is not that of these; None is that of an old file, which has none."""
    if seal is not None and seal != _sealed(seal.rpartition(_CHECKSUM)[0], tensors, contents):
        raise ValueError("its checksum is missing, or that of other contents")


def _written(stream: io.BufferedReader) -> tuple[int, int]:
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


def _empty(tensor: Tensor) -> Tensor:
    """Memory for such a tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _bytes_of(tensor: Tensor) -> memoryview:
    memory: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return memory


def _is_finite(piece: Tensor) -> bool:
    """Whether all numbers are finite.

    By numpy, where it knows the type: torch shares even a piece among its threads, which wait for each other, on a busy
    machine for longer than it takes to read the file.
    """
    return bool(np.isfinite(piece.numpy()).all()) if piece.dtype in _OF_NUMPY else is_finite(piece)


def _is_deep(value: Any, levels: int = _DEEPEST) -> bool:
    """Whether what JSON says is nested more than so many levels deep."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return levels < 0 or any(_is_deep(each, levels - 1) for each in inner)


def check_same(
    owner: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], infinite: Container[str] = ()
) -> None:
    """Refuse tensors that have not the names, shapes and types of those ``expected``, and numbers that are not finite.

    Those that are named in ``infinite`` may be infinite, as masks are, but not NaN. Errors name ``owner``.
    """
    theirs, ours = ({name: (t.shape, t.dtype) for name, t in each.items()} for each in (found, expected))
    if odd := sorted({name for name, _ in theirs.items() ^ ours.items()}):
        constraint = "of the names, shapes and types that it has"
        raise invalid("tensors", owner, constraint, Described(f"others for {odd}"))
    for name, tensor in found.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            check_finite(name, owner, tensor.clamp(-1, 1) if name in infinite else tensor)


def check_counter(name: str, value: object) -> int:
    """Refuse what no counter can be: not an int, negative or absurdly large."""
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{name} {value!r:.80}")
    return value


def check_number(name: str, value: Any, below: float = math.inf) -> None:
    """Refuse what is no finite number, whose size is ``below`` a limit, and integers that no float can hold."""
    if type(value) not in (int, float) or not abs(value) < (min(below, _LARGEST) if type(value) is int else below):
        raise ValueError(f"{name} {value!r:.80}")


@contextmanager
def _understanding(
    refusal: Callable[[str], ValueError], what: str = "which is damaged or has metadata that cannot be understood"
) -> Iterator[None]:
    try:
        yield
    except MISUNDERSTANDINGS as error:
        # In further lines torch says where in its own code.
        reason, *_ = str(error)[:_REPEATED].splitlines() or [""]
        why = f"{type(error).__name__}: {reason}"
        raise refusal(f"{what} ({why})") from error


def _refusal(path: StrPath, owner: str, kind: Kind | None, reason: str) -> ValueError:
    """The one error for a file that cannot be read."""
    constraint = "a file of bayesbackprop" + ("" if kind is None else f" that holds {_article(kind)}")
    shown = reason if len(reason) <= 2 * _REPEATED else f"{reason[:_REPEATED]}..."
    return invalid("path", owner, constraint, Described(f"{os.fspath(path)}, {shown}"))


def _article(kind: Kind) -> str:
    return f"{'an' if kind[0] in 'ae' else 'a'} {kind}"


# --- atomic writes ---------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, as :func:`written_atomically` does."""
    with written_atomically(path) as stream:
        stream.write(content)


@contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """What is written to ``path``, in any order. A crash in the middle leaves the old file intact.

    Of several threads or processes that write the same path, one wins, and its file is whole. A new file has the
    permissions that the umask allows; one that exists keeps those it has.
    """
    path, mode = path.resolve(), None
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
    start = f".{path.name[:_NAME]}."
    temporary = path.with_name(f"{start}{secrets.token_hex(8)}{_UNFINISHED}")

    def create(name: str, flags: int) -> int:
        # The content may be secret: until the file has its permissions, it is its owner's alone.
        return os.open(name, flags, 0o666 if mode is None else 0o600)

    try:
        if mode is not None and not stat.S_ISREG(mode):  # a pipe, or a device, which has one order alone
            memory = io.BytesIO()
            yield memory
            path.write_bytes(memory.getbuffer())
            return
        try:
            with open(temporary, "xb", opener=create) as file:  # x: neither an existing file nor a link is opened
                yield file
                file.flush()
                if mode is not None:
                    os.chmod(temporary, stat.S_IMODE(mode))
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        if error.errno is None:
            raise
        # What the system says names no file, or the temporary one.
        advice = _ADVICE.get(error.errno, "")
        raise OSError(error.errno, f"{error.strerror}{advice}", os.fspath(path)) from error
    _clean(path.parent, start)


def _sync_folder(folder: Path) -> None:
    """Put the names in ``folder`` on the disk: a rename is not there before."""
    try:
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        # Some systems cannot open or sync a folder, and one may have the right to write into it without that to read.
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
            raise


def _clean(folder: Path, start: str) -> None:
    """Remove what processes that were killed while they wrote files whose names begin so have left."""
    name = re.compile(re.escape(start) + "[0-9a-f]{16}" + re.escape(_UNFINISHED))
    with suppress(OSError):  # the file is written; whatever cannot be removed stays
        for left in folder.iterdir():
            if name.fullmatch(left.name) and left.is_file() and time.time() - left.lstat().st_mtime > _ABANDONED:
                left.unlink(missing_ok=True)
