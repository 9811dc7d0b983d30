"""Parameter leaves as sums of terms that are never multiplied out: the factored executor's representation.

Clients start a round from one shared weight W, and local SGD moves client c by a sum of outer products of its own layer
inputs h and output gradients d. So a leaf is kept as

    W_c = sum_m a_cm S_m + sum_j b_cj d_cj^T h_cj

with matrices S_m shared by all clients, one pair (h, d) a gradient, and one number a term and client. Steps, proximal terms,
momentum and corrections by other gradients only touch the numbers. A forward pass is one large product with the shared
matrices plus small batched ones, and the sum over a block of clients is one matrix product. It is exact: docs/factored.md.

Two classes share the arithmetic. A ``Combination`` is the representation itself, for all clients of a block at once. A
``Factored`` is what client code sees under ``vmap``: a tensor by its shape, a combination by its content.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator import lanes
from fedfleet.simulator import tree as T
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


class Patches:
    """The gradient of one call of a convolution: inputs ``h`` (C, B, c, H, W), output gradients ``d`` (C, B, o, H', W')."""

    def __init__(self, h: Tensor, d: Tensor, shape: torch.Size, geometry: tuple[Any, ...], groups: int):
        self.h, self.d, self.shape, self.geometry, self.groups = h, d, shape, geometry, groups

    def merged(self, d: Tensor) -> Patches:
        """Return the same inputs with other output gradients."""
        return Patches(self.h, d, self.shape, self.geometry, self.groups)

    def each(self) -> Tensor:
        """Return every client's gradient (C, o, c, k, k): a convolution with a group for each client."""
        clients, rows = self.h.shape[:2]
        h = self.h.transpose(0, 1).reshape(rows, -1, *self.h.shape[3:])
        d = self.d.transpose(0, 1).reshape(rows, -1, *self.d.shape[3:])
        weight = h.new_empty(()).expand(clients * self.shape[0], *self.shape[1:])
        return _weight_gradient(h, d, weight, self.geometry, clients * self.groups).view(clients, *self.shape)

    def summed(self) -> Tensor:
        """Return the sum over clients (o, c, k, k): one convolution."""
        h, d = self.h.flatten(0, 1), self.d.flatten(0, 1)
        return _weight_gradient(h, d, h.new_empty(()).expand(self.shape), self.geometry, self.groups)


def _weight_gradient(h: Tensor, d: Tensor, weight: Tensor, geometry: tuple[Any, ...], groups: int) -> Tensor:
    stride, padding, dilation = geometry
    mask = [False, True, False]
    return torch.ops.aten.convolution_backward(
        d, h, weight, None, stride, padding, dilation, False, [0, 0], groups, mask
    )[1]


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
        return _sum([v if c == 1.0 else v * c for v, c in self.shared])

    def dense(self) -> Tensor:
        """Multiply out: (C, *shape)."""
        parts = [v * _column(c, v.dim()) for v, c in self.each]
        common = self.common()
        if common is not None:
            parts.append(common.expand(self.clients, *common.shape))
        else:
            parts += [v * _column(c, v.dim() + 1) for v, c in self.shared]
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
        parts = [(v * _column(c * weight.to(v.dtype), v.dim())).sum(0) for v, c in self.each]
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


def _column(c: Number, dims: int) -> Number:
    return c.reshape(-1, *([1] * (dims - 1))) if isinstance(c, Tensor) else c


def _scaled(p: Patches, c: Number) -> Patches:
    return p if isinstance(c, float) and c == 1.0 else p.merged(p.d * _column(c, p.d.dim()))


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


