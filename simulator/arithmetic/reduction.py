"""Reductions make one value of clients' messages: declared by the phase, summed in blocks, merged by the driver.

``block`` turns the stacked uploads of one block into a partial result, ``merge`` adds two partials in block order,
and ``final`` ends it. The order in which blocks are added depends on their numbers alone (``Merging``), not on who
adds them. So the bits do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.combination import Combination, multiplied_out
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix


class Rows(NamedTuple):
    """What is known of a block's clients: weight (C,) float64, domain (C,) int64, and unit (C,) float64, the weight where none
    is asked for: 1, less for late updates, or what the server says. Both weights are 0 of rows that only fill a block
    (``Filling``).
    """

    weight: Tensor
    domain: Tensor
    unit: Tensor


class Reduction(Protocol):
    """Associative once partials are taken in block order; a partial of None is neutral.

    A partial is a tree of tensors. Under ``inner: factored`` uploads may hold combinations: whoever does more with them than a
    weighted sum takes ``multiplied_out`` of them first.
    """

    def block(self, values: Tree, rows: Rows) -> Any:
        """Reduce stacked uploads (leaves (C, ...), or combinations) of one block."""
        ...

    def merge(self, a: Any, b: Any) -> Any:
        """Add two partials, ``a`` from the earlier block."""
        ...

    def final(self, partial: Any) -> Any:
        """Return the value an algorithm sees."""
        ...


@runtime_checkable
class Filling(Protocol):
    """A reduction that bears blocks whose last rows are copies of their first client, where ``fills`` says so."""

    @property
    def fills(self) -> bool:
        """Whether it does: one that is made of another may not."""
        ...

    def unfilled(self, partial: Any, clients: int) -> Any:
        """Return the partial result of the first so many rows of a block, made of it all."""
        ...


def fillable(reductions: Iterable[Reduction]) -> bool:
    """Say whether blocks may have rows that only fill them."""
    return all(getattr(r, "fills", False) for r in reductions)


class Summing:
    """A sum with the weights of ``Rows``, to which rows that only fill a block add nothing."""

    fills = True

    def unfilled(self, partial: Any, clients: int) -> Any:
        """Return the partial as it is."""
        return partial


def merge(reduction: Reduction, a: Any, b: Any) -> Any:
    """Merge two partials, either of which may be None, the neutral one."""
    if a is None or b is None:
        return b if a is None else a
    return reduction.merge(a, b)


class Merging:
    """Adds what blocks 0, 1, 2, … send, a partial a slot, as a tree that their numbers alone give.

    The 2^h blocks from a multiple of 2^h on are added to one another before any other is: so whoever has them all may do that, and
    hand in the sum. In the end the trees that are left are added from the last one on, as if none came after them.
    """

    def __init__(self, reductions: Mapping[str, Reduction]):
        self._reductions = reductions
        self._trees: list[tuple[int, Mapping[str, Any]]] = []  # each of so many blocks, fewer than the one before

    def add(self, partials: Mapping[str, Any], blocks: int = 1) -> None:
        """Take the partials of the next so many blocks: a power of two that divides the blocks before them, or the last ones."""
        while self._trees and self._trees[-1][0] == blocks and not blocks & (blocks - 1):
            partials = self._merged(self._trees.pop()[1], partials)
            blocks *= 2
        self._trees.append((blocks, partials))

    def result(self) -> dict[str, Any]:
        """Return the merged partials, None where there are none."""
        result: Mapping[str, Any] = dict.fromkeys(self._reductions)
        for _, partials in reversed(self._trees):
            result = self._merged(partials, result)
        return dict(result)

    def _merged(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
        return {slot: merge(r, a[slot], b[slot]) for slot, r in self._reductions.items()}


def _weighted_sum(values: Tree, weight: Tensor) -> Tree:
    def leaf(v: Tensor | Combination) -> Tensor:
        if isinstance(v, Combination):
            return v.weighted_sum(weight)
        w = weight.to(v.dtype)
        return (v * T.column(w, v)).sum(0)

    return T.map(leaf, values)


class _Sum(NamedTuple):
    total: Tree
    weight: Tensor


@dataclass(frozen=True)
class Total(Summing):
    """The plain sum over the heard clients."""

    def block(self, values: Tree, rows: Rows) -> Tree:
        """Sum a block."""
        return _weighted_sum(values, rows.unit)

    def merge(self, a: Tree, b: Tree) -> Tree:
        """Add two sums."""
        return T.add(a, b)

    def final(self, partial: Tree) -> Tree:
        """Return the sum."""
        return partial


@dataclass(frozen=True)
class Mean(Summing):
    """The mean over the heard clients with the phase's weights (``weighted=False``: each counts the same)."""

    weighted: bool = True

    def block(self, values: Tree, rows: Rows) -> _Sum:
        """Sum a block with its weights."""
        weight = rows.weight if self.weighted else rows.unit
        return _Sum(_weighted_sum(values, weight), weight.sum())

    def merge(self, a: _Sum, b: _Sum) -> _Sum:
        """Add two weighted sums."""
        return _Sum(T.add(a.total, b.total), a.weight + b.weight)

    def final(self, partial: _Sum) -> Tree:
        """Divide by the weight. Raises ValueError where all weights are zero."""
        if float(partial.weight) == 0.0:
            raise ValueError("the weights of all heard clients are zero, so their mean does not exist")
        return T.map(lambda v: v / partial.weight.to(v.dtype), partial.total)


