"""Lines that a pen drew, as images."""

import torch
from torch import Tensor

CHUNK = 512  # images at a time


def drawn(points: Tensor, side: int, width: float) -> Tensor:
    """Return the pen's paths as images, uint8 (n, 1, side, side), white on black.

    Args:
        points: float64 (n, k, 2), k >= 2: x to the right and y downwards, in pixels from the top left corner of the image.
        side: pixels a side.
        width: of the line, in pixels; its edge fades over one pixel.

    """
    return torch.cat([_drawn(chunk, side, width) for chunk in points.split(CHUNK)])


def _drawn(points: Tensor, side: int, width: float) -> Tensor:
    centre = torch.arange(side, dtype=torch.float64) + 0.5
    x, y = centre.view(1, 1, side), centre.view(1, side, 1)
    nearest = torch.full((len(points), side, side), torch.inf, dtype=torch.float64)
    for start, end in zip(points.unbind(1)[:-1], points.unbind(1)[1:], strict=True):
        x0, y0 = start.view(-1, 2, 1, 1).unbind(1)
        dx, dy = (end - start).view(-1, 2, 1, 1).unbind(1)
        length = (dx * dx + dy * dy).clamp(min=1e-12)  # a pen that rests draws a dot
        along = (((x - x0) * dx + (y - y0) * dy) / length).clamp(0, 1)
        nearest = torch.minimum(nearest, (x - x0 - along * dx).square() + (y - y0 - along * dy).square())
    ink = (width / 2 + 0.5 - nearest.sqrt()).clamp(0, 1)
    return torch.floor(ink * 255 + 0.5).to(torch.uint8).unsqueeze(1)
