"""The library's files: one format for all of them, atomic writes, and one error for whatever cannot be read.

A file is a safetensors file. Its metadata has one entry, whose JSON says the number of the format, the kind of the
file, the version of the library that wrote it, the contents (what the writer of that kind needs besides tensors), and a
checksum of all that and of the tensors. Reading a file never runs code.

safetensors itself checks, before anything is allocated, that the header and every tensor lie within the file and that
shapes and types agree with their bytes. What JSON claims is checked here and by the readers of each kind.
"""

import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from bayesbackprop._errors import Described, check_finite, invalid
from bayesbackprop._version import __version__

StrPath = str | os.PathLike[str]
Kind = Literal["model", "checkpoint", "sparse network", "agent", "estimator"]

# The layout of the files. It rises when an older version of the library could not read them.
FORMAT = 3
# It was the key of models in format 1, so that an older version refuses a newer model by its format.
_KEY = "bayesbackprop"
# What precedes the checksum in the JSON; it is the last entry, from format 3 on.
_CHECKSUM = ', "checksum": '

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


def write(path: StrPath, kind: Kind, tensors: Mapping[str, Tensor], contents: Mapping[str, Any]) -> None:
    """Write a file of this kind, atomically, into a folder that exists; JSON must be able to say ``contents``."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"format": FORMAT, "kind": kind, "version": __version__, "contents": dict(contents)}
    text = json.dumps(header)
    if len(text) > _LONGEST or _is_deep(header):
        constraint = f"at most {_LONGEST:,} characters of JSON, nested at most {_DEEPEST} deep"
        raise invalid("contents", f"the file of {_article(kind)}", constraint, Described(f"{len(text):,} characters"))
    metadata = {_KEY: sealed(text[:-1], contiguous)}
    write_atomically(Path(path), safetensors.torch.save(contiguous, metadata=metadata))


def read(path: StrPath, kind: Kind | None, owner: str) -> File:
    """The file of this kind, or (None) of any, at ``path``, of this format or an older one. Errors name ``owner``."""
    refusal = partial(_refusal, path, owner, kind)
    with _opened(path, owner, refusal) as (file, header):
        if kind is not None and header["kind"] != kind:
            raise refusal(f"which holds {_article(header['kind'])}")
        with _understanding(refusal):
            # Copies: safetensors maps the file into memory, which would change with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            text = header.pop("text")
            if (header["format"] >= 3 or _CHECKSUM in text) and text != sealed(text.rpartition(_CHECKSUM)[0], tensors):
                raise ValueError("its checksum is missing, or that of other contents")
    return File(**header, tensors=tensors, understanding=partial(_understanding, refusal))


def kind_of(path: StrPath, owner: str) -> Kind:
    """The kind of the file at ``path``, without reading its tensors; ``owner`` is whom errors name."""
    with _opened(path, owner, partial(_refusal, path, owner, None)) as (_, header):
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
def _opened(path: StrPath, owner: str, refusal: Callable[[str], ValueError]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A safetensors file, whose tensors are read when they are asked for, and its header in the format of today."""
    if not isinstance(path, (str, os.PathLike)) or (Path(path).exists() and not Path(path).is_file()):
        raise invalid("path", owner, "the path of a file", path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file, _header(file.metadata() or {}, refusal)
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


def sealed(text: str, tensors: Mapping[str, Tensor]) -> str:
    """The JSON ``text`` of a mapping, whose last brace is missing, with a checksum as its last entry.

    It is that of the text, and of the names, types, shapes and bytes of the tensors, which are not copied.
    """
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f'{text}{_CHECKSUM}"{digest.hexdigest()}"}}'


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
    """Write ``content`` to ``path``. A crash in the middle leaves the old file intact.

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
        if mode is not None and not stat.S_ISREG(mode):  # a pipe, or a device
            path.write_bytes(content)
            return
        try:
            with open(temporary, "xb", opener=create) as file:  # x: neither an existing file nor a link is opened
                file.write(content)
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
