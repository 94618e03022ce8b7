"""The environments of the experiments refuse what they cannot be made of."""

from typing import Any

import pytest

from bayesbackprop_paper.environments import Wheel

pytestmark = pytest.mark.identities


@pytest.mark.parametrize("delta", [0, 1, -0.5, 1.5, float("nan"), True, "half", None])
def test_a_wheel_needs_a_radius_within_it(delta: Any) -> None:
    with pytest.raises(ValueError, match=r"'delta' parameter of Wheel must be a float in \(0, 1\)"):
        Wheel(delta)
