from typing import Any

import pytest

from bayesbackprop._engine.mlp import FullyConnected


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that were trained on as fully connected networks."""
    sizes: list[int] = []
    run = FullyConnected.run

    def spy(self: FullyConnected, *args: Any) -> Any:
        sizes.append(len(args[0]))
        return run(self, *args)

    monkeypatch.setattr(FullyConnected, "run", spy)
    return sizes
