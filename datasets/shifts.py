"""A set of images as domains that look different: each image is shifted one way, so that no two domains share one.

All shifts map images uint8 (n, 1 or 3, h, w) to uint8 (n, 3, h, w), in whole numbers, so that every machine gives the same
bytes; `blended` does where JPEG decoders agree on its photographs.

| domain | what becomes of an image |
|---|---|
| `identity` | nothing |
| `inverted` | black becomes white |
| `rotated` | it is turned by 30 degrees, counterclockwise |
| `blended` | the absolute difference of it and a random patch of one of scikit-learn's two photographs |
| `posterised` | four levels are left of 256 |
| `edges` | the length of its gradient, by Sobel's filters |
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedfleet.datasets import blending, mnist
from fedfleet.datasets.examples import Dataset, Examples, joined
from fedfleet.datasets.resampling import rgb, turned
from fedfleet.simulator.arithmetic import rng

DEGREES = 30
LEVELS = 4


def load_fashion_mnist_shifts(folder: Path) -> Dataset:
    """Return Fashion-MNIST under the shifts: uint8 (60,000 + 10,000, 3, 28, 28), a sixth of them in each domain.

    Raises DataError.
    """
    return shifted(mnist.load_fashion_mnist(folder))


def load_mnist_shifts(folder: Path) -> Dataset:
    """Return MNIST under the shifts, shaped as Fashion-MNIST. Raises DataError."""
    return shifted(mnist.load_mnist(folder))


def shifted(data: Dataset) -> Dataset:
    """Deal the images of a data set to the domains `SHIFTS` by a fixed permutation, and shift them.

    The domains differ by one image in size at most; training images stay for training, and test images for testing.
    """
    name = f"{data.name}_shifts"
    key = rng.fold(rng.key(0), "shifts")
    parts = [_shifted(part, rng.fold(key, number)) for number, part in enumerate((data.train, data.test))]
    return joined(name, {domain: (parts[0][domain], parts[1][domain]) for domain in SHIFTS})


def _shifted(examples: Examples, key: rng.Key) -> dict[str, Examples]:
    order = rng.permutation(rng.fold(key, "deal"), len(examples))
    dealt = order.tensor_split(len(SHIFTS))
    return {
        name: Examples(shift(examples.x[rows], rng.fold(key, name)), examples.y[rows], examples.classes)
        for (name, shift), rows in zip(SHIFTS.items(), dealt, strict=True)
    }


def inverted(images: Tensor) -> Tensor:
    """Return images whose bright pixels are dark."""
    return rgb(255 - images)


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Return images turned counterclockwise about their middle, bilinearly; what comes from outside is black."""
    return rgb(turned(images, degrees))


def posterised(images: Tensor, levels: int) -> Tensor:
    """Return images with so many levels, from 2, evenly spaced from 0 to 255."""
    return rgb((images.to(torch.int32) * levels // 256 * 255 // (levels - 1)).to(torch.uint8))


def edges(images: Tensor) -> Tensor:
    """Return a quarter of the length of Sobel's gradient, at most 255, of images whose border goes on outside as it is."""
    x = torch.nn.functional.pad(images.double(), (1, 1, 1, 1), mode="replicate")
    smooth_down = x[..., :-2, :] + 2 * x[..., 1:-1, :] + x[..., 2:, :]
    smooth_across = x[..., :-2] + 2 * x[..., 1:-1] + x[..., 2:]
    across = smooth_down[..., 2:] - smooth_down[..., :-2]
    down = smooth_across[..., 2:, :] - smooth_across[..., :-2, :]
    return rgb(torch.floor((across.square() + down.square()).sqrt() / 4).clamp(max=255).to(torch.uint8))


def _blended(images: Tensor, key: rng.Key) -> Tensor:
    before = blending.patches(blending.package_photographs(), key, len(images), images.shape[-1])
    return blending.blended(images, before)


SHIFTS: Mapping[str, Callable[[Tensor, rng.Key], Tensor]] = {
    "identity": lambda images, key: rgb(images),
    "inverted": lambda images, key: inverted(images),
    "rotated": lambda images, key: rotated(images, DEGREES),
    "blended": _blended,
    "posterised": lambda images, key: posterised(images, LEVELS),
    "edges": lambda images, key: edges(images),
}
"""Domains: images and a key to their shifted images."""
