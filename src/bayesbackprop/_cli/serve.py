"""``bbb serve``."""

from pathlib import Path
from typing import Annotated

import rich.console
import typer

from bayesbackprop._errors import invalid
from bayesbackprop.serving.command import serve
from bayesbackprop.serving.export import export as write_csv
from bayesbackprop.serving.log import Log
from bayesbackprop.serving.settings import AGENTS, READ_TOKEN, TOKEN, Limits, Settings, read_tokens

_LIMITS = Limits()
_PLACE = "A file of SQLite, or a URL such as postgresql://user@host/database."

app = typer.Typer(invoke_without_command=True)

Place = Annotated[str, typer.Option("--log", help=_PLACE)]


@app.callback()
def command(
    context: typer.Context,
    features: Annotated[int | None, typer.Option(min=1, help="The width of a context; of a new log.")] = None,
    actions: Annotated[int | None, typer.Option(min=1, help="How many actions there are; of a new log.")] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(AGENTS)}, or a file that agent.save wrote; of a new log.", show_default="thompson"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of a new agent.")] = 0,
    log: Place = "bandit.sqlite",
    snapshots: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="A folder; all machines share it.", show_default="LOG.snapshots"),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Processes that answer; one of them learns.")] = 1,
    token_file: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help=f"Tokens that may do everything, one a line; or set {TOKEN}."),
    ] = None,
    read_token_file: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help=f"Tokens that may read state and metrics, one a line; or set {READ_TOKEN}.",
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let everyone who reaches --host do everything.")
    ] = False,
    expire: Annotated[float, typer.Option(min=0, help="Hours that a decision waits for its reward.")] = _LIMITS.expire
    / 3600,
    most_waiting: Annotated[int, typer.Option(min=1, help="Decisions that may wait for a reward.")] = _LIMITS.waiting,
    most_bytes: Annotated[int, typer.Option(min=1, help="Of a request.")] = _LIMITS.body,
    most_in_batch: Annotated[int, typer.Option(min=1, help="Decisions or rewards of a request.")] = _LIMITS.batch,
) -> None:
    """Serve a bandit over HTTP; write its log as a table.

    It answers decisions, rewards, its state, metrics, and a page to look at. All decisions and rewards are in the log
    when they are answered; rewards are learnt behind it. It may be killed at any moment. The same command goes on from
    the log, which knows its agent. Ctrl-C or SIGTERM ends it.

    Example: `bbb serve --features 10 --actions 3`, then look at http://127.0.0.1:8000
    """
    if context.invoked_subcommand is not None:
        return
    settings = Settings(
        log=log,
        snapshots=None if snapshots is None else str(snapshots),
        features=features,
        actions=actions,
        agent=agent,
        seed=seed,
        tokens=read_tokens(TOKEN, "--token-file", token_file or []),
        read_tokens=read_tokens(READ_TOKEN, "--read-token-file", read_token_file or []),
        anyone=no_token,
        limits=Limits(body=most_bytes, batch=most_in_batch, waiting=most_waiting, expire=expire * 3600),
    )
    name = f"[{host}]" if ":" in host else host
    told = rich.console.Console(stderr=True, soft_wrap=True, highlight=False)
    address = f"http://{name}:{port}"
    said = f"{address}   (the API: {address}/docs)   Ctrl-C ends it."
    serve(settings, host, port, workers, announce=lambda: told.print(said, markup=False))


@app.command()
def export(
    output: Annotated[Path, typer.Argument(dir_okay=False, help="The CSV file to write.")],
    log: Place = "bandit.sqlite",
    waiting: Annotated[bool, typer.Option("--waiting", help="Also decisions without a reward.")] = False,
) -> None:
    """Write the log as a table: contexts, actions, rewards, propensities; while the service goes on.

    Example: `bbb serve export log.csv --log bandit.sqlite`
    """
    found = Log(Settings(log).url)
    if not found.exists():
        raise invalid("--log", "bbb serve export", "a log that bbb serve wrote", log)
    count = write_csv(found, output, waiting=waiting)
    rich.console.Console(soft_wrap=True).print(f"{count:,} decisions are in {output}", markup=False, highlight=False)
