"""Mangled files of every kind: what makes them, and what became of reading them.

In a child process with a memory limit, 2000 of each kind from seed 0:

    python tests/file_fuzzing.py 2000

Each is refused with the one error, or loads what was written. What was written anew, with a checksum of its own or in a
format without one, may also load as it now is, if all numbers are finite.
"""

import argparse
import copy
import copyreg
import io
import json
import math
import pickle
import random as generators
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

import bayesbackprop as bbb
from bayesbackprop import bandits
from bayesbackprop._cli import show
from bayesbackprop.callbacks import Averaging, Best, Callback, Checkpoint
from bayesbackprop.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesbackprop.training import Batches, DivergenceError, Run, fit
from rewriting import sealed

Outcome = Literal["refused", "equal", "as written", "wrong", "raw", "hung"]
_FORM = re.compile(r"The '.+' parameter of .+ must be .+\. Got .+ instead\.", re.DOTALL)
_KEY = "bayesbackprop"
# Seconds for one file, and bytes above those of the libraries for all.
_PATIENCE, _MEMORY = 20, 2**30

# --- what is read ----------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    """A kind of file: what writes a good one, and what reads it and uses what it has read."""

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def _model() -> bbb.Bayesian:
    torch.manual_seed(0)
    return bbb.Bayesian(_network(), bbb.Gaussian("learnt"), bbb.Normal(0.5), estimator="local", seed=3)


def _read_model(path: Path) -> Any:
    model = bbb.load(path, _network())
    model.eval()(torch.ones(2, 3))
    return dict(model.state_dict()), repr(model.likelihood), repr(model.plan), model.seed


class _Heads(nn.Linear):
    """A network with heads within a head."""

    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return {"a": (h[:, :1], h[:, 1:2]), "b": h[:, 2:]}


def _write_heads(path: Path) -> None:
    torch.manual_seed(0)
    classes = bbb.Categorical(weight=[1.0, 0.5], label_smoothing=0.1, ignore_index=-1)
    likelihood = bbb.Joint({"a": bbb.Joint([bbb.Ordinal(3), bbb.StudentT(df=3.0)]), "b": classes})
    bbb.save(bbb.Bayesian(_Heads(3, 4), likelihood, seed=3), path)


def _read_heads(path: Path) -> Any:
    model = bbb.load(path, _Heads(3, 4))
    model.eval()(torch.ones(2, 3))
    return dict(model.state_dict()), repr(model.likelihood), repr(model.plan), model.seed, _show(path)


def _read_sparse(path: Path) -> Any:
    net = bbb.load_sparse(path)
    first = next(layer for layer in net.layers if hasattr(layer, "in_features"))
    if first.in_features < 10_000:
        for rows in (1, 2):
            net(torch.ones(rows, first.in_features, dtype=first.bias.dtype))
    return dict(net.state_dict()), repr(net)


def _write_sparse(path: Path) -> None:
    torch.manual_seed(0)
    model = bbb.Bayesian(nn.Sequential(nn.Linear(200, 180), nn.ELU(0.5), nn.Linear(180, 5)), bbb.Categorical())
    bbb.save_sparse(bbb.sparse(bbb.prune(model, 0.98)), path)


class _Seen(Callback):
    """Notes what a run begins with."""

    def on_start(self, run: Run) -> None:
        parts = [run.objective.state_dict(), run.optimiser.state_dict(), run.scheduler.state_dict()]  # type: ignore[union-attr]
        self.state = _copied([*parts, run.state_dict()])


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list | tuple) else value


def _run(path: Path, epochs: int, kind: type[Callback] = Checkpoint) -> Any:
    model, seen, average = _model(), _Seen(), Averaging(0.8)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    x = torch.linspace(-1, 1, 60).reshape(20, 3)
    files = [Checkpoint(path, about={"a": 1})] if kind is Checkpoint else [Best(path, "cost")]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimiser, [3, 5])
    batches = Batches(x, x[:, :2], 10)
    fit(model, batches, epochs=epochs, optimiser=optimiser, scheduler=scheduler, callbacks=[average, *files, seen])
    return seen.state


def _read_best(path: Path) -> Any:
    model = _model()
    return Best(path, "cost").load(model), dict(model.state_dict())


