"""Digit-Five: five origins of digits as M3SDA prepared them, 3x32x32 pixels.

X. Peng et al., "Moment matching for multi-source domain adaptation", ICCV 2019, https://ai.bu.edu/M3SDA. The files of
Digit-Five.zip, in `Digit-Five/`, hold more than is used: up to 25,000 training examples of a domain, and 9,000 for testing.

| domain | file | training | test |
|---|---|---|---|
| `mnist` | mnist_data.mat | 25,000 of 55,000, drawn | the first 9,000 |
| `mnistm` | mnistm_with_label.mat | 25,000 of 55,000, drawn on its own | the first 9,000 |
| `svhn` | svhn_train_32x32.mat, svhn_test_32x32.mat | the first 25,000 | the first 9,000 |
| `syn` | syn_number.mat | 25,000 | 9,000 |
| `usps` | usps_28x28.mat | 7,438 | 1,860 |

Grey images get three equal channels, images of 28 pixels are enlarged bilinearly. As published, MNIST and MNIST-M show the
same digits, so nearly half of those drawn for one are drawn for the other.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedfleet.datasets import svhn
from fedfleet.datasets.examples import Dataset, Examples, joined
from fedfleet.datasets.files import absent, broken, is_there
from fedfleet.datasets.matlab import images, labels, read_mat
from fedfleet.datasets.resampling import enlarged, rgb
from fedfleet.simulator.arithmetic import rng

SITE = "https://ai.bu.edu/M3SDA"
SIDE = 32
TRAIN, TEST = 25_000, 9_000  # examples of a domain, at most
FILES = (
    *("mnist_data.mat", "mnistm_with_label.mat", "svhn_train_32x32.mat", "svhn_test_32x32.mat"),
    *("syn_number.mat", "usps_28x28.mat"),
)

Pair = tuple[Tensor, Tensor]


def load_digit_five(folder: Path) -> Dataset:
    """Return Digit-Five from `folder`/Digit-Five: uint8 (107,438 + 37,860, 3, 32, 32), digits 0..9. Raises DataError."""
    root = folder / "Digit-Five"
    if missing := [file for file in FILES if not is_there(root / file)]:
        raise absent(root / missing[0], SITE)  # before minutes are spent on the others
    mnist, mnistm, train, test, syn, usps = (root / file for file in FILES)
    pairs = {
        "mnist": _split(mnist, "train_32", "label_train", "test_32", "label_test", "nhw"),
        "mnistm": _split(mnistm, "train", "label_train", "test", "label_test", "nhwc"),
        "svhn": (svhn.read(train, SITE), svhn.read(test, SITE)),
        "syn": _split(syn, "train_data", "train_label", "test_data", "test_label", "nhwc"),
        "usps": _usps(usps),
    }
    drawn = {name: name in ("mnist", "mnistm") for name in pairs}
    return joined(
        "digit_five",
        {
            name: (_some(train, TRAIN, name if drawn[name] else None), _some(test, TEST, None))
            for name, (train, test) in pairs.items()
        },
    )


def _split(path: Path, x: str, y: str, x_test: str, y_test: str, order: str) -> tuple[Pair, Pair]:
    """Return the training and the test images of a file, whose axes are in the order said."""
    result = read_mat(path, [x, y, x_test, y_test], SITE)
    if order == "nhw":  # the axis of the one channel may or may not be there
        result = [a.squeeze(-1) if a.ndim == 4 and a.shape[-1] == 1 else a for a in result]
    train, test = (images(a, order, path, SITE) for a in result[::2])
    return (train, labels(result[1], len(train), path, SITE)), (test, labels(result[3], len(test), path, SITE))


def _usps(path: Path) -> tuple[Pair, Pair]:
    """Return USPS: a 2 x 2 cell array, images in [0, 1] (n, 1, 28, 28) and labels (n, 1), for training and for testing."""
    (cells,) = read_mat(path, ["dataset"], SITE)
    if cells.shape != (2, 2) or not all(isinstance(cell, np.ndarray) for cell in cells.flat):
        raise broken(path, f"has a dataset of {cells.shape}, expected a cell array of (2, 2)", SITE)
    if any(row[0].dtype.kind not in "uif" for row in cells):
        raise broken(path, "has images that are not numbers", SITE)
    result = [images(row[0] * 255, "nchw", path, SITE) for row in cells]
    train, test = ((x, labels(row[1], len(x), path, SITE)) for x, row in zip(result, cells, strict=True))
    return train, test


def _some(pair: Pair, size: int, draw: str | None) -> Examples:
    """Return `size` examples in the file's order, drawn by the key `draw`, or the first of them."""
    x, y = pair
    rows = torch.arange(min(size, len(y)))
    if draw is not None and len(y) > size:
        rows = rng.sample(rng.fold(rng.key(0), "digit_five", draw), len(y), size).sort().values
    return Examples(rgb(enlarged(x[rows], SIDE)), y[rows], 10)
