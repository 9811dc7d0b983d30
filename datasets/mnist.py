"""MNIST and the sets published in its format: images of 28x28 grey pixels in IDX files.

- MNIST: Y. LeCun, C. Cortes, C. J. C. Burges, "The MNIST database of handwritten digits", 1998.
- Fashion-MNIST: H. Xiao, K. Rasul, R. Vollgraf, arXiv:1708.07747, 2017.
- EMNIST: G. Cohen, S. Afshar, J. Tapson, A. van Schaik, "EMNIST: an extension of MNIST to handwritten letters",
  arXiv:1702.05373, 2017. Its images are stored transposed, and the labels of `letters` count from 1.

Mirrors and checksums are those torchvision publishes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import broken, fetch, fetch_members, is_there, read_idx

if TYPE_CHECKING:  # else where it is needed: torchvision takes more than a second to import
    from torchvision.datasets import MNIST

EMNIST_SPLITS = ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")


def load_mnist(folder: Path) -> Dataset:
    """Return MNIST from `folder`/mnist: uint8 (60,000 + 10,000, 1, 28, 28), digits 0..9. Raises DataError."""
    from torchvision.datasets import MNIST

    return _load("mnist", folder, "mnist", MNIST)


def load_fashion_mnist(folder: Path) -> Dataset:
    """Return Fashion-MNIST from `folder`/fashion-mnist, shaped as MNIST; 10 classes of clothes. Raises DataError."""
    from torchvision.datasets import FashionMNIST

    return _load("fashion_mnist", folder, "fashion-mnist", FashionMNIST)


def load_emnist(folder: Path, split: str = "balanced") -> Dataset:
    """Return one of `EMNIST_SPLITS` from `folder`/emnist: uint8 (n, 1, 28, 28), upright, labels from 0.

    Classes: byclass 62, bymerge and balanced 47, letters 26, digits and mnist 10. Raises DataError.
    """
    from torchvision.datasets import EMNIST

    stem = f"emnist-{split}"
    names = [f"{stem}-{part}-{kind}-ubyte.gz" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1")]
    unpacked = [(folder / "emnist" / name).with_suffix("") for name in names]
    if all(is_there(path) for path in unpacked):
        paths = unpacked
    else:
        members = {f"emnist/{name}": f"gzip/{name}" for name in names}
        paths = fetch_members(folder, members, "emnist/gzip.zip", EMNIST.url, EMNIST.md5)
    first = 1 if split == "letters" else 0
    classes = len(EMNIST.classes_split_dict[split]) - first  # torchvision lists a label "N/A" that never occurs
    train = _read(paths[0], paths[1], classes, EMNIST.url, first)
    test = _read(paths[2], paths[3], classes, EMNIST.url, first)
    return Dataset(f"emnist_{split}", _transpose(train), _transpose(test))


def _load(name: str, folder: Path, subfolder: str, source: type[MNIST]) -> Dataset:
    paths = [
        fetch(folder, f"{subfolder}/{file}", [mirror + file for mirror in source.mirrors], md5)
        for file, md5 in source.resources
    ]
    train = _read(paths[0], paths[1], 10, source.mirrors[0])
    test = _read(paths[2], paths[3], 10, source.mirrors[0])
    return Dataset(name, train, test)


def _read(images_path: Path, labels_path: Path, classes: int, source: str, first_label: int = 0) -> Examples:
    images, labels = read_idx(images_path, source), read_idx(labels_path, source)
    if images.ndim != 3:
        raise broken(images_path, f"has {images.ndim} dimensions, images have 3", source)
    if labels.shape != images.shape[:1]:
        problem = f"has the shape {tuple(labels.shape)}, the {len(images)} images need ({len(images)},)"
        raise broken(labels_path, problem, source)
    y = labels.to(torch.int64) - first_label
    if y.min() < 0 or y.max() >= classes:
        problem = (
            f"has labels {int(labels.min())}..{int(labels.max())}, expected {first_label}..{classes - 1 + first_label}"
        )
        raise broken(labels_path, problem, source)
    return Examples(images.unsqueeze(1), y, classes)


def _transpose(examples: Examples) -> Examples:
    return Examples(examples.x.transpose(2, 3).contiguous(), examples.y, examples.classes)
