"""Throughput of actors, which decides who gets the next block where some are faster than others.

A block is not given to a slow actor that would end it after the fast ones have done all that waits, or a round would end with the
others idle. Who computes a block changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

ALIKE = 1.5  # paces whose ratio is below this are taken for equal, since blocks differ too
LAST = 0.5  # what the last block counts in a pace, beside those before
FORGET = (
    0.03  # of what an actor is slower than the fastest, a phase without a block: one that was slow once is tried again
)


class Worker(NamedTuple):
    """An actor's blocks at hand, and its pace: the seconds it takes a client, None before its first block."""

    load: int
    pace: float | None = None


def choose(workers: Sequence[Worker], most: int, waiting: int) -> int | None:
    """Return the number of the worker that ends one more block first, of those with fewer than ``most`` at hand.

    None where all are full, or where the full ones end all ``waiting`` blocks before it would end one. A worker of unknown pace is
    taken to be as fast as the fastest.
    """
    free = [i for i, w in enumerate(workers) if w.load < most]
    if not free:
        return None
    known = [w.pace for w in workers if w.pace]
    if not known or max(known) < ALIKE * min(known):
        return min(free, key=lambda i: workers[i].load)
    least = min(known)
    pace = [w.pace or least for w in workers]
    ends = {i: (workers[i].load + 1) * pace[i] for i in free}
    result = min(free, key=ends.__getitem__)
    full = ((w.load, p) for w, p in zip(workers, pace, strict=True) if w.load >= most)
    before = sum(max(0, math.ceil(ends[result] / p) - 1 - load) for load, p in full)
    return None if before >= waiting else result


def paced(pace: float | None, seconds: float, clients: int) -> float:
    """Return an actor's new pace, after it took so long for so many clients."""
    each = seconds / max(1, clients)
    return each if pace is None else (1 - LAST) * pace + LAST * each


def forgotten(pace: float, least: float) -> float:
    """Return the pace to go by of an actor that had no block for a phase, beside the least of all."""
    return pace + FORGET * (least - pace)
