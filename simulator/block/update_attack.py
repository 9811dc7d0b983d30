"""Update attacks: what attackers send instead of what they computed, before any transform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.uplink import alike, compressible, moved_by
from fedfleet.simulator.work import Forgery


def forged(
    forgery: Forgery, send: Mapping[str, Tree], shared: Mapping[str, Any], forges: Tensor, key: Key
) -> dict[str, Tree]:
    """Return what one client sends: what it has computed to the bit, unless it ``forges``, a zero-dimensional bool.

    What is forged of a slot is its floats but for a model's buffers, as what it moved by where it is a model, as on the way
    through transforms. A slot that is one number, a weight, a count or a loss, is told truly: a server divides by some, and of a
    quotient of two numbers that are turned nothing is.
    """
    came = {}
    for slot, tree in send.items():
        if isinstance(tree, Tensor) and not tree.dim():
            came[slot] = tree
            continue
        origin = shared[slot] if alike(tree, shared.get(slot)) else None
        start = dict(T.named_leaves(origin))
        others = forgery.forged(compressible(moved_by(tree, origin)), rng.fold(key, slot))
        leaves = []
        for name, leaf in T.named_leaves(tree):
            if name not in others:
                leaves.append(leaf)
                continue
            other = start[name] + others[name] if start else others[name]
            leaves.append(torch.where(forges, other, leaf))
        came[slot] = T.unflatten(tree, leaves)
    return came
