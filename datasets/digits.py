"""scikit-learn's digits: 1,797 real handwritten digits of 8x8 pixels, inside the package, so no file and no network.

E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998 (its test
part), https://doi.org/10.24432/C50P49.
"""

from pathlib import Path

import numpy as np
import torch

from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.simulator.signals import imported


def load(folder: Path) -> Dataset:
    """Return the digits as float32 (n, 1, 8, 8), scaled from 0..16 to [-1, 1]; `folder` is not read.

    No split is published. The test examples are the last fifth (rounded down) of every class in file order; training
    and test examples both keep the file order.
    """
    load_digits = imported("sklearn.datasets").load_digits  # here, for scikit-learn takes a second
    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels.astype(np.float32) / 8 - 1).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels.astype(np.int64))
    is_test = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        rows = torch.nonzero(y == label).squeeze(1)
        is_test[rows[len(rows) - len(rows) // 5 :]] = True
    return Dataset("digits", Examples(x[~is_test], y[~is_test], 10), Examples(x[is_test], y[is_test], 10))
