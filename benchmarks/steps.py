"""The cost of a training step and of a prediction, in plain steps and passes of the same network.

All ratios come from one run, interleaved, so that a busy machine slows every column alike. Prints Markdown.
"""

import platform
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

import bayesbackprop as bbb

ROUNDS = 40
WARM_UP = 5
PRIOR = bbb.ScaleMixture(pi=0.25, sigma1=0.37, sigma2=0.001)


def mlp(sizes: list[int], dropout: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        layers += [nn.Dropout(0.5 if number else 0.2)] if dropout else []
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def step(cost: Callable[[], object], parameters: object) -> Callable[[], None]:
    optimiser = torch.optim.SGD(parameters, lr=1e-5)  # type: ignore[arg-type]

    def run() -> None:
        optimiser.zero_grad()
        cost().backward()  # type: ignore[attr-defined]
        optimiser.step()

    return run


def interleaved(runs: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """The median time of each, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + WARM_UP):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def training(sizes: list[int], batch: int, threads: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    x = torch.rand(batch, sizes[0])
    classes = sizes[-1] > 1
    y = torch.randint(sizes[-1], (batch,)) if classes else torch.randn(batch, 1)
    loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
    plain, dropout = mlp(sizes), mlp(sizes, dropout=True)
    model = bbb.Bayesian(mlp(sizes), bbb.Categorical() if classes else bbb.Gaussian(1.0), PRIOR)
    free_energy = bbb.FreeEnergy(model, n=50_000)
    return interleaved(
        {
            "sgd": step(lambda: loss(plain(x), y), plain.parameters()),
            "dropout": step(lambda: loss(dropout(x), y), dropout.parameters()),
            "bayesbackprop": step(lambda: free_energy(x, y), model.parameters()),
        },
        rounds,
    )


def predicting(images: int) -> dict[str, float]:
    torch.set_num_threads(2)
    x = torch.rand(images, 784)
    net = mlp([784, 1200, 1200, 10])
    model = bbb.Bayesian(net, bbb.Categorical(), PRIOR)
    ensemble = model.ensemble(100)

    def passes() -> None:
        with torch.no_grad():
            for _ in range(100):
                net(x)

    return interleaved(
        {
            "passes": passes,
            "shared": lambda: model.predict(x, draws=100),
            "local": lambda: model.predict(x, draws=100, estimator="local"),
            "kept": lambda: ensemble.predict(x),
        },
        rounds=5,
    )


def main() -> None:
    print(f"`make bench`, torch {torch.__version__}, {platform.machine()}; medians; one draw, sampled mixture prior\n")
    print("| network | batch | threads | SGD step | of SGD | of dropout |\n|---|---|---|---|---|---|")
    cases = [([784, u, u, 10], 128, 2, ROUNDS) for u in (400, 1200, 2400)] + [([119, 100, 100, 1], 64, 1, 500)]
    for sizes, batch, threads, rounds in cases:
        times = training(sizes, batch, threads, rounds)
        ratios = [f"{times['bayesbackprop'] / times[name]:.2f}" for name in ("sgd", "dropout")]
        cells = ["-".join(map(str, sizes)), batch, threads, f"{times['sgd'] * 1e3:.2f} ms", *ratios]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print(
        "\n| 100 draws of 784-1200-1200-10 for | 100 passes | shared | local | kept ensemble |\n|---|---|---|---|---|"
    )
    for images in (1, 128, 1000):
        times = predicting(images)
        cells = [f"{times[name] * 1e3:.0f} ms" for name in ("passes", "shared", "local", "kept")]
        print(f"| {images} inputs | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
