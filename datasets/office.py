"""Office-31 and Office-Caltech10: photographs of things in an office from a shop, from cameras, from the web.

K. Saenko et al., "Adapting visual category models to new domains", ECCV 2010; B. Gong et al., "Geodesic flow kernel for
unsupervised domain adaptation", CVPR 2012. In `office31/` and `office_caltech10/`, a folder a domain and in it a folder a class,
or a folder `images` that holds these, as the archives unpack:

    office31/amazon/images/back_pack/frame_0001.jpg
    office_caltech10/Caltech/backpack/image_0001.jpg

How the names of domains are capitalised does not matter.

No split is published: methods are tested on the very images, without their labels, that they adapt to. So here, too, the test
examples are the training examples. What comes of resizing thousands of photographs is kept.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import absent, broken
from fedfleet.datasets.made import Arrays, code, kept, versions

SITES = {
    "office31": "https://faculty.cc.gatech.edu/~judy/domainadapt",
    "office_caltech10": "https://github.com/ChristophRaab/Office_Caltech_DA_Dataset",
}
DOMAINS = {
    "office31": ("amazon", "dslr", "webcam"),
    "office_caltech10": ("amazon", "caltech", "dslr", "webcam"),
}
CLASSES = {"office31": 31, "office_caltech10": 10}


def load_office31(folder: Path, side: int = 224) -> Dataset:
    """Return Office-31 from `folder`/office31: uint8 (4,110, 3, side, side), 31 classes in the order of their names.

    Raises DataError.
    """
    return _load("office31", folder, side)


def load_office_caltech10(folder: Path, side: int = 224) -> Dataset:
    """Return Office-Caltech10 from `folder`/office_caltech10: uint8 (2,533, 3, side, side), 10 classes.

    Raises DataError.
    """
    return _load("office_caltech10", folder, side)


def _load(name: str, folder: Path, side: int) -> Dataset:
    root, site = folder / name, SITES[name]
    found = [photographs(root, domain, CLASSES[name], site) for domain in DOMAINS[name]]
    classes = list(found[0])
    for domain, other in zip(DOMAINS[name], found, strict=True):
        if strange := sorted(set(other) ^ set(classes)):
            problem = f"{strange[0]!r} is a class of {domain} or of {DOMAINS[name][0]}, not of both"
            raise broken(root / domain, problem, site)
    paths = [path for domain in found for label in classes for path in domain[label]]
    y = torch.tensor([classes.index(label) for domain in found for label in classes for _ in domain[label]])
    counts = torch.tensor([sum(map(len, domain.values())) for domain in found])
    of = code([__name__]) | versions(["pillow"]) | {"side": str(side)}
    for path in paths:
        at = path.stat()
        of[str(path.relative_to(root))] = f"{at.st_size} {at.st_mtime_ns}"
    x = kept(f"{name}-{side}", of, lambda: _resized(paths, side, site))["x"]
    examples = Examples(x, y, len(classes), torch.arange(len(found)).repeat_interleave(counts))
    return Dataset(name, examples, examples, DOMAINS[name])


def photographs(root: Path, domain: str, classes: int, site: str) -> dict[str, list[Path]]:
    """Return the photographs of a domain by class, both in the order of their names. Raises DataError."""
    there = sorted(root.iterdir()) if root.is_dir() else []
    if not (named := [at for at in there if at.name.lower() == domain and at.is_dir()]):
        raise absent(root / domain, site)
    folder = named[0] / "images" if (named[0] / "images").is_dir() else named[0]
    found = {at.name: sorted(at.glob("*.jpg")) for at in sorted(folder.iterdir()) if at.is_dir()}
    if len(found) != classes:
        raise broken(folder, f"has {len(found)} folders, expected one for each of {classes} classes", site)
    if empty := [label for label, paths in found.items() if not paths]:
        raise broken(folder / empty[0], "holds no .jpg", site)
    return found


def _resized(paths: Sequence[Path], side: int, site: str) -> Arrays:
    x = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, image in enumerate(pool.map(lambda path: _image(path, side, site), paths)):
            x[i] = image
    return {"x": x}


def _image(path: Path, side: int, site: str) -> Tensor:
    """Return a photograph uint8 (3, side, side), whatever its proportions were."""
    try:
        image = Image.open(path, formats=["JPEG"]).convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise broken(path, f"is no image ({error})", site) from error
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
