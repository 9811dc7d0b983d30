"""Parameters of a block of clients as sums of terms that are not multiplied out.

Clients start a round from one shared weight W, and local SGD moves client c by a sum of outer products of its own layer
inputs h and output gradients d. So a parameter is kept as

    W_c = sum_m a_cm S_m + sum_j b_cj d_cj^T h_cj

with matrices S_m shared by all clients, one pair (h, d) a gradient, and one number a term and client. A forward pass is one
large product with the shared matrices plus small batched ones, and the sum over a block of clients is one matrix product. It
is exact: docs/factored.md.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator import tree as T
from fedfleet.simulator.convolution import Patches
from fedfleet.simulator.tree import Tree

Number = float | Tensor
"""A coefficient: a float, or one number a client; (C,) in a ``Combination``, zero-dimensional in client code."""


class Shared:
    """A term that is the same for all clients of the block: ``value`` has the shape of the leaf."""

    def __init__(self, value: Tensor):
        self.value = value


class PerClient:
    """A term multiplied out: ``value`` is (C, ...)."""

    def __init__(self, value: Tensor):
        self.value = value


class Outer:
    """The gradient of one call of a linear layer, ``d^T h`` over rows ``start`` to ``stop`` of the leaf's tape."""

    def __init__(self, tape: Tape, start: int, stop: int):
        self.tape, self.start, self.stop = tape, start, stop


Pair = Outer | Patches
Term = Shared | PerClient | Outer | Patches


class Tape:
    """All pairs of one linear leaf in a block, side by side: ``h`` (C, R, i) and ``d`` (C, R, o) for R rows so far."""

    def __init__(self) -> None:
        self.rows = 0
        self._h: Tensor | None = None
        self._d: Tensor | None = None
        self._borrowed = False

    def append(self, h: Tensor, d: Tensor) -> Outer:
        """Add the rows of ``h`` (C, r, i) and ``d`` (C, r, o)."""
        start = self.rows
        self.rows += h.shape[1]
        self._h, self._borrowed = self._extend(h, start)
        self._d = _written(self._d, d, start)
        return Outer(self, start, self.rows)

    def _extend(self, h: Tensor, start: int) -> tuple[Tensor, bool]:
        """Inputs of a first layer are consecutive slices of the clients' data: then a longer view does, and nothing is copied."""
        old = self._h
        if old is None:
            return h, True
        if self._borrowed:
            same = old.untyped_storage().data_ptr() == h.untyped_storage().data_ptr() and old.stride() == h.stride()
            if same and h.storage_offset() == old.storage_offset() + start * old.stride(1):
                longer = (h.shape[0], self.rows, h.shape[2])
                return h.as_strided(longer, h.stride(), old.storage_offset()), True
            old = _written(None, old, 0)
        return _written(old, h, start), False

    def view(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return rows ``start`` to ``stop`` of ``h`` and ``d``."""
        assert self._h is not None
        assert self._d is not None
        return self._h[:, start:stop], self._d[:, start:stop]


def _written(buffer: Tensor | None, new: Tensor, start: int) -> Tensor:
    """Write rows into a buffer that doubles when it is full."""
    stop = start + new.shape[1]
    if buffer is None or stop > buffer.shape[1]:
        room = new.new_empty(new.shape[0], max(2 * stop, 8 * new.shape[1]), new.shape[2])
        if buffer is not None:
            room[:, :start] = buffer[:, :start]
        buffer = room
    buffer[:, start:stop] = new
    return buffer


class Combination:
    """``sum_m coefficient_m * term_m`` for the C clients of a block; ``like`` has one client's shape, and the dtype."""

    def __init__(self, clients: int, like: Tensor, terms: list[tuple[Term, Number]]):
        self.clients, self.like = clients, like
        terms = [(t, _fitting(c, like.dtype)) for t, c in terms]
        self.shared = [(t.value, c) for t, c in terms if isinstance(t, Shared)]
        self.each = [(t.value, c) for t, c in terms if isinstance(t, PerClient)]
        self.pairs = [(t, c) for t, c in terms if isinstance(t, Outer | Patches)]

    @property
    def rank(self) -> int:
        """Rows of outer products a client."""
        return sum(p.stop - p.start for p, _ in self.pairs if isinstance(p, Outer))

    def common(self) -> Tensor | None:
        """Return the sum of the shared terms, None where they differ from client to client, or there is none."""
        if not self.shared or any(isinstance(c, Tensor) for _, c in self.shared):
            return None
        return _sum([scaled(v, c) for v, c in self.shared])

    def dense(self) -> Tensor:
        """Multiply out: (C, *shape)."""
        common = self.common()
        shared = self.shared if common is None else [(common, 1.0)]
        parts = [scaled(v, c) for v, c in self.each]
        parts += [scaled(v.expand(self.clients, *v.shape), c) for v, c in shared]
        outer, patches = self._split()
        parts += [_scaled(p, c).each() for p, c in patches]
        if outer is None:
            return _sum(parts).contiguous() if parts else self._zero().expand(self.clients, *self.like.shape)
        h, d, c = outer
        if isinstance(c, Tensor):
            d, c = d * c[..., None], 1.0
        if not parts:
            return torch.bmm(d.transpose(1, 2), h) * c
        return torch.baddbmm(_sum(parts), d.transpose(1, 2), h, alpha=c)

    def weighted_sum(self, weight: Tensor) -> Tensor:
        """Return ``sum_c weight_c W_c``, of the shape of the leaf, without multiplying out any W_c; ``weight`` is (C,)."""
        parts = [scaled(v, c * weight.to(v.dtype)).sum(0) for v, c in self.each]
        for v, c in self.shared:
            total = (c.to(weight.dtype) * weight).sum() if isinstance(c, Tensor) else c * weight.sum()
            parts.append(v * float(total))
        outer, patches = self._split()
        parts += [_scaled(p, c * weight.to(p.d.dtype)).summed() for p, c in patches]
        if outer is not None:
            h, d, c = outer
            c = c * weight.to(d.dtype)[:, None]
            d = d * c[..., None]
            d, h = d.flatten(0, 1), h.flatten(0, 1)
            parts = [torch.addmm(_sum(parts), d.T, h)] if parts else [d.T @ h]
        return _sum(parts) if parts else self._zero().expand(self.like.shape)

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=self.like.dtype, device=self.like.device)

    def numel(self) -> int:
        """Return the number of scalars, all clients counted."""
        return self.clients * self.like.shape.numel()

    def element_size(self) -> int:
        """Return the bytes of a scalar."""
        return self.like.dtype.itemsize

    def rows(self) -> tuple[Tensor, Tensor, Number] | None:
        """Return all outer products as ``h`` (C, R, i), ``d`` (C, R, o) and their coefficient: a float, (R,) or (C, R)."""
        return self._split()[0]

    def _split(self) -> tuple[tuple[Tensor, Tensor, Number] | None, list[tuple[Patches, Number]]]:
        outer = sorted(((p, c) for p, c in self.pairs if isinstance(p, Outer)), key=lambda pair: pair[0].start)
        patches = _merged([(p, c) for p, c in self.pairs if isinstance(p, Patches)])
        return (_side_by_side(outer, self.clients) if outer else None), patches


