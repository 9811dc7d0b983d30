"""scikit-learn's digits, 8x8, as four domains: three sources and a target, each under a shift of its own.

`digits_to_TARGET` is for one target. The 1,797 digits, of 0..1, are cut into five equal parts by a fixed permutation: one for each
source, one for the target's training examples, one that all domains are tested on, each under its own shift.

| target | sources |
|---|---|
| `bright` | `id`, `noise`, `contrast` |
| `rot25` | `id`, `rot50`, `bright` |
| `id` | `rot-30`, `rot30`, `blur` |
| `rot15` | `id`, `rot30`, `noise` |
| `rot30` | `id`, `bright`, `noise`: outside of what the sources span, where adaptation hurts |

The target's domain is called `target` in all of them. `rotN`: counterclockwise by N degrees; `noise`: Gaussian, of 0.25;
`contrast`: x / 2 + 0.3; `bright`: x + 0.6, at most 1.6; `blur`: Gaussian, of 0.6 pixels.
"""

from pathlib import Path

import torch
from torch import Tensor

from fedfleet.datasets.digits import published
from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.signals import imported

SOURCES = {
    "bright": ("id", "noise", "contrast"),
    "rot25": ("id", "rot50", "bright"),
    "id": ("rot-30", "rot30", "blur"),
    "rot15": ("id", "rot30", "noise"),
    "rot30": ("id", "bright", "noise"),
}
"""Target -> sources."""
PARTS = 5
KEY = rng.fold(rng.key(0), "digits_shifted")


def load(folder: Path, *, target: str) -> Dataset:
    """Return the digits for a target: float32 (n, 1, 8, 8); `folder` is not read."""
    pixels, y = published()
    images = pixels.double().reshape(-1, 1, 8, 8) / 16
    parts = rng.permutation(rng.fold(KEY, "deal"), len(y)).tensor_split(PARTS)
    shifts = (*SOURCES[target], target)
    train, test = (
        _joined(images, y, [(of[d], shift, d) for d, shift in enumerate(shifts)]) for of in (parts, parts[-1:] * 4)
    )
    return Dataset(f"digits_to_{target}", train, test, (*SOURCES[target], "target"))


def _joined(images: Tensor, y: Tensor, of: list[tuple[Tensor, str, int]]) -> Examples:
    x = torch.cat([shifted(images[rows], shift, rows) for rows, shift, _ in of]).float()
    domain = torch.cat([torch.full_like(rows, d) for rows, _, d in of])
    return Examples(x, torch.cat([y[rows] for rows, *_ in of]), 10, domain)


def shifted(images: Tensor, shift: str, rows: Tensor) -> Tensor:
    """Return images (n, 1, 8, 8) under a shift; the noise of an image is of its row."""
    ndimage = imported("scipy.ndimage")
    if shift.startswith("rot"):
        return torch.from_numpy(ndimage.rotate(images.numpy(), float(shift[3:]), axes=(3, 2), reshape=False, order=1))
    match shift:
        case "noise":
            return images + 0.25 * rng.normal(rng.fold(KEY, "noise", rows), (1, 8, 8), torch.float64)
        case "contrast":
            return 0.5 * images + 0.3
        case "bright":
            return (images + 0.6).clamp(0, 1.6)
        case "blur":
            return torch.from_numpy(ndimage.gaussian_filter(images.numpy(), (0, 0, 0.6, 0.6)))
    return images
