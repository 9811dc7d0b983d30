"""SVHN: digits of house numbers in photographs, 3x32x32 pixels, from the files of its second format.

Y. Netzer et al., "Reading digits in natural images with unsupervised feature learning", NIPS workshop, 2011,
http://ufldl.stanford.edu/housenumbers. Its label 10 is the digit 0. Checksums are those torchvision publishes.
"""

from pathlib import Path

from torch import Tensor

from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import fetch
from fedfleet.datasets.matlab import images, labels, read_mat


def load_svhn(folder: Path) -> Dataset:
    """Return SVHN from `folder`/svhn: uint8 (73,257 + 26,032, 3, 32, 32), digits 0..9. Raises DataError."""
    from torchvision.datasets import SVHN  # here, for torchvision takes more than a second to import

    parts = []
    for part in ("train", "test"):
        url, file, md5 = SVHN.split_list[part]
        parts.append(Examples(*read(fetch(folder, f"svhn/{file}", [url], md5), url), 10))
    return Dataset("svhn", parts[0], parts[1])


def read(path: Path, source: str) -> tuple[Tensor, Tensor]:
    """Return images uint8 (n, 3, 32, 32) and digits int64 (n,) from a file published at `source`. Raises DataError."""
    x, y = read_mat(path, ["X", "y"], source)
    result = images(x, "hwcn", path, source)
    return result.contiguous(), labels(y, len(result), path, source)
