"""Files of published layouts, made here."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor

from fedfleet.datasets import disk
from fedfleet.datasets.examples import FederatedDataset


def idx(values: Tensor) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.numpy().tobytes()


def small_mnist(root: Path, name: str) -> Path:
    """Twelve images to learn from and six to test on, as MNIST's."""
    folder = root / name.replace("_", "-")
    folder.mkdir()
    for part, count in (("train", 12), ("t10k", 6)):
        images, labels = torch.arange(count * 784).view(count, 28, 28) % 251, torch.arange(count) % 10
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(values.to(torch.uint8))))
    return root


def on_disk(folder: Path) -> FederatedDataset:
    return disk.load(disk.DiskOptions(path=str(folder)), None, 0)
