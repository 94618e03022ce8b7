"""Running a service: in this process, or in several."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from bayesbackprop._errors import invalid
from bayesbackprop._signals import TerminatedError
from bayesbackprop.serving.app import make_app, open_log, prepare_process
from bayesbackprop.serving.log import Log
from bayesbackprop.serving.monitoring import FOLDER
from bayesbackprop.serving.settings import READ_TOKEN, TOKEN, Settings
from bayesbackprop.serving.workers import Server, run_workers

# Addresses that only this machine can reach.
LOCAL = ("127.0.0.1", "::1", "localhost")
# Seconds that a request may go on after the service was told to end.
_LEAVE = 10


def serve(
    settings: Settings,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    *,
    level: str = "warning",
    announce: Callable[[], None] = lambda: None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; then requests are finished, and a snapshot is written.

    Args:
        settings: The service.
        host: The address to listen on.
        port: The port to listen on.
        workers: How many processes answer.
        level: From which on uvicorn says what happens.
        announce: Called when it answers.
    """
    if host not in LOCAL and not settings.tokens and not settings.anyone:
        constraint = f"an address of this machine alone ({', '.join(LOCAL)}), unless there is a token (set {TOKEN} or "
        raise invalid(
            "--host", "bbb serve", constraint + "--token-file) or --no-token says that everyone may ask", host
        )
    if settings.read_tokens and not settings.tokens:
        raise invalid(
            READ_TOKEN, "bbb serve", f"given with {TOKEN} or --token-file: alone it protects nothing", "it alone"
        )
    log = Log(settings.url)
    open_log(log, settings)  # whatever is wrong with it is said here, once
    log.close()
    options = {"host": host, "port": port, "log_level": level, "access_log": False, "timeout_graceful_shutdown": _LEAVE}
    with suppress(KeyboardInterrupt, TerminatedError):  # by then all is done
        if workers == 1:
            prepare_process()
            Server(uvicorn.Config(make_app(settings), **options), announce).run()  # type: ignore[arg-type]
            return
        settings.to_environment()
        with tempfile.TemporaryDirectory() as folder:
            os.environ[FOLDER] = folder
            run_workers(workers, options, announce)
