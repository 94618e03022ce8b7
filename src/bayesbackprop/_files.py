"""Files that are written whole or not at all, and tensors with a little JSON in them. Reading never runs code."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from bayesbackprop._errors import Described, invalid

_KEY = "bayesbackprop.checkpoint"


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; whoever is killed meanwhile leaves the file as it was."""
    path = path.resolve()
    if path.exists() and not path.is_file():  # a pipe, or a device
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within it no other process is within it for the same folder; whoever is killed there lets the next one in."""
    import fcntl  # not on every system

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors, and what JSON can say, into one safetensors file."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, safetensors.torch.save(contiguous, metadata={_KEY: json.dumps(metadata)}))


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`write_checkpoint` wrote."""
    metadata, tensors = read_tensors(path, "read_checkpoint")
    if _KEY not in metadata:
        raise invalid("path", "read_checkpoint", "a checkpoint of bayesbackprop", Described(str(path)))
    return tensors, json.loads(metadata[_KEY])


def read_tensors(path: str | os.PathLike[str], owner: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a safetensors file."""
    if not isinstance(path, (str, os.PathLike)) or Path(path).is_dir():
        raise invalid("path", owner, "the path of a file", path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise invalid("path", owner, "a whole safetensors file", Described(f"{path} ({error})")) from error
