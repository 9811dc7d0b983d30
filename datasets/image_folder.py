"""Images of one's own in folders: a folder a client, or a domain, in it a folder a class; or a folder a class alone.

    cameras/north-gate/fox/0001.jpg        each: client, or domain
    photos/fox/0001.jpg                    each: class

Files are .jpg, .jpeg or .png, in capitals or not, and read as nothing else; hidden ones and other files do not count. A class is
a folder's name, numbered in the order of all names; a client or a domain need not have every class.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field
from torch import Tensor

from fedfleet.datasets import user_data
from fedfleet.datasets.examples import Dataset, FederatedDataset
from fedfleet.datasets.files import DataError, ending, entries
from fedfleet.datasets.folders import SUFFIXES
from fedfleet.datasets.parts import Parts, put_together, split
from fedfleet.datasets.user_data import Held, Rows, fail
from fedfleet.simulator.errors import one_line
from fedfleet.simulator.registry import Options

Each = Literal["client", "domain", "class"]
MODES = {1: "L", 3: "RGB"}


class FolderOptions(Options):
    """Images in folders."""

    path: str
    """The folder."""
    each: Each = "client"
    """What each folder in it is; images that come in no clients are dealt by ``population.partition``."""
    side: int | None = Field(default=None, ge=1)
    """Pixels that both sides are resized to; all images have to be of one size if not given."""
    channels: int = Field(default=3, ge=1, le=3)
    """3, or 1 for grey."""
    test: Held | None = None
    """Folder of test images in the same layout; if not given, a share is held out, ``hold_out``."""
    hold_out: float = Field(default=0.1, gt=0, lt=1)
    """Without ``test``: the share, of clients if these are folders, of images else, of every domain, that are tested on."""
    sha256: str | None = None
    """Digest of what was read; a run says here what it was."""


class _Found(NamedTuple):
    """An image, its class, and the client or domain it lies with."""

    path: Path
    label: str
    owner: str


def from_image_folder(
    path: str | Path,
    *,
    each: Each = "client",
    side: int | None = None,
    channels: int = 3,
    test: float | str | Path = 0.1,
    name: str | None = None,
) -> Dataset | FederatedDataset:
    """Return the images below a folder as data for ``fedfleet.run(data=…)``: uint8 (n, channels, height, width).

    Args:
        path: the folder.
        each: what each folder in it is: a "client" or a "domain", in which the folders of classes are, or a "class".
            ``population.partition`` deals images that come in no clients.
        side: pixels that both sides are resized to, whatever the proportions; None: all images have to be of one size.
        channels: 3, or 1 for grey.
        test: a share, of clients if these are folders, else of images, of every domain (a fixed draw); or another folder of the
            same layout.
        name: in reports; that of the folder, if not given.

    Raises DataError, a ValueError of one line.

    """
    root = Path(path).expanduser()
    return put_together(name or root.resolve().name, _parts(root, each, side, channels, test))


def read(options: FolderOptions) -> Parts:
    """Return the images below a folder. Raises DataError."""
    root, test = Path(options.path).expanduser(), options.hold_out if options.test is None else options.test
    return _parts(root, options.each, options.side, options.channels, test)


def _parts(root: Path, each: Each, side: int | None, channels: int, test: float | str | Path) -> Parts:
    if each not in ("client", "domain", "class"):
        fail("each", f"is {each!r}", "give 'client', 'domain' or 'class'")
    if channels not in MODES:
        fail("channels", f"is {channels!r}", "give 3, or 1 for grey")
    if side is not None and side < 1:
        fail("side", f"is {side!r}", "give the pixels of a side")
    result = _found(root, each)
    classes = sorted({image.label for image in result})
    user_data.check_names(f"{root}: classes", classes)
    if isinstance(test, str | Path):
        other = Path(test).expanduser()
        of_test = _found(other, each)
        if strange := sorted({image.label for image in of_test} - {*classes}):
            fail(f"{other}", f"{strange[0]!r} is no class of {root}", "rename the folder, or leave it out")
        both = read_images([image.path for image in (*result, *of_test)], side, channels)
        held: float | Rows = _rows(other, of_test, both[len(result) :], classes, each, clients=False)
        rows = _rows(root, result, both[: len(result)], classes, each)
    else:
        held, rows = (
            test,
            _rows(root, result, read_images([image.path for image in result], side, channels), classes, each),
        )
    return split(rows, held, len(classes)).called(classes=tuple(classes))


def _rows(
    root: Path, result: Sequence[_Found], x: Tensor, classes: Sequence[str], each: Each, *, clients: bool = True
) -> Rows:
    number = {label: i for i, label in enumerate(classes)}
    y = torch.tensor([number[image.label] for image in result])
    owners, count = [image.owner for image in result], len(result)
    client = user_data.codes(owners, str(root), "client", count) if each == "client" and clients else None
    domain = user_data.codes(owners, str(root), "domain", count, rising=True) if each == "domain" else None
    return Rows(str(root), x, y, client, domain)


def _found(root: Path, each: Each) -> list[_Found]:
    """Return the images of a folder, in the order of their folders' names and of their own. Raises DataError."""
    if not root.is_dir():
        fail(f"{root}", "there is no such folder", "give one with a folder a client, a domain or a class")
    owners = [root] if each == "class" else _folders(root, f"a folder a {each}")
    result = []
    for owner in owners:
        for at in _folders(owner, "a folder a class"):
            images = _images(at)
            if not images:
                deeper = any(child.is_dir() for child in entries(at))
                fix = "give each='client' or 'domain'" if deeper and each == "class" else "leave the folder out"
                fail(f"{at}", f"holds no {' or '.join(SUFFIXES)}", fix)
            result += [_Found(image, at.name, owner.name) for image in images]
    return result


