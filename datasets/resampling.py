"""Images in another size, in whole numbers, so that every machine gives the same bytes."""

import torch
from torch import Tensor

CHUNK = 2048  # images at a time: doubles take eight times the memory of bytes


def enlarged(images: Tensor, side: int) -> Tensor:
    """Return images uint8 (n, c, h, w), each side at most `side`, as (n, c, side, side) by bilinear interpolation.

    Pixels are squares whose values stand at their centres, as in Pillow, from which a value differs by 1 at most: this one
    is rounded once, half up. Raises ValueError for a smaller side, which would need a filter against aliasing.
    """
    if side < max(images.shape[2:]):
        raise ValueError(f"side is {side}: images of {tuple(images.shape[2:])} can only become larger")
    down, right = (_weights(n, side) for n in images.shape[2:])
    whole = 2 * side * 2 * side  # what the weights of a pixel add up to
    pieces = [
        torch.floor((down @ chunk.double() @ right.T * 2 + whole) / (2 * whole)).to(torch.uint8)
        for chunk in images.split(CHUNK)
    ]
    return torch.cat(pieces) if pieces else images.new_empty(0, images.shape[1], side, side)


def _weights(size: int, side: int) -> Tensor:
    """Return whole numbers (side, size), as doubles; those of a row are two neighbours' at most and add up to 2 side."""
    place = ((2 * torch.arange(side) + 1) * size - side).clamp(0, 2 * side * (size - 1))  # in units of 1 / (2 side)
    first, part = place // (2 * side), place % (2 * side)
    weights = torch.zeros(side, size, dtype=torch.float64)
    rows = torch.arange(side)
    weights[rows, first] = (2 * side - part).double()
    weights[rows, (first + 1).clamp(max=size - 1)] += part.double()
    return weights


def rgb(images: Tensor) -> Tensor:
    """Return images (n, 1 or 3, h, w) with three channels, grey ones repeated."""
    return images.expand(-1, 3, -1, -1).contiguous()
