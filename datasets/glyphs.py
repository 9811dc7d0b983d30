"""Printed digits: figures of TrueType faces, turned, coloured, blurred and noisy.

The faces are those that matplotlib ships: every style of DejaVu Sans, Sans Mono, Serif and STIX General, and the roman, sans serif
and typewriter of Computer Modern. Which face, size, place and colours a digit has are whole numbers, equal everywhere; how
a glyph becomes pixels is FreeType's and Pillow's, and may differ in shades of grey from one version of them to another.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from fedfleet.simulator.arithmetic import rng

STYLES = ("", "-Bold", "-Oblique", "-BoldOblique")
FACES = (
    *(f"DejaVuSans{style}" for style in STYLES),
    *(f"DejaVuSansMono{style}" for style in STYLES),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmss10", "cmtt10"),
)
LEAST_SIZE, MOST_SIZE = 21, 30  # of a face, in pixels an em; a figure is about 0.7 of it high
TURN = 15  # degrees, to either side
AWAY = 2  # pixels from the middle, in each direction
CONTRAST = 60  # levels of brightness between a digit and its background, at least
BLUR = 1.2  # pixels, at most
NOISE = 24  # levels to either side, at most


def package_faces() -> list[Path]:
    """Return the files of `FACES`, which matplotlib ships."""
    import matplotlib as mpl  # here, for what else reads data sets needs none

    return [Path(mpl.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf" for face in FACES]


def rendered(labels: Tensor, faces: Sequence[Path], key: rng.Key, side: int) -> Tensor:
    """Return images uint8 (n, 3, side, side) of the digits `labels` (n,), each drawn apart from the others."""
    count = len(labels)
    which, size, turn, right, down, blur = rng.uniform(rng.fold(key, "shape"), (6, count), torch.float64)
    fonts: dict[tuple[int, int], ImageFont.FreeTypeFont] = {}
    shapes = torch.empty(count, 1, side, side, dtype=torch.uint8)
    for i, label in enumerate(labels.tolist()):
        face = int(which[i] * len(faces)), LEAST_SIZE + int(size[i] * (MOST_SIZE - LEAST_SIZE + 1))
        if face not in fonts:
            fonts[face] = ImageFont.truetype(faces[face[0]], face[1], layout_engine=ImageFont.Layout.BASIC)
        place = side / 2 + (2 * float(right[i]) - 1) * AWAY, side / 2 + (2 * float(down[i]) - 1) * AWAY
        mask = shape(str(label), fonts[face], (2 * float(turn[i]) - 1) * TURN, place, float(blur[i]) * BLUR, side)
        shapes[i, 0] = torch.frombuffer(bytearray(mask.tobytes()), dtype=torch.uint8).view(side, side)
    ink, paper = colours(rng.fold(key, "colours"), count)
    return noisy(over(shapes, ink, paper), rng.fold(key, "noise"))


def shape(
    text: str, font: ImageFont.FreeTypeFont, turn: float, place: tuple[float, float], blur: float, side: int
) -> Image.Image:
    """Return a text's shape in shades of grey, turned by so many degrees about its middle, which is at `place`."""
    mask = Image.new("L", (side, side))
    ImageDraw.Draw(mask).text(place, text, fill=255, font=font, anchor="mm")
    turned = mask.rotate(turn, Image.Resampling.BICUBIC, center=place)
    return turned.filter(ImageFilter.GaussianBlur(blur))


def colours(key: rng.Key, count: int) -> tuple[Tensor, Tensor]:
    """Return colours of digits and of their backgrounds, int64 (count, 3), whose brightnesses are `CONTRAST` apart.

    Of pairs drawn uniformly the first that is far enough apart is taken.
    """
    levels = (rng.uniform(key, (count, 32, 2, 3), torch.float64) * 256).long()
    bright = levels.sum(-1)  # thrice the brightness
    first = ((bright[..., 0] - bright[..., 1]).abs() >= 3 * CONTRAST).long().argmax(1)
    pair = levels[torch.arange(count), first]
    return pair[:, 0], pair[:, 1]


def over(shapes: Tensor, ink: Tensor, paper: Tensor) -> Tensor:
    """Return shapes uint8 (n, 1, h, w) in colours (n, 3) on others, uint8 (n, 3, h, w)."""
    share, ink, paper = shapes.long(), ink[..., None, None], paper[..., None, None]
    return ((ink * share + paper * (255 - share) + 127) // 255).to(torch.uint8)


def noisy(images: Tensor, key: rng.Key) -> Tensor:
    """Return images with uniform noise, as strong in all of an image as one draw of up to `NOISE` levels says."""
    most = (rng.uniform(rng.fold(key, "strength"), len(images), torch.float64) * (NOISE + 1)).long()
    u = rng.uniform(
        rng.fold(key, "levels"), tuple(images.shape)
    )  # 24 bits of it, times at most 49, are exact in float32
    level = (u * (2 * most + 1).view(-1, 1, 1, 1)).long() - most.view(-1, 1, 1, 1)
    return (images + level).clamp(0, 255).to(torch.uint8)
