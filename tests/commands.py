"""The command line, called as a function."""

from typer.testing import CliRunner, Result

from bayesbackprop._cli import app


def bbb(*command: object) -> Result:
    return CliRunner().invoke(app, list(map(str, command)))
