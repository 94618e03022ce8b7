"""The command line: ``bbb``.

A command is imported when it is called: the help loads none of them, and a command whose dependencies are missing still
appears there and says what to install.
"""

import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import rich.console
import typer
import typer.core

from bayesbackprop._signals import TerminatedError, terminate
from bayesbackprop._version import __version__

__all__ = ["PANELS", "Deferred", "app", "main"]


class Extra(NamedTuple):
    """An extra of the package, and what it installs."""

    name: str
    needs: tuple[str, ...]


class Command(NamedTuple):
    """A row of the help: the name, the module and the function or group in it, what it does in one line, its extra."""

    name: str
    module: str
    attribute: str
    help: str
    extra: Extra | None = None


class Panel(NamedTuple):
    """A box of the help: its title, the package of its commands, the extra that they need, and the commands."""

    title: str
    package: str
    extra: Extra | None
    commands: tuple[Command, ...]


_TABLES = Extra("tables", ("matplotlib", "pandas", "pyarrow", "sklearn"))
_SERVE = Extra("serve", ("fastapi", "prometheus_client", "sqlalchemy", "uvicorn"))
_PAPER = Extra("paper", ("matplotlib", "optuna", "plotly", "pooch"))

# The library names the package of the paper's reproduction here and nowhere else.
PANELS = (
    Panel(
        "Your own tables (extra 'tables'), networks and bandits (extra 'serve')",
        "bayesbackprop._cli",
        None,
        (
            Command("fit", "fit", "command", "Fit a network to a table; say how good it is.", _TABLES),
            Command("predict", "predict", "command", "Add predictions and their uncertainty to a table.", _TABLES),
            Command("show", "show", "command", "Show what is in a file of this library."),
            Command("prune", "prune", "command", "Remove the weights that say least; write what is left."),
            Command("playground", "playground", "command", "Train small networks live in your browser.", _SERVE),
            Command("serve", "serve", "app", "Serve a bandit over HTTP; write its log as a table.", _SERVE),
        ),
    ),
    Panel(
        "The paper's experiments (they need the extra 'paper')",
        "bayesbackprop_paper.cli",
        _PAPER,
        (
            Command("demo", "demo", "demo", "See it all work: a few minutes, and one page to look at."),
            Command("train", "reproduce", "train", "Train a network on MNIST; under torchrun on several processes."),
            Command("search", "reproduce", "search", "Choose hyperparameters on the validation set."),
            Command("evaluate", "evaluate", "command", "Error, NLL, Brier score and calibration of networks."),
            Command("report", "demo", "report", "Write one self-contained HTML page on trained networks."),
            Command("reproduce", "reproduce", "app", "The tables and figures of the paper, one command each."),
            Command("truth", "truth", "app", "How near the library comes to what is known."),
            Command("bandit", "bandit", "app", "Contextual bandits: agents that explore by themselves."),
            Command("data", "data", "app", "The data sets: what there is, fetch it, where it is."),
            Command("bench", "bench", "app", "Measure speed against plain PyTorch and other libraries."),
        ),
    ),
)


class Deferred(typer.core.TyperCommand):
    """A command that is imported when it is called."""

    def __init__(self, panel: Panel, command: Command) -> None:
        super().__init__(command.name, help=command.help, rich_help_panel=panel.title)
        self._module, self._attribute = f"{panel.package}.{command.module}", command.attribute
        self._extra = command.extra or panel.extra

    def load(self) -> Any:
        """The command itself, or the group of commands."""
        # Found out now, not after an hour of training.
        missing = [name for name in self._extra.needs if find_spec(name) is None] if self._extra else []
        if self._extra and missing:
            needs = f"bbb {self.name} needs {', '.join(missing)}"
            raise ModuleNotFoundError(f'{needs}: pip install "bayesbackprop[{self._extra.name}]"')
        found: Callable[..., None] | typer.Typer = getattr(importlib.import_module(self._module), self._attribute)
        holder = typer.Typer(rich_markup_mode="markdown")
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=self.name)
        else:
            holder.command(self.name)(found)
        return typer.main.get_group(holder).commands[self.name or ""]

    def make_context(self, *args: Any, **settings: Any) -> Any:
        return self.load().make_context(*args, **settings)


class _Commands(typer.core.TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for panel in PANELS:
            for command in panel.commands:
                self.add_command(Deferred(panel, command))

    def invoke(self, ctx: Any) -> Any:
        with _plain_warnings():
            return super().invoke(ctx)

    def get_params(self, ctx: Any) -> Any:
        """All options; ``--show-completion`` works but is not shown, so that the help fits one screen."""
        params = super().get_params(ctx)
        for option in params:
            if option.name == "show_completion":
                option.hidden = True  # type: ignore[attr-defined]
        return params


def _start() -> str:
    """What to try first: of what is installed."""
    firsts = {_PAPER: "bbb demo", _TABLES: "bbb fit TABLE --target COLUMN"}
    installed = (first for extra, first in firsts.items() if all(map(find_spec, extra.needs)))
    return f"Start with `{next(installed, 'bbb show FILE')}`."


app = typer.Typer(
    name="bbb",
    cls=_Commands,
    help=f"Networks that know what they do not know. {_start()}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

# What typer raises for commands that it cannot make sense of; it has no public name for all of them.
_WrongCommand: Any = typer.BadParameter.__base__

# The exit codes after Ctrl-C and SIGTERM, as shells count them; typer gives back the first instead of an exception.
_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bayesbackprop {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")


@app.callback()
def _options(version: Annotated[bool, _VERSION] = False) -> None:
    pass


def main() -> None:
    """Run the command; a mistake of the user's is one line that says what to do, unless ``BBB_TRACEBACK`` is set."""
    is_main = threading.current_thread() is threading.main_thread()
    ours = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        if ours:
            terminate.came = False
            signal.signal(signal.SIGTERM, terminate)
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except TerminatedError:
        code = _TERMINATED
    except _WrongCommand as error:
        if said := error.format_message():  # without arguments, typer has shown the help instead
            _say(f"{said.rstrip('.')}. See {error.ctx.command_path if error.ctx else 'bbb'} --help.")
        code = error.exit_code
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        if os.environ.get("BBB_TRACEBACK"):
            raise
        unsaid = isinstance(error, ModuleNotFoundError) and "pip install" not in str(error)
        _say(f"{error}" + (f': pip install "bayesbackprop[{_PAPER.name}]"' if unsaid else ""))
        code = 1
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if code in (_INTERRUPTED, _TERMINATED):
        print("Stopped.", file=sys.stderr)
    sys.exit(code)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Within it a warning is one line that says what it is about, and not where in the code it came from."""
    before = warnings.showwarning

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        _say(str(message), "Warning", "yellow")

    warnings.showwarning = before if os.environ.get("BBB_TRACEBACK") else show
    try:
        yield
    finally:
        warnings.showwarning = before


def _say(what: str, kind: str = "Error", colour: str = "red") -> None:
    console = rich.console.Console(stderr=True)
    console.print(f"{kind}: {what}", style=colour, markup=False, highlight=False, soft_wrap=True)
