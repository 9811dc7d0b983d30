"""Convolutions of a block of clients: one large batch where all share the filters.

Where each client has its own, ``way`` says how: one convolution a client, one with a group a client, or batched products with
patches. It goes by shapes and by the kind of processor, as ``benchmarks.convolutions`` timed them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PATCHED = 64
"""Images whose patches are held at once on a CPU."""
PATCHES, PATCHES_ON_GPU = 1 << 22, 1 << 27
"""Floats of patches that are held at once, where clients have filters of their own; those of one client always are."""
SMALL = 2048
"""Output places of a client's batch up to which a call of its own costs more than a group of a shared one."""
AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
"""Whether the processor has AVX2 and no AVX-512: torch is slow there at gradients by filters that see one channel."""

Of = Literal["outputs", "filters", "inputs"]
"""The quantity computed: the outputs, or the gradient by the filters or by the inputs."""
Way = Literal["alone", "groups", "products"]


class Geometry(NamedTuple):
    """What a convolution is besides its filters."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def places(self, image: torch.Size, side: torch.Size) -> int:
        """Return the number of outputs H' W' of an image (H, W) for filters of a side (k, k)."""
        each = zip(image, side, self.stride, self.padding, self.dilation, strict=True)
        return math.prod((n + 2 * pad - apart * (k - 1) - 1) // step + 1 for n, k, step, pad, apart in each)


def way(of: Of, shape: torch.Size, geometry: Geometry, h: Tensor) -> Way:
    """Return how clients' own filters, each of a ``shape`` (o, c, k, k), see their images ``h`` (C, B, c, H, W)."""
    if h.is_cuda:
        exact = geometry.groups == 1 and not torch.backends.cuda.matmul.allow_tf32
        return "products" if exact and of != "filters" else "groups"
    channels, side = shape[1], shape[2:]
    if geometry.groups > 1:
        return "alone"
    single, strided = math.prod(side) == 1, math.prod(geometry.stride) > 1
    if AVX2 and of == "filters" and channels == 1:
        return "products"
    if of == "inputs" and (strided if single else channels <= 3):
        return "products"
    if single or h.shape[1] * geometry.places(h.shape[3:], side) > SMALL:
        return "alone"
    whole = channels % 8 == 0  # as torch's kernels take them
    fits = {"outputs": whole or channels == 1, "filters": True, "inputs": whole and not strided}
    return "groups" if fits[of] else "alone"


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
        how = way("filters", self.shape, self.geometry, self.h)
        if how == "products":
            return _by_patches(self.d, self.h, filters, self.geometry)
        if how == "alone":
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
        if way("filters", self.shape, self.geometry, self.h) == "products":
            return _by_patches(d[None], h[None], filters, self.geometry)[0]
        return _gradient(d, h, filters, self.geometry, of_input=False)


def unfolded(x: Tensor, side: torch.Size, geometry: Geometry) -> Tensor:
    """Return the patches (N, c k k, H' W') of images (N, c, H, W) that filters of a ``side`` (k, k) see.

    They are those of ``F.unfold``, which on a CPU copies number by number; here a row is copied at once.
    """
    seen = _windows(x, side, geometry)
    return seen.permute(0, 1, 4, 5, 2, 3).reshape(len(x), -1, seen.shape[2] * seen.shape[3])


def _windows(x: Tensor, side: torch.Size, geometry: Geometry) -> Tensor:
    """Return what filters of a ``side`` (k, k) see of images (N, c, H, W): a view (N, c, H', W', k, k)."""
    (down, right), (above, left), apart = geometry.stride, geometry.padding, geometry.dilation
    x = F.pad(x, (left, left, above, above)) if above or left else x
    span = [a * (k - 1) + 1 for k, a in zip(side, apart, strict=True)]
    return x.unfold(2, span[0], down).unfold(3, span[1], right)[..., :: apart[0], :: apart[1]]


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


