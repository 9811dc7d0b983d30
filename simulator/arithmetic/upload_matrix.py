"""Uploads kept whole: Gram matrix, linear combination, and robust aggregates over clients.

Uploads lie in memory, or, where they are large, in a file (``spill.py``). Either way coordinates are visited in tiles,
each read into the same memory, so that beyond the uploads in memory there is one tile of all clients, and what is
computed is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.spill import Spilled, SpillFile, whole
from fedfleet.simulator.arithmetic.tree import Tree

_TILE = 1 << 20  # floats of a tile
_ROWS = 16  # of a Gram matrix at a time
_THREADS = 8  # at the most


class UploadMatrix(NamedTuple):
    """Stacked uploads (leaves (C_b, ...)) and weights (C_b,), in the order of the blocks; S = sum of C_b clients.

    Leaves are tensors, or ``Spilled`` ones: ``stacked`` has all in memory. ``device`` is where tiles are computed, None
    for the CPU. ``beside`` is what a reduction that does more than to keep them has made of them. ``replaced`` and
    ``groups`` say what takes the place of what lies in the blocks, wherever it is read: see the methods of like names;
    ``counts`` what members do in a group.
    """

    blocks: tuple[Tree, ...]
    weights: tuple[Tensor, ...]
    device: torch.device | None = None
    beside: Any = None
    replaced: tuple[Tensor, Tree] | None = None
    groups: tuple[Tensor, ...] | None = None
    counts: tuple[Tensor, ...] = ()

    @property
    def weight(self) -> Tensor:
        """The clients' weights (S,), or the sums of the groups'."""
        each = torch.cat(self.weights)
        return each if self.groups is None else torch.stack([each[g].sum() for g in self.groups])

    def of(self, part: Callable[[Tree], Tree]) -> UploadMatrix:
        """Return the part of each upload that ``part`` picks."""
        other = self.replaced and (self.replaced[0], part(self.replaced[1]))
        return self._replace(blocks=tuple(part(b) for b in self.blocks), replaced=other)

    def replacing(self, rows: Tensor, upload: Tree) -> UploadMatrix:
        """Return the uploads of which some, a mask (S,), are all another one."""
        return self._replace(replaced=(rows, upload))

    def grouped(self, groups: tuple[Tensor, ...], *, weighted: bool = False) -> UploadMatrix:
        """Return the means of groups of the uploads, each the rows of its members, int64: G in the place of S.

        They are plain, or ``weighted`` as clients are, but in a group all of whom weigh nothing.
        """
        each = torch.cat(self.weights).double()
        of_members = [each[g] if weighted and each[g].any() else torch.ones(len(g)).double() for g in groups]
        return self._replace(groups=groups, counts=tuple(w / w.sum() for w in of_members))

    def first(self, clients: int) -> UploadMatrix:
        """Return the first so many uploads of one block, in memory."""
        (block,), (weight,) = self.blocks, self.weights
        return self._replace(blocks=(T.index(block, slice(clients)),), weights=(weight[:clients],))

    def spilled(self, spill: SpillFile) -> UploadMatrix:
        """Return the same uploads, those of large blocks in a file. Raises OSError where the disk is full."""
        return self._replace(blocks=tuple(spill.keep(b) for b in self.blocks))

    def stacked(self) -> Tree:
        """Return all uploads in memory, as one tree with leaves (S, ...)."""
        result = T.concat([T.map(whole, b) for b in self.blocks])
        if self.replaced is not None:
            rows, upload = self.replaced
            result = T.map(lambda v, other: torch.where(T.column(rows, v), other, v), result, upload)
        return result if self.groups is None else T.map(self._grouped, result)

    def _grouped(self, v: Tensor) -> Tensor:
        if self.groups is None:
            return v
        return torch.stack(
            [(T.column(n, v[g]).to(v) * v[g]).sum(0) for g, n in zip(self.groups, self.counts, strict=True)]
        )

    def tiles(self, origin: Tree = None) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield ``(leaf number, coordinates, (S, n) matrix)`` over all coordinates in order; a matrix is there until the next.

        Given an ``origin``, matrices are differences from it, in float64.
        """
        with _threads() as pool:
            yield from self._tiles(pool, origin)

    def _tiles(self, pool: Executor, origin: Tree = None) -> Iterator[tuple[int, slice, Tensor]]:
        size = sum(map(len, self.weights))
        width = max(1, _TILE // size)
        others = None if self.replaced is None else [leaf.flatten() for leaf in T.leaves(self.replaced[1])]
        zeros = None if origin is None else [leaf.flatten() for leaf in T.leaves(origin)]
        for i, parts in enumerate(zip(*(T.leaves(b) for b in self.blocks), strict=True)):
            count, sizes = parts[0].shape[1:].numel(), [len(p) for p in parts]
            room = torch.empty(size * min(width, count), dtype=parts[0].dtype)
            wide = room if zeros is None else torch.empty(len(room), dtype=torch.float64)
            for start in range(0, max(1, count), width):
                here = slice(start, min(start + width, count))
                length = here.stop - start
                tile, result = (r[: size * length].view(size, length) for r in (room, wide))
                fill = partial(_fill, here, None if zeros is None else zeros[i][here].double())
                list(pool.map(fill, parts, tile.split(sizes), result.split(sizes)))
                if self.replaced is not None and others is not None:
                    other = others[i][here].to(result.dtype)
                    result[self.replaced[0]] = other if zeros is None else other - zeros[i][here].double()
                yield i, here, self._grouped(result).to(self.device or "cpu")

    def reduce(self, fn: Callable[[Tensor], Tensor], origin: Tree = None) -> Tree:
        """Apply ``fn`` (S, n) -> (n,) tile by tile and return a tree of one client's shape, in the types of ``origin``."""
        shapes = [leaf.shape[1:] for leaf in T.leaves(self.blocks[0])]
        types = [None] * len(shapes) if origin is None else [leaf.dtype for leaf in T.leaves(origin)]
        result: list[Tensor | None] = [None] * len(shapes)
        with _threads() as pool:
            for i, here, tile in self._tiles(pool, origin):
                value = fn(tile)
                room = result[i]
                if room is None:
                    room = result[i] = torch.empty(shapes[i].numel(), dtype=types[i] or value.dtype)
                room[here] = value.to("cpu")
        return T.unflatten(self.blocks[0], [v.view(s) for v, s in zip(result, shapes, strict=True) if v is not None])

    def gram(self, origin: Tree = None) -> Tensor:
        """Return the inner products of all pairs of uploads, or of their differences from ``origin``, float64 (S, S)."""
        size = len(self.weight)
        total = torch.zeros(size, size, dtype=torch.float64, device=self.device)
        with _threads() as pool:
            for _, _, tile in self._tiles(pool, origin):
                # It is symmetric: only what is left of the diagonal, the longest rows first.
                list(pool.map(partial(_add_products, total, tile.double()), range(0, size, _ROWS)[::-1]))
        return (total.tril() + total.tril(-1).T).to("cpu")

    def norms(self, origin: Tree = None) -> Tensor:
        """Return the Euclidean norm of each upload, or of its difference from ``origin``, float64 (S,)."""
        squares = (tile.double().square().sum(1) for _, _, tile in self.tiles(origin))
        return sum(squares, torch.zeros(len(self.weight), dtype=torch.float64, device=self.device)).sqrt().to("cpu")

    def products(self, other: Tree, origin: Tree = None) -> Tensor:
        """Return the inner product of each upload, or of its difference from ``origin``, with another tree, float64 (S,)."""
        flat = [leaf.flatten().double() for leaf in T.leaves(other)]
        each = (tile.double() @ flat[i][here].to(tile.device) for i, here, tile in self.tiles(origin))
        return sum(each, torch.zeros(len(self.weight), dtype=torch.float64, device=self.device)).to("cpu")

    def combine(self, weights: Tensor, origin: Tree = None) -> Tree:
        """Return the linear combination of the uploads, or of their differences from ``origin``, with weights (S,).

        An upload of weight 0 is left out, also where it is infinite or NaN.
        """

        def total(v: Tensor) -> Tensor:
            of = weights.to(v)
            result = of @ v
            if bool(result.isfinite().all()):
                return result
            return of @ v.masked_fill((of == 0)[:, None], 0.0)  # 0 * inf is NaN

        return self.reduce(total, origin)

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

        return self.reduce(middle)

    def trimmed_mean(self, trim: float) -> Tree:
        """Return the coordinate-wise mean without the floor(trim * S) largest and smallest (Yin et al. 2018).

        Raises ValueError unless 0 <= trim < 1/2.
        """
        if not 0 <= trim < 0.5:
            raise ValueError(f"trim={trim}: the share cut on each side must be at least 0 and below 0.5")
        size = len(self.weight)
        cut = min(int(trim * size + 1e-9), (size - 1) // 2)  # 0.29 * 100 is a little less than 29
        return self.reduce(lambda v: v.sort(0).values[cut : len(v) - cut].mean(0))

    def krum(self, byzantine: int, keep: int = 1) -> Tree:
        """Return the mean of the ``keep`` uploads of lowest Krum score (Blanchard et al. 2017; keep > 1 is Multi-Krum).

        Raises ValueError for too few uploads, as ``krum_shares``.
        """
        return self.combine(krum_shares(self.gram(), byzantine, keep))


def krum_shares(gram: Tensor, byzantine: int, keep: int = 1) -> Tensor:
    """Return what each of S uploads counts (S,): 1/keep for those of lowest Krum score, by the inner products (S, S).

    A score is the sum of squared distances to the S - byzantine - 2 nearest others. Raises ValueError if that is < 1.
    """
    size = len(gram)
    near = size - byzantine - 2
    if near < 1 or not 1 <= keep <= size:
        raise ValueError(
            f"krum: {size} uploads with byzantine={byzantine}, keep={keep}: it needs byzantine <= {size - 3} and "
            f"1 <= keep <= {size}"
        )
    squared = gram.diagonal()[:, None] + gram.diagonal()[None] - 2 * gram
    squared.fill_diagonal_(torch.inf)
    score = squared.sort(1).values[:, :near].sum(1)
    chosen = torch.zeros(size, dtype=torch.float64)
    chosen[score.argsort(stable=True)[:keep]] = 1.0 / keep
    return chosen


def _threads() -> Executor:
    """Return threads for one pass; how many there are changes no bit, since each computes rows of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ThreadPoolExecutor(min(cores or 1, _THREADS))


def _fill(here: slice, zero: Tensor | None, part: Tensor | Spilled, rows: Tensor, result: Tensor) -> None:
    """Copy coordinates of a block to ``rows`` (C, n), and the difference from ``zero`` (n,), if there is one, to ``found``."""
    if isinstance(part, Spilled):
        part.rows(rows, here.start)
    else:
        rows.copy_(part.reshape(len(part), -1)[:, here])
    if zero is not None:
        result.copy_(rows).sub_(zero)


def _add_products(total: Tensor, rows: Tensor, start: int) -> None:
    """Add to some rows of a Gram matrix (S, S) the products of ``rows`` (S, n), as far as the diagonal."""
    stop = start + _ROWS
    total[start:stop, :stop] += rows[start:stop] @ rows[:stop].T
