"""Nobody waits for a disk: no test sees whether it did, and all of them together would wait for most of a minute."""

import os


def do_not_wait() -> None:
    """For files, but for the tests of files."""
    os.fsync = os.fstat  # type: ignore[assignment]


def do_not_wait_for_databases() -> None:
    """For those of Optuna."""
    from sqlalchemy import Engine, event

    @event.listens_for(Engine, "connect")
    def connected(connection: object, _: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")  # type: ignore[attr-defined]
