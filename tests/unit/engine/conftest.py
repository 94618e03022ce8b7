from typing import Any

import pytest
from torch import Tensor

from bayesbackprop._engine.mlp import FullyConnected


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that were trained on as fully connected networks."""
    sizes: list[int] = []
    run = FullyConnected.run

    def spy(self: FullyConnected, ws: Any, x: Tensor) -> list[Tensor]:
        sizes.append(len(x))
        return run(self, ws, x)

    monkeypatch.setattr(FullyConnected, "run", spy)
    return sizes
