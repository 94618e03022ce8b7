"""Ranks, the processes that train one model together: which one this is, sums over all, and an end that they share."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist

from bayesbackprop._signals import ENDINGS, interrupt_deferred


def rank_of_ranks() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def over_ranks(values: Sequence[float]) -> Sequence[float]:
    """The sums over all ranks; all wait for the last."""
    if rank_of_ranks() == (0, 1):
        return values
    device = "cpu" if dist.get_backend() == "gloo" else torch.get_device_module().current_device()
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return cast(list[float], sums.tolist())


@contextmanager
def ending_together() -> Iterator[Callable[[], int]]:
    """As :func:`interrupt_deferred`, but the function given answers the signal that any rank got, and waits for all.

    After it no rank goes on to read what another still writes, and a signal that one of them got ends all.
    """
    with interrupt_deferred() as interrupted:

        def signal_of_any() -> int:
            number = interrupted()
            counts = over_ranks([number == each for each in ENDINGS])
            return next((each for each, count in zip(ENDINGS, counts, strict=True) if count), 0)

        yield signal_of_any
        if number := signal_of_any():
            raise ENDINGS[number]


@contextmanager
def distributed() -> Iterator[None]:
    """Within it, a process that ``torchrun`` started belongs to its group; any other runs alone."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        yield
        return
    store, rank, ranks = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    # After a restart torchrun's store still has the addresses of the ranks that are gone, and a quick rank would take
    # one for that of its neighbour. On several machines the counts of restarts differ, so there it must be as it is.
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        attempt = f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
