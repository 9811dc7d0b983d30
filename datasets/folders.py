"""Photographs and drawings in folders: a folder a domain, in it a folder a class. What benchmarks of many domains come as.

| data set | | images | classes |
|---|---|---|---|
| `office31` | K. Saenko et al., "Adapting visual category models to new domains", ECCV 2010 | 4,110 | 31 |
| `office_caltech10` | B. Gong et al., "Geodesic flow kernel for unsupervised domain adaptation", CVPR 2012 | 2,533 | 10 |
| `pacs` | D. Li et al., "Deeper, broader and artier domain generalization", ICCV 2017 | 9,991 | 7 |
| `vlcs` | C. Fang, Y. Xu, D. N. Rockmore, "Unbiased metric learning", ICCV 2013 | 10,729 | 5 |
| `office_home` | H. Venkateswara et al., "Deep hashing network for unsupervised domain adaptation", CVPR 2017 | 15,588 | 65 |
| `terra_incognita` | S. Beery, G. Van Horn, P. Perona, "Recognition in terra incognita", ECCV 2018 | 24,788 | 10 |

The last four as DomainBed (Gulrajani & Lopez-Paz, ICLR 2021) lays them out: its four locations and ten classes of Terra Incognita.
Each lies in a folder of its name in the data directory, and in a domain's folder, or in a folder `images` there, are the classes:

    office31/amazon/images/back_pack/frame_0001.jpg
    office_home/Real World/Alarm_Clock/00001.jpg

Capitals, spaces and underscores in the names of data sets and domains do not matter: DomainBed writes `PACS` and `VLCS`. Files
are .jpg, .jpeg or .png, in capitals or not; hidden ones do not count.

Where no split is published, methods are tested on a domain that nobody has learnt from, or on the very images, without their
labels, that they adapt to. So here, too, the test examples are the training examples. PACS has one, in lists beside the folders:
`art_painting_train_kfold.txt`, `art_painting_test_kfold.txt` and so on, of lines `art_painting/dog/pic_001.jpg 1`, classes counted
from 1. Where they are, each domain's training examples are those of the first and its test examples those of the second, which
are all; those of `_crossval_kfold.txt` then are not learnt from. Where none of them is, PACS is as the others.

What comes of resizing thousands of images is kept.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedfleet.datasets.cached_arrays import Arrays, code, kept, versions
from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import DataError, absent, broken, ending, entries, is_there
from fedfleet.simulator.errors import one_line
from fedfleet.simulator.plain_text import OtherEncoding, decoded

SUFFIXES = (".jpg", ".jpeg", ".png")
DOMAINBED = "https://github.com/facebookresearch/DomainBed (domainbed/scripts/download.py)"


class Folders(NamedTuple):
    """A data set in folders: where it is published, its domains' folders, its classes, whether lists may say its split."""

    site: str
    domains: tuple[str, ...]
    classes: int
    lists: bool = False


SETS: Mapping[str, Folders] = {
    "office31": Folders("https://faculty.cc.gatech.edu/~judy/domainadapt", ("amazon", "dslr", "webcam"), 31),
    "office_caltech10": Folders(
        "https://github.com/ChristophRaab/Office_Caltech_DA_Dataset", ("amazon", "caltech", "dslr", "webcam"), 10
    ),
    "pacs": Folders(DOMAINBED, ("art_painting", "cartoon", "photo", "sketch"), 7, lists=True),
    "vlcs": Folders(DOMAINBED, ("Caltech101", "LabelMe", "SUN09", "VOC2007"), 5),
    "office_home": Folders(
        "https://www.hemanthdv.org/officeHomeDataset.html", ("Art", "Clipart", "Product", "Real World"), 65
    ),
    "terra_incognita": Folders(DOMAINBED, ("location_38", "location_43", "location_46", "location_100"), 10),
}


