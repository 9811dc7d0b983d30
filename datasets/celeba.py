"""CelebA at 64 x 64 from its original files: aligned photographs of faces, labelled by who they show, or by whether they are blond.

Z. Liu, P. Luo, X. Wang, X. Tang, "Deep learning face attributes in the wild", ICCV 2015,
https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html. Its terms ask that it be fetched by hand. In `celeba/`:

    img_align_celeba.zip, or unpacked img_align_celeba/000001.jpg, ...
    identity_CelebA.txt          a line a photograph: its file, the number of the person
    list_eval_partition.txt      a line a photograph: its file, 0 (training), 1 (validation) or 2 (test)
    list_attr_celeba.txt         of celeba_blond: their number, names of 40 attributes, a line a photograph: its file, 1 or -1 each

The short side becomes 64 pixels, and the middle 64 x 64 are kept, as in CDMA's experiments. What comes of it is kept in
`celeba/images_64.safetensors`, since reading 202,599 photographs takes minutes.
"""

import io
import os
import re
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedfleet.datasets.examples import Column, Dataset, Examples
from fedfleet.datasets.files import DataError, absent, broken, is_there

SITE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
SIDE = 64
GROUPS = ("not_blond_female", "not_blond_male", "blond_female", "blond_male")
KEPT = "images_64.safetensors"
TELL_EVERY = 10_000
UNREADABLE = (OSError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile, Image.DecompressionBombError)
"""What a damaged, encrypted or hostile photograph or archive makes its readers raise."""


def load_celeba(folder: Path) -> Dataset:
    """Return CelebA from `folder`/celeba: uint8 (162,770 + 19,962, 3, 64, 64); labels number the people from 0.

    Raises DataError.
    """
    root = folder / "celeba"
    who = _column(root / "identity_CelebA.txt")
    names = _split(root, who)
    people = {identity: label for label, identity in enumerate(sorted(set(who.values())))}
    train, test = _examples(root, names, {name: people[who[name]] for name in who}, len(people))
    return Dataset("celeba", train, test)


def load_blond(folder: Path) -> Dataset:
    """Return CelebA from `folder`/celeba by the attribute Blond_Hair: uint8 (162,770 + 19,962, 3, 64, 64), 1 for blond.

    Domains are the four groups of it and the attribute Male, so that accuracy in the worst domain is that of the worst group
    (S. Sagawa et al., ICLR 2020, arXiv:1911.08731); the column "Male" has two domains. Raises DataError.
    """
    root = folder / "celeba"
    blond, male = _attributes(root / "list_attr_celeba.txt", ("Blond_Hair", "Male"))
    names = _split(root, blond)
    train, test = _examples(root, names, blond, 2)
    columns = [torch.tensor([male[name] for name in part]) for part in names]
    train, test = (
        replace(part, domain=2 * part.y + column) for part, column in zip((train, test), columns, strict=True)
    )
    return Dataset("celeba_blond", train, test, GROUPS, {"Male": Column(("female", "male"), columns[0], columns[1])})


