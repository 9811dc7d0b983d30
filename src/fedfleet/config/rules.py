"""The rules behind ``auto``: how clients are computed and how many make a block.

They look at the configuration, the model, the algorithm and the kind of device, never at the number of workers, a clock or a
measurement, so that one configuration means one result. ``python -m benchmarks.rules`` checks them against measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.arithmetic.tree import Tree

BATCHED_UP_TO = 65_536
"""Floats of a model above which, on a CPU, many clients' weights no longer stay in the cache and batching loses."""


FEW_STEPS = 2
"""Local steps up to which convolutions gain by what clients still share."""


class Sizes(NamedTuple):
    """What blocks are made of on a kind of device.

    Attributes:
        idle_flop: arithmetic of a step that takes no longer than its fixed cost.
        step_flop: arithmetic that makes a step of a block outweigh its fixed cost.
        block_flop: arithmetic that makes a block a task of moderate length.
        smallest, largest: clients a block, but for small cohorts.

    """

    idle_flop: float
    step_flop: float
    block_flop: float
    smallest: int
    largest: int


SIZES = {"cpu": Sizes(2e7, 1e9, 4e9, 8, 512), "cuda": Sizes(1e11, 1e11, 1e12, 64, 4096)}
"""A GPU does about a hundred times the arithmetic of a core at the same fixed cost a step, and cuts no cohort that it does not
have to: blocks one after the other take longer there than one (`python -m benchmarks.gpu`)."""


STEP_S, FLOP_S = 2e-3, 1e10
"""What a local step of a block takes at the least, and what a core computes in a second: rough, and without effect on a result."""
SMALL_S = 10.0
"""Seconds in one process up to which a run is over about when Ray has started."""


def small(rounds: int, cohort: int, blocks: int, z: Tree, notes: Callable[[], Notes]) -> bool:
    """Say whether a run takes no longer in one process than with actors that must be started first.

    The notes are asked for only where one example a client would not be too much already.
    """
    if rounds * (blocks * STEP_S + cohort * 6 * T.count(z) / FLOP_S) > SMALL_S:
        return False
    n = notes()
    steps = n.examples / (n.step_examples or 1)
    flop = n.examples * sum(n.flop.values())
    return rounds * (blocks * steps * STEP_S + cohort * flop / FLOP_S) <= SMALL_S


def inner(z: Tree, notes: Notes, device: str) -> str:
    """Return "factored" where at least half of the floats can be, else "batched" on a GPU and for small models, or "serial".

    Filters of convolutions are each client's own from its second step on: many steps of a small model are better batched.
    """
    floats, few = T.count(z), notes.examples <= FEW_STEPS * (notes.step_examples or notes.examples)
    kept = [leaf for path, leaf in T.named_leaves(z) if factors(path, leaf, notes)]
    lasting = sum(leaf.numel() for leaf in kept if leaf.dim() == 2 or few or device == "cuda")
    if lasting * 2 < floats and (device == "cuda" or floats <= BATCHED_UP_TO):
        return "batched"
    return "factored" if sum(leaf.numel() for leaf in kept) * 2 >= floats else "serial"


def factors(path: str, leaf: Tensor, notes: Notes) -> bool:
    """Say whether a leaf is a weight of layers that nothing needs multiplied out."""
    return leaf.dim() in (2, 4) and path not in notes.reasons


def block_size(cohort: int, z: Tree, notes: Notes, device: str) -> int:
    """Return the clients a block: enough work for its fixed cost, the number of blocks a power of two.

    A cohort is one block if its step takes no longer than a step's fixed cost; else there are at least two, for two workers.
    """
    products = max(notes.products.values(), default=0) or T.count(z)
    each = 6 * products  # a multiplication and an addition, forward once and backward twice
    s = SIZES[device]
    step = each * (notes.step_examples or 1)
    if cohort <= s.largest and cohort * step <= s.idle_flop:
        return cohort
    wanted = min(s.largest, s.step_flop / step, s.block_flop / (each * notes.examples))
    blocks = 1 << max(1, math.ceil(math.log2(max(1.0, cohort / max(s.smallest, wanted)))))
    return math.ceil(cohort / blocks)
