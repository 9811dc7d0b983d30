"""Uploads kept whole: Gram matrix, linear combination, and robust aggregates over clients.

Coordinates are visited in tiles, so that beyond the uploads themselves memory stays at ``clients x tile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree

_TILE = 65536


class Stored(NamedTuple):
    """Stacked uploads (leaves (C_b, ...)) and weights (C_b,), in the order of the blocks; S = sum of C_b clients."""

    blocks: tuple[Tree, ...]
    weights: tuple[Tensor, ...]

    @property
    def weight(self) -> Tensor:
        """The clients' weights (S,)."""
        return torch.cat(self.weights)

    def of(self, part: Callable[[Tree], Tree]) -> Stored:
        """Return what ``part`` takes of each upload."""
        return self._replace(blocks=tuple(part(b) for b in self.blocks))

    def stacked(self) -> Tree:
        """Return all uploads in one tree, leaves (S, ...): of small ones."""
        return T.concat(self.blocks)

    def _tiles(self, origin: Tree = None) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(leaf number, (S, <= tile) matrix)`` over all coordinates in order, as differences from ``origin``."""
        start_of = [
            None if origin is None else leaf.flatten()
            for leaf in T.leaves(self.blocks[0] if origin is None else origin)
        ]
        for i, parts in enumerate(zip(*(T.leaves(b) for b in self.blocks), strict=True)):
            flat, zero = [p.reshape(len(p), -1) for p in parts], start_of[i]
            for start in range(0, flat[0].shape[1], _TILE):
                tile = torch.cat([f[:, start : start + _TILE] for f in flat])
                yield i, tile if zero is None else tile.double() - zero[start : start + _TILE].double()

    def _reduce(self, fn: Callable[[Tensor], Tensor], origin: Tree = None) -> Tree:
        """Apply ``fn`` (S, n) -> (n,) tile by tile and return a tree of one client's shape."""
        found: dict[int, list[Tensor]] = {}
        for i, tile in self._tiles(origin):
            found.setdefault(i, []).append(fn(tile))
        shapes = [leaf.shape[1:] for leaf in T.leaves(self.blocks[0])]
        return T.unflatten(self.blocks[0], [torch.cat(found[i]).reshape(s) for i, s in enumerate(shapes)])

    def gram(self, origin: Tree = None) -> Tensor:
        """Return the inner products of all pairs of uploads, or of their differences from ``origin``, float64 (S, S)."""
        size = len(self.weight)
        total = torch.zeros(size, size, dtype=torch.float64)
        for _, tile in self._tiles(origin):
            total += tile.double() @ tile.double().T
        return total

    def combine(self, weights: Tensor, origin: Tree = None) -> Tree:
        """Return the linear combination of the uploads, or of their differences from ``origin``, with weights (S,)."""
        found = self._reduce(lambda v: weights.to(v.dtype) @ v, origin)
        return found if origin is None else T.map(lambda v, like: v.to(like.dtype), found, origin)

    def mean(self) -> Tree:
        """Return the weighted mean. Raises ValueError where all weights are zero."""
        total = self.weight.sum()
        if float(total) == 0.0:
            raise ValueError("the weights of all heard clients are zero, so their mean does not exist")
        return self.combine(self.weight / total)

    def median(self) -> Tree:
        """Return the coordinate-wise median, the mean of the two middle values for an even number (Yin et al. 2018)."""

        def middle(v: Tensor) -> Tensor:
            ordered = v.sort(0).values
            return (ordered[(len(v) - 1) // 2] + ordered[len(v) // 2]) / 2

        return self._reduce(middle)

    def trimmed_mean(self, trim: float) -> Tree:
        """Return the coordinate-wise mean without the floor(trim * S) largest and smallest (Yin et al. 2018).

        Raises ValueError unless 0 <= trim < 1/2.
        """
        if not 0 <= trim < 0.5:
            raise ValueError(f"trim={trim}: the share cut on each side must be at least 0 and below 0.5")
        size = len(self.weight)
        cut = min(int(trim * size + 1e-9), (size - 1) // 2)  # 0.29 * 100 is a little less than 29
        return self._reduce(lambda v: v.sort(0).values[cut : len(v) - cut].mean(0))

    def krum(self, byzantine: int, keep: int = 1) -> Tree:
        """Return the mean of the ``keep`` uploads of lowest Krum score (Blanchard et al. 2017; keep > 1 is Multi-Krum).

        A score is the sum of squared distances to the S - byzantine - 2 nearest others. Raises ValueError if that is < 1.
        """
        size = len(self.weight)
        near = size - byzantine - 2
        if near < 1 or not 1 <= keep <= size:
            raise ValueError(
                f"krum: {size} uploads with byzantine={byzantine}, keep={keep}: it needs byzantine <= {size - 3} and "
                f"1 <= keep <= {size}"
            )
        gram = self.gram()
        squared = gram.diagonal()[:, None] + gram.diagonal()[None] - 2 * gram
        squared.fill_diagonal_(torch.inf)
        score = squared.sort(1).values[:, :near].sum(1)
        chosen = torch.zeros(size, dtype=torch.float64)
        chosen[score.argsort(stable=True)[:keep]] = 1.0 / keep
        return self.combine(chosen)
