"""The command line: ``bbb``."""

import os
import sys
from typing import Annotated, Any

import rich.console
import typer

from bayesbackprop._cli import prune
from bayesbackprop._version import __version__
from bayesbackprop_paper.cli import bandit, bench, data, demo, evaluate, reproduce

__all__ = ["app", "main"]

app = typer.Typer(
    name="bbb",
    help="Bayes by Backprop: neural networks that know what they do not know.\n\nStart with `bbb demo`. "
    "Each command's --help has an example; set BBB_TRACEBACK=1 for tracebacks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("demo")(demo.demo)
app.command("train")(reproduce.train)
app.command("search")(reproduce.search)
app.add_typer(reproduce.app, name="reproduce")
app.add_typer(bandit.app, name="bandit")
app.command("prune")(prune.command)
app.command("evaluate")(evaluate.command)
app.command("report")(demo.report)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")


# What typer raises for commands that it cannot make sense of; it has no public name for all of them.
_WrongCommand: Any = typer.BadParameter.__base__

# The exit code after Ctrl-C, as shells count it; typer gives it back instead of an exception.
_INTERRUPTED = 130


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bayesbackprop {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; a mistake of the user's is one line that says what to do, unless ``BBB_TRACEBACK`` is set."""
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except _WrongCommand as error:
        if said := error.format_message():  # without arguments, typer has shown the help instead
            _say(f"{said.rstrip('.')}. See {error.ctx.command_path if error.ctx else 'bbb'} --help.")
        sys.exit(error.exit_code)
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        if os.environ.get("BBB_TRACEBACK"):
            raise
        missing = isinstance(error, ModuleNotFoundError)
        _say(f"{error}" + (': this needs pip install "bayesbackprop[experiments]".' if missing else ""))
        sys.exit(1)
    if code == _INTERRUPTED:
        print("Stopped.", file=sys.stderr)
    sys.exit(code)


def _say(what: str) -> None:
    console = rich.console.Console(stderr=True)
    console.print(f"Error: {what}", style="red", markup=False, highlight=False, soft_wrap=True)
