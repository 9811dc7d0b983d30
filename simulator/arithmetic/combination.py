"""Parameters of a block of clients as sums of terms that are not multiplied out.

Clients start a round from one shared weight W, and local SGD moves client c by a sum of outer products of its own layer
inputs h and output gradients d. So a parameter is kept as

    W_c = sum_m a_cm S_m + sum_j b_cj d_cj^T h_cj

with matrices S_m shared by all clients, one pair (h, d) a gradient, and one number a term and client. A forward pass is one
large product with the shared matrices plus small batched ones, and the sum over a block of clients is one matrix product. It
is exact: docs/explanation/factored.md.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.convolution import Patches
from fedfleet.simulator.arithmetic.tree import Tree

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
    """The gradient of one call of a linear layer, ``d^T h`` over rows ``start`` to ``stop`` of a tape.

    Where the inputs are rows of the clients' data, ``place`` is the first of them there.
    """

    def __init__(self, tape: Tape, start: int, stop: int, place: int | None):
        self.tape, self.start, self.stop, self.place = tape, start, stop, place


Pair = Outer | Patches
Product = tuple[Tensor, Tensor, Number]
"""Outer products side by side: ``h`` (C, R, i), ``d`` (C, R, o) and their coefficient, a float, (R,) or (C, R)."""
Term = Shared | PerClient | Outer | Patches


class Tape:
    """All pairs of one linear leaf in a block, side by side: ``h`` (C, R, i) and ``d`` (C, R, o) for R rows so far.

    Inputs of a first layer are rows of the clients' data along their walk, ``walk`` (C, N, i): then only ``d`` is kept here.
    """

    def __init__(self, walk: Tensor | None):
        self.rows, self.walk = 0, walk
        self._h: Tensor | None = None
        self._d: Tensor | None = None

    def append(self, h: Tensor, d: Tensor, place: int | None) -> Outer:
        """Add the rows of ``h`` (C, r, i), which start at ``place`` of the walk, and ``d`` (C, r, o)."""
        start = self.rows
        self.rows += h.shape[1]
        if self.walk is None:
            self._h = _written(self._h, h, start)
        self._d = _written(self._d, d, start)
        return Outer(self, start, self.rows, place)

    def inputs(self, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop`` of ``h``, or of the walk."""
        h = self._h if self.walk is None else self.walk
        assert h is not None
        return h[:, start:stop]

    def gradients(self, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop`` of ``d``."""
        assert self._d is not None
        return self._d[:, start:stop]


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
        """Rows of outer products a client; gradients at the same rows of a client's data count once."""
        own = sum(p.stop - p.start for p, _ in self.pairs if isinstance(p, Outer) and p.place is None)
        return own + sum(stop - start for start, stop in {_rows_of(p) for p, _ in self.pairs if _on_walk(p)})

    @cached_property
    def common(self) -> Tensor | None:
        """The sum of the shared terms, None where they differ from client to client, or there is none."""
        if not self.shared or any(isinstance(c, Tensor) for _, c in self.shared):
            return None
        return _sum([scaled(v, c) for v, c in self.shared])

    def dense(self) -> Tensor:
        """Multiply out: (C, *shape)."""
        common = self.common
        shared = self.shared if common is None else [(common, 1.0)]
        parts = [scaled(v, c) for v, c in self.each]
        parts += [scaled(v.expand(self.clients, *v.shape), c) for v, c in shared]
        parts += [_scaled(p, c).each() for p, c in self.patches()]
        total = _sum(parts).contiguous() if parts else None
        for h, d, c in self.products:
            if isinstance(c, Tensor):
                d, c = d * c[..., None], 1.0
            total = torch.bmm(d.mT, h) * c if total is None else torch.baddbmm(total, d.mT, h, alpha=c)
        return self._zero().expand(self.clients, *self.like.shape) if total is None else total

    def weighted_sum(self, weight: Tensor) -> Tensor:
        """Return ``sum_c weight_c W_c``, of the shape of the leaf, without multiplying out any W_c; ``weight`` is (C,)."""
        parts = [scaled(v, c * weight.to(v.dtype)).sum(0) for v, c in self.each]
        for v, c in self.shared:
            total = (c.to(weight.dtype) * weight).sum() if isinstance(c, Tensor) else c * weight.sum()
            parts.append(v * total.to(v.dtype))
        parts += [_scaled(p, c * weight.to(p.d.dtype)).summed() for p, c in self.patches()]
        total = _sum(parts) if parts else None
        for h, d, c in self.products:
            d = (d * (c * weight.to(d.dtype)[:, None])[..., None]).flatten(0, 1).T
            h = h.flatten(0, 1)
            total = d @ h if total is None else torch.addmm(total, d, h)
        return self._zero().expand(self.like.shape) if total is None else total

    def norms(self, dtype: torch.dtype) -> Tensor:
        """Return each client's Euclidean norm (C,), of outer products without multiplying them out where that takes less."""
        rows = sum(h.shape[1] for h, _, _ in self.products)
        zero = all(isinstance(c, float) and c == 0.0 for _, c in self.shared)
        plain = zero and not self.each and not self.patches() and self.like.dim() == 2
        if not plain or rows * sum(self.like.shape) > self.like.numel():
            return torch.linalg.vector_norm(self.dense().flatten(1), dim=1, dtype=dtype)
        own = [(h, d * c[..., None] if isinstance(c, Tensor) else d * c) for h, d, c in self.products]
        if not own:
            return torch.zeros(self.clients, dtype=dtype, device=self.like.device)
        h, d = torch.cat([h for h, _ in own], 1), torch.cat([d for _, d in own], 1)
        # |sum_r d_r^T h_r|^2 = sum_rs <d_r, d_s> <h_r, h_s>
        return (torch.bmm(h, h.mT) * torch.bmm(d, d.mT)).sum((1, 2), dtype=dtype).clamp(min=0.0).sqrt()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=self.like.dtype, device=self.like.device)

    def numel(self) -> int:
        """Return the number of scalars, all clients counted."""
        return self.clients * self.like.shape.numel()

    def element_size(self) -> int:
        """Return the bytes of a scalar."""
        return self.like.dtype.itemsize

    @cached_property
    def products(self) -> list[Product]:
        """All outer products, a tape each."""
        tapes: dict[Tape, list[tuple[Outer, Number]]] = {}
        for p, c in self.pairs:
            if isinstance(p, Outer):
                tapes.setdefault(p.tape, []).append((p, c))
        return [_joined(t, sorted(pairs, key=lambda pair: pair[0].start), self.clients) for t, pairs in tapes.items()]

    def patches(self) -> list[tuple[Patches, Number]]:
        """Return the gradients of convolutions."""
        return _merged([(p, c) for p, c in self.pairs if isinstance(p, Patches)])