def _in_parts(of: Callable[..., Tensor], geometry: Geometry, filters: Tensor, h: Tensor, *more: Tensor) -> Tensor:
    """Call ``of`` with filters (C, o, c, k, k), inputs and more of so many clients that their patches are few enough; join it."""
    each = h[0].numel() * math.prod(filters.shape[2:]) // math.prod(geometry.stride)
    clients = max(1, (PATCHES_ON_GPU if h.is_cuda else PATCHES) // max(1, each))
    parts = (t.split(clients) for t in (filters.unflatten(0, (len(h), -1)), h, *more))
    return torch.cat([of(geometry, *part) for part in zip(*parts, strict=True)])


def _outputs(geometry: Geometry, filters: Tensor, h: Tensor) -> Tensor:
    """Return outputs (C, B, o, H', W') as products of filters (C, o, c, k, k) with patches of ``h`` (C, B, c, H, W)."""
    clients, batch = h.shape[:2]
    seen = _windows(h.flatten(0, 1), filters.shape[3:], geometry)
    out = seen.shape[2:4]
    seen = seen.unflatten(0, (clients, batch)).permute(0, 2, 5, 6, 1, 3, 4).reshape(clients, -1, batch * math.prod(out))
    return torch.bmm(filters.flatten(2), seen).view(clients, -1, batch, *out).transpose(1, 2)


def _input_gradients(geometry: Geometry, filters: Tensor, h: Tensor, d: Tensor) -> Tensor:
    """Return gradients by ``h`` (C, B, c, H, W): each place of the filters (C, o, c, k, k) adds what it saw."""
    clients, batch, c, height, width = h.shape
    (down, right), (above, left) = geometry.stride, geometry.padding
    (p, q), (a, b), out = filters.shape[3:], geometry.dilation, d.shape[3:]
    each = torch.bmm(filters.flatten(2).mT, d.transpose(1, 2).reshape(clients, d.shape[2], -1))
    each = each.view(clients, c, p, q, batch, *out).transpose(1, 4)  # (C, B, p, q, c, H', W')
    total = h.new_zeros(clients, batch, c, height + 2 * above, width + 2 * left)
    for i in range(p):
        for j in range(q):
            rows = slice(a * i, a * i + down * (out[0] - 1) + 1, down)
            columns = slice(b * j, b * j + right * (out[1] - 1) + 1, right)
            total[..., rows, columns] += each[:, :, i, j]
    return total[..., above : above + height, left : left + width]


def convolve(h: Tensor, filters: Tensor, geometry: Geometry, *, own: bool) -> Tensor:
    """Return the outputs (C, B, o, H', W') of ``filters`` (o, c, k, k), or with ``own`` those of all clients, (C o, c, k, k)."""
    how = _how("outputs", filters, geometry, h, own)
    if how == "products":
        return _in_parts(_outputs, geometry, filters, h)
    if how == "alone":
        return torch.stack([F.conv2d(x, f, None, *geometry) for x, f in zip(h, filters.chunk(len(h)), strict=True)])
    return _restored(F.conv2d(_laid(h, own), filters, None, *_of_block(geometry, len(h), own)), len(h), own)


def input_gradient(d: Tensor, h: Tensor, filters: Tensor, geometry: Geometry, *, own: bool) -> Tensor:
    """Return the gradient by the inputs ``h``, given that by the outputs; ``filters`` and ``own`` as in ``convolve``."""
    how = _how("inputs", filters, geometry, h, own)
    if how == "products":
        return _in_parts(_input_gradients, geometry, filters, h, d)
    if how == "alone":
        alone = zip(d, h, filters.chunk(len(h)), strict=True)
        return torch.stack([_gradient(di, hi, f, geometry, of_input=True) for di, hi, f in alone])
    result = _gradient(_laid(d, own), _laid(h, own), filters, _of_block(geometry, len(h), own), of_input=True)
    return _restored(result, len(h), own)


def _how(of: Of, filters: Tensor, geometry: Geometry, h: Tensor, own: bool) -> Way | None:
    """Return the way of clients' own filters (C o, c, k, k); None if they are shared."""
    return way(of, torch.Size((len(filters) // len(h), *filters.shape[1:])), geometry, h) if own else None


def _gradient(d: Tensor, h: Tensor, filters: Tensor, geometry: Geometry, *, of_input: bool) -> Tensor:
    stride, padding, dilation, groups = geometry
    mask = [of_input, not of_input, False]
    return torch.ops.aten.convolution_backward(
        d, h, filters, None, stride, padding, dilation, False, [0, 0], groups, mask
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