class _World(bandits.Environment):
    """A bandit of two features and three actions."""

    def __init__(self) -> None:
        super().__init__(2, 3, seed=0)

    def make(self, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        best = torch.eye(3)[int(random.integers(3))]
        return torch.tensor([0.1 * (self.t % 7), 1.0]), best, best


_SMALL: dict[str, Any] = {"hidden": [4], "updates": 2, "batch_size": 4, "memory": 5}
_AGENTS: dict[str, Callable[[], bandits.Agent]] = {
    "thompson": lambda: bandits.ThompsonSampling(2, 3, **_SMALL),
    "epsilon": lambda: bandits.EpsilonGreedy(2, 3, encoding="output", **_SMALL),
    "linear": lambda: bandits.LinearThompson(2, 3),
    "uniform": lambda: bandits.Uniform(2, 3),
}


def _write_agent(name: str, path: Path) -> None:
    agent = _AGENTS[name]()
    for number in range(7):
        context = [0.1 * number, 1.0]
        agent.observe(context, agent.act(context), 1.0)
    agent.save(path)


def _read_agent(path: Path) -> Any:
    agent = bandits.load(path)
    found = _copied([agent.tensors(), repr(agent.described()), type(agent).__name__])
    small = agent.features * agent.actions * agent.replicas < 1000
    if small and getattr(agent, "updates", 0) * getattr(agent, "batch_size", 0) < 10_000:
        contexts = torch.ones(agent.replicas, agent.features)
        agent.observe_all(contexts, agent.act_all(contexts), [1.0] * agent.replicas)
    return found


def _simulate(path: Path, steps: int) -> Any:
    agent, world = bandits.LinearThompson(2, 3), _World()
    regret = bandits.simulate([world], agent, steps, path)
    return regret, dict(agent.tensors()), world.t, agent.acted, agent.observed


def _estimator(kind: type[Any]) -> Any:
    x = np.random.RandomState(0).randn(40, 3)
    y = np.array(["no", "yes"])[(x[:, 0] > 0).astype(int)] if kind is BayesianMLPClassifier else x[:, 0]
    settings = {"hidden_layer_sizes": (4,), "draws": 3, "random_state": 0}
    return kind(**settings).partial_fit(x, y, *([["no", "yes"]] if kind is BayesianMLPClassifier else []))


def _said(estimator: Any) -> Any:
    state = {name: value for name, value in vars(estimator).items() if name not in ("model_", "_optimiser")}
    if not hasattr(estimator, "model_"):
        return repr(sorted(state.items()))
    if isinstance(estimator.draws, int) and estimator.draws < 1000:
        estimator.predict(np.ones((2, estimator.n_features_in_)))
    return repr(sorted(state.items())), dict(estimator._tensors())


def _unpickle(path: Path) -> Any:
    """What unpickling itself refuses never reaches the library."""
    reached: list[Any] = []
    ours: list[Exception] = []
    original = BayesianMLPClassifier.__setstate__

    def noted(self: Any, state: Any) -> None:
        reached.append(state)
        try:
            original(self, state)
        except Exception as error:
            ours.append(error)
            raise

    BayesianMLPClassifier.__setstate__ = noted  # type: ignore[method-assign]
    try:
        found = pickle.loads(path.read_bytes())
    except Exception as error:
        if ours:
            raise ours[0] from None
        raise ValueError("The 'pickle' parameter of pickle must be whole. Got another instead.") from error
    finally:
        BayesianMLPClassifier.__setstate__ = original  # type: ignore[method-assign]
    if not reached or type(found) is not BayesianMLPClassifier:
        raise ValueError("The 'pickle' parameter of pickle must be an estimator. Got another instead.")
    return _said(found)


def _show(path: Path) -> Any:
    with redirect_stdout(io.StringIO()) as shown:
        show.command(path, json=True)
        show.command(path, json=False)
    return re.sub(r"\d[\d.,]* (bytes|kB)|\"bytes\": \d+", "", shown.getvalue())


SUBJECTS: dict[str, Subject] = {
    "model": Subject(lambda path: bbb.save(_model(), path), _read_model),
    "model of heads": Subject(_write_heads, _read_heads),
    "sparse network": Subject(_write_sparse, _read_sparse),
    "checkpoint": Subject(lambda path: _run(path, 2), lambda path: _run(path, 3)),
    "best": Subject(lambda path: _run(path, 2, Best), _read_best),
    **{f"agent, {name}": Subject(lambda path, name=name: _write_agent(name, path), _read_agent) for name in _AGENTS},
    "simulation": Subject(lambda path: _simulate(path, 5), lambda path: _simulate(path, 6)),
    "classifier": Subject(
        lambda path: _estimator(BayesianMLPClassifier).save(path), lambda path: _said(BayesianMLPClassifier.load(path))
    ),
    "regressor": Subject(
        lambda path: _estimator(BayesianMLPRegressor).save(path), lambda path: _said(BayesianMLPRegressor.load(path))
    ),
    "pickle": Subject(lambda path: path.write_bytes(pickle.dumps(_estimator(BayesianMLPClassifier))), _unpickle),
    "shown": Subject(lambda path: bbb.save(_model(), path), _show),
}


# --- how files are mangled -------------------------------------------------------------------------------------------


class Mangled(NamedTuple):
    """A mangled file; ``anew`` if it was written anew, so that its contents are what they say."""

    data: bytes
    anew: bool
    how: str


_ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 0.5, -0.5, 1e308, -1e308, 1e-320, math.nan, math.inf, -math.inf,
    2**31, 2**53, 2**63, 2**64, 10**9, 10**400, "", "x", "1", "nan", "NaN", "\0", "é" * 50, "x" * 100_000,
    [], {}, [[]], [None], [1, 2, 3], [0] * 10_000, json.loads("[" * 60 + "]" * 60), {"a": 1},
    {"kind": "own", "name": "x"}, {"kind": "Normal", "sigma": math.nan}, {"array": "<U400000000", "values": ["a"]},
    {"array": "V999999999", "values": [0]},
]  # fmt: skip
_TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool]