def _fitting(c: Number, dtype: torch.dtype) -> Number:
    """Let a float that the dtype cannot hold be infinite, as it would be in a tensor."""
    return math.copysign(math.inf, c) if isinstance(c, float) and abs(c) > torch.finfo(dtype).max else c


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for p in parts[1:]:
        total = total + p
    return total


def scaled(v: Tensor, c: Number) -> Tensor:
    """Return ``c * v`` for stacked values v (C, ...)."""
    if isinstance(c, Tensor):
        return v * T.column(c, v)
    return v if c == 1.0 else v * c


def _scaled(p: Patches, c: Number) -> Patches:
    return p if isinstance(c, float) and c == 1.0 else p.merged(scaled(p.d, c))


def _merged(patches: list[tuple[Patches, Number]]) -> list[tuple[Patches, Number]]:
    """Add the output gradients of pairs that have the same inputs, so that they are contracted once."""
    found: dict[tuple[Any, ...], tuple[Patches, Number]] = {}
    for p, c in patches:
        key = (p.h.data_ptr(), p.h.shape, p.h.stride(), p.geometry)
        if key in found:
            q, e = found[key]
            p, c = q.merged(_scaled(q, e).d + _scaled(p, c).d), 1.0
        found[key] = (p, c)
    return list(found.values())


def _side_by_side(outer: list[tuple[Outer, Number]], clients: int) -> tuple[Tensor, Tensor, Number]:
    """Return the span of the tape that holds the pairs; what lies between them gets a coefficient of zero."""
    first, last = outer[0][0].start, outer[-1][0].stop
    h, d = outer[0][0].tape.view(first, last)
    c = outer[0][1]
    full = sum(p.stop - p.start for p, _ in outer) == last - first
    if full and isinstance(c, float) and all(isinstance(e, float) and e == c for _, e in outer):
        return h, d, c
    if any(isinstance(e, Tensor) for _, e in outer):
        coefficients = d.new_zeros(clients, last - first)
        for p, e in outer:
            coefficients[:, p.start - first : p.stop - first] = e[:, None] if isinstance(e, Tensor) else e
        return h, d, coefficients
    listed = [0.0] * (last - first)
    for p, e in outer:
        listed[p.start - first : p.stop - first] = [float(e)] * (p.stop - p.start)
    return h, d, torch.tensor(listed, dtype=d.dtype, device=d.device)


def multiplied_out(tree: Tree) -> Tree:
    """Return a tree of stacked values (C, ...) in which every combination is multiplied out."""
    return T.map(lambda v: v.dense() if isinstance(v, Combination) else v, tree)
