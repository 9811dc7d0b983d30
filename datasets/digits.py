"""scikit-learn's digits: 1,797 real handwritten digits of 8x8 pixels, inside the package, so no file and no network.

E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998 (its test
part), https://doi.org/10.24432/C50P49.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedfleet.datasets.examples import Dataset, Examples


def load(folder: Path) -> Dataset:
    """Return the digits as float32 (n, 1, 8, 8), scaled from 0..16 to [-1, 1]; `folder` is not read.

    No split is published. The test examples are the last fifth (rounded down) of every class in file order; training
    and test examples both keep the file order.
    """
    pixels, y = published()
    x = (pixels.float() / 8 - 1).reshape(-1, 1, 8, 8)
    is_test = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        rows = torch.nonzero(y == label).squeeze(1)
        is_test[rows[len(rows) - len(rows) // 5 :]] = True
    return Dataset("digits", Examples(x[~is_test], y[~is_test], 10), Examples(x[is_test], y[is_test], 10))


def published() -> tuple[Tensor, Tensor]:
    """Return the pixels (1797, 64), from 0 to 16, and labels (1797,) as they are published, uint8 and int64.

    As ``sklearn.datasets.load_digits`` does, but without scikit-learn, whose import takes three seconds of every process.
    """
    found = importlib.util.find_spec("sklearn")
    assert found is not None  # a requirement of the package
    table = Path(str(found.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    rows = torch.from_numpy(np.loadtxt(table, delimiter=",", dtype=np.uint8))
    return rows[:, :-1], rows[:, -1].long()