def mutations(data: bytes, seed: int, count: int) -> Iterator[Mangled]:
    """So many mangled versions of a good file, a pure function of the seed."""
    random = generators.Random(seed)
    for _ in range(count):
        yield mangle(data, random)


def mangle(data: bytes, random: generators.Random) -> Mangled:
    """One mangled version of a file."""
    if data[8:9] != b"{":  # a pickle
        return _pickled(data, random) if random.random() < 0.4 else Mangled(*_damaged(data, random))
    choice = random.random()
    if choice < 0.4:
        return Mangled(*_damaged(data, random))
    if choice < 0.5:
        return _reworded(data, random)
    header, tensors = _parts(data)
    hows = [_changed(header, tensors, random) for _ in range(random.choice([1, 1, 1, 2, 5]))]
    old = random.random() < 0.3
    if old:  # a format without a checksum
        header["format"] = 2
    try:
        made = _joined(header, tensors, old)
    except Exception as error:  # which cannot be written at all
        return Mangled(b"", False, f"cannot be written: {error}")
    if old and random.random() < 0.3:
        made, _, how = _damaged(made, random)
        hows.append(how)
    return Mangled(made, True, "; ".join(hows))


def _parts(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(json.loads(data[8:end])["__metadata__"][_KEY])
    header.pop("checksum")
    return header, safetensors.torch.load(data)


def _joined(header: Mapping[str, Any], tensors: Mapping[str, Tensor], old: bool) -> bytes:
    text = json.dumps(header)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = text if old or not text.endswith("}") else sealed(text[:-1], contiguous)
    return safetensors.torch.save(contiguous, metadata={_KEY: text})


def _damaged(data: bytes, random: generators.Random) -> tuple[bytes, bool, str]:
    """Bytes that have changed, without knowledge of what they mean."""
    place = random.randrange(len(data))
    kind = random.choice(
        ["flip", "flip", "flip", "flips", "cut", "add", "insert", "delete", "zero", "repeat", "length", "nan"]
    )
    found = bytearray(data)
    if kind == "flip":
        found[place] ^= 1 << random.randrange(8)
    elif kind == "flips":
        for _ in range(random.randrange(2, 30)):
            found[random.randrange(len(found))] ^= 1 << random.randrange(8)
    elif kind == "cut":
        del found[place:]
    elif kind == "add":
        found += bytes(random.randrange(256) for _ in range(random.randrange(1, 50)))
    elif kind == "insert":
        found[place:place] = bytes(random.randrange(256) for _ in range(random.randrange(1, 20)))
    elif kind == "delete":
        del found[place : place + random.randrange(1, 50)]
    elif kind == "zero":
        found[place : place + 8] = bytes(len(found[place : place + 8]))
    elif kind == "repeat":
        found[place:place] = found[place : place + random.randrange(1, 200)]
    elif kind == "length":
        found[:8] = struct.pack(
            "<Q", random.choice([0, 1, 7, len(data), 2**31, 2**62, 2**64 - 1, random.randrange(2000)])
        )
    else:
        found[-4:] = struct.pack("<f", random.choice([math.nan, math.inf, -math.inf, 1e30, -1.0]))
    return bytes(found), False, f"{kind} at {place}"


def _reworded(data: bytes, random: generators.Random) -> Mangled:
    """Another word in the header of the safetensors file, where nothing is sealed."""
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = data[8:end]
    words = list(re.finditer(rb'\\*"[^"]*"|-?\d+(\.\d+)?(e-?\d+)?|\[|\]|\{|\}|null|true|false', header))
    word = words[random.randrange(len(words))]
    other = [
        b"0", b"-1", b"1", b"2", b"1e999", b"9" * 30, b"[" * 2000, b"{", b"null", b'"F64"', b'"I8"',
        b'"' + b"F" * 10_000 + b'"', b'"bayesbackprop"', b"[0,9223372036854775808]", b"[4294967296,4294967296]",
        words[random.randrange(len(words))].group(),
    ]  # fmt: skip
    header = header[: word.start()] + random.choice(other) + header[word.end() :]
    return Mangled(struct.pack("<Q", len(header)) + header + data[end:], False, f"reworded {word.group()[:40]!r}")


def _changed(header: dict[str, Any], tensors: dict[str, Tensor], random: generators.Random) -> str:
    """Change something in the contents or the tensors, and say what."""
    if not tensors or random.random() < 0.55:
        owner, key = _place(header if random.random() < 0.1 else header.get("contents"), random)
        if owner is None:
            return "nothing"
        what = random.choice(["set", "set", "set", "delete", "add", "near"])
        value = copy.deepcopy(random.choice(_ODD))
        if what == "near" and isinstance(owner[key], int | float) and abs(owner[key]) < 1e15:
            value = owner[key] * random.choice([-1, 2, 10, 1e6]) + random.choice([0, 1, -1])
        if what == "delete":
            del owner[key]
        elif what == "add" and isinstance(owner, dict):
            owner["more"] = value
        else:
            owner[key] = value
        return f"{what} {key!r} {value!r:.40}"
    name = random.choice(sorted(tensors))
    tensor = tensors[name].clone()
    what = random.choice(["number", "number", "drop", "rename", "add", "shape", "type", "empty", "large", "swap"])
    if what == "number" and tensor.numel():
        value = random.choice([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, -1.0, 0.5, 2.0**62, 255.0])
        if not tensor.is_floating_point() and not math.isfinite(value):
            value = -1.0
        tensor.view(-1)[random.randrange(tensor.numel())] = (
            value if tensor.is_floating_point() else int(max(-1e18, min(1e18, value))) % 256
        )
        tensors[name] = tensor
    elif what == "drop":
        del tensors[name]
    elif what == "rename":
        tensors[random.choice(["x", name + "x", name[1:], "", name.replace("0", "7")])] = tensors.pop(name)
    elif what == "add":
        tensors[random.choice(["x", name + ".x", name.replace("0", "1") + "y"])] = tensor
    elif what == "shape":
        tensors[name] = random.choice(
            [tensor.view(-1), tensor[None], tensor.view(-1)[:1], torch.zeros(3, 5), tensor.new_zeros(())]
        )
    elif what == "type":
        tensors[name] = tensor.to(random.choice(_TYPES))
    elif what == "empty":
        tensors[name] = tensor.new_zeros(random.choice([(0,), (0, 10**15), (10**6, 0, 10**6), (0, 0)]))
    elif what == "large":
        tensors[name] = tensor.new_zeros(200_000)
    else:
        tensors[name] = tensors[random.choice(sorted(tensors))].clone()
    return f"{what} {name}"


def _place(value: Any, random: generators.Random) -> tuple[Any, Any]:
    """A random place in nested contents: what holds it, and its key."""
    if not isinstance(value, dict | list) or not value:
        return None, None
    while True:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = random.choice(keys)
        if not isinstance(value[key], dict | list) or not value[key] or random.random() < 0.15:
            return value, key
        value = value[key]


class _Pickled:
    """Is pickled as an estimator with this state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return copyreg._reconstructor, (BayesianMLPClassifier, object, None), self.state  # type: ignore[attr-defined]


def _pickled(data: bytes, random: generators.Random) -> Mangled:
    state = pickle.loads(data).__getstate__()
    if unsummed := random.random() < 0.5:
        del state["_sha256"]
    name, value = random.choice(sorted(state)), copy.deepcopy(random.choice(_ODD))
    if random.random() < 0.3:
        state = random.choice([value, {**state, name: value, "more": value}])
    elif isinstance(state[name], bytes):
        state[name], *_ = _damaged(state[name], random)
    else:
        state[name] = value
    return Mangled(pickle.dumps(_Pickled(state)), unsummed, f"{name} {value!r:.40}")


# --- what becomes of them --------------------------------------------------------------------------------------------


class Fuzzer:
    """Reads mangled files of one kind."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.subject, self.path = SUBJECTS[kind], folder / "file"
        self.subject.write(self.path)
        self.data = self.path.read_bytes()
        self.good = self.subject.read(self.path)

    def classify(self, mangled: Mangled) -> tuple[Outcome, str]:
        """What became of it, and what to say of it."""
        self.path.write_bytes(mangled.data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self.subject.read(self.path)
        except ValueError as error:
            return ("refused" if _FORM.fullmatch(str(error)) else "raw"), f"{mangled.how}: {error!r:.300}"
        except DivergenceError as error:
            return ("refused" if mangled.anew else "wrong"), f"{mangled.how}: {error!r:.300}"
        except TimeoutError:
            return "hung", mangled.how
        except Exception as error:
            return "raw", f"{mangled.how}: {error!r:.300}"
        if _same(found, self.good):
            return "equal", mangled.how
        return ("as written" if mangled.anew and _is_finite(found) else "wrong"), mangled.how


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or not bool(value.isnan().any())
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list | tuple) else True


def _child(kind: str, first: int, count: int) -> None:
    """Classify, and print each outcome: who reads them knows what a crash was caused by."""

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(kind, Path(folder))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
        for seed in range(first, first + count):
            (mangled,) = mutations(fuzzer.data, seed, 1)
            signal.alarm(_PATIENCE)
            outcome, what = fuzzer.classify(mangled)
            signal.alarm(0)
            print(json.dumps([seed, outcome, what if outcome in ("wrong", "raw", "hung") else ""]), flush=True)


def attack(kind: str, count: int, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Read so many mangled files in a child process; gives how many met which end, and what to say of bad ones."""
    ends: Counter[str] = Counter()
    bad: list[str] = []
    seed, end = first, first + count
    while seed < end:
        command = [sys.executable, __file__, "--child", kind, str(seed), str(end - seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                seed, outcome, what = json.loads(line)
                seed += 1
                ends[outcome] += 1
                if what:
                    bad.append(f"{kind}, seed {seed - 1}, {outcome}: {what}")
            errors = process.stderr.read() if process.stderr else ""
        if seed < end:
            ends["crashed"] += 1
            bad.append(f"{kind}, seed {seed}, crashed with {process.returncode}: {errors[-300:]}")
            seed += 1
    return ends, bad


def main() -> int:
    """Attack every kind, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=SUBJECTS, action="append")
    options = parser.parse_args()
    columns = ["refused", "equal", "as written", "wrong", "raw", "hung", "crashed"]
    print(f"{'kind':20}{'tried':>8}" + "".join(f"{name:>12}" for name in columns))
    failed: list[str] = []
    for kind in options.kind or SUBJECTS:
        ends, bad = attack(kind, options.count, options.first)
        print(f"{kind:20}{sum(ends.values()):8}" + "".join(f"{ends[name]:12}" for name in columns), flush=True)
        failed += bad
    print(*failed[:60], sep="\n")
    return bool(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        torch.set_num_threads(1)
        _child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
