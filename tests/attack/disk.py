"""A disk that is full while a file is written: `full_disk` has the kinds of files."""

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import full_disk
from attack import Attempt


def run(seed: int, seconds: float) -> Iterator[Attempt]:
    until, chance = time.monotonic() + seconds, random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        writers = full_disk.writers()
        places = {kind: Path(folder, str(number)) for number, kind in enumerate(writers)}
        whole = {kind: full_disk.prepare(write, places[kind]) for kind, write in writers.items()}
        first = True
        while first or time.monotonic() < until:
            for kind, write in writers.items():
                for way in full_disk.WAYS:
                    found = full_disk.attempt(write, places[kind], whole[kind], way, chance)
                    yield Attempt(kind, found.outcome, f"{way}: {found.detail}")
            first = False
