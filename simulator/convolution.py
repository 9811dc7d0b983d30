"""Convolutions of a block of clients: one large batch where all share the filters, a group for each client where not."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
        clients = len(self.h)
        filters = self.h.new_empty(()).expand(clients * self.shape[0], *self.shape[1:])
        return _gradient(self.d, self.h, filters, self.geometry, own=True, of_input=False).view(clients, *self.shape)

    def summed(self) -> Tensor:
        """Return the sum over clients (o, c, k, k)."""
        filters = self.h.new_empty(()).expand(self.shape)
        return _gradient(self.d, self.h, filters, self.geometry, own=False, of_input=False)


def convolve(h: Tensor, filters: Tensor, geometry: Geometry, *, own: bool) -> Tensor:
    """Return the outputs (C, B, o, H', W') of ``filters`` (o, c, k, k), or with ``own`` those of all clients, (C o, c, k, k)."""
    stride, padding, dilation, groups = _of_block(geometry, len(h), own)
    return _restored(F.conv2d(_laid(h, own), filters, None, stride, padding, dilation, groups), len(h), own)


def input_gradient(d: Tensor, h: Tensor, filters: Tensor, geometry: Geometry, *, own: bool) -> Tensor:
    """Return the gradient by the inputs ``h``, given that by the outputs; ``filters`` and ``own`` as in ``convolve``."""
    return _restored(_gradient(d, h, filters, geometry, own=own, of_input=True), len(h), own)


def _gradient(d: Tensor, h: Tensor, filters: Tensor, geometry: Geometry, *, own: bool, of_input: bool) -> Tensor:
    stride, padding, dilation, groups = _of_block(geometry, len(h), own)
    mask = [of_input, not of_input, False]
    return torch.ops.aten.convolution_backward(
        _laid(d, own), _laid(h, own), filters, None, stride, padding, dilation, False, [0, 0], groups, mask
    )[0 if of_input else 1]


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
