"""Torchvision's data sets by their names there, from a folder in which their files lie; nothing is downloaded.

Those with images and labels, a published split and files that are read without unpickling: torchvision's CIFAR is a pickle, and
`cifar10` and `cifar100` here read the binary version of the same images.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from fedfleet.datasets import user_data
from fedfleet.datasets.files import data_dir
from fedfleet.datasets.parts import Parts, split
from fedfleet.datasets.user_data import Rows, fail
from fedfleet.simulator.errors import one_line
from fedfleet.simulator.registry import Options

TRAIN, SPLIT, VALIDATED = (
    ({"train": True}, {"train": False}),
    ({"split": "train"}, {"split": "test"}),
    ("trainval", "test"),
)
OURS = {name.replace("_", ""): name for name in ("mnist", "fashion_mnist", "emnist", "cifar10", "cifar100", "celeba")}
"""Those that are read here by names of their own, as torchvision writes them in small letters."""
SETS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **dict.fromkeys(("KMNIST", "QMNIST", "USPS"), TRAIN),
    **dict.fromkeys(("Country211", "DTD", "Flowers102", "Food101", "GTSRB", "RenderedSST2", "STL10", "SVHN"), SPLIT),
    **dict.fromkeys(("FGVCAircraft", "OxfordIIITPet"), tuple({"split": part} for part in VALIDATED)),
    "Imagenette": ({"split": "train"}, {"split": "val"}),
}  # pyright: ignore[reportAssignmentType]
"""What the training and the test examples of each are asked for by."""


class TorchvisionOptions(Options):
    """A data set of torchvision's."""

    dataset: str
    """Its name in torchvision.datasets, such as KMNIST."""
    path: str | None = None
    """Folder that torchvision calls root; ``torchvision`` in the data directory if not given."""
    side: int | None = Field(default=None, ge=1)
    """Pixels that both sides are resized to; all images have to be of one size if not given."""
    channels: int = Field(default=3, ge=1, le=3)
    """3, or 1 for grey."""
    sha256: str | None = None
    """Digest of what was read; a run says here what it was."""


def read(options: TorchvisionOptions) -> Parts:
    """Return the training and the test examples. Raises DataError."""
    from torchvision import datasets  # takes a second to import

    name = options.dataset
    if name not in SETS:
        near = difflib.get_close_matches(name, SETS, n=1)
        if (own := OURS.get(name.lower().replace("-", "").replace("_", ""))) is not None:
            hint = f"{own} is read here as it is published: set population.dataset={own}"
        else:
            hint = f"did you mean {near[0]!r}" if near else f"choose one of {', '.join(SETS)}"
        fail(f"population.dataset.dataset={name!r}", "none that is read", hint)
    if options.channels == 2:
        fail("population.dataset.channels=2", "no images have two", "give 3, or 1 for grey")
    root = data_dir() / "torchvision" if options.path is None else Path(options.path).expanduser()
    sides = []
    for part, asked in zip(("training", "test"), SETS[name], strict=True):
        try:
            result = getattr(datasets, name)(str(root), **asked)
        except (OSError, RuntimeError, ValueError) as e:
            fix = f"fetch it by torchvision.datasets.{name}({str(root)!r}, download=True), or give another path"
            fail(f"{root}", f"{name} cannot be read ({one_line(e)})", fix)
        sides.append(_rows(f"{name}, {part}", result, options))
    return split(sides[0], sides[1])


def _rows(where: str, result: Any, options: TorchvisionOptions) -> Rows:
    images, y = [], []
    for i in range(len(result)):
        image, label = result[i]
        image = image.convert("L" if options.channels == 1 else "RGB")
        if options.side is not None:
            image = image.resize((options.side, options.side), Image.Resampling.BILINEAR)
        images.append(np.atleast_3d(np.asarray(image)))
        y.append(int(label))
        if images[-1].shape != images[0].shape:
            sizes = [" x ".join(map(str, one.shape[:2])) for one in (images[-1], images[0])]
            fail(f"{where}, example {i}", f"is of {sizes[0]} pixels, and the first of {sizes[1]}", "set side")
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return Rows(where, x, user_data.labels(np.array(y), where, None, len(y)))
