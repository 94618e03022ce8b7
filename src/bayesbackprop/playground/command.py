"""Running a playground in this process."""

import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from bayesbackprop._errors import Described, invalid
from bayesbackprop._signals import TerminatedError
from bayesbackprop.playground.app import make_app
from bayesbackprop.playground.sessions import warm_up
from bayesbackprop.serving.app import prepare_process
from bayesbackprop.serving.command import LOCAL

# Seconds that a request may go on after the playground was told to end.
_LEAVE = 2


def play(host: str = "127.0.0.1", port: int = 8008, *, opens: bool = True, announce: Callable[[str], None]) -> None:
    """Serve the playground until Ctrl-C or SIGTERM.

    Args:
        host: The address to listen on.
        port: The port to listen on.
        opens: Whether to open the page in a browser.
        announce: Called with the address when it can be opened.
    """
    is_v6 = ":" in host
    try:
        place = socket.create_server((host, port), family=socket.AF_INET6 if is_v6 else socket.AF_INET)
    except OSError as error:
        constraint = "an address and a port of this machine that nobody uses (choose another --port)"
        raise invalid("--port", "bbb playground", constraint, Described(f"{host}:{port}: {error}")) from error
    address = f"http://{f'[{host}]' if is_v6 else host}:{port}"
    with place, suppress(KeyboardInterrupt, TerminatedError):
        prepare_process()
        warm_up()
        app = make_app(local=host in LOCAL)
        options = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": _LEAVE}
        announce(address)  # whoever opens it waits in line until the server takes the socket
        if opens:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        uvicorn.Server(uvicorn.Config(app, **options)).run(sockets=[place])  # type: ignore[arg-type]
