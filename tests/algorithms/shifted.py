"""scikit-learn's digits, 8x8, a shift a client: sources, a target, and test examples of the target."""

from __future__ import annotations

import numpy as np
import torch
from adaptation import population
from harness import World
from scipy.ndimage import gaussian_filter, rotate
from sklearn.datasets import load_digits
from torch import Tensor

from fedfleet.tasks.options import DataShape
from fedfleet.tasks.two_heads import TwoHeads, TwoHeadsOptions

CASES = {
    "bright": ("id", "noise", "contrast"),
    "rot25": ("rot0", "rot50", "bright"),
    "id": ("rot-30", "rot30", "blur"),
    "rot15": ("id", "rot30", "noise"),
}
"""Target -> sources."""


def shifted(images: np.ndarray, shift: str, draw: np.random.Generator) -> np.ndarray:
    """Images (n, 8, 8) of 0..1 under a shift."""
    if shift.startswith("rot"):
        return rotate(images, float(shift[3:]), axes=(2, 1), reshape=False, order=1)
    match shift:
        case "noise":
            return images + 0.25 * draw.standard_normal(images.shape)
        case "contrast":
            return 0.5 * images + 0.3
        case "bright":
            return (images + 0.6).clip(0, 1.6)
        case "blur":
            return gaussian_filter(images, (0, 0.6, 0.6))
    return images


def world(target: str, seed: int, **task) -> tuple[World, dict[str, Tensor]]:
    """Three sources and a target, of equal size, and as many test examples of the target."""
    pixels, labels = load_digits(return_X_y=True)
    draw = np.random.default_rng(seed)
    parts = np.array_split(draw.permutation(len(labels)), 5)
    shifts = (*CASES[target], target, target)
    x = [shifted(pixels[p].reshape(-1, 8, 8) / 16, s, draw) for p, s in zip(parts, shifts, strict=True)]
    x = [torch.from_numpy(i.astype(np.float32))[:, None] for i in x]
    y = [torch.from_numpy(labels[p]).long() for p in parts]
    options = TwoHeadsOptions(**{"hidden": (64, 64), "double_softmax": False, **task})
    clients = population(torch.cat(x[:4]), torch.cat(y[:4]), [len(i) for i in x[:4]], (3,))
    return World(TwoHeads(options, DataShape((1, 8, 8), 10)), clients), {"x": x[4], "y": y[4]}
