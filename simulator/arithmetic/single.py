"""Layers of many clients whose weights have a gradient of each row: its norm, and clipped sums, without writing them down.

The gradient of a linear layer by one row is d h^T, of its input h and output gradient d. Its norm is |d| |h|, and a weighted sum
of them one matrix product, so that none need be multiplied out (Goodfellow, "Efficient per-example gradient computations", 2015).
Where a row comes to a layer several times, as words do, and for filters, they are written down: the norm of a sum of products by
their Gram matrices cancels, and what is promised of a norm has to hold.

N = C B rows, B of each of C clients, one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic.convolution import Geometry, Patches, convolve, input_gradient, unfolded
from fedfleet.simulator.arithmetic.weight import Multiplied


class Single(Multiplied):
    """The product of each client's rows with its weight, ``value`` (C, ...) or one (...) that all share.

    Attributes:
        index, shell, lanes, tap: as of every parameter that stands in for a tensor; a lane is a row.
        clients: C.
        calls: inputs and output gradients (N, ...) of each product, and its geometry where it is a convolution.

    """

    def __init__(self, index: int, value: Tensor, *, shared: bool, clients: int, rows: int, trained: bool):
        like = value if shared else value[0]
        super().__init__(index, like.new_empty(()).expand(like.shape), clients * rows, trained)
        self.value, self.shared, self.clients = value, shared, clients
        self.calls: list[tuple[Tensor, Tensor, Geometry | None]] = []
        self._each: Tensor | None = None

    def product(self, x: Tensor, geometry: Geometry | None) -> Tensor:
        """Return the products of rows (N, ...)."""
        if geometry is not None:
            images: Any = _Conv.apply(self, geometry, x.reshape(len(x), -1, *x.shape[-3:]), self.tap)
            return images.reshape(*x.shape[:-3], *images.shape[-3:])
        out: Any = _Linear.apply(self, x.reshape(len(x), -1, x.shape[-1]), self.tap)
        return out.reshape(*x.shape[:-1], -1)

    def squares(self) -> Tensor:
        """Return the squared norms (N,) of the rows' gradients, float64."""
        if not self.calls:
            return torch.zeros(self.lanes, dtype=torch.float64, device=self.value.device)
        if (pair := self._pair()) is not None:
            return squares(pair[0]) * squares(pair[1])
        return squares(self._written())

    def summed(self, factor: Tensor) -> Tensor:
        """Return the sum (C, ...) of each client's rows' gradients times ``factor`` (C, B)."""
        if not self.calls:
            return torch.zeros(self.clients, *self.shell.shape, dtype=self.shell.dtype, device=self.value.device)
        factor = factor.to(self.shell.dtype)
        if (pair := self._pair()) is not None:
            h, d = (x.view(*factor.shape, x.shape[-1]) for x in pair)
            return torch.bmm((d * factor[..., None]).mT, h)
        return summed(factor, self._written())

    def _pair(self) -> tuple[Tensor, Tensor] | None:
        """Return the input (N, i) and output gradient (N, o) where each row came by once."""
        (h, d, geometry), *more = self.calls
        return (h[:, 0], d[:, 0]) if not more and geometry is None and h.shape[1] == 1 else None

    def _written(self) -> Tensor:
        """Return the rows' gradients (N, ...)."""
        if self._each is None:
            each = [torch.bmm(d.mT, h) if g is None else self._filters(h, d, g) for h, d, g in self.calls]
            self._each = each[0] if len(each) == 1 else torch.stack(each).sum(0)
        return self._each

    def _filters(self, h: Tensor, d: Tensor, geometry: Geometry) -> Tensor:
        shape = self.shell.shape
        if geometry.groups > 1:
            return Patches(h, d, shape, geometry).each()
        images = lambda x: x.view(self.clients, -1, *x.shape[1:]).unbind(0)  # noqa: E731
        result = []
        for hc, dc in zip(images(h), images(d), strict=True):  # a client at a time, whose patches a cache holds
            patches = unfolded(hc.flatten(0, 1), shape[2:], geometry).view(*hc.shape[:2], -1, dc[0, 0, 0].numel())
            result.append(torch.bmm(dc.transpose(1, 2).flatten(2), patches.transpose(1, 2).flatten(2).mT))
        return torch.cat(result).view(len(h), *shape)


def summed(factor: Tensor, each: Tensor) -> Tensor:
    """Return the sums (C, ...) of gradients (N, ...) times ``factor`` (C, B)."""
    clients, rows = factor.shape
    flat = each.reshape(clients, rows, -1)
    return torch.bmm(factor.to(each.dtype)[:, None], flat).view(clients, *each.shape[1:])


def squares(each: Tensor) -> Tensor:
    """Return the squared norms (N,) of gradients (N, ...), float64."""
    return torch.linalg.vector_norm(each.reshape(len(each), -1), dim=1, dtype=torch.float64).square()


class _Linear(torch.autograd.Function):
    """``h`` (N, r, i) times each client's weight (o, i), transposed: (N, r, o)."""

    @staticmethod
    def forward(ctx: Any, layer: Single, h: Tensor, tap: Tensor) -> Tensor:
        ctx.layer, ctx.h = layer, h.detach()
        return _times(layer, ctx.h, layer.value.mT)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # type: ignore[override]
        layer: Single = ctx.layer
        if layer.tap.requires_grad:
            layer.calls.append((ctx.h, d, None))
        return None, _times(layer, d, layer.value) if ctx.needs_input_grad[1] else None, None


def _times(layer: Single, x: Tensor, value: Tensor) -> Tensor:
    if layer.shared:
        return torch.mm(x.reshape(-1, x.shape[-1]), value).view(*x.shape[:-1], -1)
    return torch.bmm(x.reshape(layer.clients, -1, x.shape[-1]), value).view(*x.shape[:-1], -1)


class _Conv(torch.autograd.Function):
    """Convolve ``h`` (N, b, c, H, W) with the filters of each client."""

    @staticmethod
    def forward(ctx: Any, layer: Single, geometry: Geometry, h: Tensor, tap: Tensor) -> Tensor:
        ctx.layer, ctx.geometry, ctx.h = layer, geometry, h.detach()
        ctx.filters = layer.value if layer.shared else layer.value.flatten(0, 1)
        return _restored(h, convolve(_images(layer, ctx.h), ctx.filters, geometry, own=not layer.shared))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:  # type: ignore[override]
        layer: Single = ctx.layer
        if layer.tap.requires_grad:
            layer.calls.append((ctx.h, d, ctx.geometry))
        dh = None
        if ctx.needs_input_grad[2]:
            dh = input_gradient(
                _images(layer, d), _images(layer, ctx.h), ctx.filters, ctx.geometry, own=not layer.shared
            )
        return None, None, None if dh is None else _restored(ctx.h, dh), None


def _images(layer: Single, x: Tensor) -> Tensor:
    """Return each client's images (C, B b, ...) of (N, b, ...)."""
    return x.reshape(layer.clients, -1, *x.shape[2:])


def _restored(like: Tensor, x: Tensor) -> Tensor:
    return x.reshape(*like.shape[:2], *x.shape[2:])
