"""Images in another size, or turned, in whole numbers, so that every machine gives the same bytes."""

import math

import torch
from torch import Tensor

CHUNK = 2048  # images at a time: doubles take eight times the memory of bytes
PART = 256  # a place between pixels is rounded to one so many-th of a pixel


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


def turned(images: Tensor, degrees: float) -> Tensor:
    """Return images uint8 (n, c, h, w) turned counterclockwise about their middle, bilinearly; what comes from outside is black."""
    height, width = images.shape[2:]
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    y, x = torch.meshgrid(
        torch.arange(height).double() - (height - 1) / 2, torch.arange(width).double() - (width - 1) / 2, indexing="ij"
    )
    # Where a pixel of the result comes from, in parts of a pixel: y points downwards.
    across = torch.floor((x * cosine - y * sine + (width - 1) / 2) * PART + 0.5).long()
    down = torch.floor((x * sine + y * cosine + (height - 1) / 2) * PART + 0.5).long()
    left, top = across.div(PART, rounding_mode="floor"), down.div(PART, rounding_mode="floor")
    right_share, low_share = across - left * PART, down - top * PART
    flat = images.flatten(2)
    total = torch.full((1, 1, height * width), PART * PART // 2, dtype=torch.int32)
    for one_down, row_share in ((0, PART - low_share), (1, low_share)):
        for one_right, column_share in ((0, PART - right_share), (1, right_share)):
            row, column = top + one_down, left + one_right
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            place = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
            share = (row_share * column_share * inside).flatten().to(torch.int32)
            total = total + flat[:, :, place.flatten()] * share
    return (total // (PART * PART)).to(torch.uint8).unflatten(2, (height, width))


def rgb(images: Tensor) -> Tensor:
    """Return images (n, 1 or 3, h, w) with three channels, grey ones repeated."""
    return images.expand(-1, 3, -1, -1).contiguous()