def _on_walk(p: Pair) -> bool:
    return isinstance(p, Outer) and p.place is not None


def _rows_of(p: Any) -> tuple[int, int]:
    """Return the rows of the walk that a pair is of."""
    return p.place, p.place + p.stop - p.start


def _fitting(c: Number, dtype: torch.dtype) -> Number:
    """Return a number as one in a tensor of that dtype would act: infinite where it is too large, and changing no dtype."""
    if isinstance(c, Tensor):
        return c.to(dtype)
    return math.copysign(math.inf, c) if abs(c) > torch.finfo(dtype).max else c


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
    result: dict[tuple[Any, ...], tuple[Patches, Number]] = {}
    for p, c in patches:
        key = (p.h.data_ptr(), p.h.shape, p.h.stride(), p.geometry)
        if key in result:
            q, e = result[key]
            p, c = q.merged(_scaled(q, e).d + _scaled(p, c).d), 1.0
        result[key] = (p, c)
    return list(result.values())


def _joined(tape: Tape, outer: list[tuple[Outer, Number]], clients: int) -> Product:
    """Join the pairs of a tape, in its order."""
    if tape.walk is None:
        d, c = _side_by_side(tape, outer, clients)
        return tape.inputs(outer[0][0].start, outer[-1][0].stop), d, c
    rows = [_rows_of(p) for p, _ in outer]
    gapless = outer[-1][0].stop - outer[0][0].start == rows[-1][1] - rows[0][0]
    if gapless and _consecutive(rows):
        return tape.inputs(rows[0][0], rows[-1][1]), *_side_by_side(tape, outer, clients)
    # Gradients at the same inputs are added first, so that they are multiplied with them once.
    result: dict[tuple[int, int], Tensor] = {}
    for (p, c), at in zip(outer, rows, strict=True):
        d = scaled(tape.gradients(p.start, p.stop), c)
        result[at] = result[at] + d if at in result else d
    places = sorted(result)
    spans = [(places[0][0], places[-1][1])] if _consecutive(places) else places
    h = torch.cat([tape.inputs(*span) for span in spans], 1) if len(spans) > 1 else tape.inputs(*spans[0])
    return h, torch.cat([result[at] for at in places], 1), 1.0


def _consecutive(rows: list[tuple[int, int]]) -> bool:
    return all(stop == start for (_, stop), (start, _) in itertools.pairwise(rows))


def _side_by_side(tape: Tape, outer: list[tuple[Outer, Number]], clients: int) -> tuple[Tensor, Number]:
    """Return the gradients in the span of the tape that holds the pairs; what lies between them gets a coefficient of zero."""
    first, last = outer[0][0].start, outer[-1][0].stop
    d, c = tape.gradients(first, last), outer[0][1]
    full = sum(p.stop - p.start for p, _ in outer) == last - first
    if full and isinstance(c, float) and all(isinstance(e, float) and e == c for _, e in outer):
        return d, c
    if any(isinstance(e, Tensor) for _, e in outer):
        coefficients = d.new_zeros(clients, last - first)
        for p, e in outer:
            coefficients[:, p.start - first : p.stop - first] = e[:, None] if isinstance(e, Tensor) else e
        return d, coefficients
    listed = [0.0] * (last - first)
    for p, e in outer:
        assert isinstance(e, float)
        listed[p.start - first : p.stop - first] = [e] * (p.stop - p.start)
    return d, torch.tensor(listed, dtype=d.dtype, device=d.device)


def multiplied_out(tree: Tree) -> Tree:
    """Return a tree of stacked values (C, ...) in which every combination is multiplied out."""
    return T.map(lambda v: v.dense() if isinstance(v, Combination) else v, tree)
