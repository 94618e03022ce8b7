"""``bbb playground``."""

from typing import Annotated

import rich.console
import typer

from bayesbackprop.playground.command import play


def command(
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8008,
    host: Annotated[
        str, typer.Option(help="The address to listen on. With another, everyone who reaches it may play.")
    ] = "127.0.0.1",
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the page in a browser.")] = False,
) -> None:
    """Train small networks live in your browser.

    Click points and watch the prediction, its uncertainty, drawn functions and the free energy while the library
    trains; change the prior, the posterior and the noise; or watch two bandits explore. It serves this machine alone,
    keeps no file, and needs no network. Ctrl-C ends it.

    Example: `bbb playground`
    """
    told = rich.console.Console(stderr=True, soft_wrap=True, highlight=False)
    play(host, port, opens=not no_open, announce=lambda address: told.print(f"{address}   Ctrl-C ends it."))
