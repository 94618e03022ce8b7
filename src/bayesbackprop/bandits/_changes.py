"""A test for change: whether rewards are suddenly predicted worse than before."""

import numpy as np
import torch
from torch import Tensor

# Errors are averaged over about so many, recently and in the long run; none is judged before there are as many as this.
RECENT, _LONG, _ENOUGH = 25, 300, 200

# An error counts at most this many times the scale, so that one rare reward is no alarm.
_LARGEST = 3.0

# The least standard deviation of an error: where all were alike, rounding is no alarm.
_LEAST_DEVIATION = 0.01


class Changes:
    """Compares the mean of recent errors with that of all since the last change, for each of ``replicas``.

    The recent mean is m <- m + (e - m) / 25, whose standard error is that of one error times sqrt(a / (2 - a)) with
    a = 1 / 25. It is an alarm when m exceeds the long-run mean by ``alarm`` standard errors.
    """

    def __init__(self, replicas: int, alarm: float) -> None:
        self.alarm = alarm
        # How many errors, the recent mean, the long-run mean and that of the squares.
        self.state = torch.zeros(4, replicas, dtype=torch.float64)

    def see(self, errors: Tensor) -> Tensor:
        """Whether the world of each replica has changed, given the next error of each; then all begins anew for it."""
        # In numpy: torch's calls would take longer than an update of the network.
        count, recent, mean, square = self.state.numpy()
        e, a = np.minimum(errors.double().numpy(), _LARGEST), 1 / RECENT
        count += 1
        recent += (e - recent) / np.minimum(count, RECENT)
        mean += (e - mean) / np.minimum(count, _LONG)
        square += (e * e - square) / np.minimum(count, _LONG)
        deviation = np.sqrt(np.maximum(square - mean * mean, _LEAST_DEVIATION**2))
        changed = torch.from_numpy((count > _ENOUGH) & (recent - mean > self.alarm * deviation * (a / (2 - a)) ** 0.5))
        if changed.any():
            self.state[:, changed] = 0
        return changed
