"""Jobs of the bandit experiment in one process, and regrets as they could come out."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bayesbackprop_paper.experiments import bandit
from bayesbackprop_paper.experiments.bandit import Job, Point


def serial(jobs: Sequence[Job], folder: Path, cores: int, says: Callable[[str, int, float], None]) -> list[Point]:
    """As run_all, without processes."""
    return [point for job in jobs for point in bandit.run(job, folder, says)]


REGRETS = {"epsilon-5": 700.0, "epsilon-1": 650.0, "greedy": 600.0, "bbb": -12.5, "uniform": 3000.0}


def points(steps: Sequence[int] = (100, 200)) -> list[Point]:
    """Regrets that double with the steps; those of the second seed are 10 more."""
    return [
        Point(agent, seed, step, regret * step / steps[-1] + 10 * seed)
        for agent, regret in REGRETS.items()
        for seed in range(2)
        for step in steps
    ]
