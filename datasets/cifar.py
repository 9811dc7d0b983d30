"""CIFAR-10 and CIFAR-100 from their binary versions, which, unlike the Python versions, hold no pickles.

A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html, where the checksums are published too. A record is one label byte
(CIFAR-100: the coarse label, then the fine label) and 3,072 pixels: red, green and blue planes of 32 rows of 32.
"""

from pathlib import Path

import torch
from torch import Tensor

from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import broken, fetch_members

SITE = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32


def load_cifar10(folder: Path) -> Dataset:
    """Return CIFAR-10 from `folder`/cifar-10-batches-bin: uint8 (50,000 + 10,000, 3, 32, 32), 10 classes.

    Raises DataError.
    """
    batches = [f"cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
    return _load("cifar10", folder, batches, "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 1, 10)


def load_cifar100(folder: Path) -> Dataset:
    """Return CIFAR-100 from `folder`/cifar-100-binary, shaped as CIFAR-10; labels are the 100 fine classes.

    Raises DataError.
    """
    files = ["cifar-100-binary/train.bin", "cifar-100-binary/test.bin"]
    return _load("cifar100", folder, files, "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 2, 100)


def _load(name: str, folder: Path, files: list[str], archive: str, md5: str, label_bytes: int, classes: int) -> Dataset:
    """Read `files`, the last of which is the test set."""
    paths = fetch_members(folder, {file: file for file in files}, archive, SITE + archive, md5)
    parts = [_read(path, label_bytes, classes, SITE + archive) for path in paths]
    *train, (x_test, y_test) = parts
    x, y = (torch.cat(column) for column in zip(*train, strict=True))
    return Dataset(name, Examples(x, y, classes), Examples(x_test, y_test, classes))


def _read(path: Path, label_bytes: int, classes: int, source: str) -> tuple[Tensor, Tensor]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise broken(path, f"cannot be read ({error})", source) from error
    record = label_bytes + PIXELS
    if not data or len(data) % record:
        raise broken(path, f"{len(data)} bytes are not a whole number of records of {record} bytes", source)
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(-1, record)
    y = rows[:, label_bytes - 1].to(torch.int64)
    if y.max() >= classes:
        raise broken(path, f"has the label {int(y.max())}, expected 0..{classes - 1}", source)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), y
