"""Three comparisons: a training step, a step of a small network, and a prediction."""

from collections.abc import Sequence

from bayesbackprop_paper.bench.contenders import DROPOUT, OURS, OURS_BY_ADAM, SGD, fully_connected
from bayesbackprop_paper.bench.measuring import Config, memory, predictions, settings, steps
from bayesbackprop_paper.bench.report import Row


def step(config: Config, units: Sequence[int]) -> list[Row]:
    """784-U-U-10 on batches of 128, for each U of ``units``, and its peak memory."""
    batch, contenders = 128, [SGD, DROPOUT, OURS, *config.peers]
    tasks = [fully_connected((784, number, number, 10), config.device) for number in units]
    rows: list[Row] = []
    with settings(config):
        held = [memory(config, task, batch, contenders) for task in tasks]
        for task, extra in zip(tasks, held, strict=True):
            rows += steps(config, task, batch, contenders, warm_up=5, extra=extra)
    return rows


def small(config: Config) -> list[Row]:
    """119-100-100-1 on batches of 64, the network of the paper's bandits, where all is overhead."""
    task = fully_connected((119, 100, 100, 1), config.device)
    with settings(config):
        return steps(config, task, 64, [SGD, DROPOUT, OURS, OURS_BY_ADAM, *config.peers], warm_up=50)


def predict(config: Config, units: int, images: Sequence[int], draws: int) -> list[Row]:
    """The probabilities of ``draws`` networks 784-U-U-10 for some images, beside as many plain passes."""
    task = fully_connected((784, units, units, 10), config.device)
    with settings(config):
        return [row for number in images for row in predictions(config, task, number, draws)]