def _split(root: Path, listed: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return the photographs for training and those for testing, of all that are `listed` elsewhere."""
    path = root / "list_eval_partition.txt"
    split = _column(path)
    if listed.keys() != split.keys():
        only = sorted(listed.keys() ^ split.keys())[0]
        raise broken(path, f"{only} is in one of the lists alone", SITE)
    if wrong := [f"{name} {part}" for name, part in split.items() if part not in (0, 1, 2)]:
        raise broken(path, f"has the line {wrong[0]!r}, expected 0, 1 or 2", SITE)
    names = {part: [name for name, p in split.items() if p == part] for part in (0, 2)}
    if empty := [part for part, result in names.items() if not result]:
        raise broken(path, f"has no photograph of part {empty[0]}", SITE)
    return names[0], names[2]


def _examples(
    root: Path, names: tuple[list[str], list[str]], labels: Mapping[str, int], classes: int
) -> tuple[Examples, Examples]:
    images = _images(root, names[0] + names[1])
    y = torch.tensor([labels[name] for part in names for name in part])
    cut = len(names[0])
    train, test = (Examples(images[part], y[part], classes) for part in (slice(cut), slice(cut, None)))
    return train, test


def _attributes(path: Path, wanted: Sequence[str]) -> list[dict[str, int]]:
    """Read which photographs have each of the `wanted` attributes, 1 or 0."""
    _, head, *rows = [line.split() for line in _lines(path)] + [[], []]
    if missing := [name for name in wanted if name not in head]:
        raise broken(path, f"names no attribute {missing[0]} in its second line", SITE)
    rows = [row for row in rows if row]
    for number, row in enumerate(rows, 3):
        if len(row) != len(head) + 1 or not set(row[1:]) <= {"1", "-1"}:
            raise broken(path, f"line {number} is not a file name and {len(head)} times 1 or -1", SITE)
    if twice := [name for name, times in Counter(row[0] for row in rows).items() if times > 1]:
        raise broken(path, f"has two lines of {twice[0]}", SITE)
    return [{row[0]: int(row[1 + head.index(name)] == "1") for row in rows} for name in wanted]


def _column(path: Path) -> dict[str, int]:
    """Read lines of a file name and a number."""
    result: dict[str, int] = {}
    for number, line in enumerate(_lines(path), 1):
        name, _, value = line.strip().partition(" ")
        if not re.fullmatch(r"\w+\.jpg", name) or not re.fullmatch(r"\s*\d{1,9}", value):
            raise broken(path, f"line {number} is {line[:40]!r}, not a file name and a number", SITE)
        if result.setdefault(name, int(value)) != int(value):
            raise broken(
                path, f"line {number} has {name} with {value.strip()}, an earlier one with {result[name]}", SITE
            )
    return result


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        raise absent(path, SITE) from None
    except (OSError, UnicodeDecodeError) as error:
        raise broken(path, f"cannot be read ({error})", SITE) from error


def _images(root: Path, names: list[str]) -> Tensor:
    """Return the photographs (n, 3, 64, 64) uint8, from what an earlier call has kept if it is of these."""
    kept = root / KEPT
    wanted = torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8)
    with suppress(OSError, SafetensorError, KeyError):
        result = load_file(kept)
        images, of = result["images"], result["names"]
        right = images.dtype == torch.uint8 and images.shape == (len(names), 3, SIDE, SIDE)
        if right and of.dtype == torch.uint8 and torch.equal(of, wanted):
            return images
    images = torch.empty(len(names), 3, SIDE, SIDE, dtype=torch.uint8)
    with _opened(root) as read, ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, image in enumerate(pool.map(lambda name: _small(root, name, read), names)):
            images[i] = image
            if (i + 1) % TELL_EVERY == 0:
                print(f"fedfleet: {i + 1:,} of {len(names):,} photographs of CelebA read", file=sys.stderr)
    # Where it cannot be kept it is read again.
    with suppress(OSError, SafetensorError), tempfile.TemporaryDirectory(prefix=".", dir=root) as scratch:
        save_file({"images": images, "names": wanted}, Path(scratch) / KEPT)
        (Path(scratch) / KEPT).replace(kept)
    return images


@contextmanager
def _opened(root: Path) -> Iterator[Callable[[str], bytes]]:
    """Give the function that reads a photograph, from the folder or the archive."""
    folder, archive = root / "img_align_celeba", root / "img_align_celeba.zip"
    if folder.is_dir():
        yield lambda name: (folder / name).read_bytes()
    elif is_there(archive):
        try:
            opened = zipfile.ZipFile(archive)
        except (OSError, zipfile.BadZipFile) as error:
            raise broken(archive, f"cannot be read ({error})", SITE) from error
        with opened as members:
            yield lambda name: members.read(f"img_align_celeba/{name}")
    else:
        raise DataError(f"neither {folder} nor {archive} is there: fetch the aligned photographs from {SITE}")


def _small(root: Path, name: str, read: Callable[[str], bytes]) -> Tensor:
    from torchvision.transforms.functional import (
        pil_to_tensor,  # here, for torchvision takes more than a second to import
    )

    path = root / "img_align_celeba" / name
    try:
        image = Image.open(io.BytesIO(read(name)), formats=["JPEG"]).convert("RGB")
    except (FileNotFoundError, KeyError):
        raise broken(path, "is not there", SITE) from None
    except UNREADABLE as error:
        raise broken(path, f"is no image ({error})", SITE) from error
    scale = SIDE / min(image.size)
    width, height = (max(SIDE, int(scale * n)) for n in image.size)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + SIDE, top + SIDE))
    return pil_to_tensor(image)