class DomainMeans(NamedTuple):
    """Means by domain, for the domains that were heard: domain (D,) sorted, value leaves (D, ...), weight (D,)."""

    domain: Tensor
    value: Tree
    weight: Tensor


@dataclass(frozen=True)
class ByDomainMean(Summing):
    """The weighted mean over the heard clients of each domain; cost and size grow with the domains heard, not with all."""

    def _sum(self, domain: Tensor, value: Tree, weight: Tensor) -> DomainMeans:
        result, inverse = torch.unique(domain, return_inverse=True)

        def leaf(v: Tensor) -> Tensor:
            return v.new_zeros(len(result), *v.shape[1:]).index_add_(0, inverse, v)

        return DomainMeans(result, T.map(leaf, value), leaf(weight))

    def block(self, values: Tree, rows: Rows) -> DomainMeans:
        """Sum a block by domain."""
        scaled = T.map(lambda v: v * T.column(rows.weight.to(v.dtype), v), multiplied_out(values))
        return self._sum(rows.domain, scaled, rows.weight)

    def merge(self, a: DomainMeans, b: DomainMeans) -> DomainMeans:
        """Add the sums of two blocks, domain by domain."""
        both = T.concat([a, b])
        return self._sum(both.domain, both.value, both.weight)

    def final(self, partial: DomainMeans) -> DomainMeans:
        """Divide each domain's sum by its weight."""
        divide = lambda v: v / T.column(partial.weight.to(v.dtype), v)  # noqa: E731
        return DomainMeans(partial.domain, T.map(divide, partial.value), partial.weight)


@dataclass(frozen=True)
class CollectUploads:
    """Keep every upload, as the blocks they came in: for methods that need more than a sum (median, Krum, FedOMG).

    Large ones go to a file, which workers of the driver's machine write themselves.
    """

    fills = True

    def block(self, values: Tree, rows: Rows) -> UploadMatrix:
        """Wrap a block."""
        return UploadMatrix((multiplied_out(values),), (rows.weight,))

    def unfilled(self, partial: UploadMatrix, clients: int) -> UploadMatrix:
        """Keep the first so many."""
        return partial.first(clients)

    def merge(self, a: UploadMatrix, b: UploadMatrix) -> UploadMatrix:
        """Append the later blocks."""
        return UploadMatrix(a.blocks + b.blocks, a.weights + b.weights)

    def final(self, partial: UploadMatrix) -> UploadMatrix:
        """Return the stored uploads."""
        return partial
