"""Convolutions of a block of clients: one large batch where all share the filters.

Where each client has its own, a GPU runs one convolution with a group a client, and a CPU one convolution a client: torch's
grouped convolutions on a CPU take up to twice the time. The gradient by filters that see one channel, as first layers do of
images without colours, is a product with patches on a CPU, which takes two fifths of torch's time or less.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PATCHED = 64
"""Images whose patches are held at once."""


class Geometry(NamedTuple):
    """What a convolution is besides its filters."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Patches:
    """The gradient of one call of a convolution: inputs ``h`` (C, B, c, H, W), output gradients ``d`` (C, B, o, H', W')."""

    def __init__(self, h: Tensor, d: Tensor, shape: torch.Size, geometry: Geometry):
        self.h, self.d, self.shape, self.geometry = h, d, shape, geometry

    def merged(self, d: Tensor) -> Patches:
        """Return the same inputs with other output gradients."""
        return Patches(self.h, d, self.shape, self.geometry)

    def each(self) -> Tensor:
        """Return every client's gradient (C, o, c, k, k)."""
        filters = self.h.new_empty(()).expand(self.shape)
        if _patched(filters, self.geometry, self.h):
            return _by_patches(self.d, self.h, filters, self.geometry)
        if _alone(self.h, True):
            alone = zip(self.d, self.h, strict=True)
            return torch.stack([_gradient(d, h, filters, self.geometry, of_input=False) for d, h in alone])
        clients, geometry = len(self.h), _of_block(self.geometry, len(self.h), True)
        filters = filters.expand(clients, *self.shape).flatten(0, 1)
        result = _gradient(_laid(self.d, True), _laid(self.h, True), filters, geometry, of_input=False)
        return result.view(clients, *self.shape)

    def summed(self) -> Tensor:
        """Return the sum over clients (o, c, k, k)."""
        filters = self.h.new_empty(()).expand(self.shape)
        d, h = self.d.flatten(0, 1), self.h.flatten(0, 1)
        if _patched(filters, self.geometry, h):
            return _by_patches(d[None], h[None], filters, self.geometry)[0]
        return _gradient(d, h, filters, self.geometry, of_input=False)


def unfolded(x: Tensor, side: torch.Size, geometry: Geometry) -> Tensor:
    """Return the patches (N, c k k, H' W') of images (N, c, H, W) that filters of a ``side`` (k, k) see.

    They are those of ``F.unfold``, which on a CPU copies number by number; here a row is copied at once.
    """
    (down, right), (above, left), apart = geometry.stride, geometry.padding, geometry.dilation
    x = F.pad(x, (left, left, above, above)) if above or left else x
    span = [a * (k - 1) + 1 for k, a in zip(side, apart, strict=True)]
    seen = x.unfold(2, span[0], down).unfold(3, span[1], right)[..., :: apart[0], :: apart[1]]  # (N, c, H', W', k, k)
    return seen.permute(0, 1, 4, 5, 2, 3).reshape(len(x), -1, seen.shape[2] * seen.shape[3])


def _patched(filters: Tensor, geometry: Geometry, h: Tensor) -> bool:
    """Say whether a product with patches is the faster way to the gradient by filters."""
    return filters.shape[1] == geometry.groups == 1 and not h.is_cuda


def _by_patches(d: Tensor, h: Tensor, filters: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradients (C, o, c, k, k) by filters without groups; no more than ``PATCHED`` images are in patches at once."""

    def of(d: Tensor, h: Tensor) -> Tensor:
        seen = unfolded(h.flatten(0, 1), filters.shape[2:], geometry)
        return torch.bmm(d.flatten(0, 1).flatten(2), seen.mT).view(*h.shape[:2], -1).sum(1)

    clients, result = max(1, PATCHED // max(1, h.shape[1])), []
    for dc, hc in zip(d.split(clients), h.split(clients), strict=True):
        first, *more = map(of, dc.split(PATCHED, 1), hc.split(PATCHED, 1))
        result.append(sum(more, first))
    return torch.cat(result).view(len(h), *filters.shape)


def convolve(h: Tensor, filters: Tensor, geometry: Geometry, *, own: bool) -> Tensor:
    """Return the outputs (C, B, o, H', W') of ``filters`` (o, c, k, k), or with ``own`` those of all clients, (C o, c, k, k)."""
    if _alone(h, own):
        return torch.stack([F.conv2d(x, f, None, *geometry) for x, f in zip(h, filters.chunk(len(h)), strict=True)])
    return _restored(F.conv2d(_laid(h, own), filters, None, *_of_block(geometry, len(h), own)), len(h), own)


def input_gradient(d: Tensor, h: Tensor, filters: Tensor, geometry: Geometry, *, own: bool) -> Tensor:
    """Return the gradient by the inputs ``h``, given that by the outputs; ``filters`` and ``own`` as in ``convolve``."""
    if _alone(h, own):
        alone = zip(d, h, filters.chunk(len(h)), strict=True)
        return torch.stack([_gradient(di, hi, f, geometry, of_input=True) for di, hi, f in alone])
    result = _gradient(_laid(d, own), _laid(h, own), filters, _of_block(geometry, len(h), own), of_input=True)
    return _restored(result, len(h), own)


def _gradient(d: Tensor, h: Tensor, filters: Tensor, geometry: Geometry, *, of_input: bool) -> Tensor:
    stride, padding, dilation, groups = geometry
    mask = [of_input, not of_input, False]
    return torch.ops.aten.convolution_backward(
        d, h, filters, None, stride, padding, dilation, False, [0, 0], groups, mask
    )[0 if of_input else 1]


def _alone(h: Tensor, own: bool) -> bool:
    return own and not h.is_cuda


def _of_block(geometry: Geometry, clients: int, own: bool) -> Geometry:
    return geometry._replace(groups=geometry.groups * clients) if own else geometry


def _laid(h: Tensor, own: bool) -> Tensor:
    """Return (C B, c, H, W) for shared filters, (B, C c, H, W) for each client's own."""
    return h.transpose(0, 1).reshape(h.shape[1], -1, *h.shape[3:]) if own else h.flatten(0, 1)


def _restored(x: Tensor, clients: int, own: bool) -> Tensor:
    """Return (C, B, c, H, W)."""
    if own:
        return x.view(x.shape[0], clients, -1, *x.shape[2:]).transpose(0, 1)
    return x.view(clients, -1, *x.shape[1:])
