"""A bandit as a web service: ``bbb serve``.

The log of decisions and rewards, a database, is the truth. Requests append to it and are answered when that is
committed. A thread behind the log learns the rewards in its order; the agent is a pure function of the log, so it can
be rebuilt from it at any time. Snapshots only make that quicker.
"""

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import sqlalchemy  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    needs = "bayesbackprop.serving needs fastapi, uvicorn, sqlalchemy and prometheus-client"
    raise ModuleNotFoundError(f'{needs}: pip install "bayesbackprop[serve]"') from error

from bayesbackprop.serving.app import make_app
from bayesbackprop.serving.log import Log
from bayesbackprop.serving.settings import Limits, Settings

__all__ = ["Limits", "Log", "Settings", "make_app"]
