"""Mangled files of every kind: `file_fuzzing` has the kinds and the mutations. Without it, model files alone."""

import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import torch
from torch import nn

from attack import Attempt, Outcome
from bayesbackprop import Bayesian, Categorical, load, save

# What `file_fuzzing` calls them. A file that was written anew, with sound numbers, may load as it says.
OF_END: dict[str, Outcome] = {
    "refused": "refused clearly",
    "equal": "equal",
    "as written": "equal",
    "wrong": "accepted wrong",
    "raw": "crashed",
    "crashed": "crashed",
    "hung": "hung",
}
COUNT = 200  # of each kind before the next one


def run(seed: int, seconds: float) -> Iterator[Attempt]:
    if not util.find_spec("file_fuzzing"):
        yield from models(seed, seconds)
        return
    import file_fuzzing

    until = time.monotonic() + seconds
    for number in itertools.count():
        for kind in random.Random(seed).sample([*file_fuzzing.SUBJECTS], len(file_fuzzing.SUBJECTS)):
            if time.monotonic() > until:
                return
            ends, bad = file_fuzzing.attack(kind, COUNT, first=10**6 * seed + COUNT * number)
            for end, times in ends.items():
                said = iter([each for each in bad if f", {end}" in each])
                yield from (Attempt(kind, OF_END[end], next(said, "")) for _ in range(times))


def models(seed: int, seconds: float) -> Iterator[Attempt]:
    """Models with some bytes changed, cut off or put in."""
    until, chance = time.monotonic() + seconds, random.Random(seed)

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        model = Bayesian(net(), Categorical(), seed=1)
        save(model, path)
        whole, expected = path.read_bytes(), model.state_dict()
        while time.monotonic() < until:
            path.write_bytes(mangled(whole, chance))
            try:
                found = load(path, net()).state_dict()
            except ValueError as error:
                clear = str(path) in str(error)
                yield Attempt("model", "refused clearly" if clear else "crashed", f"ValueError: {error}")
            except Exception as error:
                yield Attempt("model", "crashed", f"{type(error).__name__}: {error}")
            else:
                same = all(torch.equal(found[name], value) for name, value in expected.items())
                yield Attempt("model", "equal" if same else "accepted wrong", "other contents")


def mangled(content: bytes, chance: random.Random) -> bytes:
    """``content`` with one thing wrong."""
    spoilt, place = bytearray(content), chance.randrange(len(content))
    match chance.randrange(4):
        case 0:
            spoilt[place] ^= 1 << chance.randrange(8)
        case 1:
            del spoilt[place:]
        case 2:
            spoilt[place : place + chance.randrange(1, 9)] = chance.randbytes(chance.randrange(1, 9))
        case _:
            spoilt[place:place] = chance.randbytes(chance.randrange(1, 9))
    return bytes(spoilt)
