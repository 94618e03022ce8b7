"""Every kernel in C at every edge, without torch: ``python kernel_edges.py <extension> <results>``.

Blocks have 256 elements and chunks 8192; noise comes in groups of 32. Kernels run over one parameter at a time and over
all of them in several threads. A build with sanitizers stops at the first access outside of an array; the results of
two builds can be compared.
"""

import importlib.util
import itertools
import struct
import sys
from typing import Any

import numpy as np

SIZES = [0, 1, 31, 32, 33, 255, 256, 257, 8193]
CHUNKS = [8191, 8192, 8193]  # their ends are the same for all priors: the first has them all
TYPES = [np.float32, np.float64]
SEED, STEP, DRAW, MANY = 2**40 + 7, 2**31 + 5, 2**32 - 2, 3  # the counter of the draws wraps around
PRIORS = {
    "NONE": (0, 0, 0),
    "NORMAL": (0.3, 0, 0),
    "MIXTURE": (0.25, 1.0, 0.1),
    "LAPLACE": (0.2, 0, 0),
    "NORMAL_KL": (0.3, 0, 0),
    "LAPLACE_KL": (0.2, 0, 0),
}
# Whether there is all that may be left out (a centre, gradients of means and variances, slopes of a prior, deviations
# in place of weights), and which weights are constant.
FORMS = [(False, "none"), (True, "some"), (True, "none"), (False, "all")]
POINTERS = ["mu", "rho", "centre", "w", "gw", "gm", "gv", "slope", "gmu", "grho"]
MOMENTS = ["mu_m", "mu_v", "rho_m", "rho_v"]
# Of the layers: batches and widths around the vectors and the rows of a tile.
BATCHES = [1, 2, 5, 6, 7, 13]
WIDTHS = [(1, 1), (3, 4, 2), (17, 16, 33, 1), (15, 9, 2)]
ADAM = {"rate": 0.01, "scale": 1.5, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "keep": 0.9}
Array = np.ndarray[Any, Any]


def sizes_of(kind: str) -> list[int]:
    return [*SIZES[:-1], *CHUNKS] if kind == next(iter(PRIORS)) else SIZES


