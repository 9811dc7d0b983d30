"""USPS: digits of post codes on envelopes, 16x16 grey pixels, from LIBSVM's files.

J. J. Hull, "A database for handwritten text recognition research", IEEE TPAMI 16(5), 1994,
https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps. A line is the label, 1..10 for the digits 0..9, and
256 times the number of a pixel, a colon and its value in [-1, 1]. Checksums, and how values become bytes, are torchvision's.
"""

import bz2
from pathlib import Path

import numpy as np
import torch

from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import broken, fetch

PIXELS = 16 * 16


def load_usps(folder: Path) -> Dataset:
    """Return USPS from `folder`/usps: uint8 (7,291 + 2,007, 1, 16, 16), digits 0..9. Raises DataError."""
    from torchvision.datasets import USPS  # here, for torchvision takes more than a second to import

    parts = []
    for part in ("train", "test"):
        url, file, md5 = USPS.split_list[part]
        parts.append(_read(fetch(folder, f"usps/{file}", [url], md5), url))
    return Dataset("usps", parts[0], parts[1])


def _read(path: Path, source: str) -> Examples:
    try:
        with bz2.open(path, "rt", encoding="ascii") as file:
            rows = [line.replace(":", " ").split() for line in file]
        table = np.array(rows, dtype=np.float32)
    except (OSError, EOFError, ValueError) as error:
        raise broken(path, f"cannot be read ({error})", source) from error
    if table.ndim != 2 or table.shape[1] != 1 + 2 * PIXELS:
        raise broken(path, f"has no rows of a label and {PIXELS} pixels", source)
    label, numbers, values = table[:, 0], table[:, 1::2], table[:, 2::2]
    if not np.isin(label, range(1, 11)).all() or not (numbers == np.arange(1, PIXELS + 1)).all():
        raise broken(path, f"has labels other than 1..10, or pixels that are not numbered 1..{PIXELS}", source)
    if not (np.abs(values) <= 1).all():
        raise broken(path, "has values outside [-1, 1]", source)
    x = torch.from_numpy(((values + 1) / 2 * 255).astype(np.uint8)).view(-1, 1, 16, 16)
    return Examples(x, torch.from_numpy(label.astype(np.int64) - 1), 10)
