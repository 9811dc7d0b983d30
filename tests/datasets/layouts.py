"""Files of published layouts, made here."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
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


def small_celeba(root: Path, people: Sequence[int], parts: Sequence[int], grey: Sequence[int]) -> Path:
    """Photographs of one grey below a red strip, as CelebA's: who they are of, and what part they are in."""
    folder = root / "celeba"
    (folder / "img_align_celeba").mkdir(parents=True)
    names = [f"{i + 1:06}.jpg" for i in range(len(people))]
    for name, value in zip(names, grey, strict=True):
        image = Image.new("RGB", (178, 218), (value, value, value))
        image.paste((255, 0, 0), (0, 0, 178, 20))  # a strip that the crop leaves out
        image.save(folder / "img_align_celeba" / name, quality=95)
    for file, column in (("identity_CelebA.txt", people), ("list_eval_partition.txt", parts)):
        (folder / file).write_text("".join(f"{n} {v}\n" for n, v in zip(names, column, strict=True)))
    return root


def with_attributes(root: Path, blond: Sequence[int], male: Sequence[int]) -> Path:
    """The list of attributes of these photographs, of which 1 says yes and 0 no."""
    names = ["Bald", "Blond_Hair", "Male", "Young"]
    rows = [[1, 2 * b - 1, 2 * m - 1, -1] for b, m in zip(blond, male, strict=True)]
    lines = [f"{i + 1:06}.jpg  " + " ".join(f"{v:2}" for v in row) for i, row in enumerate(rows)]
    text = "\n".join([str(len(rows)), " ".join(names) + " ", *lines]) + "\n"
    (root / "celeba" / "list_attr_celeba.txt").write_text(text)
    return root


def on_disk(folder: Path) -> FederatedDataset:
    return disk.load(disk.DiskOptions(path=str(folder)), None, 0)