def _folders(at: Path, wanted: str) -> list[Path]:
    result = [child for child in entries(at) if child.is_dir()]
    if not result:
        fix = "give each='class'" if _images(at) and wanted == "a folder a class" else f"put {wanted} there"
        fail(f"{at}", "holds no folders", fix)
    if stray := _images(at):
        fail(f"{stray[0]}", f"lies beside {wanted}", "put it into one of them, or move it away")
    return result


def _images(at: Path) -> list[Path]:
    return [child for child in ending(at, SUFFIXES) if child.is_file()]


def read_images(paths: Sequence[Path | io.BytesIO], side: int | None, channels: int) -> Tensor:
    """Return images (n, channels, height, width) uint8. Raises DataError."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        images = list(pool.map(lambda at: _image(at[0], at[1], side, channels), enumerate(paths)))
    first = images[0].shape
    for i, (path, x) in enumerate(zip(paths, images, strict=True)):
        if x.shape != first:
            sizes = [f"{s[1]} x {s[0]}" for s in (x.shape, first)]
            fix = f"give side={min(first[:2])}, to resize all"
            first_name = _called(paths[0], 0)
            fail(_called(path, i), f"is of {sizes[0]} pixels, and {first_name} of {sizes[1]}", fix)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def _called(path: Path | io.BytesIO, number: int) -> str:
    return f"{path}" if isinstance(path, Path) else f"image {number}"


def _turned(image: Image.Image) -> Image.Image:
    """Return a photograph as its EXIF orientation says it is to be seen; as it is where that cannot be read."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # whatever PIL does with broken metadata
        return image


def _image(number: int, path: Path | io.BytesIO, side: int | None, channels: int) -> np.ndarray:
    try:
        with Image.open(path, formats=["JPEG", "PNG"]) as opened:
            if opened.mode.startswith(("I", "F")):  # which convert would clip to 255
                fail(_called(path, number), "has more than 8 bits a pixel", "scale it to 8, from 0 to 255")
            if opened.format == "PNG" and getattr(opened, "is_animated", False):
                fail(_called(path, number), "is animated, several images", "keep the one that is meant")
            image = _turned(opened).convert(MODES[channels])
        if side is not None:
            image = image.resize((side, side), Image.Resampling.BILINEAR)
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
        fail(_called(path, number), f"is no image ({one_line(e)})", "mend it, or leave it out")
    x = np.asarray(image)
    return x[:, :, None] if channels == 1 else x
