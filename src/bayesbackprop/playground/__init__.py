"""A page to play on: ``bbb playground``.

A page of the browser owns a *work*: points and settings, or a bandit. It puts the work to a session of its own, whose
thread trains it with the library, and asks again and again for the newest snapshot. A session rests while nobody asks.
"""

from bayesbackprop.playground.app import make_app
from bayesbackprop.playground.sessions import Limits

__all__ = ["Limits", "make_app"]
