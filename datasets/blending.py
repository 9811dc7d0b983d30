"""Digits and clothes before photographs: what makes MNIST-M of MNIST.

Y. Ganin et al., "Domain-adversarial training of neural networks", JMLR 17, 2016, arXiv:1505.07818, section 5.2.2: the absolute
difference of an image and a random patch of a colour photograph, channel by channel.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng


def package_photographs() -> list[Tensor]:
    """Return the two photographs that scikit-learn ships, uint8 (3, 427, 640): a temple and a flower."""
    from sklearn.datasets import load_sample_images  # here, for scikit-learn takes a second to import

    return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in load_sample_images().images]


def patches(photographs: Sequence[Tensor], key: rng.Key, count: int, side: int) -> Tensor:
    """Return `count` random squares of photographs, uint8 (count, 3, side, side).

    Each is of a photograph drawn uniformly, uint8 (3, height, width), its top left corner drawn uniformly where it fits.
    Raises ValueError for a photograph in which none does.
    """
    if small := [tuple(p.shape[1:]) for p in photographs if min(p.shape[1:]) < side]:
        raise ValueError(f"a photograph of {small[0]} holds no patch of {side} x {side}")
    which, down, right = rng.uniform(key, (3, count), torch.float64)
    which = (which * len(photographs)).long()
    result = torch.empty(count, 3, side, side, dtype=torch.uint8)
    for number, photograph in enumerate(photographs):
        rows = (which == number).nonzero().squeeze(1)
        windows = photograph.unfold(1, side, 1).unfold(2, side, 1)  # (3, tops, lefts, side, side), without a copy
        top, left = (down[rows] * windows.shape[1]).long(), (right[rows] * windows.shape[2]).long()
        result[rows] = windows[:, top, left].transpose(0, 1)
    return result


def blended(images: Tensor, before: Tensor) -> Tensor:
    """Return |patch - image|, uint8 (n, 3, h, w), of images (n, 1 or 3, h, w) and patches `before` (n, 3, h, w)."""
    return (before.to(torch.int16) - images.to(torch.int16)).abs().to(torch.uint8)


def silhouettes(images: Tensor) -> Tensor:
    """Return 255 wherever a pixel is above 0, else 0: the digit that MNIST-M blends."""
    return (images > 0).to(torch.uint8) * 255
