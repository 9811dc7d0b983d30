"""Linear layers and convolutions with factored weights, which hand back their inputs and output gradients.

The product with a parameter is computed for all clients of the block from its combination. The backward pass records
the pair (inputs, output gradients) instead of multiplying it out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic.combination import Combination, Number, Pair, scaled
from fedfleet.simulator.arithmetic.convolution import Geometry, Patches, convolve, input_gradient
from fedfleet.simulator.arithmetic.factored import Ledger, Walk
from fedfleet.simulator.arithmetic.weight import Multiplied


class Layer(Multiplied):
    """The product with one parameter of a block of clients, and the pairs that its backward passes recorded.

    Attributes:
        index, shell, lanes, tap: as of every parameter that stands in for a tensor; a lane is a client.
        content: the parameter.
        recording: whether the backward pass under way is the one of this parameter's own player.

    """

    def __init__(self, index: int, ledger: Ledger, path: str, content: Combination, trained: bool):
        super().__init__(index, ledger.shell(content.like), ledger.clients, trained)
        self.ledger, self.path, self.content = ledger, path, content
        self.recording = False
        self.pairs: list[Pair] = []

    def product(self, x: Tensor, geometry: Geometry | None) -> Tensor:
        """Return the products with the inputs of all clients."""
        if geometry is not None:
            return _BlockConv.apply(self, geometry, x, self.tap)  # pyright: ignore[reportReturnType]
        out: Any = _BlockLinear.apply(self, x.reshape(x.shape[0], -1, x.shape[-1]), self.tap)
        return out.reshape(*x.shape[:-1], -1)


class _BlockLinear(torch.autograd.Function):
    """``h`` (C, r, i) times each client's weight (o, i), transposed: (C, r, o)."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, h: Tensor, tap: Tensor) -> Tensor:
        ctx.layer, ctx.h = layer, h.detach()
        ctx.on = layer.ledger.on_walk(ctx.h)
        layer.ledger.products += h[0, :, 0].numel() * layer.content.like.numel()
        return _forward(layer.content, ctx.h, ctx.on)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # type: ignore[override]
        layer: Layer = ctx.layer
        dh = _backward(layer.content, d) if ctx.needs_input_grad[1] else None
        if layer.recording:
            layer.pairs.append(layer.ledger.outer(layer.path, ctx.h, d, ctx.on))
        return None, dh, None


def _forward(w: Combination, h: Tensor, place: tuple[Walk, int] | None) -> Tensor:
    """Return ``h W_c^T`` (C, r, o) for the rows h (C, r, i) of each client."""
    if place is None or (len(w.shared) > 1 and w.common is not None):
        # Several matrices are added and multiplied with these rows: with all rows of the walk each would be multiplied apart.
        out, fresh = _shared_products(w, h, transposed=True), True
    else:
        walk, start = place
        parts = [(walk.product(m, start, start + h.shape[1]), c) for m, c in w.shared]
        out, fresh = _scaled_sum(parts), len(parts) != 1 or not (isinstance(parts[0][1], float) and parts[0][1] == 1.0)
    out, changed = _own_products(w, h, out, transposed=True)
    return out if fresh or changed else out.clone()


def _backward(w: Combination, d: Tensor) -> Tensor:
    """Return ``d W_c`` (C, r, i) for the output gradients d (C, r, o) of each client."""
    return _own_products(w, d, _shared_products(w, d, transposed=False), transposed=False)[0]


def _shared_products(w: Combination, v: Tensor, *, transposed: bool) -> Tensor | None:
    """Return the products with the shared terms: one large multiplication if their coefficients are."""
    turn = (lambda m: m.mT) if transposed else (lambda m: m)
    common = w.common
    rows = v.reshape(-1, v.shape[2])
    matrices = [(common, 1.0)] if common is not None else w.shared
    parts = [(torch.mm(rows, turn(m)).view(*v.shape[:2], -1), c) for m, c in matrices]
    return _scaled_sum(parts)


def _scaled_sum(parts: list[tuple[Tensor, Number]]) -> Tensor | None:
    out: Tensor | None = None
    for product, c in parts:
        out = scaled(product, c) if out is None else out + scaled(product, c)
    return out


def _own_products(w: Combination, v: Tensor, out: Tensor | None, *, transposed: bool) -> tuple[Tensor, bool]:
    """Add the products with what is each client's own to ``out``, if there is any; say whether there was."""
    turn = (lambda m: m.mT) if transposed else (lambda m: m)
    changed = False
    for m, c in w.each:
        rows = scaled(v, c)
        out = torch.bmm(rows, turn(m)) if out is None else torch.baddbmm(out, rows, turn(m))
        changed = True
    for h, d, c in w.products:
        inner, outer = (h, d) if transposed else (d, h)
        p = torch.bmm(v, inner.mT)  # (C, r, R)
        if isinstance(c, Tensor):
            p, c = p * (c[:, None] if c.dim() == 2 else c), 1.0
        out = torch.bmm(p, outer) * c if out is None else torch.baddbmm(out, p, outer, alpha=c)
        changed = True
    assert out is not None
    return out, changed


class _BlockConv(torch.autograd.Function):
    """Convolve ``h`` (C, B, c, H, W) with filters that all clients share, or with each client's own."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, geometry: Geometry, h: Tensor, tap: Tensor) -> Tensor:
        ctx.layer, ctx.geometry, ctx.h = layer, geometry, h.detach()
        ctx.filters, ctx.own = _filters(layer.content)
        out = convolve(ctx.h, ctx.filters, geometry, own=ctx.own)
        layer.ledger.products += out[0, :, 0].numel() * layer.content.like.numel()
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # type: ignore[override]
        layer: Layer = ctx.layer
        dh = input_gradient(d, ctx.h, ctx.filters, ctx.geometry, own=ctx.own) if ctx.needs_input_grad[2] else None
        if layer.recording:
            layer.pairs.append(Patches(ctx.h, d, layer.content.like.shape, ctx.geometry))
        return None, None, dh, None


def _filters(w: Combination) -> tuple[Tensor, bool]:
    """Return the shared filters, or those of all clients side by side; and whether they are each client's own."""
    common = w.common
    if common is not None:
        return common, False
    ((value, _),) = w.each  # `pays` has seen to it
    return value.flatten(0, 1), True


FOLD_AT = 1.0
"""A linear leaf is multiplied out once its outer products take this many times the arithmetic of a weight of its own.

For its last use twice as many, since to multiply it out takes about as much as to use it.
"""


def pays(content: Combination, *, last: bool) -> bool:
    """Say whether a parameter is better left factored: a linear one while its rank is low, a filter if all share it.

    ``last`` says that it is used for the last time.
    """
    if content.like.dim() > 2:
        return content.common is not None and not content.pairs and not content.each
    o, i = content.like.shape
    return content.rank * (o + i) <= FOLD_AT * (1 + last) * o * i
