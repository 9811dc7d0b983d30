"""One client's part of a secure sum: its numbers as integers, and its weight.

Integers are float64. It adds them exactly in any order as long as sums stay below 2^53, and passes on values that are
not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.factored import Factored
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.uplink import alike, moved_by
from fedfleet.simulator.secure import CLIPPED, ROUNDED, WEIGHT, Rounding, Secure


class Encoded(NamedTuple):
    """One client's slots as integers, float64; the numbers and the bits that it sends."""

    send: dict[str, Tree]
    numbers: int
    bits: int


def encoded(secure: Secure, send: Mapping[str, Tree], shared: Mapping[str, Any], examples: Tensor, key: Key) -> Encoded:
    """Return what one client adds to the sum, who has so many ``examples`` () and was sent ``shared``; ``key`` is of its draws."""
    result: dict[str, Tree] = {}
    weight = examples.to(torch.float64).clamp(max=float(secure.weight_bound))
    out = (examples > secure.weight_bound).to(torch.float64) if secure.weighted else torch.zeros_like(weight)
    rounded, nonzero = torch.zeros_like(weight), torch.zeros_like(weight)
    for slot, bound in secure.clip.items():
        origin = shared[slot] if alike(send[slot], shared.get(slot)) else None
        moved, leaves = moved_by(send[slot], origin), []
        share = weight / secure.weight_bound if slot in secure.weighted else None
        for name, leaf in T.named_leaves(moved):
            x = (leaf.multiplied_out() if isinstance(leaf, Factored) else leaf).to(torch.float64)
            out = out + (x.abs() > bound).sum()
            y = x.clamp(-bound, bound) if share is None else x.clamp(-bound, bound) * share
            q = _rounded(y / secure.step(slot), secure.rounding, rng.fold(key, slot, name))
            rounded = rounded + ((x != 0) & (q == 0)).sum()
            nonzero = nonzero + (x != 0).sum()
            leaves.append(q.clamp(-secure.half, secure.half) + x * 0.0)  # what is not finite stays so
        result[slot] = T.unflatten(send[slot], leaves)
    numbers = T.count(result)
    if secure.weighted:
        result[WEIGHT], numbers = weight, numbers + 1
    return Encoded({**result, CLIPPED: out, ROUNDED: torch.stack([rounded, nonzero])}, numbers, secure.bits_of(numbers))


def _rounded(x: Tensor, rounding: Rounding, key: Key) -> Tensor:
    """Return integers; drawn so that their mean is ``x`` if stochastic."""
    if rounding == "nearest":
        return x.round()
    return x.trunc() if rounding == "toward_zero" else (x + rng.uniform(key, tuple(x.shape), torch.float64)).floor()