@dataclass
class Notes:
    """What was found out about factoring while client code ran.

    Attributes:
        dense: objective -> leaves it uses in another way than as the weight of a linear layer or a convolution.
        reasons: leaf -> the operations that need it multiplied out.
        products: objective -> multiplications that its layers do for one example, forward.
        step_examples: examples a client takes in a step, in the stage where they are fewest; padding counted.
        examples: examples a client takes in a stage, where they are most.

    """

    dense: dict[str, set[str]] = field(default_factory=dict)
    reasons: dict[str, set[str]] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    step_examples: int | None = None
    examples: int = 1

    def walked(self, steps: int, rows: int) -> None:
        """Note a stage of so many steps of so many examples."""
        self.step_examples = rows if self.step_examples is None else min(self.step_examples, rows)
        self.examples = max(self.examples, steps * rows)


class Walk:
    """The inputs of all steps of a block, (C, N, i), and their products with shared matrices, each computed once."""

    def __init__(self, inputs: Tensor):
        self.inputs = inputs
        self._products: dict[int, Tensor] = {}

    def product(self, matrix: Tensor, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop`` of the inputs times ``matrix`` (o, i) transposed: (C, r, o), not to be written to."""
        if id(matrix) not in self._products:  # shared terms live as long as the ledger, so their ids stay theirs
            self._products[id(matrix)] = torch.matmul(self.inputs, matrix.mT)
        return self._products[id(matrix)][:, start:stop]


class Ledger:
    """What the factored leaves of one block have in common: the number of clients C, the tapes, the notes."""

    def __init__(self, clients: int, notes: Notes):
        self.clients, self.notes = clients, notes
        self.products = 0
        self._shared: dict[int, Shared] = {}
        self._tapes: dict[tuple[str, int, int], Tape] = {}
        self._walks: dict[int, Walk] = {}
        self._shells: dict[tuple[Any, ...], Tensor] = {}

    def walk(self, inputs: Tensor) -> None:
        """Make known the inputs (C, T, R, ...) of all steps, unless they are labels."""
        if not inputs.is_floating_point():
            return
        flat = inputs.reshape(inputs.shape[0], inputs.shape[1] * inputs.shape[2], -1)
        self._walks[inputs.untyped_storage().data_ptr()] = Walk(flat)

    def on_walk(self, h: Tensor) -> tuple[Walk, int] | None:
        """Return the walk that ``h`` (C, r, i) is a slice of, and its first row; None if it is none."""
        walk = self._walks.get(h.untyped_storage().data_ptr())
        if walk is None or h.shape[2] != walk.inputs.shape[2] or h.stride() != walk.inputs.stride():
            return None
        return walk, int(h.storage_offset() - walk.inputs.storage_offset()) // h.shape[2]

    def shell(self, like: Tensor) -> Tensor:
        """Return a tensor of the shape, dtype and device of ``like`` that takes no memory."""
        key = (like.shape, like.dtype, like.device)
        if key not in self._shells:
            self._shells[key] = torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)
        return self._shells[key]

    def shared(self, value: Tensor) -> Shared:
        """Return the term of a shared tensor, the same one each time."""
        return self._shared.setdefault(id(value), Shared(value))

    def outer(self, path: str, h: Tensor, d: Tensor) -> Outer:
        """Record a pair of the leaf at ``path``."""
        return self._tapes.setdefault((path, d.shape[2], h.shape[2]), Tape()).append(h, d)


class Factored(Tensor):
    """A leaf of client code whose content is a combination: linear operations stay factored, any other multiplies it out."""

    ledger: Ledger
    path: str
    terms: dict[Term, Number]

    @staticmethod
    def of(ledger: Ledger, path: str, like: Tensor, terms: dict[Term, Number]) -> Factored:
        """Make a leaf with the shape, dtype and device of ``like``."""
        new = ledger.shell(like).as_subclass(Factored)
        new.ledger, new.path, new.terms = ledger, path, terms
        return new

    def combination(self) -> Combination:
        """Return the content for all clients of the block."""
        clients = self.ledger.clients

        def whole(c: Number) -> Number:
            if not isinstance(c, Tensor):
                return c
            value, batched = lanes.lower(c)
            return value if batched else value.expand(clients)

        return Combination(clients, self, [(t, whole(c)) for t, c in self.terms.items()])

    def fold(self, value: Tensor) -> None:
        """Take ``value`` (C, ...), the content multiplied out, as the content from now on."""
        self.terms = {PerClient(value): 1.0}

    def multiplied_out(self, reason: str) -> Tensor:
        """Return an ordinary tensor of client code."""
        self.ledger.notes.reasons.setdefault(self.path, set()).add(reason)
        content = self.combination()
        with lanes.beneath():
            value = content.dense()
        return lanes.lift(value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in LINEAR and not kwargs:
            found = LINEAR[name](*args)
            if found is not NotImplemented:
                return found
        own = any(isinstance(a, Tensor) and not isinstance(a, Factored) and a.dim() for a in args)
        reason = f"{name} with a tensor of each client's own" if own else name
        dense = [a.multiplied_out(reason) if isinstance(a, Factored) else a for a in args]
        return func(*dense, **(kwargs or {}))


def multiplied_out(tree: Tree) -> Tree:
    """Return a tree of stacked values (C, ...) in which every combination is multiplied out."""
    return T.map(lambda v: v.dense() if isinstance(v, Combination) else v, tree)


METADATA = {
    "__get__",
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "__hash__",
}


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or (isinstance(x, Tensor) and not isinstance(x, Factored) and x.dim() == 0)


def _times(c: Number, s: Any) -> Number:
    return c * (s if isinstance(s, Tensor) else float(s))


def _terms(x: Any, ledger: Ledger) -> dict[Term, Number] | None:
    """Return a leaf as terms; None where it is a tensor that differs from client to client."""
    if isinstance(x, Factored):
        return x.terms
    if not isinstance(x, Tensor) or lanes.is_batched(x):
        return None
    return {ledger.shared(x): 1.0}


def _joined(a: Any, b: Any, each: Callable[[Number, Number], Number]) -> Any:
    leaf: Factored = a if isinstance(a, Factored) else b
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape):
        return NotImplemented
    left, right = _terms(a, leaf.ledger), _terms(b, leaf.ledger)
    if left is None or right is None:
        return NotImplemented
    terms = {t: each(left.get(t, 0.0), right.get(t, 0.0)) for t in {**left, **right}}
    return Factored.of(leaf.ledger, leaf.path, leaf, terms)


def _scale(a: Any, s: Any) -> Any:
    if _is_number(a):
        a, s = s, a
    if not (isinstance(a, Factored) and _is_number(s)):
        return NotImplemented
    return Factored.of(a.ledger, a.path, a, {t: _times(c, s) for t, c in a.terms.items()})


def _divide(a: Any, s: Any) -> Any:
    return _scale(a, 1.0 / s) if isinstance(a, Factored) and _is_number(s) else NotImplemented


def _choose(condition: Any, a: Any, b: Any) -> Any:
    if not (isinstance(condition, Tensor) and condition.dim() == 0):
        return NotImplemented

    def pick(x: Number, y: Number) -> Number:
        if isinstance(x, float) and isinstance(y, float) and x == y:
            return x
        return torch.where(condition, number(x), number(y))

    leaf = a if isinstance(a, Factored) else b
    number = lambda x: torch.as_tensor(x, dtype=leaf.dtype, device=leaf.device)  # noqa: E731
    return _joined(a, b, pick)


LINEAR: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: _joined(a, b, lambda x, y: x + y),
    "sub": lambda a, b: _joined(a, b, lambda x, y: x - y),
    "rsub": lambda a, b: _joined(b, a, lambda x, y: x - y),
    "mul": _scale,
    "div": _divide,
    "neg": lambda a: _scale(a, -1.0),
    "where": _choose,
    "zeros_like": lambda a: Factored.of(a.ledger, a.path, a, {}),
    "clone": lambda a: a,
    "detach": lambda a: a,
}
LINEAR |= {"__radd__": LINEAR["add"], "__rmul__": _scale, "__rsub__": LINEAR["rsub"], "true_divide": _divide}