def extension(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def memory(n: int, dtype: Any, many: int = 1) -> Array:
    """Room for the numbers that is not aligned for vectors, and ends where they end."""
    return np.full(many * n + 1, np.nan, dtype)[1:]


def parameter(n: int, dtype: Any, kind: str, full: bool, constants: str) -> dict[str, Any]:
    """One parameter with all that a kernel reads and writes."""
    generator = np.random.default_rng(n)
    arrays = {name: memory(n, dtype) for name in [*POINTERS, *MOMENTS]}
    for name in ("mu", "centre", "gw", "gm", "gv", "slope"):
        arrays[name][:] = generator.standard_normal(n)
    arrays["rho"][:] = generator.uniform(-7, 3, n)
    arrays["rho"][{"none": slice(0, 0), "some": slice(0, None, 3), "all": slice(None)}[constants]] = -1e30
    for name in MOMENTS:
        arrays[name][:] = generator.uniform(0.1, 1, n)
    if not full:
        del arrays["centre"], arrays["gm"], arrays["gv"], arrays["slope"]
    numbers = {f"{of}_{name}": value for of in ("mu", "rho") for name, value in ADAM.items()}
    numbers |= {f"{of}_step": np.zeros(1, np.float32) for of in ("mu", "rho")}
    return {
        "n": n,
        "wide": dtype is np.float64,
        "kind": kind,
        "stream": 4 * n + 1,
        "deviates": full,
        **arrays,
        **numbers,
    }


def table(cpu: Any, parameters: list[dict[str, Any]]) -> bytearray:
    rows = bytearray()
    for given in parameters:
        known = dict(zip("abc", PRIORS[given["kind"]], strict=True)) | {"kind": cpu.PRIORS.split().index(given["kind"])}
        for field in cpu.FIELDS.split():
            name, letter = field.split(":")
            value = known.get(name, given.get(name, 0))
            rows += struct.pack("=" + letter, value.ctypes.data if isinstance(value, np.ndarray) else value)
    return rows


def run(cpu: Any, parameters: list[dict[str, Any]], threads: int) -> dict[str, list[Array]]:
    """What every kernel makes of the parameters."""
    results: dict[str, list[Array]] = {}

    def call(kernel: str, own: float, outputs: list[str], case: str = "") -> None:
        number = getattr(cpu, kernel)(table(cpu, parameters), threads, SEED, STEP, DRAW, own)
        arrays = [given[name].copy() for given in parameters for name in outputs]
        results[case or kernel] = [np.array([number]), *arrays]

    inputs = ("gw", "gm", "gv", "slope")
    first = [given | {name: given[name].copy() for name in inputs if name in given} for given in parameters]
    call("draw", 0.0, ["w"])
    call("backward", 0.7, ["gmu", "grho"])
    for given in parameters:  # the gradients of mu may overwrite those of w
        given["gmu"] = given["gw"]
    call("backward", -0.7, ["gmu", "grho"])
    for before, case in enumerate(("redraw", "again")):  # two more draws, of which the second is the last
        for given in parameters:
            given |= {"before": before, "deviates": False, "gm": 0, "gv": 0, "slope": 0}
        call("redraw", 0.7, ["w", "gmu", "grho"], case)
    call("backward", 0.7, ["gmu", "grho"], "last")
    call("variance", 0.0, ["w"])
    call("signs", 0.0, ["w"])
    for given in parameters:
        given["w"] = memory(given["n"], given["w"].dtype, MANY)
    call("normal", MANY, ["w"])
    call("draws", MANY, ["w"])
    for given, before in zip(parameters, first, strict=True):  # else the rounding of all calls comes together
        given["gw"][:] = given["gmu"][:] = before["gw"]
        given |= {name: before.get(name, 0) for name in ("before", "deviates", "gm", "gv", "slope")}
    call("adam", 0.0, ["mu", "mu_m", "mu_v", "mu_step"])
    call("backward_adam", 0.7, ["mu", "rho", *MOMENTS, "mu_step", "rho_step"])
    call("ivon", 0.02, ["mu", "rho", "mu_m"])
    return results


def row(fields: str, given: dict[str, Any]) -> bytes:
    parts = bytearray()
    for field in fields.split():
        name, letter = field.split(":")
        value = given.get(name, 0)
        parts += struct.pack("=" + letter, value.ctypes.data if isinstance(value, np.ndarray) else value)
    return bytes(parts)


def run_layers(cpu: Any, dtype: Any, batch: int, widths: tuple[int, ...], function: str, bias: bool) -> list[Array]:
    """Layers of these widths, forward and back."""
    generator = np.random.default_rng(batch)
    wide, places = dtype is np.float64, dict[str, Array]()

    def made(name: str, *shape: int) -> Array:
        places[name] = memory(int(np.prod(shape)), dtype)
        places[name][:] = generator.standard_normal(places[name].size)
        return places[name]

    rows, x, gx = bytearray(), made("x", batch, widths[0]), made("gx", batch, widths[0])
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        given = {"inputs": inputs, "outputs": outputs, "function": cpu.FUNCTIONS.split().index(function), "x": x}
        given |= {"gx": gx} if number else {}  # of the first it is not wanted
        x, gx = made(f"y{number}", batch, outputs), made(f"gy{number}", batch, outputs)
        given |= {
            "w": made(f"w{number}", outputs, inputs),
            "gw": made(f"gw{number}", outputs, inputs),
            "y": x,
            "gy": gx,
        }
        given |= {"b": made(f"b{number}", outputs), "gb": made(f"gb{number}", outputs)} if bias else {}
        rows += row(cpu.LAYER, given)
    cpu.layers_forward(rows, batch, wide)
    squares = cpu.layers_backward(rows, batch, wide)
    return [np.array([squares]), *places.values()]


def run_cost(cpu: Any, dtype: Any, batch: int, kind: str, actions: int) -> list[Array]:
    """The cost of a likelihood; of targets that there cannot be it is NaN."""
    generator, columns = np.random.default_rng(batch), 1 if actions else 3
    width = (2 if kind == "GAUSSIAN_PER_INPUT" else 1) * (actions or columns)
    output, slope, targets = memory(batch * width, dtype), memory(batch * width, dtype), []
    output[:] = 3 * generator.standard_normal(output.size)
    for _ in range(batch):
        targets += [float(generator.integers(actions))] if actions else []
        targets += (
            generator.integers(2, size=columns) if kind == "BERNOULLI" else generator.standard_normal(columns)
        ).tolist()
    target = memory(len(targets), dtype)
    target[:] = targets
    given = {"wide": dtype is np.float64, "batch": batch, "width": width, "columns": columns, "actions": actions}
    given |= {
        "kind": cpu.LIKELIHOODS.split().index(kind),
        "number": 0.3,
        "output": output,
        "target": target,
        "slope": slope,
    }
    found = [np.array([cpu.cost(row(cpu.COST, given))]), slope.copy()]
    for wrong in (-1.0, float(actions), np.nan, np.inf) if actions else ():
        target[0] = wrong
        assert np.isnan(cpu.cost(row(cpu.COST, given)))
    return found


def main(path: str, results: str) -> None:
    cpu, found = extension(path), dict[str, Array]()
    for number, (dtype, kind, rest) in enumerate(itertools.product(TYPES, PRIORS, FORMS)):
        form = dtype, kind, *rest
        sizes = sizes_of(kind)
        all_together = [parameter(n, *form) for n in [*sizes, 8193]]  # enough for several threads
        alone = [parameter(n, *form) for n in sizes]
        outputs = {str(given["n"]): run(cpu, [given], 1) for given in alone} | {"all": run(cpu, all_together, 3)}
        for case, kernels in outputs.items():
            for kernel, arrays in kernels.items():
                found[f"{np.dtype(dtype).name} {number} {case} {kernel}"] = np.concatenate(arrays).astype(np.float64)
    for dtype, batch in itertools.product(TYPES, BATCHES):
        for widths, function, bias in itertools.product(WIDTHS, cpu.FUNCTIONS.split(), (True, False)):
            arrays = run_layers(cpu, dtype, batch, widths, function, bias)
            found[f"{np.dtype(dtype).name} {batch} {widths} {function} {bias} layers"] = np.concatenate(arrays).astype(
                np.float64
            )
        for kind, actions in itertools.product(cpu.LIKELIHOODS.split(), (0, 2)):
            arrays = run_cost(cpu, dtype, batch, kind, actions)
            found[f"{np.dtype(dtype).name} {batch} {kind} {actions} cost"] = np.concatenate(arrays).astype(np.float64)
    given = parameter(33, np.float32, "NORMAL", False, "none")  # held: the table has only its addresses
    for bad in (float("nan"), float("inf"), -1e300):  # own: a gradient that is not finite
        cpu.backward(table(cpu, [given]), 1, 0, 0, 0, bad)
    np.savez(results, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
