"""MNIST and MNIST-M, which is made of it with photographs, 3x28x28 pixels, as in the experiments of FedMM.

Y. Ganin et al., JMLR 17, 2016, arXiv:1505.07818; Y. Shen et al., "FedMM", AAMAS 2023. The photographs are the 200 training images
of BSDS500 (P. Arbelaez et al., IEEE TPAMI 33(5), 2011), in `BSR/BSDS500/data/images/train/`, as its archive unpacks.

Both domains show digits as black and white: 255 wherever MNIST is above 0. MNIST-M is |patch - digit| of a random patch.
MNIST's first 5,000 training images are left out, which are for validation there: 55,000 remain.

- `mnistm`: both domains hold the same digits in the same order, as published, in training and in testing.
- `mnistm_unpaired`: each holds a random half of them, so that nothing of a digit's label reaches the other domain.
"""

from pathlib import Path

import torch
from torch import Tensor

from fedfleet.datasets.blending import blended, patches, silhouettes
from fedfleet.datasets.examples import Dataset, Examples, joined
from fedfleet.datasets.files import absent, broken, ending
from fedfleet.datasets.mnist import load_mnist
from fedfleet.datasets.resampling import rgb
from fedfleet.simulator.arithmetic import rng

SITE = "http://www.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/BSR/BSR_bsds500.tgz"
PHOTOGRAPHS = Path("BSR", "BSDS500", "data", "images", "train")
VALIDATION = 5_000
DOMAINS = ("mnist", "mnistm")


def load_mnistm(folder: Path, *, paired: bool = True) -> Dataset:
    """Return MNIST and MNIST-M from `folder`/mnist and `folder`/BSR: uint8 (n, 3, 28, 28), digits 0..9.

    n is 110,000 + 20,000 if `paired`, or else 55,000 + 10,000. Raises DataError.
    """
    result = photographs(folder / PHOTOGRAPHS)
    data = load_mnist(folder)
    key = rng.fold(rng.key(0), "mnistm")
    parts = []
    for number, part in enumerate((_without(data.train, VALIDATION), data.test)):
        mine, theirs = _halves(part, rng.fold(key, "halves", number)) if not paired else (part, part)
        before = patches(result, rng.fold(key, "patches", number), len(theirs), 28)
        source = Examples(rgb(silhouettes(mine.x)), mine.y, 10)
        parts.append((source, Examples(blended(silhouettes(theirs.x), before), theirs.y, 10)))
    name = "mnistm" if paired else "mnistm_unpaired"
    return joined(name, {domain: (parts[0][k], parts[1][k]) for k, domain in enumerate(DOMAINS)})


def photographs(folder: Path) -> list[Tensor]:
    """Return the photographs in a folder by name, uint8 (3, height, width) each. Raises DataError."""
    import numpy as np
    from PIL import Image

    if not (paths := ending(folder, (".jpg",))):
        raise absent(folder / "*.jpg", SITE)
    result = []
    for path in paths:
        try:
            image = Image.open(path, formats=["JPEG"]).convert("RGB")
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise broken(path, f"is no image ({error})", SITE) from error
        if min(image.size) < 28:
            raise broken(path, f"has {image.size[0]} x {image.size[1]} pixels, which hold no patch of 28 x 28", SITE)
        result.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    return result


def _without(examples: Examples, first: int) -> Examples:
    return Examples(examples.x[first:], examples.y[first:], examples.classes)


def _halves(examples: Examples, key: rng.Key) -> tuple[Examples, Examples]:
    order = rng.permutation(key, len(examples))
    one, other = (Examples(examples.x[rows], examples.y[rows], 10) for rows in order.tensor_split(2))
    return one, other