def load(folder: Path, side: int = 224, *, name: str) -> Dataset:
    """Return one of `SETS` from `folder`/name: uint8 (n, 3, side, side), labels in the order of the classes' names.

    Raises DataError.
    """
    of, root = SETS[name], _called(folder, name) or folder / name
    result = [photographs(root, domain, of) for domain in of.domains]
    classes = list(result[0])
    for domain, other in zip(of.domains, result, strict=True):
        if strange := sorted(set(other) ^ set(classes)):
            problem = f"{strange[0]!r} is a class of {domain} or of {of.domains[0]}, not of both"
            raise broken(root / domain, problem, of.site)
    paths = [path for domain in result for label in classes for path in domain[label]]
    y = torch.tensor([classes.index(label) for domain in result for label in classes for _ in domain[label]])
    counts = torch.tensor([sum(map(len, domain.values())) for domain in result])
    parts = [torch.tensor([path in listed for path in paths]) for listed in _split(root, of, result)]
    made_of = code([__name__]) | versions(["pillow"]) | {"side": str(side)}
    for path in paths:
        made_of[str(path.relative_to(root))] = _marks(path, of.site)
    x = kept(f"{name}-{side}", made_of, lambda: _resized(paths, side, of.site))["x"]
    examples = Examples(x, y, len(classes), torch.arange(len(result)).repeat_interleave(counts))
    train, test = (examples.rows(part) for part in parts) if parts else (examples, examples)
    return Dataset(name, train, test, tuple(domain.lower().replace(" ", "_") for domain in of.domains))


def photographs(root: Path, domain: str, of: Folders) -> dict[str, list[Path]]:
    """Return the images of a domain by class, both in the order of their names. Raises DataError."""
    if (at := _called(root, domain)) is None:
        raise absent(root / domain, of.site)
    folder = at / "images" if (at / "images").is_dir() else at
    result = {at.name: ending(at, SUFFIXES) for at in entries(folder) if at.is_dir()}
    if len(result) != of.classes:
        problem = f"has {len(result)} folders, expected one for each of {of.classes} classes"
        raise broken(folder, problem, of.site)
    if empty := [label for label, paths in result.items() if not paths]:
        raise broken(folder / empty[0], f"holds no {' or '.join(SUFFIXES)}", of.site)
    return result


def _called(folder: Path, name: str) -> Path | None:
    """Return the folder of that name, however it is written; as it stands where there are several."""
    if (folder / name).is_dir():
        return folder / name
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    return next((at for at in there if _plain(at.name) == _plain(name) and at.is_dir()), None)


def _marks(path: Path, site: str) -> str:
    """Return what changes with a file. Raises DataError for a link to nothing."""
    try:
        at = path.stat()
    except OSError as error:
        raise broken(path, f"cannot be read ({error})", site) from error
    return f"{at.st_size} {at.st_mtime_ns}"


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _split(root: Path, of: Folders, result: Sequence[Mapping[str, list[Path]]]) -> list[set[Path]]:
    """Return the images listed for training and those for testing, or nothing where there are no lists. Raises DataError."""
    lists = {part: [root / f"{domain}_{part}_kfold.txt" for domain in of.domains] for part in ("train", "test")}
    there = {path: is_there(path) for paths in lists.values() for path in paths}
    if not of.lists or not any(there.values()):
        return []
    if missing := [path for path, is_here in there.items() if not is_here]:
        raise DataError(f"{missing[0]} is not there, and others of its kind are: fetch it, too, or move those away")
    return [
        {image for of_domain in zip(paths, of.domains, result, strict=True) for image in _listed(*of_domain)}
        for paths in lists.values()
    ]


def _listed(path: Path, domain: str, images: Mapping[str, list[Path]]) -> Iterator[Path]:
    """Give the images that a list names. Raises DataError for what is not one of them, or of another class."""
    known = {
        f"{domain}/{label}/{image.name} {number}": image
        for number, label in enumerate(images, 1)
        for image in images[label]
    }
    try:
        lines = decoded(path.read_bytes()).splitlines()
    except (OSError, OtherEncoding) as error:
        raise DataError(f"{path}: cannot be read ({one_line(error)}); fetch it again") from error
    if not lines:
        raise DataError(f"{path}: names no image; fetch it again")
    if twice := [line for line, times in Counter(line.strip() for line in lines).items() if times > 1]:
        raise DataError(f"{path}: {twice[0][:80]!r} is there twice; fetch it again")
    for number, line in enumerate(lines, 1):
        if line.strip() not in known:
            raise DataError(
                f"{path}: line {number} is {line[:80]!r}, which is no image that is there and the number of its class; fetch "
                f"both again"
            )
        yield known[line.strip()]


def _resized(paths: Sequence[Path], side: int, site: str) -> Arrays:
    x = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, image in enumerate(pool.map(lambda path: _image(path, side, site), paths)):
            x[i] = image
    return {"x": x}


def _image(path: Path, side: int, site: str) -> Tensor:
    """Return an image uint8 (3, side, side), whatever its proportions were."""
    try:
        image = Image.open(path, formats=["JPEG", "PNG"]).convert("RGB")
        image = image.resize((side, side), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise broken(path, f"is no image ({error})", site) from error
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
