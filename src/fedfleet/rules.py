"""The rules behind ``auto``: how clients are computed and how many make a block.

They look at the configuration, the model, the algorithm and the kind of device, never at the number of workers, a clock or a
measurement, so that one configuration means one result. ``docs/performance.md`` checks them against measurements.
"""

from __future__ import annotations

import math

from torch import Tensor

from fedfleet.simulator import tree as T
from fedfleet.simulator.factored import Notes
from fedfleet.simulator.tree import Tree

BATCHED_UP_TO = 65_536
"""Floats of a model above which, on a CPU, many clients' weights no longer stay in the cache and batching loses."""
STEP_FLOP, BLOCK_FLOP = 1e9, 4e9
"""Arithmetic that makes a step of a block outweigh its fixed cost, and a block a task of moderate length."""
SMALLEST_BLOCK, LARGEST_BLOCK = 8, 512


def inner(z: Tree, notes: Notes, device: str) -> str:
    """Return "factored" where at least half of the floats can be, else "batched" on a GPU and for small models, or "serial"."""
    floats = T.count(z)
    if sum(leaf.numel() for path, leaf in T.named_leaves(z) if factors(path, leaf, notes)) * 2 >= floats:
        return "factored"
    return "batched" if device == "cuda" or floats <= BATCHED_UP_TO else "serial"


def factors(path: str, leaf: Tensor, notes: Notes) -> bool:
    """Say whether a leaf is a weight of layers that nothing needs multiplied out."""
    return leaf.dim() in (2, 4) and path not in notes.reasons


def block_size(cohort: int, z: Tree, notes: Notes) -> int:
    """Return the clients a block: enough work for its fixed cost, at least two blocks, their number a power of two."""
    products = max(notes.products.values(), default=0) or T.count(z)
    each = 6 * products  # a multiplication and an addition, forward once and backward twice
    wanted = min(LARGEST_BLOCK, STEP_FLOP / (each * (notes.step_examples or 1)), BLOCK_FLOP / (each * notes.examples))
    blocks = 1 << max(1, math.ceil(math.log2(max(1.0, cohort / max(SMALLEST_BLOCK, wanted)))))
    return math.ceil(cohort / blocks)
