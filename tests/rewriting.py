"""Files of the library with something changed in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from bayesbackprop._files import sealed

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
