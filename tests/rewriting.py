"""Files of the library with something changed in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

KEY = "bayesbackprop"


def header_of(path: Path) -> dict[str, Any]:
    """What the metadata of a file say: its format, its kind, the version that wrote it, and its contents."""
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.metadata()) == {KEY}
        return json.loads(file.metadata()[KEY])


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any], text: str | None = None) -> None:
    """Change the header and the tensors of a file in place, or put another text where the header was."""
    header, tensors = header_of(path), safetensors.torch.load_file(path)
    change(header, tensors)
    safetensors.torch.save_file(tensors, path, metadata={KEY: json.dumps(header) if text is None else text})
