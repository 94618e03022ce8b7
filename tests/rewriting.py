"""Files of the library with something changed in them."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

KEY = "bayesbackprop"


def header_of(path: Path) -> dict[str, Any]:
    """What the metadata of a file say: its format, its kind, the version, the contents and the checksum."""
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.metadata()) == {KEY}
        return json.loads(file.metadata()[KEY])


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any], text: str | None = None) -> None:
    """Change the header and the tensors of a file in place, or put another text where the header was.

    The checksum is that of the new contents: what is wrong with them must be found without it.
    """
    header, tensors = header_of(path), safetensors.torch.load_file(path)
    change(header, tensors)
    checksum = header.pop("checksum", None)
    if text is None:
        text = json.dumps(header) if checksum is None else sealed(json.dumps(header)[:-1], tensors)
    safetensors.torch.save_file(tensors, path, metadata={KEY: text})


def sealed(text: str, tensors: Mapping[str, Tensor]) -> str:
    """The JSON ``text`` of a mapping, whose last brace is missing, with a checksum as its last entry.

    It is that of the text, and of the names, types, shapes and bytes of the tensors.
    """
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f'{text}, "checksum": "{digest.hexdigest()}"}}'
